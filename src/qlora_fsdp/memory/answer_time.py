"""Predicts how long a step on answers takes: the model writes them (decoding/), and then learns from them.

All answers are taken to be as long as they may be, after the longest prompts: how soon a model ends them nobody knows.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from qlora_fsdp.common.text import plural, show_duration
from qlora_fsdp.memory.answer_slots import AnswerSlots, plan_answer_slots
from qlora_fsdp.memory.gpus import Gpu
from qlora_fsdp.memory.model_bytes import sum_bytes
from qlora_fsdp.memory.plan import MemoryPlan
from qlora_fsdp.memory.speed import EXCHANGE_SECONDS, MOVING, PRODUCTS, step_seconds

# Of texts that are written in slots, fitted to 64 and 256 texts of an 8B model on an H200 (docs/benchmarks.md)
DECODED_PRODUCTS = 0.35  # share of the datasheet's FLOP/s that products of few rows with codes reach
DECODED_READS = 2.0  # how often the time to read the weights once is what a step takes besides


@dataclass(frozen=True)
class AnswerTime:
    """A step of a run whose model writes answers, at most.

    Attributes:
        slots: in which they are written.
        rollout_seconds: to write them.
        rollout_tokens: that are written, by all ranks.
        training_seconds: to learn from them.
        num_steps: of the run; None: the data says how many there are.
    """

    slots: AnswerSlots
    rollout_seconds: float
    rollout_tokens: int
    training_seconds: float
    num_steps: int | None

    @property
    def hours(self) -> float | None:
        """Hours that the run takes at most; None where its steps are not known."""
        if self.num_steps is None:
            return None
        return self.num_steps * (self.rollout_seconds + self.training_seconds) / 3600

    def describe_time(self) -> str:
        """A step at most, and the run."""
        speed = self.rollout_tokens / self.rollout_seconds
        text = (
            f"a step takes up to {self.rollout_seconds:,.0f} s to write answers ({speed:,.0f} tokens/s) and "
            f"{self.training_seconds:,.0f} s to learn from them"
        )
        if self.hours is None or self.num_steps is None:
            return text
        return f"{text}, {plural(self.num_steps, 'step')} up to {show_duration(3600 * self.hours)}"

    def figures(self) -> dict[str, Any]:
        """What preflight.json holds of it."""
        return {
            "answer_slots": asdict(self.slots),
            "rollout_seconds": self.rollout_seconds,
            "rollout_tokens_per_second": self.rollout_tokens / self.rollout_seconds,
            "training_seconds": self.training_seconds,
        }


def plan_answers(plan: MemoryPlan, target: float, gpu: Gpu) -> AnswerTime | None:
    """The slots of a run and the time of its steps; None if its model writes no answers.

    Args:
        plan: of the run.
        target: bytes of a GPU that can be had.
        gpu: its rates predict the speed.
    """
    slots = plan_answer_slots(plan, target)
    if slots is None:
        return None
    work = plan.work
    return AnswerTime(
        slots=slots,
        rollout_seconds=answer_seconds(plan, slots, gpu),
        rollout_tokens=work.sequences_a_step * work.config.rollout.max_completion_length,
        training_seconds=step_seconds(work, plan.policies, gpu, plan.num_kept_dequantized),
        num_steps=work.config.training.max_steps,
    )


def answer_seconds(plan: MemoryPlan, slots: AnswerSlots, gpu: Gpu) -> float:
    """Seconds to write the answers of a step, all of them of `rollout.max_completion_length` after the longest prompts.

    A step of the slots reads the weights once, and for each text keys and values, of half of its answer in the mean.
    Ranks that share a model divide its products, and send one another what each layer gives.
    """
    work = plan.work
    num_slots = max(1, slots.number)
    rollout = work.config.rollout
    weights = sum_bytes(tensor for kind in work.layers for tensor in kind.tensors)
    tables = sum_bytes(tensor for tensors in work.parts.ends.values() for tensor in tensors)
    num_bytes = (weights.total + tables.embeddings) / work.num_shards
    memory = gpu.memory_gb_s * 1e9 * MOVING
    product = 2 * work.parts.num_parameters / work.num_shards / (gpu.tflops * 1e12)
    mean_length = work.config.training.max_length - rollout.max_completion_length / 2
    of_text = product / DECODED_PRODUCTS + mean_length * work.parts.cached_bytes / memory
    exchanges = EXCHANGE_SECONDS * work.num_layers if work.num_shards > 1 else 0.0
    step = DECODED_READS * num_bytes / memory + exchanges + num_slots * of_text
    num_steps = -(slots.num_answers // -num_slots) * rollout.max_completion_length
    num_prompts = -(slots.num_answers // -rollout.num_generations)
    prompt_tokens = num_prompts * (work.config.training.max_length - rollout.max_completion_length)
    return num_steps * step + prompt_tokens * product / PRODUCTS
