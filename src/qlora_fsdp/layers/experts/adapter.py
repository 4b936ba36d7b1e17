"""The adapters of fused experts: PEFT's two matrices for all experts, read as each expert's own, and their gradients.

Shapes: E experts, R the rank of an adapter, S rows of tokens, X the other dimension of a matrix: inputs or outputs.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qlora_fsdp.layers.experts.row_order import RowOrder, uses_kernels

RANK_MULTIPLE = 8  # grouped products want rows of a multiple of 16 bytes


class ExpertMatrix(NamedTuple):
    """A matrix of the adapters of all experts: each expert's A [R, inputs], or its B transposed, [R, outputs].

    Attributes:
        linear: has it as its weight, float32, in one of PEFT's two layouts. FSDP gathers the weight anew for backward,
            so it is read where it is used.
        num_experts: E.
        is_by_rank: the layout: [X, R E], of each rank, expert by expert, as PEFT's B; else [E R, X], as its A.
        factor: what the matrix is multiplied by where it is used, in float32.
    """

    linear: nn.Linear
    num_experts: int
    is_by_rank: bool
    factor: float

    @property
    def stored(self) -> Tensor:
        """The matrices of all experts, as they are stored."""
        return self.linear.weight

    @property
    def rank(self) -> int:
        """The rank in products: filled up with zeros to a multiple of 8."""
        rank = self._by_expert(self.stored).shape[1]
        return rank + -rank % RANK_MULTIPLE

    def fill(self, out_ERX: Tensor, first: int = 0) -> None:
        """Write some columns, from `first` on, into `out_ERX`, which may be strided."""
        last = first + out_ERX.shape[2]
        _write(self._by_expert(self.stored.detach())[:, :, first:last], self.factor, out_ERX)

    def to(self, dtype: torch.dtype) -> Tensor:
        """The matrices [E, R, X] in `dtype`, contiguous."""
        width = self._by_expert(self.stored).shape[2]
        out_ERX = self.stored.new_empty(self.num_experts, self.rank, width, dtype=dtype)
        self.fill(out_ERX)
        return out_ERX

    def gradient(self, low_SR: Tensor, x_SX: Tensor, rows: RowOrder) -> Tensor:
        """The gradient of `stored`, float32.

        Args:
            low_SR: of A, the gradient of h = x A^T; of B, h itself.
            x_SX: of A, the input x; of B, the gradient of the output.
            rows: which rows belong to which expert.
        """
        grad_ERX = F.grouped_mm(low_SR.t(), x_SX, offs=rows.ends)
        grad = torch.empty_like(self.stored)
        out_ERX = self._by_expert(grad)
        _write(grad_ERX[:, : out_ERX.shape[1]], self.factor, out_ERX)
        return grad

    def _by_expert(self, stored: Tensor) -> Tensor:
        """A view [E, R, X] of what is stored in the matrix's layout."""
        if self.is_by_rank:
            return stored.view(len(stored), -1, self.num_experts).permute(2, 1, 0)
        return stored.view(self.num_experts, -1, stored.shape[1])


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

    def a(self, num_experts: int) -> ExpertMatrix:
        """A of each expert, for h = x A^T."""
        return ExpertMatrix(self.lora_b if self.is_swapped else self.lora_a, num_experts, self.is_swapped, 1.0)

    def b(self, num_experts: int) -> ExpertMatrix:
        """The scaled B of each expert, for h B^T."""
        linear = self.lora_a if self.is_swapped else self.lora_b
        return ExpertMatrix(linear, num_experts, not self.is_swapped, self.scaling)


def _write(source_ERX: Tensor, factor: float, out_ERX: Tensor) -> None:
    """Write the source times a factor, which are multiplied in float32, and zeros for the ranks that it does not have.

    Both may be strided. On a GPU one kernel does it, whatever the layouts: torch would take a pass for each of
    conversion, factor and transposition.
    """
    if uses_kernels(source_ERX):
        from qlora_fsdp.layers.kernels import triton_experts

        triton_experts.write_matrices(source_ERX, factor, out_ERX)
        return
    rank = source_ERX.shape[1]
    out_ERX[:, :rank] = source_ERX.float() * factor
    out_ERX[:, rank:] = 0
