"""Give objects other attributes for a while. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

_MISSING = object()


@contextmanager
def replaced(changes: Iterable[tuple[dict[str, Any], str, Any]]) -> Iterator[None]:
    """While it lasts, entries of tables have other values. Afterwards they are as before, or not there.

    Args:
        changes: tables, names and values. An object's own attributes are in `vars(object)`, a module's parameters in
            its `_parameters`.
    """
    changes = list(changes)
    before = [(table, name, table.get(name, _MISSING)) for table, name, _ in changes]
    for table, name, value in changes:
        table[name] = value
    try:
        yield
    finally:
        for table, name, value in reversed(before):
            if value is _MISSING:
                del table[name]
            else:
                table[name] = value
