"""The adapters of fused experts: PEFT's two matrices for all experts, as each expert's own, and back.

Shapes: E experts, R the rank of an adapter.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qlora_fsdp.layers.expert_rows import Rows

RANK_MULTIPLE = 8  # grouped products want rows of a multiple of 16 bytes


class LowRank(NamedTuple):
    """The matrices of all experts' adapters: A [E, R, in] and the scaled B [E, out, R]."""

    a: Tensor
    b: Tensor

    @property
    def a_t(self) -> Tensor:
        """[E, in, R]."""
        return self.a.transpose(1, 2)

    @property
    def b_t(self) -> Tensor:
        """[E, R, out]."""
        return self.b.transpose(1, 2)


class ExpertAdapter(NamedTuple):
    """The adapters of one weight of all experts, in the layout of PEFT's `lora.ParamWrapper`.

    Attributes:
        lora_a: weight [E R, in], expert by expert.
        lora_b: weight [out, R E]: of each rank, expert by expert.
        scaling: lora_alpha / r, or lora_alpha / sqrt(r).
    """

    lora_a: nn.Linear
    lora_b: nn.Linear
    scaling: float

    def matrices(self, num_experts: int, dtype: torch.dtype) -> LowRank:
        """Both matrices in `dtype`, their rank filled up with zeros to a multiple of 8."""
        a, b = self.lora_a.weight, self.lora_b.weight
        a_ERI = a.view(num_experts, -1, a.shape[1]).to(dtype)
        b_EOR = b.new_empty(num_experts, b.shape[0], a_ERI.shape[1], dtype=dtype)
        torch.mul(b.view(b.shape[0], -1, num_experts).permute(2, 0, 1), self.scaling, out=b_EOR)
        padding = -a_ERI.shape[1] % RANK_MULTIPLE
        if padding:
            a_ERI, b_EOR = F.pad(a_ERI, (0, 0, 0, padding)), F.pad(b_EOR, (0, padding))
        return LowRank(a_ERI, b_EOR)

    def gradients(self, grad_a_ERI: Tensor, grad_b_EOR: Tensor) -> tuple[Tensor, Tensor]:
        """The gradients of both weights in float32, from those of the matrices."""
        rank = self.lora_a.weight.shape[0] // grad_a_ERI.shape[0]
        grad_a = grad_a_ERI[:, :rank].reshape(self.lora_a.weight.shape).float()
        grad_b = grad_b_EOR[:, :, :rank].permute(1, 2, 0).float().mul_(self.scaling)
        return grad_a, grad_b.reshape(self.lora_b.weight.shape)


def adapter_grads(
    adapter: ExpertAdapter | None, inputs: tuple[Tensor, Tensor | None], grads: tuple[Tensor, Tensor | None], rows: Rows
) -> list[Tensor]:
    """The gradients of an adapter's two weights; none without adapter.

    Args:
        adapter: of the weight whose product is differentiated.
        inputs: the product's input [S, in] and its low-rank part h = x A^T [S, R].
        grads: the gradients of the output [S, out] and of h [S, R].
        rows: which rows belong to which expert.
    """
    if adapter is None:
        return []
    (x, low), (grad, grad_low) = inputs, grads
    assert low is not None and grad_low is not None
    grad_a_ERI = F.grouped_mm(grad_low.t(), x, offs=rows.ends)
    grad_b_EOR = F.grouped_mm(grad.t(), low, offs=rows.ends)
    return list(adapter.gradients(grad_a_ERI, grad_b_EOR))
