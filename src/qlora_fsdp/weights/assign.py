"""Find which tensor of the model files fills which parameter of the model.

The tensors come under the model's names (map_keys.py), and a tied weight is found under any of its names. Everything
that is missing, left over or of another shape is reported at once.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from torch import nn
from transformers import PreTrainedModel

from qlora_fsdp.common.errors import CheckpointError
from qlora_fsdp.common.text import list_some
from qlora_fsdp.layers.experts.grouped_products import QuantizedExpertWeight
from qlora_fsdp.layers.quantized.format import Format
from qlora_fsdp.layers.quantized_layer import QuantizedLayer
from qlora_fsdp.weights.composed import Assignment, ComposedTensor, Stored, format_of, stored_tensors, transposed
from qlora_fsdp.weights.safetensors_files import StoredTensor, same_bytes
from qlora_fsdp.weights.scaled import ScaledTensor
from qlora_fsdp.weights.stored_quantization import (
    books_problem,
    int8_state_names,
    is_row_major,
    parts_problem,
    read_quant_state,
    weight_name,
    weight_shape,
)

PART_OF_SUFFIX = {"absmax": "scales", "nested_absmax": "nested_scales"}
CODE_BOOKS = ("quant_map", "nested_quant_map")
NON_PERSISTENT = r"rotary_emb\.inv_freq$|\.masked_bias$|\.attn\.bias$|\.position_ids$"


def stored_formats(keys: Mapping[str, Stored]) -> dict[str, Format]:
    """Format of every layer that is quantized in the files, by module name.

    Raises:
        CheckpointError: bitsandbytes' description of a weight is damaged.
    """
    formats = {}
    for key, stored in keys.items():
        if key.endswith(".SCB"):
            formats[key.removesuffix(".SCB")] = Format("int8")
        elif ".quant_state.bitsandbytes__" in key:
            assert isinstance(stored, StoredTensor)
            weight, state = key.split(".quant_state.")[0], read_quant_state(stored)
            double_quant = state.nested_offset is not None
            formats[weight.removesuffix(".weight")] = Format(state.quant_type, double_quant, state.blocksize)
        elif (format := format_of(stored)) is not None:
            formats[key.removesuffix(".weight")] = format
    return formats


def assign(
    model: PreTrainedModel,
    keys: Mapping[str, Stored],
    random: bool,
    new: Collection[str] = (),
    is_optional: Callable[[str], bool] = lambda name: False,
) -> list[Assignment]:
    """Assign a stored tensor to each parameter, once; a tied parameter is found under any of its names.

    Args:
        model: on meta.
        keys: the tensors in the files under the model's names.
        random: nothing comes from files.
        new: parameters that are random all the same.
        is_optional: whether a tensor of the files may be left unused.

    Raises:
        CheckpointError: tensors are missing, unexpected or of another shape (all are listed), or tied ones differ.
    """
    weights = _find_weights(model)
    if random:
        drawn = [_random_assignment(names) for names in weights]
        return [each for each in drawn if each.is_quantized or each.attribute in each.module._parameters]
    matches = [_match(names, keys, is_new=next(iter(names)) in new) for names in weights]
    used = {key for match in matches for key in match.used}
    ignored = [NON_PERSISTENT, *(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or [])]
    unexpected = []
    for key in keys:
        is_ignored = any(re.search(pattern, key) for pattern in ignored)
        if key not in used and not is_ignored and not is_optional(key):
            unexpected.append(key)
    missing = [name for match in matches for name in match.missing]
    misshaped = [match.problem for match in matches if match.problem is not None]
    _raise_if_any(model, missing, unexpected, misshaped)
    return [match.assignment for match in matches if match.assignment is not None]


@dataclass(frozen=True)
class Match:
    """The tensors that the files have for one weight.

    Attributes:
        assignment: what fills it; None where the files have nothing for it.
        used: keys of the files that belong to it.
        missing: what it needs and the files do not have.
        problem: why what they have does not fit.
    """

    assignment: Assignment | None
    used: Collection[str] = ()
    missing: Sequence[str] = ()
    problem: str | None = None


Names = dict[str, tuple[nn.Module, str]]  # every name of a weight: the module and its attribute


def _find_weights(model: PreTrainedModel) -> list[Names]:
    """All weights of a model with their names; a tied weight is one weight of several names."""
    weights: dict[int, Names] = {}
    for module_name, module in model.named_modules():
        prefix = f"{module_name}." if module_name else ""
        if isinstance(module, QuantizedLayer):
            weights[id(module)] = {weight_name(module_name, module): (module, "weight")}
            if module.bias is not None:
                weights[id(module.bias)] = {f"{prefix}bias": (module, "bias")}
            continue
        persistent = {n: b for n, b in module._buffers.items() if n not in module._non_persistent_buffers_set}
        for attribute, value in {**module._parameters, **persistent}.items():
            if value is not None:
                weights.setdefault(id(value), {})[prefix + attribute] = (module, attribute)
    return list(weights.values())


def _random_assignment(names: Names) -> Assignment:
    name, (module, attribute) = next(iter(names.items()))
    return Assignment(name, module, attribute)


def _match(names: Names, keys: Mapping[str, Stored], is_new: bool) -> Match:
    """Find the tensors that fill a weight.

    Raises:
        CheckpointError: the files hold other values under another of its names.
    """
    if is_new:
        return Match(_random_assignment(names), used=names)
    found = [name for name in names if name in keys]
    if not found:
        return Match(None, missing=[" or ".join(names)])
    name = found[0]
    stored = keys[name]
    module, attribute = names[name]
    if isinstance(stored, ComposedTensor) and stored.missing:
        return Match(None, found, stored.missing)
    if isinstance(module, QuantizedLayer) and attribute == "weight":
        return match_quantized(name, module, keys)
    copies = {other: keys[other] for other in found[1:]}
    _check_tied(name, stored, copies)
    assignment = Assignment(name, module, attribute, stored, copies=tuple(copy.key for copy in copies.values()))
    problem = _shape_problem(name, stored.shape, tuple(assignment.parameter.shape)) or _kinds_problem(name, stored)
    if assignment.parameter.is_floating_point():
        problem = problem or _codes_problem(name, stored)
    return Match(assignment, found, problem=problem)


def match_quantized(name: str, layer: QuantizedLayer, keys: Mapping[str, Stored]) -> Match:
    """Find what fills a quantized layer's weight: its values, or codes and scales that bitsandbytes has made."""
    stored = keys[name]
    shape = weight_shape(layer)
    if isinstance(layer, QuantizedExpertWeight) and layer.is_turned:
        try:
            stored = transposed(name, stored)
        except ValueError as error:
            return Match(None, [name], problem=str(error))
    scales_key, format_key = int8_state_names(name)
    state_key = f"{name}.quant_state.bitsandbytes__{layer.format.quant_type}"
    if scales_key not in keys and state_key not in keys:
        problem = _shape_problem(name, stored.shape, shape) or _kinds_problem(name, stored)
        problem = problem or _codes_problem(name, stored)
        return Match(Assignment(name, layer, "weight", stored), [name], problem=problem)
    whole = {key: value for key, value in keys.items() if isinstance(value, StoredTensor)}
    if name not in whole:
        return Match(None, [name], problem=f"{name}: codes of more than one tensor")
    codes = whole[name]
    if scales_key in whole:
        parts = {"scales": whole[scales_key]}
        problem = parts_problem(layer, codes, parts)
        if format_key in whole and not is_row_major(whole[format_key]):
            problem = f"{format_key}: the codes do not lie row by row"
        return Match(Assignment(name, layer, "weight", codes, parts), [name, scales_key, format_key], problem=problem)
    used = [name, *(key for key in keys if key.startswith(f"{name}."))]
    parts = {}
    missing = []
    for suffix in ("absmax", "nested_absmax") if layer.format.double_quant else ("absmax",):
        key = f"{name}.{suffix}"
        if key in whole:
            parts[PART_OF_SUFFIX[suffix]] = whole[key]
        else:
            missing.append(key)
    state = read_quant_state(whole[state_key])
    assignment = Assignment(name, layer, "weight", codes, parts, state.nested_offset)
    problem = _shape_problem(name, state.shape, shape) or parts_problem(layer, codes, parts)
    books = {book: whole[f"{name}.{book}"] for book in CODE_BOOKS if f"{name}.{book}" in whole}
    return Match(assignment, used, missing, problem or books_problem(state.quant_type, books))


def _check_tied(name: str, stored: Stored, copies: dict[str, Stored]) -> None:
    for other, copy in copies.items():
        is_same = isinstance(stored, StoredTensor) and isinstance(copy, StoredTensor) and same_bytes(stored, copy)
        if not is_same:
            config = stored_tensors(stored)[0].file.parent / "config.json"
            raise CheckpointError(
                f"config.json ties {other} to {name}, but the files hold different values for the two. Set "
                f'"tie_word_embeddings": false in {config} to use both, as transformers does, or remove one of them '
                "from the files."
            )


def _kinds_problem(name: str, stored: Stored) -> str | None:
    """Tensors of different dtypes that are to be one: the rows of one tensor are read with one dtype."""
    if not isinstance(stored, ComposedTensor) or len(stored.kinds) == 1:
        return None
    return f"{name}: of tensors in {' and '.join(sorted(stored.kinds))}"


def _codes_problem(name: str, stored: Stored) -> str | None:
    """Codes without the scales that belong to them: these would load as if they were weights."""
    one = stored_tensors(stored)[0]
    if isinstance(one, ScaledTensor) or (one.dtype.is_floating_point and one.dtype.itemsize > 1):
        return None
    return f"{name}: codes in {stored.dtype} without their scales"


def _shape_problem(name: str, stored: tuple[int, ...], expected: tuple[int, ...]) -> str | None:
    if stored == expected:
        return None
    return f"{name}: {list(stored)} in the file, {list(expected)} by the config"


def _raise_if_any(model: PreTrainedModel, missing: list[str], unexpected: list[str], misshaped: list[str]) -> None:
    problems = {
        "missing from the files": missing,
        "in the files but not in the model": unexpected,
        "of another shape or kind": misshaped,
    }
    parts = [f"Tensors {len(items)} {label}:\n{list_some(items)}" for label, items in problems.items() if items]
    if parts:
        text = "\n".join(parts)
        raise CheckpointError(
            f"The checkpoint does not fit its config.json ({type(model).__name__}). Check that model.path holds the "
            f"files of one model, whole and unmixed. {text}"
        )
