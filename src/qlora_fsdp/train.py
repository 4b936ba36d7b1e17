"""`python -m qlora_fsdp.train`: the pipeline, read top to bottom.

config -> processes -> build (meta) -> adapt -> shard -> load -> prove -> data -> loop -> export
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from qlora_fsdp.config.check_settings import check_settings
from qlora_fsdp.config.command_line import parse_arguments
from qlora_fsdp.config.compose import load_config
from qlora_fsdp.config.launch_environment import check_launch_environment
from qlora_fsdp.config.world import World
from qlora_fsdp.errors import ConfigError, RankError, UserError, print_error

FIRST_RANK_SECONDS = 3.0  # for a node's first rank to say what this one would


def main(argv: Sequence[str] | None = None) -> int:
    """Parse, check, run or start jobs that do.

    Returns:
        The exit code: 0; that of the `UserError` that has been printed; or 1 if a job of a sweep has not finished.
    """
    try:
        argv = sys.argv[1:] if argv is None else argv
        arguments = parse_arguments(argv)
        if arguments.starts_jobs and not (arguments.help or arguments.cfg):
            from qlora_fsdp.launch.multirun import start_jobs

            return start_jobs(arguments, os.environ)
        config = load_config(argv)
        world = World.from_environment(os.environ)
        problems = [*check_settings(config), *check_launch_environment(config, os.environ)]
        if problems:
            raise ConfigError(problems)
        from qlora_fsdp.run import run  # torch and transformers are imported only from here on

        run(config, world)
    except UserError as error:
        if not error.is_shown:
            # The processes have not met. A node's first rank finds the same, as a rule, and its end ends the others.
            if os.environ.get("LOCAL_RANK", "0") == "0":
                print_error(error)
            else:
                time.sleep(FIRST_RANK_SECONDS)
                print_error(RankError(f"rank {os.environ.get('RANK')}: {error}"))
        _tell_launcher(error)
        return error.exit_code
    except KeyboardInterrupt:  # while the libraries are imported; later, run() tells all ranks
        return 128 + signal.SIGINT
    return 0


def _tell_launcher(error: UserError) -> None:
    """Let torchrun's report of the failed processes end with the reason, not with a link to its documentation."""
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if file is not None:
        message = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        Path(file).write_text(
            json.dumps({"message": {"message": message, "extraInfo": {"timestamp": int(time.time())}}})
        )


if __name__ == "__main__":
    sys.exit(main())
