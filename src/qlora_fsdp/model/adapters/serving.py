"""How a server applies an adapter beside its base, and which names it knows the adapter's layers by.

PEFT calls a layer by the name of its module in transformers' class. vLLM reads an adapter's keys as it reads the
base's files (`hf_to_vllm_mapper` of its classes renames both), so it calls a layer by the name of its weight there. For
most models both names are one. They differ where transformers renames tensors while it loads them: where a class has
only the text part of a checkpoint (Qwen 3.5, Llama 4), or the files are in an older form. vLLM passes over keys that it
does not know without a word, and answers as the base does. Some of its classes know two forms (Gemma 3's), which is
written nowhere but there; the files' names are known to all.

So an adapter's folder has the names that PEFT needs, and `merge write=adapter` writes those of the files. Both follow
from what fills the base's weights (`MetaModel.assignments`), not from a list of models.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import peft
from torch import nn

from qlora_fsdp.config.adapter.adapter_config import WEIGHT
from qlora_fsdp.layers.experts.forward import ExpertLora
from qlora_fsdp.layers.lora import LoraEmbedding, LoraLinear
from qlora_fsdp.layers.token_rows import ADAPTER
from qlora_fsdp.model.experts import expert_weights, is_apart
from qlora_fsdp.weights.composed import Assignment, ComposedTensor, Stored

BASE_LAYER = ".base_layer"  # what PEFT adds to the name of a layer below its adapter
LAYERS_DIFFER = "its layers differ in rank or alpha"


@dataclass(frozen=True)
class LayerInFiles:
    """A linear layer of the base's files, and which rows of the model's layer it has.

    Attributes:
        name: the name of its weight in the files, without `.weight`.
        first_row: the first row of the model's weight that is in it.
        num_rows: how many are; None for all.
    """

    name: str
    first_row: int = 0
    num_rows: int | None = None


@dataclass(frozen=True)
class Serving:
    """What a server that reads adapters beside a base, such as vLLM, needs of an adapter.

    Attributes:
        export: why `merge write=adapter` has to write the adapter anew for it; None if it reads the adapter as it is,
            or in no form.
        merge: why it reads the adapter in no form, so that `merge` has to make one model of adapter and base; None if
            it does.
    """

    export: str | None = None
    merge: str | None = None


def stored_by_name(assignments: Sequence[Assignment]) -> dict[str, Stored | None]:
    """What the files have for each weight, by the weight's name in the model."""
    return {assignment.name: assignment.stored for assignment in assignments}


def layers_in_files(name: str, stored: Stored | None) -> list[LayerInFiles]:
    """The layers that a linear layer of the model is in the base's files.

    Args:
        name: the layer's name in the model.
        stored: what fills its weight; None for a weight that the files do not name, such as a tied head.

    Returns:
        One layer for nearly all. Several where transformers joins them, such as query, key and value. None where the
        layer is a part of a larger tensor in the files: a server has no name for such a part.
    """
    if stored is None:
        return [LayerInFiles(name)]
    if not isinstance(stored, ComposedTensor):
        return [LayerInFiles(stored.key.removesuffix(WEIGHT))]
    layers = []
    row = 0
    for piece in stored.pieces:
        is_whole = piece.num_rows * stored.row_elements == math.prod(piece.stored.shape)
        is_turned = stored.is_transposed and len(stored.pieces) > 1  # the files' rows are inputs then, which are A's
        if is_turned or not is_whole:
            return []
        layers.append(LayerInFiles(piece.stored.key.removesuffix(WEIGHT), row, piece.num_rows))
        row += piece.num_rows
    return layers if len(layers) > 1 else [LayerInFiles(layers[0].name)]


def experts_in_files(module: str, stored: Stored | None) -> str:
    """The name that the module of fused experts has in the base's files, which have all experts in one tensor.

    Args:
        module: its name in the model.
        stored: what fills one of its weights.
    """
    if stored is None:
        return module
    key = stored.pieces[0].stored.key if isinstance(stored, ComposedTensor) else stored.key
    return key.rpartition(".")[0]


def find_serving(model: nn.Module, assignments: Sequence[Assignment], settings: peft.LoraConfig) -> Serving:
    """Find out how a server applies an adapter.

    Args:
        model: the base with the adapter's layers; may be on meta.
        assignments: what fills the base's weights.
        settings: of the adapter.
    """
    stored = stored_by_name(assignments)
    reason = _why_in_no_form(model, stored, settings)
    if reason is not None:
        return Serving(merge=reason)
    if any(is_apart(stored.get(name)) for name, _ in adapted_experts(model)):
        return Serving(export="its experts' adapters are as PEFT keeps them")
    if _differ(settings):
        return Serving(export=LAYERS_DIFFER)
    renamed = find_renamed(model, stored)
    if renamed:
        name, other = next(iter(renamed.items()))
        return Serving(export=f"the base's files, by which vLLM knows layers, have other names ({other} for {name})")
    return Serving()


def _why_in_no_form(model: nn.Module, stored: Mapping[str, Stored | None], settings: peft.LoraConfig) -> str | None:
    if settings.use_dora:
        return "it is a DoRA adapter"
    if settings.modules_to_save:
        return "it holds whole layers (lora.modules_to_save)"
    if settings.trainable_token_indices:
        return "it has rows for new tokens"
    if any(isinstance(module, LoraEmbedding) for module in model.modules()):
        return "it has an adapter of the embeddings, which not every server reads"
    for name in adapted_linears(model):
        if not layers_in_files(name, stored.get(name + WEIGHT)):
            return f"{name} is a part of a larger tensor in the base's files"
    experts = dict(adapted_experts(model))
    is_whole = any(not is_apart(stored.get(name)) for name in experts)
    if is_whole and _differ(settings):
        return LAYERS_DIFFER
    missing = find_missing_experts(model)
    if missing is not None:
        return f"it has no adapter of {missing}, beside others of the same experts"
    return None


def _differ(settings: peft.LoraConfig) -> bool:
    """Whether some layers have a rank or an alpha of their own."""
    return bool(settings.rank_pattern or settings.alpha_pattern)


def adapted_linears(model: nn.Module) -> Iterator[str]:
    """The names of the linear layers that have an adapter, as they are without it."""
    for name, module in model.named_modules():
        if isinstance(module, LoraLinear):
            yield name.replace(BASE_LAYER, "")


def adapted_experts(model: nn.Module) -> Iterator[tuple[str, str]]:
    """The weights of fused experts that have an adapter, and the module of each, by their names without it."""
    for name, module in model.named_modules():
        if isinstance(module, ExpertLora):
            experts = name.replace(BASE_LAYER, "")
            yield f"{experts}.{module.parameter_name}", experts


def find_missing_experts(model: nn.Module) -> str | None:
    """A weight of fused experts without an adapter beside one that has one; None if there is none."""
    adapted = dict(adapted_experts(model))
    modules = set(adapted.values())
    for place in expert_weights(model):
        module = place.module.replace(BASE_LAYER, "")
        name = f"{module}.{place.key}"
        if module in modules and name not in adapted:
            return name
    return None


def find_renamed(model: nn.Module, stored: Mapping[str, Stored | None]) -> dict[str, str]:
    """Adapted layers, and modules of fused experts, that have other names in the base's files: these names."""
    renamed = {}
    for name in adapted_linears(model):
        layers = [layer.name for layer in layers_in_files(name, stored.get(name + WEIGHT))]
        if layers != [name]:
            renamed[name] = ", ".join(layers)
    for weight, module in adapted_experts(model):
        other = experts_in_files(module, stored.get(weight))
        if other != module and not is_apart(stored.get(weight)):
            renamed[module] = other
    return renamed


def peft_settings(model: peft.PeftModel) -> peft.LoraConfig:
    """PEFT's settings of the adapter."""
    settings = model.peft_config[ADAPTER]
    assert isinstance(settings, peft.LoraConfig)
    return settings
