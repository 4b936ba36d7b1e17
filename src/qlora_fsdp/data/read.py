"""Stage 1, read: files or a hub data set → raw rows, each with its place.

Raw rows are bytes that nothing has parsed yet (see `row_files`). Arrow's schema inference never sees them, and 5 GB of
JSONL pass through in constant memory.

The log names the columns that nothing reads, since one of them may be what the user wants the model to see.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from qlora_fsdp.common.errors import DataError, UserError
from qlora_fsdp.common.hub import find_unreachable, path_exists
from qlora_fsdp.common.replaced import replaced
from qlora_fsdp.common.text import name_error
from qlora_fsdp.config.data_sets import SUFFIXES, as_paths, hub_split, settings_for, split_name
from qlora_fsdp.config.schema import DataConfig, DataFormat, TaskConfig, TaskName
from qlora_fsdp.config.settings import show
from qlora_fsdp.config.specs import DataSpec
from qlora_fsdp.data.columns import MAX_KEYS, MORE_KEYS, NOT_TEXT, rename
from qlora_fsdp.data.files.find_files import find_files
from qlora_fsdp.data.files.position import Position
from qlora_fsdp.data.files.row_file import RowFile
from qlora_fsdp.data.files.row_files import (
    BATCH_ROWS,
    BROKEN,
    ChooseColumns,
    RawRow,
    dump_table,
    dump_table_row,
    find_reader,
    known_suffixes,
    read_text,
)
from qlora_fsdp.data.files.unpacking import Unpacking
from qlora_fsdp.data.labels import used_label_columns
from qlora_fsdp.data.layouts import OF_CHATS, is_judgement, text_columns
from qlora_fsdp.data.read_answers import preference_columns, read_answers
from qlora_fsdp.data.read_row import read_row
from qlora_fsdp.data.row import BadRow, parse_row

if TYPE_CHECKING:  # it takes half a second, for pandas, and rows that are in the cache do not need it
    import datasets

Paths = str | list[str]  # of one data set, as a setting has them
OF_TEXTS = ("prompt", "completion", "chosen", "rejected")
FIRST_ROWS = 10  # of a source, that are looked at: `system` may be empty in the very first ones
ROWS_LOOKED_AT = 100  # the first of them may be bad


@dataclass(frozen=True)
class Source:
    """Where rows come from: files, or else a hub data set.

    Attributes:
        path: the path, the paths or the name, as the user gave it.
        files: in the order in which they are read; empty for a hub data set.
        identity: a JSON value that changes when the contents may have changed.
        hub: the hub data set.
        skipped: which files of a folder are left out, and why; one line per reason.
        choose: returns which columns of a table to read.
    """

    path: str
    files: tuple[RowFile, ...]
    identity: list[Any]
    hub: datasets.Dataset | datasets.IterableDataset | None = None
    skipped: tuple[str, ...] = ()
    choose: ChooseColumns = list


def find_source(path: Paths, data: DataConfig, task: TaskConfig | None = None) -> Source:
    """Resolves a path (of `data.path`, `data.mix` or `data.eval_path`) without reading rows. Downloads a hub data set.

    Args:
        path: one path, or several whose rows follow one another.
        data: the settings of the data.
        task: the task of the run, which says which columns rows need; None: a language model's.

    Raises:
        DataError: there is no such file, folder or hub data set, or it is of no known kind.
    """
    setting, choose = name_setting(path, data), partial(_choose, data=data, task=task or TaskConfig())
    files: dict[RowFile, None] = {}  # a file that several patterns name is read once
    skipped: list[str] = []
    for one in as_paths(path):
        found = find_files(one, split_name(data.split), setting)
        if found is None and isinstance(path, str):
            return replace(_find_on_hub(path, data), choose=choose)
        if found is None:
            raise DataError(
                f"{show(setting, path)} names {one}, which does not exist. Give files or folders that do. A hub data"
                " set can be a part of data.mix={...}, but not of a list."
            )
        files |= dict.fromkeys(found[0])
        skipped += found[1]
    identity = [file.identity for file in files]
    return Source(", ".join(as_paths(path)), tuple(files), identity, None, tuple(skipped), choose)


def _choose(names: Sequence[str], data: DataConfig, task: TaskConfig) -> list[str]:
    if task.has_labels:
        return used_label_columns(names, data.columns, task)
    if task.writes_answers:  # whose functions may ask for any column
        return list(names)
    if task.compares_answers:
        return preference_columns(names, data.columns)
    return text_columns(names, data.format, data.columns)


def training_paths(data: DataConfig) -> list[Paths]:
    """Where the training data is: one entry for each data set."""
    return list(data.mix) or ([] if data.path is None else [data.path])


def name_setting(path: Paths, data: DataConfig) -> str:
    """The setting that names `path`: `data.path`, `data.mix` or `data.eval_path`."""
    if isinstance(path, str) and path in data.mix:
        return "data.mix"
    return "data.eval_path" if path == data.eval_path and path != data.path else "data.path"


def read_rows(
    source: Source, file: Path, on_progress: Callable[[int], object] = lambda num_rows: None
) -> datasets.Dataset:
    """Copies the raw rows of `source` into the Arrow file `file`.

    Args:
        source: where the rows are.
        file: a new file.
        on_progress: gets the number of rows read since its last call.

    Returns:
        A memory-mapped data set with the columns `place` (string, such as `chats.jsonl:12`) and `row` (bytes).

    Raises:
        DataError: a file can't be read at all.
    """
    rows = iterate_rows(source)
    schema = pa.schema([("place", pa.string()), ("row", pa.large_binary())])
    with pa.OSFile(str(file), "wb") as sink, pa.ipc.new_stream(sink, schema) as writer:
        while batch := list(islice(rows, BATCH_ROWS)):
            places, contents = zip(*batch, strict=True)
            writer.write_batch(pa.record_batch([places, contents], schema=schema))
            on_progress(len(batch))
    return open_rows(file)


def open_rows(file: Path) -> datasets.Dataset:
    """The rows of a file that `read_rows` has written, memory-mapped."""
    from datasets import Dataset

    return Dataset.from_file(str(file))


def _find_on_hub(path: str, data: DataConfig) -> Source:
    setting = name_setting(path, data)
    if path_exists(path):  # a pipe, a device
        raise DataError(f"{setting}={path} is neither a file nor a folder. Write the rows to a file first.")
    looks_local = path.startswith(("/", ".", "~")) or path.endswith(SUFFIXES)
    if looks_local or path.count("/") > 1:
        raise DataError(f"{setting}={path} does not exist. Set {setting} to {known_suffixes()} or a folder of these.")
    unreachable = find_unreachable(path, None)
    try:
        import datasets

        # Else it asks again and again, with lines of its own, before it looks into its cache.
        offline = replaced([(vars(datasets.config), "HF_HUB_OFFLINE", True)])
        with nullcontext() if unreachable is None else offline:
            hub = datasets.load_dataset(path, data.name, split=hub_split(data.split), streaming=data.streaming)
    except Exception as error:  # `datasets` and the hub client raise many unrelated types
        reason = " ".join(str(error).split())
        if unreachable is not None and "offline" in reason.lower():
            reason = f"it can't be reached ({name_error(unreachable)}), and its cache has none"
        fix = f"Check the name, or download it and set {setting} to the folder."
        if data.is_default and setting == "data.path":
            fix = "It is the default where no data is named: set data.path to your own file, folder or hub data set."
        raise DataError(
            f"{setting}={path} is no local file or folder, and can't be loaded from the hub"
            f" ({show('data.name', data.name)}, data.split={data.split}): {reason.rstrip('.')}. {fix}"
        ) from error
    state = getattr(hub, "_fingerprint", None)  # none of a stream
    return Source(path, (), ["hub", path, data.name, data.split, state], hub)


def iterate_rows(source: Source, position: Position | None = None) -> Iterator[RawRow]:
    """The raw rows of a source, one after another.

    Args:
        source: where the rows come from.
        position: where to begin; moved along with each row. None: at the beginning.

    Raises:
        DataError: a file can't be read at all.
    """
    position = position or Position()
    if source.hub is not None:
        yield from _iterate_hub(source, source.hub, position)
    for number in range(position.file, len(source.files)):
        if number > position.file:
            position.file = number
            position.move(0, 0)
        num_skipped, position.num_taken = position.num_taken, 0
        file = source.files[number]
        try:
            unpacking = Unpacking(file)
            rows = unpacking.count((find_reader(file) or read_text)(file, source.choose, unpacking, position))
            for index, row in enumerate(rows):
                position.num_taken += 1
                if index >= num_skipped:
                    yield row
        except Exception as error:
            if isinstance(error, UserError) or not (file.remote or isinstance(error, BROKEN)):
                raise
            # Remote file systems raise types of their own.
            reason = str(error).rstrip(".")
            raise DataError(f"{file} can't be read: {reason}. Repair it, or leave it out.") from error


def _iterate_hub(
    source: Source, hub: datasets.Dataset | datasets.IterableDataset, position: Position
) -> Iterator[RawRow]:
    """The rows of a hub data set. In one that is streamed, `datasets` knows how to begin at a position."""
    from datasets import IterableDataset

    names = hub.column_names  # None of some streams
    # A copy, because a stream that has been told where to begin begins there each time.
    chosen = [] if names is None else source.choose(names)
    hub = hub.select_columns(chosen) if chosen else copy.copy(hub)
    if not set(NOT_TEXT).isdisjoint(chosen):
        hub = hub.with_format("arrow")  # which decodes no image
    if position.hub is not None:
        hub.load_state_dict(position.hub)
    is_streamed = isinstance(hub, IterableDataset)
    for number, row in enumerate(_read_stream(source, hub) if is_streamed else hub, start=position.number + 1):
        if is_streamed:
            position.number, position.hub = number, hub.state_dict()
        yield f"{source.path} row {number}", dump_table(row)[0] if isinstance(row, pa.Table) else dump_table_row(row)


def _read_stream(source: Source, hub: datasets.IterableDataset) -> Iterator[Any]:
    """The rows of a hub data set that is streamed.

    Raises:
        DataError: the hub is out of reach, or has a file that can't be read.
    """
    try:
        yield from hub
    except Exception as error:  # `datasets` and the hub client raise many unrelated types
        reason = name_error(error).rstrip(".")
        fix = "If the hub was out of reach, start the same command again."
        raise DataError(f"{source.path} can't be read on: {reason}. {fix}") from error


def note_dropped(source: Source, dropped: dict[str, None]) -> Source:
    """The source, which notes as keys of `dropped` the columns of tables that are not read."""

    def choose(names: Sequence[str]) -> list[str]:
        chosen = source.choose(names)
        dropped.update(dict.fromkeys(name for name in names if name not in chosen))
        return chosen

    return replace(source, choose=choose)


def find_unused(
    rows: Sequence[bytes], source: Source, dropped: Sequence[str], columns: Mapping[str, str]
) -> tuple[str, ...]:
    """The columns of a source that are not used.

    Args:
        rows: its first rows.
        source: knows which columns rows of this task need.
        dropped: the columns that were not read.
        columns: data.columns.
    """
    found = dict.fromkeys(dropped)
    for raw in rows:
        with suppress(BadRow):
            found.update(dict.fromkeys(_unused_of(parse_row(raw), source, columns)))
    unused = list(found)
    return (*unused[:MAX_KEYS], *(["..."] if len(unused) > MAX_KEYS else []))


def _unused_of(row: dict[str, Any], source: Source, columns: Mapping[str, str]) -> list[str]:
    used = set(source.choose(list(row)))
    ours = rename(row, columns)
    if _has_no_conversation(ours, columns):
        of_messages = {columns.get(key, key) for key in MORE_KEYS[DataFormat.prompt_completion]}
        used -= {key for key in of_messages if row.get(key)}
    has_answer = "completion" in ours or "messages" in ours
    if has_answer and not is_judgement(row.get("label")):
        used.discard("label")
    return [key for key in row if key not in used]


def _has_no_conversation(ours: Mapping[str, Any], columns: Mapping[str, str]) -> bool:
    """Whether a row, with our names of its columns, is of texts alone, in which nothing of a conversation is read."""
    are_texts = "prompt" in ours and all(isinstance(ours.get(key, ""), str) for key in OF_TEXTS)
    return are_texts and not any(key in columns for key in OF_CHATS)


def look_for_unused(source: Source, columns: Mapping[str, str]) -> tuple[str, ...]:
    """The columns of a source that is streamed that are not used.

    Raises:
        DataError: it can't be read.
    """
    dropped: dict[str, None] = {}
    rows = [raw for _, raw in islice(iterate_rows(note_dropped(source, dropped)), FIRST_ROWS)]
    return find_unused(rows, source, list(dropped), columns)


def find_form(spec: DataSpec) -> DataFormat | None:
    """The form of the first usable training row, never `auto` or `sharegpt`; None as `find_first`."""
    found = find_first(spec)
    return None if found is None else found[0]


def find_first(spec: DataSpec) -> tuple[DataFormat, dict[str, Any]] | None:
    """The first usable training row, with its form; of a preference, with the first of its answers.

    None for random tokens, for a classifier's rows, and where no row can be read.
    """
    paths = training_paths(spec.settings)
    if not paths or spec.settings.format is DataFormat.random or not spec.task.is_causal:
        return None
    data = settings_for(paths[0], spec.settings)
    try:
        for _, raw in islice(iterate_rows(find_source(paths[0], data)), ROWS_LOOKED_AT):
            try:
                if spec.task.name is TaskName.preference:
                    answer = read_answers(parse_row(raw), spec.task.has_pairs, data.columns)[0]
                    return answer.form, answer.fields
                return read_row(parse_row(raw), data.format, data.columns)
            except BadRow:
                continue
    except DataError:  # the rows were tokenized before, and are not there any more
        pass
    return None
