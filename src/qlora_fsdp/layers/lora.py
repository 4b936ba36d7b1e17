"""LoRA on quantized linear layers: one layer, or several that share an input.

Two autograd functions compute them. The first makes h = x A^T, and the second the base's product plus the adapter's.

PEFT's `lora.Linear` stays the module: its parameters, names, saving and loading are PEFT's. Only its forward is
replaced. Adapter weights are fp32 Parameters, because an FSDP group must have one trainable dtype and because an
optimizer would lose small updates in bfloat16. They are cast to the compute dtype here, so no autocast is needed.
Little more than the input is kept for backward, which dequantizes each weight again. Layers that share an input, such
as q, k and v, form a group: the input is read once, kept once, and gets one gradient.

Shapes: x_NI, W_OI, A_RI, B_OR, h_NR, y_NO. N stands for all leading dimensions and R for the rank; in a group, O and R
are summed over its layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
from peft.tuners import lora
from torch import Tensor, nn
from torch.nn import functional as F

from qlora_fsdp.layers.kernels.launch import runs_kernels
from qlora_fsdp.layers.norm import LastNorm, Recompute, recompute_input
from qlora_fsdp.layers.quantized.linear import QuantizedLinear, unflatten
from qlora_fsdp.layers.quantized.matmul import Addend

# Names of layers that are called one after another with the same input.
QKV = ("q_proj", "k_proj", "v_proj")
GATE_UP = ("gate_proj", "up_proj")


class LoraLinear(lora.Linear):
    """PEFT's LoRA layer with a forward for fp32 adapters on a frozen base in another dtype.

    Attributes:
        group: the layers that get the same input, this one among them; None if this layer is computed alone.
        last_norm: where to ask whether the input is a norm's output; None if the input is always kept.
    """

    group: SharedInput | None = None
    last_norm: LastNorm | None = None

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """x_BI -> y_BO: base(x) + scaling * B(A(dropout(x))), in the dtype of x."""
        if args or kwargs:
            return super().forward(x, *args, **kwargs)
        part = active_part(self)
        if part is not None and self.group is not None:
            return self.group.output(self, part, x)
        if part is not None:
            return lora_outputs(x, [part], self.last_norm)[0]
        (name,) = self.active_adapters
        if self.merged or self.disable_adapters or name in self.lora_variant:
            return super().forward(x)
        lora_a = cast(nn.Linear, self.lora_A[name]).weight.to(x.dtype)
        lora_b = cast(nn.Linear, self.lora_B[name]).weight.to(x.dtype)
        low_rank = F.linear(F.linear(self.lora_dropout[name](x), lora_a), lora_b)
        return self.base_layer(x) + low_rank * self.scaling[name]  # type: ignore[no-any-return]

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """PEFT's merge, which is refused on codes: there is no weight to add to. `qlora-fsdp merge` merges those."""
        if isinstance(self.base_layer, QuantizedLinear):
            raise NotImplementedError("a quantized base can't be merged in place: use qlora-fsdp merge")
        super().merge(safe_merge, adapter_names)


class LoraEmbedding(lora.Embedding):
    """PEFT's LoRA of a table of embeddings, with fp32 adapters beside a frozen table in another dtype.

    A [R, V] has a column for each token, and B is [D, R]. As in PEFT, A starts at zero, there is no dropout, and the
    column of the table's padding token gets no gradient.
    """

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """ids_BL, int64 -> x_BLD: base(ids) + scaling * B A[:, ids], in the dtype of the table."""
        embedded = cast(Tensor, self.base_layer(x, *args, **kwargs))
        if self.disable_adapters or self.merged:
            return embedded
        (name,) = self.active_adapters
        padding_idx = self.get_base_layer().padding_idx
        low_BLR = F.embedding(x, self.lora_embedding_A[name].t(), padding_idx)  # type: ignore[arg-type]
        change_BLD = F.linear(low_BLR, self.lora_embedding_B[name]) * self.scaling[name]
        scale = self._get_embed_scale()  # type: ignore[no-untyped-call]
        if scale is not None:  # Gemma's, which the table's forward has multiplied with
            change_BLD = change_BLD * scale.to(change_BLD.dtype)
        return embedded + change_BLD.to(embedded.dtype)  # type: ignore[no-any-return]


def has_zero_gradient_at_start(name: str) -> bool:
    """Whether a parameter's gradient is zero until its partner has left zero: LoRA's A, and of embeddings B."""
    return ".lora_A." in name or ".lora_embedding_B." in name


class LoraPart(NamedTuple):
    """A quantized layer with the adapter that is active on it."""

    layer: QuantizedLinear
    lora_a: nn.Linear
    lora_b: nn.Linear
    scaling: float


def active_part(module: LoraLinear) -> LoraPart | None:
    """The layer and its adapter, if the functions below can compute them; None if the plain path must.

    They can't if the base is not quantized, if dropout is on, with DoRA, and if the adapter is merged or switched off.
    """
    if not isinstance(module.base_layer, QuantizedLinear):
        return None
    (name,) = module.active_adapters
    drops = module.training and isinstance(module.lora_dropout[name], nn.Dropout)
    if drops or module.merged or module.disable_adapters or name in module.lora_variant:
        return None
    lora_a = cast(nn.Linear, module.lora_A[name])
    lora_b = cast(nn.Linear, module.lora_B[name])
    return LoraPart(module.base_layer, lora_a, lora_b, module.scaling[name])


class OutputsOfInput:
    """Outputs of layers that are called one after another with the same tensor. Each is fetched once."""

    def __init__(self) -> None:
        self._input: Tensor | None = None
        self._outputs: dict[int, Tensor] = {}

    def put(self, x: Tensor, outputs: Sequence[Tensor]) -> None:
        """Keep what the first layer's call has computed for all of them."""
        self._input = x
        self._outputs = dict(enumerate(outputs))

    def fetch(self, number: int, x: Tensor) -> Tensor | None:
        """A layer's output; None if it was not computed with x, and then the others are not wanted either."""
        if self._input is not x or number not in self._outputs:
            self.forget()
            return None
        y = self._outputs.pop(number)
        if not self._outputs:
            self.forget()
        return y

    def forget(self) -> None:
        """Let go of input and outputs. Outputs that nobody fetches must not keep their graph alive."""
        self._input = None
        self._outputs = {}


class SharedInput:
    """Layers that are called one after another with the same tensor. The first call computes the outputs of all.

    Args:
        modules: in the order in which they are called.
    """

    def __init__(self, modules: Sequence[LoraLinear]) -> None:
        self.modules = list(modules)
        self.outputs = OutputsOfInput()

    def output(self, module: LoraLinear, part: LoraPart, x: Tensor) -> Tensor:
        """The module's output. It is computed alone if x is not what the first module was called with."""
        number = self.modules.index(module)
        if number == 0:
            parts = [part]
            for other in self.modules[1:]:
                found = active_part(other)
                if found is not None:
                    parts.append(found)
            if len(parts) == len(self.modules):
                self.outputs.put(x, lora_outputs(x, parts, module.last_norm))
        y = self.outputs.fetch(number, x)
        return lora_outputs(x, [part], module.last_norm)[0] if y is None else y


def lora_outputs(x: Tensor, parts: Sequence[LoraPart], last_norm: LastNorm | None) -> tuple[Tensor, ...]:
    """y = x W^T + b + s (x A^T) B^T of each part, in two functions of autograd.

    The first computes h = x A^T and saves x. The second computes the large products and saves nothing. This shortens
    recomputation: `torch.utils.checkpoint` stops recomputing a transformer layer at the last tensor that the layer
    saved. The layer's last product (`down_proj`, a quarter of its work) comes after that, so it is not computed again.
    """
    kept, recompute = (None, None) if last_norm is None else last_norm.source_of(x)
    h_NR = _LowRank.apply(x.detach(), kept, recompute, *(p.lora_a.weight for p in parts))  # type: ignore[no-untyped-call]
    return add_low_rank(x, h_NR, parts)


def add_low_rank(
    x: Tensor, h_NR: Tensor, parts: Sequence[LoraPart], h_is_of_x: bool = True, has_values: bool = True
) -> tuple[Tensor, ...]:
    """y = x W^T + b + s h B^T of each part.

    Args:
        x: [..., I].
        h_NR: x A^T of all parts, side by side.
        parts: the layers and their adapters.
        h_is_of_x: whether the gradient of x includes what x contributes through h = x A^T. False if the function that
            computed h takes care of that itself, as `mlp.py` does.
        has_values: whether the results are computed. If not, they have the graph for backward and no values.
    """
    biases = [part.layer.bias for part in parts]
    lora_b = [part.lora_b.weight for part in parts]
    return _AddLowRank.apply(x, h_NR, parts, h_is_of_x, has_values, *lora_b, *biases)  # type: ignore[no-any-return,no-untyped-call]


class _LowRank(torch.autograd.Function):
    """h = x A^T. Its backward gives A a gradient, and x none: `_AddLowRank` adds that to a larger product."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, kept: Tensor | None, recompute: Recompute | None, *lora_a: Tensor) -> Tensor:
        x_NI = x.reshape(-1, x.shape[-1])
        ctx.save_for_backward(x_NI if kept is None else kept)
        ctx.recompute = recompute
        ctx.ranks = [a.shape[0] for a in lora_a]
        (a_RI,) = in_dtype(x.dtype, lora_a, num_joined=len(lora_a))
        return x_NI @ a_RI.t()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (kept,) = ctx.saved_tensors
        x_NI = recompute_input(kept, ctx.recompute)
        grad_a_RI = mm_fp32(grads[0].t(), x_NI)
        return (None, None, None, *grad_a_RI.split(ctx.ranks))


class _AddLowRank(torch.autograd.Function):
    """y = x W^T + b + s h B^T. Keeps h alone, which is small; backward reads W, A and B from their layers."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        h_NR: Tensor,
        parts: Sequence[LoraPart],
        h_is_of_x: bool,
        has_values: bool,
        *weights: Tensor | None,
    ) -> tuple[Tensor, ...]:
        layers = [part.layer for part in parts]
        x_NI = x.reshape(-1, x.shape[-1])
        if has_values:
            lora_b = in_dtype(x.dtype, *_b(parts))
            addends = [Addend(h, b_OR.t()) for h, b_OR in zip(_split_ranks(h_NR, parts), lora_b, strict=True)]
            outputs = layers[0].matmul.outputs(x_NI, layers, addends)
        else:
            outputs = [x_NI.new_empty(len(x_NI), layer.out_features) for layer in layers]
        # Not with save_for_backward: h would be the last saved tensor, and the products above computed again.
        ctx.h_NR = h_NR.detach()
        ctx.parts = parts
        ctx.shape = x.shape
        ctx.h_is_of_x = h_is_of_x
        return tuple(unflatten(y, x) for y in outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        parts: Sequence[LoraPart] = ctx.parts
        layers = [part.layer for part in parts]
        grads_NO = [grad.reshape(-1, grad.shape[-1]) for grad in grads]
        lora_a = [part.lora_a.weight for part in parts]
        lora_b, scalings = _b(parts)
        a_RI, *lora_b = in_dtype(grads[0].dtype, [*lora_a, *lora_b], scalings, num_joined=len(parts))
        grads_h = [grad @ b_OR for grad, b_OR in zip(grads_NO, lora_b, strict=True)]
        grad_h_NR = grads_h[0] if len(parts) == 1 else torch.cat(grads_h, 1)
        grads_b = []
        for grad, h, scaling in zip(grads_NO, _split_ranks(ctx.h_NR, parts), scalings, strict=True):
            grads_b.append(mm_fp32(grad.t(), h).mul_(scaling))
        grads_bias = _bias_grads(grads_NO, ctx.needs_input_grad[5 + len(parts) :])
        grad_x = None
        if ctx.needs_input_grad[0]:
            addend = Addend(grad_h_NR, a_RI) if ctx.h_is_of_x else None
            grad_x = layers[0].matmul.input_grad(grads_NO, layers, addend).view(ctx.shape)
        return (grad_x, grad_h_NR, None, None, None, *grads_b, *grads_bias)


def _bias_grads(grads_NO: Sequence[Tensor], needed: Sequence[bool]) -> list[Tensor | None]:
    """The gradients of biases, each [O], of those that need one."""
    return [grad.sum(0) if is_needed else None for grad, is_needed in zip(grads_NO, needed, strict=True)]


def _b(parts: Sequence[LoraPart]) -> tuple[list[Tensor], list[float]]:
    """B [O, R] of adapters, and their scalings."""
    return [part.lora_b.weight for part in parts], [part.scaling for part in parts]


def in_dtype(
    dtype: torch.dtype, weights: Sequence[Tensor], scalings: Sequence[float] = (), num_joined: int = 0
) -> list[Tensor]:
    """Adapter matrices in the compute dtype. On a GPU one kernel makes all of them.

    Args:
        dtype: the compute dtype.
        weights: float32.
        scalings: what the last ones are multiplied by, in float32; the others are not.
        num_joined: the first ones become one matrix, in which they lie one below another.
    """
    factors = [*[1.0] * (len(weights) - len(scalings)), *scalings]
    made: list[Tensor] = []
    parts: list[Tensor] = []  # of `made`, one for each weight
    if num_joined:
        num_rows = [len(weight) for weight in weights[:num_joined]]
        joined = weights[0].new_empty(sum(num_rows), weights[0].shape[1], dtype=dtype)
        made.append(joined)
        parts += joined.split(num_rows)
    alone = [torch.empty_like(weight, dtype=dtype) for weight in weights[num_joined:]]
    made += alone
    parts += alone
    if runs_kernels(weights[0]):
        from qlora_fsdp.layers.kernels import triton_convert

        triton_convert.convert(weights, parts, factors)
    else:
        for part, weight, factor in zip(parts, weights, factors, strict=True):
            part.copy_(weight.detach() * factor)
    return made


def _split_ranks(h_NR: Tensor, parts: Sequence[LoraPart]) -> tuple[Tensor, ...]:
    return cast(tuple[Tensor, ...], h_NR.split([part.lora_b.in_features for part in parts], 1))


def mm_fp32(a: Tensor, b: Tensor) -> Tensor:
    """a @ b with an fp32 result: the gradient of an fp32 adapter is not rounded to the compute dtype."""
    if runs_kernels(a) and a.dtype != torch.float32:
        return torch.mm(a, b, out_dtype=torch.float32)
    return (a @ b).float()
