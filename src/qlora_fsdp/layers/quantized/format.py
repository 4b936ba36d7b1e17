"""How a quantized weight is stored, and what quantizes and dequantizes it.

A weight W of `out_features` x `in_features` becomes two or three tensors. Ranks can own rows (or chunks) of each:

    codes          `storage` [out, in / 2 bytes] (4-bit) or [out, in bytes] (int8, fp8)
    scales         nf4, fp4: the absmax of each block, float32 [out, in / blocksize]; with double quantization one byte
                   each, in `storage`
                   int4, mxfp4: the scale of each block in `scale_dtype`, as bytes of float32 [out, in / blocksize
                   scales]; a power of two of mxfp4 is kept in bfloat16, whose kernels are int4's
                   nvfp4: float8_e4m3fn, as bytes of float32 like int4's
                   int8: the absmax of each row, float32 [out]
                   fp8: the scale of each row, float32 [out]
    nested_scales  with double quantization only: float32 [groups + 1]. The absmax of each 256 scales in row-major
                   order, and last the mean that was subtracted from all scales
    global_scales  nvfp4 only: by what the scales of a row are divided, float32 [out]. It is one number for the whole
                   weight, which each row has, so that rows can be cut anywhere. Of files in which a weight is in
                   several tensors (experts), each tensor's rows have the tensor's own

`Format.parts` computes these shapes for the layers and for the memory plan.

The bytes of nf4, fp4 and int8 are those that bitsandbytes makes of the same tensor: `quantize_4bit`,
`quantize_blockwise` and `int8_vectorwise_quant`. Those of int4, fp8, mxfp4 and nvfp4 are compressed-tensors'
(compressed.py), but for the order of two codes in a byte: the first is in the high half here, as bitsandbytes has it,
and in the low half there.
Scales of 8 and 16 bits are kept in elements of float32, so that what FSDP2 gathers together with codes in bfloat16 has
two dtypes (docs/design.md#bytes).

Because `in_features` is a multiple of the block size, a 4-bit block lies within a row, and a rank can quantize its own
rows alone. Only double quantization looks across rows, which takes one gather of the scales, and nvfp4, which takes the
largest magnitude of all rows first.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.util import find_spec
from typing import Literal

import bitsandbytes.functional as bnb
import torch
from torch import Tensor
from typing_extensions import assert_never

from qlora_fsdp.common.sizes import BLOCKSIZE, NESTED_BLOCKSIZE
from qlora_fsdp.layers.kernels import cpu_quantize
from qlora_fsdp.layers.kernels.launch import moves
from qlora_fsdp.layers.quantized.compressed import (
    FP4_BOOK,
    INT4_BOOK,
    quantize_fp8,
    quantize_int4,
    quantize_mxfp4,
    quantize_nvfp4,
)

INT8_DEQUANT_FACTOR = 1.0 / 127.0
MAX_BNB_ELEMENTS = 2**31 - 1  # bitsandbytes' kernels count in 32 bits
# In which bitsandbytes writes codes: its bnb_4bit_quant_storage. Here they are kept and gathered in bfloat16, which
# every supported torch shards.
STORAGE_DTYPES = (torch.uint8, torch.bfloat16, torch.float16, torch.float32)
VALUES_A_TIME = 2**22  # quantized or dequantized at a time by plain torch: 16 MiB in float32
QuantType = Literal["nf4", "fp4", "int8", "int4", "fp8", "mxfp4", "nvfp4"]


@dataclass(frozen=True)
class Format:
    """How a weight is quantized and stored.

    Attributes:
        quant_type: what the codes stand for.
        double_quant: nf4 and fp4 only: the scales are quantized too (QLoRA, arXiv:2305.14314, section 3).
        blocksize: 4-bit only: weights that share a scale.
        storage: dtype in which codes and quantized scales are kept and gathered. Its values mean nothing: only the
            bytes count.
        dequantizer: nf4 and fp4 only: whose kernel dequantizes whole weights on a GPU (`kernels.dequantize`). It is no
            part of what is stored.
        scale_dtype: the dtype of compressed-tensors' scales. Those of int4 and fp8 are rounded to the model's,
            mxfp4's are in bfloat16, and nvfp4's in float8_e4m3fn.
    """

    quant_type: QuantType
    double_quant: bool = False
    blocksize: int = BLOCKSIZE
    storage: torch.dtype = torch.bfloat16
    dequantizer: Literal["bitsandbytes", "triton"] = field(default="bitsandbytes", compare=False)
    scale_dtype: torch.dtype = torch.bfloat16

    @property
    def is_4bit(self) -> bool:
        """Whether two weights share a byte and each block of a row has its own scale; others have one scale a row."""
        match self.quant_type:
            case "nf4" | "fp4" | "int4" | "mxfp4" | "nvfp4":
                return True
            case "int8" | "fp8":
                return False
            case _:
                assert_never(self.quant_type)

    @property
    def is_bitsandbytes(self) -> bool:
        """Whether codes and scales are bitsandbytes', which has kernels of its own for them; or compressed-tensors'."""
        match self.quant_type:
            case "nf4" | "fp4" | "int8":
                return True
            case "int4" | "fp8" | "mxfp4" | "nvfp4":
                return False
            case _:
                assert_never(self.quant_type)

    @property
    def has_products(self) -> bool:
        """Whether a kernel multiplies its codes (kernels/triton_products.py)."""
        match self.quant_type:
            case "nf4" | "fp4" | "int8" | "int4" | "mxfp4":
                return True
            case "fp8" | "nvfp4":
                return False
            case _:
                assert_never(self.quant_type)

    @property
    def has_global_scale(self) -> bool:
        """Whether a scale belongs to the whole weight, so that no row can be quantized before all have been seen."""
        match self.quant_type:
            case "nvfp4":
                return True
            case "nf4" | "fp4" | "int8" | "int4" | "fp8" | "mxfp4":
                return False
            case _:
                assert_never(self.quant_type)

    def parts(self, out_features: int, in_features: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Name, shape and dtype of every tensor that stands for a weight of this shape.

        The first dimension of each is the one that ranks split. Rows of bytes may be filled up to a whole element.
        """
        row_bytes = in_features // 2 if self.is_4bit else in_features
        parts: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        parts["codes"] = ((out_features, _units(row_bytes, self.storage)), self.storage)
        if not self.is_4bit:
            return {**parts, "scales": ((out_features,), torch.float32)}
        num_blocks = in_features // self.blocksize
        if not self.is_bitsandbytes:
            num_units = _units(num_blocks * self.scale_dtype.itemsize, torch.float32)
            parts["scales"] = ((out_features, num_units), torch.float32)
            if self.has_global_scale:
                parts["global_scales"] = ((out_features,), torch.float32)
            return parts
        if not self.double_quant:
            return {**parts, "scales": ((out_features, num_blocks), torch.float32)}
        num_groups = math.ceil(out_features * num_blocks / NESTED_BLOCKSIZE)
        return {
            **parts,
            "scales": ((out_features, _units(num_blocks, self.storage)), self.storage),
            "nested_scales": ((num_groups + 1,), torch.float32),  # the last is the mean of all scales
        }

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
        return _pack(rows, self.storage)

    def unpack(self, stored: Tensor, num_bytes: int) -> Tensor:
        """The inverse of `pack`, of any dtype: [rows, units] -> uint8 [rows, num_bytes], contiguous."""
        rows = stored.view(torch.uint8)
        return rows if rows.shape[1] == num_bytes else rows[:, :num_bytes].contiguous()

    def source_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype in which weights of `dtype` are quantized; bitsandbytes' int8 kernel takes float16."""
        return torch.float16 if self.quant_type == "int8" else dtype

    def quantize_rows(self, weight: Tensor, global_scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Quantize whole rows, each independently of all others.

        Args:
            weight: bfloat16, float16 or float32 [rows, in_features]; the kernels of its device are used.
            global_scale: of the whole weight, for formats with `has_global_scale`: float32 [1].

        Returns:
            codes: `storage` [rows, elements].
            scales: as `parts` has them, float32. With double quantization they are not quantized yet: float32
                [rows, in_features / blocksize].
        """
        rows, in_features = weight.shape
        if not self.is_bitsandbytes:
            step = max(1, VALUES_A_TIME // max(1, in_features))
            pieces = [self._quantize_compressed(some, global_scale) for some in weight.split(step)]
            return torch.cat([codes for codes, _ in pieces]), torch.cat([scales for _, scales in pieces])
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

    def _quantize_compressed(self, weight: Tensor, global_scale: Tensor | None) -> tuple[Tensor, Tensor]:
        """The same in a format of compressed-tensors."""
        match self.quant_type:
            case "int4":
                codes, scales = quantize_int4(weight, self.blocksize, self.scale_dtype)
            case "mxfp4":
                codes, scales = quantize_mxfp4(weight)
            case "nvfp4":
                assert global_scale is not None
                codes, scales = quantize_nvfp4(weight, global_scale)
            case "fp8":
                codes, scales = quantize_fp8(weight, self.scale_dtype)
                scales = scales.unsqueeze(1)
            case "nf4" | "fp4" | "int8":
                raise AssertionError("bitsandbytes' own")
            case _:
                assert_never(self.quant_type)
        return self.pack(codes), self.pack_scales(scales)

    def pack_scales(self, scales: Tensor) -> Tensor:
        """Scales of compressed-tensors as `parts` has them.

        Args:
            scales: `scale_dtype` [rows, in_features / blocksize] for formats of 4 bits, [rows, 1] for fp8.
        """
        return _pack(scales, torch.float32) if self.is_4bit else scales[:, 0].float()

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
        is_too_large = out_features * in_features > MAX_BNB_ELEMENTS
        has_kernel = codes.is_cuda and (self.dequantizer == "triton" or is_too_large) and has_triton()
        if has_kernel or not (self.is_4bit and self.is_bitsandbytes):
            out = torch.empty(out_features, in_features, dtype=dtype, device=codes.device)
            self.dequantize_part(parts, out.unsqueeze(0))
            return out
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
        num_groups, num_rows, num_columns = out.shape
        rows = slice(first_row, first_row + num_rows)
        last_column = first_column + num_columns
        if not self.is_4bit:
            some = codes.view(torch.uint8).unflatten(0, (num_groups, -1))[:, rows, first_column:last_column]
            self._scale_rows(some, scales.view(num_groups, -1)[:, rows], out)
            return
        if out.is_cuda and has_triton():
            from qlora_fsdp.layers.kernels import triton_dequantize

            books = code_book(self.quant_type, out.device), dynamic_map(out.device)
            origin = first_row, first_column
            nested = parts.get("nested_scales")
            stored = scales if self.is_bitsandbytes else scales.view(self.scale_dtype)
            triton_dequantize.dequantize(
                codes,
                stored,
                nested,
                books,
                self.blocksize,
                out,
                origin=origin,
                global_scales=parts.get("global_scales"),
            )
            return
        code_bytes, size = codes.view(torch.uint8), self.blocksize
        scales = self.dequantize_scales(parts, code_bytes.shape[0], 2 * code_bytes.shape[1])
        code_bytes = code_bytes.unflatten(0, (num_groups, -1))[:, rows, first_column // 2 : last_column // 2]
        scales = scales.unflatten(0, (num_groups, -1))[:, rows, first_column // size : last_column // size]
        if not self.is_bitsandbytes:
            self._look_up(code_bytes, scales, out)
            return
        found = {"codes": self.pack(code_bytes.flatten(0, 1)), "scales": scales.flatten(0, 1)}
        plain = replace(self, double_quant=False)
        out.copy_(plain.dequantize(found, num_groups * num_rows, num_columns, out.dtype).view(out.shape))

    def _scale_rows(self, codes: Tensor, scales: Tensor, out: Tensor) -> None:
        """Write codes of 8 bits [groups, rows, columns], uint8, times the scales of their rows into `out`."""
        if self.is_bitsandbytes:
            factors = (scales * INT8_DEQUANT_FACTOR).unsqueeze(2)
            torch.mul(codes.view(torch.int8), factors, out=out)  # in fp32, rounded once
            return
        if out.is_cuda and has_triton():
            from qlora_fsdp.layers.kernels import triton_dequantize

            triton_dequantize.dequantize_fp8(codes, scales, out)
            return
        for some in _row_slices(out):
            values = codes[some].view(torch.float8_e4m3fn).to(out.dtype)  # exact
            torch.mul(values, scales[some].unsqueeze(1), out=out[some])  # in fp32, rounded once

    def _look_up(self, codes: Tensor, scales: Tensor, out: Tensor) -> None:
        """Write what 4-bit codes stand for into `out`, in plain torch.

        Args:
            codes: uint8 [groups, rows, columns / 2].
            scales: float32 [groups, rows, columns / blocksize].
            out: [groups, rows, columns].
        """
        book = code_book(self.quant_type, codes.device)
        byte = torch.arange(256, device=codes.device)
        pairs = torch.stack([book[byte >> 4], book[byte & 15]], 1)
        for some in _row_slices(out):
            values = pairs[codes[some].int()].view(-1, scales.shape[2], self.blocksize)
            out[some] = values.mul_(scales[some].unsqueeze(2)).flatten(1)

    def dequantize_scales(self, parts: Mapping[str, Tensor], out_features: int, in_features: int) -> Tensor:
        """The scales of a 4-bit weight: float32 [out_features, in_features / blocksize]."""
        num_blocks = in_features // self.blocksize
        if not self.is_bitsandbytes:
            scales = parts["scales"].view(self.scale_dtype)[:, :num_blocks].float()
            return scales / parts["global_scales"].unsqueeze(1) if self.has_global_scale else scales
        if not self.double_quant:
            return parts["scales"]
        nested = parts["nested_scales"]
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
    """The 16 values of a 4-bit code: float32. The largest of nf4 and fp4 is 1 (arXiv:2305.14314, appendix E)."""
    match quant_type:
        case "int4":
            values = torch.tensor(INT4_BOOK)
        case "mxfp4" | "nvfp4":
            values = torch.tensor(FP4_BOOK)
        case _:
            values = bnb.get_4bit_type(quant_type, device="cpu")
    return values.float().to(device)


@cache
def dynamic_map(device: torch.device) -> Tensor:
    """bitsandbytes' code book for quantized scales: float32 [256] (arXiv:2110.02861, section 2.1)."""
    code_book: Tensor = bnb.create_dynamic_map()
    return code_book.to(device)


def _units(num_bytes: int, storage: torch.dtype) -> int:
    """How many elements of a dtype hold so many bytes."""
    return -(num_bytes // -storage.itemsize)


def _pack(rows: Tensor, storage: torch.dtype) -> Tensor:
    """[rows, n] of any dtype as bytes in elements of another; the last of a row is filled up with zeros."""
    rows = rows.view(torch.uint8)
    padding = -rows.shape[1] % storage.itemsize
    if padding:
        rows = torch.nn.functional.pad(rows, (0, padding))
    return rows.contiguous().view(storage)


def _row_slices(out: Tensor) -> Iterator[tuple[int, slice]]:
    """Indices of a few rows at a time of a tensor [groups, rows, columns]."""
    num_groups, num_rows, num_columns = out.shape
    step = max(1, VALUES_A_TIME // max(1, num_columns))
    for group in range(num_groups):
        for start in range(0, num_rows, step):
            yield group, slice(start, start + step)
