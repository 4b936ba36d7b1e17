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

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from qlora_fsdp.layers.expert_gate import Activation
from qlora_fsdp.layers.expert_rows import ActivationBackward, Rows, activate, combine, gather, sort_rows
from qlora_fsdp.layers.quantized_experts import QuantizedExpertWeight

EXPERTS_IMPLEMENTATION = "qlora_fsdp"
# What the dequantized weights of one product may take. A layer whose experts need more is computed in slices, for which
# the host has to know how many tokens each expert got, so it waits for the GPU.
SLICE_BYTES = 2**30
RANK_MULTIPLE = 8  # grouped products want rows of a multiple of 16 bytes

ExpertWeight = QuantizedExpertWeight | nn.Parameter


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
        input_SH, low_up_SR = _beside_low_rank(x_TH.shape[1], partial(gather, x_TH, rows), up and up.a_t, rows, x_TH)
        y_SU = _product(input_SH, experts.up, up and up.b_t, experts.is_transposed, rows)
        del input_SH
        if experts.up_bias is not None:
            y_SU += experts.up_bias[rows.expert()]
        activation, width = experts.activation, experts.activation.width(y_SU.shape[1])
        activated = partial(activate, y_SU, w_S, activation)
        act_SI, low_down_SR = _beside_low_rank(width, activated, down and down.a_t, rows, y_SU)
        out_SH = _product(act_SI, experts.down, down and down.b_t, experts.is_transposed, rows)
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
        grad_SH, grad_low_SR = _beside_low_rank(hidden, gathered, down and down.b, rows, grad_TH)
        grad_act_SI = _product(grad_SH, experts.down, down and down.a, not is_transposed, rows)
        w_S = w_TK.flatten().index_select(0, rows.order)
        backward = ActivationBackward(y_SU, w_S, grad_act_SI, experts.activation)
        grad_SU, grad_low_up_SR = _beside_low_rank(num_outputs, backward, up and up.b, rows, grad_TH)
        adapter_up, adapter_down = experts.adapters
        grads_down = _adapter_grads(
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
            grad_x_TH = combine(_product(grad_SU, experts.up, up and up.a, not is_transposed, rows), rows)
        grads_up: list[Tensor] = []
        if adapter_up is not None:
            x_SH = x_TH.new_empty(len(rows.order), hidden)
            gather(x_TH, rows, x_SH)
            grads_up = _adapter_grads(adapter_up, (x_SH, low_up_SR), (grad_SU[:, :num_outputs], grad_low_up_SR), rows)
        return grad_x_TH, grad_w_TK, None, None, *grads_up, *grads_down


def _beside_low_rank(
    width: int, fill: Callable[[Tensor], None], low_rank: Tensor | None, rows: Rows, like: Tensor
) -> tuple[Tensor, Tensor | None]:
    """A factor of a large product, with the low-rank product that is to be added to it in columns of its own.

    The large product then sums over the columns of both, in the products' own precision: what an adapter adds is not
    rounded before it is added, and no pass over the memory adds it.

    Args:
        width: columns of the factor itself.
        fill: writes the factor [S, width] into a tensor whose rows are strided.
        low_rank: [E, width, R], what the factor is multiplied by for the low-rank product; None without adapter.
        rows: which rows belong to which expert.
        like: a tensor of the dtype and device wanted.

    Returns:
        [S, width + R], and the low-rank product [S, R], a tensor of its own; None without adapter.
    """
    rank = 0 if low_rank is None else low_rank.shape[2]
    both = like.new_empty(len(rows.order), width + rank)
    factor = both[:, :width]
    fill(factor)
    if low_rank is None:
        return both, None
    low = F.grouped_mm(factor, low_rank, offs=rows.ends)
    both[:, width:] = low
    return both, low


def _product(input_SK: Tensor, weight: ExpertWeight, extra: Tensor | None, sums_over_rows: bool, rows: Rows) -> Tensor:
    """Each row of the input times the weight of its expert: [S, N].

    Args:
        input_SK: its columns are the dimension that is summed over, then those of the low-rank product.
        weight: of all experts, [E, rows, columns].
        extra: the rest of the low-rank product [E, R, N]; None without adapter.
        sums_over_rows: whether the sum runs over the weight's rows (y = x W) or its columns (y = x W^T).
        rows: which rows belong to which expert.
    """
    num_experts, num_rows, num_columns = weight.shape
    num_outputs = num_columns if sums_over_rows else num_rows
    if isinstance(weight, nn.Parameter) and extra is None:
        return F.grouped_mm(input_SK, weight if sums_over_rows else weight.transpose(1, 2), offs=rows.ends)
    expert_bytes = input_SK.shape[1] * num_outputs * input_SK.dtype.itemsize
    if num_experts * expert_bytes <= SLICE_BYTES:
        factor = _factor(weight, extra, 0, num_experts, sums_over_rows, input_SK)
        return F.grouped_mm(input_SK, factor, offs=rows.ends)
    y_SN = input_SK.new_empty(len(rows.order), num_outputs)
    for first, last, begin, end in _slices(rows, max(1, SLICE_BYTES // expert_bytes)):
        part = None if extra is None else extra[first:last]
        factor = _factor(weight, part, first, last, sums_over_rows, input_SK)
        y_SN[begin:end] = F.grouped_mm(input_SK[begin:end], factor, offs=rows.ends[first:last] - begin)
        del factor
    return y_SN


def _slices(rows: Rows, num_experts: int) -> Iterator[tuple[int, int, int, int]]:
    """Runs of at most `num_experts` experts that got tokens: first and last expert, first and last row."""
    num_rows, size = len(rows.order), len(rows.ends)  # a plan has no values: as if all experts got as many rows
    ends = [num_rows * (e + 1) // size for e in range(size)] if rows.ends.is_meta else rows.ends.tolist()
    starts = [0, *ends[:-1]]
    first = 0
    while first < len(ends):
        if ends[first] == starts[first]:
            first += 1
            continue
        last = min(first + num_experts, len(ends))
        yield first, last, starts[first], ends[last - 1]
        first = last


def _factor(
    weight: ExpertWeight, extra: Tensor | None, first: int, last: int, sums_over_rows: bool, like: Tensor
) -> Tensor:
    """The weights of the experts [first, last) with those of the low-rank product: [n, K + R, N] in `like`'s dtype."""
    _, num_rows, num_columns = weight.shape
    rank = 0 if extra is None else extra.shape[1]
    size = (num_rows + rank, num_columns) if sums_over_rows else (num_rows, num_columns + rank)
    both = like.new_empty(last - first, *size)
    target = both[:, :num_rows, :num_columns]
    if isinstance(weight, QuantizedExpertWeight):
        weight.fill(target, first)
    else:
        target.copy_(weight[first:last])
    factor = both if sums_over_rows else both.transpose(1, 2)
    if extra is not None:
        factor[:, -rank:] = extra
    return factor


def _adapter_grads(
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


def _spread(w_TK: Tensor, index_TK: Tensor, num_experts: int) -> Tensor:
    """The routing weights as a matrix [T, E] that is zero for experts a token does not have."""
    return w_TK.new_zeros(w_TK.shape[0], num_experts).scatter_add_(1, index_TK, w_TK)
