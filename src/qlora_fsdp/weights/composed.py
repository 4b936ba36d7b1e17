"""Tensors that transformers makes of other tensors in the files, described by where each of their rows lies.

The files of a mixture-of-experts model have a tensor for each expert, and the model has one for all of them. What
transformers does about it, which is to stack, join or split tensors, moves whole rows. So a tensor of the model is a
list of pieces, each of them consecutive rows of a tensor in the files, and a rank reads the rows of its shard out of
whichever files have them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from qlora_fsdp.weights.safetensors_files import StoredTensor


@dataclass(frozen=True)
class Piece:
    """Rows [first_row, first_row + num_rows) of a tensor in the files, which is seen as a matrix of its last dim."""

    stored: StoredTensor
    first_row: int
    num_rows: int


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
    pieces: tuple[Piece, ...]
    is_transposed: bool = False
    missing: tuple[str, ...] = ()

    @property
    def tensors(self) -> list[StoredTensor]:
        """The tensors in the files, each once."""
        return list({piece.stored.key: piece.stored for piece in self.pieces}.values())

    @property
    def dtype(self) -> torch.dtype:
        """Of the pieces in the files, which have one dtype (see `dtypes`)."""
        return self.pieces[0].stored.dtype

    @property
    def dtypes(self) -> set[torch.dtype]:
        """The dtypes of all pieces; a tensor of more than one is not read."""
        return {piece.stored.dtype for piece in self.pieces}

    @property
    def num_bytes(self) -> int:
        return sum(piece.num_rows * self.row_elements * piece.stored.dtype.itemsize for piece in self.pieces)


Stored = StoredTensor | ComposedTensor  # what the files have for a tensor of the model; works with isinstance too


def stored_tensors(stored: Stored) -> list[StoredTensor]:
    """The tensors in the files of which a tensor of the model is made."""
    return stored.tensors if isinstance(stored, ComposedTensor) else [stored]


def as_composed(stored: Stored) -> ComposedTensor:
    """A tensor in the files as one piece of all its rows."""
    if isinstance(stored, ComposedTensor):
        return stored
    row_elements = stored.shape[-1] if len(stored.shape) > 1 else 1
    num_rows = math.prod(stored.shape) // max(1, row_elements)
    return ComposedTensor(stored.key, stored.shape, row_elements, (Piece(stored, 0, num_rows),))
