"""Names of models and data sets: on the Hugging Face hub, or paths of this machine. Imports no torch."""

from __future__ import annotations

import re
from pathlib import Path

LOCAL_BASE = "path/to/the/base/model"  # how a model card calls a base that has no name on the hub

_NAME = re.compile(r"(?!\.)[\w.-]{1,96}/(?!\.)[\w.-]{1,96}", re.ASCII)
_REPO = re.compile(r"(?:(?!\.)[\w.-]{1,96}/)?(?!\.)[\w.-]{1,96}", re.ASCII)
_SNAPSHOT = re.compile(r"/(?:models|datasets)--([\w.-]+?)--([\w.-]+)/snapshots/[0-9a-f]+/?$", re.ASCII)


def hub_name(path: str | None) -> str | None:
    """Returns the hub name that a path stands for; None for a folder or file of this machine.

    A folder in the hub's cache has the name of what was downloaded.
    """
    if path is None:
        return None
    if found := _SNAPSHOT.search(path):
        return f"{found[1]}/{found[2]}"
    return path if _NAME.fullmatch(path) and not path_exists(path) else None


def path_exists(path: str) -> bool:
    """Whether a text names a file or folder of this machine. A text too long for one does not."""
    try:
        return Path(path).expanduser().exists()
    except (OSError, RuntimeError, ValueError):
        return False


def loadable_name(path: str) -> str:
    """Returns a name under which a model loads from any current folder: a folder of this machine by its whole path."""
    folder = Path(path).expanduser()
    return str(folder.resolve()) if path_exists(path) and folder.is_dir() else path


def is_repo_name(name: str) -> bool:
    """Whether a repository of the hub may have this name: ORG/NAME, or NAME for one of the user's own."""
    return _REPO.fullmatch(name) is not None and not name.endswith((".git", ".", "-")) and "--" not in name
