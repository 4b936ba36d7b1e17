"""Tensors of checkpoints whose values are scaled by blocks, as in FP8 and MXFP4; the scales are tensors of their own.

FP8 (`quant_method` "fp8", as of DeepSeek-V3): float8_e4m3fn weights `W` with `W_scale_inv`, a float32 scale (or a power
of two in one byte) for each block of 128 x 128 weights, or one for the whole weight.
MXFP4 ("mxfp4", as of gpt-oss; Open Compute Project, Microscaling Formats, version 1.0): `W_blocks`, two 4-bit floats a
byte with the first in the low half, and `W_scales`, a power of two for each 32 weights of a row. The files have each
expert's matrix as the transpose of the model's.
compressed-tensors ("compressed-tensors", as vLLM's users have them): int4 as `W_packed`, eight integers from -8 to 7 in
an int32, each plus 8 and the first in the lowest bits, with `W_scale`, one for a group of a row; mxfp4 as `W_packed`,
two 4-bit floats a byte, with `W_scale` as MXFP4's, of the model's own matrices; nvfp4 as the same `W_packed`, with
`W_scale` in float8_e4m3fn, one for 16 weights of a row, over `W_global_scale`, one number; and FP8 as above, with
`W_scale` for the whole weight, for each row or for each block. What they say of inputs is not applied: a model is
trained and computes with inputs as they are.

Rows are dequantized while they are read, as transformers does it when it loads such files with `dequantize=True`: the
products are taken in float32, and rounded to the compute dtype. They are then quantized like any others. But where a
format of ours has the same codes and scales, these are kept as they are (`composed.format_of`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from qlora_fsdp.common.errors import CheckpointError
from qlora_fsdp.common.text import list_some, shorten
from qlora_fsdp.layers.quantized.compressed import FP4_BOOK, INT4_BOOK, MXFP4_GROUP, NVFP4_GROUP
from qlora_fsdp.weights.safetensors_files import StoredTensor

# By the quant_method of a config's quantization_config: how the names of values end, and those of their scales.
ENDINGS = {"fp8": ("", "_scale_inv"), "mxfp4": ("_blocks", "_scales")}
COMPRESSED = "compressed-tensors"
METHODS = (*ENDINGS, COMPRESSED)
EXPONENT_OF_ONE = 127.0  # in a byte of exponents (E8M0)
VALUES_A_TIME = 2**22  # dequantized at a time: 16 MiB in float32
# Of inputs in 8 or 4 bits, which are not used here, and the shape of a packed weight, which its scales' tells too.
UNUSED = (".activation_scale", "_activation_scale", ".input_scale", ".input_global_scale", ".weight_shape")
# What compressed-tensors writes beside codes that mean something else than the product with their scale.
MORE_PARTS = {
    "_zero_point": "it is asymmetric (it has zero points)",
    "_g_idx": "its columns are in another order (actorder)",
}
# The weights of compressed-tensors' schemes that are read, by their type, bits and whether they are symmetric.
INT4 = ("int", 4, True)
FLOAT4 = ("float", 4, True)
FLOAT8 = ("float", 8, True)


@dataclass(frozen=True)
class ScaledTensor(StoredTensor):
    """A tensor whose values are scaled by blocks. `shape` is that of the values, of which a byte may hold two.

    Attributes:
        name: of the values. The key in the files may say that these are packed.
        scales: [..., rows of blocks, columns of blocks] with the leading dims of the values; or one element.
        block: rows and columns of the values that share a scale; the last blocks may be smaller.
        book: the values of codes of 4 bits; none of FP8.
        is_turned: whether its matrices are the transposes of the model's, as those of gpt-oss are.
        global_scale: one element, by which the scales are divided (nvfp4); None: by nothing.
    """

    name: str
    scales: StoredTensor
    block: tuple[int, int]
    book: tuple[float, ...] = ()
    is_turned: bool = False
    global_scale: StoredTensor | None = None

    @property
    def all_scales(self) -> list[StoredTensor]:
        """The tensors in the files that say what its codes stand for."""
        return [self.scales] if self.global_scale is None else [self.scales, self.global_scale]

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
    """The tensors of a checkpoint whose values are scaled by blocks, each with its scales.

    Args:
        tensors: as in the files.
        quantization: the config's quantization_config, of a `quant_method` in `METHODS`.

    Raises:
        CheckpointError: tensors lack their scales, or these do not fit; all are listed.
    """
    method, found = quantization["quant_method"], dict[str, StoredTensor]()
    if method == COMPRESSED:
        return _attach_compressed(tensors, quantization)
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
            made = _fp8(name, stored, scales, quantization) if method == "fp8" else _mxfp4(name, stored, scales)
            if made is None:
                problems.append(f"{scales.key} {_describe(scales)} does not fit {key} {_describe(stored)}")
            else:
                found[name] = made
    _raise_if_any(method, problems)
    return found


def _raise_if_any(method: str, problems: Sequence[str]) -> None:
    if problems:
        raise CheckpointError(
            f"The checkpoint is in {method}, and {len(problems)} of its tensors can't be "
            f"dequantized. Copy or download it again, or set model.path to the model in full precision:\n"
            f"{list_some(problems)}"
        )


def _attach_compressed(tensors: Mapping[str, StoredTensor], quantization: Mapping[str, Any]) -> dict[str, StoredTensor]:
    """`attach_scales` for a checkpoint of compressed-tensors. A packed weight gets the name of the weight."""
    kinds = _read_schemes(quantization)
    found: dict[str, StoredTensor] = {}
    problems: list[str] = []
    for key, stored in tensors.items():
        if key.endswith(UNUSED) or _belongs_to_weight(key, tensors):
            continue
        name = key.removesuffix("_packed")
        is_packed = name != key
        if not is_packed and f"{name}_scale" not in tensors and stored.dtype.itemsize > 1:
            found[key] = stored
            continue
        made = _with_scales(key, name, tensors, kinds)
        if isinstance(made, str):
            problems.append(made)
        else:
            found[name] = made
    _raise_if_any(COMPRESSED, problems)
    return found


def _with_scales(
    key: str, name: str, tensors: Mapping[str, StoredTensor], kinds: Sequence[tuple[Any, ...]]
) -> ScaledTensor | str:
    """A weight of compressed-tensors with its scales, or why it can't be read.

    Args:
        key: of its codes: the weight's name, with `_packed` behind it where several codes are in a number.
        name: the weight's name.
        tensors: all tensors of the files.
        kinds: how the checkpoint's layers are quantized, as `_read_schemes` returns it.
    """
    for end, reason in MORE_PARTS.items():
        if f"{name}{end}" in tensors:
            return f"{key}: {reason}"
    scales = tensors.get(f"{name}_scale")
    if scales is None:
        return f"{key} has no {name}_scale"
    stored = tensors[key]
    global_scale = tensors.get(f"{name}_global_scale")
    is_packed = name != key
    made = None
    if is_packed and FLOAT4 in kinds and stored.dtype == torch.uint8:
        made = _fp4(name, stored, scales, global_scale)
    elif global_scale is not None:
        return f"{key}: its scales have a scale, as those of nvfp4 alone have"
    elif is_packed and INT4 in kinds and stored.dtype == torch.int32:
        made = _int4(name, stored, scales)
    elif not is_packed:
        made = _fp8(name, stored, scales, {})
    if made is None:
        return f"{scales.key} {_describe(scales)} does not fit {key} {_describe(stored)}"
    return made


def _belongs_to_weight(key: str, tensors: Mapping[str, StoredTensor]) -> bool:
    """Whether a tensor is a part of a weight that is in the files: its scales, or what is not known here."""
    for end in ("_scale", "_global_scale", *MORE_PARTS):
        weight = key.removesuffix(end)
        if weight != key and (weight in tensors or f"{weight}_packed" in tensors):
            return True
    return False


def _read_schemes(quantization: Mapping[str, Any]) -> list[tuple[Any, ...]]:
    """How the layers of a checkpoint of compressed-tensors are quantized: some of `INT4`, `FLOAT4` and `FLOAT8`.

    Raises:
        CheckpointError: it says so, or does not say how they are quantized.
    """
    groups = quantization.get("config_groups")
    schemes = list(groups.values()) if isinstance(groups, dict) else []
    problems: list[str] = []
    kinds: list[tuple[Any, ...]] = []  # of values from a file, which may be unhashable
    for scheme in schemes:
        weights = scheme.get("weights") if isinstance(scheme, dict) else None
        if not isinstance(weights, dict):
            problems.append("a group of layers whose weights are not described")
            continue
        kind = (weights.get("type", "int"), weights.get("num_bits", 8), weights.get("symmetric", True))
        kinds.append(kind)
        if kind not in (INT4, FLOAT4, FLOAT8):
            symmetry = "symmetric" if kind[2] else "asymmetric"
            problems.append(shorten(f"weights of {kind[1]} bits of type {kind[0]}, {symmetry}"))
    if problems or not schemes:
        what = problems[0] if problems else "no config_groups"
        raise CheckpointError(
            f"The checkpoint is in {COMPRESSED}, and its quantization_config has {what}. Symmetric int4, mxfp4, "
            "nvfp4 and float8 are read. Set model.path to the model in full precision."
        )
    return kinds


def input_bits(quantization: Mapping[str, Any]) -> list[int]:
    """To how many bits servers round the inputs of a checkpoint's layers; none where they leave them as they are.

    Args:
        quantization: the config's quantization_config, of compressed-tensors, whose schemes `attach_scales` has read.
    """
    found: set[int] = set()
    for scheme in quantization["config_groups"].values():
        inputs = scheme.get("input_activations")
        if isinstance(inputs, dict) and type(inputs.get("num_bits")) is int:
            found.add(inputs["num_bits"])
    return sorted(found)


def _int4(name: str, packed: StoredTensor, scales: StoredTensor) -> ScaledTensor | None:
    """An int4 tensor with its scales; None if they do not fit."""
    if len(packed.shape) != 2 or len(scales.shape) != 2:
        return None
    if not scales.dtype.is_floating_point or scales.dtype.itemsize == 1:
        return None
    rows = packed.shape[0]
    columns = packed.shape[1] * 8
    num_groups = scales.shape[1]
    if scales.shape[0] != rows or num_groups == 0 or columns % num_groups or columns // num_groups % 2:
        return None
    codes = replace(packed, dtype=torch.uint8)
    return _scaled(name, codes, (rows, columns), scales, (1, columns // num_groups), INT4_BOOK)


def _fp4(
    name: str, packed: StoredTensor, scales: StoredTensor, global_scale: StoredTensor | None
) -> ScaledTensor | None:
    """An mxfp4 or nvfp4 tensor of compressed-tensors with its scales; None if they do not fit."""
    group_size = MXFP4_GROUP
    scale_dtype = torch.uint8
    if global_scale is not None:
        group_size = NVFP4_GROUP
        scale_dtype = torch.float8_e4m3fn
        if global_scale.dtype != torch.float32 or math.prod(global_scale.shape) != 1:
            return None
    if len(packed.shape) != 2 or scales.dtype != scale_dtype:
        return None
    rows = packed.shape[0]
    columns = packed.shape[1] * 2
    if columns % group_size or scales.shape != (rows, columns // group_size):
        return None
    found = _scaled(name, packed, (rows, columns), scales, (1, group_size), FP4_BOOK)
    return replace(found, global_scale=global_scale)


def _fp8(name: str, stored: StoredTensor, scales: StoredTensor, quantization: Mapping[str, Any]) -> ScaledTensor | None:
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
    return _scaled(name, stored, stored.shape, scales, (block[0], block[1]), ())


def _mxfp4(name: str, blocks: StoredTensor, scales: StoredTensor) -> ScaledTensor | None:
    """An MXFP4 tensor with its scales; None if they do not fit."""
    if blocks.dtype != torch.uint8 or scales.dtype != torch.uint8 or len(blocks.shape) != 4:
        return None
    if blocks.shape[-1] != MXFP4_GROUP // 2 or scales.shape != blocks.shape[:-1]:
        return None
    num_experts, rows, num_blocks, _ = blocks.shape
    shape = (num_experts, rows, num_blocks * MXFP4_GROUP)
    return replace(_scaled(name, blocks, shape, scales, (1, MXFP4_GROUP), FP4_BOOK), is_turned=True)


def name_of(stored: StoredTensor) -> str:
    """The name that a tensor of the files has once its values stand there as they are."""
    return stored.name if isinstance(stored, ScaledTensor) else stored.key


def _scaled(
    name: str,
    stored: StoredTensor,
    shape: tuple[int, ...],
    scales: StoredTensor,
    block: tuple[int, int],
    book: tuple[float, ...],
) -> ScaledTensor:
    return ScaledTensor(stored.key, stored.file, stored.offset, shape, stored.dtype, name, scales, block, book)


def _describe(stored: StoredTensor) -> str:
    return f"({str(stored.dtype).removeprefix('torch.')} {list(stored.shape)})"


def dequantize_rows(stored: ScaledTensor, rows: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows of a scaled tensor in `dtype`.

    Args:
        stored: tells what codes of 4 bits mean, and how many columns a block has.
        rows: uint8 [n, row_bytes], packed codes of 4 bits; or float8_e4m3fn [n, values].
        scales: [n, scales], one for each block of a row: floats, or uint8 exponents of two. Those of nvfp4 are divided
            by the global scale already.
        dtype: the dtype of the result [n, values].
    """
    columns = stored.block[1]
    num_values = rows.shape[1] * (2 if rows.dtype == torch.uint8 else 1)
    out = torch.empty(len(rows), num_values, dtype=dtype, device=rows.device)
    step = max(1, VALUES_A_TIME // max(1, num_values))
    for part in range(0, len(rows), step):
        some = slice(part, part + step)
        values = _unpack(rows[some], stored.book) if rows.dtype == torch.uint8 else rows[some].float()
        factors = scale_values(scales[some])
        whole = num_values // columns * columns
        values[:, :whole].unflatten(1, (-1, columns)).mul_(factors[:, : num_values // columns, None])
        values[:, whole:].mul_(factors[:, num_values // columns :])
        out[some] = values
    return out


def scale_values(scales: Tensor) -> Tensor:
    """What stored scales stand for: float32, of floats or of uint8 exponents of two."""
    return (scales.float() - EXPONENT_OF_ONE).exp2() if scales.dtype == torch.uint8 else scales.float()


def _unpack(rows: Tensor, book: tuple[float, ...]) -> Tensor:
    """Codes of 4 bits, two a byte: uint8 [n, bytes] -> float32 [n, 2 * bytes]."""
    return _pairs(book, rows.device)[rows.int()].flatten(1)


@cache
def _pairs(book: tuple[float, ...], device: torch.device) -> Tensor:
    """The two values of each byte: float32 [256, 2]."""
    values = torch.tensor(book)
    codes = torch.arange(256)
    return torch.stack([values[codes % 16], values[codes // 16]], 1).to(device)


def read_dequantized(stored: ScaledTensor, dtype: torch.dtype) -> Iterator[Tensor]:
    """The values of a tensor in the files, some rows [n, values] at a time, on the CPU."""
    num_rows, step = math.prod(stored.shape[:-1]), max(1, VALUES_A_TIME // max(1, stored.shape[-1]))
    scales = _read_whole(stored.scales).view(-1, stored.scales_per_row)
    if stored.global_scale is not None:
        scales = scales.float() / _read_whole(stored.global_scale)
    value_dtype = torch.uint8 if stored.is_packed else stored.dtype
    for first in range(0, num_rows, step):
        last = min(num_rows, first + step)
        rows = _read(stored, first * stored.row_bytes, (last - first) * stored.row_bytes).view(value_dtype)
        some = scales[stored.scale_rows(first, last)]
        yield dequantize_rows(stored, rows.view(last - first, -1), some, dtype)


def _read_whole(stored: StoredTensor) -> Tensor:
    return _read(stored, 0, stored.num_bytes).view(stored.dtype)


def _read(stored: StoredTensor, start: int, num_bytes: int) -> Tensor:
    with stored.file.open("rb") as stream:
        stream.seek(stored.offset + start)
        return torch.frombuffer(bytearray(stream.read(num_bytes)), dtype=torch.uint8)
