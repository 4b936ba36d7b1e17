"""What a run's own figures say against it."""

from __future__ import annotations

from typing import Any

import pytest
from tests.helpers.quick_config import load_config

from qlora_fsdp.config.outlook import Ends, Outlook

CALM = (1.0, 1.0)


def outlook(*settings: str, num_ranks: int = 1) -> Outlook:
    return Outlook.of(load_config(["model.path=some/model", "data.path=rows.jsonl", *settings]), num_ranks)


@pytest.mark.parametrize(
    ("ends", "said"),
    [
        (Ends(3.0, (3.0, 2.0), CALM), None),
        (Ends(3.0, (2.9, 3.2), CALM), "The training loss rose from 2.9000 to 3.2000. Lower training.learning_rate"),
        (Ends(3.0, (90.0, 80.0), CALM), "The training loss rose from 3.0000 to 80.0000."),
        (Ends(3.0, (3.0, 2.0), (2.0, 3517.0)), "The gradient's norm grew from 2 to 3517: the steps are too large."),
        (Ends(3.0, (3.0, 2.99), CALM), "The training loss ends where it began (3.0000, 2.9900)"),
        (Ends(3.0, (3.0, 2.99), CALM, [(0, 3.0), (60, 2.9)]), None),
        (Ends(3.0, (3.0, 2.0), CALM, [(0, 3.0), (60, 3.1)]), "The evaluation loss does not end below where it began"),
        (None, "The gradient of no step was used"),
    ],
)
def test_the_gravest_is_said(ends: Ends | None, said: str | None) -> None:
    found = outlook().judge(60, 600, ends)
    assert (found is None) is (said is None), found
    assert (found or "").startswith(said or "")
    assert outlook("model.weights=random", "model=tiny").judge(60, 600, ends) is None, "there is nothing to learn"


def test_equal_rewards_explain_gradients_of_zero_only_where_rewards_are_learned_from() -> None:
    ends = Ends(0.0, (0.0, 0.0), (0.0, 0.0))
    assert "all answers to a prompt have one reward" in (outlook("task=grpo").judge(60, 600, ends) or "")
    assert outlook("task=distill").judge(60, 600, ends) is None


@pytest.mark.parametrize("num_sequences", [3, 16, 60, 150, 400, 700])
@pytest.mark.parametrize("num_ranks", [1, 3, 8])
def test_what_is_advised_makes_enough_steps(num_sequences: int, num_ranks: int) -> None:
    own = outlook(num_ranks=num_ranks)
    batch, epochs = own._enough(num_sequences)
    assert batch % num_ranks == 0
    assert -(-epochs * num_sequences // batch) >= 50


@pytest.mark.parametrize(
    ("settings", "is_usual"),
    [
        ({}, True),
        ({"training.learning_rate": 1e-6}, False),
        ({"training.learning_rate": 0.05}, False),
        ({"lora.r": 1}, True),
        ({"lora.r": 256}, True),
        ({"lora.r": 64, "lora.use_rslora": "true", "lora.lora_alpha": 16}, True),
        ({"lora.r": 256, "lora.use_rslora": "true", "lora.lora_alpha": 512}, False),
        ({"lora.lora_alpha": 512, "training.learning_rate": 1e-3}, False),
    ],
)
def test_usual_rates_follow_the_scale_of_the_adapter(settings: dict[str, Any], is_usual: bool) -> None:
    found = outlook(*(f"{key}={value}" for key, value in settings.items())).unusual_rate()
    assert (found is None) is is_usual, found
