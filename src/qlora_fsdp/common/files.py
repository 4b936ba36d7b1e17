"""Writes and removes files so that nobody else decides where to, and digests them. Imports no torch.

All that this program writes or removes goes through here, because a folder may be one that somebody else has made: a
downloaded run, or a folder that several users share. There, a link with the name of a file of ours may lead to any
file of the user's. So no link is followed at the end of a path, temporary names can't be guessed, and readers never see
half a file. Links further up in a path are followed: people keep their folders on other disks.

Explains why a disk can't be written to, and finds another folder with room.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import stat
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, TextIO

from safetensors import SafetensorError

from qlora_fsdp.common.text import first_line

NUM_DIGESTERS = 8  # threads
MAX_PREFIX = 100  # characters of a name in its temporary name, which must not become too long for the file system


def write_json(path: Path, value: Any) -> None:
    """Writes JSON so that a reader never sees half a file; what JSON does not know becomes text."""
    write_atomically(path, json.dumps(value, indent=2, default=str) + "\n")


def write_atomically(path: Path, text: str) -> None:
    """Writes text so that a reader never sees half a file. A file that it replaces keeps its permissions.

    Raises:
        OSError: it can't be written, or something other than a file has the name.
    """
    with replacing(path) as temporary, create(temporary) as file:
        file.write(text.encode())


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Gives a temporary name; the file or folder that the caller makes there takes the place of `path` at the end.

    The name is in a fresh folder beside `path` that no other user can enter, so libraries that open files by their
    names may write there. A file that is replaced keeps its permissions; a link that is replaced is itself replaced.

    Raises:
        OSError: the folder can't be made, or `path` is neither a file nor a folder, for example a device or a pipe.
    """
    with fresh_folder(path) as own:
        temporary = own / path.name
        yield temporary
        before = _lstat(path)
        if before is not None and stat.S_ISREG(before.st_mode) and before.st_uid == os.geteuid():
            temporary.chmod(stat.S_IMODE(before.st_mode) & 0o777)
        if before is not None and stat.S_ISDIR(before.st_mode) and temporary.is_dir():
            aside = own / f"{path.name}.replaced"
            path.rename(aside)
            try:
                temporary.rename(path)
            except OSError:
                aside.rename(path)
                raise
        elif before is None or stat.S_ISREG(before.st_mode) or stat.S_ISLNK(before.st_mode):
            temporary.replace(path)
        else:
            raise OSError(f"{path} is there and is no file")


@contextmanager
def fresh_folder(path: Path) -> Iterator[Path]:
    """Gives an empty folder beside `path`, for this user alone and with a name that can't be guessed; then removes it.

    Those that killed processes have left behind for the same `path` are not touched: `remove_leftovers` does that.

    Raises:
        OSError: it can't be made.
    """
    own = Path(tempfile.mkdtemp(prefix=f".{path.name[:MAX_PREFIX]}.", suffix=".tmp", dir=path.parent))
    try:
        yield own
    finally:
        shutil.rmtree(own, ignore_errors=True)  # with half a file, if the disk is full


def remove_leftovers(path: Path) -> None:
    """Removes what killed processes have left of `fresh_folder(path)`; nobody else may be writing `path` now."""
    with suppress(OSError):
        for own in path.parent.iterdir():
            if own.name.startswith(f".{path.name[:MAX_PREFIX]}.") and own.name.endswith(".tmp"):
                remove(own)


def create(path: Path) -> BinaryIO:
    """Makes a file and opens it for writing; a file or link of the same name is removed first.

    Raises:
        OSError: it can't be made.
    """
    with suppress(FileNotFoundError):
        path.unlink()
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666), "wb")


def open_to_append(path: Path) -> TextIO:
    """Opens a regular file to append text, and to read it; makes it if it is not there. Every line is written at once.

    Raises:
        OSError: it can't be opened, or it is a link, a pipe or a device.
    """
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    if path.is_symlink():
        raise OSError(f"{path} is a link, and a link is not written to")
    descriptor = os.open(path, flags, 0o666)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(f"{path} is not a regular file")
    return os.fdopen(descriptor, "a+", buffering=1, encoding="utf-8")


def remove(path: Path) -> None:
    """Removes a file, a link itself, or a folder with what is in it; nothing that a link in it leads to.

    Raises:
        OSError: it can't be removed.
    """
    found = _lstat(path)
    if found is not None and stat.S_ISDIR(found.st_mode):
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def digest_file(file: Path) -> str:
    """Returns the SHA-256 of a file's bytes."""
    with file.open("rb") as stream:
        return digest_stream(stream)


def digest_files(folder: Path, names: Iterable[str]) -> dict[str, str]:
    """Returns the SHA-256 of files of a folder by their names, on several threads: hashlib lets others run meanwhile.

    Raises:
        OSError: one can't be read.
    """
    names = list(names)
    with ThreadPoolExecutor(max_workers=NUM_DIGESTERS) as pool:
        return dict(zip(names, pool.map(lambda name: digest_file(folder / name), names), strict=True))


def digest_stream(stream: BinaryIO) -> str:
    """Returns the SHA-256 of the bytes that follow in a file."""
    digest = hashlib.sha256()
    while block := stream.read(2**22):
        digest.update(block)
    return digest.hexdigest()


def _lstat(path: Path) -> os.stat_result | None:
    try:
        return path.lstat()
    except FileNotFoundError:
        return None


def shipped_file(name: str) -> Path:
    """Returns a file: inside the package when that was installed from a wheel, at the root of the repository otherwise.

    Args:
        name: its path from there, e.g. `conf/config.yaml`.
    """
    package = Path(__file__).parents[1]
    for folder in (package, package.parents[1]):
        if (folder / name).is_file():
            return folder / name
    raise AssertionError(f"{name} is neither in {package} nor in {package.parents[1]}: the installation is broken")


def is_write_error(error: BaseException) -> bool:
    """Whether an error says that a file can't be written. Libraries in Rust have classes of their own, or none."""
    return isinstance(error, (OSError, SafetensorError)) or _system_error(error) is not None


def disk_reason(error: BaseException) -> str:
    """Why a file can't be written, in the system's words, such as `No space left on device`."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    number = _system_error(error)
    if number is not None:
        return os.strerror(number)
    return first_line(error).rstrip(".")


def free_bytes(folder: Path) -> int:
    """Bytes that can be written to a folder, which may not be there yet.

    A file system that is no disk (/proc, /sys) has none in all. Nothing of its size says why it can't be written, so
    that sys.maxsize stands for it: the writing tells.
    """
    there = next(each for each in (folder.absolute(), *folder.absolute().parents) if each.exists())
    disk = shutil.disk_usage(there)
    return disk.free if disk.total else sys.maxsize


def find_room(folder: Path, num_bytes: int) -> Iterator[Path]:
    """Makes new folders in place of one that can't be written, one after another: beside it, then on other disks.

    Those that the caller leaves empty are removed.

    Args:
        folder: the one that can't be written.
        num_bytes: places with less room are left out.
    """
    temporary = (os.environ.get("TMPDIR", "/tmp"), "/var/tmp")  # noqa: S108  # in a new folder of this user's alone
    places = (str(folder.parent), *temporary, os.environ.get("HOME", "."), ".")
    for place in dict.fromkeys(places):
        with suppress(OSError):
            if shutil.disk_usage(place).free < num_bytes:
                continue
            made = Path(tempfile.mkdtemp(prefix=f"{folder.name}-rescued-", dir=place)).absolute()
            try:
                yield made
            finally:
                with suppress(OSError):
                    made.rmdir()  # which fails unless it is empty


def write_elsewhere(folder: Path, num_bytes: int, write: Callable[[Path], None]) -> Path | None:
    """Lets `write` fill a new folder in place of one that can't be written.

    Args:
        folder: the one that can't be written.
        num_bytes: what `write` takes, about.
        write: called with one folder after another until it succeeds.

    Returns:
        The folder that was written; None if there is none with room.
    """
    for place in find_room(folder, num_bytes):
        try:
            write(place)
        except Exception as error:
            _empty(place)
            if not is_write_error(error):
                raise
        else:
            return place
    return None


def _empty(folder: Path) -> None:
    for path in folder.iterdir():
        with suppress(OSError):
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def _system_error(error: BaseException) -> int | None:
    """The system's number of an error, also where a library in Rust has put it into the text."""
    found = re.search(r"\(os error (\d+)\)", str(error))
    if found is not None:
        return int(found[1])
    return error.errno if isinstance(error, OSError) else None
