"""The longest rows that a run can train on, by the plan: `preflight training.max_length=max`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from qlora_fsdp.common.text import format_table
from qlora_fsdp.memory.choose_plan import describe_choice, ways_to_share, with_tiles
from qlora_fsdp.memory.gpus import GPUS_A_HOST, Gpu, Hardware
from qlora_fsdp.memory.ladders import fixed_policies
from qlora_fsdp.memory.plan import GIB, MemoryPlan, make_plan
from qlora_fsdp.memory.policy import Policy
from qlora_fsdp.memory.speed import tokens_per_second
from qlora_fsdp.memory.workload import Workload

COUNTS = (1, 2, 4, 8)  # of GPUs, for which it is told
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
    lengths = [tokens * work.config.distributed.num_slices for tokens in FIRST]
    plans = {length: _smallest_plan(work, length) for length in lengths}
    for _ in range(MAX_TRIES):
        length = _meeting(plans, target)
        if length in plans:
            break
        plans[length] = _smallest_plan(work, length)
    fitting = [length for length, plan in plans.items() if plan.needed <= target]
    return plans[max(fitting)] if fitting else None


def _smallest_plan(work: Workload, length: int) -> MemoryPlan:
    """The plan that needs least for rows of `length` tokens, within what the settings say."""
    config = work.config.with_values(
        {
            "training.max_length": length,
            "training.micro_batch_size": 1,
            "training.global_batch_size": work.num_groups,
        }
    )
    work = replace(work, config=config, micro_batch_size=1)
    work = with_tiles(work) or work
    policies = fixed_policies(config.memory, work.num_layers) or (Policy.offload,) * work.num_layers
    return make_plan(work, policies)


def describe_longest(
    work: Workload, hardware: Hardware, target: float, name: str, positions: int | None
) -> tuple[list[str], dict[str, Any]]:
    """Returns the lines to print about the longest rows on 1 to 8 GPUs, and what preflight.json holds.

    Args:
        work: see `longest`, for any number of ranks.
        hardware: the GPUs; their number is told of besides.
        target: see `longest`.
        name: the model's name.
        positions: that the model knows; None if it does not say.
    """
    found: list[MemoryPlan] = []
    wanted = work.config.distributed
    for count in sorted({*COUNTS, hardware.count}):
        if count % wanted.num_slices:
            continue
        ranks = replace(work, num_ranks=count, local_num_ranks=min(count, GPUS_A_HOST))
        plan = longest(_most_shared(ranks), target)
        if plan is not None:
            found.append(plan)
    if not found:
        return [f"No rows of {name} fit in {target / GIB:.2f} GiB a GPU, however short"], {"longest": []}
    figures = [_figures_of(plan, hardware.gpu) for plan in found]
    lines = [
        f"The longest rows of {name} on GPUs of {hardware.gpu.gib:g} GiB, of which {target / GIB:.2f} can be had, by "
        f"the plan: one row at a time, {describe_choice(found[0])}",
        _table_of(figures),
    ]
    if positions is not None and positions < figures[-1]["max_length"]:
        lines.append(f"The model knows {positions:,} positions: model.rope_scaling stretches them (docs/long-rows.md)")
    if wanted.context_parallel == 1:
        lines.append("GPUs can share a row, which then can be as many times as long: distributed.context_parallel=N")
    return lines, {"longest": figures}


def _most_shared(work: Workload) -> Workload:
    """The run with as many ranks that share each row as there can be, if that is open."""
    long = replace(work, config=work.config.with_values({"training.max_length": FIRST[-1]}))
    return [long, *ways_to_share(long)][-1]


def _figures_of(plan: MemoryPlan, gpu: Gpu) -> dict[str, Any]:
    return {
        "gpus": plan.work.num_ranks,
        "gpus_a_row": plan.work.config.distributed.num_slices,
        "max_length": plan.work.config.training.max_length,
        "needed_gib": plan.needed / GIB,
        "host_gib": plan.host_needed / GIB,
        "tokens_per_second": tokens_per_second(plan.work, plan.policies, gpu),
    }


def _table_of(figures: Sequence[Mapping[str, Any]]) -> str:
    rows = [
        {
            "GPUs": str(row["gpus"]),
            "GPUs a row": str(row["gpus_a_row"]),
            "tokens a row": f"{row['max_length']:,}",
            "GiB a GPU": f"{row['needed_gib']:.1f}",
            "GiB a host": f"{row['host_gib']:.1f}",
            "tokens/s": f"{row['tokens_per_second']:,.0f}",
        }
        for row in figures
    ]
    return format_table(rows)


def _meeting(plans: dict[int, MemoryPlan], target: float) -> int:
    """Where the line through the two lengths nearest to the target meets it: a multiple of `UNIT`."""
    nearest = sorted(plans, key=lambda length: abs(plans[length].needed - target))[:2]
    ((short, long),) = pairwise(sorted(nearest))
    slope = (plans[long].needed - plans[short].needed) / (long - short)
    meeting = short + (target - plans[short].needed) / slope
    return int(min(max(meeting, UNIT), MOST)) // UNIT * UNIT
