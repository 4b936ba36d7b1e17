"""What transformers' conversions do to the rows of tensors, found out by applying them to the rows' numbers.

A conversion (`transformers.core_model_loading.WeightConverter`) stacks, joins, splits or reorders tensors. It is given
small tensors that have, in the place of each row, that row's number; what comes out tells where each row of the model's
tensor lies in the files. No operation has to be known by name, and one that computes with values is noticed: every
number must come out once.

Each row of the small tensors has four columns, with the numbers `4 * row` to `4 * row + 3`. If four such numbers come
out side by side, the conversion moves whole rows. If they come out below each other, it transposes matrices. Anything
else cuts rows apart.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig
from transformers.core_model_loading import WeightConverter

from qlora_fsdp.common.text import first_line
from qlora_fsdp.weights.composed import ComposedTensor, Piece
from qlora_fsdp.weights.safetensors_files import StoredTensor

COLUMNS = 4  # with two, an operation that deals columns out in turn would leave them as they are


@dataclass(frozen=True)
class _Rows:
    """Where the rows of one tensor lie, with the tensors in the files by their place among the sources."""

    shape: tuple[int, ...]
    row_elements: int
    pieces: list[tuple[int, int, int]]  # which source, its first row, number of rows
    is_transposed: bool


class RowConversions:
    """Conversions of the tensors of one model. What is found for a layer is not looked for again in one like it."""

    def __init__(self, expected: Mapping[str, Tensor], config: PretrainedConfig) -> None:
        self.expected, self.config = expected, config
        self._known: dict[Hashable, _Rows] = {}

    def convert(
        self, converter: WeightConverter, name: str, sources: Mapping[str, Sequence[StoredTensor]]
    ) -> dict[str, ComposedTensor]:
        """The tensors that a conversion makes, by the model's names.

        Args:
            converter: the conversion; it is left as it is.
            name: the first tensor of the model that it makes.
            sources: by the conversion's own source patterns, the tensors in the files in the order of their names.

        Raises:
            ValueError: rows are cut apart or computed with, or the tensors do not fit each other.
        """
        names = [name.replace(converter.target_patterns[0], target) for target in converter.target_patterns]
        wanted = tuple(self.expected[other].shape if other in self.expected else None for other in names)
        kind = id(converter), tuple((p, tuple(t.shape for t in group)) for p, group in sources.items()), wanted
        made = {name: self._known[kind]} if kind in self._known else self._find(converter, name, sources)
        if made.keys() == {name}:
            self._known[kind] = made[name]
        tensors = [stored for group in sources.values() for stored in group]
        return {
            key: ComposedTensor(
                key,
                rows.shape,
                rows.row_elements,
                tuple(Piece(tensors[index], first, num_rows) for index, first, num_rows in rows.pieces),
                rows.is_transposed,
            )
            for key, rows in made.items()
        }

    def _find(
        self, converter: WeightConverter, name: str, sources: Mapping[str, Sequence[StoredTensor]]
    ) -> dict[str, _Rows]:
        """Apply a conversion to the numbers of rows."""
        shapes = [stored.shape for group in sources.values() for stored in group]
        widths = {shape[-1] if len(shape) > 1 else None for shape in shapes}  # None: vectors
        if len(widths) > 1:
            raise ValueError("its tensors have rows of different lengths")
        (width,) = widths
        firsts, numbered = [0], deepcopy(converter)
        for pattern, group in sources.items():
            for stored in group:
                numbers: Any = _number_rows(stored.shape, firsts[-1])  # a Future when transformers reads files itself
                numbered.add_tensor(name, stored.key, pattern, numbers)
                firsts.append(firsts[-1] + math.prod(stored.shape) // max(1, width or 1))
        try:
            made = numbered.convert(name, model=_Shapes(self.expected), config=self.config)
        except Exception as error:  # whatever an operation raises on tensors that do not fit each other
            raise ValueError(first_line(error)) from error
        results = {key: value[0] if isinstance(value, list) else value for key, value in made.items()}
        rows = {key: _read_numbers(value, is_vector=width is None) for key, value in results.items()}
        found = torch.cat([numbers.flatten() for numbers, _ in rows.values()])
        if not found.sort().values.equal(torch.arange(firsts[-1], dtype=found.dtype)):
            raise ValueError("it computes with values, or leaves some out")
        return {
            key: _find_pieces(numbers, is_transposed, width, torch.tensor(firsts))
            for key, (numbers, is_transposed) in rows.items()
        }


class _Shapes:
    """Stands for the model where an operation asks for the shape of a parameter, whose rows have few columns here."""

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        self.parameters = parameters

    def get_parameter(self, name: str) -> Tensor:
        shape = self.parameters[name].shape
        return torch.empty(*shape[:-1], COLUMNS, device="meta") if len(shape) > 1 else torch.empty(shape, device="meta")


def _number_rows(shape: tuple[int, ...], first: int) -> Tensor:
    """The numbers of a tensor's rows, the first of which is `first`: int32 [..., COLUMNS], or [n] for a vector."""
    lead, step = (shape, COLUMNS) if len(shape) < 2 else ((*shape[:-1], COLUMNS), 1)
    last = first + math.prod(shape if len(shape) < 2 else shape[:-1])
    return torch.arange(COLUMNS * first, COLUMNS * last, step, dtype=torch.int32).view(lead)


def _read_numbers(numbers: Tensor, is_vector: bool) -> tuple[Tensor, bool]:
    """The rows' numbers that a conversion has moved, and whether it has transposed matrices.

    Args:
        numbers: what came out for one tensor.
        is_vector: the numbers are those of elements of vectors.

    Raises:
        ValueError: rows were cut apart.
    """
    if is_vector and numbers.dtype == torch.int32:
        return numbers // COLUMNS, False
    for turned in (False, True):
        rows = numbers.mT if turned and numbers.ndim > 1 else numbers
        if rows.shape[-1] == COLUMNS and (rows - rows[..., :1]).eq(torch.arange(COLUMNS)).all():
            return rows[..., 0] // COLUMNS, turned
    raise ValueError("it cuts rows apart, or computes with values")


def _find_pieces(rows: Tensor, is_transposed: bool, width: int | None, firsts: Tensor) -> _Rows:
    """Where the rows of a tensor lie, given their numbers; transposed ones as [matrices, rows of the files].

    Raises:
        ValueError: a matrix that is transposed does not lie in one place.
    """
    flat = rows.flatten().long()
    owners = torch.bucketize(flat, firsts, right=True) - 1
    starts = torch.ones(len(flat), dtype=torch.bool)
    starts[1:] = (flat[1:] != flat[:-1] + 1) | (owners[1:] != owners[:-1])
    if is_transposed:
        height = rows.shape[-1]
        wanted = torch.arange(len(flat)) % height == 0
        if (starts & ~wanted).any() or ((flat - firsts[owners])[wanted] % height).any():
            raise ValueError("it joins matrices that it transposes")
        starts = wanted
    begins = starts.nonzero().flatten()
    ends = torch.cat([begins[1:], torch.tensor([len(flat)])])
    columns = (owners[begins], (flat - firsts[owners])[begins], ends - begins)
    pieces = list(zip(*(column.tolist() for column in columns), strict=True))
    if width is None:
        return _Rows(tuple(rows.shape), 1, pieces, is_transposed=False)
    shape = (*rows.shape[:-1], width, rows.shape[-1]) if is_transposed else (*rows.shape, width)
    return _Rows(shape, width, pieces, is_transposed)
