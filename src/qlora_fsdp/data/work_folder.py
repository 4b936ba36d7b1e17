"""The folder in which a cache entry is made, with the raw rows, the choice of those to use, and tokenized shards.

It lies beside the entry, is closed to others, and stays when the process ends early: the next start goes on in it.
"""

from __future__ import annotations

import os
import re
import stat
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from qlora_fsdp.common.files import remove, write_json
from qlora_fsdp.common.foreign_files import read_json_object
from qlora_fsdp.data.counts import ReadReport

RAW = "raw.arrow"
PLAN = "plan.json"
MAX_PLAN_BYTES = 2**20
SECONDS_KEPT = 7 * 24 * 3600.0  # what nobody has gone on with
LEFTOVER = re.compile(r"\.[0-9a-f]{32}\..*(parts|tmp)")  # also of versions that went on with nothing


@dataclass(frozen=True)
class TokenizingPlan:
    """The rows that are tokenized, and how.

    Attributes:
        rows: int64 [num_rows], the rows that are used, by their number among the raw rows.
        bounds: int64 [num_shards + 1], where shards begin among them (see `shards`).
        read: what is known of the rows so far.
    """

    rows: NDArray[np.int64]
    bounds: NDArray[np.int64]
    read: ReadReport

    def save(self, work: Path) -> None:
        """Writes it; the last file says that it is whole."""
        np.save(work / "rows.npy", self.rows)
        np.save(work / "bounds.npy", self.bounds)
        write_json(work / PLAN, self.read.to_json())

    @classmethod
    def load(cls, work: Path) -> TokenizingPlan | None:
        """Load what `save` has written; None if nothing whole is there."""
        try:
            read = ReadReport.from_json(read_json_object(work / PLAN, MAX_PLAN_BYTES))
            return cls(np.load(work / "rows.npy"), np.load(work / "bounds.npy"), read)
        except (OSError, ValueError, KeyError, TypeError):
            return None


def find_work(entry: Path) -> Path:
    """Where this user makes an entry."""
    return entry.parent / f".{entry.name}.{os.geteuid()}.parts"


def open_work(entry: Path) -> Path:
    """Makes the folder, or finds it as it was left. Nobody else may be making the entry now.

    Raises:
        OSError: it can't be made, or somebody else has put something there.
    """
    work = find_work(entry)
    with suppress(FileExistsError):
        work.mkdir(mode=0o700)
    found = work.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        raise PermissionError(f"{work} is no folder of this user's: remove it")
    return work


def remove_abandoned(cache: Path) -> None:
    """Removes the work folders of this user's with which nobody has gone on for a week."""
    for path in cache.iterdir():
        with suppress(OSError):
            found = path.lstat()
            is_old = time.time() - found.st_mtime > SECONDS_KEPT
            if LEFTOVER.fullmatch(path.name) and is_old and found.st_uid == os.geteuid():
                remove(path)
