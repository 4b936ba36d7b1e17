"""The losses of answers that the model has written itself, from log-probabilities and advantages.

Formulas, names of settings and names of figures are those of TRL's GRPOTrainer and RLOOTrainer. N stands for the tokens
of a batch, R for its rows; a row is a prompt with one answer.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from qlora_fsdp.config.schema import GrpoConfig, PolicyLoss, SamplingLevel
from qlora_fsdp.data.batch import Batch
from qlora_fsdp.model.tasks.mismatch import MISMATCH, count_bins
from qlora_fsdp.model.tasks.referenced import SumRows


@dataclass(frozen=True)
class Answers:
    """The tokens of a batch, and what is known of them.

    Attributes:
        logps: float32 [N], log-probabilities under the model, with gradient.
        entropies: float32 [N], of what was predicted in their place.
        batch: has advantages, weights, and log-probabilities of before.
    """

    logps: Tensor
    entropies: Tensor
    batch: Batch

    @cached_property
    def weights(self) -> Tensor:
        """What each token counts in the loss, [N]."""
        return self._of_tokens("weights")

    @cached_property
    def mask(self) -> Tensor:
        """1 for tokens that count, float32 [N]."""
        return (self.weights > 0).float()

    @cached_property
    def old(self) -> Tensor:
        """Log-probabilities before the first step on these answers, [N]."""
        rewarded = self.batch.rewarded
        assert rewarded is not None
        return self.logps.detach() if rewarded.old is None else rewarded.old.flatten()

    @cached_property
    def sampled(self) -> Tensor:
        """The log-probabilities with which tokens were drawn, [N]."""
        return self._of_tokens("sampled")

    @cached_property
    def reference(self) -> Tensor:
        """Log-probabilities under the reference, [N]."""
        return self._of_tokens("reference")

    @cached_property
    def advantages(self) -> Tensor:
        """Of each row's answer, [R]."""
        assert self.batch.rewarded is not None
        own = self.batch.rewarded.advantages
        room = len(self.batch.sequence_starts) - 1 - len(own)  # for rows without tokens (capture/passes.py)
        return torch.nn.functional.pad(own, (0, room))

    @cached_property
    def row_of_token(self) -> Tensor:
        """int64 [N]."""
        starts = self.batch.sequence_starts.long()
        tokens = torch.arange(self.logps.shape[0], device=starts.device)
        return torch.searchsorted(starts, tokens, right=True) - 1

    def sum_rows(self, *values: Tensor) -> Tensor:
        """Sums of K values [N] over the tokens of each row: [K, R]."""
        stacked = torch.stack(values)
        starts, longest = self.batch.sequence_starts, self.batch.max_row_length
        return SumRows.apply(stacked, starts, longest)  # type: ignore[no-any-return,no-untyped-call]

    def _of_tokens(self, name: str) -> Tensor:
        found: Tensor = getattr(self.batch.rewarded, name)
        return found.flatten()


def policy_figures(settings: GrpoConfig) -> tuple[str, ...]:
    """Names of what `policy_loss` measures besides the loss, in their order, without those of bins."""
    names = ["entropy", f"{MISMATCH}/mean"]
    if settings.beta > 0:
        names.append("kl")
    if settings.loss_type is PolicyLoss.cispo:
        names.append("cispo_clip_ratio")
    else:
        names += [f"clip_ratio/{side}_mean" for side in ("low", "high", "region")]
    if _is_corrected(settings):
        names.append("sampling/importance_sampling_ratio/mean")
    return tuple(names)


def policy_loss(answers: Answers, settings: GrpoConfig) -> tuple[Tensor, Tensor]:
    """The loss of a batch, a scalar, and its figures.

    Returns:
        The sum over tokens of loss times weight, of rloo the sum over rows; and float64 [K, 2], for each of
        `policy_figures` and then for each bin of the mismatch the sum of values, and how many these are.
    """
    mask = answers.mask
    log_ratios = (answers.logps - answers.old) * mask
    is_of_rows = settings.importance_sampling_level is SamplingLevel.sequence
    is_rloo = settings.loss_type is PolicyLoss.rloo
    if is_rloo or is_of_rows:
        sums, counts = answers.sum_rows(log_ratios, mask)
        ratios = torch.exp(sums if is_rloo else sums / counts.clamp(min=1.0))
        advantages = answers.advantages
        counted = (counts > 0).float()
    else:
        ratios = torch.exp(log_ratios)
        advantages = answers.advantages[answers.row_of_token]
        counted = mask

    corrections = torch.ones_like(mask)
    if _is_corrected(settings):
        corrections = torch.exp((answers.old - answers.sampled) * mask).clamp(max=settings.importance_sampling_clip_max)
    weights = answers.weights * corrections

    high = settings.used_epsilon_high
    clipped: list[Tensor]
    if settings.loss_type is PolicyLoss.cispo:
        factors = ratios.clamp(max=high).detach() * advantages
        by_token = factors[answers.row_of_token] if is_of_rows else factors
        loss = -(by_token * answers.logps * weights).sum()
        clipped = [(ratios > high) & (advantages > 0)]
    else:
        losses, clipped = _clipped_losses(ratios, advantages, settings)
        if is_rloo:
            loss = losses.sum()
        elif is_of_rows:
            (row_weights,) = answers.sum_rows(weights)
            loss = (losses * row_weights).sum()
        else:
            loss = (losses * weights).sum()

    divergence: list[tuple[Tensor, Tensor]] = []
    if settings.beta > 0 and is_rloo:  # which is part of the reward
        divergence.append(((answers.old - answers.reference) * mask, mask))
    elif settings.beta > 0:
        kl = _divergences(answers, ratios, settings, is_of_rows)
        loss = loss + settings.beta * (kl * answers.weights).sum()
        divergence.append((kl * mask, mask))

    mismatch = (answers.old - answers.sampled).abs() * mask
    found = [(answers.entropies * mask, mask), (mismatch, mask), *divergence]
    found += [(is_clipped.float() * counted, counted) for is_clipped in clipped]
    if _is_corrected(settings):
        found.append((corrections * mask, mask))
    sums = torch.stack([torch.stack([value.double().sum(), count.double().sum()]) for value, count in found])
    return loss, torch.cat([sums, count_bins(mismatch, mask)]).detach()


def _clipped_losses(ratios: Tensor, advantages: Tensor, settings: GrpoConfig) -> tuple[Tensor, list[Tensor]]:
    """PPO's losses (arXiv:1707.06347, equation 7), and where ratios are clipped below, above, and at either side."""
    low = 1 - settings.epsilon
    high = 1 + settings.used_epsilon_high
    within = ratios.clamp(low, high)
    limited = ratios if settings.delta is None else ratios.clamp(max=settings.delta)
    losses = -torch.min(limited * advantages, within * advantages)
    is_low = (limited < low) & (advantages < 0)
    is_high = (limited > high) & (advantages > 0)
    return losses, [is_low, is_high, is_low | is_high]


def _divergences(answers: Answers, ratios: Tensor, settings: GrpoConfig, is_of_rows: bool) -> Tensor:
    """The divergence of each token from the reference, [N], with gradient; at least 0 (k3)."""
    apart = (answers.reference - answers.logps) * answers.mask
    divergences = torch.exp(apart) - apart - 1
    if not settings.use_bias_correction_kl:
        return divergences
    return divergences * (_spread(ratios, answers) if is_of_rows else ratios)


def _spread(values_R: Tensor, answers: Answers) -> Tensor:
    """Each row's value for all of its tokens, [N], with a gradient whose sums have one order."""
    return SpreadRows.apply(values_R, answers)  # type: ignore[no-any-return,no-untyped-call]


class SpreadRows(torch.autograd.Function):
    """values [R] to [N], each token its row's. Backward sums over rows as `SumRows` does, always in the same order."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, values_R: Tensor, answers: Answers) -> Tensor:
        ctx.answers = answers  # type: ignore[attr-defined]
        return values_R[answers.row_of_token]

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *grads: Tensor) -> tuple[Tensor, None]:
        answers: Answers = ctx.answers  # type: ignore[attr-defined]
        return answers.sum_rows(grads[0])[0], None


def _is_corrected(settings: GrpoConfig) -> bool:
    """Whether tokens are weighed by their probability in training over the one that they were drawn with."""
    return settings.importance_sampling_correction and settings.loss_type is not PolicyLoss.rloo
