"""Follows the memory of tensors by the life of their storages, on meta as on any device."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from qlora_fsdp.layers.kernels.launch import times
from qlora_fsdp.memory.traced import Operations
from qlora_fsdp.tracing.known_shapes import run_on_meta
from qlora_fsdp.tracing.operations import operations_of

aten: Any = torch.ops.aten


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
        self.peak, self.operations = self.now, Operations()

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
        is_refused = func is aten._grouped_mm.default and args[0].is_meta and args[0].dtype != torch.bfloat16
        out = _grouped_mm(*args, **(kwargs or {})) if is_refused else run_on_meta(func, args, kwargs or {})
        if self._is_paused:
            return out
        for leaf in (out,) if isinstance(out, Tensor) else tree_leaves(out):
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
        return int(query.numel() * 4 + (2 * query.nbytes if query.shape[heads] != key.shape[heads] else 0))
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
