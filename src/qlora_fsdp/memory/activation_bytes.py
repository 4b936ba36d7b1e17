"""What a transformer layer saves for backward, tensor by tensor, and what each policy saves of it.

The table is that of `quantized/` (an adapted layer saves its input and the low-rank product), transformers' decoder
layers, Liger's kernels and flash attention; tests/unit/test_memory_activations.py compares it with autograd's own
account. A policy is a set of names of the table.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

from qlora_fsdp.config.schema import MatmulKind
from qlora_fsdp.memory.parameter_bytes import adapter_rank, is_quantized, is_saved
from qlora_fsdp.memory.shape import HEAD_NORMS, Linear
from qlora_fsdp.memory.workload import Workload


class Policy(Enum):
    """What becomes of a layer's activations, from most memory to least.

    Attributes:
        none: they are kept.
        selective: but for the norms' outputs, which the layers that got them make again (layers/fuse.py).
        full: the layer's input is kept, with the low-rank products of its adapters, which are small; the rest is
            computed again in backward.
        offload: as full, with the input in host memory.
    """

    none = "none"
    selective = "selective"
    full = "full"
    offload = "offload"


GATES = ("mlp.gate_proj", "mlp.up_proj", "mlp.gate_up_proj")
NORM_OUTPUTS = frozenset({"attention_norm", "mlp_norm"})
MAX_FUSED_RANK = 64  # layers/gated_activation.py
OFFLOAD_SLOTS = 2  # inputs of offloaded layers that are on the GPU at a time: on their way out, or back


def layer_tensors(work: Workload) -> dict[str, float]:
    """Name and bytes a token of every tensor that a layer saves when nothing is recomputed."""
    shape, item, lora = work.shape, work.compute_bytes, work.config.lora
    inner = shape.intermediate_size * item
    query, key = shape.query_size * item, shape.key_size * item
    # torch's own norms compute in fp32, and save that copy of their input.
    stream = shape.hidden_size * (item if "rms_norm" in work.fused else 4)
    table: dict[str, float] = {"input": stream, "input_rstd": 4, "residual": stream, "residual_rstd": 4}
    table |= {"query": query, "key": key, "value": key}
    table |= {"attention_out": query, "attention_lse": 4 * shape.num_heads}
    table |= {"gate": inner, "up": inner}
    if shape.has_head_norms:
        table |= {"query_before_norm": query, "key_before_norm": key}
        table |= {"head_rstd": 4 * (shape.num_heads + shape.num_kv_heads)}
    if shape.has_fused_linears:  # the values are a view into the product of all three
        table |= {"value": query + 2 * key}
    if shape.has_post_norms:
        table |= {"attention_projected": stream, "mlp_projected": stream, "post_rstd": 8}
    if "glu" not in work.fused and not fuses_mlp(work):
        table["activated"] = inner
    for norm, (name, width) in _norm_inputs(work).items():
        if is_saved(_name(work, norm), lora):  # computes in fp32, and keeps that copy of its input
            table[name] = width * 4
    low_rank = dropped = dora = 0.0
    for linear in shape.linears:
        rank, name = adapter_rank(_name(work, linear.name), lora), _input_of(linear)
        if is_saved(_name(work, linear.name), lora):
            table.setdefault(name, linear.in_features * item)
        if not rank:
            continue
        low_rank += rank * item
        if lora.use_dora:  # what the base and the adapter give, the latter in fp32 like its input
            dora += linear.out_features * (item + 4) + (linear.in_features * 4 if item < 4 else 0)
        if lora.lora_dropout > 0:  # each adapter has its own dropped input, and a mask of bytes
            dropped += linear.in_features * (item + 1)
        elif name != "product" or not fuses_mlp(work):
            table.setdefault(name, linear.in_features * item)
    table |= {"low_rank": low_rank, "dropped": dropped, "dora": dora}
    return {name: size for name, size in table.items() if size}


def _name(work: Workload, part: str) -> str:
    """In the layer in the middle, which stands for all: settings that tell layers apart leave out the first or last."""
    return f"model.layers.{work.shape.num_layers // 2}.{part}"


def _norm_inputs(work: Workload) -> dict[str, tuple[str, int]]:
    """The tensor of the table that each norm gets, and its width."""
    shape = work.shape
    streams: tuple[str, ...] = ("input", "residual")
    if shape.has_post_norms:
        streams = ("input", "attention_projected", "residual", "mlp_projected")
    found = {norm: (stream, shape.hidden_size) for norm, stream in zip(shape.norms, streams, strict=False)}
    if shape.has_head_norms:
        queries, keys = HEAD_NORMS
        found |= {queries: ("query_before_norm", shape.query_size), keys: ("key_before_norm", shape.key_size)}
    return found


def _input_of(linear: Linear) -> str:
    """The tensor of the table that a linear layer gets."""
    if linear.name.startswith("self_attn."):
        return "attention_out" if linear.name.endswith(".o_proj") else "attention_norm"
    return "product" if linear.name.endswith(".down_proj") else "mlp_norm"


def saved_bytes(work: Workload, policy: Policy) -> int:
    """What a layer under a policy keeps on the GPU for a micro-batch."""
    casts = 0 if policy in (Policy.full, Policy.offload) else _cast_bytes(work)
    return round(work.num_tokens * sum(_saved(work, policy).values())) + casts


def host_bytes(work: Workload, policies: Sequence[Policy]) -> int:
    """What the layers together keep in pinned host memory for a micro-batch."""
    size = work.num_tokens * work.shape.hidden_size * work.compute_bytes
    return size * sum(policy is Policy.offload for policy in policies)


def backward_bytes(work: Workload, policy: Policy) -> int:
    """What the backward of one layer takes beyond what was saved, at its peak: in the MLP.

    Everything that was not saved, but for the norms' outputs, is there again, with the gradients of the layer's output
    and of `product`, and one dequantized weight. A fused MLP saves nothing of its last product, whose backward comes
    before the layer is computed again: then the gradient of `product` waits, beside `product` itself and the input.
    """
    table, saved = layer_tensors(work), _saved(work, policy)
    remade = _remade(work) if policy is not Policy.none else frozenset()
    again = sum(size for name, size in table.items() if name not in remade) - sum(
        size for name, size in saved.items() if name not in remade
    )
    item, shape = work.compute_bytes, work.shape
    hidden, inner, weight = shape.hidden_size * item, shape.intermediate_size * item, dequantized_bytes(work)
    is_fused, recomputes = fuses_mlp(work), policy in (Policy.full, Policy.offload)
    in_fp8 = shape.intermediate_size * (2 if is_fused else 1) if _is_fp8(work) else 0  # copy of a gradient, in bytes
    if is_fused and recomputes:
        in_mlp = max(weight + work.num_tokens * in_fp8, work.num_tokens * inner)
        return round(work.num_tokens * (again + 2 * hidden + inner)) + in_mlp + _cast_bytes(work)
    gradients = hidden + inner + in_fp8
    if "glu" not in work.fused and not is_fused:  # of the activation and of `up`, where Liger's writes over its inputs
        gradients += 2 * inner
    return round(work.num_tokens * (again + gradients)) + weight + (_cast_bytes(work) if recomputes else 0)


def forward_bytes(work: Workload, policy: Policy) -> int:
    """What the forward of one layer takes beyond what it saves, at its peak: in the MLP.

    A layer that is recomputed has gate and up beside a dequantized weight, and their product once that is gone.
    """
    tokens, shape = work.num_tokens * work.compute_bytes, work.shape
    inner, weight = tokens * shape.intermediate_size, dequantized_bytes(work)
    if policy not in (Policy.none, Policy.selective):
        in_mlp = max(2 * inner + weight, 3 * inner)
    else:
        in_fp8 = work.num_tokens * shape.intermediate_size if _is_fp8(work) else 0
        in_mlp = (inner if fuses_mlp(work) else 0) + in_fp8 + weight  # a fused MLP does not save `product`
    return 2 * tokens * shape.hidden_size + in_mlp


def dequantized_bytes(work: Workload) -> int:
    """The largest dequantized weight of a layer; there is one at a time (in fp8 those of gate and up are one).

    For the norms of its rows DoRA makes BA, scaled, and adds it to the weight: three matrices in fp32.
    """
    config, shape = work.config, work.shape
    sizes = [
        linear.out_features * linear.in_features
        for linear in shape.linears
        if is_quantized(_name(work, linear.name), config.quant, config.lora)
    ]
    if _is_fp8(work):
        return max(sizes, default=0) * (2 if fuses_mlp(work) and not shape.has_fused_linears else 1)
    return max(sizes, default=0) * (work.compute_bytes + (12 if config.lora.use_dora else 0))


def _cast_bytes(work: Workload) -> int:
    """Copies in the compute dtype of a layer's matrices that are trained in fp32, which backward needs."""
    shape, lora = work.shape, work.config.lora
    saved = [linear for linear in shape.linears if is_saved(_name(work, linear.name), lora)]
    weights = sum(linear.out_features * linear.in_features for linear in saved)
    return weights * work.compute_bytes if work.compute_bytes < 4 else 0


def fuses_mlp(work: Workload) -> bool:
    """Whether the MLP is one function that keeps gate and up alone (layers/mlp.py)."""
    config, shape = work.config, work.shape
    if not config.kernels.fuse_layers or config.lora.lora_dropout or config.lora.use_dora:
        return False
    names = [_name(work, linear.name) for linear in shape.linears if linear.name.startswith("mlp.")]
    ranks = [adapter_rank(name, config.lora) for name in names]
    has_bias = any(linear.has_bias for linear in shape.linears if linear.name in GATES)
    quantized = all(is_quantized(name, config.quant, config.lora) for name in names)
    return quantized and not has_bias and all(0 < rank <= MAX_FUSED_RANK for rank in ranks)


def _is_fp8(work: Workload) -> bool:
    return work.config.compute.matmul is MatmulKind.fp8


def _remade(work: Workload) -> frozenset[str]:
    """The norms' outputs that are not kept: where keeping the input saves anything, which is no copy in fp32.

    Adapted quantized layers make them again (layers/lora.py), of norms that are frozen; any other layer with
    something to train keeps its own.
    """
    config = work.config
    keeps_own_input = "rms_norm" in work.fused or work.compute_bytes == 4
    if not keeps_own_input or config.lora.lora_dropout or config.lora.use_dora:
        return frozenset()
    outputs = {"input": "attention_norm", "residual": "mlp_norm"}
    inputs = (name for norm, (name, _) in _norm_inputs(work).items() if is_saved(_name(work, norm), config.lora))
    keeping = {outputs[name] for name in inputs if name in outputs}
    for linear in work.shape.linears:
        name = _name(work, linear.name)
        is_adapted = adapter_rank(name, config.lora) > 0
        if is_saved(name, config.lora) or (is_adapted and not is_quantized(name, config.quant, config.lora)):
            keeping.add(_input_of(linear))
    return NORM_OUTPUTS - keeping


def _kept_low_rank(work: Workload) -> int:
    """Low-rank products that layers/lora.py keeps in spite of checkpointing, to save it the last large product."""
    config = work.config
    if config.lora.lora_dropout or config.lora.use_dora:
        return 0
    in_gate = GATES if fuses_mlp(work) else ()
    names = [_name(work, linear.name) for linear in work.shape.linears if linear.name not in in_gate]
    ranks = [adapter_rank(name, config.lora) for name in names if is_quantized(name, config.quant, config.lora)]
    return sum(ranks) * work.compute_bytes


def _saved(work: Workload, policy: Policy) -> dict[str, float]:
    """What backward finds on the GPU."""
    if policy is Policy.offload:
        return {"low_rank": _kept_low_rank(work)}
    if policy is Policy.full:  # the checkpoint keeps the input as it is, not a norm's copy of it
        return {"input": work.shape.hidden_size * work.compute_bytes, "low_rank": _kept_low_rank(work)}
    remade = _remade(work) if policy is Policy.selective else frozenset()
    return {name: size for name, size in layer_tensors(work).items() if name not in remade}
