"""Files in a folder that anybody may have written, such as a checkpoint that was downloaded. Imports no torch.

Caches are protected: who may read an entry, and whose entries are used.
"""

from __future__ import annotations

import errno
import io
import json
import os
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from qlora_fsdp.common.errors import ConfigError, Problem
from qlora_fsdp.common.files import digest_files
from qlora_fsdp.common.text import shorten

MAX_SMALL_BYTES = 2**25
NAMED_TEMPLATES = "additional_chat_templates"  # the folder of a tokenizer's chat templates that have names


def open_regular(folder: Path, name: str) -> io.BufferedReader:
    """Opens a file in `folder`, or in a folder inside it, for reading.

    The folder itself may be a link. The file may not be one, and may not lie behind a link that leaves the folder:
    otherwise the folder could make this process read any file of the user's. A pipe or a device is refused too, because
    reading it could wait or fill memory without end; it is opened without waiting for somebody to write to it.

    Raises:
        OSError: the file can't be opened, or is not a regular file in the folder; `strerror` says which.
        ValueError: the name can't be the name of a file.
    """
    file = folder / name
    if file.is_symlink() or not file.parent.resolve().is_relative_to(folder.resolve()):
        raise OSError(errno.ELOOP, "it is a link, or lies behind one that leaves its folder", str(file))
    descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is not a regular file", str(file))
    return os.fdopen(descriptor, "rb")


def named_templates(folder: Path) -> list[str]:
    """A tokenizer's chat templates that have names, as paths within its folder, sorted; none in most folders."""
    return [f"{NAMED_TEMPLATES}/{file.name}" for file in sorted((folder / NAMED_TEMPLATES).glob("*.jinja"))]


def find_outside(folder: Path) -> list[Path]:
    """Returns the files of a folder that lead out of it by a link, or are pipes or devices.

    Libraries read the files of a model or an adapter by themselves, so all of them are looked at before. These are the
    files in the folder itself and the chat templates beside them. The folder may be a link. In a snapshot of the hub's
    cache, and in the folders inside it, every file is a link into the folder `blobs` of the same repository, which is
    part of the model. Weights may be links to anywhere: people keep large files on other disks, and nothing but tensors
    is read from them.
    """
    inside = folder.resolve()
    snapshots = (path for path in (inside, *inside.parents) if path.parent.name == "snapshots")
    blobs = next((path.parent.parent / "blobs" for path in snapshots), inside)
    found = []
    for file in sorted([*folder.iterdir(), *folder.glob(f"{NAMED_TEMPLATES}/*")]):
        if not os.path.exists(file) or file.is_dir():  # noqa: PTH110  # a link to nowhere, or to what may not be read
            continue
        target = file.resolve()
        is_inside = file.suffix == ".safetensors" or any(map(target.is_relative_to, (inside, blobs)))
        if not is_inside or not target.is_file():
            found.append(file)
    return found


def read_json_object(file: Path, max_bytes: int) -> dict[str, Any]:
    """Reads a file that holds an object of JSON, such as a config.json. It may be a link, as in the hub's cache.

    Raises:
        OSError: the file can't be opened.
        ValueError: it has more than `max_bytes` bytes, is no JSON in UTF-8, is nested too deeply, or is no object.
    """
    with file.open("rb") as stream:
        content = stream.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise ValueError(f"it has more than {max_bytes:,} bytes")
    try:
        values = json.loads(content)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(values, dict):
        raise ValueError(f"it holds a {type(values).__name__}, and not an object")
    return values


def read_digests(folder: Path, written: Any) -> dict[str, str]:
    """Digests what a folder's list of its files names, and nothing elsewhere.

    Args:
        folder: the folder.
        written: what the list says: the digest of each file.

    Returns:
        The digests of these files as they are now.

    Raises:
        OSError: one can't be read.
        ValueError: it is no such list, or names what is no file of the folder.
    """
    if not isinstance(written, dict):
        raise ValueError(f"the list of its files is a {type(written).__name__}")
    strange = set(written) - {file.name for file in folder.iterdir() if file.is_file()}
    if strange:
        raise ValueError(f"it lists {shorten(min(strange))}, which is no file of it")
    return digest_files(folder, written)


def read_small(folder: Path, name: str) -> bytes:
    """Reads a file that describes others, such as a manifest, opened as by `open_regular`.

    Raises:
        OSError, ValueError: as `open_regular`; and ValueError for a file larger than any honest one, because what is
            parsed from it takes many times its size of memory.
    """
    with open_regular(folder, name) as stream:
        content = stream.read(MAX_SMALL_BYTES + 1)
    if len(content) > MAX_SMALL_BYTES:
        raise ValueError(f"it has more than {MAX_SMALL_BYTES:,} bytes")
    return content


def open_cache(typed: str | None, default: str) -> Path:
    """Makes and returns the folder of a cache.

    Args:
        typed: the setting; None takes the default folder.
        default: a folder for this user alone.

    Raises:
        OSError: it can't be made.
    """
    folder = find_cache(typed, default)
    folder.mkdir(mode=0o700 if typed is None else 0o777, parents=True, exist_ok=True)
    return folder


def find_cache(typed: str | None, default: str) -> Path:
    """Returns the folder of a cache, which need not exist.

    Raises:
        ConfigError: it is in the user's home, and there is none, as for a user of a container without a name.
    """
    folder = default if typed is None else typed
    try:
        return Path(folder).expanduser()
    except RuntimeError as error:
        reason = "can't be found: HOME is not set, and the system does not know this user."
        fix = "Set HOME, or the folder by name (data.cache_folder, model.cache_folder)."
        raise ConfigError([Problem(folder, reason, fix)]) from error


def check_owner(entry: Path, typed: str | None) -> None:
    """Refuses an entry that another user has put into the default folder.

    Raises:
        OSError: the entry is there, and belongs to neither this user nor root.
    """
    if typed is None and (owner := entry.lstat().st_uid) not in (os.geteuid(), 0):
        raise PermissionError(
            f"{entry} belongs to another user (number {owner}), who may have put anything there: remove it, or set the "
            "folder by name if you trust them"
        )


def close_to_others(entry: Path, typed: str | None, sources: Iterable[Path]) -> None:
    """Takes from others the rights to an entry that they do not have to what it was made of.

    Args:
        entry: a folder with files that have just been written.
        typed: the setting of the cache's folder; None closes the entry whatever it was made of.
        sources: the files that it was made of.
    """
    allowed = 0o777 if typed is not None else 0o700
    for source in sources:
        mode = source.stat().st_mode
        allowed &= 0o700 | (0o070 if mode & stat.S_IRGRP else 0) | (0o007 if mode & stat.S_IROTH else 0)
    for path in (entry, *entry.iterdir()):
        path.chmod(stat.S_IMODE(path.stat().st_mode) & allowed)


def lock_mode(folder: Path) -> int:
    """Returns the permissions for a lock file in a cache: all who may write to the folder may wait for one another."""
    writers = folder.stat().st_mode & 0o022
    return 0o600 | writers | writers << 1  # to write, and to read
