"""Choose activation policies, the micro-batch and whether layers stay gathered, for the best predicted speed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise

from qlora_fsdp.config.schema import Activations, Config
from qlora_fsdp.memory.activation_bytes import Policy
from qlora_fsdp.memory.gpus import Gpu
from qlora_fsdp.memory.plan import MemoryPlan, planner
from qlora_fsdp.memory.speed import tokens_per_second
from qlora_fsdp.memory.workload import Workload

AUTO = "auto"  # of training.micro_batch_size
MARGIN = 0.05  # of the free memory, left free
ROOM = 0.02  # of the target, that auto leaves where it has a choice: plans are not exact
LADDER = (Policy.none, Policy.selective, Policy.full, Policy.offload)  # from the fastest to the smallest
_FATES = {
    Policy.none: "kept",
    Policy.selective: "kept but for the norms' outputs",
    Policy.full: "recomputed",
    Policy.offload: "recomputed, their inputs offloaded",
}


@dataclass(frozen=True)
class Choice:
    """A plan, and whether it fits the target that it was chosen for."""

    plan: MemoryPlan
    fits: bool


def choose(work: Workload, target: float, gpu: Gpu) -> Choice:
    """The fastest plan that needs at most `target` bytes a GPU, with some room; the smallest where none does.

    Args:
        work: its micro-batch counts where `training.micro_batch_size` is a number.
        target: bytes, libraries included.
        gpu: for the rates.
    """
    choices = [
        _choose_policies(replace(each, micro_batch_size=size), target)
        for size in micro_batch_sizes(work)
        for each in _ways_to_reshard(work)
    ]
    fitting = [choice for choice in choices if choice.fits]
    if not fitting:
        return min(choices, key=lambda choice: choice.plan.needed)
    return max(fitting, key=lambda choice: tokens_per_second(choice.plan.work, choice.plan.policies, gpu))


def micro_batch_sizes(work: Workload) -> list[int]:
    """The micro-batch sizes to choose among: powers of two that divide a rank's part of the global batch."""
    training = work.config.training
    if training.micro_batch_size != AUTO:
        return [work.micro_batch_size]
    assert training.global_batch_size is not None
    part = training.global_batch_size // work.num_ranks
    return [size for size in (2**power for power in range(part.bit_length())) if part % size == 0]


def _ways_to_reshard(work: Workload) -> Iterator[Workload]:
    """With layers that stay gathered between forward and backward, and with layers that don't; or as it is set."""
    fsdp = work.config.fsdp
    is_open = fsdp.reshard_after_forward is None and work.reshards
    if is_open and work.num_shards > 1 and work.is_cuda and not fsdp.cpu_offload:
        yield replace(work, config=replace(work.config, fsdp=replace(fsdp, reshard_after_forward=False)))
    yield work


def fixed_policies(config: Config, num_layers: int) -> tuple[Policy, ...] | None:
    """The layers' policies that `memory.activations` names; None for auto."""
    memory = config.memory
    if memory.activations is Activations.auto:
        return None
    if memory.activations is Activations.every_k:
        return tuple(Policy.none if index % memory.every_k else Policy.full for index in range(num_layers))
    return (Policy(memory.activations.value),) * num_layers


def next_smaller(policies: Sequence[Policy]) -> tuple[Policy, ...] | None:
    """The policies with an eighth of the layers, the first of those with the fastest, a step down; None at the end."""
    fastest = next(policy for policy in LADDER if policy in policies)
    if fastest is LADDER[-1]:
        return None
    smaller = LADDER[LADDER.index(fastest) + 1]
    some = [index for index, policy in enumerate(policies) if policy is fastest][: -(len(policies) // -8)]
    return tuple(smaller if index in some else policy for index, policy in enumerate(policies))


def describe_policies(policies: Sequence[Policy]) -> str:
    """`of 12 layers recomputed, of 20 kept`, in the order of the layers; of alternating ones the counts."""
    runs = [(policy, len(list(group))) for policy, group in groupby(policies)]
    if len(runs) > 3:
        runs = [(policy, policies.count(policy)) for policy in dict.fromkeys(policies)]
    parts = [f"of {count} layers {_FATES[policy]}" for policy, count in runs]
    return ", ".join([parts[0], *(part.replace(" layers", "") for part in parts[1:])])


def describe_choice(plan: MemoryPlan) -> str:
    """What becomes of activations, and of gathered layers where they stay."""
    stays = "" if plan.work.reshards or plan.work.num_shards == 1 else ", layers gathered once a pass"
    return f"activations {describe_policies(plan.policies)}{stays}"


def _choose_policies(work: Workload, target: float) -> Choice:
    fixed = fixed_policies(work.config, work.shape.num_layers)
    make_plan = planner(work)
    plan, target_with_room = None, target * (1 - ROOM)
    small = _from_fast_to_small(work.shape.num_layers, lambda some: make_plan(some).needed <= target_with_room)
    for policies in [fixed] if fixed is not None else small:
        plan = make_plan(policies)
        if plan.needed <= target_with_room:
            return Choice(plan, True)
    assert plan is not None
    return Choice(plan, plan.needed <= target)


def _from_fast_to_small(num_layers: int, fits: Callable[[Sequence[Policy]], bool]) -> Iterator[tuple[Policy, ...]]:
    """Policies in which ever more layers, the first ones first, take the next step of the ladder.

    The first layers, because the others have freed their activations by the time that backward comes to these. Within
    a step the least number of layers that fits is found by bisection.
    """
    yield (LADDER[0],) * num_layers
    for fast, small in pairwise(LADDER):

        def mixed(num_small: int, fast: Policy = fast, small: Policy = small) -> tuple[Policy, ...]:
            return (small,) * num_small + (fast,) * (num_layers - num_small)

        low, high = 1, num_layers
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if fits(mixed(middle)) else (middle + 1, high)
        yield mixed(low)
