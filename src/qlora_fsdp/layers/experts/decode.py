"""Experts while text is generated: few rows, no gradients, frozen adapters.

A step of generation has a row for each text and each of its experts. Dequantizing all experts for it writes four times
as many bytes as their codes have, and reads them again. So few rows are multiplied with the codes themselves
(kernels/triton_products.py): rows are sorted by expert, and the programs of one launch read the codes of experts that
have rows. Where experts compute y = x W (gpt-oss but in mxfp4, Llama 4), whose blocks of scales lie along the outputs,
another kernel does so (kernels/triton_transposed_products.py). What an adapter adds is added before the product is
rounded. For more rows, such as those of a prompt, weights are dequantized as in training.

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
from qlora_fsdp.layers.quantized.stored_weight import code_books, code_values, weight_codes

if TYPE_CHECKING:
    from qlora_fsdp.layers.kernels.triton_products import Tile
    from qlora_fsdp.layers.kernels.triton_transposed_products import TransposedTile


class CodedWeight:
    """One weight of all experts, multiplied with its codes, and its adapter.

    Args:
        weight: [E, O, I], used as y = x W^T, or [E, I, O], used as y = x W.
        is_transposed: which of these.
        bias: [E, O], or None.
        a: A of each expert's adapter, or None.
        b: B of each expert's adapter, or None.
    """

    def __init__(
        self,
        weight: QuantizedExpertWeight,
        is_transposed: bool,
        bias: Tensor | None,
        a: ExpertMatrix | None,
        b: ExpertMatrix | None,
    ) -> None:
        self.weight = weight
        self.is_transposed = is_transposed
        num_experts, num_rows, num_columns = weight.shape
        self.num_experts = num_experts
        self.width = num_rows if is_transposed else num_columns
        self.num_outputs = num_columns if is_transposed else num_rows
        self.splits = weight.format.is_4bit and not is_transposed  # even columns of rows before odd ones
        self.bias = bias
        self.a = a
        self.b = b
        self.a_ERI: Tensor | None = None  # with its columns split as those of the input
        self.b_EOR: Tensor | None = None

    def refresh(self) -> None:
        """Copy the adapter as it is now."""
        if self.a is None or self.b is None:
            return
        width = self.width
        dtype = self.weight.compute_dtype
        if self.a_ERI is None or self.b_EOR is None:
            like = self.a.stored
            self.a_ERI = like.new_empty(self.num_experts, self.a.rank, width, dtype=dtype, requires_grad=False)
            self.b_EOR = like.new_empty(
                self.num_experts, self.num_outputs, self.b.rank, dtype=dtype, requires_grad=False
            )
        self.b.fill(self.b_EOR.transpose(1, 2))
        if not self.splits:
            self.a.fill(self.a_ERI)
            return
        natural = self.a.to(dtype)
        self.a_ERI[..., : width // 2] = natural[..., ::2]
        self.a_ERI[..., width // 2 :] = natural[..., 1::2]

    def tile(self, num_rows: int) -> Tile | TransposedTile | None:
        """How a kernel divides the product of so many rows; None if the weight is better dequantized."""
        from qlora_fsdp.layers.kernels.triton_products import best_expert_tile
        from qlora_fsdp.layers.kernels.triton_transposed_products import transposed_tile

        format = self.weight.format
        if self.is_transposed:
            return transposed_tile(self.width, num_rows, self.num_experts, format.is_4bit)
        return best_expert_tile(self.width, num_rows, self.num_experts, format.blocksize, format.is_4bit)

    def split(self, x_NI: Tensor) -> Tensor:
        """Rows as the kernel takes them."""
        from qlora_fsdp.layers.kernels.triton_products import split_even_odd

        return split_even_odd(x_NI) if self.splits else x_NI.contiguous()

    def product(self, x_SI: Tensor, rows: RowOrder) -> Tensor:
        """Each row times the weight of its expert, with bias and adapter: [S, O]. Rows are as `split` gives them."""
        from qlora_fsdp.layers.kernels.triton_products import Tile, products
        from qlora_fsdp.layers.kernels.triton_transposed_products import transposed_products

        format = self.weight.format
        tile = self.tile(len(x_SI))
        assert tile is not None
        bias = None if self.bias is None else self.bias.detach().to(x_SI.dtype).flatten()
        codes = weight_codes(self.weight, bias)
        values = code_values(format)
        books = code_books(format, x_SI.dtype, x_SI.device)
        ends = rows.ends
        interprets = not x_SI.is_cuda
        h_SR: Tensor | None = None
        if self.a_ERI is not None:
            h_SR = F.grouped_mm(x_SI, self.a_ERI.transpose(1, 2), offs=ends)
        if not isinstance(tile, Tile):
            return transposed_products(
                x_SI, codes, values, books, format.blocksize, tile, ends, h_SR, self.b_EOR, interprets
            )
        b = [] if self.b_EOR is None else [self.b_EOR.flatten(0, 1)]
        (y_SO,) = products(x_SI, [codes], values, books, format.blocksize, tile, ends, h_SR, b, ends, interprets)
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
        self.up = CodedWeight(parts.up, parts.is_transposed, parts.up_bias, parts.up_a, parts.up_b)
        self.down = CodedWeight(parts.down, parts.is_transposed, None, parts.down_a, parts.down_b)
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
    for weight in (parts.up, parts.down):
        if not isinstance(weight, QuantizedExpertWeight):
            return "it is not quantized"
        if not weight.format.has_products:
            return f"no kernel multiplies codes in {weight.format.quant_type}"
    return None
