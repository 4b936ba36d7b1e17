"""Answers in a batch with room for more: the same loss, gradient and figures, and nothing that waits for the device."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import peft
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM

from qlora_fsdp.common.sizes import IGNORE_INDEX
from qlora_fsdp.config.schema import PreferenceConfig, PreferenceLoss
from qlora_fsdp.data.batch import Batch, lay_out
from qlora_fsdp.layers.head_loss import LogitTransform, Reduction
from qlora_fsdp.model.tasks.preference import PreferenceLM
from qlora_fsdp.training.capture.passes import Key, fill, with_room

LENGTH = 256
CPU = torch.device("cpu")
# What asks the device, and what copies a number to it: neither can be part of a CUDA graph.
WAITS = {"_local_scalar_dense", "nonzero", "lift_fresh", "lift_fresh_copy", "masked_select", "scalar_tensor"}


class Given(PreferenceLM):
    """A model whose tokens have given losses."""

    given: Tensor

    def losses(self, batch: Batch, reduction: Reduction) -> tuple[Tensor, None]:
        assert reduction == "none"
        return self.given * (batch.targets != IGNORE_INDEX), None


def model_of(loss: str, **more: Any) -> Given:
    config = LlamaConfig(vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
    return Given(
        peft.get_peft_model(LlamaForCausalLM(config), peft.LoraConfig(target_modules=["q_proj"])),
        settings_of(loss, **more),
        loss_kernel="torch",
        transform=LogitTransform(),
    )


def settings_of(loss: str, **more: Any) -> PreferenceConfig:
    return PreferenceConfig(PreferenceLoss[loss], **more)


def make_batch(num_pairs: list[int], seed: int, is_paired: bool) -> Batch:
    """Sequences of so many pairs each, with a reference; the rest is padding."""
    torch.manual_seed(seed)
    lengths = [torch.randint(5, 30, (2 * num,)).tolist() for num in num_pairs]
    rows = [[(torch.arange(n).numpy() % 13, (torch.arange(n) > 2).numpy()) for n in own] for own in lengths]
    batch = lay_out(rows, LENGTH, pad_token_id=15)
    num = 2 * sum(num_pairs)
    reference = -20 * torch.rand(num, 2)
    if is_paired:
        return replace(batch, num_answers=num, reference=reference[: num // 2])
    return replace(batch, num_answers=num, reference=reference, is_good=torch.rand(num) > 0.5)


def measure(model: Given, batch: Batch, given: Tensor) -> tuple[Tensor, Tensor, dict[str, float]]:
    """Loss, gradient of the tokens' losses, and figures."""
    model.given = given.clone().requires_grad_()
    loss = model(batch)
    (grad,) = torch.autograd.grad(loss, model.given)
    sums = model.take_sums()
    assert sums is not None
    return loss.detach(), grad, model.name_figures(sums.flatten().tolist())


LOSSES = [(loss.value, {}) for loss in PreferenceLoss] + [("dpo", {"sft_weight": 0.5, "label_smoothing": 0.1})]


@pytest.mark.parametrize(("loss", "more"), LOSSES)
def test_room_changes_nothing(loss: str, more: dict[str, Any]):
    model, is_paired = model_of(loss, **more), PreferenceLoss[loss].is_paired
    model._moved(torch.zeros(1)).fill_(0.7)  # of kto: how far it is from the reference
    first, second = make_batch([3, 4], 0, is_paired), make_batch([4, 0], 1, is_paired)
    key = Key.of(first)
    assert key == Key.of(second) == Key(2, LENGTH, 16, LENGTH, 16)
    roomy = with_room(make_batch([3, 4], 0, is_paired), key, CPU)  # tensors of its own
    for seed, batch in enumerate((first, second, first)):
        given = 0.5 + torch.rand(2, LENGTH, generator=torch.Generator().manual_seed(seed))
        fill(roomy, batch)
        expected, found = measure(model, batch, given), measure(model, roomy, given)
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
        assert found[1].count_nonzero() and found[2]


class NoWaiting(TorchDispatchMode):
    """Refuses what a CUDA graph can't hold."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.partition(".")[0]
        assert name not in WAITS, f"{name} waits for the device"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("loss", "more"), LOSSES)
def test_no_loss_waits_for_the_device(loss: str, more: dict[str, Any]):
    model, is_paired = model_of(loss, **more), PreferenceLoss[loss].is_paired
    batch = make_batch([3, 4], 0, is_paired)
    roomy = with_room(batch, Key.of(batch), CPU)
    model.given = torch.rand(2, LENGTH, requires_grad=True)
    model(roomy)  # the first makes what stays
    with NoWaiting():
        model(roomy).backward()


def test_waiting_is_seen():
    with NoWaiting(), pytest.raises(AssertionError, match="waits for the device"):
        torch.ones(2).sum().item()
    with NoWaiting(), pytest.raises(AssertionError, match="waits for the device"):
        torch.ones(2).new_tensor(1.0)
    with NoWaiting(), pytest.raises(AssertionError, match="waits for the device"):
        torch.where(torch.ones(2) > 0, 1.0, -1.0)
