"""How much better an answer is than others to the same prompt, as TRL computes it; and figures of rewards."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from qlora_fsdp.config.schema import GrpoConfig, PolicyLoss, ScaleRewards

Numbers = NDArray[np.float64]
LEAST_SPREAD = 1e-4  # TRL's, which is added to what is divided by


def weighted_rewards(by_function: Numbers, weights: Sequence[float] | None) -> Numbers:
    """The sum of each answer's rewards, [num_answers]; NaN where no function had anything to say.

    Args:
        by_function: [num_answers, num_functions]; NaN: nothing to say.
        weights: what each function's are multiplied by; None: 1.
    """
    factors = np.ones(by_function.shape[1]) if weights is None else np.array(weights)
    sums: Numbers = np.nansum(by_function * factors, axis=1)
    sums[np.isnan(by_function).all(1)] = np.nan
    return sums


def advantages_of(rewards: Numbers, num_generations: int, settings: GrpoConfig) -> Numbers:
    """The advantage of each answer, [num_answers]; 0 for those without a reward.

    Args:
        rewards: [num_answers], those to one prompt side by side; NaN: none.
        num_generations: answers to each prompt.
        settings: the loss. rloo compares an answer with the mean of the others (arXiv:2402.14740); all others with the
            mean of its group (arXiv:2402.03300), divided by `scale_rewards`.
    """
    groups = rewards.reshape(-1, num_generations)
    if settings.loss_type is PolicyLoss.rloo:
        is_there = ~np.isnan(groups)
        others = is_there.sum(1, keepdims=True) - 1
        sums = np.nansum(groups, 1, keepdims=True)
        baselines = (sums - np.nan_to_num(groups)) / np.maximum(others, 1)
        advantages = np.where(others > 0, groups - baselines, 0.0).flatten()
        if settings.normalize_advantages:
            advantages = (advantages - mean_of(advantages)) / (spread_of(advantages) + LEAST_SPREAD)
        return np.nan_to_num(advantages)
    advantages = groups - _over_groups(groups, mean_of)
    match settings.scale_rewards:
        case ScaleRewards.group:
            advantages = advantages / (_over_groups(groups, spread_of) + LEAST_SPREAD)
        case ScaleRewards.batch:
            advantages = advantages / (spread_of(rewards) + LEAST_SPREAD)
        case ScaleRewards.none:
            pass
    return np.nan_to_num(advantages.flatten())


def groups_without_spread(rewards: Numbers, num_generations: int) -> float:
    """The part of the prompts whose answers all have one reward, so that nothing is learned from them."""
    return float(has_no_spread(rewards, num_generations).mean())


def has_no_spread(rewards: Numbers, num_generations: int) -> NDArray[np.bool_]:
    """Whether the answers to each prompt all have one reward, [num_prompts]."""
    groups = rewards.reshape(-1, num_generations)
    return np.array([bool(np.isclose(spread_of(group), 0.0, atol=1e-8)) for group in groups])


def pass_rates(rewards: Numbers, num_generations: int, threshold: float) -> dict[str, float]:
    """`pass@1` and `pass@k` with k = `num_generations`: the part of the prompts that k answers solve.

    The estimate without bias of k answers out of n (arXiv:2107.03374, equation 1): for k = 1 it is the part of the
    answers that pass, for k = n the part of the prompts to which some answer does.

    Args:
        rewards: of the function that decides, [num_answers], those to one prompt side by side. Prompts with NaN, about
            which the function has nothing to say, are left out.
        num_generations: answers to each prompt.
        threshold: the least reward with which an answer passes.
    """
    groups = rewards.reshape(-1, num_generations)
    groups = groups[~np.isnan(groups).any(1)]
    if not len(groups):
        return {}
    passes = groups >= threshold
    rates = {"pass@1": float(passes.mean())}
    if num_generations > 1:
        rates[f"pass@{num_generations}"] = float(passes.any(1).mean())
    return rates


def mean_of(values: Numbers) -> float:
    """The mean of what is not NaN; NaN if there is nothing."""
    return float(np.nanmean(values)) if np.isfinite(values).any() else float("nan")


def spread_of(values: Numbers) -> float:
    """The sample's standard deviation of what is not NaN; 0 of a single number, NaN of none."""
    number = int(np.isfinite(values).sum())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of nothing but NaN
        return float(np.nanstd(values, ddof=1)) if number > 1 else 0.0


def _over_groups(groups: Numbers, function: Callable[[Numbers], float]) -> Numbers:
    return np.array([[function(group)] for group in groups])
