"""`python -m qlora_fsdp.train`: the pipeline, read top to bottom.

config -> processes -> build (meta) -> adapt -> shard -> load -> prove -> data -> loop -> export
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from qlora_fsdp.config.compose import load_config
from qlora_fsdp.config.schema import Config
from qlora_fsdp.config.validate import check_settings
from qlora_fsdp.config.world import World
from qlora_fsdp.errors import ConfigError, UserError


def main(argv: Sequence[str] | None = None) -> int:
    """Parse, check, run. Returns the exit code: 0, or that of the `UserError` which rank 0 has printed."""
    is_main = os.environ.get("RANK", "0") == "0"
    try:
        config = load_config(sys.argv[1:] if argv is None else argv)
        world = World.from_environment(os.environ)
        from qlora_fsdp.config.launch_environment import check_launch_environment

        problems = [*check_settings(config), *check_launch_environment(config, os.environ)]
        if problems:
            raise ConfigError(problems)
        from qlora_fsdp.run import run  # torch and transformers are imported only from here on

        run(config, world)
    except UserError as error:
        if is_main:
            print(f"\nError: {error}", file=sys.stderr, flush=True)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
