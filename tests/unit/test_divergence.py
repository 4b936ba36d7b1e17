"""The divergence from a teacher through a frozen head: values and gradients are those of torch's own functions."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from qlora_fsdp.layers.divergence import FrozenHead, TopTeacher, WholeTeacher, divergences, likeliest

NUM_TOKENS, VOCAB = 7, 40


def made(cap: float | None = None) -> tuple[Tensor, FrozenHead, Tensor, FrozenHead, Tensor]:
    """Hidden states and a head of a model and of a wider teacher with a larger table; targets."""
    torch.manual_seed(0)
    own = FrozenHead(torch.randn(VOCAB, 16), torch.randn(VOCAB), 0.5, cap)
    teachers = FrozenHead(torch.randn(VOCAB + 8, 24), None, 0.3, None)
    hidden, theirs = torch.randn(NUM_TOKENS, 16, requires_grad=True), torch.randn(NUM_TOKENS, 24)
    return hidden, own, theirs, teachers, torch.randint(0, VOCAB, (NUM_TOKENS,))


def log_probs(hidden: Tensor, head: FrozenHead) -> Tensor:
    logits = hidden * head.factor @ head.weight[:VOCAB].T
    logits = logits if head.bias is None else logits + head.bias
    if head.softcap is not None:
        logits = head.softcap * torch.tanh(logits / head.softcap)
    return logits.log_softmax(1)


def generalized(own: Tensor, theirs: Tensor, beta: float) -> Tensor:
    if beta == 0:
        return (theirs.exp() * (theirs - own)).sum(1)
    if beta == 1:
        return (own.exp() * (own - theirs)).sum(1)
    mixed = ((1 - beta) * own.exp() + beta * theirs.exp()).log()
    return beta * (theirs.exp() * (theirs - mixed)).sum(1) + (1 - beta) * (own.exp() * (own - mixed)).sum(1)


def events(values: Tensor, ids: Tensor) -> Tensor:
    """Log-probabilities of some tokens, and of all others together."""
    return torch.cat([values.gather(1, ids), values.scatter(1, ids, -torch.inf).logsumexp(1, keepdim=True)], 1)


@pytest.mark.parametrize("cap", [None, 2.0])
@pytest.mark.parametrize("number", [None, 5, VOCAB - 1])
@pytest.mark.parametrize("beta", [0.0, 0.4, 1.0])
def test_values_and_gradients_are_autograds(beta: float, number: int | None, cap: float | None) -> None:
    """Of a teacher of which some tokens are known, it is the divergence over these and the event of another one."""
    hidden, head, theirs, teachers_head, targets = made(cap)
    teacher: WholeTeacher | TopTeacher = WholeTeacher(theirs, teachers_head)
    own, of_teacher = log_probs(hidden, head), log_probs(theirs, teachers_head)
    expected = generalized(own, of_teacher, beta)
    if number is not None:
        teacher = likeliest(theirs, teachers_head.first(VOCAB), targets, number)
        torch.testing.assert_close(teacher.log_probs, events(of_teacher, teacher.ids))
        expected = generalized(events(own, teacher.ids), teacher.log_probs, beta)
    found = divergences(hidden, head, teacher, targets, beta)
    torch.testing.assert_close(found[0], expected)
    torch.testing.assert_close(found[1], -(own.exp() * own).sum(1).detach())
    for row, values in ((2, own), (3, of_teacher)):
        torch.testing.assert_close(found[row], values.gather(1, targets[:, None])[:, 0].detach())
    weights = torch.rand(NUM_TOKENS)
    (gradient,) = torch.autograd.grad((found[0] * weights).sum(), hidden, retain_graph=True)
    (wanted,) = torch.autograd.grad((expected * weights).sum(), hidden)
    torch.testing.assert_close(gradient, wanted)


def test_no_probability_is_too_small() -> None:
    """Where all others together have none, neither values nor gradients are NaN."""
    hidden, head, _, _, targets = made()
    sure = torch.full((NUM_TOKENS, 3), -torch.inf)
    sure[:, 0] = 0
    ids = torch.arange(2).expand(NUM_TOKENS, 2)
    for beta in (0.0, 0.5, 1.0):
        found = divergences(hidden * 1e3, head, TopTeacher(ids, sure, sure[:, 0]), targets, beta)
        (gradient,) = torch.autograd.grad(found[0].clamp(max=1e30).sum(), hidden)
        assert found.isfinite().all() and gradient.isfinite().all()
