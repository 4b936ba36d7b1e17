"""The head's loss against plain cross-entropy in float64."""

from __future__ import annotations

import pytest
import torch
from tests.helpers.quantized import make_quantized
from torch import Tensor, nn
from torch.nn import functional as F

from qlora_fsdp.common import sizes
from qlora_fsdp.layers.head_loss import LogitTransform
from qlora_fsdp.layers.quantized.format import Format
from qlora_fsdp.layers.rewire import attach_loss, use_head_pieces
from qlora_fsdp.runtime import rows


def reference(
    hidden: Tensor, targets: Tensor, head: nn.Linear, softcap: float | None, factor: float, smoothing: float = 0.0
) -> tuple[Tensor, list[Tensor]]:
    """The summed loss and its gradients by the hidden states and the head's parameters, in float64, by autograd."""
    leaves = [tensor.detach().double().requires_grad_() for tensor in (hidden, *head.parameters())]
    hidden, *parameters = leaves
    logits = factor * F.linear(hidden, *parameters)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    flat = logits.flatten(0, 1)
    loss = F.cross_entropy(flat, targets.flatten(), ignore_index=-100, reduction="sum", label_smoothing=smoothing)
    (3 * loss).backward()
    return loss.detach(), [leaf.grad for leaf in leaves]


@pytest.mark.parametrize("is_frozen", [True, False])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("factor", [1.0, 0.25])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("num_tokens", [64, 60])  # chunks of 32 that fit, and that do not
def test_loss_and_gradient(
    monkeypatch, is_frozen: bool, softcap: float | None, factor: float, bias: bool, num_tokens: int
):
    monkeypatch.setattr(sizes, "MIN_CHUNK", 32)
    monkeypatch.setattr(sizes, "LOGITS_BYTES", 1)
    torch.manual_seed(0)
    head = nn.Linear(16, 50, bias=bias).requires_grad_(not is_frozen)
    hidden = torch.randn(2, num_tokens // 2, 16, requires_grad=True)
    targets = torch.randint(0, 50, (2, num_tokens // 2))
    targets[0, :20] = -100
    targets[1, -1] = -100
    if factor != 1.0 and bias:
        pytest.skip("a head with a bias has no factor")
    expected, expected_grads = reference(hidden, targets, head, softcap, factor)
    attach_loss(head, LogitTransform(factor, softcap))

    loss = head(hidden, targets)
    (3 * loss).backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    found = [hidden] if is_frozen else [hidden, *head.parameters()]
    for tensor, expected_grad in zip(found, expected_grads, strict=not is_frozen):
        torch.testing.assert_close(tensor.grad.double(), expected_grad, rtol=1e-5, atol=1e-6)
    hidden.grad = None
    losses, entropies = head(hidden, targets, "with_entropy")
    (3 * losses.sum()).backward()
    torch.testing.assert_close(hidden.grad.double(), expected_grads[0], rtol=1e-5, atol=1e-6)
    assert losses.sum().item() == pytest.approx(expected.item(), rel=1e-6)
    logits = factor * F.linear(hidden.detach(), *head.parameters()).double()
    capped = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    wanted = torch.distributions.Categorical(logits=capped).entropy() * (targets != -100)
    torch.testing.assert_close(entropies.detach().double(), wanted, rtol=1e-5, atol=1e-5)
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


@pytest.mark.parametrize("is_frozen", [True, False])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_label_smoothing(monkeypatch, is_frozen: bool, softcap: float | None):
    monkeypatch.setattr(sizes, "MIN_CHUNK", 32)
    monkeypatch.setattr(sizes, "LOGITS_BYTES", 1)
    torch.manual_seed(0)
    head = nn.Linear(16, 50, bias=False).requires_grad_(not is_frozen)
    hidden = torch.randn(2, 30, 16, requires_grad=True)
    targets = torch.randint(0, 50, (2, 30))
    targets[0, :20] = -100
    expected, expected_grads = reference(hidden, targets, head, softcap, 1.0, smoothing=0.3)
    attach_loss(head, LogitTransform(1.0, softcap))
    loss = head(hidden, targets, "sum", 0.3)
    (3 * loss).backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    torch.testing.assert_close(hidden.grad.double(), expected_grads[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("smoothing", [0.0, 0.3])
@pytest.mark.parametrize("bias", [False, True])
def test_an_int8_head_in_pieces_gives_the_loss_of_the_whole(
    monkeypatch, dtype: torch.dtype, softcap: float | None, smoothing: float, bias: bool
):
    """Pieces of 7 rows of 50, chunks of 32 tokens of 60; against the whole dequantized head in float64."""
    monkeypatch.setattr(sizes, "MIN_CHUNK", 32)
    monkeypatch.setattr(sizes, "LOGITS_BYTES", 1)
    monkeypatch.setattr(rows, "PIECE_BYTES", 7 * 16)
    torch.manual_seed(0)
    head = make_quantized(torch.randn(50, 16, dtype=dtype), Format("int8"), bias)
    whole = nn.Linear(16, 50, bias=bias)
    whole.weight.data = head.dequantize()
    if bias:
        whole.bias.data = head.bias.data
    hidden = torch.randn(2, 30, 16).to(dtype).requires_grad_()
    targets = torch.randint(0, 50, (2, 30))
    targets[0, :20] = -100
    expected, expected_grads = reference(hidden, targets, whole, softcap, 1.0, smoothing)
    attach_loss(head, LogitTransform(1.0, softcap))
    found = []
    for in_pieces in (False, True):
        use_head_pieces(head, in_pieces)
        hidden.grad = None
        losses, entropies = head(hidden, targets, "with_entropy", smoothing)
        (3 * losses.sum()).backward()
        found.append((losses.detach(), entropies.detach(), hidden.grad.double()))
    tolerance = 1e-5 if dtype is torch.float32 else 0.03
    torch.testing.assert_close(found[1], found[0], rtol=tolerance, atol=tolerance)
    assert found[1][0].sum().item() == pytest.approx(expected.item(), rel=1e-6 if dtype is torch.float32 else 1e-2)
    scale = expected_grads[0].abs().max().item()
    errors = [(grad - expected_grads[0]).abs().max().item() for *_, grad in found]
    assert errors[1] <= max(1e-5 * scale, 1.2 * errors[0]), "no further from the truth than the whole head's"
