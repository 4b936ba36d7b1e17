"""Give objects other attributes for a while. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

_MISSING = object()


@contextmanager
def replaced(changes: Iterable[tuple[Any, str, Any]]) -> Iterator[None]:
    """While it lasts, attributes have other values. Afterwards they are as before, or not there.

    Args:
        changes: owners, names and values. An owner is an object, a class or a Python module; or a dict, whose entry is
            replaced, such as the `_parameters` of a torch module.
    """
    changes = list(changes)
    before = [(owner, name, _table(owner).get(name, _MISSING)) for owner, name, _ in changes]
    for owner, name, value in changes:
        _set(owner, name, value)
    try:
        yield
    finally:
        for owner, name, value in reversed(before):
            _set(owner, name, value)


def _table(owner: Any) -> Any:
    return owner if isinstance(owner, dict) else vars(owner)


def _set(owner: Any, name: str, value: Any) -> None:
    if value is _MISSING:
        if isinstance(owner, dict):
            del owner[name]
        else:
            delattr(owner, name)
    elif isinstance(owner, dict):
        owner[name] = value
    else:
        setattr(owner, name, value)
