"""Tokens and their experts: the rows of a mixture-of-experts layer between its products.

A token with K experts makes K rows. Rows are sorted by expert, so that each expert's are one stretch of a tensor. The
functions here make these rows of tokens (`gather`), activate them and multiply them by their routing weights
(`activate`), and add up a token's rows (`combine`). On a GPU each is one Triton kernel; elsewhere plain torch.

Shapes: T tokens, K experts per token, S = T K rows, E experts, H hidden size, U outputs of `up`, I inner size.

What happens between an expert's two products: an activation, in most models a gated one.

transformers' experts have a method for it. A Triton kernel computes the gates that most models use. A module gets the
kernel only if its own method gives the same numbers in a trial, so this module needs no list of models.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qlora_fsdp.layers.kernels.launch import runs_kernels
from qlora_fsdp.layers.quantized.format import has_triton

NUM_PROBES = 64  # values of gate and up that a kernel's function is tried with, some of them beyond usual limits
LARGEST_PROBE = 20.0


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
    if uses_kernels(index_TK) and not index_TK.is_meta:
        from qlora_fsdp.layers.kernels import triton_experts

        if index_TK.numel() <= triton_experts.MAX_RANKED:
            return RowOrder(*triton_experts.rank_rows(index_TK.contiguous(), num_experts))
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


class Gate(NamedTuple):
    """act(min(gate, limit)) (clamp(up, -limit, limit) + offset).

    Attributes:
        kind: act; "silu" is x sigmoid(alpha x).
        is_interleaved: whether gate and up take turns in a row of `up`'s outputs, and do not lie side by side.
        alpha: of "silu".
        limit: the largest value of both; infinite for none.
        offset: what is added to up.
    """

    kind: Literal["silu", "gelu_tanh"]
    is_interleaved: bool = False
    alpha: float = 1.0
    limit: float = math.inf
    offset: float = 0.0

    def __call__(self, y_SU: Tensor) -> Tensor:
        """[S, 2 I] -> [S, I], in plain torch."""
        gate, up = (y_SU[:, ::2], y_SU[:, 1::2]) if self.is_interleaved else y_SU.chunk(2, 1)
        gate = gate.clamp(max=self.limit)
        up = up.clamp(-self.limit, self.limit)
        act = gate * torch.sigmoid(self.alpha * gate) if self.kind == "silu" else F.gelu(gate, approximate="tanh")
        return act * (up + self.offset)


class Activation(NamedTuple):
    """The activation of a module of fused experts.

    Attributes:
        function: y_SU -> [S, I]; the gate is part of it.
        has_gate: whether U is 2 I.
        gate: the same as `function`, as a kernel computes it; None if no kernel does.
    """

    function: Callable[[Tensor], Tensor]
    has_gate: bool
    gate: Gate | None

    @classmethod
    def of(cls, module: Any) -> Activation:
        """The activation of a module of transformers' experts."""
        if not module.has_gate:
            return cls(module.act_fn, False, None)
        if module not in _GATES:
            _GATES[module] = find_gate(module)
        return cls(module._apply_gate, True, _GATES[module])

    def width(self, num_outputs: int) -> int:
        """I, from U."""
        return num_outputs // 2 if self.has_gate else num_outputs


_GATES: WeakKeyDictionary[nn.Module, Gate | None] = WeakKeyDictionary()


def find_gate(module: Any) -> Gate | None:
    """The gate that computes what a module's own method does, tried with some numbers; None if there is none.

    Limits and factors are looked for under the names that transformers' models give them: `limit`, `swiglu_limit` and
    `alpha`.
    """
    limits = {float(value) for name in ("limit", "swiglu_limit") if (value := getattr(module, name, None))}
    alphas = {float(value) for value in (getattr(module, "alpha", None), 1.0) if value}
    axis = torch.linspace(-LARGEST_PROBE, LARGEST_PROBE, NUM_PROBES)
    probe = torch.cat([axis, axis.flip(0) * 0.7 + 1.0]).unsqueeze(0)  # no two pairs of gate and up alike
    try:
        expected = module._apply_gate(probe)
    except (RuntimeError, TypeError, AttributeError):  # it computes with something that is not on the CPU
        return None
    kinds: tuple[Literal["silu", "gelu_tanh"], ...] = ("silu", "gelu_tanh")
    for kind, is_interleaved, alpha, limit, offset in itertools.product(
        kinds, (False, True), sorted(alphas), sorted({math.inf, *limits}), (0.0, 1.0)
    ):
        gate = Gate(kind, is_interleaved, alpha, limit, offset)
        found = gate(probe)
        if expected.shape == found.shape and torch.allclose(found, expected, rtol=1e-5, atol=1e-5):
            return gate
    return None
