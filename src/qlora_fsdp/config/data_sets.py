"""What data.path, data.eval_path and data.mix may name: files, folders, patterns, URLs and hub data sets.

Each data set of a mix may have settings that count for it alone, such as its weight, rows and split.
"""

from __future__ import annotations

import glob
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from qlora_fsdp.common.errors import DataError
from qlora_fsdp.common.hub import path_exists
from qlora_fsdp.common.text import is_number, is_whole
from qlora_fsdp.config.schema import DataConfig, DataFormat

DEFAULT_SPLIT = "train"
_SLICE = re.compile(r"(?P<name>[\w.-]*)(?:\[(?P<start>-?\d+%?)?:(?P<stop>-?\d+%?)?\])?")


# Suffixes of the files that data/files/row_files.py reads.
SUFFIXES = (".jsonl", ".json", ".csv", ".tsv", ".parquet", ".arrow", ".txt", ".md", ".gz", ".bz2", ".xz", ".zst")
MAX_LOOKED_AT = 100_000  # entries of a folder, before it is known that none of them can be read
# datasets' `save_to_disk` writes this beside the folders of a data set's splits.
SAVED_SPLITS = "dataset_dict.json"


@dataclass(frozen=True)
class DataSet:
    """A data set of `data.mix`, with its weight relative to the others'.

    Where a value is None, the setting of the same name in `data` counts, as it does for all data sets. The adapter
    is used later with `data.chat_template`, whatever template a data set has.
    """

    weight: float = 1.0
    max_rows: int | None = None
    split: str | None = None
    name: str | None = None
    format: DataFormat | None = None
    chat_template: str | None = None
    columns: dict[str, str] | None = None
    system_prompt: str | None = None


OWN_KEYS = tuple(field.name for field in fields(DataSet))


def find_mistakes(value: Any) -> Iterator[str]:
    """The mistakes in a value of data.mix, each as the end of a sentence about its data set."""
    if is_number(value):
        value = {"weight": value}
    if not isinstance(value, Mapping):
        yield f"has {value!r}, which is neither a weight nor a mapping such as {{weight: 2, max_rows: 5000}}"
        return
    unknown = [str(key) for key in value if key not in OWN_KEYS]
    if unknown:
        yield f"has {', '.join(unknown)}, and the settings of a data set are {', '.join(OWN_KEYS)}"
    weight, max_rows = value.get("weight", 1.0), value.get("max_rows")
    if not is_number(weight) or not 0 < weight < math.inf:
        yield "has a weight that is not positive"
    if max_rows is not None and not (is_whole(max_rows) and max_rows >= 1):
        yield f"has max_rows={max_rows}, which is no whole number of at least 1"
    forms = [form.value for form in DataFormat if form is not DataFormat.random]
    if value.get("format") is not None and value["format"] not in forms:
        yield f"has format={value['format']}, which is none of {', '.join(forms)}"
    for key in ("split", "name", "chat_template", "system_prompt"):
        if not isinstance(value.get(key), (str, type(None))):
            yield f"has {key}={value[key]}, which is no text"
    columns = value.get("columns") or {}
    if not isinstance(columns, Mapping) or not all(isinstance(name, str) for name in columns.values()):
        yield f"has columns={columns}, which is no mapping {{name: name}}"


def mixed_sets(data: DataConfig) -> dict[str, DataSet]:
    """The data sets of data.mix by their paths, of which `find_mistakes` finds nothing to say."""
    return {path: _read_set(value) for path, value in data.mix.items()}


def _read_set(value: Any) -> DataSet:
    if not isinstance(value, Mapping):
        return DataSet(weight=float(value))
    form = value.get("format")
    return DataSet(**{**value, "format": None if form is None else DataFormat(form)})


def settings_for(path: Any, data: DataConfig) -> DataConfig:
    """The settings of data as they count for one data set of the training data."""
    own = mixed_sets(data).get(path) if isinstance(path, str) else None
    if own is None:
        return data
    given = {key: getattr(own, key) for key in OWN_KEYS if key != "weight" and getattr(own, key) is not None}
    return replace(data, **given)


def settings_for_evaluation(data: DataConfig) -> DataConfig:
    """The settings of data as they count for data.eval_path: a slice of rows, or their number, is of training data."""
    split = data.eval_split
    if split is None:
        split = data.split if "+" in data.split else split_name(data.split)
    return replace(data, split=split, max_rows=None)


def explain_split(split: str) -> str | None:
    """Explain what is wrong with a split; None if nothing is. Sums of splits are left to `datasets`."""
    if "+" in split:
        return None
    found = _SLICE.fullmatch(split)
    if found is None or not split:
        return "is neither the name of a split nor a slice such as train[:5000] or train[10%:]"
    edges = (found["start"] or "0", found["stop"] or "100%")
    start, stop = (int(edge.rstrip("%")) for edge in edges)
    are_alike = len({(edge.startswith("-"), edge.endswith("%")) for edge in edges}) == 1
    return "has no rows, because it ends where it begins or before" if are_alike and start >= stop else None


def split_name(split: str) -> str:
    """The name of a split, without the rows of it."""
    return split.partition("[")[0] or DEFAULT_SPLIT


def hub_split(split: str) -> str:
    """A split as `datasets` takes it: with a name."""
    return f"{DEFAULT_SPLIT}{split}" if split.startswith("[") else split


def slice_rows(split: str, num_rows: int) -> range:
    """The rows of a data set that a split asks for.

    Args:
        split: such as `train`, `train[:5000]`, `[10%:]` or `train[-100:]`; percents are rounded to whole rows.
        num_rows: how many rows there are.

    Raises:
        DataError: it is a sum of splits, or no slice.
    """
    found = _SLICE.fullmatch(split)
    if found is None:
        raise DataError(
            f"data.split={split} can be used with hub data sets alone. Set it to one slice, such as train[:5000]."
        )

    def edge(text: str | None, default: int) -> int:
        if text is None:
            return default
        return round(int(text[:-1]) * num_rows / 100) if text.endswith("%") else int(text)

    return range(num_rows)[edge(found["start"], 0) : edge(found["stop"], num_rows)]


def as_paths(value: Any) -> list[str]:
    """The paths of a setting that takes one path or a list of them; none if it is null."""
    if value is None:
        return []
    return [str(path) for path in value] if isinstance(value, (list, tuple)) else [str(value)]


def all_paths(data: DataConfig) -> list[str]:
    """Every path of the training data."""
    return [*as_paths(data.path), *data.mix]


def is_pattern(path: str) -> bool:
    """Whether a path has `*`, `?` or `[...]` that stand for other letters, and is no name of a file as it stands."""
    return glob.has_magic(path) and "://" not in path and not path_exists(path)


def match(path: str) -> list[Path]:
    """The files and folders that a local path or a pattern names, sorted; none if nothing is there."""
    if is_pattern(path):
        found = glob.glob(str(Path(path).expanduser()), recursive=True)  # noqa: PTH207 (Path takes no absolute pattern)
        return sorted(map(Path, found))
    return [Path(path).expanduser()] if path_exists(path) else []


def is_missing(path: str) -> bool:
    """Whether a path to data does not exist. What looks like a path or a file is never the name of a hub data set."""
    if "://" in path:
        return False
    is_local = path.startswith(("/", "./", "../", "~")) or path.endswith(SUFFIXES) or is_pattern(path)
    return is_local and not match(path)


def is_without_rows(folder: Path) -> bool:
    """Whether no file in the folder has a suffix that is read. One too large to look through is taken to have some."""
    for number, file in enumerate(folder.rglob("*")):
        if file.name.endswith(SUFFIXES) or number == MAX_LOOKED_AT:
            return False
    return True


def saved_splits(found: Iterable[Path]) -> list[str]:
    """The splits of a data set that `save_to_disk` wrote, sorted; none if what a path has led to is no such."""
    folders = [path for path in found if path_exists(str(path / SAVED_SPLITS))]
    return sorted({file.parent.name for folder in folders for file in folder.glob("*/state.json")})
