"""Which tensor of the checkpoint fills which parameter of the model.

Names go through transformers' own renaming rules, tied weights answer to any of their names, and whatever is missing,
left over or of another shape is reported at once.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection
from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from qlora_fsdp.common.errors import CheckpointError
from qlora_fsdp.config.schema import QuantConfig
from qlora_fsdp.layers import Format, QuantizedLayer, parse_storage
from qlora_fsdp.weights.fill import Assignment
from qlora_fsdp.weights.safetensors_files import StoredTensor, list_some, same_bytes

PART_OF_SUFFIX = {"absmax": "scales", "nested_absmax": "nested_scales"}
QUANT_STATE = re.compile(r"^(.+\.weight)\.(?:(?:nested_)?absmax|(?:nested_)?quant_map|quant_state\.bitsandbytes__\w+)$")
INT8_STATE = re.compile(r"^(.+)\.(?:SCB|weight_format)$")
NON_PERSISTENT = re.compile(r"rotary_emb\.inv_freq$|\.masked_bias$|\.attn\.bias$|\.position_ids$")


def map_keys(model: PreTrainedModel, tensors: dict[str, StoredTensor]) -> dict[str, StoredTensor]:
    """The checkpoint's tensors under the model's names, renamed by transformers' own rules.

    Raises:
        CheckpointError: a tensor that transformers would split, merge or transpose: that can't be done by rows.
    """
    transforms = get_model_conversion_mapping(model)
    renamings = [t for t in transforms if isinstance(t, WeightRenaming)]
    converters = [t for t in transforms if isinstance(t, WeightConverter)]
    state = model.state_dict()
    renamed: dict[str, StoredTensor] = {}
    unsupported = []
    for key, stored in tensors.items():
        # The scales of quantized weights follow the weight's name.
        match = QUANT_STATE.match(key) or INT8_STATE.match(key)
        suffix = ""
        if match is not None:
            suffix = key[match.end(1) :]
            key = match.group(1)
        probe = key + ".weight" if match is not None and match.re is INT8_STATE else key
        name, pattern = rename_source_key(probe, renamings, converters, model.base_model_prefix, state)
        if probe != key:
            name = name.removesuffix(".weight")
        if pattern is not None:
            unsupported.append(f"{key} (rule {pattern})")
        renamed[name + suffix] = stored
    if unsupported:
        raise CheckpointError(
            "transformers would split or merge these tensors while loading, which row-wise loading can't do. Load the "
            "model with the installed transformers, save it with save_pretrained(FOLDER, save_original_format=False), "
            f"and set model.path to that:\n{list_some(unsupported)}"
        )
    return renamed


def stored_formats(keys: dict[str, StoredTensor], quant: QuantConfig) -> dict[str, Format]:
    """Format of every layer that the checkpoint holds quantized, by module name."""
    storage = parse_storage(quant.bnb_4bit_quant_storage.value)
    formats = {}
    for key, stored in keys.items():
        if key.endswith(".SCB"):
            formats[key.removesuffix(".SCB")] = Format("int8", storage=storage)
        elif ".quant_state.bitsandbytes__" in key:
            weight = key.split(".quant_state.")[0]
            state = read_quant_state(stored)
            formats[weight.removesuffix(".weight")] = Format(
                state["quant_type"], "nested_offset" in state, state["blocksize"], storage
            )
    return formats


def read_quant_state(stored: StoredTensor) -> dict[str, Any]:
    """bitsandbytes' packed description of a quantized weight: quant_type, blocksize, shape, dtype, nested_offset..."""
    with stored.file.open("rb") as stream:
        stream.seek(stored.offset)
        return json.loads(stream.read(stored.num_bytes))  # type: ignore[no-any-return]


def assign(
    model: PreTrainedModel,
    keys: dict[str, StoredTensor],
    random: bool,
    new: Collection[str] = (),
    is_optional: Callable[[str], bool] = lambda name: False,
) -> list[Assignment]:
    """Which tensor fills which parameter, each parameter once, tied ones under any of their names.

    Args:
        model: on meta.
        keys: the checkpoint's tensors under the model's names.
        random: nothing comes from files.
        new: parameters that are made up all the same.
        is_optional: whether a tensor of the files may be left unused.

    Raises:
        CheckpointError: missing, unexpected or misshaped tensors: all are listed; or tied ones that differ.
    """
    names_of: dict[int, list[str]] = {}
    slots: dict[str, tuple[nn.Module, str]] = {}
    for module_name, module in model.named_modules():
        prefix = f"{module_name}." if module_name else ""
        if isinstance(module, QuantizedLayer):
            slots[f"{prefix}weight"] = (module, "weight")
            names_of[id(module)] = [f"{prefix}weight"]
            if module.bias is not None:
                slots[f"{prefix}bias"] = (module, "bias")
                names_of[id(module.bias)] = [f"{prefix}bias"]
            continue
        persistent = {n: b for n, b in module._buffers.items() if n not in module._non_persistent_buffers_set}
        for attribute, value in {**module._parameters, **persistent}.items():
            if value is not None:
                slots[prefix + attribute] = (module, attribute)
                names_of.setdefault(id(value), []).append(prefix + attribute)
    if random:
        return [
            Assignment(names[0], *slots[names[0]])
            for names in names_of.values()
            if slots[names[0]][1] in slots[names[0]][0]._parameters or isinstance(slots[names[0]][0], QuantizedLayer)
        ]
    assignments: list[Assignment] = []
    missing, misshaped, used = [], [], set[str]()
    for names in names_of.values():
        if names[0] in new:
            assignments.append(Assignment(names[0], *slots[names[0]]))
            used.update(names)
            continue
        name = next((n for n in names if n in keys), None)
        if name is None:
            missing.append(" or ".join(names))
            continue
        used.update(n for n in names if n in keys)
        module, attribute = slots[name]
        if isinstance(module, QuantizedLayer) and attribute == "weight":
            assignment, problem = assign_quantized(name, module, keys, used, missing)
        else:
            copies = {n: keys[n] for n in names if n in keys and n != name}
            _check_tied(name, keys[name], copies)
            assignment = Assignment(name, module, attribute, keys[name], copies=tuple(c.key for c in copies.values()))
            problem = _shape_problem(name, keys[name].shape, tuple(assignment.parameter.shape))
            if assignment.parameter.is_floating_point():
                problem = problem or _codes_problem(name, keys[name])
        if problem:
            misshaped.append(problem)
        assignments.append(assignment)
    ignored = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or []
    unexpected = [
        key
        for key in keys
        if not (key in used or is_optional(key) or NON_PERSISTENT.search(key))
        and not any(re.search(p, key) for p in ignored)
    ]
    _raise_if_any(model, missing, unexpected, misshaped)
    return assignments


def assign_quantized(
    name: str, layer: QuantizedLayer, keys: dict[str, StoredTensor], used: set[str], missing: list[str]
) -> tuple[Assignment, str | None]:
    """What fills a quantized layer: its weight, or codes and scales that bitsandbytes made; and what is wrong with it.

    Names that it takes go into `used`, names that are not there into `missing`.
    """
    stored, shape = keys[name], (layer.out_features, layer.in_features)
    scales_key = name.removesuffix("weight") + "SCB"
    state_key = f"{name}.quant_state.bitsandbytes__{layer.format.quant_type}"
    if scales_key in keys:
        used.update((scales_key, scales_key.replace("SCB", "weight_format")))
        parts = {"scales": keys[scales_key]}
        return Assignment(name, layer, "weight", stored, parts), _shape_problem(name, stored.shape, shape)
    if state_key in keys:
        used.update(k for k in keys if k.startswith(f"{name}."))
        suffixes = ("absmax", "nested_absmax") if layer.format.double_quant else ("absmax",)
        missing.extend(f"{name}.{suffix}" for suffix in suffixes if f"{name}.{suffix}" not in keys)
        parts = {PART_OF_SUFFIX[s]: keys[f"{name}.{s}"] for s in suffixes if f"{name}.{s}" in keys}
        state = read_quant_state(keys[state_key])
        if layer.format.double_quant and state.get("nested_blocksize", 256) != 256:
            return Assignment(name, layer, "weight", stored, parts), f"{name}: nested block size is not 256"
        assignment = Assignment(name, layer, "weight", stored, parts, state.get("nested_offset"))
        return assignment, _shape_problem(name, tuple(state["shape"]), shape)
    problem = _shape_problem(name, stored.shape, shape) or _codes_problem(name, stored)
    return Assignment(name, layer, "weight", stored), problem


def _check_tied(name: str, stored: StoredTensor, copies: dict[str, StoredTensor]) -> None:
    for other, copy in copies.items():
        if not same_bytes(stored, copy):
            raise CheckpointError(
                f"config.json ties {other} to {name}, but the files hold different values for the two. Set "
                f'"tie_word_embeddings": false in {stored.file.parent / "config.json"} to use both, as transformers '
                "does, or remove one of them from the files."
            )


def _codes_problem(name: str, stored: StoredTensor) -> str | None:
    """Codes without the scales that belong to them would load as if they were weights."""
    if stored.dtype.is_floating_point:
        return None
    return f"{name}: codes in {stored.dtype} without their scales"


def _shape_problem(name: str, stored: tuple[int, ...], expected: tuple[int, ...]) -> str | None:
    if stored == expected:
        return None
    return f"{name}: {list(stored)} in the file, {list(expected)} by the config"


def _raise_if_any(model: PreTrainedModel, missing: list[str], unexpected: list[str], misshaped: list[str]) -> None:
    parts = [
        f"{len(items)} {label}:\n{list_some(items)}"
        for label, items in (
            ("missing from the files", missing),
            ("in the files but not in the model", unexpected),
            ("of another shape or kind", misshaped),
        )
        if items
    ]
    if parts:
        raise CheckpointError(
            f"The checkpoint does not fit its config.json ({type(model).__name__}). Check that model.path holds the "
            "files of one model, whole and unmixed. Tensors " + "\nTensors ".join(parts)
        )
