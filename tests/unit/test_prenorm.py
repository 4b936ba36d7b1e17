"""Norms and pre-norm layers: which prove to be of a known form, and that they compute what they computed before."""

from __future__ import annotations

import copy
from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest
import torch
from tests.helpers.families import make_config
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from qlora_fsdp.config.schema import KernelsConfig
from qlora_fsdp.layers import liger, norm
from qlora_fsdp.layers.norm import is_rms_norm
from qlora_fsdp.layers.prenorm import PreNorm, Roles, find_roles, join_norms
from qlora_fsdp.layers.rewire import fuse_layers, recompute_norms

USUAL = Roles("input_layernorm", "self_attn", "post_attention_layernorm", "mlp")
FAMILIES = {
    "llama": USUAL,
    "phi3": USUAL,
    "qwen3_moe": USUAL,
    "deepseek_v3": USUAL,
    "granitemoe": USUAL._replace(mlp="block_sparse_moe"),
    "apertus": Roles("attention_layernorm", "self_attn", "feedforward_layernorm", "mlp"),
    "lfm2": Roles("operator_norm", "self_attn", "ffn_norm", "feed_forward"),  # of its layers with attention
    "gemma": USUAL,  # its norms multiply by 1 + weight
    "gpt_oss": None,  # its MLP returns scores too
    "gemma2": None,  # four norms
    "olmo2": None,  # norms after attention and MLP
    "cohere": None,  # attention beside the MLP
    "gpt2": None,
}


def build(family: str, **changes: Any) -> Any:
    config = make_config(family)
    for name, value in changes.items():
        setattr(config, name, value)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize("family", FAMILIES)
def test_families(family: str):
    found = {roles for module in build(family).modules() if (roles := find_roles(module)) is not None}
    assert found == ({FAMILIES[family]} if FAMILIES[family] else set())


def test_a_multiplier_decides():
    assert find_roles(build("granite", residual_multiplier=1.0).model.layers[0]) == USUAL
    assert find_roles(build("granite", residual_multiplier=0.3).model.layers[0]) is None


class Attention(nn.Linear):
    def forward(self, hidden_states: Tensor, scale: Tensor | None = None, **_: Any) -> tuple[Tensor, None]:
        y = super().forward(hidden_states)
        return (y if scale is None else y * scale), None


class Layer(nn.Module):
    def __init__(self, compute: Callable[..., Tensor]) -> None:
        super().__init__()
        self.compute = compute
        self.a, self.b = Attention(16, 16), nn.Linear(16, 16)
        self.drop, self.after = nn.Dropout(0.0), nn.Dropout(0.5)
        self.n, self.m = LlamaRMSNorm(16), LlamaRMSNorm(16)
        for each in (self.n, self.m):
            nn.init.normal_(each.weight)

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return self.compute(self, x, *args, **kwargs)


def plain(layer: Any, x: Tensor, scale: Tensor | None = None, **kwargs: Any) -> Tensor:
    if scale is not None:
        kwargs["scale"] = scale
    x = layer.a(hidden_states=layer.m(x), **kwargs)[0] + x
    return x + layer.drop(layer.b(layer.n(x)))


UNLIKE: list[Callable[..., Tensor]] = [
    lambda layer, x, **kwargs: layer.after(plain(layer, x, **kwargs)),
    lambda layer, x, **kwargs: plain(layer, x, **kwargs).clamp(max=100.0),
    lambda layer, x, **kwargs: plain(layer, x, **kwargs) * 1.001,
    lambda layer, x, **kwargs: plain(layer, x),
    lambda layer, x, **kwargs: plain(layer, x, **{**kwargs, "use_cache": True}),
    lambda layer, x, **kwargs: plain(layer, x, **kwargs, more=1),
    lambda layer, x, **kwargs: (plain(layer, x, **kwargs),),
    lambda layer, x, **kwargs: x + layer.b(layer.n(x)) + layer.a(hidden_states=layer.m(x), **kwargs)[0],
    lambda layer, x, **kwargs: (h := x + layer.a(layer.m(x), **kwargs)[0]) + layer.b(layer.n(h)),  # not by its name
    lambda layer, x, **kwargs: plain(layer, layer.n(x), **kwargs),
]


@pytest.mark.parametrize("compute", UNLIKE)
def test_what_computes_anything_else_stays_as_it_is(compute: Callable[..., Tensor]):
    layer = Layer(compute)
    assert find_roles(layer) is None
    join_norms(layer)
    assert type(layer) is Layer


def test_own_parameters_are_not_left_out():
    layer = Layer(plain)
    layer.scale = nn.Parameter(torch.ones(16))
    assert find_roles(layer) is None


def test_results_are_those_of_before():
    torch.manual_seed(0)
    layer, x, scale = Layer(plain), torch.randn(2, 5, 16), torch.rand(16)
    expected, scaled = layer(x), layer(x, scale=scale)
    join_norms(layer)
    assert isinstance(layer, PreNorm) and layer.roles == ("m", "a", "n", "b")
    torch.testing.assert_close(layer(x), expected)
    torch.testing.assert_close(layer(x, scale=scale), scaled)
    torch.testing.assert_close(layer(x, scale), scaled)  # by place, which only the layer's own forward knows


def test_ligers_norm_is_what_it_stands_for(monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("liger_kernel")
    monkeypatch.setattr(liger, "_stock", {})
    config = LlamaConfig(hidden_size=64, intermediate_size=96, num_attention_heads=4)
    stock = modeling_llama.LlamaRMSNorm
    try:
        liger.use_fused_kernels(KernelsConfig(), config, torch.device("cuda"))
        with torch.device("meta"):
            layer = modeling_llama.LlamaDecoderLayer(config, 0)
        assert type(layer.input_layernorm) is not stock and find_roles(layer) == USUAL
    finally:
        for (owner, name), value in liger._stock.items():
            setattr(owner, name, value)
    assert modeling_llama.LlamaRMSNorm is stock


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs the kernels themselves")
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3_text", "gemma", "gpt_oss"])
def test_models_with_norms_by_the_kernel(family: str, recompute: bool, monkeypatch: pytest.MonkeyPatch):
    """In Triton's interpreter: norms of heads and layers, joined with residuals or not, against transformers' own."""
    pytest.importorskip("triton")
    kernels = import_module("qlora_fsdp.layers.kernels.triton_norm")
    torch.manual_seed(0)
    stock: Any = AutoModelForCausalLM.from_config(make_config(family), dtype=torch.float32).requires_grad_(False)
    norms = [module for module in stock.modules() if is_rms_norm(module)]
    for module in norms:
        nn.init.uniform_(module.weight, 0.5, 1.5)
    ours = copy.deepcopy(stock)
    fuse_layers(ours)
    for layer in ours.model.layers if recompute else ():
        recompute_norms(layer)
    x, forward, results, num_calls = torch.randn(1, 7, stock.config.hidden_size), kernels.forward, [], 0

    def counted(*args: Any) -> tuple[Tensor, Tensor]:
        nonlocal num_calls
        num_calls += 1
        return forward(*args)

    monkeypatch.setattr(norm, "runs_kernels", lambda _: True)
    monkeypatch.setattr(kernels, "forward", counted)
    for model in (stock, ours):
        leaf = x.clone().requires_grad_()
        logits = model(inputs_embeds=leaf, use_cache=False).logits
        logits.square().mean().backward()
        results.append((logits.detach(), leaf.grad))
    assert num_calls == len(norms)
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max()))
