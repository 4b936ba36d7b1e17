"""Protect caches: who may read an entry, and whose entries are used. Imports no torch.

A run trains on what a cache holds, without further checks. So the default folder, in the user's home, is closed to
others, and an entry there that belongs to another user is refused. A folder that was typed may be shared, and who types
it trusts those who write to it; what is made there of a private file stays private.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from pathlib import Path

from qlora_fsdp.common.errors import ConfigError, Problem


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
