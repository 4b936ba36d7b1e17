"""Where the ranks of a run leave short messages for one another, without a collective.

It is the store at which they met; and where all run on one host and this project's launcher has started them, a folder
that only this user can enter, so that nobody else can read, write or remove anything there.
"""

from __future__ import annotations

import os
import secrets
from contextlib import suppress
from pathlib import Path
from typing import Protocol


class Board(Protocol):
    """What the watch needs of a store (torch's `Store`)."""

    def set(self, key: str, value: str) -> None:
        """Write a message, in place of one that is there."""

    def get(self, key: str) -> bytes:
        """The message under a key that is there."""

    def check(self, keys: list[str]) -> bool:
        """Whether there is a message under each of these keys."""

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """The messages under keys that are all there."""

    def compare_set(self, key: str, expected: str, value: str) -> bytes:
        """Write a message if there is none, for which `expected` is empty. Returns the one that is there then."""


class FolderBoard:
    """Messages as files, each of which is always whole.

    Args:
        folder: where they are, beside the files of other boards.
        name: what the names of this board's files begin with.

    Raises (all methods):
        RuntimeError: the folder is gone, or the disk is full; as torch's stores do.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self.folder = folder
        self.name = name

    def set(self, key: str, value: str) -> None:
        try:
            self._write(value).replace(self._file(key))
        except OSError as error:
            raise RuntimeError(str(error)) from error

    def get(self, key: str) -> bytes:
        try:
            return self._file(key).read_bytes()
        except OSError as error:
            raise RuntimeError(str(error)) from error

    def check(self, keys: list[str]) -> bool:
        return all(self._file(key).exists() for key in keys)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self.get(key) for key in keys]

    def compare_set(self, key: str, expected: str, value: str) -> bytes:
        assert expected == ""
        try:
            temporary = self._write(value)
            with suppress(FileExistsError):
                os.link(temporary, self._file(key))
            temporary.unlink()
        except OSError as error:
            raise RuntimeError(str(error)) from error
        return self.get(key)

    def _file(self, key: str) -> Path:
        return self.folder / f"{self.name}-{key.replace('/', '-')}"

    def _write(self, value: str) -> Path:
        temporary = self.folder / f".{secrets.token_hex(8)}"
        temporary.write_text(value)
        return temporary
