"""What Liger's kernels keep and allocate, for a trace on meta: the package is installed on few hosts without a GPU.

Each class stands for the autograd function of the same purpose in liger_kernel/ops (0.8): it saves what that one saves,
reads and writes what that one does, and writes in place where that one does. This project's own kernels need no such
description (layers/kernels/launch.py).

Liger's kernels by family (`LIGER_KERNELS`) are what this program knows of families of models. A family that is missing
still trains, with fewer of these kernels. Whether rows are packed is no matter of families (model/trials/packing.py
tries it), nor is the memory plan (tracing/).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from qlora_fsdp.common.replaced import replaced
from qlora_fsdp.common.sizes import next_power_of_two
from qlora_fsdp.layers import head_loss
from qlora_fsdp.layers.gated import find_gated
from qlora_fsdp.layers.norm import is_rms_norm

# The settings of `kernels` for which Liger has kernels, by the `model_type` of the model's config. A plan is made on
# hosts without Liger too; a run asks the package itself, and a test compares the two.
_ALL = ("rms_norm", "rotary", "glu")
_WITHOUT_ROTARY = ("rms_norm", "glu")
LIGER_KERNELS = {
    "deepseek_v2": _WITHOUT_ROTARY,
    "deepseek_v3": _WITHOUT_ROTARY,
    "deepseek_v4": ("rms_norm",),
    "exaone4": _ALL,
    "falcon_h1": _ALL,
    "gemma": _ALL,
    "gemma2": _ALL,
    "gemma3_text": _ALL,
    "gemma4_text": _WITHOUT_ROTARY,
    "glm4": _WITHOUT_ROTARY,
    "gpt_oss": ("rms_norm", "rotary"),
    "granite": _ALL,
    "hunyuan_v1_dense": _ALL,
    "hunyuan_v1_moe": _ALL,
    "llama": _ALL,
    "llama4_text": _ALL,
    "ministral": _ALL,
    "mistral": _ALL,
    "mixtral": _ALL,
    "olmo2": _ALL,
    "olmo3": _ALL,
    "phi3": _ALL,
    "qwen2": _ALL,
    "qwen3": _ALL,
    "qwen3_5_text": _WITHOUT_ROTARY,
    "qwen3_moe": _ALL,
    "qwen3_next": _WITHOUT_ROTARY,
    "smollm3": _ALL,
}


def put_in_shapes(model: nn.Module, kernels: Collection[str]) -> None:
    """Let norms and gated MLPs keep and allocate what they would with Liger's kernels.

    Args:
        model: a transformers model before its layers are rewired; changed in place.
        kernels: the settings of `kernels` for which Liger's are used.
    """
    for module in model.modules():
        # Gemma 4's norms without a weight stay transformers' code: Liger's class computes them by torch, too.
        has_weight = getattr(module, "weight", None) is not None
        if "rms_norm" in kernels and is_rms_norm(module) and has_weight:
            module.forward = partial(_normalize, module)
        elif "glu" in kernels and (gated := find_gated(module)) is not None:
            module.forward = partial(_gated_mlp, module, gated.names)


@contextmanager
def shapes_of_functions(model: nn.Module, kernels: Collection[str]) -> Iterator[None]:
    """While it lasts, so do the functions that the model's code calls: rotary embeddings, and Liger's loss."""
    changes: list[tuple[Any, str, Any]] = [(head_loss, "_liger_loss", _loss)]
    if "rotary" in kernels:
        sources = [sys.modules[name] for name in {type(module).__module__ for module in model.modules()}]
        name = "apply_rotary_pos_emb"
        changes += [(source, name, _rotate) for source in sources if hasattr(source, name)]
    with replaced(changes):
        yield


def _normalize(norm: nn.Module, x: Tensor) -> Tensor:
    return _Norm.apply(x.contiguous(), norm.weight)  # type: ignore[no-any-return,no-untyped-call]


class _Norm(torch.autograd.Function):
    """LigerRMSNormFunction: keeps x and one factor per row.

    In some families it writes the gradient of x over that of y. This stands for the other families.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, x.new_empty(x.shape[:-1], dtype=torch.float32), weight)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, _, weight = ctx.saved_tensors
        return x + grads[0], torch.empty_like(weight) if ctx.needs_input_grad[1] else None


def _rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
    return _Rotary.apply(q, k, cos, sin)  # type: ignore[no-any-return,no-untyped-call]


class _Rotary(torch.autograd.Function):
    """LigerRopeFunction: rotates queries and keys in place, and their gradients too."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        q, k = (x.transpose(1, 2).contiguous().transpose(1, 2).mul_(1) for x in (q, k))
        return q.view_as(q), k.view_as(k)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_q, grad_k = (grad.transpose(1, 2).contiguous().transpose(1, 2).mul_(1) for grad in grads)
        return grad_q, grad_k, None, None


def _gated_mlp(mlp: nn.Module, names: Sequence[str], x: Tensor) -> Tensor:
    *wide, down = (mlp.get_submodule(name) for name in names)
    gate, up = (layer(x) for layer in wide) if len(wide) == 2 else wide[0](x).chunk(2, -1)
    return down(_Gate.apply(gate, up))  # type: ignore[no-any-return,no-untyped-call]


class _Gate(torch.autograd.Function):
    """LigerSiLUMulFunction: keeps gate and up, whose gradients are written over them."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        gate, up = gate.contiguous(), up.contiguous()
        ctx.save_for_backward(gate, up)
        return gate * up

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        gate, up = ctx.saved_tensors
        return gate.mul_(grads[0]), up.mul_(grads[0])


def _loss(hidden_ND: Tensor, weight_VD: Tensor, bias: Tensor | None, targets_N: Tensor, softcap: Any) -> Tensor:
    return _Loss.apply(hidden_ND, weight_VD)  # type: ignore[no-any-return,no-untyped-call]


class _Loss(torch.autograd.Function):
    """LigerFusedLinearCrossEntropyFunction with a frozen head: chunks of logits about as large as the hidden states."""

    @staticmethod
    def forward(ctx: Any, hidden_ND: Tensor, weight_VD: Tensor) -> Tensor:
        num_tokens, num_chunks = len(hidden_ND), math.ceil(weight_VD.shape[0] / weight_VD.shape[1])
        chunk = next_power_of_two(math.ceil(num_tokens / num_chunks))
        grad_ND = torch.zeros_like(hidden_ND)
        losses_N = torch.zeros(num_tokens, dtype=torch.float32, device=hidden_ND.device)
        for start in range(0, num_tokens, chunk):
            rows = slice(start, start + chunk)
            torch.mm(hidden_ND[rows] @ weight_VD.t(), weight_VD, out=grad_ND[rows])
        ctx.save_for_backward(grad_ND)
        return losses_N.sum()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.saved_tensors[0], None  # multiplied in place
