"""Prints the memory plan as text, and turns it into JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from qlora_fsdp.common.text import format_table
from qlora_fsdp.config.schema import Dtype, Weights
from qlora_fsdp.memory.gpus import GPUS_A_HOST, Gpu, Hardware
from qlora_fsdp.memory.plan import GIB, MemoryPlan
from qlora_fsdp.memory.policy import describe_policies
from qlora_fsdp.memory.search import Change, Choice, Room, dequantized_once, longest, whole_copies
from qlora_fsdp.memory.speed import load_seconds, planned_tokens_per_second, tokens_per_second, waiting_share
from qlora_fsdp.memory.workload import Workload

PARTS = {  # the rows of the table, in order
    "codes": "codes",
    "scales": "scales",
    "full_precision": "norms, biases, unquantized layers",
    "embeddings": "embeddings and head",
    "adapters": "adapters",
    "other_adapters": "adapters that reward or teach",
    "teacher": "the teacher's weights",
    "gradients": "gradients",
    "optimizer": "optimizer state",
    "gathered": "gathered layers",
    "dequantized": "dequantized weights",
    "activations": "activations",
    "slots": "a slot for an answer",
    "loss": "loss",
    "workspace": "workspace of cuBLAS, or of loading",
}
COUNTS = (1, 2, 4, 8)  # of GPUs, for which the longest rows are told
MIN_WAITING = 0.25  # share of a step from which on the wait for Python gets a line
_WIDTH = max(map(len, PARTS.values())) + 2


def table(plan: MemoryPlan) -> str:
    """GiB per GPU by part and in all, with a column for each phase."""
    rows = [_row("GiB a GPU", list(plan.phases))]
    for part, label in PARTS.items():
        sizes = [plan.phases[phase].get(part, 0) for phase in plan.phases]
        if any(sizes):
            rows.append(_row(label, [_gib(size) for size in sizes]))
    rows.append(_row("all tensors", [_gib(plan.tensor_bytes(phase)) for phase in plan.phases]))
    rows.append(_row("torch's allocator", [_gib(plan.allocator_bytes(phase)) for phase in plan.phases]))
    rows.append(_row("CUDA and NCCL", [_gib(plan.library_bytes)] * len(plan.phases)))
    rows.append(_row("needed", [_gib(plan.needed_in(phase)) for phase in plan.phases]))
    return "\n".join(rows)


def host_line(plan: MemoryPlan) -> str:
    """How much host memory the ranks of one host need."""
    pinned = plan.pinned * plan.work.local_num_ranks
    return f"Host memory: {plan.host_needed / GIB:.1f} GiB a host, {pinned / GIB:.1f} GiB of it pinned"


def loading_line(plan: MemoryPlan) -> str:
    """The bytes that are read, and how long loading takes."""
    seconds = load_seconds(plan)
    if "random" in seconds:
        return f"Loading: nothing is read; {seconds['random']:.0f} s to make random weights on each GPU"
    return (
        f"Loading: {read_bytes(plan.work) / GIB:.1f} GiB to read; {seconds['disk']:.0f} s from a disk of 2 GB/s, "
        f"{seconds['page_cache']:.0f} s from the page cache"
    )


def speed_text(plan: MemoryPlan, gpu: Gpu) -> str:
    """Tokens per second of all GPUs together, and of one."""
    is_slower = plan.work.config.training.precision is Dtype.float32
    caveat = " in bfloat16, several times as fast as float32" if is_slower else ""
    speed = planned_tokens_per_second(plan, gpu)
    return f"Speed: {speed:,.0f} tokens/s in all ({speed / plan.work.num_ranks:,.0f} per GPU){caveat}"


def read_bytes(work: Workload) -> int:
    """Bytes of the bfloat16 files that are read; none for random weights."""
    num_parameters = work.parts.num_parameters
    if work.teacher is not None:
        num_parameters += work.teacher.parts.num_parameters
    return 0 if work.config.model.weights is Weights.random else num_parameters * 2


def remarks(choice: Choice, room: Room) -> list[str]:
    """What a user should know of a plan besides, a line each."""
    faster = [*faster_lines(choice, room), *_held_lines(choice.plan, room)]
    return [*_launch_lines(choice), *waiting_lines(choice.plan, room.gpu), *faster]


def _launch_lines(choice: Choice) -> list[str]:
    """A line if `auto` lets GPUs share sequences, and one if the plan does without the CUDA graph that is asked for."""
    lines = []
    if choice.sharing is not None:
        lines.append(choice.sharing)
    if choice.gives_up_graph:
        lines.append("A CUDA graph of a micro-batch would leave too little room, so kernels are launched one by one")
    return lines


def waiting_lines(plan: MemoryPlan, gpu: Gpu) -> list[str]:
    """One line if GPUs would wait for Python for a good part of a step, else none."""
    share = waiting_share(plan.work, plan.policies, gpu)
    if share < MIN_WAITING:
        return []
    small = f"{plan.work.num_tokens:,} tokens are few for a micro-batch here (training.micro_batch_size)"
    return [f"GPUs would wait {share:.0%} of the time for Python to start their kernels: {small}"]


def faster_lines(choice: Choice, room: Room) -> list[str]:
    """One line about whole copies of the base: what auto chose, or that they would be faster (`whole_copies`)."""
    plan = choice.plan
    if choice.sharding is not None:
        return [choice.sharding]
    whole = whole_copies(plan, room) if choice.fits else None
    if whole is None:
        return []
    gain = whole.speed / room.speed(plan) - 1
    needed = _gib(whole.plan.needed)
    return [f"There is room for the whole base on each GPU: {whole.text} needs {needed} GiB, and is {gain:.0%} faster"]


def _held_lines(plan: MemoryPlan, room: Room) -> list[str]:
    """One line if weights could stay for the whole run and that is faster, or if they should and can't; else none."""
    if plan.work.config.memory.keep_dequantized == "run":
        why = _why_none_held(plan)
        if why is not None:
            return [f"memory.keep_dequantized=run does nothing here: {why}"]
    held = dequantized_once(plan, room)
    if held is None:
        return []
    gain = held.speed / planned_tokens_per_second(plan, room.gpu) - 1
    needed = _gib(held.plan.needed)
    return [f"Dequantized weights can stay for the whole run: {held.text} needs {needed} GiB, and is {gain:.0%} faster"]


def _why_none_held(plan: MemoryPlan) -> str | None:
    """Why no dequantized weights stay for the whole run; None if some do."""
    if plan.work.uses_fsdp:
        return "FSDP shards the base, so they stay until backward at most"
    if plan.beside_graph == 0:
        return "micro-batches are not recorded as a CUDA graph"
    if not any(layer.dequantized for layer in plan.work.layers):
        return "no weights are dequantized for products"
    return None if plan.num_kept_dequantized else "no memory is left over"


def changes_table(changes: Sequence[Change]) -> str:
    """One line per change: what to type, the GiB that the run then needs, and its speed."""
    width = max((len(change.text) for change in changes), default=0)
    lines = []
    for change in changes:
        lines.append(f"  {change.text:<{width}}  {_gib(change.plan.needed)} GiB, {change.speed:,.0f} tokens/s")
    return "\n".join(lines)


def as_json(plan: MemoryPlan) -> dict[str, Any]:
    """The plan's figures in GiB, for preflight.json and summary.json."""
    return {
        "phases": {phase: _gib_values(plan.phases[phase]) for phase in plan.phases},
        "tensors_gib": {phase: round(plan.tensor_bytes(phase) / GIB, 3) for phase in plan.phases},
        "allocator_gib": round(plan.allocator_bytes(plan.peak_phase) / GIB, 3),
        "libraries_gib": round(plan.library_bytes / GIB, 3),
        "needed_gib": round(plan.needed / GIB, 3),
        "activations": describe_policies(plan.policies),
        "micro_batch_size": plan.work.micro_batch_size,
        "sharding_strategy": plan.work.config.fsdp.sharding_strategy.value,
        "reshard_after_forward": plan.work.reshards,
        "layers_kept_dequantized": plan.num_kept_dequantized,
        "host_gib_rank_0": _gib_values(plan.host),
        "pinned_gib_a_rank": round(plan.pinned / GIB, 3),
    }


def describe_choice(plan: MemoryPlan) -> str:
    """Describe the choice: the activation policies, and what else stays from forward to backward."""
    text = f"activations {describe_policies(plan.policies)}"
    tile = plan.work.config.memory.num_tile_tokens
    if tile is not None:
        text += f", MLPs in tiles of {tile:,} tokens"
    if plan.work.config.memory.head_in_pieces is True:
        text += ", the head's loss in pieces of the vocabulary"
    if plan.work.num_shards > 1 and not plan.work.reshards:
        text += ", layers gathered once a pass"
    number = plan.num_kept_dequantized
    if number:
        until = "for the whole run" if plan.work.holds_dequantized else "until backward"
        text += f", dequantized weights of {number} layers kept {until}"
    return text


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
        plan = longest(ranks, target)
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


def _gib_values(parts: Mapping[str, int]) -> dict[str, float]:
    return {name: round(size / GIB, 3) for name, size in parts.items()}


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / GIB:.2f}"


def _row(label: str, cells: Sequence[str]) -> str:
    return f"{label:<{_WIDTH}}" + "".join(f"{cell:>10}" for cell in cells)
