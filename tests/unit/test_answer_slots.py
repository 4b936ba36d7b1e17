"""The plan's slots, in which answers are written: as many as the completer takes from what is free between steps."""

from __future__ import annotations

import pytest
from tests.helpers.plans import traced
from tests.helpers.quick_config import load_config

from qlora_fsdp.memory.answer_slots import plan_answer_slots
from qlora_fsdp.memory.plan import GIB, MemoryPlan, make_plan
from qlora_fsdp.memory.policy import Policy
from qlora_fsdp.memory.workload import CACHE_SHARE, Workload

BASE = ["model=llama3.1-8b-base", "data.path=org/name", "training.max_length=768", "training.global_batch_size=64"]
ANSWERS = ["task=grpo", "reward.functions=[exact_match]", "rollout.max_completion_length=512"]
SLOT_BYTES = 768 * 32 * 2 * 8 * 128 * 2  # tokens, layers, keys and values, heads, their size, bytes of a number


def plan_of(*more: str, num_ranks: int = 1) -> MemoryPlan:
    config = load_config([*BASE, *more])
    work = Workload(traced(config), config, num_ranks, num_ranks, 1)
    return make_plan(work, [Policy.full] * work.num_layers)


def test_where_there_is_room_all_slots_are_there() -> None:
    slots = plan_answer_slots(plan_of(*ANSWERS, "fsdp=no_shard"), 132 * GIB)
    assert slots is not None
    assert (slots.number, slots.length, slots.num_answers) == (256, 768, 512)
    assert slots.num_bytes == 256 * SLOT_BYTES
    assert "512 a step and model, in 256 slots of 768 tokens at a time; they take 24.0 GiB a GPU" in slots.describe()


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
    assert plan_answer_slots(plan_of("fsdp=no_shard"), 132 * GIB) is None
