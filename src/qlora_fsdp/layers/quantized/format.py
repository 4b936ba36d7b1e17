"""How a quantized weight is stored, and the kernels that quantize and dequantize it, which are bitsandbytes'.

A weight W of `out_features` x `in_features` becomes two or three tensors. Ranks can own rows (or chunks) of each:

    codes          storage [out, in / 2 bytes] (4-bit) or [out, in bytes] (int8)
    scales         4-bit: the absmax of each block, float32 [out, in / blocksize]; with double quantization one byte
                   each, in `storage`
                   int8: the absmax of each row, float32 [out]
    nested_scales  with double quantization only: float32 [groups + 1]. The absmax of each 256 scales in row-major
                   order, and last the mean that was subtracted from all scales

layers/quantized/format.py computes these shapes for the layers and for the memory plan.

The bytes are those that bitsandbytes makes of the same tensor: `quantize_4bit`, `quantize_blockwise` and
`int8_vectorwise_quant`. Because `in_features` is a multiple of the block size, a 4-bit block lies within a row, and a
rank can quantize its own rows alone. Only double quantization looks across rows, which takes one gather of the scales.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.util import find_spec
from typing import Literal, NamedTuple

import bitsandbytes.functional as bnb
import torch
from torch import Tensor
from typing_extensions import assert_never

from qlora_fsdp.common.sizes import BLOCKSIZE, NESTED_BLOCKSIZE
from qlora_fsdp.layers.kernels import cpu_quantize
from qlora_fsdp.layers.kernels.launch import moves

INT8_DEQUANT_FACTOR = 1.0 / 127.0
MAX_BNB_ELEMENTS = 2**31 - 1  # bitsandbytes' kernels count in 32 bits
# In which bitsandbytes writes codes: its bnb_4bit_quant_storage. Here they are kept and gathered in bfloat16, which
# every supported torch shards.
STORAGE_DTYPES = (torch.uint8, torch.bfloat16, torch.float16, torch.float32)
QuantType = Literal["nf4", "fp4", "int8"]


@dataclass(frozen=True)
class Format:
    """How a weight is quantized and stored.

    Attributes:
        quant_type: code book of the codes.
        double_quant: 4-bit only: the scales are quantized too (QLoRA, arXiv:2305.14314, section 3).
        blocksize: 4-bit only: weights that share a scale.
        storage: dtype in which codes and quantized scales are kept and gathered. Its values mean nothing: only the
            bytes count.
        dequantizer: 4-bit only: whose kernel dequantizes whole weights on a GPU (`kernels.dequantize`). It is no part
            of what is stored.
    """

    quant_type: QuantType
    double_quant: bool = False
    blocksize: int = BLOCKSIZE
    storage: torch.dtype = torch.bfloat16
    dequantizer: Literal["bitsandbytes", "triton"] = field(default="bitsandbytes", compare=False)

    @property
    def is_4bit(self) -> bool:
        return is_4bit(self.quant_type)

    def parts(self, out_features: int, in_features: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Name, shape and dtype of every tensor that stands for a weight of this shape."""
        found = stored_parts(
            self.quant_type, self.double_quant, self.blocksize, self.storage.itemsize, out_features, in_features
        )
        return {name: (part.shape, self.storage if part.is_packed else torch.float32) for name, part in found.items()}

    def num_bytes(self, out_features: int, in_features: int) -> int:
        """Bytes of the whole weight, codes and scales."""
        return sum(math.prod(shape) * dtype.itemsize for shape, dtype in self.parts(out_features, in_features).values())

    def why_not(self, in_features: int) -> str | None:
        """Why a weight with rows of this length can't be quantized; None if it can."""
        if self.is_4bit and in_features % self.blocksize:
            return f"has in_features={in_features}, not a multiple of the 4-bit block size {self.blocksize}"
        return None

    def pack(self, rows: Tensor) -> Tensor:
        """Bytes [rows, n] -> `storage` [rows, ceil(n / itemsize)]; the last element is filled up with zeros."""
        rows = rows.view(torch.uint8)
        padding = -rows.shape[1] % self.storage.itemsize
        if padding:
            rows = torch.nn.functional.pad(rows, (0, padding))
        return rows.contiguous().view(self.storage)

    def unpack(self, stored: Tensor, num_bytes: int) -> Tensor:
        """The inverse of `pack`: `storage` [rows, units] -> uint8 [rows, num_bytes], contiguous."""
        rows = stored.view(torch.uint8)
        return rows if rows.shape[1] == num_bytes else rows[:, :num_bytes].contiguous()

    def source_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype in which weights of `dtype` are quantized; bitsandbytes' int8 kernel takes float16."""
        return dtype if self.is_4bit else torch.float16

    def quantize_rows(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Quantize whole rows, each independently of all others.

        Args:
            weight: bfloat16, float16 or float32 [rows, in_features]; the kernels of its device are used.

        Returns:
            codes: `storage` [rows, elements].
            absmax: float32 [rows, in_features / blocksize], or [rows] for int8. These scales are not quantized yet.
        """
        rows, in_features = weight.shape
        if not self.is_4bit:
            source = weight.to(self.source_dtype(weight.dtype))
            codes, absmax, _ = torch.ops.bitsandbytes.int8_vectorwise_quant.default(source)
            return self.pack(codes), absmax
        if weight.device.type == "cpu":
            packed, absmax = cpu_quantize.quantize_4bit(weight, self.quant_type, self.blocksize)
            return self.pack(packed), absmax
        packed, absmax = torch.ops.bitsandbytes.quantize_4bit.default(
            weight.contiguous(), self.blocksize, self.quant_type, torch.uint8
        )
        return self.pack(packed.view(rows, in_features // 2)), absmax.view(rows, in_features // self.blocksize)

    def quantize_scales(self, absmax: Tensor) -> tuple[Tensor, Tensor]:
        """Double quantization: quantize the scales of a whole weight.

        Args:
            absmax: float32 [out_features, blocks].

        Returns:
            scales: `storage` [out_features, elements].
            nested_scales: float32 [groups + 1].
        """
        offset = absmax.mean()
        codes, state = bnb.quantize_blockwise(absmax.flatten() - offset, blocksize=NESTED_BLOCKSIZE)
        return self.pack(codes.view(absmax.shape)), torch.cat([state.absmax.flatten(), offset.view(1)])

    def dequantize(
        self, parts: Mapping[str, Tensor], out_features: int, in_features: int, dtype: torch.dtype
    ) -> Tensor:
        """The weight [out_features, in_features] in `dtype`, from its whole (gathered) parts."""
        codes, scales = parts["codes"], parts["scales"]
        if codes.is_meta:
            # bitsandbytes makes the scales first, and keeps them meanwhile.
            makes_scales = self.double_quant and self.dequantizer == "bitsandbytes"
            num_scales = out_features * (in_features // self.blocksize) if makes_scales else 0
            made = torch.empty(num_scales, dtype=torch.float32, device="meta")
            out = torch.empty(out_features, in_features, dtype=dtype, device="meta")
            moves(out.nbytes + 2 * made.nbytes + sum(part.nbytes for part in parts.values()))
            return out
        if not self.is_4bit:
            rows = self.unpack(codes, in_features).view(torch.int8)
            out = torch.empty(rows.shape, dtype=dtype, device=rows.device)
            return torch.mul(rows, (scales * INT8_DEQUANT_FACTOR).unsqueeze(1), out=out)  # in fp32, rounded once
        is_too_large = out_features * in_features > MAX_BNB_ELEMENTS
        if codes.is_cuda and (self.dequantizer == "triton" or is_too_large) and has_triton():
            from qlora_fsdp.layers.kernels import triton_dequantize

            out = torch.empty(out_features, in_features, dtype=dtype, device=codes.device)
            books = code_book(self.quant_type, codes.device), dynamic_map(codes.device)
            return triton_dequantize.dequantize(codes, scales, parts.get("nested_scales"), books, self.blocksize, out)
        scales = self.dequantize_scales(parts, out_features, in_features)
        weight: Tensor = torch.ops.bitsandbytes.dequantize_4bit.default(
            codes.view(torch.uint8).view(-1, 1),
            scales.view(-1),
            self.blocksize,
            self.quant_type,
            (out_features, in_features),
            dtype,
        )
        return weight

    def dequantize_part(
        self, parts: Mapping[str, Tensor], out: Tensor, first_row: int = 0, first_column: int = 0
    ) -> None:
        """Write some rows and columns of a weight into `out`, or the same ones of each of several matrices.

        Args:
            parts: the whole (gathered) parts of the weight.
            out: [groups, rows, columns], in the dtype wanted; the weight is this many matrices, one below the other.
                Groups and rows may be strided, as when adapters have columns or rows of their own between them. Columns
                are a multiple of the block size.
            first_row: the first row to write of each matrix.
            first_column: a multiple of the block size.
        """
        codes, scales = parts["codes"], parts["scales"]
        if out.is_meta:
            moves(out.nbytes + out.numel() // (2 if self.is_4bit else 1))
            return
        if self.is_4bit and out.is_cuda and has_triton():
            from qlora_fsdp.layers.kernels import triton_dequantize

            books = code_book(self.quant_type, out.device), dynamic_map(out.device)
            origin = first_row, first_column
            nested = parts.get("nested_scales")
            triton_dequantize.dequantize(codes, scales, nested, books, self.blocksize, out, origin=origin)
            return
        num_groups, num_rows, num_columns = out.shape
        rows = slice(first_row, first_row + num_rows)
        last_column = first_column + num_columns
        if not self.is_4bit:
            some = codes.view(torch.int8).unflatten(0, (num_groups, -1))[:, rows, first_column:last_column]
            factors = (scales * INT8_DEQUANT_FACTOR).view(num_groups, -1, 1)[:, rows]
            torch.mul(some, factors, out=out)  # in fp32, rounded once
            return
        code_bytes, size = codes.view(torch.uint8), self.blocksize
        scales = self.dequantize_scales(parts, code_bytes.shape[0], 2 * code_bytes.shape[1])
        code_bytes = code_bytes.unflatten(0, (num_groups, -1))[:, rows, first_column // 2 : last_column // 2]
        scales = scales.unflatten(0, (num_groups, -1))[:, rows, first_column // size : last_column // size]
        found = {"codes": self.pack(code_bytes.flatten(0, 1)), "scales": scales.flatten(0, 1)}
        plain = replace(self, double_quant=False)
        out.copy_(plain.dequantize(found, num_groups * num_rows, num_columns, out.dtype).view(out.shape))

    def dequantize_scales(self, parts: Mapping[str, Tensor], out_features: int, in_features: int) -> Tensor:
        """The scales of a 4-bit weight: float32 [out_features, in_features / blocksize]."""
        if not self.double_quant:
            return parts["scales"]
        nested = parts["nested_scales"]
        num_blocks = in_features // self.blocksize
        codes = self.unpack(parts["scales"], num_blocks)
        if nested.is_cuda and has_triton():
            from qlora_fsdp.layers.kernels import triton_dequantize

            out = nested.new_empty(out_features, num_blocks)
            return triton_dequantize.dequantize_scales(codes, nested, dynamic_map(nested.device), out)
        absmax: Tensor = torch.ops.bitsandbytes.dequantize_blockwise.default(
            codes,
            nested[:-1],
            dynamic_map(nested.device),
            NESTED_BLOCKSIZE,
            torch.float32,
        )
        return absmax.add_(nested[-1]).view(out_features, num_blocks)


@cache
def has_triton() -> bool:
    """Whether Triton is installed, so that a GPU's kernels are ours."""
    return find_spec("triton") is not None


@cache
def code_book(quant_type: str, device: torch.device) -> Tensor:
    """The 16 values of a 4-bit code: float32, and the largest magnitude is 1 (arXiv:2305.14314, appendix E)."""
    values: Tensor = bnb.get_4bit_type(quant_type, device="cpu")
    return values.float().to(device)


@cache
def dynamic_map(device: torch.device) -> Tensor:
    """bitsandbytes' code book for quantized scales: float32 [256] (arXiv:2110.02861, section 2.1)."""
    code_book: Tensor = bnb.create_dynamic_map()
    return code_book.to(device)


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
