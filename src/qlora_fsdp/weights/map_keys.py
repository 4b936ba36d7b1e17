"""Rename the tensors in the files to the model's names, by transformers' own rules.

Most rules rename a tensor. A conversion makes one tensor of several, or several of one: the experts' of a
mixture-of-experts layer, for example, become one. What can be done to whole rows, or to one matrix at a time, becomes a
`ComposedTensor`; the rest is refused.
"""

from __future__ import annotations

from collections.abc import Mapping

from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from qlora_fsdp.common.errors import CheckpointError
from qlora_fsdp.common.text import list_some
from qlora_fsdp.weights.composed import ComposedTensor, Stored, turn_packed
from qlora_fsdp.weights.convert_rows import RowConversions
from qlora_fsdp.weights.safetensors_files import StoredTensor
from qlora_fsdp.weights.stored_quantization import INT8_STATE, QUANT_STATE

Sources = dict[str, list[StoredTensor]]  # by the pattern of the conversion that they belong to


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
