"""What data.path, data.eval_path and data.mix may name: files, folders, patterns, URLs and hub data sets."""

from __future__ import annotations

import glob
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from qlora_fsdp.common.hub import path_exists
from qlora_fsdp.config.schema import DataConfig

# Suffixes of the files that data/files/row_files.py reads.
SUFFIXES = (".jsonl", ".json", ".csv", ".parquet", ".arrow", ".txt", ".md", ".gz", ".bz2", ".xz", ".zst")

# datasets' `save_to_disk` writes this beside the folders of a data set's splits.
SAVED_SPLITS = "dataset_dict.json"


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


def saved_splits(found: Iterable[Path]) -> list[str]:
    """The splits of a data set that `save_to_disk` wrote, sorted; none if what a path has led to is no such."""
    folders = [path for path in found if path_exists(str(path / SAVED_SPLITS))]
    return sorted({file.parent.name for folder in folders for file in folder.glob("*/state.json")})
