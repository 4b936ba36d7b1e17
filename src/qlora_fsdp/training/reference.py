"""The log-probabilities of answers under the reference, computed once, and kept beside the tokenized data.

The model computes them itself, before its first step changes it, so no second model is needed. Only rows that the run
will see are computed. Later runs on the same base and data find the values in the cache, so a sweep over learning rates
computes them once. The file has NaN for rows that no run has asked for yet.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from qlora_fsdp.common.files import replacing
from qlora_fsdp.common.foreign_files import find_cache
from qlora_fsdp.common.text import plural
from qlora_fsdp.config.schema import DEFAULT_CACHE_FOLDER, DataConfig
from qlora_fsdp.data.batch import collate, micro_batch_indices
from qlora_fsdp.data.cleaning.row_hashes import read_kept
from qlora_fsdp.data.prefetch import prefetch
from qlora_fsdp.data.sequences import Indices, Rows, Sequences
from qlora_fsdp.data.split import BatchSplit
from qlora_fsdp.model.tasks.policy_lm import PolicyLM
from qlora_fsdp.model.tasks.preference import PreferenceLM
from qlora_fsdp.records.run_folder import log
from qlora_fsdp.runtime.fsdp_state import free_gathered
from qlora_fsdp.runtime.hardware import dtype_name
from qlora_fsdp.runtime.processes import Processes
from qlora_fsdp.training.capture.passes import place
from qlora_fsdp.training.prepare import Prepared

NOT_COMPUTED = ("_name_or_path", "transformers_version")  # what a model's config says that no logits depend on
Found = NDArray[np.float32]  # [num_rows, 2], as `Batch.reference` has them; NaN: not computed


class Use(NamedTuple):
    """Sequences that pass through the model together, in this order: of a step, of an evaluation, or a micro-batch."""

    data: Sequences
    indices: Indices

    def rows(self) -> Indices:
        """The rows of the sequences, in their order."""
        none = np.zeros(0, np.int64)
        return np.concatenate([none, *(self.data.row_ids_of(int(index)) for index in self.indices)])


def add_reference(prepared: Prepared, processes: Processes) -> Prepared:
    """Give the data of a run the reference's log-probabilities, if it wants them beforehand. Collective.

    Args:
        prepared: a run whose model is loaded and sharded, and not yet trained: its adapter is as it starts.
        processes: all ranks take part.
    """
    settings = prepared.spec.modules.task.preference
    model = prepared.model
    data = prepared.data
    if isinstance(model, PolicyLM) and prepared.start is not None and model.settings.beta > 0:
        model.freeze_start(keeps_copy=True)
    if not isinstance(model, PreferenceLM) or not settings.loss.needs_reference:
        return prepared
    if prepared.start is not None:
        model.freeze_start(keeps_copy=not settings.precompute)
    if not settings.precompute:
        return prepared
    train, held_out = data.train, data.eval
    assert isinstance(train, Sequences)
    prepared.peaks.enter("evaluation")
    uses = [Use(train, step) for step in _first_epoch(train, prepared.split, prepared.spec.steps.seed)]
    evaluation = [] if held_out is None else [Use(held_out, np.arange(len(held_out)))]
    if held_out is None or held_out.rows is train.rows:
        found = found_held_out = _find(prepared, model, uses + evaluation, processes)
    else:
        found, found_held_out = (_find(prepared, model, each, processes) for each in (uses, evaluation))
    held_out = None if held_out is None else replace(held_out, reference=found_held_out)
    return replace(prepared, data=replace(data, train=replace(train, reference=found), eval=held_out))


def _first_epoch(train: Sequences, split: BatchSplit, seed: int) -> list[Indices]:
    """The sequences of each step, until all that the run will see were in one."""
    size = split.global_batch_size
    num_steps = -(-min(split.num_sequences, len(train)) // size)
    order = train.order(0, min(num_steps * size, split.num_sequences), seed)
    return np.split(order, range(size, len(order), size))


def _find(prepared: Prepared, model: PreferenceLM, uses: list[Use], processes: Processes) -> Found:
    """The log-probabilities of the rows in use, all of one data set, from the cache as far as it has them."""
    rows = uses[0].data.rows
    file = _cache_file(prepared, rows)
    # Nodes may have caches of their own, and all ranks must compute the same rows.
    kept = _read(file, len(rows.num_targets), prepared.spec.data.settings) if processes.is_main else None
    found: Found = processes.share(kept, Found)
    used = np.unique(np.concatenate([use.rows() for use in uses]))
    num_missing = int(np.isnan(found[used]).any(1).sum())
    if not num_missing:
        log.info(f"Reference: log-probabilities of {plural(len(used), 'row')} found in {file}")
        return found
    started = time.perf_counter()
    _compute(prepared, model, list(_missing(uses, found, prepared.split)), found, processes)
    where = ""
    if file is not None and processes.is_main:
        where = f", kept in {file}" if _write(file, found) else f", not kept: {file.parent} can't be written"
    log.info(
        f"Reference: log-probabilities of {plural(num_missing, 'row')} computed in "
        f"{time.perf_counter() - started:.1f} s{where}"
    )
    return found


def _missing(uses: list[Use], found: Found, split: BatchSplit) -> Iterator[list[Use]]:
    """The micro-batches, one of each rank, that hold a row which `found` lacks.

    They are those of training, to the last token of padding: matrix products of other shapes round in another way, and
    attention takes one kernel for many short rows and another one for few long ones.
    """
    is_missing = np.isnan(found).max(1)
    for use in uses:
        options = {"num_ranks": split.num_groups, "micro_batch_size": split.micro_batch_size}
        by_rank = [micro_batch_indices(use.indices, rank=rank, **options) for rank in range(split.num_groups)]
        for together in zip(*by_rank, strict=True):
            of_ranks = [Use(use.data, indices) for indices in together]
            rows = np.concatenate([own.rows() for own in of_ranks])
            if is_missing[rows].any():
                is_missing[rows] = False
                yield of_ranks


@torch.no_grad()
def _compute(
    prepared: Prepared, model: PreferenceLM, micro_batches: list[list[Use]], found: Found, processes: Processes
) -> None:
    """Fill in what `found` lacks of the rows of these micro-batches. Ranks share the work. Collective."""
    mine, size = [of_ranks[processes.rank] for of_ranks in micro_batches], prepared.split.micro_batch_size
    made = (collate(own.data, own.indices, micro_batch_size=size) for own in mine)
    deterministic = prepared.spec.steps.deterministic
    with closing(prefetch(made)) as batches:
        values = [model.reference_of(place(batch, processes.device, deterministic)) for batch in batches]
    free_gathered(model)
    of_rows = [use.rows() for use in mine]
    own = [(rows, value[: len(rows)].cpu().numpy()) for rows, value in zip(of_rows, values, strict=True)]
    for rows, computed in (part for parts in processes.gather(own, list[tuple[Indices, Found]]) for part in parts):
        found[rows] = np.where(np.isnan(found[rows]), computed, found[rows])


def _cache_file(prepared: Prepared, rows: Rows) -> Path | None:
    """The cache file, named by all that its values depend on; None if base or data can't be identified."""
    modules, data = prepared.spec.modules, prepared.spec.data
    if prepared.base is None or not rows.key:
        return None
    quant = [str(value) for value in (*vars(modules.quant).values(), modules.compute.matmul)]
    tokens = list(prepared.assembled.spec.added_tokens)
    start = None if prepared.start is None else [prepared.start.digest, str(modules.lora)]
    shape = prepared.assembled.meta.config.to_dict()  # of the model, with scaled positions
    identity = [
        5,  # how they are computed, to which values of before do not belong
        prepared.base,
        {key: str(value) for key, value in shape.items() if key not in NOT_COMPUTED},
        start,
        quant,
        dtype_name(prepared.assembled.dtype),
        tokens,
        rows.key,
        rows.num_answers,
        data.max_length,  # to which prompts with other answers are cut
    ]
    name = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:32]
    return find_cache(data.settings.cache_folder, DEFAULT_CACHE_FOLDER) / f"reference-{name}.npy"


def _read(file: Path | None, num_rows: int, data: DataConfig) -> Found:
    """Read the values of a cache file; all are NaN if there is no such file, or one for other rows."""
    found = read_kept(file, data)
    if found is not None and found.shape == (num_rows, 2) and found.dtype == np.float32:
        return np.asarray(found, np.float32)
    return np.full((num_rows, 2), np.nan, dtype=np.float32)


def _write(file: Path, found: Found) -> bool:
    """Keep log-probabilities for later runs. A run goes on where that fails: it has them."""
    try:
        with replacing(file) as temporary, temporary.open("wb") as stream:
            np.save(stream, found)
    except OSError:
        return False
    return True
