"""How a command beside training runs: errors are shown once, processes meet and part."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from qlora_fsdp.config.check_settings import check_settings
from qlora_fsdp.config.commands import AdapterSettings, load_command
from qlora_fsdp.config.schema import Config
from qlora_fsdp.errors import ConfigError, RunFolderError, UserError, print_error
from qlora_fsdp.files import write_atomically

if TYPE_CHECKING:
    from qlora_fsdp.distributed import Processes

log = logging.getLogger("qlora_fsdp")
Settings = TypeVar("Settings", bound=AdapterSettings)


def write_out(out: str, text: str) -> None:
    """Write what a command's `out=` setting asks for, whole or not at all.

    Raises:
        RunFolderError: the file can't be written.
    """
    try:
        write_atomically(Path(out).expanduser(), text)
    except OSError as error:
        raise RunFolderError(f"out={out} can't be written: {error}. Set out to another file.") from error


def run_command(
    argv: Sequence[str] | None,
    kind: type[Settings],
    usage: str,
    body: Callable[[Settings, Config, Processes], None],
    *base: str,
) -> int:
    """Parse, check, and run `body` on every process.

    Args:
        argv: the arguments; None: this process's own.
        kind: dataclass of the command's own settings.
        usage: what --help prints.
        body: the command.
        base: settings of the run where nothing else is typed.

    Returns:
        The exit code: 0, or that of the `UserError` that has been printed.
    """
    rank = os.environ.get("RANK", "0")
    try:
        settings, config = load_command(sys.argv[1:] if argv is None else argv, kind, usage, *base)
        problems = check_settings(config)
        if problems:
            raise ConfigError(problems)
        from qlora_fsdp.distributed import start_processes, stop_processes  # torch is imported only from here on

        log.handlers[:] = [logging.StreamHandler(sys.stderr) if rank == "0" else logging.NullHandler()]
        log.setLevel(logging.INFO)
        log.propagate = False
        processes = start_processes(config.distributed.timeout_seconds)
        try:
            body(settings, config, processes)
        finally:
            stop_processes()
    except UserError as error:
        if rank == "0":
            print_error(error)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    return 0
