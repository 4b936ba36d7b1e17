"""How far a model's distribution of each token is from a teacher's, through a frozen head, in chunks of tokens.

As in head_loss.py the logits of all tokens never exist at once, and forward computes the gradient of the hidden states
in the same pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from qlora_fsdp.common.sizes import loss_chunk


@dataclass(frozen=True)
class FrozenHead:
    """A linear head that is not trained, whole on this device.

    Attributes:
        weight: [V, D] in the compute dtype.
        bias: [V]; None without one.
        factor: what hidden states are multiplied by.
        softcap: what caps the logits; None: nothing does.
    """

    weight: Tensor
    bias: Tensor | None
    factor: float
    softcap: float | None

    def first(self, num_tokens: int) -> FrozenHead:
        """The head of the first tokens of the vocabulary."""
        bias = None if self.bias is None else self.bias[:num_tokens]
        return replace(self, weight=self.weight[:num_tokens], bias=bias)


@dataclass(frozen=True)
class WholeTeacher:
    """A teacher of which all that it predicts is known.

    Attributes:
        hidden: [N, D], what its head gets of each token.
        head: its head, maybe the model's own.
    """

    hidden: Tensor
    head: FrozenHead


@dataclass(frozen=True)
class TopTeacher:
    """A teacher of which the likeliest tokens are known, and how likely all others are together.

    Attributes:
        ids: int64 [N, K], the likeliest tokens in each place.
        log_probs: float32 [N, K + 1], theirs, and last that of all others together.
        given: float32 [N], those of the tokens that stand there.
    """

    ids: Tensor
    log_probs: Tensor
    given: Tensor

    def map(self, function: Callable[[Tensor], Tensor]) -> TopTeacher:
        """The same with what a function makes of each tensor."""
        return TopTeacher(function(self.ids), function(self.log_probs), function(self.given))


def divergences(
    hidden_ND: Tensor, head: FrozenHead, teacher: WholeTeacher | TopTeacher, targets_N: Tensor, beta: float
) -> Tensor:
    """How far what is predicted for each token is from what a teacher predicts.

    Where one head has rows for more tokens than the other, which stand for none in the tokenizer that both have, these
    rows are left out.

    Args:
        hidden_ND: final hidden states in the compute dtype.
        head: the model's.
        teacher: what the teacher predicts for the same tokens.
        targets_N: int64, the tokens.
        beta: of the generalized divergence of Jensen and Shannon (arXiv:2306.13649, equation 1): 0 is the KL of the
            teacher from the model, 1 that of the model from the teacher.

    Returns:
        float32 [4, N]: divergences in nats; and, without gradient, entropies of what the model predicts, and the
        log-probabilities of the targets under the model and under the teacher.
    """
    if isinstance(teacher, WholeTeacher):
        shared = min(len(head.weight), len(teacher.head.weight))
        head = head.first(shared)
        teacher = replace(teacher, head=teacher.head.first(shared))
        if teacher.head.factor != 1.0:
            teacher = replace(teacher, hidden=teacher.hidden * teacher.head.factor)
    if head.factor != 1.0:
        hidden_ND = hidden_ND * head.factor
    found = FrozenHeadDivergence.apply(hidden_ND, head, teacher, targets_N, beta)  # type: ignore[no-untyped-call]
    return torch.stack(found)


@torch.no_grad()
def likeliest(hidden_ND: Tensor, head: FrozenHead, targets_N: Tensor, number: int) -> TopTeacher:
    """What a teacher predicts, as a file has it: the likeliest tokens and all others together.

    Args:
        hidden_ND: final hidden states in the compute dtype.
        head: the teacher's, of tokens that are compared.
        targets_N: int64, the tokens.
        number: how many of the likeliest tokens.
    """
    if head.factor != 1.0:
        hidden_ND = hidden_ND * head.factor
    chunk = loss_chunk(len(head.weight))
    found = []
    for start in range(0, len(hidden_ND), chunk):
        rows = slice(start, start + chunk)
        log_probs, _ = _log_probs(hidden_ND[rows], head)
        top, ids = log_probs.topk(number, dim=1)
        given = log_probs.gather(1, targets_N[rows].unsqueeze(1)).squeeze(1)
        others = log_probs.scatter_(1, ids, -torch.inf).logsumexp(1, keepdim=True)
        found.append(TopTeacher(ids, _finite(torch.cat([top, others], 1)), given))
    if not found:
        nothing = hidden_ND.new_zeros(0, dtype=torch.float32)
        return TopTeacher(targets_N.new_zeros(0, number), nothing.view(0, number + 1), nothing)
    return TopTeacher(
        torch.cat([part.ids for part in found]),
        torch.cat([part.log_probs for part in found]),
        torch.cat([part.given for part in found]),
    )


class FrozenHeadDivergence(torch.autograd.Function):
    """The generalized divergence of Jensen and Shannon through a frozen linear head (arXiv:2306.13649, equation 1).

    Shapes: hidden_ND; N tokens, D hidden size, V vocabulary. With p the model's probabilities, q the teacher's and
    m = (1 - beta) p + beta q, it is beta KL(q, m) + (1 - beta) KL(p, m), and at beta 0 and 1, where that is 0, KL(q, p)
    and KL(p, q). Of a teacher whose likeliest tokens alone are known it is that of the distributions over these and
    over the event that it is another one.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        head: FrozenHead,
        teacher: WholeTeacher | TopTeacher,
        targets_N: Tensor,
        beta: float,
    ) -> tuple[Tensor, ...]:
        vocab_size = len(head.weight)
        chunk = loss_chunk(vocab_size)
        grad_ND = torch.empty_like(hidden_ND) if ctx.needs_input_grad[0] else None
        found = torch.empty(4, len(hidden_ND), dtype=torch.float32, device=hidden_ND.device)
        for start in range(0, len(hidden_ND), chunk):
            rows = slice(start, start + chunk)
            own, slope = _log_probs(hidden_ND[rows], head)
            index = targets_N[rows].clamp(max=vocab_size - 1).unsqueeze(1)
            found[2, rows] = own.gather(1, index).squeeze(1)
            probs = own.exp()
            found[1, rows] = -(probs * own).sum(1)
            if isinstance(teacher, WholeTeacher):
                teachers, _ = _log_probs(teacher.hidden[rows], teacher.head)
                found[3, rows] = teachers.gather(1, index).squeeze(1)
                found[0, rows], grad = _divergences(own, teachers, probs, beta)
                del teachers
            else:
                found[3, rows] = teacher.given[rows]
                found[0, rows], grad = _top_divergences(own, teacher.ids[rows], teacher.log_probs[rows], beta)
            del own, probs
            if grad_ND is not None:
                if slope is not None:
                    grad.mul_(slope)
                grad_ND[rows] = grad.to(head.weight.dtype) @ head.weight
            del grad, slope  # or they would be there while the next chunk is made
        ctx.save_for_backward(grad_ND)
        result, *others = found.unbind()
        ctx.mark_non_differentiable(*others)
        return (result, *others)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad_ND,) = ctx.saved_tensors
        grad = (grad_ND.float() * grads[0].unsqueeze(1)).to(grad_ND.dtype)
        return grad, None, None, None, None


def _log_probs(hidden_ND: Tensor, head: FrozenHead) -> tuple[Tensor, Tensor | None]:
    """Log-probabilities float32 [N, V], finite; and the slope of capped logits, None where there is no cap."""
    logits = F.linear(hidden_ND, head.weight, head.bias).float()
    slope = None
    if head.softcap is not None:
        logits.div_(head.softcap).tanh_()
        slope = 1.0 - logits**2
        logits.mul_(head.softcap)
    return _finite(logits.log_softmax(1)), slope


def _finite(log_probs: Tensor) -> Tensor:
    """Log-probabilities, changed in place, none of which is -inf: 0 times that would be NaN."""
    return log_probs.clamp_(min=torch.finfo(torch.float32).min)


def _divergences(own: Tensor, teachers: Tensor, probs: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """The divergence of each token [N], and its gradient by the model's logits [N, V].

    Args:
        own: the model's log-probabilities, [N, V].
        teachers: the teacher's.
        probs: the model's probabilities.
        beta: see `FrozenHeadDivergence`.
    """
    if beta == 0.0:
        teachers_probs = teachers.exp()
        return (teachers_probs * (teachers - own)).sum(1), probs - teachers_probs
    if beta == 1.0:
        slopes = own - teachers
        found = (probs * slopes).sum(1)
        return found, probs * (slopes - found.unsqueeze(1))
    mixed = torch.logaddexp(own + math.log1p(-beta), teachers + math.log(beta))
    slopes = (own - mixed).mul_(1.0 - beta)
    by_own = (probs * slopes).sum(1)
    by_teacher = (teachers.exp() * (teachers - mixed)).sum(1)
    return beta * by_teacher + by_own, probs * (slopes - by_own.unsqueeze(1))


def _top_divergences(own: Tensor, ids: Tensor, teachers: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """As `_divergences`, over the teacher's likeliest tokens and the event that it is another one.

    That event's logit is the logarithm of the sum of the exponentials of all others' logits. So its gradient is divided
    among these by their shares.

    Args:
        own: the model's log-probabilities, [N, V].
        ids: the likeliest tokens, [N, K].
        teachers: their log-probabilities and that of the event, [N, K + 1].
        beta: see `FrozenHeadDivergence`.
    """
    others = _finite(own.scatter(1, ids, -torch.inf).logsumexp(1, keepdim=True))
    of_events = torch.cat([own.gather(1, ids), others], 1)
    found, event_grad = _divergences(of_events, _finite(teachers.clone()), of_events.exp(), beta)
    grad = (own - others).exp_().mul_(event_grad[:, -1:])
    return found, grad.scatter_(1, ids, event_grad[:, :-1])
