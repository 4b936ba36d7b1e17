"""One source of rows, tokenized into the cache by one process per node, and loaded from there by every rank."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import numpy as np
from filelock import FileLock
from transformers import PreTrainedTokenizerBase

from qlora_fsdp.common.cache_folder import check_owner, close_to_others, find_cache, lock_mode, open_cache
from qlora_fsdp.common.errors import DataError
from qlora_fsdp.common.files import fresh_folder, remove, remove_leftovers
from qlora_fsdp.config.data_sets import slice_rows
from qlora_fsdp.config.schema import BadRows, Config, TaskName
from qlora_fsdp.data.answers import wrap_answers
from qlora_fsdp.data.cache import check_targets, fingerprint, load_entry, write_entry
from qlora_fsdp.data.counts import ReadReport
from qlora_fsdp.data.label_counts import label_width
from qlora_fsdp.data.labels import LabelledRowTokenizer, check_lists
from qlora_fsdp.data.preferences import PreferenceRowTokenizer
from qlora_fsdp.data.read import Paths, Source, find_source, name_setting, read_rows
from qlora_fsdp.data.row import TOO_LONG
from qlora_fsdp.data.sequences import Rows
from qlora_fsdp.data.tokenize import FEATURES, RowTokenizer

DEFAULT_CACHE_FOLDER = "~/.cache/qlora_fsdp/data"
# One process tokenizes this much sooner than more processes have started.
ROWS_A_PROCESS = 2_000
BYTES_A_PROCESS = 4 * 2**20
MAX_PROCESSES = 8
ROWS_A_BATCH = 100  # rows may be whole books, and a batch is in memory together with its offsets


def tokenize_source(path: Paths, config: Config, tokenizer: PreTrainedTokenizerBase) -> None:
    """Writes the cache entry of a source, unless it is there already.

    Args:
        path: of the source.
        config: its `data` is that of this source (see `config.data_sets`).
        tokenizer: the result of `load_tokenizer`, with new tokens added.

    Raises:
        DataError: the source can't be read, has no usable row, or the cache folder can't be written.
    """
    source = find_source(path, config.data, config.task)
    entry = _entry_folder(source, config, tokenizer)
    try:
        if _is_whole(entry, config):  # also where the folder may only be read
            return
        folder = open_cache(config.data.cache_folder, DEFAULT_CACHE_FOLDER)
        lock = FileLock(entry.with_suffix(".lock"), mode=lock_mode(folder))
        with lock:  # other runs, and nodes that share the folder, wait for the first
            if not _is_whole(entry, config):
                _tokenize_into(entry, path, source, config, tokenizer)
    except OSError as error:
        raise DataError(
            f"data.cache_folder={entry.parent} can't be used: {error}. Set data.cache_folder to a folder that can be"
            " written and has room."
        ) from error


def load_source(
    path: Paths, config: Config, tokenizer: PreTrainedTokenizerBase, vocab_size: int
) -> tuple[Rows, ReadReport]:
    """The rows of a source that `tokenize_source` has tokenized, mapped into memory.

    Raises:
        DataError: the cache entry can't be read, has tokens that the model does not know, or targets or labels that
            nothing can be learned from.
    """
    source = find_source(path, config.data, config.task)
    entry = _entry_folder(source, config, tokenizer)
    try:
        check_owner(entry, config.data.cache_folder)
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
    if config.task.name is TaskName.causal_lm:
        check_targets(rows, source.path)
    wrapped = wrap_answers(rows, rows.labels, config, source.path)
    num_used = len(wrapped.num_targets)
    return wrapped, replace(report, path=source.path, skipped=source.skipped, num_used_rows=num_used)


def row_tokenizer(
    config: Config, tokenizer: PreTrainedTokenizerBase
) -> Callable[[dict[str, list[Any]]], dict[str, list[Any]]]:
    """The function that makes token rows of raw rows, for `datasets.map`."""
    data, max_length = config.data, config.training.max_length
    if config.task.has_labels:
        return LabelledRowTokenizer(tokenizer, config.task, max_length, data.bad_rows, data.columns)
    if config.task.compares_answers:
        has_margin = config.task.name is TaskName.reward
        return PreferenceRowTokenizer(tokenizer, config.has_pairs, max_length, data.bad_rows, data.columns, has_margin)
    return RowTokenizer(
        tokenizer, data.format, data.loss_on, max_length, data.bad_rows, data.columns, data.system_prompt
    )


def _tokenize_into(
    entry: Path, path: Paths, source: Source, config: Config, tokenizer: PreTrainedTokenizerBase
) -> None:
    data = config.data
    remove_leftovers(entry)
    with fresh_folder(entry) as temporary:
        raw = read_rows(source, temporary / "raw.arrow")
        num_bytes = raw.data.nbytes
        if source.hub is None and "[" in data.split:  # of hub data sets, `datasets` has taken them already
            raw = _take_split(raw, source, data.split)
            num_bytes = num_bytes * len(raw) // max(1, raw.data.num_rows)
        if data.max_rows is not None and data.max_rows < len(raw):
            chosen = np.random.default_rng(config.row_seed).permutation(len(raw))[: data.max_rows]
            num_bytes = num_bytes * data.max_rows // len(raw)
            raw = raw.select(np.sort(chosen))
        if config.task.has_labels:
            check_lists(((row["place"], row["row"]) for row in raw), config.task, data.columns)
        tokenized = raw.map(
            row_tokenizer(config, tokenizer),
            batched=True,
            batch_size=ROWS_A_BATCH,
            remove_columns=raw.column_names,
            features=FEATURES,
            num_proc=_num_processes(raw, num_bytes, data.num_proc),
            cache_file_name=str(temporary / "tokenized.arrow"),
            new_fingerprint=entry.name,  # otherwise the tokenizer is pickled and hashed to find one
            desc=f"Tokenizing {Path(source.path).name}",
        )
        finished = temporary / "finished"
        finished.mkdir()
        read = ReadReport(source.path, len(raw), 0, 0, -1, (), _width(config))
        written = write_entry(finished, read, tokenized, config.task.compares_answers)
        _check(replace(written, num_used_rows=written.num_used_rows // (2 if config.has_pairs else 1)), path, config)
        close_to_others(finished, data.cache_folder, [Path(file.path) for file in source.files if file.remote is None])
        remove(entry)  # it exists only if it is not whole
        finished.rename(entry)


def _take_split(raw: datasets.Dataset, source: Source, split: str) -> datasets.Dataset:
    """The rows that a split such as train[:5000] asks for.

    Raises:
        DataError: these are none.
    """
    taken = slice_rows(split, len(raw))
    if len(raw) and not taken:
        raise DataError(f"data.split={split} takes none of the {len(raw):,} rows of {source.path}. Set it to others.")
    return raw.select(taken)


def _num_processes(raw: datasets.Dataset, num_bytes: int, wanted: int | None) -> int | None:
    """How many processes tokenize the rows; None: this process does. Few rows count too, if they are long."""
    if len(raw) < 2 or (len(raw) <= ROWS_A_PROCESS and num_bytes <= BYTES_A_PROCESS):
        return None
    return min(wanted or min(MAX_PROCESSES, len(os.sched_getaffinity(0))), len(raw))


def _width(config: Config) -> int:
    """Numbers per label; 0 without labels."""
    if config.task.compares_answers:  # a label or a margin
        return 0 if config.has_pairs and config.task.name is TaskName.preference else 1
    return label_width(config.task) if config.task.has_labels else 0


def _check(report: ReadReport, path: Paths, config: Config) -> None:
    """Refuses a source that has bad rows where data.bad_rows=error, or that has no usable row."""
    if report.problems and config.data.bad_rows is BadRows.error:
        raise DataError(
            f"data.bad_rows=error, and {report}\nRepair these rows, or set data.bad_rows=skip"
            + (" or truncate." if any(p.kind == TOO_LONG for p in report.problems) else ".")
        )
    if report.num_used_rows == 0:
        what = f"{report}" if report.num_rows else f"{report.path} has no rows"
        where = name_setting(path, config.data)
        more = " or task.labels" if config.task.has_labels else " or training.max_length"
        if config.task.name is TaskName.causal_lm:
            more = ", data.format, data.loss_on or training.max_length"
        raise DataError(f"There is no usable row. {what}\nRepair the rows, or set {where}, data.columns{more}.")


def _is_whole(entry: Path, config: Config) -> bool:
    """Whether an entry is there and can be read.

    Raises:
        OSError: it is another user's.
    """
    try:
        load_entry(entry)
    except (OSError, ValueError, KeyError, TypeError):
        return False
    check_owner(entry, config.data.cache_folder)
    return True


def _entry_folder(source: Source, config: Config, tokenizer: PreTrainedTokenizerBase) -> Path:
    """The folder of the source's cache entry, named by everything that its tokens depend on."""
    data = config.data
    form: tuple[Any, ...] = (config.task.name.value, config.task.problem_type.value, config.task.labels)
    if config.task.compares_answers:
        form = (config.task.name.value, config.has_pairs)
    key = fingerprint(
        tokenizer,
        source.identity,
        data.format.value,
        data.loss_on.value,
        data.bad_rows.value,
        config.training.max_length,
        data.max_rows,
        config.row_seed if data.max_rows is not None else None,
        form if config.task.name is not TaskName.causal_lm else None,
        *([data.columns] if data.columns else []),  # without them a key is what it was before they existed
        *(["split", data.split] if source.hub is None and "[" in data.split else []),
        *(["system", data.system_prompt] if data.system_prompt else []),
    )
    return find_cache(data.cache_folder, DEFAULT_CACHE_FOLDER) / key
