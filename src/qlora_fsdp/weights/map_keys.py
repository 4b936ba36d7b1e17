"""Rename the tensors in the files to the model's names, by transformers' own rules.

Most rules rename a tensor. A conversion makes one tensor of several, or several of one: the experts' of a
mixture-of-experts layer, for example, become one. What can be done to whole rows, or to one matrix at a time, becomes a
`ComposedTensor`; the rest is refused.

What a conversion does is found out by applying it. A conversion (`transformers.core_model_loading.WeightConverter`)
stacks, joins, splits or reorders tensors. It is given small tensors that have, in the place of each row, that row's
number; what comes out tells where each row of the model's tensor lies in the files. No operation has to be known by
name, and one that computes with values is noticed: every number must come out once.

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
from transformers import PretrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from qlora_fsdp.common.errors import CheckpointError
from qlora_fsdp.common.text import first_line, list_some
from qlora_fsdp.weights.composed import ComposedTensor, Stored, StoredRows, turn_packed
from qlora_fsdp.weights.safetensors_files import StoredTensor
from qlora_fsdp.weights.stored_quantization import INT8_STATE, QUANT_STATE

Sources = dict[str, list[StoredTensor]]  # by the pattern of the conversion that they belong to
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
        self.expected = expected
        self.config = config
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
        shapes = tuple((pattern, tuple(stored.shape for stored in group)) for pattern, group in sources.items())
        kind = id(converter), shapes, wanted
        if kind in self._known:
            made = {name: self._known[kind]}
        else:
            made = self._find(converter, name, sources)
        if made.keys() == {name}:
            self._known[kind] = made[name]
        tensors = [stored for group in sources.values() for stored in group]
        composed: dict[str, ComposedTensor] = {}
        for key, rows in made.items():
            pieces = tuple(StoredRows(tensors[index], first, num_rows) for index, first, num_rows in rows.pieces)
            composed[key] = ComposedTensor(key, rows.shape, rows.row_elements, pieces, rows.is_transposed)
        return composed

    def _find(
        self, converter: WeightConverter, name: str, sources: Mapping[str, Sequence[StoredTensor]]
    ) -> dict[str, _Rows]:
        """Apply a conversion to the numbers of rows."""
        shapes = [stored.shape for group in sources.values() for stored in group]
        widths = {shape[-1] if len(shape) > 1 else None for shape in shapes}  # None: vectors
        if len(widths) > 1:
            raise ValueError("its tensors have rows of different lengths")
        (width,) = widths
        firsts = [0]
        numbered = deepcopy(converter)
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
        if len(shape) > 1:
            shape = torch.Size((*shape[:-1], COLUMNS))
        return torch.empty(shape, device="meta")


def _number_rows(shape: tuple[int, ...], first: int) -> Tensor:
    """The numbers of a tensor's rows, the first of which is `first`: int32 [..., COLUMNS], or [n] for a vector."""
    if len(shape) < 2:
        last = first + math.prod(shape)
        return torch.arange(COLUMNS * first, COLUMNS * last, COLUMNS, dtype=torch.int32).view(shape)
    last = first + math.prod(shape[:-1])
    return torch.arange(COLUMNS * first, COLUMNS * last, dtype=torch.int32).view(*shape[:-1], COLUMNS)


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
    indices = owners[begins].tolist()
    first_rows = (flat - firsts[owners])[begins].tolist()
    pieces = list(zip(indices, first_rows, (ends - begins).tolist(), strict=True))
    if width is None:
        return _Rows(tuple(rows.shape), 1, pieces, is_transposed=False)
    shape = (*rows.shape[:-1], width, rows.shape[-1]) if is_transposed else (*rows.shape, width)
    return _Rows(shape, width, pieces, is_transposed)


def map_keys(model: PreTrainedModel, tensors: Mapping[str, StoredTensor]) -> dict[str, Stored]:
    """The tensors in the files under the model's names.

    Raises:
        CheckpointError: transformers would cut rows apart, or compute with them, which can't be done by rows; or it
            would split or merge tensors that are quantized. All are listed.
    """
    transforms = get_model_conversion_mapping(model)
    renamings = [t for t in transforms if isinstance(t, WeightRenaming)]
    converters = [t for t in transforms if isinstance(t, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    state = model.state_dict()

    def rename(key: str) -> tuple[str, str | None]:
        name, pattern = rename_source_key(key, renamings, converters, model.base_model_prefix, state)
        if name not in state and key in state:  # a checkpoint that has the model's own names already
            return rename_source_key(key, [], [], model.base_model_prefix, state)
        return name, pattern

    found: dict[str, Stored] = {}
    groups: dict[str, Sources] = {}
    refused = []
    for key in sorted(tensors, key=dot_natural_key):  # transformers stacks tensors in this order
        weight, suffix = _split_state(key)
        probe = f"{weight}.weight" if INT8_STATE.match(key) else weight
        name, pattern = rename(probe)
        if probe != weight:
            name = name.removesuffix(".weight")
        if pattern is None:
            found[name + suffix] = turn_packed(name, tensors[key])
        elif suffix:
            refused.append(f"{key}: it belongs to codes")
        else:
            groups.setdefault(name, {}).setdefault(pattern, []).append(tensors[key])
    conversions = RowConversions(state, model.config)
    for name, sources in groups.items():
        if name not in state:  # of a part of the model that is left out; or the files are another model's
            found[name] = next(iter(sources.values()))[0]
            continue
        try:
            found |= _convert(conversions, by_pattern[next(iter(sources))], name, sources)
        except ValueError as error:
            some = next(iter(sources.values()))[0].key
            refused.append(f"{some} and others, for {name}: {error}" if len(sources) > 1 else f"{some}: {error}")
    if refused:
        raise CheckpointError(
            "transformers would split or merge these tensors while loading, in a way that can't be done by rows. Load "
            "the model with the installed transformers, save it with save_pretrained(FOLDER, "
            f"save_original_format=False), and set model.path to that:\n{list_some(refused)}"
        )
    return found


def _split_state(key: str) -> tuple[str, str]:
    """The name of a weight, and what follows it in the names of its scales; these are renamed like the weight."""
    match = QUANT_STATE.match(key) or INT8_STATE.match(key)
    return (key, "") if match is None else (match.group(1), key[match.end(1) :])


def _convert(
    conversions: RowConversions, converter: WeightConverter, name: str, sources: Sources
) -> dict[str, ComposedTensor]:
    """Apply a conversion. If the files lack a tensor that it needs, the tensor is named instead.

    Raises:
        ValueError: it can't be done by rows.
    """
    problem: ValueError | None = None
    made: dict[str, ComposedTensor] = {}
    expected = conversions.expected[name].shape
    try:
        made = conversions.convert(converter, name, sources)
    except ValueError as error:
        problem = error
    if name not in made or made[name].shape != tuple(expected):
        missing = _find_missing(converter, name, sources, expected[0])
        if missing:
            return {name: ComposedTensor(name, (), 1, (), missing=tuple(missing))}
    if problem is not None:
        raise problem
    return made


def _find_missing(converter: WeightConverter, name: str, sources: Sources, num_modules: int) -> list[str]:
    """Find tensors that the files lack for a conversion that stacks modules, such as one expert's."""
    missing = []
    for pattern in converter.source_patterns:
        if pattern not in sources:
            prefix = name.partition(converter.target_patterns[0])[0]
            missing.append((prefix + pattern).replace("\\", ""))
        elif isinstance(converter.operations[0], MergeModulelist):
            keys = {_module_index(stored.key): stored.key for stored in sources[pattern]}
            some = next(iter(keys.values())).split(".")
            place = max((index for index, part in enumerate(some) if part.isdigit()), default=0)
            wanted = (n for n in range(num_modules) if n not in keys)
            missing += [".".join([*some[:place], str(n), *some[place + 1 :]]) for n in wanted]
    return missing


def _module_index(key: str) -> int:
    """The number of a module in a list, which is the last number in the name."""
    return max(((index, int(part)) for index, part in enumerate(key.split(".")) if part.isdigit()), default=(0, -1))[1]
