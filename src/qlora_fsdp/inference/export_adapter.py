"""Rewrite an adapter as vLLM reads it: layers have the names of the base's files, and one scaling is that of all.

vLLM names layers as the base's files do (model/adapters/serving.py). PEFT has all experts of a layer in two tensors,
because transformers has their weights in one. In the files of most models experts are linear layers:
`...mlp.experts.7.gate_proj`. So the rows of a weight of fused experts, of which each file's tensor is a piece, tell
which rows of B make which expert's adapter. Two layers whose weights are one in the model, gate and up, get the same A.
Experts that are one tensor in the files stay as PEFT has them, which vLLM reads so.

vLLM's `vllm/lora/lora_model.py` and `vllm/lora/model_manager.py` were read at its commit 01533aa8f9c0: the names
(`_create_merged_loras_inplace`), that an expert needs adapters of all its layers (`pack_moe`), and that one rank and
one scaling are taken for the whole adapter (`PEFTHelper`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import peft
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F

from qlora_fsdp.common.errors import AdapterError, RunFolderError
from qlora_fsdp.common.files import replacing
from qlora_fsdp.common.text import list_some
from qlora_fsdp.config.adapter.adapter_config import ADAPTER_WEIGHTS, PREFIX, WEIGHT
from qlora_fsdp.inference.merge_weights import ParameterChange, find_parameter_changes
from qlora_fsdp.model.adapters.serving import (
    BASE_LAYER,
    LayerInFiles,
    adapted_experts,
    adapted_linears,
    experts_in_files,
    find_missing_experts,
    find_renamed,
    layers_in_files,
    stored_by_name,
)
from qlora_fsdp.model.assemble import AssembledModel
from qlora_fsdp.model.experts import is_apart
from qlora_fsdp.weights.composed import ComposedTensor, Stored


def export_adapter(trained: AssembledModel, adapter: Path, out: Path) -> dict[str, str]:
    """Write the adapter to `out`: its weights, its config and the tokenizer.

    Returns:
        The layers that have other names in `out`, with these names.

    Raises:
        AdapterError: vLLM reads it as it is, or in no form; it has no adapters of all layers of an expert; or it has
            several scalings, and the base's files have experts in one tensor.
        RunFolderError: `out` is not empty.
    """
    config = peft.LoraConfig.from_pretrained(str(adapter))
    changes = find_parameter_changes(trained.model.base, adapter)
    _check_kind(adapter, config, changes)
    stored = stored_by_name(trained.meta.assignments)
    experts = dict(adapted_experts(trained.model.base))
    renamed = find_renamed(trained.model.base, stored)
    has_patterns = bool(config.rank_pattern or config.alpha_pattern)
    if not experts and not has_patterns and not renamed and not config.use_rslora:  # which SGLang does not read
        raise AdapterError(
            f"adapter={adapter} has no adapters of experts and one scaling for all layers, so vLLM and SGLang read it "
            "as it is. Give them that."
        )
    _check_experts(trained, adapter, stored, has_patterns, bool(renamed))
    _check_linears(trained, adapter, stored)
    if out.is_dir() and any(out.iterdir()):
        raise RunFolderError(f"out={out} is not empty. Set out to a new folder.")
    scaling = config.lora_alpha / (math.sqrt(config.r) if config.use_rslora else config.r)
    tensors: dict[str, Tensor] = {}
    has_fused = False
    for name, change in changes.items():
        if name not in experts:
            pairs = _by_layer(change, layers_in_files(name.removesuffix(WEIGHT), stored.get(name)))
        elif is_apart(source := stored[name]):
            assert isinstance(source, ComposedTensor)
            pairs = _unfuse(change, source)
        else:
            has_fused = True
            pairs = _fused(change, experts[name], experts_in_files(experts[name], stored[name]))
        for layer, a, b in pairs:
            tensors[f"{PREFIX}{layer}.lora_A.weight"] = a.contiguous()
            tensors[f"{PREFIX}{layer}.lora_B.weight"] = (b * (change.scaling / scaling)).contiguous()
    # Fused experts are here only where all layers have one rank.
    rank = config.r if has_fused else _pad_ranks(tensors)
    config = replace(
        config,
        r=rank,
        lora_alpha=scaling * rank,  # PEFT and vLLM take fractions too
        use_rslora=False,  # by which PEFT would scale fused gate and up otherwise than gate and up
        target_modules=_target_modules(tensors, has_fused),
        target_parameters=_ends(config.target_parameters) if has_fused else None,
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
    return renamed


def _by_layer(change: ParameterChange, layers: Sequence[LayerInFiles]) -> Iterator[tuple[str, Tensor, Tensor]]:
    """The matrices of a linear layer, for each layer that it is in the files; these share A."""
    a, b = change.read("lora_A.weight"), change.read("lora_B.weight")
    for layer in layers:
        rows = b if layer.num_rows is None else b[layer.first_row : layer.first_row + layer.num_rows]
        yield layer.name, a, rows


def _fused(change: ParameterChange, module: str, module_in_files: str) -> Iterator[tuple[str, Tensor, Tensor]]:
    """The matrices of a weight of fused experts, as PEFT has them, under the name of their module in the files."""
    own = change.keys["lora_A.weight"].removeprefix(PREFIX).removesuffix(".lora_A.weight")
    assert own.startswith(module)
    yield module_in_files + own.removeprefix(module), change.read("lora_A.weight"), change.read("lora_B.weight")


def _unfuse(change: ParameterChange, source: ComposedTensor) -> Iterator[tuple[str, Tensor, Tensor]]:
    """The matrices of each expert's layers, under the layers' names in the files."""
    b_EOR, a_ERI = change.factors()
    start = 0
    for piece in source.pieces:
        expert, row = divmod(start, b_EOR.shape[1])
        yield piece.stored.key.removesuffix(WEIGHT), a_ERI[expert], b_EOR[expert, row : row + piece.num_rows]
        start += piece.num_rows


def _pad_ranks(tensors: dict[str, Tensor]) -> int:
    """Give all matrices the largest rank, with zeros, in place. Returns the rank."""
    layers = _layers(tensors)
    rank = max(len(tensors[f"{layer}.lora_A.weight"]) for layer in layers)
    for layer in layers:
        a, b = f"{layer}.lora_A.weight", f"{layer}.lora_B.weight"
        padding = rank - len(tensors[a])
        tensors[a], tensors[b] = F.pad(tensors[a], (0, 0, 0, padding)), F.pad(tensors[b], (0, padding))
    return rank


def _layers(tensors: Mapping[str, Tensor]) -> list[str]:
    """The names of the layers in an adapter's file."""
    return [key.removesuffix(".lora_A.weight") for key in tensors if key.endswith(".lora_A.weight")]


def _target_modules(tensors: Mapping[str, Tensor], has_fused: bool) -> list[str]:
    """PEFT's setting for the linear layers of an adapter's file; fused experts are named by `target_parameters`."""
    layers = [layer.removesuffix(BASE_LAYER) for layer in _layers(tensors)]
    ends = {layer.rpartition(".")[2] for layer in layers}
    return sorted(ends - {"experts"} if has_fused else ends)


def _ends(target_parameters: Sequence[str] | None) -> list[str]:
    """The ends of the names of experts' weights, which are the same in the files: `experts.down_proj`."""
    return sorted({".".join(name.split(".")[-2:]) for name in target_parameters or []})


def _check_kind(adapter: Path, config: peft.LoraConfig, changes: Mapping[str, ParameterChange]) -> None:
    kinds = {
        "is a DoRA adapter": config.use_dora,
        "holds whole layers (modules_to_save)": any("whole" in change.keys for change in changes.values()),
        "has rows for tokens (trainable_token_indices)": config.trainable_token_indices,
    }
    if any(change.is_of_embeddings for change in changes.values()):
        raise AdapterError(
            f"write=adapter: adapter={adapter} adapts embeddings, which not every server reads. Set write=model, which "
            "makes one model of both."
        )
    found = [kind for kind, is_so in kinds.items() if is_so]
    if found:
        raise AdapterError(
            f"write=adapter: adapter={adapter} {found[0]}, which vLLM does not read beside a base. Set write=model, "
            "which makes one model of both."
        )


def _check_experts(
    trained: AssembledModel,
    adapter: Path,
    stored: Mapping[str, Stored | None],
    has_patterns: bool,
    is_renamed: bool,
) -> None:
    base = trained.model.base
    whole = [name for name, _ in adapted_experts(base) if not is_apart(stored.get(name))]
    if whole and (has_patterns or not is_renamed):
        fix = f"Give it adapter={adapter} as it is."
        if has_patterns:
            fix = "It takes one scaling for all layers, and the adapter has several. Set write=model."
        raise AdapterError(
            f"write=adapter: {trained.files.folder} has {whole[0]} in one tensor for all experts, and vLLM reads "
            f"adapters as the base's files are. {fix}"
        )
    missing = find_missing_experts(base)
    if missing is not None:
        raise AdapterError(
            f"write=adapter: adapter={adapter} has no adapter of {missing}, and vLLM wants one of each layer of an "
            "expert. Set write=model, which makes one model of base and adapter."
        )


def _check_linears(trained: AssembledModel, adapter: Path, stored: Mapping[str, Stored | None]) -> None:
    linears = adapted_linears(trained.model.base)
    parts = sorted(name for name in linears if not layers_in_files(name, stored.get(name + WEIGHT)))
    if parts:
        raise AdapterError(
            f"write=adapter: adapter={adapter} adapts layers of which {trained.files.folder} has several in one "
            "tensor, and no server applies an adapter of a part. Set write=model, which makes one model of base and "
            f"adapter. These are:\n{list_some(parts)}"
        )
