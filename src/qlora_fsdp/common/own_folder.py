"""A folder of one run's processes on this host, which only this user can enter, until the last of them leaves it.

Who is in it holds a lock on a file there, which the system ends with the process, however that ends. So what is locked
by nobody was left behind by processes that were killed, and the next run removes it. Imports no torch.
"""

from __future__ import annotations

import atexit
import fcntl
import os
import secrets
import shutil
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from qlora_fsdp.common.run_key import is_own_folder, make_key

PREFIX = "qlora-fsdp-"
UNFINISHED = ".qlora-fsdp-"  # a folder without its lock
KEY_FILE = "key"


@dataclass
class OwnFolder:
    """A folder that this process is in.

    Attributes:
        path: where it is.
        key: a secret, which is in it.
        lock: a descriptor of the file of the secret, on which each process that is there has a lock.
    """

    path: Path
    key: str
    lock: int

    def leave(self) -> None:
        """Removes the folder, if no other process is there any more."""
        fcntl.lockf(self.lock, fcntl.LOCK_UN)
        _remove_if_left(self.path, self.lock)
        os.close(self.lock)


_entered: list[OwnFolder] = []  # by this process, which has yet to leave it


def make_folder() -> OwnFolder:
    """Makes a folder with a new secret, and enters it. Those that killed processes have left behind are removed.

    Raises:
        OSError: the disk is full, or has no locks.
    """
    remove_left_folders()
    unfinished = Path(tempfile.mkdtemp(prefix=UNFINISHED))
    (unfinished / KEY_FILE).write_text(make_key())
    folder = _lock(unfinished)
    folder.path = unfinished.with_name(PREFIX + secrets.token_hex(8))
    unfinished.rename(folder.path)  # only now do others look whether anybody is there
    return folder


def enter(path: Path) -> OwnFolder:
    """Enters a folder that another process of this user's has made, and is in.

    Raises:
        OSError: it is gone.
    """
    return _lock(path)


def leave_folder() -> None:
    """Leaves the folder that this process has entered, if any."""
    while _entered:
        _entered.pop().leave()


def remove_left_folders() -> None:
    """Removes folders of this user's in which no process is any more: all were killed."""
    for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        if any(path == folder.path for folder in _entered) or not is_own_folder(path):
            continue  # to close another descriptor of the file would end this process's own lock
        with suppress(OSError):
            lock = os.open(path / KEY_FILE, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                _remove_if_left(path, lock)
            finally:
                os.close(lock)


def _lock(path: Path) -> OwnFolder:
    lock = os.open(path / KEY_FILE, os.O_RDWR | os.O_NOFOLLOW)
    fcntl.lockf(lock, fcntl.LOCK_SH)
    folder = OwnFolder(path, os.pread(lock, 64, 0).decode(), lock)
    _entered.append(folder)
    atexit.register(leave_folder)
    return folder


def _remove_if_left(path: Path, lock: int) -> None:
    with suppress(OSError):  # another process is there
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(path, ignore_errors=True)
