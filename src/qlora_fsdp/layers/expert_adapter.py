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

    def a(self, num_experts: int, dtype: torch.dtype) -> Tensor:
        """A [E, R, in] in `dtype`, its rank filled up with zeros to a multiple of 8."""
        weight = self.lora_a.weight
        a_ERI = weight.view(num_experts, -1, weight.shape[1]).to(dtype)
        padding = -a_ERI.shape[1] % RANK_MULTIPLE
        return F.pad(a_ERI, (0, 0, 0, padding)) if padding else a_ERI

    def b(self, num_experts: int, dtype: torch.dtype) -> Tensor:
        """The scaled B [E, out, R] in `dtype`, its rank filled up as that of A."""
        weight = self.lora_b.weight
        stored = weight.view(weight.shape[0], -1, num_experts).permute(2, 0, 1)
        b_EOR = torch.mul(stored, self.scaling, out=weight.new_empty(stored.shape, dtype=dtype))
        padding = -b_EOR.shape[2] % RANK_MULTIPLE
        return F.pad(b_EOR, (0, padding)) if padding else b_EOR

    def grad_a(self, x_SI: Tensor, grad_low_SR: Tensor, rows: Rows) -> Tensor:
        """The gradient of A's weight, float32.

        Args:
            x_SI: the input of the product that is adapted.
            grad_low_SR: the gradient of h = x A^T.
            rows: which rows belong to which expert.
        """
        grad_ERI = F.grouped_mm(grad_low_SR.t(), x_SI, offs=rows.ends)
        rank = self.lora_a.weight.shape[0] // grad_ERI.shape[0]
        return grad_ERI[:, :rank].reshape(self.lora_a.weight.shape).float()

    def grad_b(self, low_SR: Tensor, grad_SO: Tensor, rows: Rows) -> Tensor:
        """The gradient of B's weight, float32.

        Args:
            low_SR: h = x A^T.
            grad_SO: the gradient of the product's output.
            rows: which rows belong to which expert.
        """
        grad_EOR = F.grouped_mm(grad_SO.t(), low_SR, offs=rows.ends)
        rank = self.lora_b.weight.shape[1] // grad_EOR.shape[0]
        grad = grad_EOR[:, :, :rank].permute(1, 2, 0).float().mul_(self.scaling)
        return grad.reshape(self.lora_b.weight.shape)
