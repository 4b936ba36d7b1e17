"""What ranks tell one another: everything of a type comes back as it was, and nothing that is not of that type."""

from __future__ import annotations

import json
import pickle
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from signal import Signals
from typing import Any, TypeVar

import numpy as np
import pytest
from numpy.typing import NDArray
from typing_extensions import TypeAliasType

from qlora_fsdp.common.plain_values import LENGTH_BYTES, STAYS, BadMessage, pack, unpack


class Color(Enum):
    red = 1


@dataclass(frozen=True)
class Inner:
    names: tuple[str, ...]
    color: Color | None = None


@dataclass
class Outer:
    model: object = field(metadata=STAYS)
    inner: Inner
    sizes: dict[str, tuple[int, int]]


VALUES: list[Any] = [
    (None, str | None),
    ("a line\nand a half of a pair \ud800", str | None),
    (True, bool),
    (-(10**30), int),
    (float("inf"), float),
    (b"\x00\xff", bytes),
    (Path("/tmp/a b"), Path | None),
    (Signals.SIGTERM, Signals | None),
    ({1: "x", 2: ""}, dict[int, str]),
    ((("host", 5), 3), tuple[tuple[str, int], int]),
    ([("a:1", b"row"), ("a:2", b"")], list[tuple[str, bytes]]),
    pytest.param(frozenset({"b", "a"}), frozenset[str], id="a frozenset"),
    ([(1.5, True), 2.0, "text"], list[tuple[float, bool] | float | str]),
    ({"a": [1, None, 2.5, {"b": "c"}]}, dict[str, Any]),
    (Outer(None, Inner(("x", "y"), Color.red), {"w": (0, 4)}), Outer),
    (Outer(None, Inner(()), {}), Outer | None),
]


@pytest.mark.parametrize(("value", "kind"), VALUES, ids=str)
def test_a_value_comes_back(value: Any, kind: Any) -> None:
    found = unpack(pack(value, kind), kind)
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize("dtype", ["bool", "int32", "float32", "uint64"])
@pytest.mark.parametrize("shape", [(), (0,), (3, 2), (2, 0)])
def test_arrays_come_back_and_may_be_written_to(dtype: str, shape: tuple[int, ...]) -> None:
    array = np.arange(np.prod(shape, dtype=int)).astype(dtype).reshape(shape)
    for kind in (np.ndarray, NDArray[np.generic], NDArray[array.dtype.type]):  # type: ignore[name-defined]
        found = unpack(pack(array, kind), kind)
        assert found.dtype == array.dtype and found.shape == shape and (found == array).all()
        found[...] = 0


def test_an_alias_of_a_type_is_that_type() -> None:
    """numpy 2.5 and later write NDArray as such an alias; this Python may be older than the statement."""
    item = TypeVar("item", bound=np.generic)
    alias = TypeAliasType("Array", np.ndarray[Any, np.dtype[item]], type_params=(item,))
    array = np.arange(3, dtype=np.float32)
    kind: Any = dict[str, alias[np.float32] | None]  # type: ignore[valid-type]
    assert unpack(pack({"a": array, "b": None}, kind), kind)["a"].tolist() == [0, 1, 2]
    with pytest.raises(BadMessage, match="float32"):
        pack({"a": array}, dict[str, alias[np.int64]])  # type: ignore[valid-type]


def test_what_a_rank_keeps_is_not_told() -> None:
    found = unpack(pack(Outer(open, Inner(()), {}), Outer), Outer)
    assert found.model is None


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (1, str),
        (True, int),
        (1, bool),
        ({"a": (1,)}, dict[str, Any]),
        ({1: "a"}, Any),
        pytest.param(object(), Any, id="an object"),
        pytest.param(lambda: None, object, id="a function"),
        (Inner(()), Outer),
        ([1], list[str]),
        (np.array(["a"], object), np.ndarray),
        (np.zeros(1, np.int32), NDArray[np.int64]),
    ],
    ids=str,
)
def test_what_is_no_plain_data_is_not_told(value: Any, kind: Any) -> None:
    with pytest.raises((TypeError, BadMessage)):
        pack(value, kind)


def message(told: Any, rest: bytes = b"") -> bytes:
    text = json.dumps(told).encode()
    return len(text).to_bytes(LENGTH_BYTES, "big") + text + rest


FORGED: list[tuple[bytes, Any]] = [
    (b"", str),
    (b"\xff" * 8, str),
    (pickle.dumps("text"), str),
    (message("text", b"more"), str),
    (message(1), str),
    (message("1"), int),
    (message(True), int),
    (message(1), float),
    (message(2**60), bytes),
    (message(-1), bytes),
    (message(["float32", [2**40, 2**40]]), np.ndarray),
    (message(["float32", [-1, -4]], b"0" * 16), np.ndarray),
    (message(["float32", ["4"]], b"0" * 16), np.ndarray),
    (message(["O", [1]], b"0" * 8), np.ndarray),
    (message(["object", [1]], b"0" * 8), np.ndarray),
    (message(["int32", [2]], b"0" * 8), NDArray[np.int64]),
    (message([7, "x"]), str | None),
    (message("blue"), Color),
    (message("__class__"), Color),
    (message([[["x"], None]]), Outer),
    (message([1, 2, 3]), tuple[int, int]),
    (message([[[1], "x"]]), dict[int, str]),
    (message(["a"] * 3), list[int]),
    (b"\x00" * 7 + b"\x08" + b"[" * 8, list[str]),
    (len(b"[" * 100_000).to_bytes(8, "big") + b"[" * 100_000, Any),
    (message(int("9" * 4000)), str),
]


@pytest.mark.parametrize(("forged", "kind"), FORGED, ids=range(len(FORGED)))
def test_what_is_of_another_type_is_refused(forged: bytes, kind: Any) -> None:
    with pytest.raises(BadMessage):
        unpack(forged, kind)
