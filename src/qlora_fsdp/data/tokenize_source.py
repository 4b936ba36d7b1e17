"""One source of rows, tokenized into the cache by one process per node, and loaded from there by every rank.

Rows are copied, those to use are chosen, tokenized shard by shard, and the shards become one entry of the cache. All
that happens in a work folder beside the entry, which is closed to others. It stays when the process ends early: whoever
starts again goes on in it.
"""

from __future__ import annotations

import logging
import os
import re
import stat
import time
from collections.abc import Sequence, Sized
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any

import numpy as np
import pyarrow.compute as pc
from filelock import FileLock
from numpy.typing import NDArray
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from qlora_fsdp.common.errors import DataError
from qlora_fsdp.common.files import remove, write_json
from qlora_fsdp.common.foreign_files import (
    check_owner,
    close_to_others,
    find_cache,
    lock_mode,
    open_cache,
    read_json_object,
)
from qlora_fsdp.common.sizes import next_power_of_two
from qlora_fsdp.common.startup import KEPT
from qlora_fsdp.config.data_sets import slice_rows
from qlora_fsdp.config.schema import DEFAULT_CACHE_FOLDER, BadRows, TaskName, Thoughts
from qlora_fsdp.config.specs import DataSpec
from qlora_fsdp.data.answers import wrap_answers
from qlora_fsdp.data.cache import Entry, find_damage, fingerprint, load_entry, write_entry
from qlora_fsdp.data.counts import ReadReport
from qlora_fsdp.data.cut import CutSettings
from qlora_fsdp.data.label_order import check_label_order
from qlora_fsdp.data.labels import LabelledRowTokenizer, check_lists, label_width
from qlora_fsdp.data.preferences import PreferenceRowTokenizer
from qlora_fsdp.data.read import (
    FIRST_ROWS,
    Paths,
    Source,
    find_source,
    find_unused,
    name_setting,
    note_dropped,
    open_rows,
    read_rows,
)
from qlora_fsdp.data.row import REFUSED, TOO_LONG
from qlora_fsdp.data.sequences import Rows
from qlora_fsdp.data.shards import Shards, find_bounds
from qlora_fsdp.data.tokenize import RowTokenizer
from qlora_fsdp.data.tokenized_rows import check_token_ids, explain_unlearnable
from qlora_fsdp.data.tokenizer import with_template
from qlora_fsdp.data.workers import Tokenize, num_cores

if TYPE_CHECKING:
    import datasets

log = logging.getLogger("qlora_fsdp")

# One process tokenizes this much sooner than more processes have started.
ROWS_A_PROCESS = 2_000
BYTES_A_PROCESS = 4 * 2**20
# Of rows that may not be split, this many tokens are kept whatever training.max_length is, so that runs with other
# lengths find them. Where that is more, the next power of two.
KEPT_TOKENS = 2**17
RAW = "raw.arrow"
PLAN = "plan.json"
MAX_PLAN_BYTES = 2**20
SECONDS_KEPT = 7 * 24 * 3600.0  # what nobody has gone on with
LEFTOVER = re.compile(r"\.[0-9a-f]{32}\..*(parts|tmp)")  # also of versions that went on with nothing


def tokenize_source(path: Paths, spec: DataSpec, tokenizer: PreTrainedTokenizerBase) -> None:
    """Writes the cache entry of a source, unless it is there already.

    Raises:
        DataError: the source can't be read, has no usable row, or the cache folder can't be written.
    """
    source = find_source(path, spec.settings, spec.task.settings)
    tokenizer = with_template(tokenizer, spec.settings)
    folder = _entry_folder(source, spec, tokenizer)
    try:
        entry = _load_whole(folder, spec)
        if entry is None or find_work(folder).exists():  # else the folder need not be writable
            cache = open_cache(spec.settings.cache_folder, DEFAULT_CACHE_FOLDER)
            lock = FileLock(folder.with_suffix(".lock"), mode=lock_mode(cache))
            with lock:  # other runs, and nodes that share the folder, wait for the first
                if _load_whole(folder, spec) is None:
                    remove_abandoned(cache)
                    _tokenize_into(folder, source, spec, tokenizer)
                if find_work(folder).exists():
                    remove(find_work(folder))
            entry = load_entry(folder)
    except OSError as error:
        raise DataError(
            f"data.cache_folder={folder.parent} can't be used: {error}. Set data.cache_folder to a folder that can be"
            f" written and has room. {KEPT}"
        ) from error
    _, report = entry.cut(_cut_settings(spec))
    _check(replace(report, num_used_rows=report.num_used_rows // (2 if spec.task.has_pairs else 1)), path, spec)


def load_source(
    path: Paths, spec: DataSpec, tokenizer: PreTrainedTokenizerBase, vocab_size: int
) -> tuple[Rows, ReadReport]:
    """The rows of a source that `tokenize_source` has tokenized, mapped into memory, and cut to training.max_length.

    Raises:
        DataError: the cache entry can't be read, has tokens that the model does not know, or targets or labels that
            nothing can be learned from.
    """
    source = find_source(path, spec.settings, spec.task.settings)
    tokenizer = with_template(tokenizer, spec.settings)
    folder = _entry_folder(source, spec, tokenizer)
    try:
        check_owner(folder, spec.settings.cache_folder)
        rows, report = load_entry(folder).cut(_cut_settings(spec))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"The tokenized data in {folder} can't be read: {error}. Did {path} change while it was tokenized, or is"
            " data.cache_folder local to another host?"
        ) from error
    check_token_ids(report.max_token_id, vocab_size, source.path)
    if spec.task.name is TaskName.causal_lm:
        reason = explain_unlearnable(rows.is_target, rows.starts, rows.lengths, rows.num_targets, source.path)
        if reason:
            raise DataError(reason)
    wrapped = wrap_answers(rows, rows.labels, spec)
    num_used = len(wrapped.num_targets)
    return wrapped, replace(report, path=source.path, skipped=source.skipped, num_used_rows=num_used)


def text_tokenizer(spec: DataSpec, tokenizer: PreTrainedTokenizerBase) -> RowTokenizer:
    """Make the function that turns batches of raw rows of a language model into token rows."""
    data, max_length = spec.settings, spec.max_length
    return RowTokenizer(
        tokenizer,
        data.format,
        data.loss_on,
        max_length,
        data.bad_rows,
        data.columns,
        data.system_prompt,
        data.thoughts,
    )


def _whole_tokenizer(spec: DataSpec, tokenizer: PreTrainedTokenizerBase) -> Tokenize:
    """The function for rows of any task, which are cut later. Only rows with labels are cut by the tokenizer itself."""
    data, kept = spec.settings, _kept_tokens(spec)
    if spec.task.has_labels:
        return LabelledRowTokenizer(tokenizer, spec.task.settings, spec.max_length, data.bad_rows, data.columns)
    if spec.task.compares_answers:
        has_margin = spec.task.name is TaskName.reward
        return PreferenceRowTokenizer(tokenizer, spec.task.has_pairs, kept, data.columns, has_margin)
    return replace(text_tokenizer(spec, tokenizer), max_length=kept, bad_rows=BadRows.truncate).whole


def _kept_tokens(spec: DataSpec) -> int:
    return max(KEPT_TOKENS, next_power_of_two(spec.max_length))


def _cut_settings(spec: DataSpec) -> CutSettings:
    is_compared = spec.task.compares_answers
    truncates = spec.settings.bad_rows is BadRows.truncate
    return CutSettings(spec.max_length, truncates, is_compared, is_compared and spec.task.has_pairs)


def _tokenize_into(folder: Path, source: Source, spec: DataSpec, tokenizer: PreTrainedTokenizerBase) -> None:
    """Makes the entry `folder`, from where another process has left off."""
    data, name = spec.settings, Path(source.path).name
    work = open_work(folder)
    plan = TokenizingPlan.load(work)
    shards = None if plan is None else Shards(work, plan.bounds)
    missing = [] if shards is None else shards.find_missing()
    if plan is None or shards is None or (missing and not (work / RAW).exists()):
        for path in work.iterdir():
            remove(path)
        dropped: dict[str, None] = {}
        with ReadingBar(note_dropped(source, dropped), f"Reading {name}") as reading:
            raw = read_rows(reading.source, work / RAW, reading.advance)
        plan = _plan(raw, source, spec, list(dropped))
        plan.save(work)
        shards = Shards(work, plan.bounds)
        missing = shards.find_missing()
    num_rows, num_done = len(plan.rows), len(plan.rows) - sum(map(shards.num_rows, missing))
    if num_done:
        log.info(f"Data: {num_done:,} of {num_rows:,} rows of {source.path} have been tokenized before")
    if missing:
        raw = open_rows(work / RAW)
        raw = raw if num_rows == len(raw) else raw.select(plan.rows)
        with row_bar(f"Tokenizing {name}", num_rows, num_done) as bar:
            num_processes = data.num_proc or num_cores()
            shards.make_all(missing, num_processes, raw, _whole_tokenizer(spec, tokenizer), bar.update)
    (work / RAW).unlink(missing_ok=True)
    finished = work / "finished"
    remove(finished)
    finished.mkdir()
    with row_bar(f"Writing {name}", num_rows) as bar:
        tables = (table for shard in range(len(shards)) for table in shards.read(shard))
        write_entry(finished, plan.read, tables, spec.task.compares_answers, bar.update)
    close_to_others(finished, data.cache_folder, [Path(file.path) for file in source.files if file.remote is None])
    remove(folder)  # it exists only if it is not whole
    finished.rename(folder)


def _plan(raw: datasets.Dataset, source: Source, spec: DataSpec, dropped: Sequence[str]) -> TokenizingPlan:
    """Which rows are used, and how they are divided into shards.

    Args:
        raw: all rows.
        source: where they are from.
        spec: which of them are used.
        dropped: columns that are not among them.

    Raises:
        DataError: data.split takes none, or it can't be told what labels mean.
    """
    data = spec.settings
    rows = np.arange(len(raw))
    if source.hub is None and "[" in data.split:  # of hub data sets, `datasets` has taken them already
        rows = rows[slice_rows(data.split, len(raw))]
        if len(raw) and not len(rows):
            raise DataError(
                f"data.split={data.split} takes none of the {len(raw):,} rows of {source.path}. Set it to others."
            )
    if data.max_rows is not None and data.max_rows < len(rows):
        chosen = np.random.default_rng(spec.row_seed).permutation(len(rows))[: data.max_rows]
        rows = rows[np.sort(chosen)]
    if spec.task.has_labels:
        check_label_order(source, spec.task.settings, data.columns)
        check_lists(((row["place"], row["row"]) for row in raw.select(rows)), spec.task.settings, data.columns)
    num_bytes = pc.binary_length(raw.data.column("row")).to_numpy()[rows]
    may_divide = len(rows) > ROWS_A_PROCESS or num_bytes.sum() > BYTES_A_PROCESS
    unused = find_unused(raw[:FIRST_ROWS]["row"], source, dropped, data.columns)
    read = ReadReport(source.path, len(rows), 0, 0, -1, (), _width(spec), unused=unused)
    return TokenizingPlan(rows, find_bounds(num_bytes.astype(np.int64), may_divide), read)


def _width(spec: DataSpec) -> int:
    """Numbers per label; 0 without labels."""
    if spec.task.compares_answers:  # a label or a margin
        return 0 if spec.task.has_pairs and spec.task.name is TaskName.preference else 1
    return label_width(spec.task.settings) if spec.task.has_labels else 0


def _check(report: ReadReport, path: Paths, spec: DataSpec) -> None:
    """Refuses a source that has bad rows where data.bad_rows=error, or that has no usable row."""
    kinds = {problem.kind for problem in report.problems}
    if kinds and spec.settings.bad_rows is BadRows.error:
        ways = "skip or truncate" if TOO_LONG in kinds else "skip"
        raise DataError(f"data.bad_rows=error, and {report}\nRepair these rows, or set data.bad_rows={ways}.")
    if report.num_used_rows > 0:
        return
    what = f"{report}" if report.num_rows else f"{report.path} has no rows"
    where = name_setting(path, spec.settings)
    if REFUSED in kinds:
        more = " or data.chat_template"
        if spec.settings.system_prompt is not None:
            more += "; or leave data.system_prompt out"
    elif spec.task.name is TaskName.causal_lm:
        more = ", data.format, data.loss_on or training.max_length"
    elif spec.task.has_labels:
        more = " or task.labels"
    else:
        more = " or training.max_length"
    raise DataError(f"There is no usable row. {what}\nRepair the rows, or set {where}, data.columns{more}.")


def _load_whole(folder: Path, spec: DataSpec) -> Entry | None:
    """An entry; None: it is not there, can't be read, or is damaged, which is told.

    Raises:
        OSError: it is another user's.
    """
    if not folder.is_dir():
        return None
    try:
        entry = load_entry(folder)
        damage = find_damage(folder)
        if damage is not None:
            log.warning(f"The tokenized data is damaged and made anew: {damage}")
            return None
    except (OSError, ValueError, KeyError, TypeError):
        return None
    check_owner(folder, spec.settings.cache_folder)
    return entry


def _entry_folder(source: Source, spec: DataSpec, tokenizer: PreTrainedTokenizerBase) -> Path:
    """The folder of the source's cache entry, named by everything that its tokens depend on."""
    data = spec.settings
    form: tuple[Any, ...] = (spec.task.name.value, spec.task.settings.problem_type.value, spec.task.settings.labels)
    if spec.task.compares_answers:
        form = (spec.task.name.value, spec.task.has_pairs)
    key = fingerprint(
        tokenizer,
        source.identity,
        data.format.value,
        data.loss_on.value,
        [spec.max_length, data.bad_rows.value] if spec.task.has_labels else _kept_tokens(spec),
        data.max_rows,
        spec.row_seed if data.max_rows is not None else None,
        form if spec.task.name is not TaskName.causal_lm else None,
        *([data.columns] if data.columns else []),  # without them a key is what it was before they existed
        *(["split", data.split] if source.hub is None and "[" in data.split else []),
        *(["system", data.system_prompt] if data.system_prompt else []),
        *(["thoughts", data.thoughts.value] if data.thoughts is not Thoughts.last else []),
    )
    return find_cache(data.cache_folder, DEFAULT_CACHE_FOLDER) / key


def row_bar(title: str, total: int | None, done: int = 0) -> Any:
    """A bar of rows, whose total may not be known (None)."""
    return tqdm(total=total, initial=done, desc=title, unit=" rows", unit_scale=True, delay=1, leave=False)


class ReadingBar:
    """A bar of how much of a source has been read: of the bytes of its files as they are stored, or else of its rows.

    Attributes:
        source: to be read in place of the other: the bar sees how far its files are read.
    """

    def __init__(self, source: Source, title: str) -> None:
        sizes = [file.num_bytes for file in source.files]
        self._ends = list(accumulate(size or 0 for size in sizes))
        self._file = 0
        self._stream: IO[bytes] | None = None
        files = tuple(replace(file, watch=partial(self._open, number)) for number, file in enumerate(source.files))
        self.source = replace(source, files=files)
        if files:
            total = None if None in sizes else self._ends[-1]
            self._bar = tqdm(total=total, desc=title, unit="B", unit_scale=True, delay=1, leave=False)
        else:
            self._bar = row_bar(title, len(source.hub) if isinstance(source.hub, Sized) else None)

    def __enter__(self) -> ReadingBar:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._bar.close()

    def advance(self, num_rows: int) -> None:
        """Moves the bar by `num_rows` more rows."""
        self._bar.update(num_rows if not self._ends else max(0, self._position() - self._bar.n))

    def _open(self, file: int, stream: IO[bytes]) -> None:
        self._file, self._stream = file, stream

    def _position(self) -> int:
        before = self._ends[self._file - 1] if self._file else 0
        if self._stream is None or self._stream.closed:
            return self._ends[self._file]
        return min(before + self._stream.tell(), self._ends[self._file])


@dataclass(frozen=True)
class TokenizingPlan:
    """The rows that are tokenized, and how.

    Attributes:
        rows: int64 [num_rows], the rows that are used, by their number among the raw rows.
        bounds: int64 [num_shards + 1], where shards begin among them (see `shards`).
        read: what is known of the rows so far.
    """

    rows: NDArray[np.int64]
    bounds: NDArray[np.int64]
    read: ReadReport

    def save(self, work: Path) -> None:
        """Writes it; the last file says that it is whole."""
        np.save(work / "rows.npy", self.rows)
        np.save(work / "bounds.npy", self.bounds)
        write_json(work / PLAN, self.read.to_json())

    @classmethod
    def load(cls, work: Path) -> TokenizingPlan | None:
        """Load what `save` has written; None if nothing whole is there."""
        try:
            read = ReadReport.from_json(read_json_object(work / PLAN, MAX_PLAN_BYTES))
            return cls(np.load(work / "rows.npy"), np.load(work / "bounds.npy"), read)
        except (OSError, ValueError, KeyError, TypeError):
            return None


def find_work(entry: Path) -> Path:
    """Where this user makes an entry."""
    return entry.parent / f".{entry.name}.{os.geteuid()}.parts"


def open_work(entry: Path) -> Path:
    """Makes the folder, or finds it as it was left. Nobody else may be making the entry now.

    Raises:
        OSError: it can't be made, or somebody else has put something there.
    """
    work = find_work(entry)
    with suppress(FileExistsError):
        work.mkdir(mode=0o700)
    found = work.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        raise PermissionError(f"{work} is no folder of this user's: remove it")
    return work


def remove_abandoned(cache: Path) -> None:
    """Removes the work folders of this user's with which nobody has gone on for a week."""
    for path in cache.iterdir():
        with suppress(OSError):
            found = path.lstat()
            is_old = time.time() - found.st_mtime > SECONDS_KEPT
            if LEFTOVER.fullmatch(path.name) and is_old and found.st_uid == os.geteuid():
                remove(path)
