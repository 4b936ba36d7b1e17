"""Attention's result, kept by recomputed layers: against full recomputation, to the bit, and how often kernels run."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tests.helpers.checkpoints import FAMILIES, OTHER_FAMILIES, SHAPE
from tests.helpers.plain_varlen import register_plain_varlen
from torch import Tensor, nn
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from qlora_fsdp.layers.attention.choose import VARLEN, varlen_attention
from qlora_fsdp.memory.policy import Policy
from qlora_fsdp.model import activations
from qlora_fsdp.model.activations import set_activation_policy
from qlora_fsdp.model.trials.attention_by_starts import BY_STARTS, BY_STARTS_CAPPED, register_stand_ins

KEEPING = (Policy.attention, Policy.offload_attention)
STARTS = torch.tensor([0, 10, 32, 64], dtype=torch.int32)  # of rows, in two sequences of 32 tokens


@pytest.fixture(autouse=True)
def registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every tensor is offloaded, and each test leaves the functions of attention as they were."""
    monkeypatch.setattr(activations, "MIN_BYTES", 0)
    register_plain_varlen()
    register_stand_ins()
    AttentionInterface.register(VARLEN, varlen_attention)
    before = dict(ALL_ATTENTION_FUNCTIONS.items())
    yield
    assert dict(ALL_ATTENTION_FUNCTIONS.items()) == before


def make(family: str, attention: str, **more: Any) -> nn.Module:
    torch.manual_seed(0)
    values = {**SHAPE, **(FAMILIES | OTHER_FAMILIES)[family], **more}
    config = AutoConfig.for_model(family, **values, initializer_range=0.1, attn_implementation=attention)
    return AutoModelForCausalLM.from_config(config).train()


def layers_of(model: nn.Module) -> list[nn.Module]:
    return list(model.get_decoder().layers)  # type: ignore[operator]


def step(model: nn.Module, attention: str) -> list[Tensor]:
    """Loss and gradients of two sequences: of packed rows, or one padded where there is a mask."""
    ids = torch.arange(64).view(2, 32)
    told: dict[str, Any] = {"attention_mask": torch.ones(2, 32).tril(20)}
    if attention in (VARLEN, BY_STARTS, BY_STARTS_CAPPED):
        positions = torch.cat([torch.arange(10), torch.arange(22), torch.arange(32)]).view(2, 32)
        told = {"position_ids": positions, "cu_seq_lens_q": STARTS, "cu_seq_lens_k": STARTS}
        told |= {"max_length_q": 32, "max_length_k": 32}
    model.zero_grad()
    loss = model(ids, **told, use_cache=False).logits.float().log_softmax(-1).square().mean()
    loss.backward()
    return [loss.detach(), *(param.grad for param in model.parameters() if param.grad is not None)]


@pytest.mark.parametrize(
    ("family", "attention"),
    [
        ("llama", "sdpa"),  # grouped queries, and a mask over padding
        ("llama", VARLEN),
        ("mistral", VARLEN),  # sliding windows
        ("gpt_oss", VARLEN),  # sinks, which are trained here, and windows in some layers
        ("gpt_oss", "eager"),
        ("deepseek_v3", VARLEN),  # values of another width
        ("glm4", VARLEN),  # partial rotary embeddings: the kernel gets copies
        ("gemma2", BY_STARTS_CAPPED),  # capped logits
        ("gemma2", "eager"),
        ("qwen3", BY_STARTS),
        ("bloom", "eager"),  # attention of the model's own code
        ("falcon", "sdpa"),  # queries, keys and values of one product
    ],
)
def test_gradients_are_those_of_full_recomputation_to_the_bit(family: str, attention: str):
    model = make(family, attention)
    layers = layers_of(model) if family not in ("bloom", "falcon") else list(model.get_decoder().h)
    set_activation_policy(layers, [Policy.full] * len(layers))
    expected = step(model, attention)
    for policy in KEEPING:
        for policies in ([policy] * len(layers), [policy, *[Policy.full] * (len(layers) - 1)]):
            set_activation_policy(layers, policies)
            for _ in range(2):  # the second time with the host buffers of the first
                found = step(model, attention)
            assert len(found) == len(expected)
            assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)), policies


def count_calls(model: nn.Module, attention: str) -> int:
    """How often a step calls the kernel; it is put into the registry after the layers got their policies."""
    kernel, num_calls = ALL_ATTENTION_FUNCTIONS[attention], 0

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        return kernel(*args, **kwargs)

    AttentionInterface.register(attention, counted)
    try:
        step(model, attention)
        assert ALL_ATTENTION_FUNCTIONS[attention] is counted
    finally:
        AttentionInterface.register(attention, kernel)
    return num_calls


@pytest.mark.parametrize(("policy", "calls"), [(Policy.full, 2), (Policy.attention, 1), (Policy.offload_attention, 1)])
@pytest.mark.parametrize("attention", ["sdpa", VARLEN])
def test_a_kernel_runs_once_per_layer_and_step(attention: str, policy: Policy, calls: int):
    model = make("llama", attention)
    set_activation_policy(layers_of(model), [policy] * 2)
    assert count_calls(model, attention) == 2 * calls


def test_dropout_is_computed_again():
    """Its random numbers are drawn again, and so are those of all that follows."""
    model = make("llama", "sdpa", attention_dropout=0.5)
    found = []
    for policy in (Policy.full, *KEEPING):
        set_activation_policy(layers_of(model), [policy] * 2)
        torch.manual_seed(1)
        found.append(step(model, "sdpa"))
    assert all(torch.equal(*pair) for other in found[1:] for pair in zip(found[0], other, strict=True))
    assert count_calls(model, "sdpa") == 4


@pytest.mark.parametrize("policy", KEEPING)
def test_results_are_freed_without_garbage_collection(policy: Policy):
    model, results = make("llama", VARLEN), list[weakref.ref[Any]]()
    set_activation_policy(layers_of(model), [policy] * 2)

    def noted(*args: Any, **kwargs: Any) -> Any:
        out, weights = varlen_attention(*args, **kwargs)
        results.append(weakref.ref(out.untyped_storage()))
        return out, weights

    AttentionInterface.register(VARLEN, noted)
    gc.disable()
    try:
        step(model, VARLEN)
        assert [ref() for ref in results] == [None, None]
    finally:
        gc.enable()
        AttentionInterface.register(VARLEN, varlen_attention)


def test_a_layer_that_fails_leaves_the_registry_as_it_was():
    model = make("llama", VARLEN)
    layers = layers_of(model)
    set_activation_policy(layers, [Policy.attention] * 2)

    def fail(*_: Any) -> None:
        raise RuntimeError("no memory")

    handle = layers[1].mlp.register_forward_hook(fail)  # type: ignore[union-attr]
    with pytest.raises(RuntimeError, match="no memory"):
        step(model, VARLEN)
    assert ALL_ATTENTION_FUNCTIONS[VARLEN] is varlen_attention
    handle.remove()
    step(model, VARLEN)
