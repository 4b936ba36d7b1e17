"""The activation policies of a run's layers: those that the settings ask for, or ever smaller mixtures of them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import groupby, pairwise

from qlora_fsdp.config.schema import Activations, MemoryConfig
from qlora_fsdp.memory.plan import MemoryPlan, planner
from qlora_fsdp.memory.policy import Policy
from qlora_fsdp.memory.workload import Workload

ROOM = 0.02  # share of the target that is left free if there is a choice, because plans are not exact
# Policies that a plan may mix, each ladder from the fastest to the smallest. In short rows it is faster to keep all of
# a few layers, in long ones to keep attention's results of many. Where two ladders lead to about the same speed, the
# earlier one is taken.
LADDERS = (
    (Policy.none, Policy.selective, Policy.full, Policy.offload),
    (Policy.none, Policy.selective, Policy.attention, Policy.full),
    (Policy.none, Policy.selective, Policy.attention, Policy.offload_attention, Policy.offload),
)
_DESCRIPTIONS = {
    Policy.none: "kept",
    Policy.selective: "kept but for the norms' outputs",
    Policy.attention: "recomputed but for attention",
    Policy.full: "recomputed",
    Policy.offload_attention: "recomputed but for attention, its results and their inputs offloaded",
    Policy.offload: "recomputed, their inputs offloaded",
}


def fixed_policies(memory: MemoryConfig, num_layers: int) -> tuple[Policy, ...] | None:
    """The layers' policies that `memory.activations` asks for; None for auto."""
    match memory.activations:
        case Activations.auto:
            return None
        case Activations.half:
            return tuple(Policy.none if index % 2 else Policy.full for index in range(num_layers))
        case other:
            return (Policy(other.value),) * num_layers


def plans_of_policies(work: Workload, target: float, host: float) -> list[MemoryPlan]:
    """For each ladder the first of ever smaller plans that fits with some room, or else the smallest.

    On a CPU that is the first ladder alone: the speed of GPUs, by which they are compared, predicts nothing there.

    Args:
        work: what is planned. If its settings say the policies, there is one plan.
        target: bytes per GPU that the run may use.
        host: bytes of host memory that the ranks of a host may use together.
    """
    make_plan = cache(planner(work))  # ladders begin alike
    fixed = fixed_policies(work.config.memory, work.num_layers)
    if fixed is not None:
        return [make_plan(fixed)]

    def fits(policies: tuple[Policy, ...]) -> bool:
        return make_plan(policies).needed <= target * (1 - ROOM)

    plans = []
    for ladder in LADDERS if work.is_cuda else LADDERS[:1]:
        for policies in _from_fast_to_small(ladder, work.num_layers, fits):
            if fits(policies):
                break
        plans.append(_within_host(make_plan(policies), make_plan, host))
    return plans


def next_smaller(policies: Sequence[Policy]) -> tuple[Policy, ...] | None:
    """Less memory: an eighth of all layers, the first ones that have the fastest policy, take the next of their ladder.

    Returns:
        The new policies; None if all layers have the smallest policy.
    """
    ladder = next(ladder for ladder in LADDERS if set(policies) <= set(ladder))
    fastest = next(policy for policy in ladder if policy in policies)
    if fastest is ladder[-1]:
        return None
    smaller = ladder[ladder.index(fastest) + 1]
    some = [index for index, policy in enumerate(policies) if policy is fastest][: -(len(policies) // -8)]
    return tuple(smaller if index in some else policy for index, policy in enumerate(policies))


def describe_policies(policies: Sequence[Policy]) -> str:
    """`of 12 layers recomputed, of 20 kept`: runs of equal policies in order, or only counts if they alternate.

    Without policies, of a model whose layers are not known, all are kept.
    """
    if not policies:
        return _DESCRIPTIONS[Policy.none]
    runs = [(policy, len(list(group))) for policy, group in groupby(policies)]
    if len(runs) > 3:
        runs = [(policy, policies.count(policy)) for policy in dict.fromkeys(policies)]
    parts = [f"of {count} layers {_DESCRIPTIONS[policy]}" for policy, count in runs]
    return ", ".join([parts[0], *(part.replace(" layers", "") for part in parts[1:])])


def _within_host(plan: MemoryPlan, make_plan: Callable[[tuple[Policy, ...]], MemoryPlan], host: float) -> MemoryPlan:
    """The plan, but that no more attention results wait in host memory than it has room for, if that is enough."""
    with_results = [index for index, policy in enumerate(plan.policies) if policy is Policy.offload_attention]

    def without(number: int) -> MemoryPlan:
        policies = list(plan.policies)
        for index in with_results[:number]:
            policies[index] = Policy.offload
        return make_plan(tuple(policies))

    def fits(number: int) -> bool:
        return without(number).host_needed <= host

    least = bisect_left(range(len(with_results)), True, key=fits)
    return without(least)


def _from_fast_to_small(
    ladder: Sequence[Policy], num_layers: int, fits: Callable[[tuple[Policy, ...]], bool]
) -> Iterator[tuple[Policy, ...]]:
    """Policies from fast to small: ever more layers, from the first one on, take the next policy of a ladder.

    The first layers come first because backward reaches them last: recomputing one of them takes memory when the other
    layers have freed theirs. For each policy, bisection finds the least number of layers with which the run fits; if
    there is none, all layers take the policy.
    """
    yield (ladder[0],) * num_layers
    for fast, small in pairwise(ladder):
        mixtures = [(small,) * number + (fast,) * (num_layers - number) for number in range(1, num_layers + 1)]
        yield mixtures[min(bisect_left(mixtures, True, key=fits), num_layers - 1)]
