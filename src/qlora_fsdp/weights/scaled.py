"""Tensors of FP8 and MXFP4 checkpoints, whose values are scaled by blocks; the scales are tensors of their own.

FP8 (`quant_method` "fp8", as of DeepSeek-V3): float8_e4m3fn weights `W` with `W_scale_inv`, a float32 scale (or a power
of two in one byte) for each block of 128 x 128 weights, or one for the whole weight.
MXFP4 ("mxfp4", as of gpt-oss; Open Compute Project, Microscaling Formats, version 1.0): `W_blocks`, two 4-bit floats a
byte with the first in the low half, and `W_scales`, a power of two for each 32 weights of a row. The files have each
expert's matrix as the transpose of the model's.

Rows are dequantized while they are read, as transformers does it when it loads such files with `dequantize=True`: the
products are taken in float32, and rounded to the compute dtype. They are then quantized like any others.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from qlora_fsdp.common.errors import CheckpointError
from qlora_fsdp.common.text import list_some
from qlora_fsdp.weights.safetensors_files import StoredTensor

# By the quant_method of a config's quantization_config: how the names of values end, and those of their scales.
ENDINGS = {"fp8": ("", "_scale_inv"), "mxfp4": ("_blocks", "_scales")}
METHODS = tuple(ENDINGS)
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # values of a 4-bit float without its sign, which is the highest bit
MXFP4_BLOCK = 32
VALUES_A_TIME = 2**22  # dequantized at a time: 16 MiB in float32
UNUSED = (".activation_scale", "_activation_scale")  # of inputs in FP8, which are not used here


@dataclass(frozen=True)
class ScaledTensor(StoredTensor):
    """A tensor whose values are scaled by blocks. `shape` is that of the values, of which a byte may hold two.

    Attributes:
        scales: [..., rows of blocks, columns of blocks] with the leading dims of the values; or one element.
        block: rows and columns of the values that share a scale; the last blocks may be smaller.
    """

    scales: StoredTensor
    block: tuple[int, int]

    @property
    def row_bytes(self) -> int:
        return self.shape[-1] * self.dtype.itemsize // (2 if self.is_packed else 1)

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape[:-1]) * self.row_bytes

    @property
    def is_packed(self) -> bool:
        """Whether a byte holds two values of 4 bits."""
        return self.dtype == torch.uint8

    @property
    def scales_per_row(self) -> int:
        return -(-self.shape[-1] // self.block[1])

    def scale_rows(self, first: int, last: int) -> Tensor:
        """The row of scales of each of the rows [first, last) of the values, counted over all matrices: int64 [n]."""
        rows, height = torch.arange(first, last), self.shape[-2]
        return rows // height * -(-height // self.block[0]) + rows % height // self.block[0]


def attach_scales(tensors: Mapping[str, StoredTensor], quantization: Mapping[str, Any]) -> dict[str, StoredTensor]:
    """The tensors of an FP8 or MXFP4 checkpoint, each with its scales.

    Args:
        tensors: as in the files.
        quantization: the config's quantization_config, of a `quant_method` in `METHODS`.

    Raises:
        CheckpointError: tensors lack their scales, or these do not fit; all are listed.
    """
    method, found = quantization["quant_method"], dict[str, StoredTensor]()
    values_end, scales_end = ENDINGS[method]
    problems = []
    for key, stored in tensors.items():
        goes_with_values = key.endswith(scales_end) and key.removesuffix(scales_end) + values_end in tensors
        if goes_with_values or key.endswith(UNUSED):
            continue
        name = key.removesuffix(values_end)
        scales = tensors.get(name + scales_end)
        if not key.endswith(values_end) or (method == "fp8" and scales is None and stored.dtype.itemsize > 1):
            found[key] = stored
        elif scales is None:
            problems.append(f"{key} has no {name}{scales_end}")
        else:
            made = _fp8(stored, scales, quantization) if method == "fp8" else _mxfp4(stored, scales)
            if made is None:
                problems.append(f"{scales.key} {_describe(scales)} does not fit {key} {_describe(stored)}")
            else:
                found[name] = made
    if problems:
        raise CheckpointError(
            f"The checkpoint is in {method}, and {len(problems)} of its tensors can't be "
            f"dequantized. Copy or download it again, or set model.path to the model in full precision:\n"
            f"{list_some(problems)}"
        )
    return found


def _fp8(stored: StoredTensor, scales: StoredTensor, quantization: Mapping[str, Any]) -> ScaledTensor | None:
    """An FP8 tensor with its scales; None if they do not fit."""
    if stored.dtype != torch.float8_e4m3fn or len(stored.shape) < 2:
        return None
    if not (scales.dtype.is_floating_point or scales.dtype == torch.uint8) or scales.dtype == torch.float8_e4m3fn:
        return None
    grid = scales.shape if math.prod(scales.shape) > 1 else (1,) * len(stored.shape)
    if len(grid) != len(stored.shape) or grid[:-2] != stored.shape[:-2]:
        return None
    declared = quantization.get("weight_block_size")
    declared = declared if isinstance(declared, list | tuple) and len(declared) == 2 else (1, 1)
    block = []
    for size, number, wanted in zip(stored.shape[-2:], grid[-2:], declared, strict=True):
        if type(wanted) is int and wanted > 0 and -(-size // wanted) == number:
            block.append(min(wanted, size))
        elif number and size % number == 0:  # the blocks may be smaller in some layers, and one scale may be for all
            block.append(size // number)
        else:
            return None
    is_exponent = scales.dtype == torch.float8_e8m0fnu  # of two, in one byte
    scales = replace(scales, shape=grid, dtype=torch.uint8 if is_exponent else scales.dtype)
    return _scaled(stored, stored.shape, scales, (block[0], block[1]))


def _mxfp4(blocks: StoredTensor, scales: StoredTensor) -> ScaledTensor | None:
    """An MXFP4 tensor with its scales; None if they do not fit."""
    if blocks.dtype != torch.uint8 or scales.dtype != torch.uint8 or len(blocks.shape) != 4:
        return None
    if blocks.shape[-1] != MXFP4_BLOCK // 2 or scales.shape != blocks.shape[:-1]:
        return None
    num_experts, rows, num_blocks, _ = blocks.shape
    return _scaled(blocks, (num_experts, rows, num_blocks * MXFP4_BLOCK), scales, (1, MXFP4_BLOCK))


def _scaled(stored: StoredTensor, shape: tuple[int, ...], scales: StoredTensor, block: tuple[int, int]) -> ScaledTensor:
    return ScaledTensor(stored.key, stored.file, stored.offset, shape, stored.dtype, scales, block)


def _describe(stored: StoredTensor) -> str:
    return f"({str(stored.dtype).removeprefix('torch.')} {list(stored.shape)})"


def dequantize_rows(rows: Tensor, scales: Tensor, columns: int, dtype: torch.dtype) -> Tensor:
    """Rows of a scaled tensor in `dtype`.

    Args:
        rows: uint8 [n, row_bytes], packed 4-bit floats; or float8_e4m3fn [n, values].
        scales: [n, scales], one for each `columns` values of a row: floats, or uint8 exponents of two.
        columns: columns of a block.
        dtype: the dtype of the result [n, values].
    """
    num_values = rows.shape[1] * (2 if rows.dtype == torch.uint8 else 1)
    out = torch.empty(len(rows), num_values, dtype=dtype, device=rows.device)
    step = max(1, VALUES_A_TIME // max(1, num_values))
    for part in range(0, len(rows), step):
        some = slice(part, part + step)
        values = _unpack(rows[some]) if rows.dtype == torch.uint8 else rows[some].float()
        factors = (scales[some].float() - 127.0).exp2() if scales.dtype == torch.uint8 else scales[some].float()
        whole = num_values // columns * columns
        values[:, :whole].unflatten(1, (-1, columns)).mul_(factors[:, : num_values // columns, None])
        values[:, whole:].mul_(factors[:, num_values // columns :])
        out[some] = values
    return out


def _unpack(rows: Tensor) -> Tensor:
    """4-bit floats, two a byte: uint8 [n, bytes] -> float32 [n, 2 * bytes]."""
    return _pairs(rows.device)[rows.int()].flatten(1)


@cache
def _pairs(device: torch.device) -> Tensor:
    """The two values of each byte: float32 [256, 2]."""
    values = torch.tensor([*E2M1, *(-value for value in E2M1)])
    codes = torch.arange(256)
    return torch.stack([values[codes % 16], values[codes // 16]], 1).to(device)


def read_dequantized(stored: ScaledTensor, dtype: torch.dtype) -> Iterator[Tensor]:
    """The values of a tensor in the files, some rows [n, values] at a time, on the CPU."""
    num_rows, step = math.prod(stored.shape[:-1]), max(1, VALUES_A_TIME // max(1, stored.shape[-1]))
    scales = _read(stored.scales, 0, stored.scales.num_bytes).view(stored.scales.dtype).view(-1, stored.scales_per_row)
    value_dtype = torch.uint8 if stored.is_packed else stored.dtype
    for first in range(0, num_rows, step):
        last = min(num_rows, first + step)
        rows = _read(stored, first * stored.row_bytes, (last - first) * stored.row_bytes).view(value_dtype)
        some = scales[stored.scale_rows(first, last)]
        yield dequantize_rows(rows.view(last - first, -1), some, stored.block[1], dtype)


def _read(stored: StoredTensor, start: int, num_bytes: int) -> Tensor:
    with stored.file.open("rb") as stream:
        stream.seek(stored.offset + start)
        return torch.frombuffer(bytearray(stream.read(num_bytes)), dtype=torch.uint8)
