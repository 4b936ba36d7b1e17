"""The longest rows that a run can train on, by the plan: `preflight training.max_length=max`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from qlora_fsdp.common.text import format_table
from qlora_fsdp.config.written import with_values
from qlora_fsdp.memory.choose import fixed_policies, with_tiles
from qlora_fsdp.memory.gpus import Gpu
from qlora_fsdp.memory.plan import GIB, MemoryPlan, make_plan
from qlora_fsdp.memory.policy import Policy
from qlora_fsdp.memory.speed import tokens_per_second
from qlora_fsdp.memory.workload import Workload

UNIT = 2**10  # tokens; lengths are multiples of it
FIRST = (2**16, 2**18)  # tokens of a GPU's slice with which it begins
MAX_TRIES = 4
MOST = 2**24  # tokens; longer rows are not looked for


def longest(work: Workload, target: float) -> MemoryPlan | None:
    """The plan of the longest rows, one at a time, with which a run needs at most `target` bytes per GPU.

    Bytes grow with the length as a straight line does, or nearly so. So two lengths show where the line meets the
    target, and one or two more, traced there, show how nearly.

    Args:
        work: the run; its length and its micro-batch do not count. Where its activations are open, all layers'
            inputs wait in host memory, for these plans need least.
        target: bytes that a rank may use, libraries included.

    Returns:
        None if not even a row of `UNIT` tokens fits.
    """
    num_slices = work.config.distributed.context_parallel
    plans = {length: smallest_plan(work, length) for length in (slice * num_slices for slice in FIRST)}
    for _ in range(MAX_TRIES):
        length = _meeting(plans, target)
        if length in plans:
            break
        plans[length] = smallest_plan(work, length)
    fitting = [length for length, plan in plans.items() if plan.needed <= target]
    return plans[max(fitting)] if fitting else None


def smallest_plan(work: Workload, length: int) -> MemoryPlan:
    """The plan that needs least for rows of so many tokens, within what the settings say."""
    config = with_values(
        work.config,
        {
            "training.max_length": length,
            "training.micro_batch_size": 1,
            "training.global_batch_size": work.num_groups,
        },
    )
    work = replace(work, config=config, micro_batch_size=1)
    work = with_tiles(work) or work
    policies = fixed_policies(config, work.num_layers) or (Policy.offload,) * work.num_layers
    return make_plan(work, policies)


def figures_of(plans: Sequence[MemoryPlan], gpu: Gpu) -> list[dict[str, Any]]:
    """What preflight.json says of each of the longest rows."""
    return [
        {
            "gpus": plan.work.num_ranks,
            "max_length": plan.work.config.training.max_length,
            "needed_gib": plan.needed / GIB,
            "host_gib": plan.host_needed / GIB,
            "tokens_per_second": tokens_per_second(plan.work, plan.policies, gpu),
        }
        for plan in plans
    ]


def table_of(figures: Sequence[Mapping[str, Any]]) -> str:
    """The same as a table."""
    return format_table(
        [
            {
                "GPUs": str(row["gpus"]),
                "tokens a row": f"{row['max_length']:,}",
                "GiB a GPU": f"{row['needed_gib']:.1f}",
                "GiB a host": f"{row['host_gib']:.1f}",
                "tokens/s": f"{row['tokens_per_second']:,.0f}",
            }
            for row in figures
        ]
    )


def _meeting(plans: dict[int, MemoryPlan], target: float) -> int:
    """Where the line through the two lengths nearest to the target meets it: a multiple of `UNIT`."""
    nearest = sorted(plans, key=lambda length: abs(plans[length].needed - target))[:2]
    ((short, long),) = pairwise(sorted(nearest))
    slope = (plans[long].needed - plans[short].needed) / (long - short)
    meeting = short + (target - plans[short].needed) / slope
    return int(min(max(meeting, UNIT), MOST)) // UNIT * UNIT
