"""The plan of a run that is about to start: policies and micro-batch chosen, and what can't work refused.

Pure: what the machine has is an argument.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from qlora_fsdp.common.errors import ConfigError, MemoryShortage
from qlora_fsdp.config.schema import Activations, Config, QuantConfig
from qlora_fsdp.config.settings import problem_with, show
from qlora_fsdp.memory.activation_bytes import Policy, host_bytes
from qlora_fsdp.memory.choose import AUTO, choose, describe_choice, describe_policies, fixed_policies
from qlora_fsdp.memory.gpus import Gpu
from qlora_fsdp.memory.plan import GIB, MemoryPlan
from qlora_fsdp.memory.shape import model_shape
from qlora_fsdp.memory.show import changes_table, faster_lines, host_line, speed_text, table, waiting_lines
from qlora_fsdp.memory.suggest import MAX_SHOWN, cheapest_changes, enough_gpus, smaller_runs
from qlora_fsdp.memory.workload import Workload


@dataclass(frozen=True)
class Machine:
    """What a rank runs on.

    Attributes:
        num_ranks: processes in all.
        local_num_ranks: of them on this host.
        target: bytes of a GPU (on a CPU: of host memory) that the run may use; the least of all ranks.
        gpu: for the rates.
        is_cuda: whether there is a GPU.
        host_available: bytes of host memory to be had on this host, for all its ranks.
    """

    num_ranks: int
    local_num_ranks: int
    target: float
    gpu: Gpu
    is_cuda: bool
    host_available: int


@dataclass(frozen=True)
class Decision:
    """How the run uses memory.

    Attributes:
        plan: None for a model that the plan does not know.
        policies: one a layer.
        micro_batch_size: sequences a rank a forward pass.
        reshard_after_forward: layers are freed after their forward.
        lines: to tell the user.
    """

    plan: MemoryPlan | None
    policies: tuple[Policy, ...]
    micro_batch_size: int
    reshard_after_forward: bool
    lines: tuple[str, ...]


def decide(
    config: Config,
    model_config: Mapping[str, Any],
    num_layers: int,
    quant: QuantConfig,
    compute_bytes: int,
    fused: frozenset[str],
    machine: Machine,
) -> Decision:
    """Choose what `auto` leaves open, and check the rest against the machine.

    Args:
        config: of the run.
        model_config: the transformers config, as a dict.
        num_layers: that the model has.
        quant: as the weights are, which a quantized checkpoint decides itself.
        compute_bytes: of an activation.
        fused: the settings of `kernels` whose kernels are Liger's.
        machine: what there is.

    Raises:
        ConfigError: a target smaller than the weights alone, or `auto` for a model that the plan does not know.
        MemoryShortage: host memory for less than the run pins and loads, or on a CPU for less than its tensors.
    """
    shape = model_shape(model_config)
    size = config.training.micro_batch_size
    if shape is None or shape.num_layers != num_layers:
        return _without_plan(config, str(model_config.get("model_type")), num_layers)
    config = replace(config, quant=quant)
    first_size = 1 if size == AUTO else size
    work = Workload(
        shape, config, machine.num_ranks, machine.local_num_ranks, first_size, compute_bytes, fused, machine.is_cuda
    )
    choice = choose(work, machine.target, machine.gpu)
    plan, lines = choice.plan, []
    _check_weights(plan, machine)
    _check_host(plan, machine)
    _check_cpu(plan, work, machine)
    if machine.is_cuda:
        lines.append("\n".join(("the plan", table(plan), host_line(plan), speed_text(plan, machine.gpu))))
    lines.append(_reason(plan, machine))
    if machine.is_cuda:
        lines += waiting_lines(plan, machine.gpu)
        lines += faster_lines(choice, machine.target, machine.gpu)
    if not choice.fits and machine.is_cuda:
        cheapest = cheapest_changes(work, machine.target, machine.gpu)
        lines.append("This may not fit. What would, by the plan:\n" + changes_table(cheapest))
    return Decision(plan, plan.policies, plan.work.micro_batch_size, plan.work.reshards, tuple(lines))


def _without_plan(config: Config, model_type: str, num_layers: int) -> Decision:
    size = config.training.micro_batch_size
    if size == AUTO:
        reason = f"needs the memory plan, which does not know model_type={model_type}."
        raise ConfigError(
            [problem_with(config, "training.micro_batch_size", reason, "Set training.micro_batch_size=1.")]
        )
    policies = fixed_policies(config, num_layers) or (Policy.full,) * num_layers
    line = f"no plan for model_type={model_type}; activations {describe_policies(policies)}"
    return Decision(None, policies, size, config.fsdp.reshards, (line,))


def _reason(plan: MemoryPlan, machine: Machine) -> str:
    """What was chosen, and why."""
    config, work = plan.work.config, plan.work
    chosen = [
        name
        for name, is_auto in (
            ("memory.activations", config.memory.activations is Activations.auto),
            ("training.micro_batch_size", config.training.micro_batch_size == AUTO),
        )
        if is_auto
    ]
    setting = show("memory.target_gib", config.memory.target_gib)
    target = f"{machine.target / GIB:.1f} GiB ({setting if config.memory.target_gib else 'free memory less 5 %'})"
    what = f"micro-batch {work.micro_batch_size}, {describe_choice(plan)}"
    by = f"auto chose {' and '.join(chosen)} for the best speed within {target}" if chosen else f"as set; {target}"
    return f"{what} ({by})"


def _check_weights(plan: MemoryPlan, machine: Machine) -> None:
    """The weights must be smaller than what there is, whatever the error of the rest of the plan."""
    config, work = plan.work.config, plan.work
    weights = sum(plan.phases["load"].values()) + plan.libraries
    if weights <= machine.target:
        return
    missing, share = (weights - machine.target) / GIB, f"{weights / GIB:.2f} GiB"
    reason = f"is {missing:.2f} GiB less than a rank's weights take, {share}"
    if machine.is_cuda:
        gpus = enough_gpus(work, machine.target, machine.gpu)
        more = f"Use {gpus.text}, or set fsdp=offload." if gpus else "Set fsdp=offload."
        reason += " with CUDA's own share."
    else:
        more = "Set model to a smaller one, or use a host with more memory."
        reason += "."
    if config.memory.target_gib is not None:
        raise ConfigError([problem_with(config, "memory.target_gib", reason, more)])
    raise MemoryShortage(f"The free memory of {machine.target / GIB:.2f} GiB (less 5 %) {reason} {more}")


def _check_host(plan: MemoryPlan, machine: Machine) -> None:
    needed = plan.host_needed
    if needed <= machine.host_available or not machine.is_cuda:
        return
    pinned = plan.pinned * machine.local_num_ranks
    uses = [
        name
        for name, part in (("fsdp=offload", "parameters"), ("memory.activations=offload", "activations"))
        if part in plan.host
    ]
    fix = f"Set another than {' and '.join(uses)}" if uses else "Start fewer processes a host"
    raise MemoryShortage(
        f"The {machine.local_num_ranks} ranks of a host need {needed / GIB:.1f} GiB of host memory, {pinned / GIB:.1f} "
        f"GiB of it pinned, and {machine.host_available / GIB:.1f} GiB can be had (free memory and cgroup limits). "
        f"{fix}, or give the host or the container more memory."
    )


def _check_cpu(plan: MemoryPlan, work: Workload, machine: Machine) -> None:
    """On a CPU tensors are in host memory, and a process that takes too much of it is killed without a word."""
    needed = plan.needed + host_bytes(plan.work, plan.policies)  # what is offloaded is in host memory too
    available = machine.host_available / machine.local_num_ranks
    if machine.is_cuda or needed <= available:
        return
    fitting = [f"\n  {change.text}" for change in smaller_runs(work, machine.target, machine.gpu)[:MAX_SHOWN]]
    raise MemoryShortage(
        f"A rank's tensors need {needed / GIB:.1f} GiB of host memory by the plan, with a micro-batch of "
        f"{plan.work.micro_batch_size:,} x {work.config.training.max_length:,} tokens, and {available / GIB:.1f} GiB "
        "can be had (free memory and cgroup limits). "
        + (f"What would fit, by the plan:{''.join(fitting)}" if fitting else "Set model to a smaller one.")
    )
