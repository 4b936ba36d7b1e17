"""Experts of a mixture-of-experts layer: grouped products over tokens that are sorted by expert.

transformers hands the experts of a layer to a function that is chosen by name (`transformers.integrations.moe`), and
this module registers ours. It differs from transformers' own in three ways. The weights may be stored quantized: they
are dequantized for a product, again for its gradient, and nothing of them is kept. An adapter of an expert is computed
as two more grouped products of low rank; PEFT makes a whole weight of it, which for 128 experts is 800 MB per layer.
And little is kept for backward: the tokens once, not once for each of their experts, and the products of gate and up.

The rows of a token's k-th expert are multiplied by the routing weight before `down`, not after it. That is the same
function, and backward needs no output of `down` for the routing weight's gradient.

Shapes: T tokens with K experts each make S = T K rows, sorted by expert; E experts; H the hidden size, I the experts'
inner size, and U what `up` gives: 2 I with a gate, else I; R the rank of an adapter.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from qlora_fsdp.layers.expert_adapter import ExpertAdapter, LowRank, adapter_grads
from qlora_fsdp.layers.expert_gate import Activation
from qlora_fsdp.layers.expert_rows import ActivationBackward, Rows, activate, combine, gather, sort_rows
from qlora_fsdp.layers.grouped_products import ExpertWeight, beside_low_rank, product
from qlora_fsdp.layers.quantized_experts import QuantizedExpertWeight

EXPERTS_IMPLEMENTATION = "qlora_fsdp"


def expert_weight_names(module: nn.Module) -> list[str]:
    """Names of the weights of three dimensions that a module of fused experts computes with; none for other modules.

    The attributes are those that transformers' `use_experts_implementation` gives every class of fused experts.
    """
    if not hasattr(module, "has_gate") or getattr(module, "has_post_expert_norm", True):
        return []
    names = ["gate_up_proj" if module.has_gate else "up_proj", "down_proj"]
    found = [getattr(module, name, None) for name in names]
    fits = all(isinstance(w, QuantizedExpertWeight) or (isinstance(w, nn.Parameter) and w.ndim == 3) for w in found)
    return names if fits else []


def mentions_experts(config: PretrainedConfig) -> bool:
    """Whether a model's config has figures of experts, by the names of its keys."""
    return any("expert" in key for key in config.get_text_config().to_dict())


def experts_forward(
    module: nn.Module,
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    adapters: Mapping[str, ExpertAdapter] | None = None,
) -> Tensor:
    """The weighted sum of each token's experts.

    Args:
        module: transformers' module of fused experts.
        hidden_states: x_TH in the compute dtype.
        top_k_index: int64 [T, K], each token's experts.
        top_k_weights: [T, K], what each expert's output is multiplied by.
        adapters: by the name of the weight that each adapts.

    Returns:
        y_TH in the dtype of x.
    """
    experts = Experts(module, adapters or {})
    parts = experts.adapters
    weights = [w for part in parts if part is not None for w in (part.lora_a.weight, part.lora_b.weight)]
    return _Experts.apply(hidden_states, top_k_weights, top_k_index, experts, *weights)  # type: ignore[no-any-return,no-untyped-call]


def _forward_or_transformers(module: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
    """What transformers calls: ours where it can be, else transformers' own grouped products."""
    forward = experts_forward if expert_weight_names(module) else ALL_EXPERTS_FUNCTIONS["grouped_mm"]
    return cast(Tensor, forward(module, *args, **kwargs))


ALL_EXPERTS_FUNCTIONS.register(EXPERTS_IMPLEMENTATION, _forward_or_transformers)


class ExpertLoad:
    """Counts the rows that each expert of a layer gets.

    Attributes:
        counts: int64 [E]; None before the first forward pass.
    """

    counts: Tensor | None = None

    def add(self, rows: Rows) -> None:
        """Count the rows of a forward pass. The host does not wait, so that a step may be recorded with it."""
        ends = rows.ends.long()
        counts = torch.diff(ends, prepend=ends.new_zeros(1))
        if self.counts is None:
            self.counts = torch.zeros_like(counts)
        self.counts += counts


def count_loads(model: nn.Module) -> list[ExpertLoad]:
    """Let every module of fused experts count the rows of its experts while it is trained."""
    loads = []
    for module in model.modules():
        if expert_weight_names(module):
            module.load = ExpertLoad()  # type: ignore[assignment]
            loads.append(module.load)
    return loads  # type: ignore[return-value]


class Experts:
    """What a computation reads of a module of fused experts: its two weights, biases, adapters and activation.

    Args:
        module: transformers' module, whose `expert_weight_names` are two.
        adapters: by the name of the weight that each adapts.
    """

    def __init__(self, module: Any, adapters: Mapping[str, ExpertAdapter]) -> None:
        names = expert_weight_names(module)
        self.up, self.down = (cast(ExpertWeight, getattr(module, name)) for name in names)
        self.up_bias, self.down_bias = (getattr(module, f"{n}_bias") if module.has_bias else None for n in names)
        self.adapters = [adapters.get(name) for name in names]
        self.is_transposed: bool = module.is_transposed
        self.num_experts: int = self.up.shape[0]
        self.activation = Activation.of(module)
        self.load: ExpertLoad | None = getattr(module, "load", None) if module.training else None

    def matrices(self, dtype: torch.dtype) -> list[LowRank | None]:
        """The matrices of both weights' adapters; None for a weight without."""
        return [None if part is None else part.matrices(self.num_experts, dtype) for part in self.adapters]


class _Experts(torch.autograd.Function):
    """y = sum over k of down(w_k act(up(x))), each product with its adapter."""

    @staticmethod
    def forward(ctx: Any, x_TH: Tensor, w_TK: Tensor, index_TK: Tensor, experts: Experts, *_: Tensor) -> Tensor:
        rows = sort_rows(index_TK, experts.num_experts)
        if experts.load is not None:
            experts.load.add(rows)
        up, down = experts.matrices(x_TH.dtype)
        w_S = w_TK.flatten().index_select(0, rows.order)
        input_SH, low_up_SR = beside_low_rank(x_TH.shape[1], partial(gather, x_TH, rows), up and up.a_t, rows, x_TH)
        y_SU = product(input_SH, experts.up, up and up.b_t, experts.is_transposed, rows)
        del input_SH
        if experts.up_bias is not None:
            y_SU += experts.up_bias[rows.expert()]
        activation, width = experts.activation, experts.activation.width(y_SU.shape[1])
        activated = partial(activate, y_SU, w_S, activation)
        act_SI, low_down_SR = beside_low_rank(width, activated, down and down.a_t, rows, y_SU)
        out_SH = product(act_SI, experts.down, down and down.b_t, experts.is_transposed, rows)
        del act_SI
        y_TH = combine(out_SH, rows)
        if experts.down_bias is not None:
            y_TH += _spread(w_TK, index_TK, experts.num_experts).to(y_TH.dtype) @ experts.down_bias
        ctx.save_for_backward(x_TH, w_TK, index_TK, y_SU, low_up_SR, low_down_SR, *rows)
        ctx.experts = experts
        return y_TH

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad_TH,), experts = grads, cast(Experts, ctx.experts)
        x_TH, w_TK, index_TK, y_SU, low_up_SR, low_down_SR, *rest = ctx.saved_tensors
        rows = Rows(*rest)
        up, down = experts.matrices(x_TH.dtype)
        hidden, num_outputs, is_transposed = x_TH.shape[1], y_SU.shape[1], experts.is_transposed

        # Through down: from the gradient of the sum to that of the activations.
        gathered = partial(gather, grad_TH, rows)
        grad_SH, grad_low_SR = beside_low_rank(hidden, gathered, down and down.b, rows, grad_TH)
        grad_act_SI = product(grad_SH, experts.down, down and down.a, not is_transposed, rows)
        w_S = w_TK.flatten().index_select(0, rows.order)
        backward = ActivationBackward(y_SU, w_S, grad_act_SI, experts.activation)
        grad_SU, grad_low_up_SR = beside_low_rank(num_outputs, backward, up and up.b, rows, grad_TH)
        adapter_up, adapter_down = experts.adapters
        grads_down = adapter_grads(
            adapter_down, (backward.activated_SI, low_down_SR), (grad_SH[:, :hidden], grad_low_SR), rows
        )
        grad_w_TK = None
        if ctx.needs_input_grad[1]:
            grad_w_TK = backward.grad_w_S.index_select(0, rows.position.flatten()).view_as(w_TK)
            if experts.down_bias is not None:
                grad_w_TK = grad_w_TK + (grad_TH @ experts.down_bias.t()).gather(1, index_TK)
            grad_w_TK = grad_w_TK.to(w_TK.dtype)
        del grad_SH, grad_act_SI, backward, y_SU

        # Through up: to the gradient of the tokens.
        grad_x_TH = None
        if ctx.needs_input_grad[0]:
            grad_x_TH = combine(product(grad_SU, experts.up, up and up.a, not is_transposed, rows), rows)
        grads_up: list[Tensor] = []
        if adapter_up is not None:
            x_SH = x_TH.new_empty(len(rows.order), hidden)
            gather(x_TH, rows, x_SH)
            grads_up = adapter_grads(adapter_up, (x_SH, low_up_SR), (grad_SU[:, :num_outputs], grad_low_up_SR), rows)
        return grad_x_TH, grad_w_TK, None, None, *grads_up, *grads_down


def _spread(w_TK: Tensor, index_TK: Tensor, num_experts: int) -> Tensor:
    """The routing weights as a matrix [T, E] that is zero for experts a token does not have."""
    return w_TK.new_zeros(w_TK.shape[0], num_experts).scatter_add_(1, index_TK, w_TK)
