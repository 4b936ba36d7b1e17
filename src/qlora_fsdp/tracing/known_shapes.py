"""Runs torch's operations on meta, each only the first time that it gets tensors of these shapes.

Torch finds the shape of most results on meta in Python, which takes 50 to 500 µs for an operation, and a trace asks for
the same ones again and again: in each tile, layer and policy. A result depends only on shapes, strides, dtypes and
plain values. So it is remembered under these as long as the process lives, and made again with one allocation.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

_PLAIN = (Tensor, nn.Parameter)  # other classes of tensors may do more than their shapes say


class _Fresh(NamedTuple):
    """How to make a tensor on meta with a storage of its own."""

    size: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype

    def make(self) -> Tensor:
        return torch.empty_strided(self.size, self.stride, dtype=self.dtype, device="meta")


_FIRST = object()  # an operation in place: it returns its first argument, whose shape stays as it is
_ASK = object()  # nothing to be remembered: a view, or a result that is not on meta alone
_known: dict[Any, Any] = {}  # by operator and arguments: one of these, or a tuple of what it returns


def run_on_meta(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """What `func(*args, **kwargs)` returns.

    Raises:
        RuntimeError: and whatever else the operator raises. Only what has succeeded is remembered.
    """
    if func.namespace != "aten":  # custom operators may count, or do other things besides
        return func(*args, **kwargs)
    try:
        key = (func, _described(args), tuple((name, _described(value)) for name, value in kwargs.items()))
        known = _known.get(key)
    except TypeError:  # an argument says more than its shape does, or can't be looked up
        return func(*args, **kwargs)
    if known is None:
        before = key[1][0] if args else None
        out = func(*args, **kwargs)
        _known[key] = _remembered(func, args, kwargs, before, out)
        return out
    if known is _ASK:
        return func(*args, **kwargs)
    if known is _FIRST:
        return args[0]
    made = tuple(each.make() if isinstance(each, _Fresh) else each for each in known)
    return made[0] if len(func._schema.returns) == 1 else made


def _described(value: Any) -> Any:
    """Equal for arguments that give results of equal shapes. 1, 1.0 and True are equal, but their results differ.

    Raises:
        TypeError: an argument says more than its shape does.
    """
    if isinstance(value, Tensor):
        if not value.is_meta or type(value) not in _PLAIN:
            raise TypeError
        return value.shape, value.stride(), value.dtype
    if isinstance(value, (list, tuple)):
        return tuple(map(_described, value))
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool, torch.Generator)):
        raise TypeError
    return type(value), value


def _remembered(func: Any, args: Any, kwargs: dict[str, Any], before: Any, out: Any) -> Any:
    """What to keep of a result: how to make it again, or that this can't be known.

    `before` is the first argument as it was described before the call.
    """
    schema = func._schema
    if schema.is_mutable:
        stays = args and out is args[0] and _described(out) == before
        others = [argument for argument in schema.arguments[1:] if argument.alias_info is not None]
        return _FIRST if stays and not others else _ASK
    outputs = (out,) if len(schema.returns) == 1 else out
    if any(isinstance(each, (list, tuple)) for each in outputs):
        return _ASK
    tensors = [each for each in outputs if isinstance(each, Tensor)]
    storages = [tensor.untyped_storage()._cdata for tensor in tensors]
    given = [*args, *kwargs.values()]
    given += [each for some in given if isinstance(some, (list, tuple)) for each in some]
    taken = {each.untyped_storage()._cdata for each in given if isinstance(each, Tensor)}
    if len({*storages, *taken}) != len(storages) + len(taken) or not all(map(_is_fresh, tensors)):
        return _ASK
    return tuple(_fresh(each) if isinstance(each, Tensor) else each for each in outputs)


def _fresh(tensor: Tensor) -> _Fresh:
    return _Fresh(tensor.shape, tensor.stride(), tensor.dtype)


def _is_fresh(tensor: Tensor) -> bool:
    """Whether a tensor of this shape, made anew, takes what this one takes."""
    if not tensor.is_meta or type(tensor) is not Tensor:
        return False
    size = _fresh(tensor).make().untyped_storage().nbytes()
    return tensor.storage_offset() == 0 and tensor.untyped_storage().nbytes() == size
