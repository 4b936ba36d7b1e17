"""Find the experts of a model and the routers that choose among them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, cast

from torch import nn
from torch.nn.modules.conv import _ConvNd
from transformers import PretrainedConfig, PreTrainedModel

from qlora_fsdp.common.errors import CheckpointError
from qlora_fsdp.common.model_figures import values_by_layer
from qlora_fsdp.layers.experts.forward import expert_weight_names, mentions_experts
from qlora_fsdp.layers.experts.grouped_products import ExpertWeight
from qlora_fsdp.weights.composed import ComposedTensor

# Names that a weight of fused experts had in earlier versions of the models, as linear layers of each expert. Model
# files and settings still use them.
FORMER_NAMES = {"gate_up_proj": ("gate_proj", "up_proj", "w1", "w3"), "down_proj": ("w2",), "up_proj": ("w1",)}


class ExpertWeightPlace(NamedTuple):
    """Where a weight of fused experts is: the name of its module, and its own name there."""

    module: str
    key: str

    @property
    def name(self) -> str:
        """The weight's full name."""
        return f"{self.module}.{self.key}"

    def weight_in(self, model: nn.Module) -> ExpertWeight:
        """The weight [E, rows, columns]."""
        return cast(ExpertWeight, getattr(model.get_submodule(self.module), self.key))

    def former_names(self) -> list[str]:
        """Full names that the weight's parts had as linear layers."""
        return [f"{self.module}.{name}" for name in FORMER_NAMES[self.key]]


def expert_weights(model: nn.Module) -> Iterator[ExpertWeightPlace]:
    """All weights of fused experts, in the order of the model's modules."""
    for name, module in model.named_modules():
        for key in expert_weight_names(module):
            yield ExpertWeightPlace(name, key)


def has_experts(model: nn.Module) -> bool:
    """Whether the model has fused experts."""
    return next(expert_weights(model), None) is not None


def is_apart(stored: object) -> bool:
    """Whether a weight of fused experts is a tensor for each expert in the files. vLLM then wants an adapter for each.

    Args:
        stored: what fills the weight (`Assignment.stored`).
    """
    return isinstance(stored, ComposedTensor) and not stored.is_transposed


def num_chosen(block: nn.Module, config: PretrainedConfig) -> int | None:
    """How many experts a token is sent to, by the router beside them or by the model's config; None if neither says."""
    by_router = [getattr(module, "top_k", None) for module in block.modules()]
    by_config = values_by_layer(config, "num_experts_per_tok", "top_k_experts", "moe_topk")
    return next((number for number in (*by_router, *by_config) if type(number) is int), None)


def check_num_chosen(model: PreTrainedModel) -> None:
    """Refuse routers that are to choose more experts than there are.

    Raises:
        CheckpointError: one is.
    """
    for place in expert_weights(model):
        num_experts, block = place.weight_in(model).shape[0], place.module.rpartition(".")[0]
        number = num_chosen(model.get_submodule(block), model.config.get_text_config())
        if number is not None and not 1 <= number <= num_experts:
            raise CheckpointError(
                f"config.json sends each token to {number} experts (num_experts_per_tok), but {block} has "
                f"{num_experts}. Copy or download it again, or correct it."
            )


def find_routers(model: nn.Module) -> set[str]:
    """Names of the modules that score experts.

    They lie beside experts, whoever computes these, and have a matrix of one row for each of them.
    """
    routers = set()
    for experts, num_experts in _all_experts(model).items():
        block = experts.rpartition(".")[0]
        for name, module in model.get_submodule(block).named_modules(prefix=block):
            weight = module._parameters.get("weight")
            is_inside = name == experts or name.startswith(f"{experts}.")
            if weight is not None and weight.ndim == 2 and weight.shape[0] == num_experts and not is_inside:
                routers.add(name)
    return routers


def _all_experts(model: nn.Module) -> dict[str, int]:
    """Names of the modules of fused experts, and of those that a model computes in a way of its own: how many each has.

    The latter are told by their parameters, one tensor for all experts.
    """
    fused = {place.module: int(place.weight_in(model).shape[0]) for place in expert_weights(model)}
    return {name: len(found[0]) for name, found in other_experts(model).items()} | fused


def other_experts(model: nn.Module) -> dict[str, list[nn.Parameter]]:
    """Modules of experts that transformers does not let others compute, by their names: their weights."""
    if not isinstance(model, PreTrainedModel) or not mentions_experts(model.config):
        return {}
    found = {}
    # Each layer's, though on meta layers that are alike may be one module.
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, _ConvNd) or expert_weight_names(module):
            continue
        params = [param for param in module.parameters(recurse=False) if param.ndim > 2 and len(param) > 1]
        if params:
            found[name] = params
    return found
