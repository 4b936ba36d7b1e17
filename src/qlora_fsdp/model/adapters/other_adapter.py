"""A second adapter of the same base, whose matrices take the places of the model's own for single passes.

A reward model that was trained on the same base costs its adapter, not a model. Its matrices are small, so every rank
has them whole. FSDP goes on to gather the model's own, which nobody reads meanwhile.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import peft
import torch
from peft.tuners.lora import LoraLayer
from peft.utils.other import get_pattern_key
from safetensors import safe_open
from torch import Tensor, nn

from qlora_fsdp.common.errors import AdapterError
from qlora_fsdp.common.text import list_some
from qlora_fsdp.config.adapter.adapter_config import ADAPTER_WEIGHTS, PREFIX, read_lora, read_shapes
from qlora_fsdp.config.reading.commands import read_corrected_format
from qlora_fsdp.config.schema import LoraConfig
from qlora_fsdp.layers.lora import LoraLinear
from qlora_fsdp.layers.mlp import MAX_RANK
from qlora_fsdp.layers.quantized.linear import QuantizedLinear
from qlora_fsdp.layers.token_rows import ADAPTER
from qlora_fsdp.model.adapters.read_adapter import SavedAdapter

_MATRICES = (".lora_A.weight", ".lora_B.weight")


class OtherAdapter:
    """An adapter in PEFT's files, for passes without gradient on a model that has adapters of its own.

    Args:
        saved: the adapter. It is on linear layers alone, on none that has no adapter in the model.
        model: the wrapped model, loaded, sharded or not.
        device: where its matrices are.
        head: name of a module that it may have besides, as a whole: a reward's `score`. None: it has no other weights.

    Attributes:
        head: the weight of that module, float32 [outputs, D] on the device; None without one.

    Raises:
        AdapterError: it has what can't be put in place here.
    """

    def __init__(
        self, saved: SavedAdapter, model: peft.PeftModel, device: torch.device, head: str | None = None
    ) -> None:
        self.all_layers: list[Any] = [module for module in model.modules() if isinstance(module, LoraLayer)]
        if any(layer.lora_variant for layer in self.all_layers):  # its magnitudes are there whatever the scaling is
            reason = "the adapter that is trained is DoRA, which can't be switched off for it"
            raise AdapterError(f"{saved} can't be used: {reason}. Set lora.use_dora=false, or another lora.start.")
        self.head: Tensor | None = None
        lora = read_lora(saved.folder, saved.setting)
        layers = {
            name.removeprefix(PREFIX): module
            for name, module in model.named_modules()
            if isinstance(module, LoraLinear)
        }
        _check(saved, lora, set(layers), head)
        _check_format(saved, layers.values())
        base: Any = model.get_base_model()
        _check_shapes(saved, layers, head, base.config.get_text_config().hidden_size)
        self.matrices: dict[LoraLinear, tuple[nn.Linear, nn.Linear, float]] = {}
        with safe_open(saved.folder / ADAPTER_WEIGHTS, "pt") as file:
            stored = set(file.keys())
            for name, layer in layers.items():
                keys = [f"{PREFIX}{name}{ending}" for ending in _MATRICES]
                if not stored.issuperset(keys):
                    continue
                first, second = (_linear(file.get_tensor(key), device) for key in keys)
                self.matrices[layer] = (first, second, _scaling(lora, name, first.out_features))
            if head is not None:
                self.head = file.get_tensor(f"{PREFIX}{head}.weight").to(device, torch.float32)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """While it lasts, the model computes with this adapter, without gradients. It is for whole calls of the model.

        Layers on which this adapter is not have their own multiplied by zero.
        """
        own = [(layer, dict(layer.scaling)) for layer in self.all_layers]
        kept = {layer: (layer.lora_A[ADAPTER], layer.lora_B[ADAPTER]) for layer in self.matrices}
        for layer in self.all_layers:
            layer.scaling.update(dict.fromkeys(layer.scaling, 0.0))
        for lora_layer, (first, second, scaling) in self.matrices.items():
            lora_layer.lora_A[ADAPTER] = first
            lora_layer.lora_B[ADAPTER] = second
            lora_layer.scaling[ADAPTER] = scaling
        try:
            with torch.no_grad():
                yield
        finally:
            for lora_layer, (own_first, own_second) in kept.items():
                lora_layer.lora_A[ADAPTER] = own_first
                lora_layer.lora_B[ADAPTER] = own_second
            for layer, scalings in own:
                layer.scaling.update(scalings)


def _check(saved: SavedAdapter, lora: LoraConfig, layers: set[str], head: str | None) -> None:
    """Refuse what can't be put in place.

    Args:
        saved: the adapter.
        lora: its settings.
        layers: names of the linear layers that have adapters in the model.
        head: name of a module that it has to have as a whole.
    """
    shapes = read_shapes(saved.folder, saved.setting)
    if lora.use_dora:
        raise AdapterError(f"{saved} is DoRA, which can't be switched here. Set {saved.setting} to a plain LoRA.")
    if head is not None and shapes.get(f"{PREFIX}{head}.weight", ())[:1] != (1,):
        raise AdapterError(
            f"{saved} has no {head} with one output: it is no reward model. Set {saved.setting} to the adapter of a "
            "run with task=reward."
        )
    ranks = [shape[0] for key, shape in shapes.items() if key.endswith(_MATRICES[0])]
    if max(ranks, default=0) > MAX_RANK:
        raise AdapterError(f"{saved} has a rank of {max(ranks)}, and {MAX_RANK} is the most that can be switched here.")
    known = {f"{PREFIX}{name}{ending}" for name in layers for ending in _MATRICES}
    if head is not None:
        known.add(f"{PREFIX}{head}.weight")
    others = sorted(key.removeprefix(PREFIX) for key in shapes.keys() - known)
    if any(".lora_embedding_" in key for key in others):
        raise AdapterError(
            f"{saved} adapts embeddings, which can't be switched here. Set {saved.setting} to an adapter of linear "
            f"layers alone:\n{list_some(others)}"
        )
    if others:
        raise AdapterError(
            f"{saved} has weights that this run has no place for. Set lora.target_modules to the layers that it "
            f"adapts, or more; tables and heads that were trained as a whole can't be switched:\n{list_some(others)}"
        )


def _check_format(saved: SavedAdapter, layers: Iterable[LoraLinear]) -> None:
    """Refuse an adapter that corrects the rounding of another format than the base has."""
    corrected = read_corrected_format(str(saved.folder))
    bases = [layer.base_layer for layer in layers]
    formats = {base.format.quant_type for base in bases if isinstance(base, QuantizedLinear)}
    if corrected is not None and corrected not in formats:  # a head in int8 may be adapted too
        raise AdapterError(
            f"{saved} corrects the rounding of {corrected}, in which the base of this run is not. Set "
            f"quant={corrected}, or {saved.setting} to another adapter."
        )


def _check_shapes(saved: SavedAdapter, layers: Mapping[str, LoraLinear], head: str | None, hidden_size: int) -> None:
    """Refuse matrices that do not fit their layers, of a file that somebody else may have written.

    Args:
        saved: the adapter.
        layers: the model's linear layers that have adapters, by name.
        head: name of a module that it has as a whole.
        hidden_size: inputs of that module.
    """
    shapes = read_shapes(saved.folder, saved.setting)
    problems = []
    for name, layer in layers.items():
        first, second = (shapes.get(f"{PREFIX}{name}{ending}") for ending in _MATRICES)
        if first is None and second is None:
            continue
        rank = 0 if not first else first[0]
        if rank < 1 or first != (rank, layer.in_features) or second != (layer.out_features, rank):
            found = " and ".join("nothing" if shape is None else str(list(shape)) for shape in (first, second))
            problems.append(f"{name} is {found}, in the model {layer.in_features} inputs, {layer.out_features} outputs")
    if head is not None and shapes[f"{PREFIX}{head}.weight"] != (1, hidden_size):
        problems.append(f"{head} is {list(shapes[f'{PREFIX}{head}.weight'])}, in the model {[1, hidden_size]}")
    if problems:
        raise AdapterError(
            f"{saved} does not fit the model. Set {saved.setting} to an adapter of it:\n{list_some(problems)}"
        )


def _linear(weight: Tensor, device: torch.device) -> nn.Linear:
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    layer.weight = nn.Parameter(weight.to(device, torch.float32).contiguous(), requires_grad=False)
    return layer


def _scaling(lora: LoraConfig, name: str, rank: int) -> float:
    """What PEFT multiplies a layer's adapter by."""
    patterns = lora.alpha_pattern or {}
    alpha = patterns.get(get_pattern_key(list(patterns), name), lora.lora_alpha)
    return float(alpha / (math.sqrt(rank) if lora.use_rslora else rank))
