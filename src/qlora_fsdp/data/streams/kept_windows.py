"""Windows of streamed data as files in the run folder: a run that resumes need not tokenize again what it was at.

A window is some million tokens, which take one core some ten seconds, and a run that resumes could train on nothing
before. So rank 0 writes the tokenized rows of each window to a file, whichever ranks have made them, and any number of
ranks goes on with it: only the packing is done anew. A file is a convenience. One that is lost, damaged or can't be
written is made up for by tokenizing the window, as at the start of a run.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save

from qlora_fsdp.common.files import create, disk_reason, is_write_error, remove, replacing
from qlora_fsdp.common.foreign_files import open_regular
from qlora_fsdp.common.text import printable
from qlora_fsdp.data.chats.told import TOLD
from qlora_fsdp.data.files.position import Position
from qlora_fsdp.data.streams.share import PlacedProblem, Share, ShareTable, ToldRows
from qlora_fsdp.data.streams.windows import Place
from qlora_fsdp.records.record_files import check_own
from qlora_fsdp.records.run_state import CHECKPOINTS, WINDOWS_FOLDER, checkpoint_folders, step_of

# The one that is trained on, the one that is made ahead, and the one before, in which the last step may have been.
NUM_KEPT = 3
MAX_BYTES = 2**34  # of a file
SUFFIX = ".safetensors"
NAME = re.compile(r"\.?(\d{12,})\.safetensors(\..*tmp)?")  # by the first sequence; also what a kill has left half made

log = logging.getLogger("qlora_fsdp")


@dataclass
class KeptWindows:
    """The files of a run's windows. Rank 0 alone reads and writes them. The folders of `others` are only read.

    At most NUM_KEPT are there up to the newest window, and before them the one that the newest checkpoint stands in.
    """

    run_folder: Path
    others: Sequence[Path]
    key: str
    global_batch_size: int
    _has_warned: bool = field(default=False, init=False)

    def read(self, place: Place) -> tuple[Share, list[Position]] | None:
        """All rows of the window at `place` and how far the data sets are read after it; None: they are not there."""
        for folder in (self.run_folder, *self.others):
            try:
                return _parse(_read_whole(folder / WINDOWS_FOLDER, _name(place)), self.key, place)
            except (OSError, SafetensorError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
                continue
        return None

    def write(self, place: Place, rows: Share, ends: Sequence[Position]) -> None:
        """Keeps a window, if that is possible, and removes those that are needed no more.

        Args:
            place: where it begins.
            rows: those of all ranks.
            ends: how far the data sets are read after it.
        """
        try:
            check_own(self.run_folder)
            folder = self.run_folder / WINDOWS_FOLDER
            folder.mkdir(exist_ok=True)
            self._remove_old(folder, place.sequence)
            with replacing(folder / _name(place)) as temporary, create(temporary) as file:
                file.write(_encode(self.key, place, rows, ends))
            self._has_warned = False
        except Exception as error:
            if not is_write_error(error):
                raise
            if not self._has_warned:
                self._has_warned = True
                log.warning(
                    f"{self.run_folder / WINDOWS_FOLDER} can't be written: {disk_reason(error)}. Training goes on. If"
                    " it is resumed, it tokenizes the rows again that it was at, which takes some seconds."
                )

    def _remove_old(self, folder: Path, sequence: int) -> None:
        """Removes what is not needed beside the window that begins at `sequence`. Those after it are left to later."""
        before: dict[Path, int] = {}  # whole windows, each with its first sequence
        for path in list(folder.iterdir()):
            match = NAME.fullmatch(path.name)
            if match is None:
                continue
            if path.suffix != SUFFIX:
                remove(path)
            elif int(match[1]) < sequence:
                before[path] = int(match[1])
        firsts = sorted(before.values())
        at_checkpoint = [first for first in firsts if first <= self._num_saved()]
        needed = {*firsts[1 - NUM_KEPT :], *at_checkpoint[-1:]}
        for path, first in before.items():
            if first not in needed:
                remove(path)

    def _num_saved(self) -> int:
        """Sequences before the newest checkpoint."""
        checkpoints = checkpoint_folders(self.run_folder / CHECKPOINTS)
        last_step = step_of(checkpoints[-1]) if checkpoints else None
        return (last_step or 0) * self.global_batch_size


def _name(place: Place) -> str:
    return f"{place.sequence:012}{SUFFIX}"


def _read_whole(folder: Path, name: str) -> bytes:
    with open_regular(folder, name) as stream:
        if os.fstat(stream.fileno()).st_size > MAX_BYTES:
            raise ValueError("no window is so large")
        return stream.read()


def _encode(key: str, place: Place, rows: Share, ends: Sequence[Position]) -> bytes:
    table = rows.table
    about = {
        "key": key,
        "place": asdict(place),
        "ends": [asdict(end) for end in ends],
        "problems": [[*asdict(problem).values()] for problem in table.problems],
        "told": [[*asdict(told).values()] for told in table.told],
    }
    arrays: dict[str, NDArray[Any]] = {
        "about": np.frombuffer(json.dumps(about).encode(), np.uint8),
        "raw_rows": table.raw_rows,
        "lengths": table.lengths,
        "tokens": np.concatenate([np.zeros(0, np.int32), *rows.tokens]),
    }
    return save(arrays | {"sha256": _digest(arrays)})


def _parse(content: bytes, key: str, place: Place) -> tuple[Share, list[Position]]:
    """What `_encode` has made.

    Raises:
        SafetensorError, ValueError, LookupError, TypeError, AttributeError, RecursionError: it is damaged, of another
            window, or anybody's.
    """
    arrays = load(content)
    if (arrays.pop("sha256") != _digest(arrays)).any():
        raise ValueError("it is damaged")
    about = json.loads(arrays["about"].tobytes())
    if about["key"] != key or about["place"] != asdict(place):
        raise ValueError("it is another window")
    raw_rows, lengths, tokens = (arrays[name] for name in ("raw_rows", "lengths", "tokens"))
    wanted = ((raw_rows, np.int64), (lengths, np.int64), (tokens, np.int32))
    if any(array.ndim != 1 or array.dtype != dtype for array, dtype in wanted):
        raise TypeError("no window has such numbers")
    is_whole = raw_rows.shape == lengths.shape and lengths.min() > 0 and lengths.sum() == len(tokens)
    if not (is_whole and raw_rows.min() >= 0 and (np.diff(raw_rows) >= 0).all()):
        raise ValueError("its rows are not those of a window")
    starts = np.cumsum(lengths) - lengths
    num_targets = np.add.reduceat(tokens < 0, starts, dtype=np.int32)
    largest = int(np.where(tokens < 0, ~tokens, tokens).max())
    problems = [
        PlacedProblem(int(row), printable(where), printable(kind), printable(detail), bool(is_kept))
        for row, where, kind, detail, is_kept in about["problems"]
    ]
    told = [
        ToldRows(int(flag), int(num_rows), tuple((int(row), printable(where)) for row, where in first))
        for flag, num_rows, first in about["told"]
        if flag in TOLD
    ]
    ends = [Position.from_json(end) for end in about["ends"]]
    if len(ends) != len(place.positions):
        raise ValueError("it is of another mix")
    table = ShareTable(raw_rows, lengths, num_targets, tuple(problems), largest, "", tuple(told))
    return Share(table, np.split(tokens, starts[1:])), ends


def _digest(arrays: dict[str, NDArray[Any]]) -> NDArray[np.uint8]:
    digest = hashlib.sha256()
    for name in sorted(arrays):
        digest.update(name.encode() + np.ascontiguousarray(arrays[name]).tobytes())
    return np.frombuffer(digest.digest(), np.uint8)
