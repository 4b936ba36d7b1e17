"""Values that ranks tell one another, as bytes: plain data of a type that the receiver names, and never code.

A message is JSON, followed by the bytes of what has many: arrays and byte strings, in the order in which the JSON tells
of them. What a value may consist of follows from its type: None, bool, int, float, str, bytes, paths, enums, arrays of
numbers, tuples, lists, dicts and frozensets of such, a choice among such (`A | B`), dataclasses of such, and `Any`,
which stands for what JSON has by itself. Nothing else is written, nothing else is read, and what is read has the types
that the receiver named, all the way down. So whoever wrote a message makes no object that the receiver did not ask for.
Imports no torch.
"""

from __future__ import annotations

import json
import math
import operator
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import numpy as np

LENGTH_BYTES = 8  # of the number that says how long the JSON is
DTYPES = ("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float32", "float64")


# The metadata of a dataclass's field whose value is nothing to tell: None is read in its place.
STAYS = {"stays": True}


class BadMessage(ValueError):
    """Bytes that are no value of the type that was asked for."""


def pack(value: Any, kind: Any) -> bytes:
    """Returns a value as bytes.

    Args:
        value: what is told.
        kind: its type, as an annotation has it: `dict[int, str] | None`.

    Raises:
        TypeError: it is not of that type, or the type is none of plain data.
    """
    parts: list[bytes] = []
    text = json.dumps(_write(value, kind, parts)).encode()
    return b"".join([len(text).to_bytes(LENGTH_BYTES, "big"), text, *parts])


def unpack(message: bytes, kind: Any) -> Any:
    """Returns the value that `pack` has made bytes of.

    Raises:
        BadMessage: the bytes are no value of this type.
    """
    end = LENGTH_BYTES + int.from_bytes(message[:LENGTH_BYTES], "big")
    rest = _Rest(message, end)
    try:
        value = _read(json.loads(message[LENGTH_BYTES:end]), kind, rest)
    except (ValueError, TypeError, LookupError, OverflowError, RecursionError) as error:
        raise BadMessage(f"no {kind}: {error}") from error
    if rest.start != len(message):
        raise BadMessage(f"{len(message) - rest.start} bytes too many")
    return value


class _Rest:
    """The bytes behind the JSON of a message, which are taken one part after another."""

    def __init__(self, message: bytes, start: int) -> None:
        self.message, self.start = message, start

    def take(self, num_bytes: Any) -> memoryview:
        if type(num_bytes) is not int or not 0 <= num_bytes <= len(self.message) - self.start:
            raise BadMessage(f"a part of {num_bytes} bytes")
        part = memoryview(self.message)[self.start : self.start + num_bytes]
        self.start += num_bytes
        return part


# Longer than other functions, as is `_read`: both have the same cases, in the same order.
def _write(value: Any, kind: Any, parts: list[bytes]) -> Any:
    """The JSON of a value; bytes that belong behind it are added to `parts`."""
    kind = _without_alias(kind)
    if not _fits(value, kind):
        raise TypeError(f"{type(value).__name__} is no {kind}")
    if kind is Any:
        _check_json(value)
        return value
    if kind is int:
        return operator.index(value)
    if kind is float:
        return float(value)
    if kind in (None, NoneType, bool, str):
        return value
    if kind is bytes:
        parts.append(value)
        return len(value)
    if kind is Path:
        return str(value)
    if _is_array(kind):
        _check_dtype(str(value.dtype), kind)
        parts.append(np.ascontiguousarray(value).tobytes())
        return [str(value.dtype), list(value.shape)]
    if isinstance(kind, type) and issubclass(kind, Enum):
        return value.name
    if isinstance(kind, type) and is_dataclass(kind):
        return [_write(getattr(value, name), hint, parts) for name, hint in _told_fields(kind)]
    items = get_args(kind)
    if _is_union(kind):
        number = next(number for number, option in enumerate(items) if _fits(value, option))
        return [number, _write(value, items[number], parts)]
    if get_origin(kind) is dict:
        return [[_write(key, items[0], parts), _write(item, items[1], parts)] for key, item in value.items()]
    if get_origin(kind) is tuple and items[-1] is not ...:
        return [_write(item, hint, parts) for item, hint in zip(value, items, strict=True)]
    if get_origin(kind) is frozenset:
        value = sorted(value)
    return [_write(item, items[0], parts) for item in value]


def _read(found: Any, kind: Any, rest: _Rest) -> Any:
    """The value of a type that JSON tells of.

    Raises:
        BadMessage, ValueError, TypeError, LookupError: it is none.
    """
    kind = _without_alias(kind)
    if kind is Any:
        return found
    if kind is int:
        return _checked(found, int)
    if kind is float:
        return _checked(found, float)
    if kind in (None, NoneType, bool, str):
        return _checked(found, NoneType if kind is None else kind)
    if kind is bytes:
        return bytes(rest.take(found))
    if kind is Path:
        return Path(_checked(found, str))
    if _is_array(kind):
        dtype, shape = found
        _check_dtype(dtype, kind)
        if any(type(size) is not int or size < 0 for size in shape):
            raise BadMessage(f"an array of the shape {shape}")
        part = rest.take(math.prod(shape) * np.dtype(dtype).itemsize)
        return np.frombuffer(part, dtype).reshape(shape).copy()  # to be written to
    if isinstance(kind, type) and issubclass(kind, Enum):
        return kind[_checked(found, str)]
    if isinstance(kind, type) and is_dataclass(kind):
        stay: dict[str, Any] = {field.name: None for field in fields(kind) if field.metadata == STAYS}
        values = zip(_told_fields(kind), _checked(found, list), strict=True)
        return kind(**stay, **{name: _read(item, hint, rest) for (name, hint), item in values})
    items = get_args(kind)
    if _is_union(kind):
        number, item = found
        return _read(item, items[_checked(number, int)], rest)
    if get_origin(kind) is dict:
        return {_read(key, items[0], rest): _read(item, items[1], rest) for key, item in _checked(found, list)}
    if get_origin(kind) is tuple and items[-1] is not ...:
        pairs = zip(_checked(found, list), items, strict=True)
        return tuple(_read(item, hint, rest) for item, hint in pairs)
    make: Any = get_origin(kind)  # list, tuple or frozenset
    return make(_read(item, items[0], rest) for item in _checked(found, list))


def _fits(value: Any, kind: Any) -> bool:
    """Whether a value is of a type, without looking at what it holds."""
    kind = _without_alias(kind)
    if kind is Any:
        return True
    if kind is None or kind is NoneType:
        return value is None
    if kind is int:
        return isinstance(value, (int, np.integer)) and not isinstance(value, (bool, Enum))
    if kind is float:
        return isinstance(value, (int, float, np.floating)) and not isinstance(value, bool)
    if kind in (bool, str, bytes):
        return type(value) is kind
    if kind is Path:
        return isinstance(value, Path)
    if _is_array(kind):
        return isinstance(value, np.ndarray)
    if _is_union(kind):
        return any(_fits(value, option) for option in get_args(kind))
    origin = get_origin(kind)
    if origin is tuple:  # what was read from a file of JSON has lists
        return type(value) in (tuple, list)
    if origin in (list, dict, frozenset):
        return type(value) is origin
    is_named = isinstance(kind, type) and (is_dataclass(kind) or issubclass(kind, Enum))
    if not is_named:
        raise TypeError(f"{kind} is no type of plain data")
    return type(value) is kind


def _checked(found: Any, kind: type) -> Any:
    if type(found) is not kind:
        raise BadMessage(f"{type(found).__name__} is no {kind.__name__}")
    return found


def _is_union(kind: Any) -> bool:
    return get_origin(kind) in (Union, UnionType)


def _without_alias(kind: Any) -> Any:
    """The type that an alias stands for: since numpy 2.5 `NDArray[...]` is one of Python's `type` statements."""
    alias = get_origin(kind) or kind
    if not hasattr(alias, "__value__"):
        return kind
    items = get_args(kind)
    return alias.__value__[items] if items else alias.__value__


def _is_array(kind: Any) -> bool:
    return kind is np.ndarray or get_origin(kind) is np.ndarray


def _check_dtype(name: Any, kind: Any) -> None:
    """Refuse an array of another dtype than its type has, where that has one, and of anything but numbers."""
    named = [scalar for dtype in get_args(kind)[1:] for scalar in get_args(dtype)]
    wanted = [np.dtype(scalar).name for scalar in named if isinstance(scalar, type) and not _is_abstract(scalar)]
    if name not in DTYPES or (wanted and name not in wanted):
        raise BadMessage(f"an array of {name} is no {kind}")


def _is_abstract(scalar: type) -> bool:
    return scalar in (np.generic, np.number, np.integer, np.floating)


def _check_json(value: Any) -> None:
    """Refuse what JSON would turn into something else.

    Raises:
        TypeError: the value has it.
    """
    for item in _parts_of(value):
        if item is not None and type(item) not in (bool, int, float, str, list, dict):
            raise TypeError(f"{type(item).__name__} is nothing that JSON has")


def _parts_of(value: Any) -> Iterator[Any]:
    yield value
    if type(value) is list:
        for item in value:
            yield from _parts_of(item)
    elif type(value) is dict:
        for name, item in value.items():
            if type(name) is not str:
                raise TypeError(f"{name!r} is no name that JSON has")
            yield from _parts_of(item)


@cache
def _told_fields(kind: type) -> tuple[tuple[str, Any], ...]:
    """The names and types of a dataclass's fields, in their order, but for those that stay."""
    hints = get_type_hints(kind)
    return tuple((field.name, hints[field.name]) for field in fields(kind) if field.metadata != STAYS)
