"""pass@k of answers to held-out prompts."""

from __future__ import annotations

import numpy as np
import pytest

from qlora_fsdp.training.answers.advantages import pass_rates


def test_pass_rates() -> None:
    """Of three prompts one is solved twice, one once, and about one the function has nothing to say."""
    rewards = np.array([1.0, 0.0, 1.0, 0.0, 0.9, 2.0, 1.0, np.nan, 1.0])
    assert pass_rates(rewards, 3, 1.0) == pytest.approx({"pass@1": 3 / 6, "pass@3": 1.0})
    assert pass_rates(rewards, 3, 0.5) == pytest.approx({"pass@1": 4 / 6, "pass@3": 1.0})
    assert pass_rates(rewards, 3, 1.5) == pytest.approx({"pass@1": 1 / 6, "pass@3": 0.5})


def test_one_answer_has_one_rate() -> None:
    assert pass_rates(np.array([1.0, 0.0]), 1, 1.0) == {"pass@1": 0.5}
    assert pass_rates(np.array([np.nan, np.nan]), 1, 1.0) == {}
