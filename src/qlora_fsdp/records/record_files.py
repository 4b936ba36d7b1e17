"""Records of a run that grow while it trains. A full disk must neither end the run nor lose a line.

The file is opened anew for each piece of text that is appended. So the text is on its way to the disk when the call
returns, other hosts see it, and writing continues by itself once the disk has room again.
"""

from __future__ import annotations

import errno
import logging
import os
import platform
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path

from qlora_fsdp.common.files import disk_reason, is_write_error, open_to_append
from qlora_fsdp.records.run_state import LOCK

log = logging.getLogger("qlora_fsdp")


class RecordFiles:
    """The records in a run folder. What can't be written is kept in memory until it can.

    Of a failure one warning tells, whichever files it concerns, and one line of its end.

    Attributes:
        folder: the run folder.
        reason: why nothing can be written at present; None: it can.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.reason: str | None = None
        self._waiting: dict[str, str] = {}  # text by the name of its file
        self._lost: set[str] = set()  # records that were written as a whole, which are not tried again
        self._lock = threading.RLock()  # a thread writes checkpoints, and logs that

    def append(self, name: str, text: str) -> None:
        """Append text to a file in the folder, now or as soon as that is possible."""
        with self._lock:
            self._waiting[name] = self._waiting.get(name, "") + text
            self._write_waiting([name])

    def write(self, name: str, write: Callable[[Path], None]) -> None:
        """Let `write` write another record to the file that it is given. If that fails, it is not tried again."""
        with self._lock:
            try:
                check_own(self.folder)
                write(self.folder / name)
            except Exception as error:
                if not is_write_error(error):
                    raise
                self._lost.add(name)
                self._fail(name, error)

    def write_rest(self, folder: Path) -> None:
        """Write to another folder what could not be written to this one."""
        with self._lock:
            for name, text in self._waiting.items():
                _append(folder / name, text)

    def _write_waiting(self, names: list[str]) -> None:
        for name in names:
            try:
                check_own(self.folder)
                _append(self.folder / name, self._waiting[name])
            except OSError as error:
                self._fail(name, error)
                return
            del self._waiting[name]
        if self.reason is None:
            return
        if self._waiting:
            self._write_waiting(list(self._waiting))
        else:
            missing = f"missing: {', '.join(sorted(self._lost))}" if self._lost else "nothing is missing"
            self.reason = None
            self._lost = set()
            log.warning(f"{self.folder} can be written again: {missing}.")

    def _fail(self, name: str, error: Exception) -> None:
        if self.reason is None:
            self.reason = disk_reason(error)  # first: the warning is a line of train.log, which fails as well
            log.warning(
                f"{self.folder / name} can't be written: {self.reason}. Training goes on. What is missing there is "
                "kept in memory, and written once that is possible."
            )


@cache
def records_in(folder: Path) -> RecordFiles:
    """The records of the run folder `folder`: one object for all of this process."""
    return RecordFiles(folder)


def holder() -> str:
    """The line in a run folder's lock about the run that holds it, of a run of this process."""
    return f"process {os.getpid()} on {platform.node()}"


def find_holder(folder: Path) -> str | None:
    """Read the lock of a run folder; None if there is none."""
    with suppress(FileNotFoundError):
        found = (folder / LOCK).read_text(encoding="utf-8").strip()
        return found if found.startswith("process ") else None
    return None


def check_own(folder: Path, own: str | None = None) -> None:
    """Check that the run folder is there, and that no other run has it by now.

    Args:
        folder: the run folder.
        own: what its lock says if this run has it; None: that this process does.

    Raises:
        OSError: somebody has removed it, and perhaps another run is in its place.
    """
    if not folder.is_dir():
        raise _folder_removed()
    found = find_holder(folder)
    if found is not None and found != (own or holder()):
        raise FileExistsError(errno.EEXIST, f"the folder was removed, and now {found} has one of that name")


def _folder_removed() -> FileNotFoundError:
    return FileNotFoundError(errno.ENOENT, "the folder was removed")


def _append(file: Path, text: str) -> None:
    """Append text wholly or not at all; a reader may meet the beginning of it meanwhile.

    Opening makes the file if it is missing. So a file that is not found tells that its folder is not there.
    """
    try:
        opened = open_to_append(file)
    except FileNotFoundError:
        raise _folder_removed() from None
    with opened as stream:
        descriptor = stream.fileno()
        size = os.fstat(descriptor).st_size
        rest = text.encode("utf-8", "replace")
        try:
            while rest:
                rest = rest[os.write(descriptor, rest) :]
        except OSError:
            with suppress(OSError):
                os.ftruncate(descriptor, size)
            raise
