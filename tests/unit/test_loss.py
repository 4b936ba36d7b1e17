"""The head's loss against plain cross-entropy in float64, and packed rows that must not see one another."""

from __future__ import annotations

import numpy as np
import peft
import pytest
import torch
from tests.helpers.checkpoints import FAMILIES, SHAPE
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM

from qlora_fsdp.common import sizes
from qlora_fsdp.common.errors import ConfigError
from qlora_fsdp.common.families import PACKED_FAMILIES
from qlora_fsdp.data.batch import collate
from qlora_fsdp.data.cache import TokenizedRows
from qlora_fsdp.data.sequences import SequenceSettings, make_sequences
from qlora_fsdp.layers.attention import check_packing
from qlora_fsdp.layers.rewire import attach_loss
from qlora_fsdp.model.causal_lm import CausalLM


def reference(hidden: Tensor, targets: Tensor, head: nn.Linear, softcap: float | None) -> tuple[Tensor, list[Tensor]]:
    """The summed loss and its gradients by the hidden states and the head's parameters, in float64, by autograd."""
    leaves = [tensor.detach().double().requires_grad_() for tensor in (hidden, *head.parameters())]
    hidden, *parameters = leaves
    logits = F.linear(hidden, *parameters)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum")
    (3 * loss).backward()
    return loss.detach(), [leaf.grad for leaf in leaves]


@pytest.mark.parametrize("is_frozen", [True, False])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("num_tokens", [64, 60])  # chunks of 32 that fit, and that do not
def test_loss_and_gradient(monkeypatch, is_frozen: bool, softcap: float | None, bias: bool, num_tokens: int):
    monkeypatch.setattr(sizes, "MIN_CHUNK", 32)
    monkeypatch.setattr(sizes, "LOGITS_BYTES", 1)
    torch.manual_seed(0)
    head = nn.Linear(16, 50, bias=bias).requires_grad_(not is_frozen)
    hidden = torch.randn(2, num_tokens // 2, 16, requires_grad=True)
    targets = torch.randint(0, 50, (2, num_tokens // 2))
    targets[0, :20] = -100
    targets[1, -1] = -100
    expected, expected_grads = reference(hidden, targets, head, softcap)
    attach_loss(head, softcap)

    loss = head(hidden, targets)
    (3 * loss).backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    found = [hidden] if is_frozen else [hidden, *head.parameters()]
    for tensor, expected_grad in zip(found, expected_grads, strict=not is_frozen):
        torch.testing.assert_close(tensor.grad.double(), expected_grad, rtol=1e-5, atol=1e-6)
    with torch.no_grad():
        assert head(hidden, targets).item() == pytest.approx(expected.item(), rel=1e-6)
        assert head(hidden).shape == (2, num_tokens // 2, 50)


def test_no_target_is_no_loss():
    head = nn.Linear(16, 50).requires_grad_(False)
    hidden = torch.randn(1, 8, 16, requires_grad=True)
    attach_loss(head)
    loss = head(hidden, torch.full((1, 8), -100))
    loss.backward()
    assert loss.item() == 0 and not hidden.grad.any()


def batch_of(*rows: list[int]):
    """Rows packed into one sequence of 64 tokens, with a target at every token of the second row alone."""
    masks = [np.full(len(row), index == 1) for index, row in enumerate(rows)]
    stored = TokenizedRows(
        tokens=np.concatenate(rows).astype(np.int32),
        is_target=np.concatenate(masks),
        starts=np.cumsum([0, *map(len, rows)]).astype(np.int64),
        num_targets=np.array([mask[1:].sum() for mask in masks], dtype=np.int32),
    )
    sequences = make_sequences(stored, np.arange(len(rows)), SequenceSettings(64, 258, packing=False, seed=0))
    packed = type(sequences)(stored, sequences.row_ids, np.array([0, len(rows)]), 64, 258, True)
    return collate(packed, np.array([0]), micro_batch_size=1)


@pytest.mark.parametrize("family", sorted(PACKED_FAMILIES))
def test_packed_rows_do_not_see_one_another(family: str):
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **{**SHAPE, **FAMILIES[family]}, initializer_range=0.1)
    attention = "eager" if family == "gemma2" else "sdpa"
    base = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    model = CausalLM(peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules="all-linear")))
    first, second, third = [list(range(start, start + 20)) for start in (10, 50, 90)]
    with torch.no_grad():
        packed = model(batch_of(first, second, third)).item()
        assert model(batch_of(first[::-1], second, third)).item() == packed
        assert model(batch_of(first, second, third[::-1])).item() == packed
        alone = model.base(input_ids=torch.tensor([second])).logits[0, :-1]
    expected = F.cross_entropy(alone.double(), torch.tensor(second[1:]), reduction="sum")
    assert packed == pytest.approx(expected.item(), abs=1e-4)


def test_packing_is_refused_where_it_was_not_tested():
    with pytest.raises(ConfigError, match=r"training.packing=true .* model_type=bert"):
        check_packing(True, AutoConfig.for_model("bert"))
    check_packing(False, AutoConfig.for_model("bert"))
