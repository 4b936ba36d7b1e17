"""Plans the memory of a run that is about to start: chooses what the settings leave open, and refuses what can't fit.

The machine is passed in as an argument, so tests can plan for any machine.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from qlora_fsdp.common.errors import ConfigError, MemoryShortage
from qlora_fsdp.common.text import join_words
from qlora_fsdp.config.schema import Activations, Config, QuantConfig, ShardingStrategy
from qlora_fsdp.config.settings import problem_with, show
from qlora_fsdp.config.world import AUTO
from qlora_fsdp.memory.gpus import Gpu
from qlora_fsdp.memory.plan import GIB, MemoryPlan
from qlora_fsdp.memory.policy import Policy, describe_policies, fixed_policies
from qlora_fsdp.memory.search import MAX_SHOWN, Room, cheapest_changes, choose, enough_gpus, smaller_runs, use_spare
from qlora_fsdp.memory.show import changes_table, describe_choice, host_line, remarks, speed_text, table
from qlora_fsdp.memory.traced import TracedModel
from qlora_fsdp.memory.workload import Workload


@dataclass(frozen=True)
class Machine:
    """The machine that a rank runs on.

    Attributes:
        num_ranks: all processes of the run.
        local_num_ranks: those of this host.
        target: bytes per GPU that the run may use (on a CPU: bytes of host memory per rank); the least of all ranks.
        gpu: its rates predict the speed.
        is_cuda: whether the ranks have GPUs.
        host_available: bytes of host memory that all ranks of this host can have together.
        can_read_peers: whether the GPUs of a host can read one another's memory.
    """

    num_ranks: int
    local_num_ranks: int
    target: float
    gpu: Gpu
    is_cuda: bool
    host_available: int
    can_read_peers: bool = True

    @property
    def room(self) -> Room:
        """What a GPU has room for."""
        return Room(self.target, self.gpu)


@dataclass(frozen=True)
class RunPlan:
    """How the run will use memory.

    Attributes:
        plan: the predicted bytes; None for a model that can't be traced.
        policies: the activation policy of each layer.
        num_tile_tokens: tokens that MLPs, experts and norms compute at a time; None for all.
        head_in_pieces: whether the loss dequantizes an int8 head in pieces.
        micro_batch_size: sequences per rank and forward pass.
        num_slices: ranks that share each sequence.
        sharding_strategy: how parameters are spread over the ranks.
        reshard_after_forward: whether layers are freed after their forward.
        reads_peers: whether codes may be read from other GPUs (sharding/peer_weights.py).
        fits: whether it fits, by the plan.
        lines: what to tell the user.
        offloaded_bytes: most bytes of a layer's input, and of attention's result, in host memory; 0 without a plan, or
            where none is offloaded.
    """

    plan: MemoryPlan | None
    policies: tuple[Policy, ...]
    num_tile_tokens: int | None
    head_in_pieces: bool
    micro_batch_size: int
    num_slices: int
    sharding_strategy: ShardingStrategy
    reshard_after_forward: bool
    reads_peers: bool
    fits: bool
    lines: tuple[str, ...]
    offloaded_bytes: tuple[int, int] = (0, 0)

    def with_models(self, model: TracedModel, teacher: TracedModel | None) -> RunPlan:
        """The plan that another rank has told, with this rank's model, and its teacher where that is another one."""
        if self.plan is None:
            return self
        work = replace(self.plan.work, model=model, teacher_model=teacher)
        return replace(self, plan=replace(self.plan, work=work))

    @property
    def chosen(self) -> dict[str, Any]:
        """What was chosen for settings that may be auto, by key; what was typed where they are not."""
        return {
            "training.micro_batch_size": self.micro_batch_size,
            "distributed.context_parallel": self.num_slices,
            "fsdp.sharding_strategy": self.sharding_strategy.name,
        }


def plan_run(
    config: Config,
    model: TracedModel,
    quant: QuantConfig,
    machine: Machine,
    teacher: TracedModel | None = None,
) -> RunPlan:
    """Choose what the settings leave open, and check the rest against the machine.

    Args:
        config: the settings of the run.
        model: the model, which can be asked what it takes under any settings.
        quant: how the weights are quantized, which a quantized checkpoint decides by itself.
        machine: what the run has.
        teacher: a teacher that is a model of its own; None without one.

    Raises:
        ConfigError: the weights alone need more than `memory.target_gib`.
        MemoryShortage: the weights alone need more than the free memory, the run needs more host memory than there is,
            or on a CPU its tensors do.
    """
    size = config.training.micro_batch_size
    work = Workload(
        model,
        replace(config, quant=quant),
        machine.num_ranks,
        machine.local_num_ranks,
        1 if size == AUTO else size,
        machine.is_cuda,
        machine.can_read_peers,
        teacher,
    )
    host = machine.host_available if machine.is_cuda else math.inf
    choice = use_spare(choose(work, replace(machine.room, host=host)), machine.target)
    plan = choice.plan
    _check_weights(plan, machine)
    _check_host(plan, machine)
    _check_cpu(plan, work, machine)
    lines: list[str] = []
    if machine.is_cuda:
        lines.append("\n".join(("the plan", table(plan), host_line(plan), speed_text(plan, machine.gpu))))
    lines.append(_reason(work, plan, machine))
    if machine.is_cuda:
        lines += remarks(choice, machine.room)
    if not choice.fits and machine.is_cuda:
        cheapest = cheapest_changes(work, machine.room)
        lines.append("This may not fit. What would, by the plan:\n" + changes_table(cheapest))
    chosen = plan.work.config
    return RunPlan(
        plan=plan,
        policies=plan.policies,
        num_tile_tokens=chosen.memory.num_tile_tokens,
        head_in_pieces=chosen.memory.head_in_pieces is True,
        micro_batch_size=plan.work.micro_batch_size,
        num_slices=chosen.distributed.num_slices,
        sharding_strategy=chosen.fsdp.sharding_strategy,
        reshard_after_forward=plan.work.reshards,
        reads_peers=plan.work.can_read_peers,
        fits=choice.fits or not machine.is_cuda,
        lines=tuple(lines),
        offloaded_bytes=_offloaded_bytes(plan),
    )


def run_without_plan(config: Config, num_layers: int, reason: str) -> RunPlan:
    """For a model that can't be traced: what is open takes the least memory."""
    size = config.training.micro_batch_size
    if size == AUTO:
        size = 1
    strategy = config.fsdp.sharding_strategy
    if strategy is ShardingStrategy.auto:
        strategy = ShardingStrategy.FULL_SHARD
    policies = fixed_policies(config.memory, num_layers) or (Policy.full,) * num_layers
    line = f"no plan, as this model can't be traced: {reason}; "
    line += f"micro-batch {size}, {strategy.value}, activations {describe_policies(policies)}"
    return RunPlan(
        plan=None,
        policies=policies,
        num_tile_tokens=config.memory.num_tile_tokens,
        head_in_pieces=config.memory.head_in_pieces is not False,
        micro_batch_size=size,
        num_slices=config.distributed.num_slices,
        sharding_strategy=strategy,
        reshard_after_forward=config.fsdp.reshards,
        reads_peers=True,
        fits=True,
        lines=(line,),
    )


def _offloaded_bytes(plan: MemoryPlan) -> tuple[int, int]:
    """What `RunPlan.offloaded_bytes` says."""
    hosts = [use.host for use in plan.work.layer_uses(plan.policies) if use.host]
    results = [host[-1] for host in hosts if len(host) > 1]
    return max((host[0] for host in hosts), default=0), max(results, default=0)


def _reason(asked: Workload, plan: MemoryPlan, machine: Machine) -> str:
    """One line: what was chosen of what the settings leave open in `asked`, and why."""
    config = asked.config
    work = plan.work
    chosen = []
    if config.memory.activations is Activations.auto:
        chosen.append("memory.activations")
    if config.training.micro_batch_size == AUTO:
        chosen.append("training.micro_batch_size")
    if config.memory.tile_tokens == AUTO and work.config.memory.num_tile_tokens is not None:
        chosen.append("memory.tile_tokens")
    if config.memory.head_in_pieces == AUTO and work.config.memory.head_in_pieces is True:
        chosen.append("memory.head_in_pieces")
    said = "free memory less 5 %"
    if config.memory.target_gib:
        said = show("memory.target_gib", config.memory.target_gib)
    target = f"{machine.target / GIB:.1f} GiB ({said})"
    by = f"as set; {target}"
    if chosen:
        by = f"auto chose {join_words(chosen)} for the best speed within {target}"
    return f"micro-batch {work.micro_batch_size}, {describe_choice(plan)} ({by})"


def _check_weights(plan: MemoryPlan, machine: Machine) -> None:
    """Refuse a run whose weights alone are too large. No error in the rest of the plan could change that."""
    work = plan.work
    config = work.config
    weights = plan.weight_bytes
    if weights <= machine.target:
        return
    missing = (weights - machine.target) / GIB
    reason = f"is {missing:.2f} GiB less than a rank's weights take, {weights / GIB:.2f} GiB"
    if machine.is_cuda:
        gpus = enough_gpus(work, machine.room)
        more = f"Use {gpus.text}, or set fsdp=offload." if gpus else "Set fsdp=offload."
        reason += " with CUDA's own share."
    else:
        room = "use a host with more memory" if config.memory.target_gib is None else "set memory.target_gib higher"
        more = f"Set model to a smaller one, or {room}."
        reason += "."
    adapters = plan.phases["load"]["adapters"]
    if adapters > weights / 2:
        lower = f"Lower lora.r={config.lora.r}"
        if work.parts.has_experts:
            lower += ", or set lora.experts=false"
        more = f"{lower}: adapters take {adapters / GIB:.2f} GiB of it."
    if config.memory.target_gib is not None:
        raise ConfigError([problem_with(config.memory, "memory.target_gib", reason, more)])
    raise MemoryShortage(f"The free memory of {machine.target / GIB:.2f} GiB (less 5 %) {reason} {more}")


def _check_host(plan: MemoryPlan, machine: Machine) -> None:
    """Refuse a run that needs more host memory than there is."""
    needed = plan.host_needed
    if needed <= machine.host_available or not machine.is_cuda:
        return
    pinned = plan.pinned * machine.local_num_ranks
    changes = {"parameters": "another than fsdp=offload", "activations": "memory=recompute"}
    if plan.work.config.memory.activations is Activations.auto:  # it offloads what the GPU has no room for
        changes["activations"] = "a smaller training.max_length"
    uses = [change for part, change in changes.items() if part in plan.host]
    fix = f"Set {' and '.join(uses)}" if uses else "Start fewer processes a host"
    raise MemoryShortage(
        f"The {machine.local_num_ranks} ranks of a host need {needed / GIB:.1f} GiB of host memory, {pinned / GIB:.1f} "
        f"GiB of it pinned, and {machine.host_available / GIB:.1f} GiB can be had (free memory and cgroup limits). "
        f"{fix}, or give the host or the container more memory."
    )


def _check_cpu(plan: MemoryPlan, work: Workload, machine: Machine) -> None:
    """Refuse a run on CPUs whose tensors do not fit: a process that takes too much is killed without a message."""
    needed = plan.needed + plan.host.get("activations", 0)  # offloaded activations are in host memory too
    available = machine.host_available / machine.local_num_ranks
    if machine.is_cuda or needed <= available:
        return
    fitting = smaller_runs(work, machine.room)[:MAX_SHOWN]
    fix = "Set model to a smaller one."
    if fitting:
        fix = "\n  ".join(["What would fit, by the plan:", *(change.text for change in fitting)])
    raise MemoryShortage(
        f"A rank's tensors need {needed / GIB:.1f} GiB of host memory by the plan, with a micro-batch of "
        f"{plan.work.micro_batch_size:,} x {work.batch.sequence_length:,} tokens, and {available / GIB:.1f} GiB "
        f"can be had (free memory and cgroup limits). {fix}"
    )
