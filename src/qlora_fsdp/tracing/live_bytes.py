"""Follows the memory of tensors by the life of their storages, on meta as on any device; and counts what a GPU does.

The work is floating-point operations of matrix products and attention, and the bytes that all other operations move.

Runs torch's operations on meta, each only the first time that it gets tensors of these shapes.

Torch finds the shape of most results on meta in Python, which takes 50 to 500 µs for an operation, and a trace asks for
the same ones again and again: in each tile, layer and policy. A result depends only on shapes, strides, dtypes and
plain values. So it is remembered under these as long as the process lives, and made again with one allocation.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from qlora_fsdp.layers.kernels.launch import times
from qlora_fsdp.memory.traced import Operations

aten: Any = torch.ops.aten

# A product with fewer operations for each byte of its factors and its result, such as one of low rank, takes as long as
# the bytes do: an H200 computes some 600e12 operations while it moves 3e12 bytes.
LEAST_INTENSITY = 128
# Grouped kernels compute whole tiles, and few groups end with one. With a tile of 128 rows more for each group, the
# rates that an H200 reached with 256 to 4,096 rows a group (467 to 686 TFLOP/s) are one, 700 TFLOP/s within 1 %.
GROUP_TILE = 128
_PLAIN = (Tensor, nn.Parameter)  # other classes of tensors may do more than their shapes say


class LiveBytes(TorchDispatchMode):
    """While it is active, it counts the bytes of tensors that operations have made and that are still alive.

    A storage counts once, however many views it has. Tensors on meta have no values. Where a model's code asks for one
    all the same (`if mask.all():`), it is told 0: it then makes the masks that rows of several lengths need.

    Attributes:
        now: bytes that are alive.
        peak: the most that were alive since `start_phase`.
        operations: the work for the GPU since then.
    """

    def __init__(self, known: Iterable[Tensor]) -> None:
        """`known`: tensors that do not count, such as parameters."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._storages: dict[int, weakref.ref[Any]] = {}
        self._is_paused = False
        self.operations = Operations()
        self.now = self.peak = 0
        self.know(known)

    def know(self, tensors: Iterable[Tensor]) -> None:
        """These tensors do not count."""
        for tensor in tensors:
            self._follow(tensor, 0)

    def start_phase(self) -> None:
        """Look for a new peak, and count operations anew."""
        self.peak = self.now
        self.operations = Operations()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """A context whose new tensors do not count, however long they live."""
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = False

    def move(self, num_bytes: int) -> None:
        """Count what a kernel moves that is not one of torch's."""
        if not self._is_paused:
            self.operations += Operations(moved=num_bytes) * times()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is aten._local_scalar_dense.default and args[0].is_meta:
            return 0
        kwargs = kwargs or {}
        if func is aten._grouped_mm.default and args[0].is_meta and args[0].dtype != torch.bfloat16:
            out = _grouped_mm(*args, **kwargs)
        else:
            out = run_on_meta(func, args, kwargs)
        if self._is_paused:
            return out
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self._follow(leaf, leaf.untyped_storage().nbytes())
        self.peak = max(self.peak, self.now + _bytes_inside(func.overloadpacket, args))
        self.operations += operations_of(func, args, out) * times()
        return out

    def _follow(self, tensor: Tensor, size: int) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._storages:
            return

        def forget(_: Any) -> None:
            del self._storages[key]
            self.now -= size

        self._storages[key] = weakref.ref(storage, forget)
        self.now += size


def _bytes_inside(operation: Any, args: Any) -> int:
    """Bytes that a kernel allocates for itself, where no mode sees it."""
    if operation is aten.logsumexp:  # the exponentials, twice
        return int(2 * args[0].nbytes)
    name = operation._qualified_op_name
    if name in _FLASH_BACKWARD:  # fp32 sums of the queries' gradient; those of keys and values for each head of queries
        query, key = args[1:3]
        heads = 1 if query.ndim == 3 else -3
        num_bytes = int(query.numel() * 4)
        if query.shape[heads] != key.shape[heads]:
            num_bytes += 2 * query.nbytes
        return num_bytes
    if name == _EFFICIENT_BACKWARD and args[1].shape[-1] > _MAX_IN_REGISTERS:
        query = args[1]
        return int(query.numel() * 4)  # fp32 sums of the queries' gradient
    return 0


def _grouped_mm(a: Tensor, b: Tensor, offs: Tensor | None = None, *_: Any, **__: Any) -> Tensor:
    """The shape of a grouped product, which torch gives on meta for bfloat16 alone."""
    if a.ndim == 2 and b.ndim == 2:
        assert offs is not None
        return a.new_empty(len(offs), a.shape[0], b.shape[1])
    return a.new_empty(*a.shape[:-1], b.shape[-1])


_EFFICIENT_BACKWARD = "aten::_scaled_dot_product_efficient_attention_backward"
_MAX_IN_REGISTERS = 128  # head size up to which that kernel keeps its sums to itself
_FLASH_BACKWARD = {
    "aten::_scaled_dot_product_flash_attention_backward",
    "torch_attn::_varlen_attn_backward",
}


def operations_of(func: Any, args: Any, out: Any) -> Operations:
    """The work that an operator with these arguments gives a GPU."""
    operation = func.overloadpacket
    name = operation._qualified_op_name
    if name in _ATTENTION:
        return Operations(attention=_attention_flops(name, args))
    num_bytes = _num_bytes(func, args, out)
    if operation not in _PRODUCTS:
        return Operations(moved=num_bytes)
    a, b = args[_PRODUCTS[operation] :][:2]
    flops = 2.0 * a.numel() * b.shape[-1]
    if operation is aten._scaled_mm:
        return Operations(fp8=flops)
    if operation is aten._grouped_mm and b.ndim == 3 and b.shape[-1] >= GROUP_TILE:
        flops *= 1 + GROUP_TILE * len(b) / len(a)
    if flops >= LEAST_INTENSITY * num_bytes:
        return Operations(products=flops)
    return Operations(moved=num_bytes)


def _num_bytes(func: Any, args: Any, out: Any) -> int:
    """Bytes that an operator reads and writes; 0 if it makes a view or room for a tensor."""
    if _moves_nothing(func):
        return 0
    written = sum(_size(leaf) for leaf in tree_leaves(out) if isinstance(leaf, Tensor))
    if func.overloadpacket in _LOOK_UPS:
        return 2 * written
    return written + sum(_size(leaf) for leaf in tree_leaves(args) if isinstance(leaf, Tensor))


def _size(tensor: Tensor) -> int:
    """Bytes of a tensor; what is expanded counts once."""
    return min(tensor.nbytes, tensor.untyped_storage().nbytes())


@cache
def _moves_nothing(func: Any) -> bool:
    name = func.overloadpacket._qualified_op_name
    if name in ("aten::_unsafe_view", "aten::set_") or name.startswith(("aten::empty", "aten::new_empty")):
        return True
    aliases = [value.alias_info for value in func._schema.returns if value.alias_info is not None]
    return any(not alias.is_write for alias in aliases)  # a view


def _attention_flops(name: str, args: Any) -> float:
    """Floating-point operations of attention, which is causal."""
    is_backward = name.endswith("_backward")
    query, key, value = args[1:4] if is_backward else args[:3]  # the gradient comes before them
    longest = key.shape[-2] if query.ndim == 4 else next(arg for arg in args if type(arg) is int)  # varlen's max_q
    forward: float = 2.0 * prod(query.shape[:-1]) * longest * (query.shape[-1] + value.shape[-1]) / 2
    return 2.5 * forward if is_backward else forward


# By operation: the place of the first factor among its arguments.
_PRODUCTS = {
    aten.mm: 0,
    aten.bmm: 0,
    aten.addmm: 1,
    aten.addmm_: 1,
    aten.baddbmm: 1,
    aten._scaled_mm: 0,
    aten._grouped_mm: 0,
}
_LOOK_UPS = {aten.embedding, aten.index_select, aten.gather, aten.index}  # they read as much as they write
_FORWARD = (
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "torch_attn::_varlen_attn",
)
_ATTENTION = {*_FORWARD, *(f"{name}_backward" for name in _FORWARD)}


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
