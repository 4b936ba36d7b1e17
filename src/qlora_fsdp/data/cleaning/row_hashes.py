"""A hash of what is trained on in each row: its tokens, its targets and its label. Equal rows have equal hashes.

Rows are compared after tokenizing, so the same row is known again whatever file, form or spelling of JSON it came in.
Only 64 bits per row stay in memory. They are kept beside the tokenized data, so that later starts read them.
"""

from __future__ import annotations

import hashlib
import json
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from qlora_fsdp.common.files import replacing
from qlora_fsdp.common.foreign_files import check_owner, find_cache
from qlora_fsdp.config.schema import DEFAULT_CACHE_FOLDER, DataConfig
from qlora_fsdp.data.answers import JudgedRows, PairedRows
from qlora_fsdp.data.mix import MixedRows
from qlora_fsdp.data.sequences import Rows

VERSION = 2  # to be raised when the same row gets another hash, or others are nearly the same
PAIR_FACTOR = np.uint64(0x9E3779B97F4A7C15)  # odd, so that (a, b) and (b, a) differ

Hashes = NDArray[np.uint64]


def hash_rows(rows: Rows, data: DataConfig) -> Hashes:
    """The hashes of all rows, [len(rows)]; of a pair, one of both answers.

    With 64 bits, one of a million rows is taken for another of them once in 37 million data sets.
    """
    if isinstance(rows, MixedRows):
        return np.concatenate([hash_rows(part, data) for part in rows.parts])
    if isinstance(rows, JudgedRows):
        return hash_rows(rows.parts, data)  # which have the labels
    if isinstance(rows, PairedRows):
        hashes = hash_rows(rows.parts, data)
        return np.asarray(hashes[::2] * PAIR_FACTOR + hashes[1::2])
    lengths = hashlib.sha256(np.ascontiguousarray(rows.lengths, dtype=np.int64).tobytes()).hexdigest()
    file = name_file("hashes", [rows.key, lengths], data) if rows.key else None
    found = read_kept(file, data)
    if found is None or found.shape != rows.lengths.shape or found.dtype != np.uint64:
        found = _hash(rows)
        keep(file, found, rows)
    return np.asarray(found)


def _hash(rows: Rows) -> Hashes:
    hashes = np.empty(len(rows.lengths), dtype=np.uint64)
    label_ends = np.cumsum(rows.num_targets, dtype=np.int64)
    has_labels = rows.labels.shape[1] > 0
    for number in range(len(hashes)):
        ((tokens, is_target),) = rows.read(number)
        digest = blake2b(tokens.tobytes(), digest_size=8)
        digest.update(is_target.tobytes())
        if has_labels:
            end = label_ends[number]
            digest.update(rows.labels[end - rows.num_targets[number] : end].tobytes())
        hashes[number] = int.from_bytes(digest.digest(), "little")
    return hashes


def name_file(kind: str, identity: list[str], data: DataConfig) -> Path:
    """Where something that was found out about rows is kept, named by what it depends on (JSON values)."""
    name = hashlib.sha256(json.dumps([VERSION, kind, *identity]).encode()).hexdigest()[:32]
    return find_cache(data.cache_folder, DEFAULT_CACHE_FOLDER) / f"{kind}-{name}.npy"


def read_kept(file: Path | None, data: DataConfig) -> NDArray[np.generic] | None:
    """Read a file of hashes; None if it is not there, can't be read, or belongs to another user."""
    with suppress(OSError, ValueError, EOFError):
        if file is not None:
            check_owner(file, data.cache_folder)
            found: NDArray[np.generic] = np.load(file, allow_pickle=False)
            return found
    return None


def keep(file: Path | None, found: NDArray[np.generic], rows: Rows) -> None:
    """Keeps an array for later runs, which do without it where it can't be written.

    Args:
        file: from `name_file`; None: the array is not kept.
        found: what was found out about the rows.
        rows: who may not read the tokens of all of these may not read the file.
    """
    with suppress(OSError):
        if file is not None:
            mode = 0o666
            for key in filter(None, rows.key.split("+")):  # its beginning names the entry
                mode &= (file.parent / key.partition("-")[0]).stat().st_mode
            with replacing(file) as temporary:
                with temporary.open("wb") as stream:
                    np.save(stream, found)
                temporary.chmod(mode | 0o600)
