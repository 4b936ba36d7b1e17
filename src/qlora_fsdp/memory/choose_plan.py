"""Chooses what the settings leave open, for the best predicted speed within a given memory.

The settings may leave open: each layer's activation policy (`memory.activations=auto`), tiles
(`memory.tile_tokens=auto`), the micro-batch size, whether each rank has the whole base or a part
(`fsdp.sharding_strategy=auto`), whether layers stay gathered between forward and backward, and how many ranks share a
sequence (`distributed.context_parallel=auto`).

The activation policies of a run's layers: those that the settings ask for, or ever smaller mixtures of them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import groupby, pairwise
from math import gcd, inf
from typing import Any

from qlora_fsdp.config.batch_size import AUTO
from qlora_fsdp.config.checks.check_training import check_context_parallel, explain_no_tiles
from qlora_fsdp.config.schema import Activations, MemoryConfig, ShardingStrategy
from qlora_fsdp.memory.gpus import Gpu
from qlora_fsdp.memory.model_bytes import ModelBytes
from qlora_fsdp.memory.plan import GIB, MemoryPlan, planner, with_spare_used
from qlora_fsdp.memory.policy import Policy
from qlora_fsdp.memory.speed import tokens_per_second
from qlora_fsdp.memory.workload import Workload

# Tokens of a micro-batch that auto chooses, if a sequence has no more: more gains nothing, on a GPU and on a CPU.
MAX_TOKENS = 2**15
CPU_TOKENS = 2**11
CLOSE = 0.01  # a plan whose predicted speed is this close to the best counts as equally fast
MARGIN = 0.05  # part of the free memory that is not planned with
SPARE = 0.10  # part of the target that is left free by what a run can do without: whole copies, kept weights
TILE_TOKENS = 2**13  # tokens of a tile that auto chooses: enough for products at the GPU's full rate
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


@dataclass(frozen=True)
class Choice:
    """The plan that was chosen.

    Attributes:
        plan: its settings have what was open decided.
        fits: whether it fits the target.
        gives_up_graph: whether it does without a CUDA graph, which the settings ask for, because of the target.
        sharding: why the base is whole or split; None if the settings say it.
        sharing: why ranks share sequences; None if they do not, or if the settings say it.
    """

    plan: MemoryPlan
    fits: bool
    gives_up_graph: bool = False
    sharding: str | None = None
    sharing: str | None = None

    @property
    def keeps_all(self) -> bool:
        """Whether no layer computes its forward again."""
        return not any(policy.recomputes for policy in self.plan.policies)


def choose(work: Workload, target: float, gpu: Gpu, host: float = inf) -> Choice:
    """The fastest plan that needs at most `target` bytes per GPU, less some room; the smallest plan if none fits.

    Args:
        work: its micro-batch size is kept unless `training.micro_batch_size` is auto.
        target: bytes that the run may use, libraries included.
        gpu: its rates predict the speed.
        host: bytes of host memory that the ranks of a host may use together.
    """
    alone = _choose_strategy(work, target, gpu, host)
    if alone.fits or alone.plan.needed_in("load") > target:  # sharing a sequence makes no weights smaller
        return alone
    for shared in ways_to_share(work):
        choice = _choose_strategy(shared, target, gpu, host)
        if choice.fits:
            plan = alone.plan
            num_slices = shared.config.distributed.num_slices
            why = f"on one it would need {plan.needed / GIB:.2f} of {target / GIB:.2f} GiB"
            if plan.needed <= target:
                why += f", and {plan.host_needed / GIB:.1f} GiB of host memory a host"
            sharing = f"{num_slices} GPUs share each sequence (distributed.context_parallel=auto): {why}"
            return replace(choice, sharing=sharing)
    return alone


def use_spare(choice: Choice, target: float) -> Choice:
    """The same choice, which spends memory that is left over on dequantizing less, where a graph can.

    Weights are dequantized ahead if the run still fits the target, and kept within a share of it.
    """
    if not choice.fits:
        return choice
    return replace(choice, plan=with_spare_used(choice.plan, target, target * (1 - SPARE)))


def ways_to_share(work: Workload) -> Iterator[Workload]:
    """The run with 2, 3 and more ranks of a host that share each sequence, if the settings leave that open.

    The micro-batch must be one sequence, or open. To take one of several sequences at a time needs less memory too, and
    is faster than to share one.
    """
    config = work.config
    is_open = config.distributed.context_parallel == AUTO and config.training.micro_batch_size in (AUTO, 1)
    most = gcd(work.num_ranks, work.local_num_ranks) if is_open and work.is_cuda else 1
    for num_slices in range(2, most + 1):
        shared = _with_values(work, {"distributed.context_parallel": num_slices})
        conflicts = check_context_parallel(
            shared.config.distributed,
            config.task.name,
            config.training,
            config.tracking,
            config.model.attn_implementation,
        )
        is_possible = most % num_slices == 0 and next(conflicts, None) is None
        if is_possible and work.model.why_not_sliced(shared.batch) is None:
            yield shared


def _choose_strategy(work: Workload, target: float, gpu: Gpu, host: float) -> Choice:
    """The fastest plan for the number of ranks that share sequences in the settings."""
    fsdp = work.config.fsdp
    if fsdp.sharding_strategy is not ShardingStrategy.auto:
        return _choose_gathers(work, target, gpu, host)
    split = _choose_gathers(with_strategy(work, ShardingStrategy.FULL_SHARD), target, gpu, host)
    if not (fsdp.may_be_whole and work.num_ranks > 1 and work.is_cuda):
        return split
    copies = with_strategy(work, ShardingStrategy.NO_SHARD)
    weights = sum(ModelBytes(copies).resident(with_training=False).values())
    if weights > target:  # the common case of large models, without planning more
        why = f"{weights / GIB:.2f} GiB for weights alone, and there are {target / GIB:.2f}"
        return replace(split, sharding=f"The base is split (auto is FULL_SHARD): whole copies would take {why}")
    whole = _choose_rest(copies, target * (1 - SPARE), gpu, host)
    gain = _speed(whole, gpu) / _speed(split, gpu) - 1
    needs = f"{whole.plan.needed / GIB:.2f} of {target / GIB:.2f} GiB"
    if whole.fits and (gain >= 0 or not split.fits):
        why = f"{needs}, and {gain:.0%} faster than FULL_SHARD"
        return replace(whole, sharding=f"Each GPU has the whole base (auto is NO_SHARD): {why}")
    why = f"be {-gain:.0%} slower" if whole.fits else f"take {needs}, of which {SPARE:.0%} stay free"
    return replace(split, sharding=f"The base is split (auto is FULL_SHARD): whole copies would {why}")


def _choose_gathers(work: Workload, target: float, gpu: Gpu, host: float) -> Choice:
    """The fastest plan in which codes are read from other GPUs; without that, and its buffers, if none fits."""
    choice = _choose_rest(work, target, gpu, host)
    if choice.fits or not work.reads_peers:
        return choice
    return _choose_rest(replace(work, can_read_peers=False), target, gpu, host)


def with_strategy(work: Workload, strategy: ShardingStrategy) -> Workload:
    """The same run under another strategy."""
    return _with_values(work, {"fsdp.sharding_strategy": strategy})


def _with_values(work: Workload, values: Mapping[str, Any]) -> Workload:
    """The same run under other settings, by their keys."""
    return replace(work, config=work.config.with_values(values))


def _speed(choice: Choice, gpu: Gpu) -> float:
    return tokens_per_second(choice.plan.work, choice.plan.policies, gpu)


def _choose_rest(work: Workload, target: float, gpu: Gpu, host: float) -> Choice:
    """The fastest plan under the strategy that the settings name."""
    choices: list[Choice] = []
    for size in micro_batch_sizes(work):
        sized = replace(work, micro_batch_size=size)
        some = [_choose_policies(way, target, gpu, host) for way in _ways_to_reshard(sized)]
        tiled = with_tiles(sized)
        if tiled is not None and not any(choice.fits and choice.keeps_all for choice in some):
            some += [_choose_policies(way, target, gpu, host) for way in _ways_to_reshard(tiled)]
        choices += some
        some_fit = any(choice.fits for choice in some)
        if some_fit is not work.is_cuda:
            break  # larger ones would not fit either; on a CPU smaller ones would
    fitting = sorted((choice for choice in choices if choice.fits), key=lambda choice: -_speed(choice, gpu))
    may_launch = work.config.compute.cuda_graph == "auto"
    if not fitting and may_launch and any(choice.plan.beside_graph for choice in choices):
        launched = _with_values(work, {"compute.cuda_graph": False})  # kernel by kernel, which keeps less memory
        return replace(_choose_rest(launched, target, gpu, host), gives_up_graph=True)
    if not fitting:
        return _smallest(choices, target)
    close = [choice for choice in fitting if _speed(choice, gpu) >= (1 - CLOSE) * _speed(fitting[0], gpu)]
    # All of these are about equally fast, so take the smallest micro-batch, which needs the least memory. Of equal
    # sizes take the one with the least in host memory, which takes time to pin; of equal ones the fastest, the first.
    return min(close, key=lambda choice: (choice.plan.work.micro_batch_size, choice.plan.host.get("activations", 0)))


def micro_batch_sizes(work: Workload) -> list[int]:
    """The micro-batch sizes to choose from: powers of two that divide a rank's part of the global batch.

    On a CPU the largest comes first, and is taken if it fits: no time is lost between kernels there, and the speed of
    GPUs predicts nothing.
    """
    training = work.config.training
    if training.micro_batch_size != AUTO:
        return [work.micro_batch_size]
    assert training.global_batch_size is not None
    part = training.global_batch_size // work.num_groups
    length = -(training.max_length // -work.config.distributed.num_slices)
    max_tokens = MAX_TOKENS if work.is_cuda else CPU_TOKENS
    most = max(1, max_tokens // length)
    powers = [2**power for power in range(part.bit_length())]
    sizes = [size for size in powers if part % size == 0 and size <= most]
    return sizes if work.is_cuda else sizes[::-1]


def _ways_to_reshard(work: Workload) -> Iterator[Workload]:
    """The run with layers that stay gathered between forward and backward, if that is open, and the run as it is."""
    fsdp = work.config.fsdp
    is_open = fsdp.reshard_after_forward is None and work.reshards
    if is_open and work.num_shards > 1 and work.is_cuda and not fsdp.cpu_offload:
        yield _with_values(work, {"fsdp.reshard_after_forward": False})
    yield work


def with_tiles(work: Workload) -> Workload | None:
    """The run with tiles, if that is open and a micro-batch is long enough for them to help."""
    memory = work.config.memory
    is_long = work.is_cuda and work.num_tokens > MAX_TOKENS
    if memory.tile_tokens != AUTO or not is_long or explain_no_tiles(work.config.lora) is not None:
        return None
    return _with_values(work, {"memory.tile_tokens": TILE_TOKENS})


def describe_choice(plan: MemoryPlan) -> str:
    """Describe the choice: the activation policies, and what else stays from forward to backward."""
    text = f"activations {describe_policies(plan.policies)}"
    tile = plan.work.config.memory.num_tile_tokens
    if tile is not None:
        text += f", MLPs in tiles of {tile:,} tokens"
    if plan.work.num_shards > 1 and not plan.work.reshards:
        text += ", layers gathered once a pass"
    number = plan.num_kept_dequantized
    if number:
        until = "for the whole run" if plan.work.holds_dequantized else "until backward"
        text += f", dequantized weights of {number} layers kept {until}"
    return text


def _choose_policies(work: Workload, target: float, gpu: Gpu, host: float) -> Choice:
    """The fastest plan that a ladder of policies leads to, an early one if close; the smallest plan if none fits."""
    plans = plans_of_policies(work, target, host)
    choices = [Choice(plan, plan.needed <= target and plan.host_needed <= host) for plan in plans]
    fitting = [choice for choice in choices if choice.fits]
    if not fitting:
        return _smallest(choices, target)
    fastest = max(_speed(choice, gpu) for choice in fitting)
    return next(choice for choice in fitting if _speed(choice, gpu) >= (1 - CLOSE) * fastest)


def _smallest(choices: Iterable[Choice], target: float) -> Choice:
    """The one that needs least of the GPU's memory; of those that all keep to `target`, least of the host's."""
    return min(choices, key=lambda choice: (max(target, choice.plan.needed), choice.plan.host_needed))


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
