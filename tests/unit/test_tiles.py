"""Layers computed in tiles against the same layers computed whole, and against plain autograd in float64."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from tests.helpers.fused import differences, make_parts
from tests.unit.test_tracing import batch, make_model
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.models.llama.modeling_llama import LlamaMLP
from transformers.models.phi3.modeling_phi3 import Phi3MLP

from qlora_fsdp.config.schema import Config, KernelsConfig, LoraConfig
from qlora_fsdp.layers import Format
from qlora_fsdp.layers.rewire import fuse_layers, remake_norms, use_tiles
from qlora_fsdp.memory.policy import Policy
from qlora_fsdp.model.activations import set_activation_policy

NF4 = Format("nf4", double_quant=True)
RECOMPUTED = partial(checkpoint, use_reentrant=False)


@pytest.mark.parametrize("call", [nn.Module.__call__, RECOMPUTED], ids=["kept", "recomputed"])
@pytest.mark.parametrize("remakes_norms", [False, True])
@pytest.mark.parametrize("fuses", [False, True])
@pytest.mark.parametrize("mlp", [LlamaMLP, Phi3MLP])  # gate and up apart; as one layer
def test_a_part_against_float64(mlp: type[nn.Module], fuses: bool, remakes_norms: bool, call: Callable[..., Tensor]):
    ours, reference = make_parts(NF4, "silu", torch.float32, "cpu", mlp)
    part = ours.base_model.model
    if fuses:
        fuse_layers(ours)
    use_tiles([part], 64)  # 150 tokens: the last tile has fewer
    if remakes_norms:
        remake_norms(part)
    assert max(differences(ours, reference, call).values()) < 1e-5


def gradients(family: str, num_tokens: int | None, policy: Policy, config: Config, **more: object) -> dict[str, Tensor]:
    model = make_model(family, config, **more)
    use_tiles(model.layers, num_tokens)
    set_activation_policy(model.layers, [policy] * len(model.layers))
    loss = model(batch())
    loss.backward()
    return {"loss": loss.detach(), **{n: p.grad for n, p in model.named_parameters() if p.grad is not None}}


DORA = Config(lora=LoraConfig(use_dora=True))
PLAIN = Config(kernels=KernelsConfig(fuse_layers=False))
SOME = Config(lora=LoraConfig(target_modules=["gate_proj", "down_proj"]))  # the first layer's input needs no gradient


@pytest.mark.parametrize(
    ("family", "config"),
    [
        *((family, Config()) for family in ("llama", "gemma3_text", "phi3", "gpt_neox", "qwen3_moe", "gpt_oss")),
        *(("llama", config) for config in (DORA, PLAIN, SOME)),
    ],
    ids=str,
)
@pytest.mark.parametrize("policy", [Policy.none, Policy.full])
def test_models_have_the_same_gradients(family: str, config: Config, policy: Policy):
    whole, tiled = (gradients(family, size, policy, config) for size in (None, 12))  # of 32 tokens
    assert whole.keys() == tiled.keys() and len(whole) > 8
    for name, expected in whole.items():
        torch.testing.assert_close(tiled[name], expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))
