"""Runs on answers that the model writes: the same at any number of ranks, packed or padded, killed or not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

import pytest

from qlora_fsdp.training.answers.rollouts import Completion
from tests.helpers.answers import answer_settings, lines_of, train_and_record
from tests.helpers.checkpoints import make_checkpoint
from tests.helpers.ranks import run_ranks

pytestmark = pytest.mark.distributed
PADDED = ["training.packing=false", "training.micro_batch_size=3"]
WITH_REFERENCE = ["grpo.beta=0.1", "grpo.num_iterations=2", "grpo.loss_type=grpo"]
# By number of ranks. The first is what all are compared with.
WORLDS: dict[int, dict[str, list[str]]] = {
    1: {"packed": [], "few slots": ["rollout.max_slots=3"], "deterministic": ["training.deterministic=true"]},
    2: {"padded": PADDED, "whole copies": ["fsdp=no_shard"]},
    3: {"packed": []},
}
FEWER: dict[int, dict[str, list[str]]] = {
    1: {"packed": []},
    2: {"padded": PADDED},
    3: {"whole copies": ["fsdp=no_shard"]},
}
LOSSES: dict[str, list[str]] = {
    "dapo": [],
    "reference": WITH_REFERENCE,
    "sequences": [*WITH_REFERENCE, "grpo.importance_sampling_level=sequence"],
    "rloo": ["grpo.loss_type=rloo", "grpo.beta=0.05"],
}
Found = tuple[list[list[Completion]], list[dict[str, float]]]


@cache
def model_in(folder: Path) -> Path:
    make_checkpoint("llama", folder / "model")
    return folder / "model"


def train(num_ranks: int, cases: Mapping[str, Sequence[str]], folder: Path) -> dict[str, Found]:
    """What each case writes in every step, which is the same on every rank, and its figures."""
    argvs = {
        case: answer_settings(model_in(folder), folder, f"{num_ranks}-{index}", *more)
        for index, (case, more) in enumerate(cases.items())
    }
    first, *others = run_ranks(num_ranks, train_and_record, argvs)
    assert all(other == first for other in others)
    return {case: (first[case], lines_of(argv)) for case, argv in argvs.items()}


def assert_same(found: Found, expected: Found) -> None:
    for step, (own, other) in enumerate(zip(found[0], expected[0], strict=True)):
        assert [completion.tokens for completion in own] == [completion.tokens for completion in other], step
        for completion, reference in zip(own, other, strict=True):
            assert completion.log_probs == pytest.approx(reference.log_probs, abs=2e-4)
    for step, (line, other_line) in enumerate(zip(found[1], expected[1], strict=True)):
        names = [name for name in other_line if not any(part in name for part in ("second", "gib", "mfu", "sampling"))]
        assert {name: line[name] for name in names} == pytest.approx(
            {name: other_line[name] for name in names}, abs=2e-5, rel=2e-5
        ), step
        assert line["sampling/sampling_logp_difference/mean"] < 1e-5


@pytest.mark.parametrize("loss", LOSSES)
def test_answers_and_losses_are_the_same_on_any_ranks(tmp_path: Path, loss: str) -> None:
    found = {
        (num_ranks, case): one
        for num_ranks, cases in (WORLDS if loss == "dapo" else FEWER).items()
        for case, one in train(
            num_ranks, {case: [*more, *LOSSES[loss]] for case, more in cases.items()}, tmp_path
        ).items()
    }
    expected = found[1, "packed"]
    num_distinct = len({tuple(completion.tokens) for step in expected[0] for completion in step})
    assert num_distinct > 40
    for one in found.values():
        assert_same(one, expected)


def test_a_step_without_anything_to_learn_changes_nothing(tmp_path: Path) -> None:
    """Here no answer has an end, and those that have none do not count."""
    more = ["grpo.mask_truncated_completions=true", "rollout.max_completion_length=2", "training.max_steps=10"]
    more.append("rollout.top_k=1")  # or one may draw an end
    (written, lines) = train(2, {"masked": more}, tmp_path)["masked"]
    assert all(len(completion.tokens) == 2 for step in written for completion in step)
    assert [line["grad_norm"] for line in lines] == [0.0] * 10
    (told,) = (file.read_text() for file in tmp_path.rglob("train.log"))
    assert told.count("For 10 steps all answers have been cut off at rollout.max_completion_length=2") == 1


def test_rewards_that_are_all_alike_are_told_after_ten_steps(tmp_path: Path) -> None:
    argv = answer_settings(model_in(tmp_path), tmp_path, "alike", "training.max_steps=11", "reward.weights=null")
    (tmp_path / "alike.py").write_text("def same(completions, **kwargs):\n    return [1.0] * len(completions)\n")
    argv += [f"reward.functions=[{tmp_path / 'alike.py'}:same]", "rollout.max_completion_length=2"]
    run_ranks(1, train_and_record, {"alike": argv})
    told = (tmp_path / "runs" / "alike" / "train.log").read_text()
    assert told.count("For 10 steps all answers to a prompt have had the same reward") == 1
    assert "a higher rollout.temperature, or more rollout.num_generations" in told
    assert all(line["frac_reward_zero_std"] == 1.0 and line["grad_norm"] == 0.0 for line in lines_of(argv))
