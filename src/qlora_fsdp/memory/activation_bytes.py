"""Bytes of the activations that a transformer layer keeps for backward, tensor by tensor, under each policy.

`layer_tensors` lists every tensor that a layer keeps when nothing is computed again, in bytes per token. The list
follows transformers' decoder layers with this project's linear layers (an adapted layer keeps its input and the product
x A^T, which is small), Liger's kernels and flash attention. A policy then keeps a part of the list.
tests/unit/test_memory_activations.py compares the list with what autograd really saves.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

from typing_extensions import assert_never

from qlora_fsdp.common.fused_mlp import GATED, can_fuse_mlp
from qlora_fsdp.config.schema import MatmulKind
from qlora_fsdp.memory.parameter_bytes import adapter_rank, is_quantized, is_saved
from qlora_fsdp.memory.shape import HEAD_NORMS, Linear
from qlora_fsdp.memory.workload import Workload


class Policy(Enum):
    """What a transformer layer keeps of its activations, from most memory to least.

    Attributes:
        none: nothing is given up: the layer keeps everything that backward needs.
        selective: it keeps all but the outputs of its norms. The linear layers that read these make them again.
        full: it keeps its input, and its adapters' low-rank products, which are small. Backward computes it again.
        offload: as `full`, but the input waits in host memory.
    """

    none = "none"
    selective = "selective"
    full = "full"
    offload = "offload"

    @property
    def recomputes(self) -> bool:
        """Whether backward computes the layer again."""
        match self:
            case Policy.none | Policy.selective:
                return False
            case Policy.full | Policy.offload:
                return True
            case _:
                assert_never(self)


GATES = frozenset(f"mlp.{name}" for names in GATED for name in names[:-1])
NORM_OUTPUTS = frozenset({"attention_norm", "mlp_norm"})
OFFLOAD_SLOTS = 2  # offloaded inputs that are on the GPU at the same time, on their way to the host or back


def layer_tensors(work: Workload) -> dict[str, float]:
    """Name and bytes per token of every tensor that a layer keeps if nothing is computed again."""
    shape, item, lora = work.shape, work.compute_bytes, work.config.lora
    inner = shape.intermediate_size * item
    query, key = shape.query_size * item, shape.key_size * item
    # Liger's norms keep their input. torch's own compute in fp32, and keep an fp32 copy of it.
    stream = shape.hidden_size * (item if "rms_norm" in work.fused else 4)
    table: dict[str, float] = {"input": stream, "input_rstd": 4, "residual": stream, "residual_rstd": 4}
    table |= {"query": query, "key": key, "value": key}
    table |= {"attention_out": query, "attention_lse": 4 * shape.num_heads}
    table |= {"gate": inner, "up": inner}
    if shape.has_head_norms:
        table |= {"query_before_norm": query, "key_before_norm": key}
        table |= {"head_rstd": 4 * (shape.num_heads + shape.num_kv_heads)}
    if shape.has_fused_linears:  # the values are a view, which keeps the product of all three alive
        table |= {"value": query + 2 * key}
    if shape.has_post_norms:
        table |= {"attention_projected": stream, "mlp_projected": stream, "post_rstd": 8}
    if "glu" not in work.fused and not fuses_mlp(work):
        table["activated"] = inner
    for norm, (name, width) in _norm_inputs(work).items():
        if _is_saved(work, norm):  # a trained norm computes in fp32, and keeps that copy of its input
            table[name] = width * 4
    low_rank = dropped = dora = 0.0
    for linear in shape.linears:
        rank, name = _rank(work, linear), _input_of(linear)
        if _is_saved(work, linear.name):
            table.setdefault(name, linear.in_features * item)
        if not rank:
            continue
        low_rank += rank * item
        if lora.use_dora:  # the base's output, and the adapter's, which is in fp32 like its input
            dora += linear.out_features * (item + 4) + (linear.in_features * 4 if item < 4 else 0)
        if lora.lora_dropout > 0:  # each adapter keeps its own dropped input, and a mask of one byte per element
            dropped += linear.in_features * (item + 1)
        elif name != "product" or not fuses_mlp(work):
            table.setdefault(name, linear.in_features * item)
    table |= {"low_rank": low_rank, "dropped": dropped, "dora": dora}
    return {name: size for name, size in table.items() if size}


def saved_bytes(work: Workload, policy: Policy) -> int:
    """Bytes that one layer keeps on the GPU for backward, per micro-batch."""
    casts = 0 if policy.recomputes else _cast_bytes(work)
    return round(work.num_tokens * sum(_saved(work, policy).values())) + casts


def host_bytes(work: Workload, policies: Sequence[Policy]) -> int:
    """Bytes that all layers together keep in pinned host memory, per micro-batch."""
    size = work.num_tokens * work.shape.hidden_size * work.compute_bytes
    return size * sum(policy is Policy.offload for policy in policies)


def forward_bytes(work: Workload, policy: Policy) -> int:
    """Bytes that the forward of one layer takes beyond what it keeps, at its peak, which is in the MLP.

    A layer that will be recomputed frees everything it makes. At first it holds gate and up beside a dequantized
    weight; once that weight is gone, it holds gate, up and their product.
    """
    tokens, shape = work.num_tokens * work.compute_bytes, work.shape
    inner, weight = tokens * shape.intermediate_size, dequantized_bytes(work)
    if policy.recomputes:
        in_mlp = max(2 * inner + weight, 3 * inner)
    else:
        in_fp8 = work.num_tokens * shape.intermediate_size if _is_fp8(work) else 0
        in_mlp = (inner if fuses_mlp(work) else 0) + in_fp8 + weight  # a fused MLP does not keep `product`
    return 2 * tokens * shape.hidden_size + in_mlp


def backward_bytes(work: Workload, policy: Policy) -> int:
    """Bytes that the backward of one layer takes beyond what was kept, at its peak, which is in the MLP.

    By then everything that was not kept exists again, except the norms' outputs. The gradients of the layer's output
    and of `product`, the input of down_proj, are there too, and one dequantized weight.

    A fused MLP keeps nothing of its last product, so the backward of that product can run before the layer is computed
    again. During the recomputation the gradient of `product` waits beside `product` itself and the MLP's input.
    """
    table, saved = layer_tensors(work), _saved(work, policy)
    remade = _remade(work) if policy is not Policy.none else frozenset()
    again = sum(size for name, size in table.items() if name not in remade) - sum(
        size for name, size in saved.items() if name not in remade
    )
    item, shape = work.compute_bytes, work.shape
    hidden, inner, weight = shape.hidden_size * item, shape.intermediate_size * item, dequantized_bytes(work)
    is_fused = fuses_mlp(work)
    in_fp8 = shape.intermediate_size * (2 if is_fused else 1) if _is_fp8(work) else 0  # a gradient's copy, in bytes
    if is_fused and policy.recomputes:
        in_mlp = max(weight + work.num_tokens * in_fp8, work.num_tokens * inner)
        return round(work.num_tokens * (again + 2 * hidden + inner)) + in_mlp + _cast_bytes(work)
    gradients = hidden + inner + in_fp8
    if "glu" not in work.fused and not is_fused:  # those of the activation and of up; Liger's overwrites its inputs
        gradients += 2 * inner
    return round(work.num_tokens * (again + gradients)) + weight + (_cast_bytes(work) if policy.recomputes else 0)


def dequantized_bytes(work: Workload) -> int:
    """Bytes of the largest dequantized weight of a layer. There is one at a time; in fp8 gate and up are made as one.

    To get the norms of its rows, DoRA makes B A, scales it and adds it to the weight: three matrices in fp32.
    """
    config, shape = work.config, work.shape
    sizes = [linear.out_features * linear.in_features for linear in shape.linears if _is_quantized(work, linear)]
    if _is_fp8(work):
        return max(sizes, default=0) * (2 if fuses_mlp(work) and not shape.has_fused_linears else 1)
    return max(sizes, default=0) * (work.compute_bytes + (12 if config.lora.use_dora else 0))


def fuses_mlp(work: Workload) -> bool:
    """Whether the MLP is computed as one function, which keeps only the outputs of gate and up (layers/mlp.py)."""
    config, shape = work.config, work.shape
    if not config.kernels.fuse_layers or config.lora.lora_dropout or config.lora.use_dora:
        return False
    linears = [linear for linear in shape.linears if linear.name.startswith("mlp.")]
    gates_have_bias = any(linear.has_bias for linear in linears if linear.name in GATES)
    ranks = [_rank(work, linear) for linear in linears]
    return all(_is_quantized(work, linear) for linear in linears) and can_fuse_mlp(ranks, gates_have_bias)


def _saved(work: Workload, policy: Policy) -> dict[str, float]:
    """Name and bytes per token of what backward finds on the GPU."""
    match policy:
        case Policy.none:
            return layer_tensors(work)
        case Policy.selective:
            remade = _remade(work)
            return {name: size for name, size in layer_tensors(work).items() if name not in remade}
        case Policy.full:  # the input is kept as it is, not the copy that a norm would make of it
            return {"input": work.shape.hidden_size * work.compute_bytes, "low_rank": _kept_low_rank(work)}
        case Policy.offload:
            return {"low_rank": _kept_low_rank(work)}
        case _:
            assert_never(policy)


def _remade(work: Workload) -> frozenset[str]:
    """The norms' outputs that `selective` gives up.

    A norm's output can be made again from the norm's input. That saves memory only where the norm keeps its input for
    backward anyway, and not an fp32 copy. The linear layers that read the output make it again, if they are quantized
    and adapted (layers/lora.py) and the norm is frozen. Any other layer that is trained keeps its own input, which is
    that output.
    """
    config = work.config
    keeps_own_input = "rms_norm" in work.fused or work.compute_bytes == 4
    if not keeps_own_input or config.lora.lora_dropout or config.lora.use_dora:
        return frozenset()
    outputs = {"input": "attention_norm", "residual": "mlp_norm"}
    inputs = (name for norm, (name, _) in _norm_inputs(work).items() if _is_saved(work, norm))
    kept = {outputs[name] for name in inputs if name in outputs}
    for linear in work.shape.linears:
        is_plain_adapted = _rank(work, linear) > 0 and not _is_quantized(work, linear)
        if _is_saved(work, linear.name) or is_plain_adapted:
            kept.add(_input_of(linear))
    return NORM_OUTPUTS - kept


def _kept_low_rank(work: Workload) -> int:
    """Bytes per token of the low-rank products that a recomputed layer keeps nevertheless.

    With them, the recomputation can leave out the layer's last large product (layers/lora.py).
    """
    config = work.config
    if config.lora.lora_dropout or config.lora.use_dora:
        return 0
    in_gate = GATES if fuses_mlp(work) else ()
    linears = [linear for linear in work.shape.linears if linear.name not in in_gate]
    return sum(_rank(work, linear) for linear in linears if _is_quantized(work, linear)) * work.compute_bytes


def _cast_bytes(work: Workload) -> int:
    """Bytes of a layer's trained fp32 matrices in the compute dtype. Backward needs these copies."""
    saved = [linear for linear in work.shape.linears if _is_saved(work, linear.name)]
    weights = sum(linear.out_features * linear.in_features for linear in saved)
    return weights * work.compute_bytes if work.compute_bytes < 4 else 0


def _norm_inputs(work: Workload) -> dict[str, tuple[str, int]]:
    """By norm: the tensor of `layer_tensors` that it reads, and its width."""
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
    """The tensor of `layer_tensors` that a linear layer reads."""
    if linear.name.startswith("self_attn."):
        return "attention_out" if linear.name.endswith(".o_proj") else "attention_norm"
    return "product" if linear.name.endswith(".down_proj") else "mlp_norm"


def _is_fp8(work: Workload) -> bool:
    match work.config.compute.matmul:
        case MatmulKind.dequantized:
            return False
        case MatmulKind.fp8:
            return True
        case _:
            assert_never(work.config.compute.matmul)


def _name(work: Workload, part: str) -> str:
    """A part's full name in the middle layer, which stands for all: settings for single layers name the first or last.

    Returns:
        E.g. `model.layers.16.mlp.up_proj` for `mlp.up_proj`.
    """
    return f"model.layers.{work.shape.num_layers // 2}.{part}"


def _is_saved(work: Workload, part: str) -> bool:
    return is_saved(_name(work, part), work.config.lora)


def _is_quantized(work: Workload, linear: Linear) -> bool:
    return is_quantized(_name(work, linear.name), work.config.quant, work.config.lora)


def _rank(work: Workload, linear: Linear) -> int:
    return adapter_rank(_name(work, linear.name), work.config.lora)
