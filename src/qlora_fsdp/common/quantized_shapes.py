"""The tensors that a quantized weight is stored in: their names, shapes and bytes.

The layers allocate these tensors (layers/quantized/format.py).
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

from typing_extensions import assert_never

from qlora_fsdp.common.sizes import NESTED_BLOCKSIZE

QuantType = Literal["nf4", "fp4", "int8"]


class StoredPart(NamedTuple):
    """One of the tensors that stand for a quantized weight.

    Attributes:
        shape: its first dimension is the one that ranks split.
        is_packed: whether it holds raw bytes, in elements of the storage dtype; if not, it is float32.
    """

    shape: tuple[int, ...]
    is_packed: bool


def is_4bit(quant_type: QuantType) -> bool:
    """Whether two weights share a byte and each block of a row has its own scale; int8 has one scale per row."""
    match quant_type:
        case "nf4" | "fp4":
            return True
        case "int8":
            return False
        case _:
            assert_never(quant_type)


def stored_parts(
    quant_type: QuantType, double_quant: bool, blocksize: int, storage_bytes: int, out_features: int, in_features: int
) -> dict[str, StoredPart]:
    """Name and shape of every tensor that stands for a weight [out_features, in_features].

    Args:
        quant_type: code book of the codes.
        double_quant: 4-bit only: the scales are quantized too.
        blocksize: 4-bit only: weights that share a scale.
        storage_bytes: bytes of one element of the storage dtype, which holds the packed parts.
        out_features: rows of the weight.
        in_features: columns of the weight; a multiple of `blocksize` for 4-bit types.
    """

    def packed(row_bytes: int) -> StoredPart:
        return StoredPart((out_features, -(row_bytes // -storage_bytes)), is_packed=True)  # the last may be padded

    if not is_4bit(quant_type):
        return {"codes": packed(in_features), "scales": StoredPart((out_features,), is_packed=False)}
    codes = packed(in_features // 2)
    num_blocks = in_features // blocksize
    if not double_quant:
        return {"codes": codes, "scales": StoredPart((out_features, num_blocks), is_packed=False)}
    num_groups = math.ceil(out_features * num_blocks / NESTED_BLOCKSIZE)
    nested_scales = StoredPart((num_groups + 1,), is_packed=False)  # the last is the mean of all scales
    return {"codes": codes, "scales": packed(num_blocks), "nested_scales": nested_scales}
