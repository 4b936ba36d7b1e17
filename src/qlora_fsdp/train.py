"""`python -m qlora_fsdp.train`: read the command line, check it, and train or start jobs that train.

The stages of a run, which training/run.py calls one after the other:

config -> processes -> find -> build (meta) -> adapt -> plan -> data -> shard -> load -> prove -> loop -> adapter
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

if __name__ == "__main__":
    from qlora_fsdp.common.startup import end_at_once

    end_at_once("No run was going on.")

from qlora_fsdp.common.errors import ConfigError, UserError
from qlora_fsdp.common.startup import quick_imports
from qlora_fsdp.config.command_line import parse_arguments
from qlora_fsdp.config.compose import load_config
from qlora_fsdp.config.launch_environment import check_launch_environment
from qlora_fsdp.config.world import World
from qlora_fsdp.records.check_run_folder import check_run
from qlora_fsdp.runtime.run_command import show_error


def main(argv: Sequence[str] | None = None) -> int:
    """Parses and checks the command line, then trains, or starts the jobs that it asks for.

    Returns:
        The exit code: 0, that of the `UserError` that has been printed, or 1 if a job of a sweep has not finished.
    """
    try:
        argv = sys.argv[1:] if argv is None else argv
        arguments = parse_arguments(argv)
        if arguments.starts_jobs and not (arguments.help or arguments.cfg):
            from qlora_fsdp.launch.multirun import start_jobs

            return start_jobs(arguments, os.environ)
        config = load_config(argv, check_run)
        world = World.from_environment(os.environ)
        problems = [*check_run(config), *check_launch_environment(config, os.environ)]
        if problems:
            raise ConfigError(problems)
        with quick_imports():  # torch and transformers only from here on
            from qlora_fsdp.training.run import run

        run(config, world)
    except UserError as error:
        show_error(error)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
