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
from qlora_fsdp.config.schema import BadRows, Config, TaskName
from qlora_fsdp.data.cache import TokenizedRows, fingerprint, load_entry, write_entry
from qlora_fsdp.data.counts import ReadReport
from qlora_fsdp.data.labels import LabelledRowTokenizer, check_lists, label_width
from qlora_fsdp.data.read import Source, find_source, name_setting, read_rows, training_paths
from qlora_fsdp.data.row import TOO_LONG
from qlora_fsdp.data.tokenize import FEATURES, RowTokenizer

DEFAULT_CACHE_FOLDER = "~/.cache/qlora_fsdp/data"
# One process tokenizes this much sooner than more processes have started.
ROWS_A_PROCESS = 2_000
BYTES_A_PROCESS = 4 * 2**20
MAX_PROCESSES = 8
ROWS_A_BATCH = 100  # rows may be whole books, and a batch is in memory together with its offsets


def tokenize_source(path: str, config: Config, tokenizer: PreTrainedTokenizerBase) -> None:
    """Writes the cache entry of a source, unless it is there already.

    Raises:
        DataError: the source can't be read, has no usable row, or the cache folder can't be written.
    """
    source = find_source(path, config.data)
    entry = _entry_folder(source, config, tokenizer)
    try:
        if _is_whole(entry, config):  # also where the folder may only be read
            return
        folder = open_cache(config.data.cache_folder, DEFAULT_CACHE_FOLDER)
        lock = FileLock(entry.with_suffix(".lock"), mode=lock_mode(folder))
        with lock:  # other runs, and nodes that share the folder, wait for the first
            if not _is_whole(entry, config):
                _tokenize_into(entry, source, config, tokenizer)
    except OSError as error:
        raise DataError(
            f"data.cache_folder={entry.parent} can't be used: {error}. Set data.cache_folder to a folder that can be"
            " written and has room."
        ) from error


def load_source(
    path: str, config: Config, tokenizer: PreTrainedTokenizerBase, vocab_size: int
) -> tuple[TokenizedRows, ReadReport]:
    """The rows of a source that `tokenize_source` has tokenized, mapped into memory.

    Raises:
        DataError: the cache entry can't be read, or has tokens that the model does not know.
    """
    source = find_source(path, config.data)
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
    return rows, replace(report, skipped=source.skipped)


def row_tokenizer(
    config: Config, tokenizer: PreTrainedTokenizerBase
) -> Callable[[dict[str, list[Any]]], dict[str, list[Any]]]:
    """The function that makes token rows of raw rows, for `datasets.map`."""
    data, max_length = config.data, config.training.max_length
    if _has_labels(config):
        return LabelledRowTokenizer(tokenizer, config.task, max_length, data.bad_rows)
    return RowTokenizer(tokenizer, data.format, data.loss_on, max_length, data.bad_rows)


def _tokenize_into(entry: Path, source: Source, config: Config, tokenizer: PreTrainedTokenizerBase) -> None:
    data = config.data
    remove_leftovers(entry)
    with fresh_folder(entry) as temporary:
        raw = read_rows(source, temporary / "raw.arrow")
        num_bytes = raw.data.nbytes
        is_training_data = source.path in training_paths(data)
        if is_training_data and data.max_rows is not None and data.max_rows < len(raw):
            chosen = np.random.default_rng(config.training.seed).permutation(len(raw))[: data.max_rows]
            num_bytes = num_bytes * data.max_rows // len(raw)
            raw = raw.select(np.sort(chosen))
        if _has_labels(config):
            check_lists(((row["place"], row["row"]) for row in raw), config.task)
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
        width = label_width(config.task) if _has_labels(config) else 0
        _check(write_entry(finished, source.path, len(raw), tokenized, width), config)
        close_to_others(finished, data.cache_folder, source.files)
        remove(entry)  # it exists only if it is not whole
        finished.rename(entry)


def _num_processes(raw: datasets.Dataset, num_bytes: int, wanted: int | None) -> int | None:
    """How many processes tokenize the rows; None: this process does. Few rows count too, if they are long."""
    if len(raw) < 2 or (len(raw) <= ROWS_A_PROCESS and num_bytes <= BYTES_A_PROCESS):
        return None
    return min(wanted or min(MAX_PROCESSES, len(os.sched_getaffinity(0))), len(raw))


def _has_labels(config: Config) -> bool:
    return config.task.name is not TaskName.causal_lm


def _check(report: ReadReport, config: Config) -> None:
    """Refuses a source that has bad rows where data.bad_rows=error, or that has no usable row."""
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
    return find_cache(data.cache_folder, DEFAULT_CACHE_FOLDER) / key
