"""Experts on a GPU in bfloat16, by Triton's and torch's grouped kernels, against float32 on the CPU."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import GptOssConfig, MixtralConfig, NemotronHConfig, Qwen3MoeConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.mixtral.modeling_mixtral import MixtralExperts
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from qlora_fsdp.layers.experts import grouped_products
from qlora_fsdp.layers.experts.adapter import ExpertAdapter
from qlora_fsdp.layers.experts.forward import expert_weight_names, experts_forward
from qlora_fsdp.layers.experts.grouped_products import QuantizedExpertWeight
from qlora_fsdp.layers.quantized.format import Format

HIDDEN, INNER, NUM_EXPERTS, TOP_K, TOKENS, RANK = 256, 128, 8, 2, 333, 12


def make(kind: str) -> nn.Module:
    sizes: dict[str, Any] = {"hidden_size": HIDDEN, "moe_intermediate_size": INNER}
    match kind:
        case "qwen3_moe":
            module: nn.Module = Qwen3MoeExperts(Qwen3MoeConfig(**sizes, num_experts=NUM_EXPERTS))
        case "gelu":
            module = Qwen3MoeExperts(Qwen3MoeConfig(**sizes, num_experts=NUM_EXPERTS, hidden_act="gelu_pytorch_tanh"))
        case "mixtral":
            module = MixtralExperts(
                MixtralConfig(hidden_size=HIDDEN, intermediate_size=INNER, num_local_experts=NUM_EXPERTS)
            )
        case "gpt_oss":
            module = GptOssExperts(
                GptOssConfig(hidden_size=HIDDEN, intermediate_size=INNER, num_local_experts=NUM_EXPERTS)
            )
        case _:
            module = NemotronHExperts(NemotronHConfig(**sizes, n_routed_experts=NUM_EXPERTS))
    for param in module.parameters():
        nn.init.normal_(param, std=0.1)
    return module.requires_grad_(False)


def quantize(module: nn.Module, format: Format) -> None:
    for key in expert_weight_names(module):
        weight = getattr(module, key).data
        made = QuantizedExpertWeight(tuple(weight.shape), format, torch.bfloat16, weight.device)
        codes, absmax = format.quantize_rows(weight.flatten(0, 1).bfloat16())
        made.codes.data = codes
        made.scales.data = absmax
        if format.double_quant:
            made.scales.data, made.nested_scales.data = format.quantize_scales(absmax)
        delattr(module, key)
        setattr(module, key, made)


def dequantized_on_cpu(module: nn.Module) -> nn.Module:
    plain = copy.deepcopy(module)
    for key in expert_weight_names(module):
        delattr(plain, key)
        setattr(plain, key, nn.Parameter(getattr(module, key).weight.float().cpu(), requires_grad=False))
    return plain.float().cpu()


def make_adapters(module: nn.Module) -> dict[str, ExpertAdapter]:
    found = {}
    for key in expert_weight_names(module):
        _, rows, columns = getattr(module, key).shape
        in_features, out_features = (rows, columns) if module.is_transposed else (columns, rows)
        lora_a, lora_b = nn.Linear(in_features, RANK * NUM_EXPERTS), nn.Linear(RANK * NUM_EXPERTS, out_features)
        nn.init.normal_(lora_b.weight, std=0.05)
        found[key] = ExpertAdapter(lora_a, lora_b, 0.5)
    return found


def gradients(
    module: nn.Module, adapters: dict[str, ExpertAdapter], x: Tensor, index: Tensor, w: Tensor
) -> list[Tensor]:
    x, w = x.detach().requires_grad_(), w.detach().requires_grad_()
    y = experts_forward(module, x, index, w, adapters)
    params = [p for part in adapters.values() for p in (part.lora_a.weight, part.lora_b.weight)]
    torch.manual_seed(1)
    grad = torch.randn(y.shape).to(y)
    return [y, *torch.autograd.grad(y, [x, w, *params], grad)]


@pytest.mark.parametrize("slices", ["whole", "slices"])
@pytest.mark.parametrize("quant_type", ["nf4", "nf4 double", "int8"])
@pytest.mark.parametrize("kind", ["qwen3_moe", "gelu", "mixtral", "gpt_oss", "nemotron_h"])
def test_experts_equal_float32(kind: str, quant_type: str, slices: str, monkeypatch: pytest.MonkeyPatch):
    torch.manual_seed(0)
    module = make(kind).cuda().bfloat16()
    quantize(module, Format(quant_type.split()[0], quant_type.endswith("double")))
    if slices == "slices":
        monkeypatch.setattr(grouped_products, "MAX_SLICE_BYTES", 80 * NUM_EXPERTS * HIDDEN * 2)  # some 80 columns
    adapters = make_adapters(module)
    x = torch.randn(TOKENS, HIDDEN)
    index = torch.stack([torch.randperm(NUM_EXPERTS - 3)[:TOP_K] for _ in range(TOKENS)])  # three get no token
    w = torch.rand(TOKENS, TOP_K)
    expected = gradients(dequantized_on_cpu(module), adapters, x.bfloat16().float(), index, w.bfloat16().float())
    on_gpu = {
        k: each._replace(lora_a=copy.deepcopy(each.lora_a).cuda(), lora_b=copy.deepcopy(each.lora_b).cuda())
        for k, each in adapters.items()
    }
    found = gradients(module, on_gpu, x.cuda().bfloat16(), index.cuda(), w.cuda().bfloat16())
    for mine, reference in zip(found, expected, strict=True):
        assert torch.isfinite(mine).all()
        distance = (mine.float().cpu() - reference).norm() / reference.norm()
        assert distance < 0.015, (distance, reference.shape)
