"""Experts while text is generated: few rows, no gradients, frozen adapters.

A step of generation has a row for each text and each of its experts. Dequantizing all experts for it writes four times
as many bytes as their codes have, and reads them again. So few rows are multiplied with the codes themselves
(kernels/triton_products.py): rows are sorted by expert, and the programs of one launch read the codes of experts that
have rows. What an adapter adds is added before the product is rounded. For more rows, such as those of a prompt, and
where experts compute y = x W (gpt-oss, Llama 4), whose blocks of scales lie along the outputs, weights are dequantized
as in training.

Adapters are fp32 Parameters. Their copies in the compute dtype are made once, not in every step, at places that stay
the same: a CUDA graph that was recorded with them reads what `refresh` has written there last.

Shapes: T tokens with K experts each make S = T K rows, sorted by expert; E experts; H the hidden size, I the experts'
inner size, and U what `up` gives; R the rank of an adapter.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qlora_fsdp.layers.experts.adapter import ExpertAdapter, ExpertMatrix
from qlora_fsdp.layers.experts.forward import Experts, experts_forward, spread_weights
from qlora_fsdp.layers.experts.grouped_products import QuantizedExpertWeight
from qlora_fsdp.layers.experts.row_order import RowOrder, activate, combine, gather, sort_rows
from qlora_fsdp.layers.kernels.launch import has_tensor_cores
from qlora_fsdp.layers.quantized.codes import code_books, code_values, weight_codes

if TYPE_CHECKING:
    from qlora_fsdp.layers.kernels.triton_products import Tile


class CodedWeight:
    """One weight of all experts, multiplied with its codes, and its adapter.

    Args:
        weight: [E, O, I], used as y = x W^T.
        bias: [E, O], or None.
        a: A of each expert's adapter, or None.
        b: B of each expert's adapter, or None.
    """

    def __init__(
        self, weight: QuantizedExpertWeight, bias: Tensor | None, a: ExpertMatrix | None, b: ExpertMatrix | None
    ) -> None:
        self.weight = weight
        self.bias = bias
        self.a = a
        self.b = b
        self.a_ERI: Tensor | None = None  # with its columns split as those of the input
        self.b_EOR: Tensor | None = None

    def refresh(self) -> None:
        """Copy the adapter as it is now."""
        if self.a is None or self.b is None:
            return
        num_experts, num_outputs, width = self.weight.shape
        dtype = self.weight.compute_dtype
        if self.a_ERI is None or self.b_EOR is None:
            like = self.a.stored
            self.a_ERI = like.new_empty(num_experts, self.a.rank, width, dtype=dtype, requires_grad=False)
            self.b_EOR = like.new_empty(num_experts, num_outputs, self.b.rank, dtype=dtype, requires_grad=False)
        self.b.fill(self.b_EOR.transpose(1, 2))
        if not self.weight.format.is_4bit:
            self.a.fill(self.a_ERI)
            return
        natural = self.a.to(dtype)
        self.a_ERI[..., : width // 2] = natural[..., ::2]
        self.a_ERI[..., width // 2 :] = natural[..., 1::2]

    def tile(self, num_rows: int) -> Tile | None:
        """How the kernel divides the product of so many rows; None if the weight is better dequantized."""
        from qlora_fsdp.layers.kernels.triton_products import best_expert_tile

        num_experts, _, width = self.weight.shape
        format = self.weight.format
        return best_expert_tile(width, num_rows, num_experts, format.blocksize, format.is_4bit)

    def split(self, x_NI: Tensor) -> Tensor:
        """Rows as the kernel takes them: of 4-bit codes, even columns before odd ones."""
        from qlora_fsdp.layers.kernels.triton_products import split_even_odd

        return split_even_odd(x_NI) if self.weight.format.is_4bit else x_NI.contiguous()

    def product(self, x_SI: Tensor, rows: RowOrder) -> Tensor:
        """Each row times the weight of its expert, with bias and adapter: [S, O]. Rows are as `split` gives them."""
        from qlora_fsdp.layers.kernels import triton_products

        format = self.weight.format
        tile = self.tile(len(x_SI))
        assert tile is not None
        bias = None if self.bias is None else self.bias.detach().to(x_SI.dtype).flatten()
        h_SR: Tensor | None = None
        b: list[Tensor] = []
        if self.a_ERI is not None and self.b_EOR is not None:
            h_SR = F.grouped_mm(x_SI, self.a_ERI.transpose(1, 2), offs=rows.ends)
            b = [self.b_EOR.flatten(0, 1)]
        (y_SO,) = triton_products.products(
            x_SI,
            [weight_codes(self.weight, bias)],
            code_values(format),
            code_books(format, x_SI.dtype, x_SI.device),
            format.blocksize,
            tile,
            rows.ends,
            h_SR,
            b,
            rows.ends,
            interprets=not x_SI.is_cuda,
        )
        return y_SO


class DecodeExperts:
    """The forward of a module of fused experts, or of its adapters, while text is generated.

    Args:
        experts: transformers' module, whose weights `why_not_coded` has nothing against.
        adapters: by the name of the weight that each adapts.
    """

    def __init__(self, experts: nn.Module, adapters: Mapping[str, ExpertAdapter]) -> None:
        self.experts = experts
        self.adapters = adapters
        parts = Experts(experts, adapters)
        assert isinstance(parts.up, QuantizedExpertWeight)
        assert isinstance(parts.down, QuantizedExpertWeight)
        self.activation = parts.activation
        self.num_experts = parts.num_experts
        self.up = CodedWeight(parts.up, parts.up_bias, parts.up_a, parts.up_b)
        self.down = CodedWeight(parts.down, None, parts.down_a, parts.down_b)
        self.down_bias = parts.down_bias  # of which a token needs one sum, and no row of its own

    def refresh(self) -> None:
        """Copy the adapters as they are now."""
        self.up.refresh()
        self.down.refresh()

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """x_TH, each token's experts [T, K] and their weights [T, K] -> y_TH."""
        num_rows = top_k_index.numel()
        is_coded = hidden_states.dtype != torch.float32 and has_tensor_cores(hidden_states.device)
        has_tiles = is_coded and self.up.tile(num_rows) is not None and self.down.tile(num_rows) is not None
        if not has_tiles:
            return experts_forward(self.experts, hidden_states, top_k_index, top_k_weights, self.adapters)
        return self.compute(hidden_states, top_k_index, top_k_weights)

    def compute(self, x_TH: Tensor, index_TK: Tensor, w_TK: Tensor) -> Tensor:
        """The same by the kernel of products with codes."""
        rows = sort_rows(index_TK, self.num_experts)
        w_S = w_TK.flatten().index_select(0, rows.order)
        x_SH = x_TH.new_empty(len(rows.order), x_TH.shape[1])
        gather(self.up.split(x_TH), rows, x_SH)
        y_SU = self.up.product(x_SH, rows)
        act_SI = y_SU.new_empty(len(y_SU), self.activation.width(y_SU.shape[1]))
        activate(y_SU, w_S, self.activation, act_SI)
        y_TH = combine(self.down.product(self.down.split(act_SI), rows), rows)
        if self.down_bias is not None:
            y_TH += spread_weights(w_TK, index_TK, self.num_experts).to(y_TH.dtype) @ self.down_bias
        return y_TH


def why_not_coded(experts: nn.Module) -> str | None:
    """Why a module of fused experts is not multiplied with its codes; None if it can be."""
    parts = Experts(experts, {})
    if parts.is_transposed:
        return "its scales lie along the outputs"
    for weight in (parts.up, parts.down):
        if not isinstance(weight, QuantizedExpertWeight):
            return "it is not quantized"
    return None
