"""The data of a run: one process per node tokenizes every source into the cache, then every rank opens the sequences.

A source is a file, a folder or a hub data set: `data.path`, each data set of `data.mix`, or `data.eval_path`. Data that
is streamed (data.streaming) is opened by `streams/stream.py` instead.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Generic, TypeVar

import numpy as np
from transformers import PreTrainedTokenizerBase

from qlora_fsdp.common.errors import DataError
from qlora_fsdp.config.data_sets import mixed_sets, settings_for, settings_for_evaluation
from qlora_fsdp.config.schema import DataConfig, DataFormat
from qlora_fsdp.config.settings import show
from qlora_fsdp.config.specs import DataSpec
from qlora_fsdp.data.answers import check_judged, wrap_answers
from qlora_fsdp.data.cleaning.clean import clean_rows, compare_with_held_out
from qlora_fsdp.data.cleaning.row_hashes import hash_rows
from qlora_fsdp.data.counts import DataReport, MixPart, ReadReport
from qlora_fsdp.data.labels import count_labels, doubt_labels
from qlora_fsdp.data.mix import MAX_ROWS, MixedRows, count_rows, raw_rows_of, repeat_rows
from qlora_fsdp.data.notes import note_mistakes
from qlora_fsdp.data.read import Paths, training_paths
from qlora_fsdp.data.sequences import (
    Indices,
    RandomRows,
    Rows,
    Sequences,
    SequenceSettings,
    TrainingData,
    make_sequences,
)
from qlora_fsdp.data.together import check_same_counts, failing_together
from qlora_fsdp.data.tokenize_source import load_source, tokenize_source
from qlora_fsdp.runtime.processes import Processes

NUM_RANDOM_ROWS = 65_536  # rows of data.format=random if data.max_rows is null

Train = TypeVar("Train", bound=TrainingData, covariant=True)


@dataclass(frozen=True)
class PreparedData(Generic[Train]):
    """The data of a run.

    Attributes:
        train: the sequences to train on; `StreamedSequences` with data.streaming.
        eval: the held-out sequences, if any were asked for.
        report: counts for rank 0 to log. For a stream they are those of its first window.
    """

    train: Train
    eval: Sequences | None
    report: DataReport


def prepare_data(
    spec: DataSpec,
    tokenizer: PreTrainedTokenizerBase,
    processes: Processes,
    vocab_size: int,
    *,
    for_training: bool = True,
) -> PreparedData[Sequences]:
    """Tokenizes the data unless it is in the cache already, and opens it. Every rank calls this.

    One rank per node writes the cache, and the others wait for it. If one rank can't prepare its data, all ranks stop,
    even if nodes do not share the cache folder.

    Args:
        spec: which rows, and what becomes of them.
        tokenizer: the result of `load_tokenizer`, with new tokens added.
        processes: all ranks take part.
        vocab_size: number of tokens that the model's embeddings know, new ones included. Every id must be below it.
        for_training: whether the data is cleaned (`clean`). Data that a model is only evaluated on stays as it is.

    Raises:
        DataError: the data can't be used; raised on every rank.
    """
    notes = note_mistakes(tokenizer, spec)
    if spec.settings.format is not DataFormat.random:
        _tokenize_sources(_sources(spec), tokenizer, processes)
    prepared = _open_first(lambda: _open(spec, tokenizer, vocab_size, for_training), processes)
    check_same_counts(prepared.report, processes)
    return replace(prepared, report=replace(prepared.report, notes=(*notes, *prepared.report.notes)))


def prepare_held_out(
    spec: DataSpec, tokenizer: PreTrainedTokenizerBase, processes: Processes, vocab_size: int
) -> Sequences:
    """Like `prepare_data`, but only for the held-out data in `data.eval_path`, which must be set."""
    path = spec.settings.eval_path
    assert path is not None
    own = _for_evaluation(spec)
    _tokenize_sources([(path, own)], tokenizer, processes)
    rows, _ = load_source(path, own, tokenizer, vocab_size)
    settings = SequenceSettings.of(spec, tokenizer)
    return make_sequences(rows, np.arange(len(rows.lengths)), settings)


def count_data(sources: Iterable[ReadReport], train: Sequences, held_out: Sequences | None) -> DataReport:
    """The counts of prepared data, for its report. `sources` are the reports of reading, one per data set."""
    num_tokens = int(train.token_counts.sum())
    return DataReport(
        sources=tuple(sources),
        num_sequences=len(train),
        num_rows=len(train.row_ids),
        num_tokens=num_tokens,
        num_target_tokens=int(train.num_targets.sum()),
        packing_efficiency=num_tokens / (len(train) * train.max_length),
        num_eval_sequences=len(held_out) if held_out else 0,
        num_eval_target_tokens=int(held_out.num_targets.sum()) if held_out else 0,
        num_answers=train.num_answers,
    )


def _sources(spec: DataSpec) -> list[tuple[Paths, DataSpec]]:
    """All sources, each with its own settings: the training data, then `data.eval_path` if it is set."""
    paths = training_paths(spec.settings)
    if not paths:
        raise DataError(
            "data.path is not set. Set it to a file, a folder or a hub data set, or set data.format=random."
        )
    sources = [(path, replace(spec, settings=settings_for(path, spec.settings))) for path in paths]
    held_out = spec.settings.eval_path
    return [*sources, *([(held_out, _for_evaluation(spec))] if held_out is not None else [])]


def _for_evaluation(spec: DataSpec) -> DataSpec:
    return replace(spec, settings=settings_for_evaluation(spec.settings))


def _tokenize_sources(
    sources: Iterable[tuple[Paths, DataSpec]], tokenizer: PreTrainedTokenizerBase, processes: Processes
) -> None:
    """Tokenizes sources into the cache, on one rank per node, and waits for all ranks."""
    with failing_together(processes):
        for path, own in sources if processes.is_local_main else ():
            tokenize_source(path, own, tokenizer)


def _open_first(open_data: Callable[[], PreparedData[Sequences]], processes: Processes) -> PreparedData[Sequences]:
    """Opens the data first on one rank per node, which caches what cleaning finds; the others then read that."""
    with failing_together(processes):
        prepared = open_data() if processes.is_local_main else None
    return prepared or open_data()


def _open(
    spec: DataSpec, tokenizer: PreTrainedTokenizerBase, vocab_size: int, for_training: bool
) -> PreparedData[Sequences]:
    """Opens the tokenized rows, cleans them, holds some out for evaluation, mixes data sets, and makes sequences."""
    data = spec.settings
    settings = SequenceSettings.of(spec, tokenizer)
    train_rows, eval_rows, sources = _load_rows(spec, tokenizer, vocab_size)
    starts = train_rows.starts if isinstance(train_rows, MixedRows) else [0, len(train_rows.lengths)]
    train_ids = [np.arange(first, last) for first, last in pairwise(starts)]  # one array per data set
    names = [report.path for report in sources[: len(train_ids)]]

    # Clean.
    cleaned = clean_rows(train_rows, train_ids, names, data) if for_training and sources else None
    cleanings = () if cleaned is None else cleaned.cleanings
    train_ids = train_ids if cleaned is None else cleaned.parts

    # Hold rows out, and compare them with those to train on.
    eval_ids: Indices | None = None
    if eval_rows is not None:
        eval_ids = np.arange(len(eval_rows.lengths))
    elif data.eval_fraction > 0:
        eval_rows = train_rows
        raw_rows = raw_rows_of(train_rows)
        held_out = [_hold_out(ids, raw_rows, data.eval_fraction, spec.row_seed) for ids in train_ids]
        train_ids, eval_ids = [kept for kept, _ in held_out], np.concatenate([held for _, held in held_out])
    evaluation = None
    if eval_rows is not None and eval_ids is not None:
        evaluation = make_sequences(eval_rows, eval_ids, settings)
        if cleaned is not None:
            hashes = cleaned.hashes if eval_rows is train_rows else hash_rows(eval_rows, data)
            train_ids, leaked = compare_with_held_out(train_ids, cleaned.hashes, hashes[eval_ids], names, data)
            cleanings += leaked

    if for_training and train_rows.num_answers == 1:
        check_judged(train_rows, np.concatenate(train_ids), names)

    # Mix data sets, and make sequences.
    mix: tuple[MixPart, ...] = ()
    if data.mix:
        train_ids, mix = _mix(train_rows, train_ids, data, spec.row_seed)
    train = make_sequences(train_rows, np.concatenate(train_ids), settings)
    report = count_data(sources, train, evaluation)
    labels = count_labels(train.labels_of(np.arange(len(train))), spec.task.settings) if train.has_labels else {}
    notes = (*report.notes, *doubt_labels(labels))
    report = replace(report, label_counts=labels, mix=mix, cleanings=cleanings, notes=notes)
    return PreparedData(train, evaluation, report)


def _load_rows(
    spec: DataSpec, tokenizer: PreTrainedTokenizerBase, vocab_size: int
) -> tuple[Rows, Rows | None, list[ReadReport]]:
    """The rows of all training data, those of `data.eval_path` if it is set, and a report of each source."""
    if spec.settings.format is DataFormat.random:
        return _random_rows(spec, vocab_size), None, []
    loaded = [load_source(path, own, tokenizer, vocab_size) for path, own in _sources(spec)]
    sources = [report for _, report in loaded]
    eval_rows = None if spec.settings.eval_path is None else loaded.pop()[0]
    train_rows = MixedRows(tuple(rows for rows, _ in loaded)) if spec.settings.mix else loaded[0][0]
    return train_rows, eval_rows, sources


def _random_rows(spec: DataSpec, vocab_size: int) -> Rows:
    """Random tokens; pairs of them, or labels in turn, where answers are compared."""
    num_rows = (spec.settings.max_rows or NUM_RANDOM_ROWS) * (2 if spec.task.has_pairs else 1)
    rows = RandomRows(num_rows, spec.max_length, vocab_size, spec.seed)
    return wrap_answers(rows, np.arange(num_rows)[:, None] % 2, spec)


def _mix(rows: Rows, parts: list[Indices], data: DataConfig, seed: int) -> tuple[list[Indices], tuple[MixPart, ...]]:
    """Repeats or draws rows so that each data set has the share of an epoch that its weight asks for.

    `parts` has the row ids of each data set, and `seed` decides which rows are repeated once more.

    Returns:
        The row ids of an epoch, one array per data set, and counts of each data set for the report.

    Raises:
        DataError: an epoch would have more than `MAX_ROWS` rows.
    """
    weights = {path: own.weight for path, own in mixed_sets(data).items()}
    row_tokens = rows.part_lengths.sum(1)
    lengths = [float(row_tokens[ids].mean()) for ids in parts]
    num_rows = [len(ids) for ids in parts]
    counts = count_rows(num_rows, list(weights.values()), data.mix_until, lengths)
    if sum(counts) > MAX_ROWS:
        times, path = max((count / number, path) for count, number, path in zip(counts, num_rows, weights, strict=True))
        fix = "a smaller data.mix_until" if isinstance(data.mix_until, int) else "data.mix_until=shortest"
        raise DataError(
            f"{show('data.mix', data.mix)} gives an epoch {sum(counts):,} rows, {path} {times:,.0f} times, and at most "
            f"{MAX_ROWS:,} can be listed. Set weights that are nearer to one another, or {fix}."
        )
    used = [repeat_rows(ids, count, seed, n) for n, (ids, count) in enumerate(zip(parts, counts, strict=True))]
    num_tokens = [int(row_tokens[ids].sum()) for ids in used]
    shares = [
        MixPart(path, len(ids), count, count / sum(counts), tokens / sum(num_tokens))
        for path, ids, count, tokens in zip(weights, parts, counts, num_tokens, strict=True)
    ]
    return used, tuple(shares)


def _hold_out(row_ids: Indices, raw_rows: Indices, fraction: float, seed: int) -> tuple[Indices, Indices]:
    """Splits rows into those to train on and those to evaluate on, both in the order of the file.

    All that was made of one raw row (`raw_rows` has its number for each row), such as the pieces of a long text or the
    pairs of a ranked list, is on one side. So fewer rows may be held out than the fraction says, or, where every raw
    row became more, those of the one that became fewest.
    """
    _, raw_row, num_made = np.unique(raw_rows[row_ids], return_inverse=True, return_counts=True)
    num_eval = max(1, math.floor(len(row_ids) * fraction))
    shuffled = np.random.default_rng(seed).permutation(len(num_made))
    fitting = shuffled[num_made[shuffled] <= num_eval]
    held = fitting[: np.searchsorted(np.cumsum(num_made[fitting]), num_eval, side="right")]
    is_held = np.isin(raw_row, held if len(held) else num_made.argmin())
    if is_held.all():
        of_one = ", all of one row of the data," if len(num_made) < len(row_ids) else ""
        raise DataError(
            f"data.eval_fraction={fraction} of {len(row_ids)} usable rows{of_one} leaves none to train on. Set it"
            " lower, or set data.eval_path."
        )
    return row_ids[~is_held], row_ids[is_held]
