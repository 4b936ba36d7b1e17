"""How far a model's distribution of each token is from a teacher's, through their head, in chunks of tokens.

As in head_loss.py the logits of all tokens never exist at once, and forward computes the gradient of the hidden states
in the same pass.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


class FrozenHeadDivergence(torch.autograd.Function):
    """The generalized divergence of Jensen and Shannon through a frozen linear head (arXiv:2306.13649, equation 1).

    Shapes: hidden_ND, teacher_ND, weight_VD; N tokens, D hidden size, V vocabulary. With p the model's probabilities, q
    the teacher's and m = (1 - beta) p + beta q, it is beta KL(q, m) + (1 - beta) KL(p, m), and at beta 0 and 1, where
    that is 0, KL(q, p) and KL(p, q).
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        teacher_ND: Tensor,
        weight_VD: Tensor,
        bias: Tensor | None,
        targets_N: Tensor,
        softcap: float | None,
        beta: float,
        chunk: int,
    ) -> tuple[Tensor, ...]:
        grad_ND = torch.empty_like(hidden_ND) if ctx.needs_input_grad[0] else None
        found = torch.empty(4, len(hidden_ND), dtype=torch.float32, device=hidden_ND.device)
        for start in range(0, len(hidden_ND), chunk):
            rows = slice(start, start + chunk)
            own, slope = _log_probs(hidden_ND[rows], weight_VD, bias, softcap)
            teachers, _ = _log_probs(teacher_ND[rows], weight_VD, bias, softcap)
            index = targets_N[rows].unsqueeze(1)
            found[2, rows] = own.gather(1, index).squeeze(1)
            found[3, rows] = teachers.gather(1, index).squeeze(1)
            probs = own.exp()
            found[1, rows] = -(probs * own).sum(1)
            found[0, rows], grad = _divergences(own, teachers, probs, beta)
            del own, teachers, probs
            if grad_ND is not None:
                if slope is not None:
                    grad.mul_(slope)
                grad_ND[rows] = grad.to(weight_VD.dtype) @ weight_VD
            del grad, slope  # or they would be there while the next chunk is made
        ctx.save_for_backward(grad_ND)
        divergences, *others = found.unbind()
        ctx.mark_non_differentiable(*others)
        return (divergences, *others)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad_ND,) = ctx.saved_tensors
        grad = (grad_ND.float() * grads[0].unsqueeze(1)).to(grad_ND.dtype)
        return grad, None, None, None, None, None, None, None


def _log_probs(
    hidden_ND: Tensor, weight_VD: Tensor, bias: Tensor | None, softcap: float | None
) -> tuple[Tensor, Tensor | None]:
    """Log-probabilities float32 [N, V], finite; and the slope of capped logits, None where there is no cap."""
    logits = F.linear(hidden_ND, weight_VD, bias).float()
    slope = None
    if softcap is not None:
        logits.div_(softcap).tanh_()
        slope = 1.0 - logits**2
        logits.mul_(softcap)
    return logits.log_softmax(1).clamp_(min=torch.finfo(torch.float32).min), slope  # 0 times -inf would be NaN


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
