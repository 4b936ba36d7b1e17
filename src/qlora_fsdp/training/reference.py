"""The log-probabilities of answers under the reference, computed once, and kept beside the tokenized data.

They are computed with the loaded and sharded model before its first step, so that nothing of it exists twice, and only
for rows that the run will see. Later runs on the same base and data find them in the cache: a sweep over learning rates
computes them once. The file has NaN for rows that no run has asked for.
"""

from __future__ import annotations

import hashlib
import json
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from qlora_fsdp.common.cache_folder import check_owner, find_cache
from qlora_fsdp.common.files import replacing
from qlora_fsdp.common.text import plural
from qlora_fsdp.data.batch import collate, micro_batch_indices
from qlora_fsdp.data.sequences import Indices, Rows, Sequences, SequenceSettings, make_sequences
from qlora_fsdp.data.tokenize_source import DEFAULT_CACHE_FOLDER
from qlora_fsdp.model.count import dtype_name
from qlora_fsdp.model.preference import PreferenceLM
from qlora_fsdp.model.shard import free_gathered
from qlora_fsdp.records.run_folder import log
from qlora_fsdp.runtime.processes import Processes
from qlora_fsdp.training.prepare import Prepared

Found = NDArray[np.float32]  # [num_rows, 2], as `Batch.reference` has them; NaN: not computed


def add_reference(prepared: Prepared, processes: Processes) -> Prepared:
    """Give the data of a run the reference's log-probabilities, if it wants them beforehand. Collective.

    Args:
        prepared: a run whose model is loaded and sharded, and not yet trained: its adapter is as it starts.
        processes: all ranks take part.
    """
    settings, model, data = prepared.config.preference, prepared.model, prepared.data
    if not isinstance(model, PreferenceLM) or not settings.loss.needs_reference:
        return prepared
    if prepared.start is not None:
        model.freeze_start(keeps_copy=not settings.precompute)
    if not settings.precompute:
        return prepared
    train, held_out = data.train, data.eval
    assert isinstance(train, Sequences)
    prepared.peaks.enter("evaluation")
    split = prepared.split
    used = _rows_in(train, train.order(0, min(split.num_sequences, len(train)), prepared.config.training.seed))
    if held_out is not None and held_out.rows is train.rows:
        used = np.union1d(used, held_out.row_ids)
    found = _find(prepared, model, train, used, processes)
    train = replace(train, reference=found)
    if held_out is not None:
        if held_out.rows is not train.rows:
            found = _find(prepared, model, held_out, np.unique(held_out.row_ids), processes)
        held_out = replace(held_out, reference=found)
    return replace(prepared, data=replace(data, train=train, eval=held_out))


def _rows_in(sequences: Sequences, indices: Indices) -> Indices:
    """The rows of these sequences, each once."""
    return np.unique(np.concatenate([sequences.row_ids_of(int(index)) for index in indices]))


def _find(prepared: Prepared, model: PreferenceLM, data: Sequences, used: Indices, processes: Processes) -> Found:
    """The log-probabilities of the rows `used` of `data.rows`, from the cache as far as it has them."""
    file = _cache_file(prepared, data.rows)
    # Nodes may have caches of their own, and all ranks must compute the same rows.
    kept = _read(file, len(data.rows.num_targets), prepared.config.data.cache_folder) if processes.is_main else None
    found: Found = processes.share(kept)
    missing = used[np.isnan(found[used]).any(1)]
    if not len(missing):
        log.info(f"Reference: log-probabilities of {plural(len(used), 'row')} found in {file}")
        return found
    started = time.perf_counter()
    rows, values = _compute(model, data, missing, prepared.split.micro_batch_size, processes)
    found[rows] = values
    where = ""
    if file is not None and processes.is_main:
        where = f", kept in {file}" if _write(file, found) else f", not kept: {file.parent} can't be written"
    log.info(
        f"Reference: log-probabilities of {plural(len(missing), 'row')} computed in "
        f"{time.perf_counter() - started:.1f} s{where}"
    )
    return found


@torch.no_grad()
def _compute(
    model: PreferenceLM, data: Sequences, rows: Indices, micro_batch_size: int, processes: Processes
) -> tuple[Indices, Found]:
    """The rows in another order, and the log-probabilities of each, [len(rows), 2]. Ranks share the work."""
    settings = SequenceSettings(data.max_length, data.pad_token_id, data.is_packed, seed=0)
    sequences, device = make_sequences(data.rows, rows, settings), processes.device
    mine: list[tuple[Indices, Found]] = []
    split = {"rank": processes.rank, "num_ranks": processes.num_ranks, "micro_batch_size": micro_batch_size}
    for indices in micro_batch_indices(np.arange(len(sequences)), **split):
        batch = collate(sequences, indices, micro_batch_size=micro_batch_size).to(device)
        values = model.reference_of(batch)
        if len(indices):
            mine.append((_rows_of(sequences, indices), values.cpu().numpy()))
    free_gathered(model)
    parts = [part for own in processes.gather(mine) for part in own]
    return np.concatenate([ids for ids, _ in parts]), np.concatenate([values for _, values in parts])


def _rows_of(sequences: Sequences, indices: Indices) -> Indices:
    """The rows of a micro-batch in the order in which it has them."""
    return np.concatenate([sequences.row_ids_of(int(index)) for index in indices])


def _cache_file(prepared: Prepared, rows: Rows) -> Path | None:
    """Where they are kept, named by what they depend on; None where nothing tells the base or the data from others."""
    config = prepared.config
    if prepared.base is None or not rows.key:
        return None
    quant = [str(value) for value in vars(config.quant).values()]
    tokens = [*config.tokenizer.add_tokens, *config.tokenizer.add_special_tokens]
    start = None if prepared.start is None else prepared.start.digest
    identity = [
        2,
        prepared.base,
        start,
        quant,
        dtype_name(prepared.assembled.dtype),
        tokens,
        rows.key,
        rows.num_answers,
    ]
    name = hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:32]
    return find_cache(config.data.cache_folder, DEFAULT_CACHE_FOLDER) / f"reference-{name}.npy"


def _read(file: Path | None, num_rows: int, typed_folder: str | None) -> Found:
    """What a file has, all NaN if it is not there or not for these rows."""
    with suppress(OSError, ValueError, EOFError):
        if file is not None:
            check_owner(file, typed_folder)
            found = np.load(file, allow_pickle=False)
            if found.shape == (num_rows, 2) and found.dtype == np.float32:
                return np.asarray(found)
    return np.full((num_rows, 2), np.nan, dtype=np.float32)


def _write(file: Path, found: Found) -> bool:
    """Keep log-probabilities for later runs. A run goes on where that fails: it has them."""
    try:
        with replacing(file) as temporary, temporary.open("wb") as stream:
            np.save(stream, found)
    except OSError:
        return False
    return True
