"""Let what belongs together in a model be computed together: q, k and v; gate, up and down; a norm and its residual."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, cast

from torch import Tensor, nn

from qlora_fsdp.common.families import GATED_MLPS
from qlora_fsdp.common.fused_mlp import GATED, can_fuse_mlp
from qlora_fsdp.layers.lora import LoraLinear, SharedInput, remake_output
from qlora_fsdp.layers.mlp import GatedMlp
from qlora_fsdp.layers.norm import join_norms
from qlora_fsdp.layers.quantized_linear import QuantizedLinear

HEAD_NORMS = ("q_norm", "k_norm")
SAME_INPUT = ("q_proj", "k_proj", "v_proj")
ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}

LIGER_MLPS = {"LigerSwiGLUMLP", "LigerGEGLUMLP", "LigerPhi3SwiGLUMLP"}  # what Liger puts in the place of a gated MLP


def fuse_layers(model: nn.Module, norms: bool = True) -> int:
    """Join what can be joined; everything else stays as it is, one layer at a time.

    Args:
        model: with adapters on quantized layers, on meta or not.
        norms: join RMSNorms and residuals too.

    Returns:
        How many groups of linear layers were made.
    """
    num_groups = 0
    for module in model.modules():
        if norms:
            join_norms(module)
        shared = _lora_children(module, SAME_INPUT)
        if shared is not None:
            group = SharedInput(shared)
            for layer in shared:
                layer.group = group
            num_groups += 1
        if type(module).__name__ in GATED_MLPS | LIGER_MLPS:
            num_groups += _fuse_mlp(module)
        for name in HEAD_NORMS:
            if isinstance(norm := module._modules.get(name), nn.Module):
                norm.forward = partial(_norm_as_stored, norm.forward)
    return num_groups


def _fuse_mlp(module: nn.Module) -> bool:
    """Compute a gated MLP's layers together, where they allow it."""
    config: Any = module.config
    activation = getattr(config, "hidden_activation", None) or getattr(config, "hidden_act", None)
    for names in GATED:
        layers = _lora_children(module, names)
        if layers is None or activation not in ACTIVATIONS:
            continue
        ranks = [rank for layer in layers for rank in layer.r.values()]
        has_bias = any(layer.base_layer.bias is not None for layer in layers[:-1])
        if can_fuse_mlp(ranks, has_bias):
            module.forward = GatedMlp(module, names, ACTIVATIONS[activation])
            return True
    return False


def _norm_as_stored(normalize: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Of heads that lie in memory as [B, L, H, D], but are seen as [B, H, L, D] (Gemma 3): kernels would copy them."""
    if x.ndim == 4 and not x.is_contiguous() and (stored := x.transpose(1, 2)).is_contiguous():
        return normalize(stored).transpose(1, 2)
    return normalize(x)


def _lora_children(module: nn.Module, names: tuple[str, ...]) -> list[LoraLinear] | None:
    """Children of these names, if all are adapted quantized layers whose products are made in the same way."""
    layers = [module._modules.get(name) for name in names]  # not getattr: PEFT's wrappers hand on what they lack
    if not all(isinstance(layer, LoraLinear) and isinstance(layer.base_layer, QuantizedLinear) for layer in layers):
        return None
    found = cast(list[LoraLinear], layers)
    return found if len({type(cast(QuantizedLinear, layer.base_layer).matmul) for layer in found}) == 1 else None


def remake_norms(layer: nn.Module) -> None:
    """Let a transformer layer's groups keep the norms' inputs, which the norms keep anyway, and not their outputs."""
    for norm in layer.children():
        if type(norm).__name__.endswith("RMSNorm"):
            remake_output(norm)
