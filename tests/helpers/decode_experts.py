"""Quantized experts with adapters, alone, as they are computed while text is generated."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import GptOssConfig, MixtralConfig, NemotronHConfig, Qwen3MoeConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.mixtral.modeling_mixtral import MixtralExperts
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from qlora_fsdp.layers.experts.adapter import ExpertAdapter
from qlora_fsdp.layers.experts.decode import DecodeExperts
from qlora_fsdp.layers.experts.forward import expert_weight_names, experts_forward
from qlora_fsdp.layers.experts.grouped_products import QuantizedExpertWeight
from qlora_fsdp.layers.quantized.format import Format

NUM_EXPERTS, TOP_K = 6, 2


def make_experts(family: str, format: Format, hidden: int, inner: int, rank: int) -> tuple[Any, dict[str, Any]]:
    """transformers' module with quantized weights, on a CPU in float32, and an adapter of each weight if rank > 0."""
    classes: dict[str, Any] = {
        "qwen3_moe": (Qwen3MoeExperts, Qwen3MoeConfig, "num_experts"),
        "mixtral": (MixtralExperts, MixtralConfig, "num_local_experts"),
        "gpt_oss": (GptOssExperts, GptOssConfig, "num_local_experts"),
        "nemotron_h": (NemotronHExperts, NemotronHConfig, "n_routed_experts"),
    }
    torch.manual_seed(0)
    made, config, name = classes[family]
    sizes = {"hidden_size": hidden, "moe_intermediate_size": inner, "intermediate_size": inner}
    module = made(config(**sizes, **{name: NUM_EXPERTS})).eval()
    for param in module.parameters():
        nn.init.normal_(param, std=0.2)
    adapters: dict[str, Any] = {}
    for name in expert_weight_names(module):
        weight = getattr(module, name).detach()
        shape = tuple(weight.shape)
        stored = QuantizedExpertWeight(shape, format, torch.float32)
        rows = weight.reshape(-1, shape[2])
        codes, scales = format.quantize_rows(rows)
        parts = {"codes": codes, "scales": scales}
        if format.double_quant:
            parts["scales"], parts["nested_scales"] = format.quantize_scales(scales)
        for part, values in parts.items():
            setattr(stored, part, nn.Parameter(values, requires_grad=False))
        delattr(module, name)
        setattr(module, name, stored)
        if rank:
            width, num_outputs = shape[1:] if family == "gpt_oss" else (shape[2], shape[1])
            lora_a = nn.Linear(width, NUM_EXPERTS * rank, bias=False)
            lora_b = nn.Linear(NUM_EXPERTS * rank, num_outputs, bias=False)
            adapters[name] = ExpertAdapter(lora_a, lora_b, 0.5)
    return module, adapters


def routed(num_tokens: int, hidden: int) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, each one's experts, and their weights; one expert gets no token."""
    torch.manual_seed(1)
    index = torch.stack([torch.randperm(NUM_EXPERTS - 1)[:TOP_K] for _ in range(num_tokens)])
    return torch.randn(num_tokens, hidden), index, torch.rand(num_tokens, TOP_K)


@torch.no_grad()
def compare_experts(
    family: str,
    format: Format,
    num_tokens: int,
    rank: int,
    sizes: tuple[int, int] = (128, 64),
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> float:
    """The distance from experts that are dequantized, in float32 on a CPU, as a part of the norm.

    Args:
        family: whose experts.
        format: of their weights.
        num_tokens: that are routed.
        rank: of adapters; 0: none. They change after the first `refresh`, and are refreshed again.
        sizes: hidden and inner size.
        device: a GPU, or Triton's interpreter computes.
        dtype: of tokens and results.
    """
    module, adapters = make_experts(family, format, *sizes, rank)
    x, index, w = routed(num_tokens, sizes[0])
    x = x.to(dtype).float()
    w = w.to(dtype).float()
    for name, param in module.named_parameters(recurse=False):
        assert name.endswith("bias")
        param.copy_(param.to(dtype))
    layers = DecodeExperts(module, adapters)
    layers.refresh()
    for adapter in adapters.values():
        adapter.lora_a.weight.mul_(2)
    expected = experts_forward(module, x, index, w, adapters)
    module.to(device)
    for weight in (layers.up.weight, layers.down.weight):
        weight.compute_dtype = dtype
    for name, param in module.named_parameters(recurse=False):
        setattr(module, name, nn.Parameter(param.to(dtype), requires_grad=False))
    for adapter in adapters.values():
        adapter.lora_a.to(device)
        adapter.lora_b.to(device)
    if device != "cpu":  # its adapters' copies are on the CPU
        layers = DecodeExperts(module, adapters)
    layers.refresh()
    found = layers.compute(x.to(device, dtype), index.to(device), w.to(device, dtype))
    return float((found.cpu().double() - expected).norm() / expected.norm())
