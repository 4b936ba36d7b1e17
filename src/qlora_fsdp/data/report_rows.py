"""A few rows of a run, kept in its folder, on which its adapter is compared with what is made of it later.

`merge` asks how much of what was learned its result keeps. It can only ask that of rows, and the data of a run may be
far away by then. So the run keeps some held-out rows as tokens beside the adapter's folder, and the adapter's settings
name them by their SHA-256: rows of another run in the same place are not taken for its own. The adapter's own folder,
which may be published, has no rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from qlora_fsdp.common.errors import DataError
from qlora_fsdp.common.files import digest_file, replacing
from qlora_fsdp.data.sequences import Sequences
from qlora_fsdp.data.tokenize import TokenRow

MAX_ROWS = 32
MAX_TOKENS = 512  # of a row: longer ones are cut
MAX_TARGETS = 64  # of a row: of more some are left out, evenly, as predictions of all of them are held at once
MAX_FILE_BYTES = 2**20
HELD_OUT = "held_out"


@dataclass(frozen=True)
class ReportRows:
    """Rows on which a merged model is compared with base and adapter.

    Attributes:
        rows: tokens, and which of them are predicted.
        are_held_out: whether training has not seen them.
    """

    rows: Sequence[TokenRow]
    are_held_out: bool


def choose_rows(data: Sequences, num_rows: int = MAX_ROWS) -> list[TokenRow]:
    """Rows of the data, evenly over all of it, cut to `MAX_TOKENS` tokens and `MAX_TARGETS` targets.

    Of a pair of answers it is the chosen one. Rows that predict nothing within the cut are left out.

    Args:
        data: rows that end in a text which is predicted.
        num_rows: how many, at most.
    """
    ids = np.sort(np.unique(data.row_ids))
    chosen = np.unique(np.linspace(0, len(ids) - 1, min(num_rows, len(ids))).round().astype(np.int64))
    rows = []
    for row in ids[chosen]:
        tokens, is_target = data.rows.read(int(row))[0]
        short = _thin_out(is_target[:MAX_TOKENS])
        if short[1:].any():
            rows.append((tokens[:MAX_TOKENS], short))
    return rows


def _thin_out(is_target: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """The same targets, or `MAX_TARGETS` of them, evenly over all."""
    places = np.flatnonzero(is_target)
    if len(places) <= MAX_TARGETS:
        return is_target
    kept = np.zeros_like(is_target)
    kept[places[np.linspace(0, len(places) - 1, MAX_TARGETS).round().astype(np.int64)]] = True
    return kept


def write_report_rows(kept: ReportRows, file: Path) -> str:
    """Write the rows to a file, whole or not at all. Returns the file's SHA-256."""
    tensors: dict[str, NDArray[Any]] = {
        "tokens": np.concatenate([tokens for tokens, _ in kept.rows]).astype(np.int32),
        "is_target": np.concatenate([is_target for _, is_target in kept.rows]).astype(np.uint8),
        "lengths": np.array([len(tokens) for tokens, _ in kept.rows], np.int32),
    }
    with replacing(file) as temporary:
        save_file(tensors, temporary, {HELD_OUT: str(kept.are_held_out).lower()})
    return digest_file(file)


def read_report_rows(file: Path, digest: str, vocab_size: int) -> ReportRows:
    """Read rows that a run has kept.

    Args:
        file: maybe from elsewhere.
        digest: the SHA-256 that the adapter's settings name.
        vocab_size: every token must be below it.

    Raises:
        DataError: it is another file, or none that a run writes.
    """
    try:
        if not file.is_file() or file.stat().st_size > MAX_FILE_BYTES or digest_file(file) != digest:
            raise DataError(f"{file} has no rows of this adapter's run.")
        with safe_open(file, "np") as stored:
            tokens, is_target, lengths = (stored.get_tensor(name) for name in ("tokens", "is_target", "lengths"))
            are_held_out = (stored.metadata() or {}).get(HELD_OUT) == "true"
    except (SafetensorError, OSError) as error:
        raise DataError(f"{file} can't be read: {error}.") from error
    is_flat = all(array.ndim == 1 and array.dtype.kind in "iu" for array in (tokens, is_target, lengths))
    fits = is_flat and len(tokens) == len(is_target) == lengths.sum() and 0 < len(lengths) <= MAX_ROWS
    if not fits or lengths.min() < 1 or tokens.min() < 0 or tokens.max() >= vocab_size:
        raise DataError(f"{file} holds no rows of tokens of this model.")
    ends = np.cumsum(lengths)[:-1]
    parts = zip(np.split(tokens.astype(np.int32), ends), np.split(is_target.astype(bool), ends), strict=True)
    return ReportRows([row for row in parts if row[1][1:].any()], are_held_out)
