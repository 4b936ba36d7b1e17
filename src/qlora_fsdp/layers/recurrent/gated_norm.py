"""RMSNorm of what a gated delta rule gives, times SiLU of a gate, by one kernel."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qlora_fsdp.layers.gated import SCALES, SIZE, facts
from qlora_fsdp.layers.kernels import triton_norm
from qlora_fsdp.layers.kernels.launch import has_kernels
from qlora_fsdp.runtime.hardware import is_shortage

_proven: dict[Any, bool] = {}


def use_gated_norm(module: nn.Module) -> None:
    """Let a frozen gated norm be computed by one kernel where there is a GPU. Other modules stay as they are."""
    eps = getattr(module, "variance_epsilon", None)
    weight = module._parameters.get("weight")
    has_only_a_weight = weight is not None and len(module._parameters) == 1 and not module._modules
    if not has_only_a_weight or not isinstance(eps, float) or module.weight.requires_grad:
        return
    key = facts(module)
    if key not in _proven:
        _proven[key] = _is_gated_norm(module, eps)
    if _proven[key]:
        module.forward = partial(_forward, module, module.forward, eps)


def _forward(
    module: nn.Module, stock: Callable[[Tensor, Tensor], Tensor], eps: float, hidden_states: Tensor, gate: Tensor
) -> Tensor:
    is_plain = hidden_states.dtype == gate.dtype and hidden_states.shape == gate.shape
    if not has_kernels(hidden_states) or not is_plain:
        return stock(hidden_states, gate)
    return cast(Tensor, _GatedNorm.apply(hidden_states, gate, module.weight, eps))  # type: ignore[no-untyped-call]


class _GatedNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
        x_ND = x.contiguous().view(-1, x.shape[-1])
        gate_ND = gate.contiguous().view(-1, x.shape[-1])
        ctx.save_for_backward(x_ND, gate_ND, weight)
        ctx.eps = eps
        return triton_norm.gated_forward(x_ND, gate_ND, weight, eps).view(x.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_ND, gate_ND, weight = ctx.saved_tensors
        grad_y = grads[0].contiguous().view(x_ND.shape)
        grad_x, grad_gate = triton_norm.gated_backward(x_ND, gate_ND, weight, ctx.eps, grad_y)
        return grad_x.view(grads[0].shape), grad_gate.view(grads[0].shape), None, None


def _is_gated_norm(module: nn.Module, eps: float) -> bool:
    """Whether the forward of a module's class gives the formula's values, in bfloat16 and to the bit."""
    with torch.random.fork_rng(devices=[]), torch.device("cpu"), torch.no_grad():
        torch.manual_seed(0)
        x = (torch.randn(len(SCALES), 3, SIZE) * torch.tensor(SCALES).view(-1, 1, 1)).bfloat16()
        gate = torch.randn(x.shape).bfloat16()
        weight = torch.randn(SIZE).bfloat16()
        kind = type(module)
        probe = kind.__new__(kind)
        probe.__dict__.update(vars(module), _parameters={"weight": nn.Parameter(weight)})
        try:
            found = kind.forward(probe, x, gate)
        except Exception as error:  # it wants other arguments
            if is_shortage(error):
                raise
            return False
        wide = x.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        expected = (weight * normed.bfloat16() * F.silu(gate.float())).bfloat16()
        return isinstance(found, Tensor) and torch.equal(found, expected)
