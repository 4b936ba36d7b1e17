"""Limits for what transformers makes while it builds a model, beside the weights: sizes in config.json are anybody's.

A class makes what its config says: masks of positions by positions, tables of positions, places of patches, modules
without end. No list of names can tell which sizes are multiplied with one another. So each call of torch is looked at
before it is made. One that may make much is made on the meta device first, which has shapes and no memory, and is
refused if that is more than any model has.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

LARGE = 2**24  # values; buffers of models have fewer
LOOKED_AT = 2**20  # values; what is made of fewer is not counted
MOST_BYTES = 2**31  # of all that a build makes in memory, a multiple of what the models with the largest masks have
MOST_WEIGHT_BYTES = 2**38  # of one weight; those of the experts of a layer of Kimi K2 have 2**35
MOST_CALLS = 2**19  # of torch's functions; models with a module for each of thousands of experts call a tenth
_FREE = {nn.init.normal_, nn.init.uniform_, nn.init.zeros_, nn.init.ones_, nn.init.kaiming_uniform_}  # in place


class TooLarge(ValueError):
    """A config asks for more than any model has; the text is a reason."""


class LimitedBuilding(TorchFunctionMode):
    """Refuses to make more than `MOST_BYTES`, or to call torch more than `MOST_CALLS` times.

    With `on_meta`, the parameters are put on meta as soon as they are made (accelerate's `init_empty_weights`). What is
    empty until then takes no memory, but zeros are written: 5 GiB for each layer of Llama 4 Scout. So large tensors of
    zeros are made on meta at once, and no numbers are drawn for what is there.

    Raises:
        TooLarge: the config asks for it.
    """

    def __init__(self, on_meta: bool) -> None:
        super().__init__()
        self.on_meta = on_meta
        self._num_bytes = 0
        self._num_calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self._num_calls += 1
        if self._num_calls > MOST_CALLS:
            raise TooLarge(f"it asks for so many modules that torch is called {MOST_CALLS:,} times")
        made = _make_on_meta(func, args, kwargs) if self.on_meta else None
        if made is not None:
            return made
        makes_nothing = func in _FREE or getattr(func, "__name__", "") in ("__get__", "__set__")
        if not makes_nothing and _may_make_much(args, kwargs):
            self._count(func, args, kwargs)
        return func(*args, **kwargs)

    def _count(self, func: Any, args: Any, kwargs: Any) -> None:
        for made in _made_on_meta(func, args, kwargs):
            self._num_bytes += made.untyped_storage().nbytes()
            if self._num_bytes > MOST_BYTES:
                raise TooLarge(
                    f"it asks for more than {MOST_BYTES / 2**30:.0f} GiB beside the weights, among them a tensor of "
                    f"{list(made.shape)}, by sizes such as positions or patches"
                )


def _make_on_meta(func: Any, args: Any, kwargs: Any) -> Tensor | None:
    """What a call gives where parameters go to meta, without numbers and large zeros; None: make the call itself."""
    if func is nn.init.normal_ and kwargs["tensor"].is_meta:
        return cast(Tensor, kwargs["tensor"])
    if func is torch.empty:
        return _make_empty(args, kwargs)
    if func is torch.zeros and "device" not in kwargs:
        zeros = torch.zeros(*args, **kwargs, device="meta")
        return zeros if zeros.numel() >= LARGE else None
    return None


def _make_empty(args: Any, kwargs: Any) -> Tensor:
    """A weight, of which the system has to give the addresses and no memory."""
    if _may_make_much(args, kwargs, MOST_WEIGHT_BYTES // 8):
        made = next(_made_on_meta(torch.empty, args, kwargs), None)  # None: the call below tells what is wrong
        if made is not None and made.untyped_storage().nbytes() > MOST_WEIGHT_BYTES:
            raise TooLarge(f"it asks for a weight of {list(made.shape)}, more than any model has")
    return torch.empty(*args, **kwargs)


def _may_make_much(args: Any, kwargs: Any, least: int = LOOKED_AT) -> bool:
    """Whether a call may make a tensor of `least` values: it makes all of what it is given, times all numbers."""
    bound = 1.0
    for leaf in tree_leaves((args, kwargs)):
        if isinstance(leaf, Tensor):
            if leaf.is_meta:
                return False  # and so is what is made of it
            bound *= max(1, leaf.numel())
        elif isinstance(leaf, torch.device) and leaf.type == "meta":
            return False  # it goes there, as each parameter does that accelerate has made empty
        elif isinstance(leaf, (int, float)) and math.isfinite(leaf):
            bound *= max(1.0, abs(leaf))
    return bound >= least


def _made_on_meta(func: Any, args: Any, kwargs: Any) -> Iterator[Tensor]:
    """The tensors that a call makes, on meta, without those that are parts of what it is given."""
    args, kwargs = tree_map(_to_meta, (args, kwargs))
    given = {leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
    try:
        with torch.device("meta"):
            results = func(*args, **({**kwargs, "device": "meta"} if "device" in kwargs else kwargs))
    except Exception:  # what depends on values can't be made on meta; the call itself tells what is wrong
        return
    for leaf in tree_leaves(results):
        if isinstance(leaf, Tensor) and leaf.untyped_storage()._cdata not in given:
            yield leaf


def _to_meta(value: Any) -> Any:
    return torch.empty_like(value, device="meta") if isinstance(value, Tensor) else value
