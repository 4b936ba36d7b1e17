"""`qlora-fsdp train`: read the command line, check it, and train or start jobs that train.

The stages of a run, which training/run.py calls one after the other:

config -> processes -> folder -> find -> build -> adapt -> plan -> data -> shard -> load -> prove -> loop -> adapter
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

if __name__ == "__main__":
    from qlora_fsdp.common.startup import NO_RUN, begin

    begin(NO_RUN)

from qlora_fsdp.common import contained
from qlora_fsdp.common.errors import UserError, refuse
from qlora_fsdp.common.startup import announce, end_process, quick_imports
from qlora_fsdp.config.checks.check_launch import check_launch_environment, follow_launcher
from qlora_fsdp.config.checks.check_settings import check_split
from qlora_fsdp.config.reading.command_line import parse_arguments
from qlora_fsdp.config.reading.compose import load_config
from qlora_fsdp.config.world import World
from qlora_fsdp.launch.ranks import plan_ranks, start_ranks
from qlora_fsdp.records.check_run_folder import check_run
from qlora_fsdp.records.run_state import RunState
from qlora_fsdp.records.start_folder import find_start
from qlora_fsdp.runtime.run_command import show_error


def main(argv: Sequence[str] | None = None, starts_ranks: bool = False) -> int:
    """Parses and checks the command line, then trains, or starts the ranks or jobs that it asks for.

    Args:
        argv: the arguments; None for those of this process.
        starts_ranks: whether this process may start others that train in its place, one for each GPU.

    Returns:
        The exit code: 0, that of the `UserError` that has been printed, or 1 if a job of a sweep has not finished.
    """
    try:
        argv = sys.argv[1:] if argv is None else argv
        arguments = parse_arguments(argv)
        if arguments.starts_jobs and not (arguments.help or arguments.cfg):
            from qlora_fsdp.launch.multirun import start_jobs

            return start_jobs(arguments, os.environ)
        config = load_config(argv, check_run, launches=starts_ranks, find_start=find_start)
        plan = plan_ranks(config.launch, os.environ) if starts_ranks else None
        world = World.from_environment(os.environ) if plan is None else plan.world
        config = follow_launcher(config, os.environ)
        problems = [*check_run(config), *check_launch_environment(config, os.environ)]
        if plan is not None and plan.number is not None:
            problems += check_split(config, world)
        refuse(problems)
        if plan is not None and (plan.number != 1 or config.launch.dry_run):
            return start_ranks("qlora_fsdp.train", argv, config.launch, plan)
        if plan is not None:
            os.environ |= plan.environment
        announce(world.num_ranks)
        with quick_imports():  # torch and transformers only from here on
            contained.start(makes_configs=True)
            from qlora_fsdp.training.run import run

        run(config, world)
    except UserError as error:
        show_error(error)
        return error.exit_code
    return 0


class _CallableModule(ModuleType):
    """This module, as `from qlora_fsdp import train` finds it, which can be called: `launch/from_python.py`.

    A package has one thing of a name, and Python puts a module there once it is imported, whatever was there before.
    """

    def __call__(self, settings: Mapping[str, Any] | str | Path, quiet: bool = False) -> RunState:
        from qlora_fsdp.launch.from_python import train_from_python

        return train_from_python(settings, quiet)


sys.modules[__name__].__class__ = _CallableModule

if __name__ == "__main__":
    end_process(main())
