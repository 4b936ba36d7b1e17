"""What bitsandbytes writes beside a quantized weight, compared with what the layer expects.

The files may come from anywhere, and codes are bytes of any meaning: whatever is not compared here would load without
a word, and compute something else. Whether the scales are finite is seen while they are read (row_reader.py).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from qlora_fsdp.common.errors import CheckpointError
from qlora_fsdp.common.sizes import NESTED_BLOCKSIZE
from qlora_fsdp.common.text import shorten
from qlora_fsdp.layers.experts.grouped_products import QuantizedExpertWeight
from qlora_fsdp.layers.quantized.format import STORAGE_DTYPES, QuantType, code_book, dynamic_map
from qlora_fsdp.layers.quantized_layer import QuantizedLayer
from qlora_fsdp.weights.safetensors_files import StoredTensor

# Names of what lies beside a quantized weight; the group is the weight's name, or for int8 the module's.
QUANT_STATE = re.compile(r"^(.+)\.(?:(?:nested_)?absmax|(?:nested_)?quant_map|quant_state\.bitsandbytes__\w+)$")
INT8_STATE = re.compile(r"^(.+)\.(?:SCB|weight_format)$")
MAX_STATE_BYTES = 2**16  # of JSON; honest ones have some 200
BLOCKSIZES = tuple(2**power for power in range(5, 13))  # those of bitsandbytes' kernels
BOOK_TOLERANCE = 1e-6  # of a value of a code book, the largest of which is 1; bitsandbytes compares them so too
ROW_MAJOR = b"\0"  # the `weight_format` of int8 codes that lie row by row


@dataclass(frozen=True)
class QuantState:
    """bitsandbytes' description of a 4-bit weight.

    Attributes:
        quant_type: code book of the codes.
        blocksize: weights that share a scale.
        shape: the weight's shape.
        nested_offset: with double quantization, the mean that was subtracted from all scales; else None.
    """

    quant_type: QuantType
    blocksize: int
    shape: tuple[int, ...]
    nested_offset: float | None


def weight_name(module_name: str, layer: QuantizedLayer) -> str:
    """The name of a layer's weight in the files. Experts' weights are named like the module's own parameters."""
    return module_name if isinstance(layer, QuantizedExpertWeight) else f"{module_name}.weight".removeprefix(".")


def weight_shape(layer: QuantizedLayer) -> tuple[int, ...]:
    """The shape that the files have for a layer's weight: that of a matrix, or [E, rows, columns] of E experts."""
    if isinstance(layer, QuantizedExpertWeight):
        return tuple(layer.shape)
    return layer.out_features, layer.in_features


def int8_state_names(name: str) -> tuple[str, str]:
    """The names of the scales and of the format of int8 codes that have this name: bitsandbytes names the module."""
    module = name.removesuffix(".weight")
    return f"{module}.SCB", f"{module}.weight_format"


def read_quant_state(stored: StoredTensor) -> QuantState:
    """Read the JSON text that bitsandbytes stores as a tensor of bytes.

    Raises:
        CheckpointError: it is damaged, or describes a weight that is quantized in another way than any here.
    """
    try:
        state: Any = json.loads(_read_bytes(stored, MAX_STATE_BYTES))
        kind = state["quant_type"]
        blocksize = state["blocksize"]
        shape = state["shape"]
        offset = None
        if kind not in ("nf4", "fp4") or not stored.key.endswith(f"__{kind}"):
            raise ValueError(f"its quant_type is {shorten(str(kind))}")
        if type(blocksize) is not int or blocksize not in BLOCKSIZES:
            raise ValueError(f"its blocksize is {shorten(str(blocksize))}, which bitsandbytes does not have")
        if not isinstance(shape, list) or len(shape) not in (2, 3) or not all(type(size) is int for size in shape):
            raise ValueError(f"its shape is {shorten(str(shape))}")
        if "nested_offset" in state:
            offset = float(state["nested_offset"])
            if state.get("nested_blocksize", NESTED_BLOCKSIZE) != NESTED_BLOCKSIZE:
                raise ValueError(f"its nested_blocksize is not {NESTED_BLOCKSIZE}")
            if not math.isfinite(offset):
                raise ValueError(f"its nested_offset is {offset}")
        return QuantState(kind, blocksize, tuple(shape), offset)
    except (OSError, ValueError, LookupError, TypeError, OverflowError, RecursionError) as error:
        raise CheckpointError(
            f"{stored.file} has a damaged {shorten(stored.key)}: {shorten(str(error) or repr(error))}. Copy or "
            "download it again into model.path."
        ) from error


def parts_problem(layer: QuantizedLayer, codes: StoredTensor, parts: Mapping[str, StoredTensor]) -> str | None:
    """Why codes and scales of a file are not those of a layer: they have another number of values, or another dtype.

    Args:
        layer: has its format from the file.
        codes: bitsandbytes' 4-bit codes, a column of any storage dtype; or int8 codes of the weight's own shape.
        parts: the scales, flat: `scales` and, with double quantization, `nested_scales`.
    """
    format = replace(layer.format, storage=torch.uint8)  # so that rows have no padding
    expected = format.parts(layer.out_features, layer.in_features)
    num_bytes = math.prod(expected["codes"][0])
    if format.is_4bit:
        if codes.dtype not in STORAGE_DTYPES or codes.num_bytes != num_bytes:
            return f"{codes.key}: {_describe(codes)}, which is not {num_bytes:,} bytes of 4-bit codes"
    elif codes.dtype != torch.int8 or codes.shape != weight_shape(layer):
        return f"{codes.key}: {_describe(codes)}, which is not int8 {list(weight_shape(layer))}"
    for name, stored in parts.items():
        shape, dtype = expected[name]
        # The last of our nested scales is the mean, which bitsandbytes keeps in its description.
        wanted = math.prod(shape) - (name == "nested_scales")
        if stored.dtype != dtype or math.prod(stored.shape) != wanted:
            return f"{stored.key}: {_describe(stored)}, which is not {wanted:,} scales of {dtype}"
    return None


def books_problem(quant_type: str, books: Mapping[str, StoredTensor]) -> str | None:
    """Why the code books of a file are not those of bitsandbytes: its codes would mean other values than they do here.

    Args:
        quant_type: which code book the codes are said to have.
        books: what the file has of `quant_map`, the values of the codes, and `nested_quant_map`, those of the scales.
    """
    cpu = torch.device("cpu")
    for name, stored in books.items():
        wanted = dynamic_map(cpu) if name == "nested_quant_map" else code_book(quant_type, cpu)
        if (stored.dtype, stored.shape) != (wanted.dtype, tuple(wanted.shape)):
            return f"{stored.key}: {_describe(stored)}, which is not {len(wanted)} values of {wanted.dtype}"
        found: Tensor = torch.frombuffer(bytearray(_read_bytes(stored, stored.num_bytes)), dtype=wanted.dtype)
        if not torch.allclose(found, wanted, rtol=0, atol=BOOK_TOLERANCE):
            what = quant_type if name == "quant_map" else "quantized scales"
            return f"{stored.key}: a code book that is not bitsandbytes' for {what}"
    return None


def is_row_major(weight_format: StoredTensor) -> bool:
    """Whether int8 codes lie row by row, by the byte that bitsandbytes stores beside them."""
    return weight_format.num_bytes == 1 and _read_bytes(weight_format, 1) == ROW_MAJOR


def _describe(stored: StoredTensor) -> str:
    return f"{str(stored.dtype).removeprefix('torch.')} {list(stored.shape)} in the file"


def _read_bytes(stored: StoredTensor, limit: int) -> bytes:
    if stored.num_bytes > limit:
        raise ValueError(f"it has {stored.num_bytes:,} bytes")
    with stored.file.open("rb") as stream:
        stream.seek(stored.offset)
        return stream.read(stored.num_bytes)
