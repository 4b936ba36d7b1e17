"""A file of rows, on this host or elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path, PurePosixPath
from typing import IO, Any
from urllib.parse import urlsplit


@dataclass(frozen=True)
class RowFile:
    """A file of rows.

    Attributes:
        path: a local path, or a URL.
        remote: the file system of a URL, from fsspec; None: the file is local.
        facts: for a remote file, what tells that it has changed, such as its size and etag.
        watch: called with what `open` gives.
    """

    path: str
    remote: Any = field(default=None, compare=False)
    facts: tuple[tuple[str, str], ...] = ()
    watch: Callable[[IO[bytes]], object] | None = field(default=None, compare=False)

    def __str__(self) -> str:
        return self.path

    @property
    def name(self) -> str:
        """The last part of its path."""
        return Path(self.path).name if self.remote is None else PurePosixPath(urlsplit(self.path).path).name

    @property
    def suffix(self) -> str:
        return PurePosixPath(self.name).suffix

    @property
    def stem(self) -> str:
        return PurePosixPath(self.name).stem

    @property
    def is_file(self) -> bool:
        return self.remote is not None or Path(self.path).is_file()

    @property
    def is_folder(self) -> bool:
        return self.remote is None and Path(self.path).is_dir()

    @property
    def identity(self) -> list[Any]:
        """A JSON value that changes when the contents may have changed."""
        if self.remote is not None:
            return [self.path, *map(list, self.facts)]
        stat = Path(self.path).stat()
        return [str(Path(self.path).resolve()), stat.st_size, stat.st_mtime_ns]

    def open(self) -> IO[bytes]:
        """Its bytes, as they are stored; what is opened can be closed and sought.

        Raises:
            OSError: it can't be opened. Remote file systems raise errors of their own.
        """
        open_file = Path(self.path).open if self.remote is None else partial(self.remote.open, self.path)
        opened: IO[bytes] = open_file("rb")
        if self.watch is not None:
            self.watch(opened)
        return opened

    @property
    def num_bytes(self) -> int | None:
        """Its size as it is stored; None: the file system does not tell."""
        if self.remote is None:
            return Path(self.path).stat().st_size
        size = dict(self.facts).get("size", "")
        return int(size) if size.isdecimal() else None
