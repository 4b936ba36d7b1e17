"""The log of a run, on the console and in train.log. On the console a live line below it shows the present step.

Neither may end the run. A console may be a file on a full disk, a pipe that nobody reads, or a terminal that is gone.
"""

from __future__ import annotations

import logging
import os
import shutil
import sys
from contextlib import suppress
from pathlib import Path
from typing import TextIO

from qlora_fsdp.common.terminal import CLEAR_LINE, can_redraw, colored, uses_color, wrap_words
from qlora_fsdp.common.text import printable_lines
from qlora_fsdp.config.recorded import hide
from qlora_fsdp.records.record_files import records_in
from qlora_fsdp.records.run_state import LOG_FILE

TIME = "%Y-%m-%d %H:%M:%S"
LEVEL_COLORS = {logging.WARNING: "yellow", logging.ERROR: "red"}
COLOR = "color"  # the attribute of a record that has a colour of its own


class _Formatter(logging.Formatter):
    """Formats lines without what the environment gave, and without control characters of others."""

    def format(self, record: logging.LogRecord) -> str:
        return printable_lines(hide(super().format(record)))


class Console(logging.Handler):
    """Prints the log, and on a terminal a live line below it, which each call of `live` replaces.

    The lines have no time in front: columns need the width, and train.log has it.
    """

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self.stream = stream
        self.is_live = can_redraw(stream)
        self.is_colored = uses_color(stream)
        self._line = ""
        self.setFormatter(_Formatter())

    def live(self, line: str) -> None:
        """Show a line in place of the last live line; an empty one: none. Nothing where lines can't be replaced."""
        if not self.is_live:
            return
        self.acquire()
        try:
            self._line = line[: shutil.get_terminal_size().columns - 1]  # one that is broken in two can't be replaced
            self._write("")
        finally:
            self.release()

    def emit(self, record: logging.LogRecord) -> None:
        text = wrap_words(self.format(record), self.stream)
        color = getattr(record, COLOR, LEVEL_COLORS.get(record.levelno))
        if self.is_colored and color is not None:
            text = "\n".join(colored(line, color) for line in text.split("\n"))
        self._write(text + "\n")

    def close(self) -> None:
        """Leave the last live line, and stop. What the stream did not take is given up, for Python tries at its end."""
        if self._line:
            self._line = ""
            self._write("")
        try:
            self.stream.flush()
        except (OSError, ValueError):
            with suppress(OSError, ValueError):
                null = os.open(os.devnull, os.O_WRONLY)
                os.dup2(null, self.stream.fileno())
                os.close(null)
        super().close()

    def _write(self, text: str) -> None:
        line = colored(self._line, "dim") if self.is_colored and self._line else self._line
        with suppress(OSError, ValueError):
            self.stream.write(f"{CLEAR_LINE}{text}{line}" if self.is_live else text)
            self.stream.flush()


class LogFile(logging.Handler):
    """Appends each line of the log to train.log in the run folder, with the time in front."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder
        self.setFormatter(_Formatter("%(asctime)s  %(message)s", TIME))

    def createLock(self) -> None:
        """No lock: the records have one, and their warnings come here while they hold it."""
        self.lock = None

    def emit(self, record: logging.LogRecord) -> None:
        records_in(self.folder).append(LOG_FILE, self.format(record) + "\n")


def show_live(line: str) -> None:
    """Show a line below the log, where it goes to a terminal."""
    for handler in logging.getLogger("qlora_fsdp").handlers:
        if isinstance(handler, Console):
            handler.live(line)


def start_log(folder: Path | None) -> None:
    """Send the log of this process to its console and to train.log in the run folder; None: nowhere."""
    log = logging.getLogger("qlora_fsdp")
    log.handlers[:] = [logging.NullHandler()] if folder is None else [Console(sys.stdout), LogFile(folder)]
    log.setLevel(logging.INFO)
    log.propagate = False


def stop_log() -> None:
    """Stop the log."""
    log = logging.getLogger("qlora_fsdp")
    for handler in log.handlers:
        handler.close()
    log.handlers[:] = [logging.NullHandler()]
