"""The search of the memory plan: many plans of one run, and the best of them for a question.

What is tried is listed in memory/choices.py. The questions:

- `choose`: the best predicted speed within the memory, by what the settings leave open. That may be: each layer's
  activation policy (`memory.activations=auto`), tiles (`memory.tile_tokens=auto`), whether an int8 head's loss is
  computed in pieces (`memory.head_in_pieces=auto`), the micro-batch size, whether each
  rank has the whole base or a part (`fsdp.sharding_strategy=auto`), whether layers stay gathered between forward and
  backward, and how many ranks share a sequence (`distributed.context_parallel=auto`);
- `smaller_runs` and `enough_gpus`: what would fit, where that does not;
- `largest_savings`: what would save most, where a run was short of memory;
- `whole_copies` and `dequantized_once`: what would be faster in memory that is left over;
- `longest`: how long rows can be (`preflight training.max_length=max`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations, pairwise
from math import inf

from qlora_fsdp.config.schema import ShardingStrategy
from qlora_fsdp.config.settings import show
from qlora_fsdp.config.world import AUTO
from qlora_fsdp.memory.choices import (
    MIN_LENGTH,
    Values,
    all_count,
    micro_batch_sizes,
    more_gpus,
    show_values,
    smaller_settings,
    ways_to_reshard,
    ways_to_share,
    with_head_pieces,
    with_tiles,
)
from qlora_fsdp.memory.gpus import Gpu
from qlora_fsdp.memory.model_bytes import ModelBytes
from qlora_fsdp.memory.plan import GIB, MemoryPlan, make_plan, planner, with_spare_used
from qlora_fsdp.memory.policy import LADDERS, Policy, fixed_policies
from qlora_fsdp.memory.speed import planned_tokens_per_second, tokens_per_second
from qlora_fsdp.memory.workload import Workload

CLOSE = 0.01  # a plan whose predicted speed is this close to the best counts as equally fast
MARGIN = 0.05  # part of the free memory that is not planned with
SPARE = 0.10  # part of the target that is left free by what a run can do without: whole copies, kept weights
ROOM = 0.02  # share of the target that is left free if there is a choice, because plans are not exact
MAX_TOGETHER = 3  # changes that are tried together
MAX_SHOWN = 3  # changes that a user is shown
MIN_GAIN = 0.03  # gain of speed from which on it is suggested to use memory that is left over
UNIT = 2**10  # tokens; the lengths of the longest rows are multiples of it
FIRST = (2**16, 2**18)  # tokens of a GPU's slice with which their search begins
MAX_TRIES = 4
MOST = 2**24  # tokens; longer rows are not looked for


@dataclass(frozen=True)
class Room:
    """The memory that a run may have, and the GPU that it is for.

    Attributes:
        target: bytes per GPU, libraries included.
        gpu: its rates predict the speed.
        host: bytes of host memory that the ranks of a host may use together.
    """

    target: float
    gpu: Gpu
    host: float = inf

    def has(self, plan: MemoryPlan) -> bool:
        """Whether a plan fits."""
        return plan.needed <= self.target and plan.host_needed <= self.host

    def without(self, share: float) -> Room:
        """The same with a share of the GPU's memory left free."""
        return replace(self, target=self.target * (1 - share))

    def speed(self, plan: MemoryPlan) -> float:
        """Predicted tokens per second of all GPUs together, if no dequantized weights are kept."""
        return tokens_per_second(plan.work, plan.policies, self.gpu)


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


@dataclass(frozen=True)
class Change:
    """One or more settings to change.

    Attributes:
        text: the change as it is typed on the command line, or a number of GPUs.
        plan: the plan after the change.
        speed: predicted tokens per second of all GPUs together.
        saved: bytes that a GPU needs less than before, where that was asked for.
    """

    text: str
    plan: MemoryPlan
    speed: float
    saved: int = 0


# What the settings leave open


def choose(work: Workload, room: Room) -> Choice:
    """The fastest plan that fits, with some room left; the smallest plan if none fits.

    The micro-batch size of `work` is kept unless `training.micro_batch_size` is auto.
    """
    alone = _choose_strategy(work, room)
    if alone.fits or alone.plan.needed_in("load") > room.target:  # sharing a sequence makes no weights smaller
        return alone
    shared = _first_fitting(_choose_strategy(way, room) for way in ways_to_share(work))
    if shared is None:
        return alone
    num_slices = shared.plan.work.config.distributed.num_slices
    why = f"on one it would need {alone.plan.needed / GIB:.2f} of {room.target / GIB:.2f} GiB"
    if alone.plan.needed <= room.target:
        why += f", and {alone.plan.host_needed / GIB:.1f} GiB of host memory a host"
    sharing = f"{num_slices} GPUs share each sequence (distributed.context_parallel=auto): {why}"
    return replace(shared, sharing=sharing)


def use_spare(choice: Choice, target: float) -> Choice:
    """The same choice, which spends memory that is left over on dequantizing less, where a graph can.

    Weights are dequantized ahead if the run still fits the target, and kept within a share of it.
    """
    if not choice.fits:
        return choice
    return replace(choice, plan=with_spare_used(choice.plan, target, target * (1 - SPARE)))


def _choose_strategy(work: Workload, room: Room) -> Choice:
    """The fastest plan for the number of ranks that share sequences in the settings."""
    fsdp = work.config.fsdp
    if fsdp.sharding_strategy is not ShardingStrategy.auto:
        return _choose_gathers(work, room)
    split = _choose_gathers(work.with_values({"fsdp.sharding_strategy": ShardingStrategy.FULL_SHARD}), room)
    if not (fsdp.may_be_whole and work.num_ranks > 1 and work.is_cuda):
        return split
    copies = work.with_values({"fsdp.sharding_strategy": ShardingStrategy.NO_SHARD})
    weights = sum(ModelBytes(copies).resident(with_training=False).values())
    if weights > room.target:  # the common case of large models, without planning more
        why = f"{weights / GIB:.2f} GiB for weights alone, and there are {room.target / GIB:.2f}"
        return replace(split, sharding=f"The base is split (auto is FULL_SHARD): whole copies would take {why}")
    whole = _choose_rest(copies, room.without(SPARE))
    gain = room.speed(whole.plan) / room.speed(split.plan) - 1
    needs = f"{whole.plan.needed / GIB:.2f} of {room.target / GIB:.2f} GiB"
    if whole.fits and (gain >= 0 or not split.fits):
        why = f"{needs}, and {gain:.0%} faster than FULL_SHARD"
        return replace(whole, sharding=f"Each GPU has the whole base (auto is NO_SHARD): {why}")
    why = f"be {-gain:.0%} slower" if whole.fits else f"take {needs}, of which {SPARE:.0%} stay free"
    return replace(split, sharding=f"The base is split (auto is FULL_SHARD): whole copies would {why}")


def _choose_gathers(work: Workload, room: Room) -> Choice:
    """The fastest plan in which codes are read from other GPUs; without that, and its buffers, if none fits."""
    choice = _choose_rest(work, room)
    if choice.fits or not work.reads_peers:
        return choice
    return _choose_rest(replace(work, can_read_peers=False), room)


def _choose_rest(work: Workload, room: Room) -> Choice:
    """The fastest plan under the strategy that the settings name; with a head in pieces if none fits without."""
    choice = _choose_sizes(work, room)
    in_pieces = with_head_pieces(work)
    if (choice.fits and not choice.gives_up_graph) or in_pieces is None:
        return choice
    small = _choose_sizes(in_pieces, room)
    if choice.fits:
        return choice if small.gives_up_graph or not small.fits else small
    return small if small.plan.needed < choice.plan.needed else choice


def _choose_sizes(work: Workload, room: Room) -> Choice:
    """The fastest plan of all micro-batch sizes, with tiles or without."""
    choices: list[Choice] = []
    for size in micro_batch_sizes(work):
        sized = replace(work, micro_batch_size=size)
        some = [_choose_policies(way, room) for way in ways_to_reshard(sized)]
        tiled = with_tiles(sized)
        if tiled is not None and not any(choice.fits and choice.keeps_all for choice in some):
            some += [_choose_policies(way, room) for way in ways_to_reshard(tiled)]
        choices += some
        some_fit = any(choice.fits for choice in some)
        if some_fit is not work.is_cuda:
            break  # larger ones would not fit either; on a CPU smaller ones would
    close = _about_as_fast_as_the_best(choices, room)
    may_launch = work.config.compute.cuda_graph == AUTO
    if not close and may_launch and any(choice.plan.beside_graph for choice in choices):
        launched = work.with_values({"compute.cuda_graph": False})  # kernel by kernel, which keeps less memory
        return replace(_choose_sizes(launched, room), gives_up_graph=True)
    if not close:
        return _smallest(choices, room)
    # All of these are about equally fast, so take the smallest micro-batch, which needs the least memory. Of equal
    # sizes take the one with the least in host memory, which takes time to pin; of equal ones the fastest, the first.
    close.sort(key=lambda choice: -room.speed(choice.plan))
    return min(close, key=lambda choice: (choice.plan.work.micro_batch_size, choice.plan.host.get("activations", 0)))


def _choose_policies(work: Workload, room: Room) -> Choice:
    """The fastest plan that a ladder of policies leads to, an early one if close; the smallest plan if none fits."""
    choices = [Choice(plan, room.has(plan)) for plan in _plans_of_policies(work, room)]
    close = _about_as_fast_as_the_best(choices, room)
    return close[0] if close else _smallest(choices, room)


def _first_fitting(choices: Iterable[Choice]) -> Choice | None:
    return next((choice for choice in choices if choice.fits), None)


def _about_as_fast_as_the_best(choices: Sequence[Choice], room: Room) -> list[Choice]:
    """Those that fit and are about as fast as the fastest of them; none if none fits."""
    fitting = [(choice, room.speed(choice.plan)) for choice in choices if choice.fits]
    fastest = max((speed for _, speed in fitting), default=0.0)
    return [choice for choice, speed in fitting if speed >= (1 - CLOSE) * fastest]


def _smallest(choices: Iterable[Choice], room: Room) -> Choice:
    """The one that needs least of the GPU's memory; of those that all keep to the target, least of the host's."""
    return min(choices, key=lambda choice: (max(room.target, choice.plan.needed), choice.plan.host_needed))


def _plans_of_policies(work: Workload, room: Room) -> list[MemoryPlan]:
    """For each ladder the first of ever smaller plans that fits with some room, or else the smallest.

    On a CPU that is the first ladder alone: the speed of GPUs, by which they are compared, predicts nothing there. If
    the settings say the policies, there is one plan.
    """
    make_plan = cache(planner(work))  # ladders begin alike
    fixed = fixed_policies(work.config.memory, work.num_layers)
    if fixed is not None:
        return [make_plan(fixed)]

    def fits(policies: tuple[Policy, ...]) -> bool:
        return make_plan(policies).needed <= room.without(ROOM).target

    plans = []
    for ladder in LADDERS if work.is_cuda else LADDERS[:1]:
        for policies in _from_fast_to_small(ladder, work.num_layers, fits):
            if fits(policies):
                break
        plans.append(_within_host(make_plan(policies), make_plan, room.host))
    return plans


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


# What would fit, save memory, or be faster


def smaller_runs(work: Workload, room: Room) -> list[Change]:
    """The changes that make the run fit, the fastest run first.

    Single changes and pairs are tried first, and of the pairs only those that need both. If none fits, three changes
    are tried together, and if nothing else helps, much shorter sequences.
    """
    candidates = list(smaller_settings(work, fixed_policies(work.config.memory, work.num_layers) or ()))
    found: dict[tuple[Values, ...], Change] = {}
    for together in range(1, MAX_TOGETHER + 1):
        for some in filter(all_count, combinations(candidates, together)):
            has_enough = any(set(enough) <= set(some) for enough in found)
            change = None if has_enough else _fitting_change(work, some, room)
            if change is not None:
                found[some] = change
        if found and together > 1:
            break
    changes = list(found.values()) or _much_shorter(work, candidates, room)
    return sorted(changes, key=lambda change: -change.speed)


def cheapest_changes(work: Workload, room: Room) -> list[Change]:
    """The changes that a user is shown: the fastest few of `smaller_runs`, and how many GPUs the run would fit on."""
    changes = smaller_runs(work, room)[:MAX_SHOWN]
    gpus = enough_gpus(work, room)
    if gpus is not None:
        changes.append(gpus)
    return changes


def enough_gpus(work: Workload, room: Room) -> Change | None:
    """The number of GPUs on which the run fits, found by doubling; None if more GPUs do not help."""
    choice = _first_fitting(choose(more, room) for more in more_gpus(work))
    if choice is None:
        return None
    return Change(f"{choice.plan.work.num_ranks} GPUs", choice.plan, room.speed(choice.plan))


def largest_savings(plan: MemoryPlan, gpu: Gpu) -> list[Change]:
    """Each single change that needs less memory than `plan`, the one that saves most first.

    The layers keep their activation policies unless a change is about these, so that each effect is seen by itself.
    To keep no dequantized weights is a change of its own, and no other one counts what they take.
    """
    room = Room(inf, gpu)
    changes = []
    if plan.num_kept_dequantized:
        without = make_plan(plan.work, plan.policies)
        text = show("memory.keep_dequantized", False)
        changes.append(Change(text, without, room.speed(without), plan.needed - without.needed))
        plan = without
    for values in smaller_settings(plan.work, plan.policies):
        work = plan.work.with_values(dict(values))
        is_policy = any(key.startswith("memory.") for key, _ in values)
        policies = fixed_policies(work.config.memory, work.num_layers) if is_policy else plan.policies
        assert policies is not None
        smaller = make_plan(work, policies)
        saved = plan.needed - smaller.needed
        if saved > 0:
            changes.append(Change(show_values(plan.work, values), smaller, room.speed(smaller), saved))
    return sorted(changes, key=lambda change: -change.saved)


def whole_copies(plan: MemoryPlan, room: Room) -> Change | None:
    """The run with the whole base on each GPU, if that fits and is faster by at least `MIN_GAIN`; else None."""
    work = plan.work
    fsdp = work.config.fsdp
    is_split_by_all = fsdp.sharding_strategy in (ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP)
    if work.num_ranks == 1 or not is_split_by_all or fsdp.cpu_offload or not work.is_cuda:
        return None
    choice = choose(work.with_values({"fsdp.sharding_strategy": ShardingStrategy.NO_SHARD}), room)
    change = Change("fsdp=no_shard", choice.plan, room.speed(choice.plan))
    is_faster = change.speed >= (1 + MIN_GAIN) * room.speed(plan)
    return change if choice.fits and is_faster else None


def dequantized_once(plan: MemoryPlan, room: Room) -> Change | None:
    """The run whose kept weights stay until it ends, if that is faster by at least `MIN_GAIN`; else None."""
    key, value = "memory.keep_dequantized", "run"
    work = plan.work.with_values({key: value})
    if not plan.num_kept_dequantized or plan.work.holds_dequantized or not work.holds_dequantized:
        return None
    held = use_spare(Choice(make_plan(work, plan.policies), True), room.target).plan
    change = Change(show(key, value), held, planned_tokens_per_second(held, room.gpu))
    return change if change.speed >= (1 + MIN_GAIN) * planned_tokens_per_second(plan, room.gpu) else None


def _much_shorter(work: Workload, candidates: Sequence[Values], room: Room) -> list[Change]:
    """Runs that fit with a quarter of the sequence length, an eighth and so on, alone or with one other change."""
    others = [values for values in candidates if values[0][0] != "training.max_length"]
    length = work.config.training.max_length // 4
    while length >= MIN_LENGTH:
        shorter = (("training.max_length", length),)
        alone = _fitting_change(work, [shorter], room)
        if alone is not None:
            return [alone]
        with_another = [_fitting_change(work, [other, shorter], room) for other in others]
        fitting = [change for change in with_another if change is not None]
        if fitting:
            return fitting
        length //= 2
    return []


def _fitting_change(work: Workload, some: Sequence[Values], room: Room) -> Change | None:
    """The run with these settings; None if it does not fit."""
    values = tuple(value for candidate in some for value in candidate)
    choice = choose(work.with_values(dict(values)), room)
    return Change(show_values(work, values), choice.plan, room.speed(choice.plan)) if choice.fits else None


# The longest rows


def longest(work: Workload, target: float) -> MemoryPlan | None:
    """The plan of the longest rows, one at a time, with which a run needs at most `target` bytes per GPU.

    Bytes grow with the length as a straight line does, or nearly so. So two lengths show where the line meets the
    target, and one or two more, traced there, show how nearly.

    Args:
        work: the run; its length and its micro-batch do not count. Where its activations are open, all layers'
            inputs wait in host memory, for these plans need least. Where it is open how many ranks share each row, as
            many do as can.
        target: bytes that a rank may use, libraries included.

    Returns:
        None if not even a row of `UNIT` tokens fits.
    """
    *_, work = [work, *ways_to_share(work.with_values({"training.max_length": FIRST[-1]}))]
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
    values = {
        "training.max_length": length,
        "training.micro_batch_size": 1,
        "training.global_batch_size": work.num_groups,
    }
    work = work.with_values(values)
    work = with_tiles(work) or work
    policies = fixed_policies(work.config.memory, work.num_layers) or (Policy.offload,) * work.num_layers
    return make_plan(work, policies)


def _meeting(plans: dict[int, MemoryPlan], target: float) -> int:
    """Where the line through the two lengths nearest to the target meets it: a multiple of `UNIT`."""
    nearest = sorted(plans, key=lambda length: abs(plans[length].needed - target))[:2]
    ((short, long),) = pairwise(sorted(nearest))
    slope = (plans[long].needed - plans[short].needed) / (long - short)
    meeting = short + (target - plans[short].needed) / slope
    return int(min(max(meeting, UNIT), MOST)) // UNIT * UNIT
