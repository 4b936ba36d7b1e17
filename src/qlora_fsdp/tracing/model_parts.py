"""A model's parameters as the memory plan counts them, by kind of layer and by FSDP unit (sharding/shard.py)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch import nn
from transformers import PretrainedConfig

from qlora_fsdp.common.layer_sizes import head_sizes
from qlora_fsdp.layers import QuantizedExpertWeight, QuantizedLinear
from qlora_fsdp.layers.quantized.matmul import DequantizedMatmul
from qlora_fsdp.memory.traced import LayerKind, ModelParts, ParameterSize
from qlora_fsdp.model.count import count_bytes
from qlora_fsdp.model.experts import has_experts
from qlora_fsdp.model.layer_kinds import kind_of
from qlora_fsdp.model.tasks.task_model import TaskModel
from qlora_fsdp.sharding.shard import embedding_and_head_units


def find_kinds(model: TaskModel) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """One layer of each kind, as indices of `model.layers`; and the kind of each layer, in the order they run in."""
    places = {layer: index for index, layer in enumerate(model.layers)}
    lists = [module for module in model.base.modules() if isinstance(module, nn.ModuleList)]
    in_order = [layer for modules in lists for layer in modules if layer in places]
    if set(in_order) != places.keys():
        in_order = list(places)
    kinds: dict[Any, int] = {}
    stand_ins: list[int] = []
    order: list[int] = []
    for layer in in_order:
        key = kind_of(layer)
        if key not in kinds:
            kinds[key] = len(kinds)
            stand_ins.append(places[layer])
        order.append(kinds[key])
    return tuple(stand_ins), tuple(order)


def count_parts(model: TaskModel, stand_ins: Sequence[int], order: Sequence[int]) -> ModelParts:
    """The parameters of a model.

    Args:
        model: on meta, with adapters; layers that are alike may be one module.
        stand_ins: one layer of each kind, as indices of `model.layers`.
        order: the kind of each layer.
    """
    layers = [model.layers[index] for index in stand_ins]
    kinds = tuple(_layer_kind(layer) for layer in layers)
    tables = [end for end in (model.embeddings, model.head) if end is not None]
    units = embedding_and_head_units(model)
    names = {id(model.embeddings): "embeddings", id(model.head): "head"}
    ends: dict[str, tuple[ParameterSize, ...]] = {"embeddings": (), "head": ()}
    for unit in units:
        ends[names[id(unit)]] = tuple(_sizes([unit], [], tables))
    ends["root"] = tuple(_sizes([model], [*model.layers, *units], tables))
    around = count_bytes(model, 0, 1).num_base - sum(count_bytes(layer, 0, 1).num_base for layer in model.layers)
    return ModelParts(
        kinds=kinds,
        layers=tuple(order),
        ends=ends,
        gathered_by_model=frozenset(names[id(unit)] for unit in units if unit in model.gathered_by_model),
        num_parameters=around + sum(count_bytes(layers[kind], 0, 1).num_base for kind in order),
        num_quantized=sum(kinds[kind].num_quantized for kind in order),
        cached_bytes=_cached_values(model.base.config.get_text_config()) * model.base.dtype.itemsize,
        has_experts=has_experts(model),
    )


def _cached_values(config: PretrainedConfig) -> int:
    """Numbers of a token's keys and values, in all layers."""
    return sum(layer.num_key_heads * (layer.key_size + layer.value_size) for layer in head_sizes(config))


def _layer_kind(layer: nn.Module) -> LayerKind:
    linears = [module for module in layer.modules() if isinstance(module, QuantizedLinear)]
    experts = [module for module in layer.modules() if isinstance(module, QuantizedExpertWeight)]
    dequantized = [module for module in linears if isinstance(module.matmul, DequantizedMatmul)]
    return LayerKind(
        tensors=tuple(_sizes([layer], [], [])),
        largest_weight=max((module.weight_bytes for module in linears), default=0),
        ahead=max((module.dequantized_bytes for module in dequantized), default=0),
        dequantized=sum(module.weight_bytes for module in dequantized),
        num_quantized=len(linears) + len(experts),
    )


def _sizes(
    inside: Iterable[nn.Module], outside: Iterable[nn.Module], tables: Iterable[nn.Module]
) -> Iterator[ParameterSize]:
    """The parameters of some modules but not of others, each once; `tables` are embeddings and head."""
    left_out = _modules(outside)
    table_modules = _modules(tables)
    seen: set[int] = set()
    for module in _modules(inside):
        if module in left_out:
            continue
        for name, param in module.named_parameters(recurse=False):
            if id(param) in seen:
                continue
            seen.add(id(param))
            rows = param.shape[0] if param.ndim else 1
            part = _part_of(name, param, module in table_modules)
            yield ParameterSize(part, rows, param.numel() // max(1, rows) * param.itemsize)


def _modules(parents: Iterable[nn.Module]) -> dict[nn.Module, None]:
    """The modules and all that is in them, each once, in order."""
    return dict.fromkeys(module for parent in parents for module in parent.modules())


def _part_of(name: str, param: nn.Parameter, is_table: bool) -> str:
    """The part of the plan that a parameter counts in."""
    if param.requires_grad:
        return "adapters"
    if is_table:
        return "embeddings"
    if name.endswith("codes"):
        return "codes"
    return "scales" if name.endswith("scales") else "full_precision"
