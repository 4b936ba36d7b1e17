"""The losses of pairs and of single answers, as functions of log-probabilities. Formulas and names are those of TRL.

A log-probability here is the sum over the tokens of an answer of log p(token | what stands before it), natural, in
float32. "The reference" is the model before training. P stands for pairs, N for answers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F
from typing_extensions import assert_never

from qlora_fsdp.config.schema import PreferenceConfig, PreferenceLoss

PAIR_FIGURES = (
    "rewards/chosen",
    "rewards/rejected",
    "rewards/margins",
    "rewards/accuracies",
    "logps/chosen",
    "logps/rejected",
)
# The margin of single answers is that of the two means, so it is made of these when all are known.
JUDGED_FIGURES = ("rewards/chosen", "rewards/rejected", "logps/chosen", "logps/rejected", "kl")


@dataclass(frozen=True)
class Pairs:
    """Pairs of answers.

    Attributes:
        logps: float32 [P, 2], log-probabilities of the chosen and of the rejected answers.
        num_tokens: float32 [P, 2], tokens of the answers, at least 1.
        reference: float32 [P, 2], the log-probabilities under the reference; None for a loss that needs none.
    """

    logps: Tensor
    num_tokens: Tensor
    reference: Tensor | None


def figure_names(settings: PreferenceConfig) -> tuple[str, ...]:
    """Names of what `pair_losses` or `judged_losses` measure besides the loss, in their order."""
    if not settings.loss.is_paired:
        return JUDGED_FIGURES
    more = ["nll_loss"] if settings.used_sft_weight else []
    more += ["log_odds_ratio", "log_odds_chosen"] if settings.loss is PreferenceLoss.orpo else []
    return (*PAIR_FIGURES, *more)


def pair_losses(pairs: Pairs, settings: PreferenceConfig) -> tuple[Tensor, Tensor]:
    """The loss of each pair, float32 [P], and the figures of each in the order of `figure_names`, [K, P]."""
    scores = pairs.logps if pairs.reference is None else pairs.logps - pairs.reference
    logps = pairs.logps
    if settings.loss in (PreferenceLoss.simpo, PreferenceLoss.orpo):  # means over tokens, and called logps, as in TRL
        scores = logps = pairs.logps / pairs.num_tokens
    more: list[Tensor] = []
    losses = _losses(scores, pairs.num_tokens, settings)
    if settings.used_sft_weight:
        nll = -pairs.logps[:, 0] / pairs.num_tokens[:, 0]
        losses = losses + settings.used_sft_weight * nll
        more.append(nll)
    if settings.loss is PreferenceLoss.orpo:
        log_odds = _log_odds(scores)
        more += [F.logsigmoid(log_odds), log_odds]
    rewards = settings.used_beta * scores
    margins = rewards[:, 0] - rewards[:, 1]
    figures = [*rewards.unbind(1), margins, (margins > 0).float(), *logps.unbind(1), *more]
    return losses, torch.stack(figures).detach()


def _losses(scores_P2: Tensor, num_tokens_P2: Tensor, settings: PreferenceConfig) -> Tensor:
    """The preference's part of each pair's loss, [P], from the answers' scores.

    A score is the log-probability over the reference's; its mean over tokens for simpo and orpo, which have none.
    """
    beta, smoothing = settings.used_beta, settings.label_smoothing
    margins = scores_P2[:, 0] - scores_P2[:, 1]
    match settings.loss:
        case PreferenceLoss.dpo | PreferenceLoss.cpo:
            return _smoothed(beta * margins, smoothing)
        case PreferenceLoss.simpo:
            return _smoothed(beta * margins - settings.simpo_gamma, smoothing)
        case PreferenceLoss.robust:  # equation 13: unbiased if labels are swapped with this probability
            kept, swapped = F.logsigmoid(beta * margins), F.logsigmoid(-beta * margins)
            return ((1 - smoothing) * -kept + smoothing * swapped) / (1 - 2 * smoothing)
        case PreferenceLoss.hinge:
            return torch.relu(1 - beta * margins)
        case PreferenceLoss.ipo:  # with means over tokens, as its authors use it (see TRL)
            means = scores_P2 / num_tokens_P2
            return (means[:, 0] - means[:, 1] - 1 / (2 * beta)) ** 2
        case PreferenceLoss.orpo:
            return -beta * F.logsigmoid(_log_odds(scores_P2))
        case PreferenceLoss.kto:
            raise AssertionError("answers of kto are in no pairs")
        case _:
            assert_never(settings.loss)


def _smoothed(logits: Tensor, smoothing: float) -> Tensor:
    """-log sigmoid, of which a part counts for swapped answers."""
    return -(1 - smoothing) * F.logsigmoid(logits) - smoothing * F.logsigmoid(-logits)


def _log_odds(means_P2: Tensor) -> Tensor:
    """log(odds of chosen / odds of rejected), with odds p / (1 - p) of mean log-probabilities log p < 0."""
    log_one_minus = torch.log(-torch.expm1(means_P2))
    odds = means_P2 - log_one_minus
    return odds[:, 0] - odds[:, 1]


def judged_losses(
    logps: Tensor, reference: Tensor, is_good: Tensor, kl: Tensor, settings: PreferenceConfig
) -> tuple[Tensor, Tensor, Tensor]:
    """KTO's loss of each answer (equation 8), its figures, and which answers each figure is about.

    Args:
        logps: float32 [N].
        reference: float32 [N], under the reference.
        is_good: bool [N], the labels.
        kl: the scalar KTO compares with: how far the model is from the reference on answers that belong to no prompt.
        settings: `preference`.

    Returns:
        Losses [N]; values [K, N] and bool [K, N] in the order of `figure_names` without `kl`.
    """
    ratios = logps - reference
    signs = 2 * is_good.float() - 1  # numbers as arguments of `where` would be copied from the host
    weights = settings.desirable_weight * is_good + settings.undesirable_weight * ~is_good
    losses = weights * (1 - torch.sigmoid(settings.used_beta * signs * (ratios - kl)))
    rewards = settings.used_beta * ratios
    values = torch.stack([rewards, rewards, logps, logps]).detach()
    return losses, values, torch.stack([is_good, ~is_good, is_good, ~is_good])
