"""Leave out rows of the training data: too short or long, repeated, nearly repeated, or in the evaluation data too.

Rows are compared after tokenizing, over all data sets of a mix, and before any are held out. So a row can't be in the
training data while its repetition is in the evaluation data. Evaluation data is never changed. Streams are not cleaned,
because nobody knows which rows are still to come.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from qlora_fsdp.common.errors import DataError
from qlora_fsdp.common.text import plural
from qlora_fsdp.config.schema import DataConfig
from qlora_fsdp.data.cleaning.row_hashes import Hashes, hash_rows, keep, name_file, read_kept
from qlora_fsdp.data.counts import NUM_EXAMPLES, Cleaning
from qlora_fsdp.data.sequences import Indices, Rows

SHINGLE = 5  # tokens
NUM_PERMUTATIONS = 128
SAMPLED_ROWS = 1000
COMMON_SHARE = 0.1  # of the sampled rows; a shingle that more of them have is boilerplate
MIN_COMMON = 10  # rows that boilerplate is in at least: of few rows, a tenth are soon alike
FACTORS = np.array([1, 0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D, 0x27D4EB2F], dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)

Shingles = NDArray[np.uint32]


def find_near_duplicates(rows: Rows, ids: Indices, hashes: Hashes, data: DataConfig) -> Indices:
    """The rows among `ids` that are like an earlier one of these, which itself stays: int64, sorted.

    Args:
        rows: the rows of all data sets.
        ids: the rows to look at, none of which are exactly the same.
        hashes: hashes of all rows, by which what was found before is known again.
        data: `near_duplicates`, the least share of common shingles, and `cache_folder` are used.
    """
    looked_at = hashlib.sha256(np.ascontiguousarray(hashes[ids]).tobytes()).hexdigest()
    file = name_file("near", [looked_at, str(data.near_duplicates)], data)
    places = read_kept(file, data)  # among ids, as row numbers may be others in another mix
    if places is None or places.dtype != np.int64 or (len(places) and int(places.max()) >= len(ids)):
        places = _find(rows, ids, float(data.near_duplicates or 1.0))
        keep(file, places, rows)
    return np.asarray(ids[places])


def _find(rows: Rows, ids: Indices, threshold: float) -> Indices:
    from datasketch import MinHash, MinHashLSH  # an extra: config/check_data.py has made sure that it is there

    common = _common_shingles(rows, ids)
    empty = MinHash(num_perm=NUM_PERMUTATIONS, hashfunc=int)  # the shingles are hashes already
    # What the index finds is compared, so it may find too much, and should miss little.
    index = MinHashLSH(threshold=threshold, num_perm=NUM_PERMUTATIONS, weights=(0.1, 0.9))
    signatures = np.empty((len(ids), NUM_PERMUTATIONS), dtype=empty.hashvalues.dtype)
    found = []
    for place, row in enumerate(ids.tolist()):
        every = _shingles(rows, row)
        own = every[~np.isin(every, common)]
        sketch = empty.copy()
        sketch.update_batch((own if len(own) else every).tolist())
        candidates = index.query(sketch)
        if candidates and (signatures[candidates] == sketch.hashvalues).mean(axis=1).max() >= threshold:
            found.append(place)
            continue
        signatures[place] = sketch.hashvalues
        index.insert(place, sketch, check_duplication=False)
    return np.array(found, dtype=np.int64)


def _shingles(rows: Rows, row: int) -> Shingles:
    """The hashes of a row's shingles, each once; of a row with fewer tokens than one has, of all its tokens."""
    tokens = np.concatenate([tokens for tokens, _ in rows.read(row)]).astype(np.uint64)
    if len(tokens) < SHINGLE:
        tokens = np.pad(tokens, (0, SHINGLE - len(tokens)), constant_values=2**32 - 1)
    windows = np.lib.stride_tricks.sliding_window_view(tokens + np.uint64(1), SHINGLE)
    mixed = (windows * FACTORS).sum(axis=1, dtype=np.uint64)
    mixed = (mixed ^ (mixed >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
    return np.unique((mixed >> np.uint64(32)).astype(np.uint32))


def _common_shingles(rows: Rows, ids: Indices) -> Shingles:
    """Those that many rows have, judged by rows that are spread evenly over the data."""
    sampled = ids[:: math.ceil(len(ids) / SAMPLED_ROWS)]
    found, counts = np.unique(np.concatenate([_shingles(rows, int(row)) for row in sampled]), return_counts=True)
    return np.asarray(found[counts > max(MIN_COMMON, COMMON_SHARE * len(sampled))])


@dataclass(frozen=True)
class CleanedRows:
    """The rows that stay.

    Attributes:
        parts: their numbers in the order of the data, one array for each data set.
        hashes: hashes of all rows, also those that do not stay (`row_hashes`).
        cleanings: what was found, for the report; kinds of which there are no rows are not among them.
    """

    parts: list[Indices]
    hashes: Hashes
    cleanings: tuple[Cleaning, ...]


def clean_rows(rows: Rows, parts: list[Indices], names: list[str], data: DataConfig) -> CleanedRows:
    """Leaves out what the settings ask for, in the order of this function: each row counts once.

    Raises:
        DataError: no row of a data set is left.
    """
    hashes = hash_rows(rows, data)
    cleanings: list[Cleaning] = []
    ids = np.concatenate(parts)

    def found(which: NDArray[np.bool_], what: str, hint: str, leaves_out: bool = True) -> None:
        nonlocal ids
        if which.any():
            examples = tuple(ids[which][:NUM_EXAMPLES].tolist())
            cleanings.append(Cleaning(what, hint, int(which.sum()), examples, leaves_out))
            ids = ids[~which] if leaves_out else ids

    longest = rows.part_lengths.max(1)  # of a pair, its longer answer
    if data.min_tokens is not None:
        found(longest[ids] < data.min_tokens, "too short", f"data.min_tokens={data.min_tokens}")
    if data.max_tokens is not None:
        found(longest[ids] > data.max_tokens, "too long", f"data.max_tokens={data.max_tokens}")
    hint = "data.deduplicate=false keeps them" if data.deduplicate else "data.deduplicate=true leaves them out"
    found(_repeats(hashes[ids]), "the same as an earlier one", hint, data.deduplicate)
    if data.near_duplicates is not None:
        near = find_near_duplicates(rows, ids, hashes, data)
        which = np.isin(ids, near)
        found(which, "nearly the same as an earlier one", f"data.near_duplicates={data.near_duplicates:g}")
    stays = np.zeros(len(hashes), dtype=bool)
    stays[ids] = True
    kept = [own[stays[own]] for own in parts]
    for name, own in zip(names, kept, strict=True):
        if not len(own):
            raise DataError(
                f"No row of {name} is left: {'; '.join(map(str, cleanings))}. Change these settings, or leave {name}"
                " out."
            )
    return CleanedRows(kept, hashes, tuple(cleanings))


def compare_with_held_out(
    parts: list[Indices], hashes: Hashes, held_out: Hashes, names: list[str], data: DataConfig
) -> tuple[list[Indices], tuple[Cleaning, ...]]:
    """Finds rows of the evaluation data in the training data, and takes them out of it if `data.decontaminate` says so.

    `parts` has the rows of each data set, without those that are held out.

    Returns:
        The rows to train on, one array for each data set, and what was found.

    Raises:
        DataError: no row of a data set is left.
    """
    which = [np.isin(hashes[own], held_out) for own in parts]
    leaked = np.concatenate([own[is_in] for own, is_in in zip(parts, which, strict=True)])
    if not len(leaked):
        return parts, ()
    number = int(np.isin(held_out, hashes[leaked]).sum())
    what = f"the same as {number:,} of the {plural(len(held_out), 'evaluation row')}"
    examples = tuple(leaked[:NUM_EXAMPLES].tolist())
    if not data.decontaminate:
        hint = "so that the evaluation tells less; data.decontaminate=true leaves them out"
        return parts, (Cleaning(what, hint, len(leaked), examples, leaves_out=False),)
    kept = [own[~is_in] for own, is_in in zip(parts, which, strict=True)]
    for name, own in zip(names, kept, strict=True):
        if not len(own):
            raise DataError(
                f"data.decontaminate=true leaves no row of {name}: all of them are in the evaluation data too. Set"
                " other evaluation data, or data.decontaminate=false."
            )
    return kept, (Cleaning(what, "data.decontaminate=true", len(leaked), examples),)


def _repeats(hashes: Hashes) -> NDArray[np.bool_]:
    """Which rows have the hash of an earlier one."""
    repeats = np.ones(len(hashes), dtype=bool)
    repeats[np.unique(hashes, return_index=True)[1]] = False
    return repeats
