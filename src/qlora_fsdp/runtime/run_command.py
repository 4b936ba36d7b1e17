"""Runs a command beside training on every process, and shows an error once."""

from __future__ import annotations

import json
import logging
import os
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING

from qlora_fsdp.common import contained
from qlora_fsdp.common.errors import (
    MemoryShortage,
    Problem,
    RankError,
    RunFolderError,
    UserError,
    print_error,
    refuse,
)
from qlora_fsdp.common.files import write_atomically
from qlora_fsdp.common.startup import announce, is_first_rank, quick_imports
from qlora_fsdp.common.text import for_stdout, name_error, printable, printable_lines
from qlora_fsdp.config.checks.check_settings import Needs, check_settings
from qlora_fsdp.config.data_sets import match
from qlora_fsdp.config.reading.commands import Settings, load_command
from qlora_fsdp.config.schema import Config
from qlora_fsdp.config.settings import show
from qlora_fsdp.config.world import World

if TYPE_CHECKING:
    from qlora_fsdp.runtime.processes import Processes

log = logging.getLogger("qlora_fsdp")

NO_BASE = "Set adapter to the folder that training wrote; or, without an adapter, model or model.path as for training."
NAME_BASE = ("model=", "model.path=", "--config")
FIRST_RANK_SECONDS = 3.0  # time for a node's first rank to print what this one would


def tell_next(typed: Sequence[str]) -> None:
    """Names the command that trains with these settings, once a node. It has a model, which its data can do without."""
    if is_first_rank():
        may_have_model = any(text.lstrip("+").startswith((*NAME_BASE, "lora.start=", "experiment=")) for text in typed)
        command = shlex.join([*([] if may_have_model else ["model=NAME"]), *typed])
        with suppress(BrokenPipeError):
            print(f"Next: qlora-fsdp train {printable(command)}")


def write_out(out: str, text: str) -> None:
    """Writes the file of a command's `out=` setting, whole or not at all.

    Raises:
        RunFolderError: the file can't be written. The text, which may be the work of hours, is on stdout then.
    """
    try:
        write_atomically(Path(out).expanduser(), text)
    except OSError as error:
        print(for_stdout(text), end="", flush=True)
        reason = f"can't be written: {error}. What it was to hold is printed above."
        raise RunFolderError(f"out={out} {reason} Set out to another file.") from error


def print_result(text: str) -> None:
    """Prints what a command was asked for, which may be the work of hours.

    Raises:
        RunFolderError: stdout takes no more, as a file on a full disk does. A pipe that nobody reads is no error.
    """
    try:
        print(for_stdout(text), flush=True)
    except BrokenPipeError:
        return
    except OSError as error:
        raise RunFolderError(f"The result can't be printed: {error}. Set out to a file where there is room.") from error


def check_out(out: str | None, sources: Iterable[str]) -> list[Problem]:
    """Returns why `write_out` could not write there, before the work begins; None is for no file.

    Args:
        out: the file that is to be written.
        sources: files, folders and patterns of what is read: none of these files is written over.
    """
    if out is None:
        return []
    path = Path(out).expanduser()
    if path.is_file() and any(_reads(found, path) for source in sources for found in match(source)):
        reason = "is the file that is read, which would be written over."
        return [Problem(f"out={out}", reason, "Set out to another file.")]
    try:
        if path.is_dir():
            raise IsADirectoryError("it is a folder")
        if path.exists() and not path.is_file():
            raise OSError("it is no file; without out the result is printed")
        with TemporaryFile(dir=path.parent):
            return []
    except OSError as error:
        reason = f"can't be written: {error.strerror or error}."
        return [Problem(f"out={out}", reason, "Set out to a file in a folder that is there and can be written.")]


def _reads(found: Path, file: Path) -> bool:
    """Whether a file is read where a path has led to this file or folder."""
    if found.is_dir():
        return file.resolve().is_relative_to(found.resolve())
    return found.exists() and file.samefile(found)


def run_command(
    argv: Sequence[str] | None,
    kind: type[Settings],
    usage: str,
    body: Callable[[Settings, Config, Processes], None],
    optional: Sequence[str] = (),
    takes_adapter: bool = True,
    on_cpu: bool = False,
) -> int:
    """Parses and checks the command line and runs `body` on every process. If it fails on one, all end with that error.

    Args:
        argv: the arguments; None for those of this process.
        kind: the dataclass of the command's own settings.
        usage: what --help prints.
        body: the command.
        optional: settings that training needs and this command can do without, e.g. `data.path`.
        takes_adapter: whether adapter= may name the model in place of model.path. A command that takes none looks at
            data alone, by the model's tokenizer.
        on_cpu: whether the command leaves GPUs alone.

    Returns:
        The exit code: 0, or that of the `UserError` that has been printed.
    """
    typed = sys.argv[1:] if argv is None else argv
    needs = Needs(optional=tuple(optional), tokenizer_only=not takes_adapter)
    try:
        settings, config = load_command(typed, kind, usage, uses_default_data=not takes_adapter, needs=needs)
        problems = check_settings(config, needs)
        fix = NO_BASE if takes_adapter and settings.adapter is None and config.model.path is None else None
        is_typed = any(text.lstrip("+").startswith(NAME_BASE) for text in typed)
        if settings.adapter is not None and config.model.path is not None and not is_typed:
            fix = f"{show('adapter', settings.adapter)} was trained on it. Set model.path to where that model is here."
        problems = [replace(p, fix=fix) if fix and p.setting == "model.path" else p for p in problems]
        refuse(problems)
        log_to_stderr()
        _run_together(partial(body, settings, config), config.distributed.timeout_seconds, on_cpu, takes_adapter)
    except UserError as error:
        show_error(error)
        return error.exit_code
    return 0


class _PlainFormatter(logging.Formatter):
    """Formats messages that may quote names of others, such as a model's path, for a terminal."""

    def format(self, record: logging.LogRecord) -> str:
        return printable_lines(super().format(record))


def log_to_stderr() -> None:
    """Lets what a command logs go to stderr, because the stdout of some is their result; nowhere but on rank 0."""
    handler = logging.StreamHandler(sys.stderr) if is_first_rank() else logging.NullHandler()
    handler.setFormatter(_PlainFormatter())
    log.handlers[:] = [handler]
    log.setLevel(logging.INFO)
    log.propagate = False


def _run_together(body: Callable[[Processes], None], timeout_seconds: int, on_cpu: bool, makes_configs: bool) -> None:
    """Meets the other processes, runs `body`, and ends all of them with the error of the first that fails."""
    announce(World.from_environment(os.environ).num_ranks)
    with quick_imports():  # torch and transformers only from here on
        contained.start(makes_configs)
        from qlora_fsdp.runtime.hardware import is_shortage, quote_shortage
        from qlora_fsdp.runtime.processes import start_processes
        from qlora_fsdp.runtime.watch import Watch, ending_together

    processes = start_processes(timeout_seconds, use_cpu=on_cpu or None)
    with ending_together(Watch(processes) if processes.num_ranks > 1 else None):
        try:
            body(processes)
        except (RuntimeError, MemoryError) as error:
            if not is_shortage(error):
                raise
            raise MemoryShortage(
                f"{quote_shortage(error, str(processes.device))}. Start more processes "
                "(launch.num_processes=2), which share the model, or set a smaller batch or length."
            ) from error


def show_error(error: UserError) -> None:
    """Prints what ends this process, unless a rank has done so, and leaves the reason for torchrun's report."""
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not error.is_shown and not (file is not None and _ended_before(Path(file), error)):
        # The processes have not met. As a rule, a node's first rank finds the same error, and its end ends the others.
        if os.environ.get("LOCAL_RANK", "0") == "0":
            print_error(error)
        else:
            time.sleep(FIRST_RANK_SECONDS)
            print_error(RankError(f"rank {os.environ.get('RANK')}: {error}"))
    if file is not None:
        message = printable(name_error(error))
        more = {"timestamp": int(time.time()), "text": str(error)}
        with suppress(OSError):  # the disk may be full; the error itself has been printed
            Path(file).write_text(json.dumps({"message": {"message": message, "extraInfo": more}}))


def _ended_before(report: Path, error: UserError) -> bool:
    """Whether this rank's attempt before (torchrun's --max_restarts) has ended with the same error: it says so once."""
    try:
        number = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
        before = report.parents[1].with_name(f"attempt_{number - 1}") / report.parent.name / report.name
        return bool(json.loads(before.read_text())["message"]["extraInfo"]["text"] == str(error))
    except (OSError, ValueError, KeyError, TypeError):
        return False
