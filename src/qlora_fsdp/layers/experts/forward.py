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
from peft.tuners.lora.layer import ParamWrapper
from torch import Tensor, nn
from transformers import PretrainedConfig
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from qlora_fsdp.layers.experts.adapter import ExpertAdapter, ExpertMatrix
from qlora_fsdp.layers.experts.grouped_products import (
    ExpertWeight,
    QuantizedExpertWeight,
    beside_low_rank,
    product,
    with_low_rank,
)
from qlora_fsdp.layers.experts.row_order import (
    Activation,
    ActivationBackward,
    RowOrder,
    activate,
    combine,
    gather,
    sort_rows,
)
from qlora_fsdp.layers.tiles import Tiles, in_tiles

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


def sums_over_rows(module: Any) -> bool:
    """Whether a module of fused experts computes y = x W with its weights, and not y = x W^T."""
    return bool(getattr(module, "sums_over_rows", module.is_transposed))


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
    adapters = adapters or {}
    num_tokens = cast(int | None, getattr(module, "tile_tokens", None))
    if num_tokens is None or len(hidden_states) <= num_tokens:
        return _compute(module, adapters, hidden_states, top_k_weights, top_k_index)
    compute = partial(_compute, module, adapters)
    tiles = Tiles(num_tokens, compute, compute, partial(_weights, adapters))
    return in_tiles(tiles, hidden_states, top_k_weights, top_k_index)


def _weights(adapters: Mapping[str, ExpertAdapter]) -> list[Tensor]:
    return [linear.weight for adapter in adapters.values() for linear in (adapter.lora_a, adapter.lora_b)]


def _compute(
    module: nn.Module, adapters: Mapping[str, ExpertAdapter], x_TH: Tensor, w_TK: Tensor, index_TK: Tensor
) -> Tensor:
    experts = Experts(module, adapters)
    trained = [matrix.stored for matrix in (experts.up_a, experts.up_b, experts.down_a) if matrix is not None]
    act_SI, low_SR = _Up.apply(x_TH, w_TK, index_TK, experts, *trained)  # type: ignore[no-untyped-call]
    trained = [] if experts.down_b is None else [experts.down_b.stored]
    return _Down.apply(act_SI, low_SR, w_TK, index_TK, experts, *trained)  # type: ignore[no-any-return,no-untyped-call]


def _forward_or_transformers(module: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
    """Compute experts for transformers: by this module if it can, else by transformers' own grouped products."""
    forward = experts_forward if expert_weight_names(module) else ALL_EXPERTS_FUNCTIONS["grouped_mm"]
    return cast(Tensor, forward(module, *args, **kwargs))


ALL_EXPERTS_FUNCTIONS.register(EXPERTS_IMPLEMENTATION, _forward_or_transformers)


class ExpertLoad:
    """Counts the rows that each expert of a layer gets.

    Attributes:
        counts: int64 [E]; None before the first forward pass.
    """

    counts: Tensor | None = None

    def add(self, rows: RowOrder) -> None:
        """Count the rows of a forward pass. The host does not wait, so a CUDA graph can record it."""
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
    """The parts of a module of fused experts: its two weights, their biases and adapters, and its activation.

    A weight without an adapter has None for the adapter's matrices, here and below.

    Args:
        module: transformers' module, whose `expert_weight_names` are two.
        adapters: by the name of the weight that each adapts.

    Attributes:
        rows: the order of rows by expert, once forward has found it. Backward takes it from here.
    """

    rows: RowOrder

    def __init__(self, module: Any, adapters: Mapping[str, ExpertAdapter]) -> None:
        names = expert_weight_names(module)
        self.up, self.down = (cast(ExpertWeight, getattr(module, name)) for name in names)
        self.up_bias, self.down_bias = (getattr(module, f"{n}_bias") if module.has_bias else None for n in names)
        self.num_experts: int = self.up.shape[0]
        (self.up_a, self.up_b), (self.down_a, self.down_b) = (self._matrices(adapters.get(name)) for name in names)
        self.is_transposed = sums_over_rows(module)
        self.activation = Activation.of(module)
        self.load: ExpertLoad | None = getattr(module, "load", None) if module.training else None

    def _matrices(self, adapter: ExpertAdapter | None) -> tuple[ExpertMatrix | None, ExpertMatrix | None]:
        return (None, None) if adapter is None else (adapter.a(self.num_experts), adapter.b(self.num_experts))


# The two functions of autograd follow layers/lora.py. Only the first saves tensors. So when a layer is recomputed in
# backward, what comes after the last saved tensor, `down`'s product, is left out. The gradient that the second function
# gives to the activations is complete. The gradient of their low-rank product is used only for A.


class _Up(torch.autograd.Function):
    """w_k act(up(x)), with the adapter of `up`; and the low-rank product of `down`."""

    @staticmethod
    def forward(
        ctx: Any, x_TH: Tensor, w_TK: Tensor, index_TK: Tensor, experts: Experts, *_: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        rows = experts.rows = sort_rows(index_TK, experts.num_experts)
        if experts.load is not None:
            experts.load.add(rows)
        w_S = w_TK.flatten().index_select(0, rows.order)
        gathered = partial(gather, x_TH, rows)
        input_SH, low_up_SR = beside_low_rank(x_TH.shape[1], gathered, experts.up_a, rows, x_TH)
        y_SU = product(input_SH, experts.up, experts.up_b, experts.is_transposed, rows)
        del input_SH
        if experts.up_bias is not None:
            y_SU += experts.up_bias[rows.expert()]
        width = experts.activation.width(y_SU.shape[1])
        activated = partial(activate, y_SU, w_S, experts.activation)
        act_SI, low_down_SR = beside_low_rank(width, activated, experts.down_a, rows, y_SU)
        ctx.save_for_backward(x_TH, w_TK, y_SU, low_up_SR)
        ctx.experts = experts
        return act_SI[:, :width], low_down_SR

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_act_SI, grad_low_down_SR = grads
        experts = cast(Experts, ctx.experts)
        x_TH, w_TK, y_SU, low_up_SR = ctx.saved_tensors
        ctx.experts = None  # `ctx` lives until all layers have run backward
        rows = experts.rows
        hidden = x_TH.shape[1]
        num_outputs = y_SU.shape[1]
        w_S = w_TK.flatten().index_select(0, rows.order)
        backward = ActivationBackward(y_SU, w_S, grad_act_SI, experts.activation)
        grad_SU, grad_low_up_SR = beside_low_rank(num_outputs, backward, experts.up_b, rows, x_TH)
        of_down = []
        if experts.down_a is not None:
            of_down = [experts.down_a.gradient(grad_low_down_SR, backward.activated_SI, rows)]
        grad_w_TK = None
        if ctx.needs_input_grad[1]:
            grad_w_TK = backward.grad_w_S.index_select(0, rows.position.flatten()).view_as(w_TK).to(w_TK.dtype)
        del grad_act_SI, backward, y_SU

        grad_x_TH = None
        if ctx.needs_input_grad[0]:
            grad_x_TH = combine(product(grad_SU, experts.up, experts.up_a, not experts.is_transposed, rows), rows)
        of_up: list[Tensor] = []
        if experts.up_a is not None and experts.up_b is not None:
            assert low_up_SR is not None and grad_low_up_SR is not None
            x_SH = x_TH.new_empty(len(rows.order), hidden)
            gather(x_TH, rows, x_SH)
            of_up = [experts.up_a.gradient(grad_low_up_SR, x_SH, rows)]
            of_up += [experts.up_b.gradient(low_up_SR, grad_SU[:, :num_outputs], rows)]
        return grad_x_TH, grad_w_TK, None, None, *of_up, *of_down


class _Down(torch.autograd.Function):
    """y = the sum over k of down's products, with its adapter. It saves nothing, and keeps only what is small."""

    @staticmethod
    def forward(
        ctx: Any,
        act_SI: Tensor,
        low_SR: Tensor | None,
        w_TK: Tensor,
        index_TK: Tensor,
        experts: Experts,
        *_: Tensor,
    ) -> Tensor:
        rows = experts.rows
        input_SI = with_low_rank(act_SI, low_SR)
        y_TH = combine(product(input_SI, experts.down, experts.down_b, experts.is_transposed, rows), rows)
        if experts.down_bias is not None:
            y_TH += spread_weights(w_TK, index_TK, experts.num_experts).to(y_TH.dtype) @ experts.down_bias
            ctx.index_TK = index_TK
            ctx.weights_dtype = w_TK.dtype
        # Not with save_for_backward: it would be the last saved tensor, and the product above computed again.
        ctx.low_SR = None if low_SR is None else low_SR.detach()
        ctx.experts = experts
        return y_TH

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad_TH,) = grads
        experts = cast(Experts, ctx.experts)
        low_SR = ctx.low_SR
        ctx.experts = ctx.low_SR = None
        rows = experts.rows
        hidden = grad_TH.shape[1]
        gathered = partial(gather, grad_TH, rows)
        grad_SH, grad_low_SR = beside_low_rank(hidden, gathered, experts.down_b, rows, grad_TH)
        grad_act_SI = product(grad_SH, experts.down, experts.down_a, not experts.is_transposed, rows)
        grad_w_TK = None
        if ctx.needs_input_grad[2] and experts.down_bias is not None:
            grad_w_TK = (grad_TH @ experts.down_bias.t()).gather(1, ctx.index_TK).to(ctx.weights_dtype)
        of_down = []
        if experts.down_b is not None:
            of_down = [experts.down_b.gradient(low_SR, grad_SH[:, :hidden], rows)]
        return grad_act_SI, grad_low_SR, grad_w_TK, None, None, *of_down


def spread_weights(w_TK: Tensor, index_TK: Tensor, num_experts: int) -> Tensor:
    """The routing weights as a matrix [T, E] that is zero for experts a token does not have."""
    return w_TK.new_zeros(w_TK.shape[0], num_experts).scatter_add_(1, index_TK, w_TK)


class ExpertLora(ParamWrapper):
    """The adapters of all experts, one for each, of one weight: PEFT's `lora.ParamWrapper` on fused experts.

    PEFT nests wrappers, one around another, if several weights of a module are adapted. The outermost is called, and
    computes the experts with the adapters of all. Parameters, names, saving and loading are PEFT's.
    """

    def get_param(self) -> Tensor:
        """The adapted weight; of a quantized one, a tensor on meta of its shape."""
        weight = getattr(self.get_base_layer(), self.parameter_name)
        if isinstance(weight, QuantizedExpertWeight):
            return torch.empty(weight.shape, dtype=weight.compute_dtype, device="meta")
        return cast(Tensor, weight)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """x_TH, each token's experts [T, K] and their weights [T, K] -> y_TH."""
        return experts_forward(self.get_base_layer(), hidden_states, top_k_index, top_k_weights, self.adapters())

    def adapters(self) -> dict[str, ExpertAdapter]:
        if self.disable_adapters:
            return {}
        (name,) = self.active_adapters
        experts = self.get_base_layer()
        is_swapped = sums_over_rows(experts) != experts.is_transposed
        found: dict[str, ExpertAdapter] = {}
        layer: nn.Module = self
        while isinstance(layer, ExpertLora):
            lora_a, lora_b = cast(nn.Linear, layer.lora_A[name]), cast(nn.Linear, layer.lora_B[name])
            found[layer.parameter_name] = ExpertAdapter(lora_a, lora_b, layer.scaling[name], is_swapped)
            layer = layer.base_layer
        return found

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """PEFT's merge, which is refused on codes: there is no weight to add to. `qlora-fsdp merge` merges those."""
        if isinstance(getattr(self.get_base_layer(), self.parameter_name), QuantizedExpertWeight):
            raise NotImplementedError("a quantized base can't be merged in place: use qlora-fsdp merge")
        super().merge(safe_merge, adapter_names)
