"""Which files a path to data names: a file, a folder, a pattern, a data set that `save_to_disk` wrote, or a URL."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fsspec.core import url_to_fs
from fsspec.utils import get_protocol

from qlora_fsdp.common.errors import DataError
from qlora_fsdp.common.foreign_files import MAX_SMALL_BYTES, read_json_object
from qlora_fsdp.common.hub import path_exists
from qlora_fsdp.common.text import is_unicode, join_words, plural, printable
from qlora_fsdp.config.data_sets import SAVED_SPLITS, is_pattern, match, saved_splits
from qlora_fsdp.data.files.row_file import RowFile
from qlora_fsdp.data.files.row_files import TEXT_SUFFIXES, find_reader, known_suffixes

SPLIT = re.compile(r"(?:^|[/_.-])(train|test|validation|valid|val|dev)(?=[/_.-])")  # in the name of a file
MAX_NAMES = 20  # of files that are left out for one reason
# datasets' `save_to_disk` writes these beside a data set's Arrow files.
SAVED_STATE, SAVED_INFO = "state.json", "dataset_info.json"
# What file systems tell of a file that changes with its contents. Not all of them tell all of it.
FACTS = (
    "size",
    "ETag",
    "etag",
    "md5Hash",
    "Content-MD5",
    "Digest",
    "blob_id",
    "generation",
    "LastModified",
    "last_modified",
    "Last-Modified",
    "mtime",
    "updated",
    "created",
)
# A link on the web has no folders and no patterns: `?` begins its query.
SINGLE_FILES = ("http", "https")
# The extra of this package that has what fsspec needs for a protocol; no other protocol has one.
EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gs", "gcs": "gs", "az": "az", "abfs": "az", "http": "http", "https": "http"}


def find_files(path: str, split: str, setting: str) -> tuple[list[RowFile], list[str]] | None:
    """The files that `path` names. None: it names nothing that is here.

    Returns:
        The files in the order in which they are read, and one line for each reason why others are left out; also one
        where those of a folder have the names of several splits, as a data set has that was downloaded from the hub.

    Raises:
        DataError: what the path names has no rows.
    """
    if is_remote(path):
        named = find_remote(path, setting)
    else:
        local = Path(path).expanduser()
        if not (local.is_file() or local.is_dir() or is_pattern(path)):
            return None
        listed = [each for found in match(path) for each in _list(found, path, split, setting)]
        named = [(name, RowFile(str(file))) for name, file in listed]
    files, skipped = _sort_out(named)
    if files:
        splits: dict[str, None] = {}
        if not is_pattern(path):
            matches = [SPLIT.search(name) for name, _ in named]
            splits = dict.fromkeys(match[1] for match in matches if match is not None)
        if "train" in splits and len(splits) > 1:
            one = f"'{path.rstrip('/')}/**/train*' names those of one"
            skipped.append(f"files of the splits {join_words(list(splits))} are all read, as one data set; {one}")
        return files, skipped
    if is_pattern(path):
        raise DataError(
            f"{setting}={path} matches no file of {known_suffixes()}. Set {setting} to a pattern that does, or to a"
            " folder, whose files are all read."
        )
    if len(named) == 1 and not Path(path).expanduser().is_dir():
        raise DataError(f"{setting}={path} is of no known kind. Use one of {known_suffixes()}.")
    raise DataError(f"{setting}={path} is a folder with no file of {known_suffixes()}.")


def _list(found: Path, path: str, split: str, setting: str) -> Iterable[tuple[str, Path]]:
    """The files of what a path has led to, with the names by which they are told. Links to folders are among them."""
    if not found.is_dir():
        return [(found.name, found)]
    folder = found
    if path_exists(str(found / SAVED_SPLITS)):
        folder = _saved_split(found, path, split, setting)
    if (folder / SAVED_STATE).is_file() and (folder / SAVED_INFO).is_file():
        return [(file.name, file) for file in _saved_files(folder)]
    named = []
    for file in sorted(folder.rglob("*")):
        if file.is_symlink() or not file.is_dir():
            named.append((str(file.relative_to(folder)), file))
    return named


def _saved_split(found: Path, path: str, split: str, setting: str) -> Path:
    """The folder of a split, in one where `save_to_disk` wrote several.

    Raises:
        DataError: it is not there.
    """
    folder = found / split
    if not (folder / SAVED_STATE).is_file():
        splits = printable(", ".join(saved_splits([found])) or "none")
        key = "data.eval_split" if setting == "data.eval_path" else "data.split"
        raise DataError(f"{setting}={path} has no split {split}: it has {splits}. Set {key}.")
    return folder


def _saved_files(folder: Path) -> list[Path]:
    """The Arrow files of a data set that `save_to_disk` wrote, in its order. Others are what `map` left there.

    Raises:
        DataError: its state.json can't be read.
    """
    try:
        entries = read_json_object(folder / SAVED_STATE, MAX_SMALL_BYTES)["_data_files"]
        names = [entry["filename"] for entry in entries]
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise DataError(f"{folder / SAVED_STATE} can't be read: {reason}. Save the data set again.") from error
    own = {file.name: file for file in folder.iterdir()}
    missing = [str(name) for name in names if name not in own]
    if missing:
        raise DataError(f"{folder} has no file {printable(missing[0])}, which its {SAVED_STATE} names. Copy it again.")
    return [own[name] for name in names]


def _sort_out(named: Iterable[tuple[str, RowFile]]) -> tuple[list[RowFile], list[str]]:
    """The files that have rows, each once, and one line for each reason for which others are left out."""
    found: dict[RowFile, None] = {}
    texts: dict[RowFile, str] = {}
    others: dict[str, list[str]] = {}  # by reason
    for name, file in named:
        # Notebooks, downloads and macOS leave copies and notes there: .ipynb_checkpoints/, .cache/, ._chats.jsonl.
        is_hidden = any(part.startswith(".") for part in name.split("/"))
        if not is_unicode(name):
            others.setdefault("names that are no UTF-8", []).append(printable(name))
        elif file.is_folder:
            if not is_hidden:
                others.setdefault("links to folders, which are not followed", []).append(name)
        elif is_hidden:
            others.setdefault("names that begin with a dot", []).append(name)
        elif not file.is_file:
            others.setdefault("neither files nor folders", []).append(name)
        elif find_reader(file) is not None:
            found[file] = None
            if file.num_bytes == 0:  # it gives no rows; that one is empty may be a surprise, though
                others.setdefault("empty", []).append(name)
        elif file.suffix in TEXT_SUFFIXES:
            texts[file] = name
        else:
            others.setdefault("of no known kind", []).append(name)
    if found and texts:  # their README and license
        others["text beside files of rows"] = list(texts.values())
    lines = []
    for reason, names in others.items():
        more = f" and {len(names) - MAX_NAMES:,} more" if len(names) > MAX_NAMES else ""
        lines.append(f"{plural(len(names), 'file')} left out ({reason}): {', '.join(names[:MAX_NAMES])}{more}")
    return list(found or texts), lines


def is_remote(path: str) -> bool:
    """Whether a path to data is a URL."""
    return "://" in path


def find_remote(url: str, setting: str) -> list[tuple[str, RowFile]]:
    """The files that a URL names, sorted, with the names by which they are told.

    Args:
        url: the URL of a file, a folder, or a pattern such as s3://bucket/rows/*.jsonl.
        setting: the setting that names it, for messages.

    Raises:
        DataError: the URL can't be read, or nothing is there.
    """
    try:
        system, root = url_to_fs(url)
        system.invalidate_cache()  # of listings that an earlier look has left
        found = _list_remote(system, root, is_single=get_protocol(url) in SINGLE_FILES)
    except ImportError as error:
        extra = EXTRAS.get(get_protocol(url))
        install = "Install it" if extra is None else f"Run pip install 'qlora-fsdp[{extra}]'"
        raise DataError(
            f"{setting}={url} needs a package that is not installed: {error}. {install}, or download the data and set"
            f" {setting} to the folder."
        ) from error
    except Exception as error:  # each file system raises types of its own
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise DataError(
            f"{setting}={url} can't be read: {reason}. Check the URL and your credentials for it, or download the data"
            f" and set {setting} to the folder."
        ) from error
    if not found:
        raise DataError(f"{setting}={url} does not exist. Check the URL and your credentials for it.")
    return [
        (name.removeprefix(root).lstrip("/") or name, RowFile(str(system.unstrip_protocol(name)), system, _facts(info)))
        for name, info in sorted(found.items())
    ]


def _list_remote(system: Any, root: str, is_single: bool) -> dict[str, dict[str, Any]]:
    """The file system's details of each file, by path."""
    if is_single:
        return {root: system.info(root)}
    if "*" in root or "?" in root or "[" in root:
        found: dict[str, dict[str, Any]] = system.glob(root, detail=True)
        return {name: info for name, info in found.items() if info.get("type") != "directory"}
    if system.isdir(root):
        return dict(system.find(root, detail=True))
    return {root: system.info(root)} if system.exists(root) else {}


def _facts(info: dict[str, Any]) -> tuple[tuple[str, str], ...]:
    return tuple((fact, str(info[fact])) for fact in FACTS if info.get(fact) is not None)
