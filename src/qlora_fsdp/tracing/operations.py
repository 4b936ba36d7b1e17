"""The cost of one torch operation: FLOPs for matrix products and attention, bytes moved for all others."""

from __future__ import annotations

from functools import cache
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from qlora_fsdp.memory.traced import Operations

aten: Any = torch.ops.aten

# A product with fewer operations for each byte of its factors and its result, such as one of low rank, takes as long as
# the bytes do: an H200 computes some 600e12 operations while it moves 3e12 bytes.
LEAST_INTENSITY = 128
# Grouped kernels compute whole tiles, and few groups end with one. With a tile of 128 rows more for each group, the
# rates that an H200 reached with 256 to 4,096 rows a group (467 to 686 TFLOP/s) are one, 700 TFLOP/s within 1 %.
GROUP_TILE = 128


def operations_of(func: Any, args: Any, out: Any) -> Operations:
    """The work that an operator with these arguments gives a GPU."""
    operation, name = func.overloadpacket, func.overloadpacket._qualified_op_name
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
    return Operations(products=flops) if flops >= LEAST_INTENSITY * num_bytes else Operations(moved=num_bytes)


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
    is_view = any(value.alias_info is not None and not value.alias_info.is_write for value in func._schema.returns)
    return (
        is_view or name.startswith(("aten::empty", "aten::new_empty")) or name in ("aten::_unsafe_view", "aten::set_")
    )


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
