"""The slots in which a model writes the answers of a step (task=grpo), by the plan: how many, and what they take.

Answers are written while nothing of a training pass is there, and the slots are given back before it begins. So they
need no memory beside the plan's, and what the plan leaves free between steps says how many there are.
"""

from __future__ import annotations

from dataclasses import dataclass

from qlora_fsdp.common.sizes import next_power_of_two
from qlora_fsdp.common.text import plural
from qlora_fsdp.memory.plan import GIB, MemoryPlan
from qlora_fsdp.memory.workload import CACHE_SHARE, GPU_SLOTS


@dataclass(frozen=True)
class AnswerSlots:
    """The slots of one GPU.

    Attributes:
        number: texts that are written at the same time; 0 if there is no memory for one.
        length: tokens of a slot.
        num_bytes: what their keys and values take, and their next tokens while these are drawn.
        num_answers: of a step, on this GPU or on those that share a model with it.
    """

    number: int
    length: int
    num_bytes: int
    num_answers: int

    def describe(self) -> str:
        """A line about them."""
        if self.number == 0:
            return f"Answers: no memory for a single slot of {self.length} tokens, in which an answer is written"
        return (
            f"Answers: {self.num_answers} a step and model, in {plural(self.number, 'slot')} of {self.length} tokens "
            f"at a time; they take {self.num_bytes / GIB:.1f} GiB a GPU, which is given back before training"
        )


def plan_answer_slots(plan: MemoryPlan, target: float) -> AnswerSlots | None:
    """The slots of a run; None if its model writes no answers, or where it would on a CPU.

    Args:
        plan: of the training passes.
        target: bytes of a GPU that can be had.
    """
    work = plan.work
    if not (work.config.task.writes_answers and work.is_cuda and work.config.training.global_batch_size is not None):
        return None
    num_models = max(1, work.num_ranks // work.num_shards)
    num_answers = -(work.sequences_a_step // -num_models)
    most = min(work.config.rollout.max_slots or GPU_SLOTS, num_answers)
    free = max(0.0, target - plan.tensor_bytes("step") - plan.library_bytes)
    number = min(next_power_of_two(most), int(free * CACHE_SHARE) // max(1, work.slot_bytes))
    return AnswerSlots(number, work.slot_length, number * work.slot_bytes, num_answers)
