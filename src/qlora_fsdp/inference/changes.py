"""What a saved adapter does to the parameters of its base: which it changes, and how."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import torch
from peft.utils import ModulesToSaveWrapper
from peft.utils.other import TrainableTokensWrapper
from safetensors import safe_open
from torch import Tensor, nn

from qlora_fsdp.common.errors import AdapterError
from qlora_fsdp.config.adapter.adapter_config import ADAPTER_WEIGHTS, read_adapter_config
from qlora_fsdp.config.adapter.adapter_tables import PREFIX, TOKEN_ROWS, whole_keys
from qlora_fsdp.layers.experts.forward import ExpertLora
from qlora_fsdp.layers.lora import LoraLinear
from qlora_fsdp.layers.token_rows import ADAPTER
from qlora_fsdp.model.adapters.read import read_whole, tokens_of_rows


@dataclass(frozen=True, eq=False)
class ParameterChange:
    """The change that an adapter makes to a parameter of the base. Tied parameters share one.

    Attributes:
        file: the adapter's tensors.
        keys: what is read there, by what it is: LoRA's matrices (`lora_A.weight`, `lora_B.weight`) and DoRA's
            magnitudes (`lora_magnitude_vector`); `whole` for a parameter that was trained in full; or `rows` of new
            tokens, which go into the `whole` if there is one too.
        scaling: of LoRA's product.
        num_experts: experts whose weights are the parameter, [E, rows, columns], each with matrices of its own; 1 for
            a linear layer.
        is_transposed: an expert's rows are its inputs, not its outputs.
        token_ids: the tokens that the `rows` belong to, in the order of these.
    """

    file: Path
    keys: Mapping[str, str]
    scaling: float = 1.0
    num_experts: int = 1
    is_transposed: bool = False
    token_ids: Sequence[int] = ()

    def read(self, what: str) -> Tensor:
        """A tensor of the adapter, on the CPU."""
        with safe_open(self.file, "pt") as file:
            return cast(Tensor, file.get_tensor(self.keys[what]))

    def read_whole(self) -> Tensor:
        """The parameter that was trained in full, on the CPU; rows that the adapter has apart are put into it."""
        with safe_open(self.file, "pt") as file:
            return read_whole(file, self.keys, self.token_ids)

    def factors(self) -> tuple[Tensor, Tensor]:
        """[E, rows, R] and [E, R, columns], whose product times `scaling` is added to the parameter; float32."""
        a, b = (self.read(f"lora_{letter}.weight").float() for letter in "AB")
        a_ERI = a.view(self.num_experts, -1, a.shape[1])  # PEFT stores A expert by expert, and B rank by rank
        b_EOR = b.view(b.shape[0], -1, self.num_experts).permute(2, 0, 1)
        return (a_ERI.mT, b_EOR.mT) if self.is_transposed else (b_EOR, a_ERI)


def find_parameter_changes(model: nn.Module, adapter: Path) -> dict[str, ParameterChange]:
    """Find an adapter's changes, by the name of the parameter that each changes.

    Two tied tables that are the same in the adapter share one.

    Args:
        model: the base with the adapter's layers; may be on meta.
        adapter: PEFT's folder, which fits the model.
    """
    changes: dict[str, ParameterChange] = {}
    token_rows: dict[nn.Module, ParameterChange] = {}  # one entry for two tables that are tied
    file = adapter / ADAPTER_WEIGHTS
    tokens = read_adapter_config(adapter, "adapter").get("trainable_token_indices")
    with safe_open(file, "pt") as tensors:
        stored = {key.removeprefix(PREFIX): key for key in tensors.keys()}  # noqa: SIM118
    for name, module in model.named_modules():
        if isinstance(module, (LoraLinear, ExpertLora)):
            parts = {part: f"{name}.{part}" for part in ("lora_A.weight", "lora_B.weight", "lora_magnitude_vector")}
            keys = {part: stored[key] for part, key in parts.items() if key in stored}
            change = ParameterChange(file, keys, module.scaling[ADAPTER])
            if isinstance(module, ExpertLora):
                experts = module.get_base_layer()
                key = module.parameter_name
                change = replace(change, num_experts=module.num_experts, is_transposed=bool(experts.is_transposed))
                changes[f"{name.replace('.base_layer', '')}.{key}"] = change
            else:
                changes[f"{name}.weight"] = change
        elif isinstance(module, ModulesToSaveWrapper):
            for key, _ in module.original_module.named_parameters():
                keys = {part: stored[own] for part, own in whole_keys(stored, f"{name}.{key}").items()}
                ids = tokens_of_rows(tokens, keys["rows"]) if "rows" in keys else ()
                changes[f"{name}.{key}"] = ParameterChange(file, keys, token_ids=ids)
        elif isinstance(module, TrainableTokensWrapper):
            layer = module.token_adapter
            if layer.tied_adapter is None:
                key = stored[f"{name}.{TOKEN_ROWS}"]
                token_rows[layer] = ParameterChange(file, {"rows": key}, token_ids=tokens_of_rows(tokens, key))
            rows = token_rows[layer.tied_adapter or layer]
            weight = f"{name.removesuffix('.base_layer')}.weight"
            adapter_of_head = changes.get(weight)  # a tied head may have an adapter above its rows
            if adapter_of_head is not None:
                rows = replace(adapter_of_head, keys={**adapter_of_head.keys, **rows.keys}, token_ids=rows.token_ids)
            changes[weight] = rows
    for one, other in (getattr(model, "all_tied_weights_keys", None) or {}).items():
        if one in changes and other in changes and _are_equal(changes[one], changes[other]):
            changes[one] = changes[other]
    return changes


def check_shared_layers(model: nn.Module, changes: Mapping[str, ParameterChange]) -> None:
    """Refuse to merge into a weight that several layers share, as blocks of Zamba 2 do: each has an adapter of its own.

    Raises:
        AdapterError: naming two such layers.
    """
    modules = dict(model.named_modules())
    for pair in (getattr(model, "all_tied_weights_keys", None) or {}).items():
        layers = [modules.get(name.removesuffix(".weight")) for name in pair]
        changed = [name for name in pair if name in changes]
        if changed and all(isinstance(layer, (LoraLinear, nn.Linear)) for layer in layers):
            raise AdapterError(
                f"{changed[0]} can't be merged: {' and '.join(sorted(pair))} are one weight, and adapters change the "
                "two layers apart. Use the adapter as it is, with qlora-fsdp generate or PEFT."
            )


def _are_equal(one: ParameterChange, other: ParameterChange) -> bool:
    """Whether an adapter has two tied tables as a whole, and both are the same: they can stay tied."""
    are_whole = "whole" in one.keys and "whole" in other.keys
    return are_whole and torch.equal(one.read_whole(), other.read_whole())
