"""Files at URLs, such as s3://bucket/rows/ or https://host/rows.jsonl.gz, through fsspec and the user's credentials."""

from __future__ import annotations

from typing import Any

from fsspec.core import url_to_fs
from fsspec.utils import get_protocol

from qlora_fsdp.common.errors import DataError
from qlora_fsdp.data.files.row_file import RowFile

# What file systems tell of a file that changes with its contents. Not all of them tell all of it.
FACTS = (
    *("size", "ETag", "etag", "md5Hash", "Content-MD5", "Digest", "blob_id", "generation"),
    *("LastModified", "last_modified", "Last-Modified", "mtime", "updated", "created"),
)
# A link on the web has no folders and no patterns: `?` begins its query.
SINGLE_FILES = ("http", "https")
# The extra of this package that has what fsspec needs for a protocol; no other protocol has one.
EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gs", "gcs": "gs", "az": "az", "abfs": "az", "http": "http", "https": "http"}


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
        found = _list(system, root, is_single=get_protocol(url) in SINGLE_FILES)
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


def _list(system: Any, root: str, is_single: bool) -> dict[str, dict[str, Any]]:
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
