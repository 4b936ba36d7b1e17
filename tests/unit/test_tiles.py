"""Layers computed in tiles against the same layers computed whole, and against plain autograd in float64."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from tests.helpers.fused import differences, make_parts
from tests.unit.test_tracing import batch, make_model, on_meta
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.models.llama.modeling_llama import LlamaMLP
from transformers.models.phi3.modeling_phi3 import Phi3MLP

from qlora_fsdp.config.schema import Config, KernelsConfig, LoraConfig
from qlora_fsdp.layers import tiles as layer_tiles
from qlora_fsdp.layers.quantized.format import Format
from qlora_fsdp.layers.quantized.matmul import DequantizedMatmul
from qlora_fsdp.layers.rewire import fuse_layers, recompute_norms, use_tiles
from qlora_fsdp.memory.policy import Policy
from qlora_fsdp.model.activations import set_activation_policy
from qlora_fsdp.tracing.trace import Trace

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
        recompute_norms(part)
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


def test_nothing_wide_is_made_of_all_tokens_and_no_product_twice(monkeypatch: pytest.MonkeyPatch):
    """A layer that is computed again: each of gate and up once in forward and once in backward, as without tiles."""
    model = make_model("llama", Config())
    products: list[tuple[int, int]] = []
    multiply = DequantizedMatmul.joint_output

    def count(self: DequantizedMatmul, x_NI: Tensor, layers: Any) -> Tensor:
        y_NO = multiply(self, x_NI, layers)
        products.append(tuple(y_NO.shape))
        return y_NO

    monkeypatch.setattr(DequantizedMatmul, "joint_output", count)
    widths: list[int] = []
    for size in (None, 12):
        use_tiles(model.layers, size)
        set_activation_policy(model.layers, [Policy.full] * len(model.layers))
        products.clear()
        model(batch()).backward()
        widths.append(sum(num_tokens * width for num_tokens, width in products))
    assert widths[0] == widths[1], "as many products of gate and up"
    assert max(num_tokens for num_tokens, _ in products) == 12


def test_the_plan_traces_some_tiles_and_counts_all(monkeypatch: pytest.MonkeyPatch):
    """Tiles that are alike are traced once: with the same bytes and the same operations as if each were."""
    model = on_meta("llama", Config())
    few, every = (Trace(model, batch(), is_cuda=False, liger_kernels=()) for _ in range(2))
    for policy in (Policy.none, Policy.full):
        found = few.layer(1, policy, num_tile_tokens=5)  # 7 tiles of 32 tokens, the last of 2
        with monkeypatch.context() as patched:
            patched.setattr(layer_tiles, "_each_tile", all_tiles)
            assert every.layer(1, policy, num_tile_tokens=5) == found
    assert few.layer(1, Policy.none, num_tile_tokens=5).saved < few.layer(1, Policy.none).saved


def all_tiles(tiles: layer_tiles.Tiles, rows: Tensor) -> list[slice]:
    return [slice(start, start + tiles.num_tokens) for start in range(0, len(rows), tiles.num_tokens)]
