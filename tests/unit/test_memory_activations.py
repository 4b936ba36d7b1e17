"""The table of saved activations, against autograd's own account of what a layer saves."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from qlora_fsdp.memory.activation_bytes import fuses_mlp, layer_tensors, saved_bytes
from qlora_fsdp.memory.shape import model_shape
from tests.helpers.checkpoints import FAMILIES, SHAPE
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from transformers import AutoConfig, AutoModelForCausalLM

from qlora_fsdp.common.fused_mlp import MAX_RANK
from qlora_fsdp.config.schema import Config, KernelsConfig, LoraConfig
from qlora_fsdp.data.batch import Batch
from qlora_fsdp.layers.rewire import rewire
from qlora_fsdp.memory.policy import Policy
from qlora_fsdp.memory.workload import Workload
from qlora_fsdp.model import input_offload
from qlora_fsdp.model.activations import set_activation_policy
from qlora_fsdp.model.adapters import apply_adapters
from qlora_fsdp.model.build import BuildSettings, build_model
from qlora_fsdp.model.causal_lm import CausalLM
from qlora_fsdp.model.find import ModelFiles

TOKENS = 32


def make_model(family: str, config: Config, **more: Any) -> tuple[CausalLM, Workload]:
    """A small model with random weights on the CPU, unsharded, and its workload."""
    torch.manual_seed(0)
    hf_config = AutoConfig.for_model(family, **{**SHAPE, **FAMILIES[family], **more}, initializer_range=0.1)
    settings = BuildSettings(config.quant, torch.float32, "sdpa", keep=config.lora.modules_to_save or [])
    built = build_model(ModelFiles(None, hf_config), settings)
    model = CausalLM(apply_adapters(built.model, config.lora))
    rewire(model, config.compute, config.kernels)
    model.to_empty(device="cpu")
    source = AutoModelForCausalLM.from_config(hf_config)  # for buffers that `to_empty` left undefined
    for name, buffer in source.named_buffers():
        model.base.get_buffer(name).copy_(buffer)
    for param in model.parameters():
        if param.is_floating_point() and param.dtype == torch.float32:
            param.data.normal_(0.0, 0.1)
        else:
            param.data.zero_()
    shape = model_shape(hf_config.to_dict())
    assert shape is not None
    config = replace(config, training=replace(config.training, max_length=TOKENS))
    return model, Workload(shape, config, 1, 1, 1, compute_bytes=4, fused=frozenset(), is_cuda=False)


def batch() -> Batch:
    ids = torch.arange(TOKENS).unsqueeze(0)
    return Batch(ids, ids, ids, torch.tensor([0, TOKENS], dtype=torch.int32), TOKENS)


def saved_by_layer(model: CausalLM, index: int) -> dict[int, int]:
    """Storages that autograd keeps for a layer: their address and bytes; parameters and rotary tables left out."""
    layer, found, outside = model.layers[index], dict[int, Tensor](), set[int]()
    forward = layer.forward

    def pack(tensor: Tensor) -> Tensor:
        found[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    def watched(*args: Any, **kwargs: Any) -> Any:
        outside.update(t.untyped_storage().data_ptr() for t in kwargs["position_embeddings"])
        with saved_tensors_hooks(pack, lambda tensor: tensor):
            return forward(*args, **kwargs)

    layer.forward = watched  # type: ignore[method-assign]
    model(batch())
    outside |= {param.untyped_storage().data_ptr() for param in model.parameters()}
    return {key: t.untyped_storage().nbytes() for key, t in found.items() if key not in outside}


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3_text"])
def test_a_recomputed_layer_keeps_its_input_alone(family: str):
    model, _ = make_model(family, Config())
    own = {param.untyped_storage().data_ptr() for param in model.parameters()}

    def kept(policy: Policy) -> int:
        set_activation_policy(model.layers, [policy] * len(model.layers))
        seen: dict[int, Tensor] = {}
        with saved_tensors_hooks(lambda t: seen.setdefault(t.untyped_storage().data_ptr(), t), lambda t: t):
            model(batch())
        return sum(t.untyped_storage().nbytes() for key, t in seen.items() if key not in own)

    assert kept(Policy.full) < 0.2 * kept(Policy.none)


# Elsewhere torch's own operations make copies on a CPU that the kernels on a GPU do not: close, and not less.
EXACT, CLOSE = 0.0, 0.15


@pytest.mark.parametrize(
    ("family", "tolerance"),
    [("llama", EXACT), ("qwen3", EXACT), ("smollm3", CLOSE), ("gemma3_text", CLOSE), ("phi3", CLOSE)],
)
@pytest.mark.parametrize("policy", [Policy.none, Policy.selective])
@pytest.mark.parametrize("targets", ["all-linear", ".*(q_proj|down_proj|qkv_proj)"])
@pytest.mark.parametrize("fuse", [True, False])
def test_table_is_what_autograd_saves(family: str, tolerance: float, policy: Policy, targets: str, fuse: bool):
    lora, kernels = LoraConfig(r=8, target_modules=targets), KernelsConfig(fuse_layers=fuse)
    model, work = make_model(family, Config(lora=lora, kernels=kernels))
    set_activation_policy(model.layers, [policy, policy])
    found = sum(saved_by_layer(model, 1).values())
    # Low-rank products are kept by the functions themselves, unseen by hooks, but for those of a fused MLP's input.
    seen = TOKENS * (1 if family == "phi3" else 2) * 8 * 4 if fuses_mlp(work) else 0
    expected = saved_bytes(work, policy) - TOKENS * round(layer_tensors(work)["low_rank"]) + seen
    assert expected <= found <= expected * (1 + tolerance)


@pytest.mark.parametrize("rank", [MAX_RANK, MAX_RANK + 1])
@pytest.mark.parametrize("more", [{}, {"mlp_bias": True}])
def test_table_knows_which_mlps_are_fused(rank: int, more: dict[str, Any]):
    """Up to which rank, and only without biases."""
    model, work = make_model("llama", Config(lora=LoraConfig(r=rank)), **more)
    set_activation_policy(model.layers, [Policy.none, Policy.none])
    found = sum(saved_by_layer(model, 1).values())
    is_fused = rank == MAX_RANK and not more
    assert fuses_mlp(work) is is_fused
    seen = TOKENS * 2 * rank * 4 if is_fused else 0  # as above
    assert found == saved_bytes(work, Policy.none) - TOKENS * round(layer_tensors(work)["low_rank"]) + seen


@pytest.mark.parametrize("saved", [["down_proj"], ["q_proj", "gate_proj"]])
@pytest.mark.parametrize("policy", [Policy.none, Policy.selective])
def test_table_counts_layers_that_are_trained_as_a_whole(saved: list[str], policy: Policy):
    lora = LoraConfig(r=8, modules_to_save=saved)
    model, work = make_model("llama", Config(lora=lora))
    set_activation_policy(model.layers, [policy, policy])
    found = sum(saved_by_layer(model, 1).values())
    assert found == saved_bytes(work, policy) - TOKENS * round(layer_tensors(work)["low_rank"])


def gradients(model: CausalLM, policies: list[Policy]) -> list[Tensor]:
    """Of the adapters, after one loss; the second of two, whose host buffers are those of the first."""
    set_activation_policy(model.layers, policies)
    for _ in range(2):
        model.zero_grad()
        model(batch()).backward()
    return [param.grad for param in model.parameters() if param.grad is not None]


def test_policies_change_no_bit(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(input_offload, "MIN_BYTES", 0)
    model, _ = make_model("llama", Config())
    kept = gradients(model, [Policy.none, Policy.none])
    for policies in (
        [Policy.selective] * 2,
        [Policy.full, Policy.none],
        [Policy.offload, Policy.full],
        [Policy.offload, Policy.offload],
    ):
        assert all(torch.equal(a, b) for a, b in zip(gradients(model, policies), kept, strict=True)), policies


def test_host_buffers_are_as_many_as_the_tensors_and_no_larger_than_the_largest_needs(monkeypatch: pytest.MonkeyPatch):
    """Whatever lengths the batches have, in whatever order."""
    monkeypatch.setattr(input_offload, "MIN_BYTES", 0)
    inputs = input_offload.InputOffload()
    for length in (500, 700, 1100, 1200, 90, 2000, 1300, 2048):
        tensors = [torch.randn(length, 4) for _ in range(3)]
        packed = [inputs._pack(tensor) for tensor in tensors]
        for tensor, one in reversed(list(zip(tensors, packed, strict=True))):
            assert torch.equal(inputs._unpack(one), tensor)
    assert [buffer.nbytes for buffer in inputs.free] == [2048 * 4 * 4] * 3


def test_offloaded_layers_keep_nothing(monkeypatch: pytest.MonkeyPatch):
    """Inputs go to a few host buffers, used again, and nothing of a layer stays where it computes."""
    monkeypatch.setattr(input_offload, "MIN_BYTES", 0)
    made: list[int] = []
    copied_out = input_offload.InputOffload._buffer

    def count(self: input_offload.InputOffload, tensor: Tensor) -> Tensor:
        made.append(len(self.free))
        return copied_out(self, tensor)

    monkeypatch.setattr(input_offload.InputOffload, "_buffer", count)
    model, work = make_model("llama", Config())
    gradients(model, [Policy.offload, Policy.offload])
    assert saved_bytes(work, Policy.offload) == TOKENS * (3 + 1 + 1) * 16 * 4, "h of q, k and v, of o, and of down"
    assert len(made) >= 4 and made[0] == 0 and made[-1] > 0, "two layers, twice; the second time into free buffers"
