"""The stages in order: once a node up to the cache, then on every rank from the cache to sequences."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, Generic, TypeVar

import numpy as np
from filelock import FileLock
from transformers import PreTrainedTokenizerBase

from qlora_fsdp.common.errors import DataError
from qlora_fsdp.config.schema import BadRows, Config, DataConfig, DataFormat, TaskName
from qlora_fsdp.data.cache import TokenizedRows, fingerprint, load_entry, write_entry
from qlora_fsdp.data.counts import DataReport, MixPart, ReadReport
from qlora_fsdp.data.labels import LabelledRowTokenizer, check_lists, count_labels, label_width
from qlora_fsdp.data.mix import MixedRows, count_rows, repeat_rows
from qlora_fsdp.data.read import Source, find_source, name_setting, read_rows
from qlora_fsdp.data.row import TOO_LONG
from qlora_fsdp.data.sequences import Indices, RandomRows, Rows, Sequences, TrainingData, make_sequences
from qlora_fsdp.data.tokenize import FEATURES, RowTokenizer

DEFAULT_CACHE_FOLDER = "~/.cache/qlora_fsdp/data"
NUM_RANDOM_ROWS = 65_536  # of format=random, unless data.max_rows says otherwise
ROWS_A_PROCESS = 2_000  # fewer are tokenized sooner than a process starts
MAX_PROCESSES = 8
ROWS_A_BATCH = 100  # rows may be whole books, and a batch is in memory with its offsets


Train = TypeVar("Train", bound=TrainingData, covariant=True)


@dataclass(frozen=True)
class PreparedData(Generic[Train]):
    """The data of a run.

    Attributes:
        train: sequences to train on; `StreamedSequences` with data.streaming.
        eval: sequences held out, if asked for.
        report: counts, to print on rank 0; of a stream, those of its first window.
    """

    train: Train
    eval: Sequences | None
    report: DataReport


def prepare_data(
    config: Config,
    tokenizer: PreTrainedTokenizerBase,
    *,
    is_main: bool,
    wait: Callable[[str | None], str | None],
    vocab_size: int,
) -> PreparedData[Sequences]:
    """Tokenizes the data where it is not in the cache yet, and opens it. Every rank calls this.

    Args:
        config: `data`, `training.max_length`, `training.packing` and `training.seed` are used.
        tokenizer: of `load_tokenizer`.
        is_main: this rank prepares the cache: one rank a node. The others wait for it.
        wait: a barrier that carries an error: called once by every rank with what went wrong there, or None, it
            returns the first error of any rank, or None. So all ranks stop if one can't prepare its data, also where
            nodes do not share the cache folder.
        vocab_size: of the model.

    Raises:
        DataError: the data can't be used; on every rank.
    """
    if config.data.format is not DataFormat.random:
        _prepare_sources(_paths(config), config, tokenizer, is_main, wait)
    return _open(config, tokenizer, vocab_size)


def prepare_held_out(
    config: Config,
    tokenizer: PreTrainedTokenizerBase,
    *,
    is_main: bool,
    wait: Callable[[str | None], str | None],
    vocab_size: int,
) -> Sequences:
    """`data.eval_path` alone, which is set; as `prepare_data` otherwise."""
    path = config.data.eval_path
    assert path is not None
    _prepare_sources([path], config, tokenizer, is_main, wait)
    rows, _ = _load_source(path, config, tokenizer, vocab_size)
    return _make_sequences(rows, np.arange(len(rows.lengths)), config, tokenizer)


def _prepare_sources(
    paths: Iterable[str],
    config: Config,
    tokenizer: PreTrainedTokenizerBase,
    is_main: bool,
    wait: Callable[[str | None], str | None],
) -> None:
    failure: Exception | None = None
    if is_main:
        try:
            for path in paths:
                _prepare_source(path, config, tokenizer)
        except Exception as error:
            failure = error
    raise_on_all(failure, wait)


def raise_on_all(failure: Exception | None, wait: Callable[[str | None], str | None]) -> None:
    """What went wrong here, or on another rank; every rank calls this.

    Args:
        failure: of this rank.
        wait: as of `prepare_data`.

    Raises:
        DataError: of another rank; this rank's own is raised as it is.
    """
    text = wait(None if failure is None else str(failure) or repr(failure))
    if failure is not None:
        raise failure
    if text is not None:
        raise DataError(text)


def _open(config: Config, tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> PreparedData[Sequences]:
    data, training = config.data, config.training

    def sequences(rows: Rows, row_ids: Indices) -> Sequences:
        return _make_sequences(rows, row_ids, config, tokenizer)

    sources: list[ReadReport] = []
    train_rows: Rows
    eval_rows: TokenizedRows | None = None
    if data.format is DataFormat.random:
        train_rows = RandomRows(data.max_rows or NUM_RANDOM_ROWS, training.max_length, vocab_size, training.seed)
    else:
        loaded = [_load_source(path, config, tokenizer, vocab_size) for path in _paths(config)]
        sources = [report for _, report in loaded]
        if data.eval_path is not None:
            eval_rows = loaded.pop()[0]
        train_rows = MixedRows(tuple(rows for rows, _ in loaded)) if data.mix else loaded[0][0]

    starts = train_rows.starts if isinstance(train_rows, MixedRows) else [0, len(train_rows.lengths)]
    train_ids = [np.arange(first, last) for first, last in pairwise(starts)]  # by data set
    evaluation: Sequences | None = None
    if eval_rows is not None:
        evaluation = sequences(eval_rows, np.arange(len(eval_rows.lengths)))
    elif data.eval_fraction > 0:
        held_out = [_hold_out(ids, data.eval_fraction, training.seed) for ids in train_ids]
        train_ids = [kept for kept, _ in held_out]
        evaluation = sequences(train_rows, np.concatenate([held for _, held in held_out]))
    mix: tuple[MixPart, ...] = ()
    if data.mix:
        train_ids, mix = _mix(train_rows, train_ids, data.mix, training.seed)
    train = sequences(train_rows, np.concatenate(train_ids))
    report = count_data(sources, train, evaluation)
    labels = count_labels(train.labels_of(np.arange(len(train))), config.task) if train.has_labels else {}
    return PreparedData(train, evaluation, replace(report, label_counts=labels, mix=mix))


def _make_sequences(rows: Rows, row_ids: Indices, config: Config, tokenizer: PreTrainedTokenizerBase) -> Sequences:
    training = config.training
    assert isinstance(tokenizer.pad_token_id, int)
    return make_sequences(
        rows,
        row_ids,
        max_length=training.max_length,
        pad_token_id=tokenizer.pad_token_id,
        packing=training.packing,
        seed=training.seed,
    )


def count_data(sources: Iterable[ReadReport], train: Sequences, held_out: Sequences | None) -> DataReport:
    """The counts of prepared data."""
    num_tokens = int(train.lengths.sum())
    return DataReport(
        sources=tuple(sources),
        num_sequences=len(train),
        num_rows=len(train.row_ids),
        num_tokens=num_tokens,
        num_target_tokens=int(train.num_targets.sum()),
        packing_efficiency=num_tokens / (len(train) * train.max_length),
        num_eval_sequences=len(held_out) if held_out else 0,
        num_eval_target_tokens=int(held_out.num_targets.sum()) if held_out else 0,
    )


def _mix(
    rows: Rows, parts: list[Indices], weights: dict[str, float], seed: int
) -> tuple[list[Indices], tuple[MixPart, ...]]:
    """The rows of an epoch by data set, and what they make up."""
    counts = count_rows([len(ids) for ids in parts], list(weights.values()))
    used = [repeat_rows(ids, count, seed, n) for n, (ids, count) in enumerate(zip(parts, counts, strict=True))]
    num_tokens = [int(rows.lengths[ids].sum()) for ids in used]
    shares = [
        MixPart(path, len(ids), count, count / sum(counts), tokens / sum(num_tokens))
        for path, ids, count, tokens in zip(weights, parts, counts, num_tokens, strict=True)
    ]
    return used, tuple(shares)


def training_paths(data: DataConfig) -> list[str]:
    """Where the training data is."""
    return list(data.mix) or ([] if data.path is None else [data.path])


def _paths(config: Config) -> list[str]:
    paths = training_paths(config.data)
    if not paths:
        raise DataError(
            "data.path is not set. Set it to a file, a folder or a hub data set, or set data.format=random."
        )
    return [*paths, *([config.data.eval_path] if config.data.eval_path is not None else [])]


def _prepare_source(path: str, config: Config, tokenizer: PreTrainedTokenizerBase) -> None:
    source = find_source(path, config.data)
    entry = _entry_folder(source, config, tokenizer)
    try:
        entry.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(entry.with_suffix(".lock")):  # other runs, and nodes that share the folder, wait for the first
            if not _is_whole(entry):
                _tokenize_into(entry, source, config, tokenizer)
    except OSError as error:
        raise DataError(
            f"data.cache_folder={entry.parent} can't be used: {error}. Set data.cache_folder to a folder that can be"
            " written and has room."
        ) from error


def _tokenize_into(entry: Path, source: Source, config: Config, tokenizer: PreTrainedTokenizerBase) -> None:
    data = config.data
    temporary = Path(mkdtemp(prefix=f"{entry.name}.tmp-", dir=entry.parent))
    try:
        raw = read_rows(source, temporary / "raw.arrow")
        is_training_data = source.path in training_paths(data)
        if is_training_data and data.max_rows is not None and data.max_rows < len(raw):
            chosen = np.random.default_rng(config.training.seed).permutation(len(raw))[: data.max_rows]
            raw = raw.select(np.sort(chosen))
        if _has_labels(config):
            check_lists(((row["place"], row["row"]) for row in raw), config.task)
        num_proc = data.num_proc or min(MAX_PROCESSES, len(os.sched_getaffinity(0)))
        tokenized = raw.map(
            row_tokenizer(config, tokenizer),
            batched=True,
            batch_size=ROWS_A_BATCH,
            remove_columns=raw.column_names,
            features=FEATURES,
            num_proc=num_proc if len(raw) > ROWS_A_PROCESS else None,
            cache_file_name=str(temporary / "tokenized.arrow"),
            new_fingerprint=entry.name,  # else the tokenizer is pickled and hashed to find one
            desc=f"Tokenizing {Path(source.path).name}",
        )
        finished = temporary / "finished"
        finished.mkdir()
        width = label_width(config.task) if _has_labels(config) else 0
        _check(write_entry(finished, source.path, len(raw), tokenized, width), config, tokenizer)
        shutil.rmtree(entry, ignore_errors=True)  # there only if it is not whole
        finished.rename(entry)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def row_tokenizer(
    config: Config, tokenizer: PreTrainedTokenizerBase
) -> Callable[[dict[str, list[Any]]], dict[str, list[Any]]]:
    """What makes token rows of raw ones."""
    data, max_length = config.data, config.training.max_length
    if _has_labels(config):
        return LabelledRowTokenizer(tokenizer, config.task, max_length, data.bad_rows)
    return RowTokenizer(tokenizer, data.format, data.loss_on, max_length, data.bad_rows)


def _has_labels(config: Config) -> bool:
    return config.task.name is not TaskName.causal_lm


def _check(report: ReadReport, config: Config, tokenizer: PreTrainedTokenizerBase) -> None:
    if report.problems and config.data.bad_rows is BadRows.error:
        raise DataError(
            f"data.bad_rows=error, and {report}\nRepair these rows, or set data.bad_rows=skip"
            + (" or truncate." if any(p.kind == TOO_LONG for p in report.problems) else ".")
        )
    if report.num_used_rows == 0:
        what = f"{report}" if report.num_rows else f"{report.path} has no rows"
        where = name_setting(report.path, config.data)
        raise DataError(
            f"There is no usable row. {what}\nRepair the rows, or set "
            + (f"{where} or task.labels." if _has_labels(config) else f"{where}, data.format or data.loss_on.")
        )


def _load_source(
    path: str, config: Config, tokenizer: PreTrainedTokenizerBase, vocab_size: int
) -> tuple[TokenizedRows, ReadReport]:
    entry = _entry_folder(find_source(path, config.data), config, tokenizer)
    try:
        rows, report = load_entry(entry)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"The tokenized data in {entry} can't be read: {error}. Did {path} change while it was tokenized, or is"
            " data.cache_folder local to another host?"
        ) from error
    if report.max_token_id >= vocab_size:
        raise DataError(
            f"{path} has token {report.max_token_id}, but the model has only {vocab_size}: the tokenizer is not this"
            " model's. Set model.tokenizer_path to the tokenizer the model was trained with."
        )
    return rows, report


def _is_whole(entry: Path) -> bool:
    try:
        load_entry(entry)
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return True


def _entry_folder(source: Source, config: Config, tokenizer: PreTrainedTokenizerBase) -> Path:
    data = config.data
    max_rows = data.max_rows if source.path in training_paths(data) else None
    form = (config.task.name.value, config.task.problem_type.value, config.task.labels)
    key = fingerprint(
        tokenizer,
        source.identity,
        data.format.value,
        data.loss_on.value,
        data.bad_rows.value,
        config.training.max_length,
        max_rows,
        config.training.seed if max_rows is not None else None,
        form if _has_labels(config) else None,
    )
    return Path(data.cache_folder or DEFAULT_CACHE_FOLDER).expanduser() / key


def _hold_out(row_ids: Indices, fraction: float, seed: int) -> tuple[Indices, Indices]:
    num_rows = len(row_ids)
    num_eval = max(1, math.floor(num_rows * fraction))
    if num_eval >= num_rows:
        raise DataError(
            f"data.eval_fraction={fraction} of {num_rows} usable rows leaves none to train on. Set it lower, or set"
            " data.eval_path."
        )
    shuffled = np.random.default_rng(seed).permutation(row_ids)
    return np.sort(shuffled[num_eval:]), np.sort(shuffled[:num_eval])
