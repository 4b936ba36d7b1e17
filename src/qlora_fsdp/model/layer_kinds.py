"""Which transformer layers of a model are alike, so that one of them can stand for the others in a memory plan."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer


def share_equal_layers(model: PreTrainedModel) -> None:
    """Put one module in the place of all layers that are alike: it runs several times then.

    A plan needs no layer twice, and adapting hundreds of modules takes seconds.

    Args:
        model: on meta, as transformers made it; changed in place, and of no use for training afterwards.
    """
    for modules in list(model.modules()):
        if isinstance(modules, nn.ModuleList) and all(isinstance(m, GradientCheckpointingLayer) for m in modules):
            kinds: dict[Any, nn.Module] = {}
            for index, layer in enumerate(modules):
                modules[index] = kinds.setdefault(kind_of(layer), layer)


def kind_of(layer: nn.Module) -> Any:
    """Equal for layers that are alike: classes, sizes and simple attributes of all modules, but for their position."""
    return tuple(
        (
            name,
            type(module).__name__,
            tuple((key, p.shape, p.dtype, p.requires_grad) for key, p in module._parameters.items() if p is not None),
            tuple((key, value) for key, value in vars(module).items() if _is_simple(key, value)),
        )
        for name, module in layer.named_modules()
    )


def _is_simple(name: str, value: Any) -> bool:
    if not isinstance(value, (int, float, str, bool, torch.dtype)):
        return False
    return not any(part in name for part in ("idx", "index", "layer_id", "layer_number"))  # its position
