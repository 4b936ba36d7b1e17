"""Steps on answers that the model writes itself, in bfloat16: what slots write is what training computes with."""

from __future__ import annotations

import math

import pytest
import torch

from qlora_fsdp.training.answers.rollouts import Completion
from tests.helpers.answers import answer_settings, lines_of, train_and_record
from tests.helpers.ranks import run_ranks

NUM_RANKS = torch.cuda.device_count()
MODEL = [
    "model=llama3-8b",
    "model.weights=random",
    *(
        f"model.config.{name}={value}"
        for name, value in {
            "num_hidden_layers": 4,
            "hidden_size": 1024,
            "intermediate_size": 2816,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "vocab_size": 4096,
        }.items()
    ),
]
LONGER = [
    "training.max_length=256",
    "training.global_batch_size=8",
    "rollout.num_generations=8",
    "rollout.max_completion_length=96",
    "training.max_steps=5",
]
REPEATED = "training.deterministic=true"
CASES = {
    "whole": ["fsdp=no_shard"],
    "shards": [],
    "few slots": ["rollout.max_slots=8"],
    "repeated": [REPEATED],
    "repeated once more": [REPEATED],
    "padded": ["training.packing=false"],
    "reference": ["grpo.beta=0.1", "grpo.num_iterations=2", "training.max_steps=6"],
    "sequences": ["grpo.loss_type=grpo", "grpo.importance_sampling_level=sequence", "grpo.num_iterations=2"],
    "rloo": ["grpo.loss_type=rloo", "grpo.beta=0.05"],
    "drawn among few": ["rollout.top_p=0.9", "rollout.top_k=50", "rollout.temperature=0.7"],
}
TEMPERATURES = {"drawn among few": 0.7}  # logits are divided by it, and so is what their rounding makes of them
Found = tuple[list[list[Completion]], list[dict[str, float]]]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Found]:
    """What each case has written in every step, and its figures."""
    folder = tmp_path_factory.mktemp("answers")
    argvs = {}
    for case, more in CASES.items():
        argv = answer_settings(folder, folder, case.replace(" ", "-"), *MODEL, *LONGER, *more)
        argvs[case] = [text for text in argv if not text.startswith("model.path=")]
    first, *others = run_ranks(NUM_RANKS, train_and_record, argvs, gpu=True)
    assert all(other == first for other in others)
    return {case: (first[case], lines_of(argv)) for case, argv in argvs.items()}


@pytest.mark.parametrize("case", CASES)
def test_slots_and_training_agree(found: dict[str, Found], case: str) -> None:
    written, lines = found[case]
    assert len({tuple(completion.tokens) for step in written for completion in step}) > 100
    for line in lines:
        assert all(math.isfinite(value) for value in line.values() if isinstance(value, float))
        assert line["sampling/sampling_logp_difference/mean"] < 0.01 / TEMPERATURES.get(case, 1.0)
        assert line["gpu_peak_gib"] > 0
    assert any(line["grad_norm"] > 0 for line in lines)


def test_a_repeated_run_is_the_same_to_the_bit(found: dict[str, Found]) -> None:
    first, second = found["repeated"], found["repeated once more"]
    assert first[0] == second[0]
    for line, other in zip(first[1], second[1], strict=True):
        assert (line["loss"], line["grad_norm"]) == (other["loss"], other["grad_norm"])


def test_the_first_divergence_from_the_reference_is_nothing(found: dict[str, Found]) -> None:
    lines = found["reference"][1]
    assert lines[0]["kl"] == pytest.approx(0, abs=1e-6)
    assert lines[-1]["kl"] > 0
