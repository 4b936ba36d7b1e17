"""What an evaluation by answers says where a figure is no number."""

import math
from types import SimpleNamespace
from typing import Any, cast

import pytest

from qlora_fsdp.training.answers.evaluate import AnswerEvaluation

WORSE = 0.25  # of a reward


class Rewarded:
    """Answers to no prompts, which have these figures."""

    names = ()
    rollouts = SimpleNamespace(settings=SimpleNamespace(used_num_generations_eval=1))

    def __init__(self, **found: float) -> None:
        self.found = found

    def answer(self, questions: Any, num_generations: int, kind: Any) -> None:
        assert questions == []

    def figures(self, answered: None) -> dict[str, float]:
        return dict(self.found)


def evaluate(rewarded: Rewarded, divergence: float | None = None) -> tuple[float, dict[str, float]]:
    teaching = None
    if divergence is not None:
        teaching = SimpleNamespace(evaluate=lambda answered: {"loss": divergence}, given_to_evaluate=lambda asked: None)
    journal = SimpleNamespace(evaluation=lambda *args: None)
    saver = SimpleNamespace(is_signalled=lambda: False)
    parts = cast(Any, (rewarded, journal, saver, teaching))
    found = AnswerEvaluation(cast(Any, []), 1, parts[0], parts[1], parts[2], parts[3]).run(cast(Any, None), 1)
    assert found is not None
    return found.loss, found.metrics


def test_a_divergence_that_is_no_number_is_not_the_lowest_loss() -> None:
    loss, metrics = evaluate(Rewarded(reward=math.nan), divergence=math.nan)
    assert math.isnan(loss) and metrics == {}
    assert evaluate(Rewarded(), divergence=0.5) == (0.5, {})


def test_answers_without_a_reward_are_not_better_than_bad_ones() -> None:
    loss, metrics = evaluate(Rewarded(reward=math.nan, length=3.0))
    assert math.isnan(loss) and metrics == {"length": 3.0}


@pytest.mark.parametrize("divergence", [None, 0.5])
def test_a_functions_own_figure_named_loss_is_not_the_runs(divergence: float | None) -> None:
    loss, metrics = evaluate(Rewarded(reward=WORSE, loss=-100.0), divergence)
    assert loss == (-WORSE if divergence is None else divergence)
    assert metrics == {"reward": WORSE}
