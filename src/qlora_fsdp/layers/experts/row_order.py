"""Tokens and their experts: the rows of a mixture-of-experts layer between its products.

A token with K experts makes K rows. Rows are sorted by expert, so that each expert's are one stretch of a tensor. The
functions here make these rows of tokens (`gather`), activate them and multiply them by their routing weights
(`activate`), and add up a token's rows (`combine`). On a GPU each is one Triton kernel; elsewhere plain torch.

Shapes: T tokens, K experts per token, S = T K rows, E experts, H hidden size, U outputs of `up`, I inner size.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from qlora_fsdp.layers.experts.gate import Activation
from qlora_fsdp.layers.kernels.launch import runs_kernels
from qlora_fsdp.layers.quantized.format import has_triton


class RowOrder(NamedTuple):
    """The order of rows by expert.

    Attributes:
        order: int32 [S], which of the token's and expert's pairs, counted token by token, each row is.
        position: int32 [T, K], the row of each pair.
        ends: int32 [E], one past each expert's last row.
    """

    order: Tensor
    position: Tensor
    ends: Tensor

    @property
    def token(self) -> Tensor:
        """int32 [S], each row's token."""
        return self.order // self.position.shape[1]

    def expert(self) -> Tensor:
        """int64 [S], each row's expert."""
        row = torch.arange(len(self.order), dtype=torch.int32, device=self.order.device)
        return torch.searchsorted(self.ends, row, right=True)


def sort_rows(index_TK: Tensor, num_experts: int) -> RowOrder:
    """The order of rows by expert, and of an expert's rows by token; the device alone finds it."""
    expert, order = index_TK.flatten().sort(stable=True)
    position = torch.empty_like(order, dtype=torch.int32)
    position[order] = torch.arange(len(order), dtype=torch.int32, device=order.device)
    experts = torch.arange(num_experts, dtype=expert.dtype, device=expert.device)
    ends = torch.searchsorted(expert, experts, right=True, out_int32=True)
    return RowOrder(order.int(), position.view_as(index_TK), ends)


def gather(x_TH: Tensor, rows: RowOrder, out: Tensor) -> None:
    """Write each row's token into `out` [S, H], whose rows may be strided."""
    if uses_kernels(x_TH):
        from qlora_fsdp.layers.kernels import triton_experts

        triton_experts.gather(x_TH, rows.token, out)
    elif not x_TH.is_meta:
        torch.index_select(x_TH, 0, rows.token, out=out)


def combine(x_SH: Tensor, rows: RowOrder) -> Tensor:
    """The sum of each token's rows [T, H], added in float32."""
    if uses_kernels(x_SH):
        from qlora_fsdp.layers.kernels import triton_experts

        y_TH: Tensor = triton_experts.combine(x_SH, rows.position)
        return y_TH
    return x_SH.index_select(0, rows.position.flatten()).view(*rows.position.shape, -1).sum(1)


def activate(y_SU: Tensor, w_S: Tensor, activation: Activation, out: Tensor) -> None:
    """Write the activated rows times their routing weights into `out` [S, I], whose rows may be strided."""
    if activation.gate is not None and uses_kernels(y_SU):
        from qlora_fsdp.layers.kernels import triton_experts

        triton_experts.activate(y_SU, w_S, activation.gate, out)
    else:
        out.copy_(activation.function(y_SU) * w_S.unsqueeze(1))


class ActivationBackward:
    """The backward pass of `activate`. Called with a tensor [S, U], it writes the gradient of y into it.

    Args:
        y_SU: the input of `activate`.
        w_S: the routing weights.
        grad_SI: the gradient of the output of `activate`.
        activation: what was computed.

    Attributes:
        activated_SI: the output of `activate`, computed again. Adapters of `down` need it.
        grad_w_S: the gradient of the routing weights, float32.
    """

    activated_SI: Tensor
    grad_w_S: Tensor

    def __init__(self, y_SU: Tensor, w_S: Tensor, grad_SI: Tensor, activation: Activation) -> None:
        self.y_SU = y_SU
        self.w_S = w_S
        self.grad_SI = grad_SI
        self.activation = activation

    def __call__(self, out: Tensor) -> None:
        """Compute the gradients; `out` [S, U] may have strided rows."""
        y_SU = self.y_SU
        w_S = self.w_S
        grad_SI = self.grad_SI
        activation = self.activation
        if activation.gate is not None and uses_kernels(y_SU):
            from qlora_fsdp.layers.kernels import triton_experts

            found = triton_experts.activate_backward(y_SU, w_S, grad_SI, activation.gate, out)
            self.activated_SI, self.grad_w_S = found
            return
        with torch.enable_grad():
            leaf = y_SU.detach().requires_grad_()
            act_SI = activation.function(leaf)
        (grad_SU,) = torch.autograd.grad(act_SI, leaf, (grad_SI * w_S.unsqueeze(1)).to(act_SI.dtype))
        out.copy_(grad_SU)
        act_SI = act_SI.detach()
        self.activated_SI = (act_SI * w_S.unsqueeze(1)).to(y_SU.dtype)
        self.grad_w_S = (grad_SI.float() * act_SI.float()).sum(1)


def uses_kernels(x: Tensor) -> bool:
    """Whether the functions of experts run Triton's kernels on a tensor, or on meta stand for that."""
    return runs_kernels(x) and (x.is_meta or has_triton())
