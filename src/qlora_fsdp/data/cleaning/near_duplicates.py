"""Rows that are nearly the same as an earlier one, found by MinHash (datasketch).

A row is the set of its runs of five tokens (shingles). How alike two rows are is the share of their shingles that both
have (Jaccard's index), which MinHash estimates from 128 numbers a row. What many rows begin with (a system prompt, the
descriptions of tools, Alpaca's prompt) would make short rows alike that are not. So shingles that are in more than a
tenth of a sample of the rows are not counted.

A row takes some 0.6 ms and 5 KiB of memory on the one process that looks; what it finds is kept beside the tokens.
"""

from __future__ import annotations

import hashlib
import math

import numpy as np
from numpy.typing import NDArray

from qlora_fsdp.config.schema import DataConfig
from qlora_fsdp.data.cleaning.row_hashes import Hashes, keep, name_file, read_kept
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
