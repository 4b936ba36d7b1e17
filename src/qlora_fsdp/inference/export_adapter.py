"""Rewrite an adapter as vLLM reads it: every expert has its own, and one scaling is that of all layers.

PEFT has all experts of a layer in two tensors, because transformers has their weights in one. vLLM names layers as the
model's files do, and there the experts of most models are linear layers: `...mlp.experts.7.gate_proj`. So the rows of
a weight of fused experts, of which each file's tensor is a piece, tell which rows of B make which expert's adapter. Two
layers whose weights are one in the model, gate and up, get the same A.

vLLM's `vllm/lora/lora_model.py` and `vllm/lora/model_manager.py` were read at its commit 01533aa8f9c0: the names
(`_create_merged_loras_inplace`), that an expert needs adapters of all its layers (`pack_moe`), and that one rank and
one scaling are taken for the whole adapter (`PEFTHelper`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import peft
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F

from qlora_fsdp.common.errors import AdapterError, RunFolderError
from qlora_fsdp.common.files import replacing
from qlora_fsdp.config.adapter_config import ADAPTER_WEIGHTS
from qlora_fsdp.config.adapter_tables import PREFIX
from qlora_fsdp.inference.changes import Change, find_changes
from qlora_fsdp.model.assemble import AssembledModel
from qlora_fsdp.model.experts import expert_weights, is_apart
from qlora_fsdp.weights.composed import ComposedTensor


def export_adapter(trained: AssembledModel, adapter: Path, out: Path) -> None:
    """Write the adapter to `out`: its weights, its config and the tokenizer.

    Raises:
        AdapterError: vLLM reads it as it is, or in no form; it has no adapters of all layers of an expert; or the
            base's files have experts in one tensor, so that there are no names of single ones.
        RunFolderError: `out` is not empty.
    """
    config = peft.LoraConfig.from_pretrained(str(adapter))
    changes = find_changes(trained.model.base, adapter)
    _check_kind(adapter, config, changes)
    experts = {name: change for name, change in changes.items() if name in _expert_names(trained)}
    stored = {assignment.name: assignment.stored for assignment in trained.meta.assignments}
    sources = {name: stored[name] for name in experts}
    composed = {name: source for name, source in sources.items() if isinstance(source, ComposedTensor)}
    has_patterns = bool(config.rank_pattern or config.alpha_pattern)
    if not experts and not has_patterns:
        raise AdapterError(
            f"adapter={adapter} has no adapters of experts and one scaling for all layers, so vLLM reads it as it is. "
            "Give it that."
        )
    _check(trained, adapter, experts, composed, has_patterns)
    if out.is_dir() and any(out.iterdir()):
        raise RunFolderError(f"out={out} is not empty. Set out to a new folder.")
    scaling = config.lora_alpha / (math.sqrt(config.r) if config.use_rslora else config.r)
    taken = {key for change in experts.values() for key in change.keys.values()}
    scales = {change.keys["lora_B.weight"]: change.scaling for change in changes.values() if _is_lora(change)}
    tensors: dict[str, Tensor] = {}
    with safe_open(adapter / ADAPTER_WEIGHTS, "pt") as file:
        for key in sorted(set(file.keys()) - taken):
            tensors[key] = file.get_tensor(key) * (scales.get(key, scaling) / scaling)
    for name, source in composed.items():
        for key, tensor in _unfuse(experts[name], source):
            factor = experts[name].scaling / scaling if key.endswith("lora_B.weight") else 1.0
            tensors[key] = (tensor * factor).contiguous()
    layers, rank = _pad_ranks(tensors)
    config = replace(
        config,
        r=rank,
        lora_alpha=scaling * rank,  # PEFT and vLLM take fractions too
        use_rslora=False,  # by which PEFT would scale fused gate and up otherwise than gate and up
        target_modules=sorted({layer.rpartition(".")[2] for layer in layers}),
        target_parameters=None,
        exclude_modules=None,
        layers_to_transform=None,
        rank_pattern={},
        alpha_pattern={},
        inference_mode=True,
    )
    out.mkdir(parents=True, exist_ok=True)
    with replacing(out / ADAPTER_WEIGHTS) as temporary:
        save_file(tensors, temporary, {"format": "pt"})
    config.save_pretrained(str(out))
    trained.tokenizer.save_pretrained(str(out))


def _unfuse(change: Change, source: ComposedTensor) -> Iterator[tuple[str, Tensor]]:
    """The matrices of each expert's layers, by their keys in an adapter's file."""
    b_EOR, a_ERI = change.factors()
    start = 0
    for piece in source.pieces:
        expert, row = divmod(start, b_EOR.shape[1])
        layer = PREFIX + piece.stored.key.removesuffix(".weight")
        yield f"{layer}.lora_A.weight", a_ERI[expert]
        yield f"{layer}.lora_B.weight", b_EOR[expert, row : row + piece.num_rows]
        start += piece.num_rows


def _pad_ranks(tensors: dict[str, Tensor]) -> tuple[list[str], int]:
    """Give all matrices the largest rank, with zeros, in place. Returns the layers' names in the file, and the rank."""
    layers = [key.removesuffix(".lora_A.weight") for key in tensors if key.endswith(".lora_A.weight")]
    rank = max(len(tensors[f"{layer}.lora_A.weight"]) for layer in layers)
    for layer in layers:
        a, b = f"{layer}.lora_A.weight", f"{layer}.lora_B.weight"
        padding = rank - len(tensors[a])
        tensors[a], tensors[b] = F.pad(tensors[a], (0, 0, 0, padding)), F.pad(tensors[b], (0, padding))
    return layers, rank


def _is_lora(change: Change) -> bool:
    return "lora_B.weight" in change.keys


def _expert_names(trained: AssembledModel) -> dict[str, str]:
    """The modules of the weights of fused experts, by the weights' names in the base without adapters."""
    found = [(place.module.replace(".base_layer", ""), place.key) for place in expert_weights(trained.model.base)]
    return {f"{module}.{key}": module for module, key in found}


def _check_kind(adapter: Path, config: peft.LoraConfig, changes: Mapping[str, Change]) -> None:
    kinds = {
        "is a DoRA adapter": config.use_dora,
        "holds whole layers (modules_to_save)": any("whole" in change.keys for change in changes.values()),
        "has rows for tokens (trainable_token_indices)": config.trainable_token_indices,
    }
    found = [kind for kind, is_so in kinds.items() if is_so]
    if found:
        raise AdapterError(
            f"write=adapter: adapter={adapter} {found[0]}, which vLLM does not read beside a base. Set write=model, "
            "which makes one model of both."
        )


def _check(
    trained: AssembledModel,
    adapter: Path,
    experts: dict[str, Change],
    composed: dict[str, ComposedTensor],
    has_patterns: bool,
) -> None:
    whole = [name for name in experts if not is_apart(composed.get(name))]
    if whole:
        fix = f"Give it adapter={adapter} as it is."
        if has_patterns:
            fix = "It takes one scaling for all layers, and the adapter has several. Set write=model."
        raise AdapterError(
            f"write=adapter: {trained.files.folder} has {whole[0]} in one tensor for all experts, and vLLM reads "
            f"adapters as the base's files are. {fix}"
        )
    modules = _expert_names(trained)
    adapted = {modules[name] for name in experts}
    missing = [name for name, module in modules.items() if module in adapted and name not in experts]
    if missing:
        raise AdapterError(
            f"write=adapter: adapter={adapter} has no adapter of {missing[0]}, and vLLM wants one of each layer of an "
            "expert. Set write=model, which makes one model of base and adapter."
        )
