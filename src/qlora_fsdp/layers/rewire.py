"""Every change that is made to the modules of a model after it was built and got its adapters.

The modules keep their names and parameters, so saving, loading and sharding notice nothing. They also compute the
same, but faster, or with less memory. The exception is fp8, which rounds products differently. The other
modules of this folder define the changes. Only this module makes them, at four moments:

    moment                          function      change
    a causal LM is made             attach_loss   `head.forward` computes the loss, if it is given targets
    a run is prepared               rewire        in this order:
                                                  1. `format` of 4-bit layers names the kernel that dequantizes
                                                  2. `matmul` of quantized layers multiplies in fp8
                                                  3. `forward` of norms is one kernel, and `__class__` of transformer
                                                     layers joins norms and residuals
                                                  4. `group` of q, k and v makes them one computation
                                                  5. `forward` of gated MLPs becomes one computation
                                                  6. `forward` of the heads' norms copies nothing
    the plan is made                use_tiles     MLPs, experts and norms compute some tokens at a time
    a layer's activation policy     recompute_norms  norms remember input and output in a `LastNorm`; linear layers ask
    is set, at the start or later                 it (`last_norm`) whether their input is a norm's output

Norms, pre-norm layers and gated MLPs are recognised by what they compute (prenorm.py, gated.py), q, k
and v by their names. A layer that fits none of this stays as it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple, cast

from torch import nn
from typing_extensions import assert_never

from qlora_fsdp.common.errors import ConfigError, Problem
from qlora_fsdp.config.schema import ComputeConfig, Kernel, KernelsConfig, MatmulKind
from qlora_fsdp.layers.experts.forward import expert_weight_names
from qlora_fsdp.layers.experts.grouped_products import QuantizedExpertWeight
from qlora_fsdp.layers.gated import find_gated
from qlora_fsdp.layers.head_loss import UNCHANGED, HeadLoss, LogitTransform, LossKernel
from qlora_fsdp.layers.lora import QKV, LoraLinear, SharedInput
from qlora_fsdp.layers.mlp import MAX_RANK, GatedMlp
from qlora_fsdp.layers.norm import (
    LastNorm,
    is_rms_norm,
    normalize,
    normalize_and_remember,
    normalize_as_stored,
)
from qlora_fsdp.layers.prenorm import find_kind, join_norms
from qlora_fsdp.layers.quantized.linear import QuantizedLinear
from qlora_fsdp.layers.quantized.matmul import FP8_MAX_BLOCKSIZE, FP8_MULTIPLE, Fp8Matmul
from qlora_fsdp.layers.recurrent.gated_norm import use_gated_norm
from qlora_fsdp.layers.tiles import TiledModule

HEAD_NORMS = ("q_norm", "k_norm")


class Rewired(NamedTuple):
    """How many layers multiply in fp8, and how many groups of linear layers are computed together."""

    num_fp8: int
    num_groups: int


def rewire(model: nn.Module, compute: ComputeConfig, kernels: KernelsConfig) -> Rewired:
    """Make the changes that the settings ask for and the model allows.

    Args:
        model: with adapters on quantized layers, on meta or not; changed in place.
        compute: says whether products are in fp8.
        kernels: say what dequantizes, and whether layers are computed together, norms and residuals too.

    Raises:
        ConfigError: fp8 is asked for, and no layer can.
    """
    for module in model.modules():
        if isinstance(module, QuantizedLinear | QuantizedExpertWeight):
            module.format = replace(module.format, dequantizer=kernels.dequantize.value)
    num_fp8 = use_fp8(model) if compute.matmul is MatmulKind.fp8 else 0
    num_groups = fuse_layers(model, kernels.of_layers is Kernel.auto) if kernels.fuse_layers else 0
    return Rewired(num_fp8, num_groups)


def use_fp8(model: nn.Module) -> int:
    """Let every 4-bit layer whose sizes allow it multiply in fp8; returns their number.

    Raises:
        ConfigError: there is none.
    """
    matmul = Fp8Matmul()
    layers = [layer for layer in model.modules() if isinstance(layer, QuantizedLinear) and _allows_fp8(layer)]
    for layer in layers:
        layer.matmul = matmul
    if not layers:
        fix = "Set compute=dequantized."
        raise ConfigError([Problem("compute.matmul=fp8", "finds no 4-bit layer in this model.", fix)])
    return len(layers)


def _allows_fp8(layer: QuantizedLinear) -> bool:
    match layer.format.quant_type:
        case "nf4" | "fp4":
            return layer.out_features % FP8_MULTIPLE == 0 and layer.blocksize <= FP8_MAX_BLOCKSIZE
        case "int8" | "int4" | "fp8" | "mxfp4" | "nvfp4":
            return False
        case unknown:
            assert_never(unknown)


def fuse_layers(model: nn.Module, norms: bool = True) -> int:
    """Compute together what belongs together; returns how many groups of linear layers were made.

    Args:
        model: with adapters on quantized layers, on meta or not; changed in place.
        norms: compute frozen norms by one kernel, and join norms and residuals, too.
    """
    modules = list(model.modules())
    if norms:
        for module in modules:
            kind = find_kind(module)
            if kind is not None and not module.weight.requires_grad:
                module.forward = partial(normalize, kind, module, module.forward)
            use_gated_norm(module)
            join_norms(module)
    num_groups = sum(_group_same_input(module) for module in modules)
    num_groups += sum(_fuse_mlp(module) for module in modules)
    for module in modules:
        for name in HEAD_NORMS:
            norm = module._modules.get(name)
            if norm is not None:
                norm.forward = partial(normalize_as_stored, norm.forward)
    return num_groups


def _group_same_input(module: nn.Module) -> bool:
    """Make q, k and v of an attention layer one group."""
    layers = _lora_children(module, QKV)
    if layers is None:
        return False
    group = SharedInput(layers)
    for layer in layers:
        layer.group = group
    return True


def _fuse_mlp(module: nn.Module) -> bool:
    """Compute the layers of a gated MLP together, if their adapters and biases allow it."""
    gated = find_gated(module)
    layers = None if gated is None else _lora_children(module, gated.names)
    if gated is None or layers is None:
        return False
    ranks = [rank for layer in layers for rank in layer.r.values()]
    has_bias = any(layer.base_layer.bias is not None for layer in layers[:-1])
    if has_bias or not all(0 < rank <= MAX_RANK for rank in ranks):
        return False
    module.forward = GatedMlp(module, layers, gated.activation)
    return True


def _lora_children(module: nn.Module, names: Sequence[str]) -> list[LoraLinear] | None:
    """Children of these names, if all are adapted quantized layers that compute their products in the same way."""
    layers = [module._modules.get(name) for name in names]  # not getattr: PEFT's wrappers pass on what they lack
    if not all(isinstance(layer, LoraLinear) and isinstance(layer.base_layer, QuantizedLinear) for layer in layers):
        return None
    found = cast(list[LoraLinear], layers)
    kinds = {type(cast(QuantizedLinear, layer.base_layer).matmul) for layer in found}
    return found if len(kinds) == 1 else None


def use_tiles(layers: Iterable[nn.Module], num_tokens: int | None) -> None:
    """Let what computes each token by itself compute `num_tokens` at a time: gated MLPs, experts and norms.

    To be called after `fuse_layers` and before `recompute_norms`. Norms that a kernel computes need memory only for
    their result, and stay as they are.

    Args:
        layers: transformer layers, on meta or not; changed in place.
        num_tokens: tokens of a tile; None leaves all as it is.
    """
    if num_tokens is None:
        return
    for layer in layers:
        norms = [
            child for child in layer.children() if is_rms_norm(child) or type(child).__name__.endswith("LayerNorm")
        ]
        gated = [module for module in layer.modules() if find_gated(module) is not None]
        for module in (*norms, *gated):
            module.forward = TiledModule(module, num_tokens)
        for module in layer.modules():
            if expert_weight_names(module):
                module.tile_tokens = num_tokens  # type: ignore[assignment]


def use_head_pieces(head: nn.Module | None, in_pieces: bool) -> None:
    """Let the loss of an int8 head dequantize some thousand of its rows at a time, or all; others stay as they are."""
    loss = getattr(head, "forward", None)
    if isinstance(loss, HeadLoss):
        loss.in_pieces = in_pieces


def recompute_norms(layer: nn.Module) -> None:
    """Let the linear layers of a transformer layer keep the norms' inputs in the place of the norms' outputs.

    To be called after `fuse_layers`; once is enough, and there is no way back.
    """
    if getattr(layer, "last_norm", None) is not None:
        return
    last_norm = LastNorm()
    for norm in layer.children():
        if is_rms_norm(norm):
            norm.forward = partial(normalize_and_remember, norm.forward, last_norm)
    for module in (layer, *(each for each in layer.modules() if isinstance(each, LoraLinear))):
        module.last_norm = last_norm  # type: ignore[assignment]


def attach_loss(head: nn.Module, transform: LogitTransform = UNCHANGED, kernel: LossKernel = "torch") -> bool:
    """Let the model's output layer compute the loss when it is given targets: `head(hidden, targets)`.

    The loss belongs inside the head's own forward because FSDP gathers the head for exactly that call. A frozen head
    need not be gathered by FSDP: call its `forward` directly, past FSDP's hooks. Without targets the head gives logits.

    Args:
        head: hidden size -> vocabulary; may be adapted or trained (PEFT's wrappers).
        transform: what the model does to the logits before the loss.
        kernel: what computes the loss of a frozen head.

    Returns:
        Whether backward needs the head's weight. It does not where the head is frozen.
    """
    loss = HeadLoss(head, transform, kernel)
    head.forward = loss
    return not loss.is_frozen_linear
