"""The adapters of fused experts: PEFT's two matrices for all experts, as each expert's own, and back.

Shapes: E experts, R the rank of an adapter.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qlora_fsdp.layers.experts.rows import Rows

RANK_MULTIPLE = 8  # grouped products want rows of a multiple of 16 bytes


class ExpertAdapter(NamedTuple):
    """The adapters of one weight of all experts, in the layout of PEFT's `lora.ParamWrapper`.

    Attributes:
        lora_a: weight [E R, in], expert by expert.
        lora_b: weight [out, R E]: of each rank, expert by expert.
        scaling: lora_alpha / r, or lora_alpha / sqrt(r).
        is_swapped: PEFT takes the experts' inputs for outputs, as it does of Llama 4's weights [E, in, out]. Then
            `lora_a` has the weight's outputs, and `lora_b` its inputs. The product of both is the same change.
    """

    lora_a: nn.Linear
    lora_b: nn.Linear
    scaling: float
    is_swapped: bool = False

    @property
    def of_inputs(self) -> Tensor:
        """What the input is multiplied by, as it is stored."""
        return self.lora_b.weight if self.is_swapped else self.lora_a.weight

    @property
    def of_outputs(self) -> Tensor:
        """What gives the output, as it is stored."""
        return self.lora_a.weight if self.is_swapped else self.lora_b.weight

    def a(self, num_experts: int, dtype: torch.dtype) -> Tensor:
        """A [E, R, in] in `dtype`, its rank filled up with zeros to a multiple of 8."""
        a_ERI = self._by_expert(self.of_inputs, num_experts, self.is_swapped)
        a_ERI = (a_ERI.transpose(1, 2) if self.is_swapped else a_ERI).to(dtype).contiguous()
        padding = -a_ERI.shape[1] % RANK_MULTIPLE
        return F.pad(a_ERI, (0, 0, 0, padding)) if padding else a_ERI

    def b(self, num_experts: int, dtype: torch.dtype) -> Tensor:
        """The scaled B [E, out, R] in `dtype`, its rank filled up as that of A."""
        stored = self._by_expert(self.of_outputs, num_experts, not self.is_swapped)
        stored = stored.transpose(1, 2) if self.is_swapped else stored
        b_EOR = torch.mul(stored, self.scaling, out=stored.new_empty(stored.shape, dtype=dtype))
        padding = -b_EOR.shape[2] % RANK_MULTIPLE
        return F.pad(b_EOR, (0, padding)) if padding else b_EOR

    def grad_a(self, x_SI: Tensor, grad_low_SR: Tensor, rows: Rows) -> Tensor:
        """The gradient of `of_inputs`, float32.

        Args:
            x_SI: the input of the product that is adapted.
            grad_low_SR: the gradient of h = x A^T.
            rows: which rows belong to which expert.
        """
        grad_ERI = F.grouped_mm(grad_low_SR.t(), x_SI, offs=rows.ends)
        grad_ERI = grad_ERI[:, : self._rank(len(grad_ERI))].float()
        grad = grad_ERI.permute(2, 1, 0) if self.is_swapped else grad_ERI
        return grad.reshape(self.of_inputs.shape)

    def grad_b(self, low_SR: Tensor, grad_SO: Tensor, rows: Rows) -> Tensor:
        """The gradient of `of_outputs`, float32.

        Args:
            low_SR: h = x A^T.
            grad_SO: the gradient of the product's output.
            rows: which rows belong to which expert.
        """
        grad_EOR = F.grouped_mm(grad_SO.t(), low_SR, offs=rows.ends)
        grad_EOR = grad_EOR[:, :, : self._rank(len(grad_EOR))]
        grad = (grad_EOR.transpose(1, 2) if self.is_swapped else grad_EOR.permute(1, 2, 0)).float()
        return grad.mul_(self.scaling).reshape(self.of_outputs.shape)

    def _rank(self, num_experts: int) -> int:
        return self.lora_a.weight.shape[0] // num_experts

    @staticmethod
    def _by_expert(weight: Tensor, num_experts: int, is_b: bool) -> Tensor:
        """PEFT's A as [E, R, in], or its B as [E, out, R]."""
        if is_b:
            return weight.view(weight.shape[0], -1, num_experts).permute(2, 0, 1)
        return weight.view(num_experts, -1, weight.shape[1])
