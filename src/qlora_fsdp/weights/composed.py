"""Tensors that transformers makes of other tensors in the files, described by where each of their rows lies.

The files of a mixture-of-experts model have a tensor for each expert, and the model has one for all of them. What
transformers does about it, which is to stack, join or split tensors, moves whole rows. So a tensor of the model is a
list of pieces, each of them consecutive rows of a tensor in the files, and a rank reads the rows of its shard out of
whichever files have them.

An `Assignment` says which tensors of the files fill a weight. assign.py finds it, and fill.py carries it out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from qlora_fsdp.layers.quantized.compressed import FP4_BOOK, INT4_BOOK, MXFP4_GROUP, NVFP4_GROUP
from qlora_fsdp.layers.quantized.format import Format
from qlora_fsdp.layers.quantized_layer import QuantizedLayer
from qlora_fsdp.runtime.hardware import dtype_name
from qlora_fsdp.weights.safetensors_files import StoredTensor
from qlora_fsdp.weights.scaled import ScaledTensor

INT4_GROUPS = (32, 64, 128)  # for which there are kernels (quant.group_size)
SCALE_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class StoredRows:
    """Rows [first_row, first_row + num_rows) of a tensor in the files, which is seen as a matrix of its last dim."""

    stored: StoredTensor
    first_row: int
    num_rows: int

    @property
    def num_bytes(self) -> int:
        """Bytes to read, those of scales included."""
        scales = sum(each.num_bytes for each in self.stored.all_scales) if isinstance(self.stored, ScaledTensor) else 0
        all_rows = max(1, self.stored.num_bytes // max(1, self.stored.row_bytes))
        return self.num_rows * self.stored.row_bytes + scales * self.num_rows // all_rows


@dataclass(frozen=True)
class ComposedTensor:
    """A tensor of the model whose rows lie in one or more tensors in the files.

    Attributes:
        key: its name in the model.
        shape: as the model has it.
        row_elements: elements of a row, of the pieces as in the files. It is the last dim of the tensors there, and 1
            where these are vectors.
        pieces: in the order of the tensor's rows; none if the files lack what it needs.
        is_transposed: each piece is a matrix [rows, row_elements] of which the tensor has the transpose. Such a piece
            can't be read by rows: each rank reads every matrix whole of which it holds a row.
        missing: what the tensor needs, and the files do not have.
    """

    key: str
    shape: tuple[int, ...]
    row_elements: int
    pieces: tuple[StoredRows, ...]
    is_transposed: bool = False
    missing: tuple[str, ...] = ()

    @property
    def tensors(self) -> list[StoredTensor]:
        """The tensors in the files, each once."""
        return list({piece.stored.key: piece.stored for piece in self.pieces}.values())

    @property
    def dtype(self) -> torch.dtype:
        """Of the pieces in the files, which are of one kind (see `kinds`)."""
        return self.pieces[0].stored.dtype

    @property
    def kinds(self) -> set[str]:
        """The kinds of the pieces, in words. Only pieces of one kind can be read as rows of one tensor."""
        return {_describe(stored) for stored in self.tensors}

    @property
    def num_bytes(self) -> int:
        return sum(piece.num_bytes for piece in self.pieces)


Stored = StoredTensor | ComposedTensor  # what the files have for a tensor of the model; works with isinstance too


def stored_tensors(stored: Stored) -> list[StoredTensor]:
    """The tensors in the files of which a tensor of the model is made, scales included."""
    tensors = stored.tensors if isinstance(stored, ComposedTensor) else [stored]
    scales = [each for tensor in tensors if isinstance(tensor, ScaledTensor) for each in tensor.all_scales]
    return [*tensors, *scales]


def is_scaled(stored: Stored) -> bool:
    """Whether the files have its values scaled by blocks."""
    return any(isinstance(tensor, ScaledTensor) for tensor in stored_tensors(stored))


def turn_packed(name: str, stored: StoredTensor) -> Stored:
    """A tensor of the files as the model has it: MXFP4 holds the transposes of the model's matrices.

    So does `Mxfp4Dequantize` of transformers see it, the only reader of such files there.
    """
    if not isinstance(stored, ScaledTensor) or not stored.is_turned:
        return stored
    return _turned(name, stored)


def _turned(name: str, stored: StoredTensor) -> ComposedTensor:
    num_matrices, height, width = stored.shape
    pieces = tuple(StoredRows(stored, index * height, height) for index in range(num_matrices))
    return ComposedTensor(name, (num_matrices, width, height), width, pieces, is_transposed=True)


def transposed(name: str, stored: Stored) -> Stored:
    """The transposes of the matrices of a tensor of the model, [E, rows, columns].

    What `turn_packed` has turned is turned back, to rows as the files have them.

    Raises:
        ValueError: the files do not have the tensor as one.
    """
    tensors = stored.tensors if isinstance(stored, ComposedTensor) else [stored]
    if len(tensors) != 1 or len(tensors[0].shape) != 3:
        raise ValueError(f"{name} is not one tensor of all experts in the files")
    if isinstance(stored, StoredTensor):
        return _turned(name, stored)
    in_order = _turned(name, tensors[0])
    if not stored.is_transposed or stored.pieces != in_order.pieces:
        raise ValueError(f"{name} has the experts of the files in another order")
    return tensors[0]


def as_composed(stored: Stored) -> ComposedTensor:
    """A tensor in the files as one piece of all its rows."""
    if isinstance(stored, ComposedTensor):
        return stored
    row_elements = stored.shape[-1] if len(stored.shape) > 1 else 1
    num_rows = math.prod(stored.shape) // max(1, row_elements)
    return ComposedTensor(stored.key, stored.shape, row_elements, (StoredRows(stored, 0, num_rows),))


def format_of(stored: Stored) -> Format | None:
    """The format of ours that has the same codes and scales as a tensor of the files; None: there is none.

    That of FP8 has a scale for each row. A scale for a whole weight is the one of each of its rows. gpt-oss's MXFP4 has
    one where a layer holds the transposes too (`transposed`).
    """
    tensors = stored.tensors if isinstance(stored, ComposedTensor) else [stored]
    formats = {_format_of_tensor(tensor) for tensor in tensors}
    is_turned = isinstance(stored, ComposedTensor) and stored.is_transposed
    return None if is_turned or len(formats) != 1 else formats.pop()


def _format_of_tensor(stored: StoredTensor) -> Format | None:
    if not isinstance(stored, ScaledTensor):
        return None
    scale_dtype = stored.scales.dtype
    if stored.global_scale is not None:
        return Format("nvfp4", blocksize=NVFP4_GROUP, scale_dtype=scale_dtype)
    if stored.book == FP4_BOOK:
        return Format("mxfp4", blocksize=MXFP4_GROUP)
    if not stored.scales.key.endswith("_scale") or scale_dtype not in SCALE_DTYPES:
        return None
    if stored.book == INT4_BOOK and stored.block[1] in INT4_GROUPS:
        return Format("int4", blocksize=stored.block[1], scale_dtype=scale_dtype)
    if stored.dtype == torch.float8_e4m3fn and stored.block[1] == stored.shape[-1]:
        return Format("fp8", scale_dtype=scale_dtype)
    return None


def _describe(stored: StoredTensor) -> str:
    dtype = dtype_name(stored.dtype)
    if not isinstance(stored, ScaledTensor):
        return dtype
    return f"{dtype} with {stored.scales_per_row} scales of {dtype_name(stored.scales.dtype)} a row"


@dataclass(frozen=True)
class Assignment:
    """One weight of the model and where it comes from.

    Attributes:
        name: its name in the model, e.g. `model.layers.0.self_attn.q_proj.weight`.
        module: the module that holds it. The `weight` of a `QuantizedLayer` stands for the layer's codes and scales.
        attribute: the parameter's (or buffer's) name in the module.
        stored: the tensor in the files, in full precision or as int8 or packed codes, or what it is composed of there;
            None for a random weight.
        stored_parts: for a weight that is quantized in the files, the tensors of its other parts (`scales`,
            `nested_scales`).
        nested_offset: for a weight that is double-quantized in the files, the mean that was subtracted from its scales.
        copies: other keys under which the files hold the same values (of a tied table); these are not read.
    """

    name: str
    module: nn.Module
    attribute: str
    stored: Stored | None = None
    stored_parts: dict[str, StoredTensor] = field(default_factory=dict)
    nested_offset: float | None = None
    copies: tuple[str, ...] = ()

    @property
    def parameter(self) -> Tensor:
        """The tensor whose rows decide what this rank reads."""
        attribute = "codes" if self.is_quantized else self.attribute
        parameter = self.module._parameters.get(attribute)
        value = self.module._buffers[attribute] if parameter is None else parameter
        assert value is not None
        return value

    @property
    def is_quantized(self) -> bool:
        return isinstance(self.module, QuantizedLayer) and self.attribute == "weight"

    @property
    def keeps_codes(self) -> bool:
        """Whether its codes and scales are in the files as its layer has them, so that their bytes are taken."""
        if self.stored_parts:
            return True
        return self.is_quantized and self.stored is not None and format_of(self.stored) == self.layer.format

    @property
    def layer(self) -> QuantizedLayer:
        """The module of a weight that `is_quantized`."""
        assert isinstance(self.module, QuantizedLayer)
        return self.module

    @property
    def num_elements(self) -> int:
        return self.layer.out_features * self.layer.in_features if self.is_quantized else self.parameter.numel()

    @property
    def stored_tensors(self) -> list[StoredTensor]:
        """All tensors in the files that are read for it."""
        return [] if self.stored is None else [*stored_tensors(self.stored), *self.stored_parts.values()]

    def num_bytes(self, dtype: torch.dtype) -> int:
        """Bytes to read for the whole weight; for a random one, what it would take in `dtype`."""
        if self.stored is None:
            return self.num_elements * dtype.itemsize
        return self.stored.num_bytes + sum(part.num_bytes for part in self.stored_parts.values())
