"""The memory plan as text and as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from qlora_fsdp.memory.choose import Choice, describe_policies
from qlora_fsdp.memory.gpus import Gpu
from qlora_fsdp.memory.plan import GIB, PHASES, MemoryPlan
from qlora_fsdp.memory.speed import tokens_per_second, waiting_share
from qlora_fsdp.memory.suggest import Change, whole_copies

PARTS = {  # in the order of the table
    "codes": "codes",
    "scales": "scales",
    "full_precision": "norms, biases, unquantized layers",
    "embeddings": "embeddings and head",
    "adapters": "adapters",
    "gradients": "gradients",
    "optimizer": "optimizer state",
    "gathered": "gathered layers",
    "dequantized": "dequantized weight",
    "activations": "activations",
    "loss": "loss",
    "workspace": "workspace of cuBLAS, or of loading",
}
MIN_WAITING = 0.25  # of a step, from which on it is worth a line
_WIDTH = max(map(len, PARTS.values())) + 2


def table(plan: MemoryPlan) -> str:
    """GiB of a GPU by part, a column a phase."""
    rows = [_row("GiB a GPU", PHASES)]
    for part, label in PARTS.items():
        sizes = [plan.phases[phase].get(part, 0) for phase in PHASES]
        if any(sizes):
            rows.append(_row(label, [_gib(size) for size in sizes]))
    rows.append(_row("all tensors", [_gib(plan.tensors(phase)) for phase in PHASES]))
    rows.append(
        f"with {_gib(plan.allocator)} for torch's allocator and {_gib(plan.libraries)} for CUDA and NCCL: "
        f"{_gib(plan.needed)} GiB needed, in {plan.peak_phase}"
    )
    return "\n".join(rows)


def summary_line(plan: MemoryPlan) -> str:
    """The plan in a line, for the log of a run."""
    phases = ", ".join(f"{phase} {_gib(plan.tensors(phase))}" for phase in PHASES)
    parts = sorted(plan.phases[plan.peak_phase].items(), key=lambda item: -item[1])
    largest = ", ".join(f"{PARTS[name]} {_gib(size)}" for name, size in parts[:4] if size)
    return f"GiB a GPU: {phases}; in {plan.peak_phase} {largest}; {_gib(plan.needed)} with all overhead"


def waiting_lines(plan: MemoryPlan, gpu: Gpu) -> list[str]:
    """A line if GPUs would wait for Python for a good part of a step, else none."""
    share = waiting_share(plan.work, plan.policies, gpu)
    if share < MIN_WAITING:
        return []
    small = f"{plan.work.num_tokens:,} tokens are few for a micro-batch here (training.micro_batch_size)"
    return [f"GPUs would wait {share:.0%} of the time for Python to start their kernels: {small}"]


def faster_lines(choice: Choice, target: float, gpu: Gpu) -> list[str]:
    """A line if the run fits, and with whole copies of the base would be faster (`suggest.whole_copies`); else none."""
    plan = choice.plan
    whole = whole_copies(plan, target, gpu) if choice.fits else None
    if whole is None:
        return []
    gain = whole.speed / tokens_per_second(plan.work, plan.policies, gpu) - 1
    needed = _gib(whole.plan.needed)
    return [f"There is room for the whole base on each GPU: {whole.text} needs {needed} GiB, and is {gain:.0%} faster"]


def changes_table(changes: Sequence[Change]) -> str:
    """A line a change: what to type, GiB needed and speed."""
    width = max((len(change.text) for change in changes), default=0)
    return "\n".join(
        f"  {change.text:<{width}}  {_gib(change.plan.needed)} GiB, {change.speed:,.0f} tokens/s" for change in changes
    )


def as_json(plan: MemoryPlan) -> dict[str, Any]:
    """The plan's figures in GiB, for preflight.json and summary.json."""
    return {
        "phases": {phase: _gib_values(plan.phases[phase]) for phase in PHASES},
        "tensors_gib": {phase: round(plan.tensors(phase) / GIB, 3) for phase in PHASES},
        "allocator_gib": round(plan.allocator / GIB, 3),
        "libraries_gib": round(plan.libraries / GIB, 3),
        "needed_gib": round(plan.needed / GIB, 3),
        "activations": describe_policies(plan.policies),
        "micro_batch_size": plan.work.micro_batch_size,
        "reshard_after_forward": plan.work.reshards,
        "host_gib_rank_0": _gib_values(plan.host),
        "pinned_gib_a_rank": round(plan.pinned / GIB, 3),
    }


def _gib_values(parts: Mapping[str, int]) -> dict[str, float]:
    return {name: round(size / GIB, 3) for name, size in parts.items()}


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / GIB:.2f}"


def _row(label: str, cells: Sequence[str]) -> str:
    return f"{label:<{_WIDTH}}" + "".join(f"{cell:>10}" for cell in cells)
