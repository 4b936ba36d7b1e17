"""Stage 2, row, begins here: the bytes of a row → a dict, or a `BadRow` that says why they are none."""

from __future__ import annotations

import json
from typing import Any

from qlora_fsdp.data.row import EMPTY, NOT_JSON, NOT_UTF8, WRONG_KEYS, BadRow

# What Excel writes as CSV in Western countries.
CONVERT = "if the file is Windows-1252, convert it: iconv -f WINDOWS-1252 -t UTF-8 OLD > NEW"


def parse_row(raw: bytes) -> dict[str, Any]:
    """Parses a row, whatever its keys.

    Raises:
        BadRow: the row is empty, not UTF-8 or no JSON object, or an object in it has a key twice.
    """
    if not raw.strip():
        raise BadRow(EMPTY)
    try:
        row = json.loads(raw.decode("utf-8"), object_pairs_hook=_read_object)
    except UnicodeDecodeError as error:
        place = f"byte {error.start + 1} of the row is 0x{raw[error.start]:02x}"
        raise BadRow(NOT_UTF8, f"{place}; {CONVERT}") from error
    except (ValueError, RecursionError) as error:
        raise BadRow(NOT_JSON, str(error)) from error
    check_unicode(raw, row)
    if not isinstance(row, dict):
        raise BadRow(
            WRONG_KEYS, "not an object of named fields, or a CSV line with more or fewer cells than the header"
        )
    return row


def _read_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object. One that has a key twice is refused, because which value counts is anybody's guess."""
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        raise BadRow(WRONG_KEYS, f"an object has {next(key for key in keys if keys.count(key) > 1)!r} twice")
    return found


def check_unicode(raw: bytes, row: Any) -> None:
    """Refuses half of a character beyond U+FFFF (a lone surrogate). JSON's escapes can write it; no tokenizer takes it.

    Raises:
        BadRow: `row`, which was parsed from `raw`, has one.
    """
    if b"\\u" in raw:  # valid UTF-8 can write it in no other way, so other rows need not be written out
        try:
            json.dumps(row, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            half = json.dumps(error.object[error.start])
            raise BadRow(NOT_UTF8, f"{half} is half of a character, without its other half") from error
