"""Part of a transformer layer, quantized and adapted, and the same in float64 through plain autograd and PEFT."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import peft
import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

from qlora_fsdp.layers.lora import LoraLinear
from qlora_fsdp.layers.quantized.format import Format
from qlora_fsdp.layers.quantized.linear import QuantizedLinear
from tests.helpers.quantized import quantize_whole

HIDDEN, WIDTH = 128, 192


class Part(nn.Module):
    """x -> q + pad(k) * pad(v) + mlp(norm(x)); q, k and v of norm(x)."""

    def __init__(self, activation: str, mlp: type[nn.Module]) -> None:
        super().__init__()
        config = LlamaConfig(hidden_size=HIDDEN, intermediate_size=WIDTH, hidden_act=activation)
        self.norm = LlamaRMSNorm(HIDDEN)
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(HIDDEN, n, bias=False) for n in (HIDDEN, 64, 64))
        self.mlp = mlp(config)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        q, k, v = self.q_proj(y), self.k_proj(y), self.v_proj(y)
        return q + nn.functional.pad(k * v, (0, HIDDEN - 64)) + self.mlp(y)


def adapt(model: nn.Module, ours: bool) -> peft.PeftModel:
    """LoRA on every linear layer, ours or PEFT's own."""
    settings = peft.LoraConfig(
        r=8, lora_alpha=24, target_modules="all-linear", rank_pattern={"up_proj": 4, "k_proj": 6}
    )
    attention, mlp = ["q_proj", "k_proj", "v_proj", "o_proj"], ["gate_proj", "up_proj", "gate_up_proj", "down_proj"]
    settings.target_modules = [*attention, *mlp]
    if ours:
        settings._register_custom_module({nn.Linear: LoraLinear})
    return peft.get_peft_model(model, settings, autocast_adapter_dtype=False)  # type: ignore[arg-type]


def quantize(plain: nn.Module, quantized: nn.Module, format: Format, dtype: torch.dtype) -> None:
    """Quantize the linear layers of one module, and give those of the other the dequantized weights."""
    for name, linear in list(plain.named_modules()):
        if not isinstance(linear, nn.Linear):
            continue
        layer = QuantizedLinear(linear.in_features, linear.out_features, False, format, dtype, device="cpu")
        for key, value in quantize_whole(linear.weight.detach().mul(2).to(dtype), format).items():
            getattr(layer, key).copy_(value)
        quantized.set_submodule(name, layer)
        linear.weight.data = layer.weight.detach()  # on the CPU, by bitsandbytes


def make_parts(
    format: Format, activation: str, dtype: torch.dtype, device: str, mlp: type[nn.Module] = LlamaMLP
) -> tuple[peft.PeftModel, peft.PeftModel]:
    """The part, quantized, with adapters in fp32; and one in float64 that has the dequantized weights."""
    torch.manual_seed(0)
    plain = Part(activation, mlp)
    quantized = copy.deepcopy(plain).to(dtype)
    quantize(plain, quantized, format, dtype)
    ours, reference = adapt(quantized, ours=True), adapt(plain, ours=False).double()
    values = {name: torch.randn(p.shape) * 0.1 for name, p in reference.named_parameters() if p.requires_grad}
    for model in (ours, reference):
        for name, param in model.named_parameters():
            if name in values:
                param.data = values[name].to(param.dtype if model is reference else torch.float32)
            elif "norm" in name:
                param.requires_grad_(False)
    return ours.to(device), reference


def differences(
    ours: nn.Module, reference: nn.Module, call: Callable[[nn.Module, Tensor], Tensor] = lambda model, x: model(x)
) -> dict[str, float]:
    """Relative errors of the output and of every gradient: norm of the difference over the norm."""
    device = next(ours.parameters()).device
    dtype = next(p for n, p in ours.named_parameters() if "norm" in n).dtype
    x = torch.randn(3, 50, HIDDEN, device=device).to(dtype).requires_grad_()
    grad = torch.randn(3, 50, HIDDEN, device=device).to(dtype)
    x64 = x.detach().cpu().double().requires_grad_()
    y, expected = call(ours, x), reference(x64)
    y.backward(grad)
    expected.backward(grad.cpu().double())
    wanted: dict[str, Any] = {"output": expected.detach(), "input": x64.grad}
    wanted |= {name: p.grad for name, p in reference.named_parameters() if p.grad is not None}
    found: dict[str, Any] = {"output": y.detach(), "input": x.grad}
    found |= {name: p.grad for name, p in ours.named_parameters() if p.grad is not None}
    assert found.keys() == wanted.keys()
    return {name: float((found[name].cpu().double() - wanted[name]).norm() / wanted[name].norm()) for name in wanted}
