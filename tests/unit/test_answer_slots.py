"""The plan's slots, in which answers are written: as many as the completer takes from what is free between steps."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from tests.helpers.plans import traced
from tests.helpers.quick_config import load_config

from qlora_fsdp.config.adapter.adapter_config import ADAPTER_WEIGHTS
from qlora_fsdp.memory.answer_slots import plan_answer_slots
from qlora_fsdp.memory.answer_time import plan_answers
from qlora_fsdp.memory.gpus import known_gpus
from qlora_fsdp.memory.model_bytes import ModelBytes
from qlora_fsdp.memory.plan import GIB, MemoryPlan, make_plan
from qlora_fsdp.memory.policy import Policy
from qlora_fsdp.memory.speed import step_seconds
from qlora_fsdp.memory.workload import CACHE_SHARE, Workload

BASE = ["model=llama3.1-8b-base", "data.path=org/name", "training.max_length=768", "training.global_batch_size=64"]
ANSWERS = ["task=grpo", "reward.functions=[exact_match]", "rollout.max_completion_length=512"]
VOCAB = 128_256
CACHE_BYTES = 768 * 32 * 2 * 8 * 128 * 2  # tokens, layers, keys and values, heads, their size, bytes of a number
SLOT_BYTES = CACHE_BYTES + 2 * VOCAB  # with the logits of the next token


def plan_of(*more: str, num_ranks: int = 1) -> MemoryPlan:
    config = load_config([*BASE, *more])
    work = Workload(traced(config), config, num_ranks, num_ranks, 1)
    return make_plan(work, [Policy.full] * work.num_layers)


def test_where_there_is_room_all_slots_are_there() -> None:
    slots = plan_answer_slots(plan_of(*ANSWERS, "fsdp=no_shard"), 132 * GIB)
    assert slots is not None
    assert (slots.number, slots.length, slots.num_answers) == (256, 768, 512)
    assert slots.num_bytes == 256 * SLOT_BYTES
    assert "512 a step and model, in 256 slots of 768 tokens at a time; they take 24.1 GiB a GPU" in slots.describe()


@pytest.mark.parametrize("gib", [7, 12, 24])
def test_slots_take_their_share_of_what_is_free(gib: int) -> None:
    plan = plan_of(*ANSWERS, "fsdp=no_shard")
    slots = plan_answer_slots(plan, gib * GIB)
    free = gib * GIB - plan.tensor_bytes("step") - plan.library_bytes
    assert slots is not None
    assert slots.number == max(0, int(free * CACHE_SHARE)) // SLOT_BYTES < 256


def test_ranks_with_whole_copies_divide_answers_and_others_write_the_same() -> None:
    whole = plan_answer_slots(plan_of(*ANSWERS, "fsdp=no_shard", num_ranks=4), 132 * GIB)
    shared = plan_answer_slots(plan_of(*ANSWERS, "fsdp=full_shard", num_ranks=4), 132 * GIB)
    assert whole is not None and shared is not None
    assert (whole.num_answers, whole.number) == (128, 128)
    assert (shared.num_answers, shared.number) == (512, 256)


def test_other_runs_have_none() -> None:
    plan = plan_of("fsdp=no_shard")
    assert plan_answer_slots(plan, 132 * GIB) is None
    assert plan_answers(plan, 132 * GIB, known_gpus()["h200"]) is None
    assert "answers" not in plan.phases


def test_drawing_among_few_tokens_takes_memory_for_each_slot() -> None:
    """Seven copies of the logits, four bytes each, one of which is of places with eight."""
    plain = plan_of(*ANSWERS, "fsdp=no_shard").work.slot_bytes
    assert plain == SLOT_BYTES
    for more in ("rollout.top_p=0.9", "rollout.top_k=20", "rollout.min_p=0.1"):
        assert plan_of(*ANSWERS, "fsdp=no_shard", more).work.slot_bytes == plain + 28 * VOCAB


def test_a_run_needs_memory_for_a_single_answer() -> None:
    """So a plan in which no answer fits does not fit, whatever training would need."""
    plan = plan_of(*ANSWERS, "fsdp=no_shard", "rollout.top_p=0.9")
    assert list(plan.phases) == ["load", "answers", "forward", "backward", "step"]
    assert plan.phases["answers"]["slots"] == plan.work.slot_bytes
    assert plan.tensor_bytes("answers") > plan.tensor_bytes("step") + plan.work.slot_bytes


def test_adapters_that_reward_or_teach_are_counted_whole(tmp_path: Path) -> None:
    save_file({"a": np.zeros((8, 16), np.float16), "b": np.zeros(4, np.float16)}, tmp_path / ADAPTER_WEIGHTS)
    judged = plan_of(*ANSWERS, f"reward.models=[{tmp_path},{tmp_path}]")
    taught = plan_of("task=distill", f"distill.teacher_adapter={tmp_path}")
    for plan, number in ((judged, 2), (taught, 1), (plan_of(*ANSWERS, "reward.models=[nowhere]"), 0)):
        assert plan.phases["step"]["other_adapters"] == number * 4 * (8 * 16 + 4)


def test_a_teacher_of_its_own_is_counted_with_what_its_pass_takes() -> None:
    """In 4 bits, split as the model is; beside the model's largest moments are its head and what that gets."""
    config = load_config([*BASE, "task=distill", "distill.teacher_prompt=hinted", "fsdp=full_shard"])
    teacher = load_config(["model=llama3.1-70b-base", *BASE[1:], "task=distill"])
    plain = Workload(traced(config), config, 4, 4, 1)
    other = config.with_values({"distill.teacher_model": "org/big"})
    both = replace(plain, config=other, teacher_model=traced(teacher, is_trained=False))
    alone, taught = (make_plan(work, [Policy.full] * work.num_layers) for work in (plain, both))
    theirs = ModelBytes(Workload(traced(teacher), teacher, 4, 4, 1)).resident(with_training=False)
    own = sum(theirs.values()) - theirs["adapters"]
    for phase in ("load", "answers", "forward", "backward", "step"):
        assert taught.phases[phase]["teacher"] == own > 8 * GIB
    head = VOCAB * 8192 * 2
    beside = taught.tensor_bytes("backward") - alone.tensor_bytes("backward") - own
    assert beside == head + 768 * (8192 - 4096) * 2
    assert taught.tensor_bytes("step") == alone.tensor_bytes("step") + own
    gpu = known_gpus()["h200"]
    seconds = [step_seconds(work, [Policy.full] * work.num_layers, gpu) for work in (plain, both)]
    assert 1.2 * seconds[0] < seconds[1] < 2 * seconds[0]


def test_the_time_of_a_step_is_about_what_an_h200_took() -> None:
    """64 prompts of 256 with 8 answers of 512 tokens each: 33.1 s to write, 20.0 to learn (benchmarks/grpo.py)."""
    found = plan_answers(plan_of(*ANSWERS, "fsdp=no_shard", "training.max_steps=100"), 132 * GIB, known_gpus()["h200"])
    assert found is not None
    assert 33.1 * 0.6 < found.rollout_seconds < 33.1 * 1.4
    assert found.rollout_tokens == 64 * 8 * 512
    assert found.hours == pytest.approx(100 * (found.rollout_seconds + found.training_seconds) / 3600)
    assert "tokens/s) and" in found.describe_time() and "100 steps up to" in found.describe_time()


def test_fewer_slots_take_longer() -> None:
    seconds = []
    for more in ([], ["rollout.max_slots=64"], ["rollout.max_slots=16"]):
        found = plan_answers(plan_of(*ANSWERS, "fsdp=no_shard", *more), 132 * GIB, known_gpus()["h200"])
        assert found is not None and found.hours is None
        seconds.append(found.rollout_seconds)
    assert seconds == sorted(seconds) and seconds[2] > 2 * seconds[0]
