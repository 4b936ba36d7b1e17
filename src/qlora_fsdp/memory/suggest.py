"""Finds changes of settings that make a run smaller, or faster, and what each would do.

The longest rows that a run can train on, by the plan: `preflight training.max_length=max`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, pairwise
from typing import Any

from qlora_fsdp.common.text import format_table
from qlora_fsdp.config.batch_size import AUTO, round_default
from qlora_fsdp.config.schema import Activations, EmbeddingStorage, Optimizer, ShardingStrategy
from qlora_fsdp.config.settings import show, value_of
from qlora_fsdp.memory.choose_plan import (
    Choice,
    choose,
    describe_choice,
    fixed_policies,
    use_spare,
    ways_to_share,
    with_tiles,
)
from qlora_fsdp.memory.gpus import GPUS_A_HOST, Gpu, Hardware
from qlora_fsdp.memory.plan import GIB, MemoryPlan, make_plan
from qlora_fsdp.memory.policy import Policy
from qlora_fsdp.memory.speed import planned_tokens_per_second, tokens_per_second
from qlora_fsdp.memory.workload import Workload

MAX_RANKS = 1024
MAX_TOGETHER = 3  # changes that are tried together
MAX_SHOWN = 3  # changes that a user is shown
MIN_LENGTH = 512  # tokens per sequence; shorter ones are not suggested
MIN_GAIN = 0.03  # gain of speed from which on it is suggested to use memory that is left over
COUNTS = (1, 2, 4, 8)  # of GPUs, for which it is told
UNIT = 2**10  # tokens; lengths are multiples of it
FIRST = (2**16, 2**18)  # tokens of a GPU's slice with which it begins
MAX_TRIES = 4
MOST = 2**24  # tokens; longer rows are not looked for


@dataclass(frozen=True)
class Change:
    """One or more settings to change.

    Attributes:
        text: the change as it is typed on the command line, or a number of GPUs.
        plan: the plan after the change.
        fits: whether that plan fits the target.
        speed: predicted tokens per second of all GPUs together.
        saved: bytes that a GPU needs less than before, where that was asked for.
    """

    text: str
    plan: MemoryPlan
    fits: bool
    speed: float
    saved: int = 0


_Values = tuple[tuple[str, Any], ...]  # settings by their keys


def smaller_runs(work: Workload, target: float, gpu: Gpu) -> list[Change]:
    """The changes that make the run fit `target` bytes per GPU, the fastest run first.

    Single changes and pairs are tried first, and of the pairs only those that need both. If none fits, three changes
    are tried together, and if nothing else helps, much shorter sequences.
    """
    candidates = list(_candidates(work, fixed_policies(work.config.memory, work.num_layers) or ()))
    found: dict[tuple[_Values, ...], Change] = {}
    for together in range(1, MAX_TOGETHER + 1):
        for some in combinations(candidates, together):
            has_enough = any(set(enough) <= set(some) for enough in found)
            if has_enough or not _all_count(some):
                continue
            change = _change(work, some, target, gpu)
            if change.fits:
                found[some] = change
        if found and together > 1:
            break
    changes = list(found.values()) or _much_shorter(work, candidates, target, gpu)
    return sorted(changes, key=lambda change: -change.speed)


def cheapest_changes(work: Workload, target: float, gpu: Gpu) -> list[Change]:
    """The changes that a user is shown: the fastest few of `smaller_runs`, and how many GPUs the run would fit on."""
    changes = smaller_runs(work, target, gpu)[:MAX_SHOWN]
    gpus = enough_gpus(work, target, gpu)
    if gpus is not None:
        changes.append(gpus)
    return changes


def largest_savings(plan: MemoryPlan, gpu: Gpu) -> list[Change]:
    """Each single change that needs less memory than `plan`, the one that saves most first.

    The layers keep their activation policies unless a change is about these, so that each effect is seen by itself.
    To keep no dequantized weights is a change of its own, and no other one counts what they take.
    """
    changes = []
    if plan.num_kept_dequantized:
        without = make_plan(plan.work, plan.policies)
        text = show("memory.keep_dequantized", False)
        changes.append(Change(text, without, True, _speed(without, gpu), plan.needed - without.needed))
        plan = without
    for values in _candidates(plan.work, plan.policies):
        work = _changed(plan.work, values)
        is_policy = any(key.startswith("memory.") for key, _ in values)
        policies = fixed_policies(work.config.memory, work.num_layers) if is_policy else plan.policies
        assert policies is not None
        smaller = make_plan(work, policies)
        saved = plan.needed - smaller.needed
        if saved > 0:
            changes.append(Change(_text(plan.work, values), smaller, True, _speed(smaller, gpu), saved))
    return sorted(changes, key=lambda change: -change.saved)


def whole_copies(plan: MemoryPlan, target: float, gpu: Gpu) -> Change | None:
    """The run with the whole base on each GPU, if that fits and is faster by at least `MIN_GAIN`; else None."""
    work = plan.work
    fsdp = work.config.fsdp
    is_split_by_all = fsdp.sharding_strategy in (ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP)
    if work.num_ranks == 1 or not is_split_by_all or fsdp.cpu_offload or not work.is_cuda:
        return None
    choice = choose(_changed(work, (("fsdp.sharding_strategy", ShardingStrategy.NO_SHARD),)), target, gpu)
    change = Change("fsdp=no_shard", choice.plan, choice.fits, _speed(choice.plan, gpu))
    is_faster = change.speed >= (1 + MIN_GAIN) * _speed(plan, gpu)
    return change if change.fits and is_faster else None


def dequantized_once(plan: MemoryPlan, target: float, gpu: Gpu) -> Change | None:
    """The run whose kept weights stay until it ends, if that is faster by at least `MIN_GAIN`; else None."""
    value = ("memory.keep_dequantized", "run")
    work = _changed(plan.work, (value,))
    if not plan.num_kept_dequantized or plan.work.holds_dequantized or not work.holds_dequantized:
        return None
    held = use_spare(Choice(make_plan(work, plan.policies), True), target).plan
    change = Change(show(*value), held, True, planned_tokens_per_second(held, gpu))
    return change if change.speed >= (1 + MIN_GAIN) * planned_tokens_per_second(plan, gpu) else None


def enough_gpus(work: Workload, target: float, gpu: Gpu) -> Change | None:
    """The number of GPUs on which the run fits, found by doubling; None if more GPUs do not help."""
    num_ranks = work.num_ranks
    while 2 * num_ranks <= MAX_RANKS:
        num_ranks *= 2
        config, _ = round_default(work.config, num_ranks)
        total = config.training.global_batch_size
        if total is not None and total % config.distributed.num_groups(num_ranks):
            config = config.with_values({"training.global_batch_size": None, "training.micro_batch_size": 1})
        more = replace(work, config=config, num_ranks=num_ranks, local_num_ranks=min(num_ranks, 8))
        choice = choose(more, target, gpu)
        if choice.fits:
            return Change(f"{num_ranks} GPUs", choice.plan, True, _speed(choice.plan, gpu))
    return None


def _candidates(work: Workload, policies: Sequence[Policy]) -> Iterator[_Values]:
    """Changes that may save memory. Those of the activation policies need the present ones: `policies`, or nothing."""
    config = work.config
    size = work.micro_batch_size
    order = list(Policy)
    for smaller in order[order.index(Policy.attention) :]:
        is_possible = work.is_cuda or not smaller.offloads
        if is_possible and set(policies) & set(order[: order.index(smaller)]):
            yield (("memory.activations", Activations(smaller.value)),)
    if config.optim.name is Optimizer.adamw and not config.fsdp.cpu_offload and work.is_cuda:
        yield (("optim.name", Optimizer.adamw_8bit),)
    if config.quant.load_in_8bit or not config.quant.load_in_4bit:
        yield (("quant.load_in_4bit", True), ("quant.load_in_8bit", False))
    trains_ends = {"embed_tokens", "lm_head"} & {name.rpartition(".")[2] for name in config.lora.modules_to_save or []}
    if config.quant.embeddings is EmbeddingStorage.none and work.parts.ends["embeddings"] and not trains_ends:
        yield (("quant.embeddings", EmbeddingStorage.int8),)
    if config.training.micro_batch_size != AUTO:
        is_free = config.training.global_batch_size is None  # if not, the micro-batch size must divide it
        while size % 2 == 0 or (is_free and size > 1):
            size //= 2
            yield (("training.micro_batch_size", size),)
    elif size > 1:
        yield (("training.micro_batch_size", 1),)
    strategy = config.fsdp.sharding_strategy
    if strategy not in (ShardingStrategy.FULL_SHARD, ShardingStrategy.auto) and work.num_ranks > 1:
        yield (("fsdp.sharding_strategy", ShardingStrategy.FULL_SHARD), ("fsdp.hybrid_shard_size", None))
    if work.is_cuda and not config.fsdp.cpu_offload and strategy is not ShardingStrategy.NO_SHARD:
        yield (("fsdp.cpu_offload", True), ("optim.name", Optimizer.adamw))
    if config.training.max_length >= 2 * MIN_LENGTH:
        yield (("training.max_length", config.training.max_length // 2),)


def _all_count(some: Sequence[_Values]) -> bool:
    """Whether no change is undone by another that sets the same, such as one of two micro-batch sizes.

    The others together, which are tried by themselves, are the same run, and each plan takes a while.
    """
    names = [{key for key, _ in values} for values in some]
    return not any(one <= other or other <= one for one, other in combinations(names, 2))


def _much_shorter(work: Workload, candidates: Sequence[_Values], target: float, gpu: Gpu) -> list[Change]:
    """Runs that fit with a quarter of the sequence length, an eighth and so on, alone or with one other change."""
    others = [values for values in candidates if values[0][0] != "training.max_length"]
    length = work.config.training.max_length // 4
    while length >= MIN_LENGTH:
        shorter = (("training.max_length", length),)
        alone = _change(work, [shorter], target, gpu)
        if alone.fits:
            return [alone]
        with_another = [_change(work, [other, shorter], target, gpu) for other in others]
        fitting = [change for change in with_another if change.fits]
        if fitting:
            return fitting
        length //= 2
    return []


def _change(work: Workload, some: Sequence[_Values], target: float, gpu: Gpu) -> Change:
    values = tuple(value for candidate in some for value in candidate)
    choice = choose(_changed(work, values), target, gpu)
    return Change(_text(work, values), choice.plan, choice.fits, _speed(choice.plan, gpu))


def _changed(work: Workload, values: _Values) -> Workload:
    config = work.config.with_values(dict(values))
    size = config.training.micro_batch_size
    return replace(work, config=config, micro_batch_size=work.micro_batch_size if size == AUTO else size)


def _text(work: Workload, values: _Values) -> str:
    """The overrides as typed, without those that change nothing. A group of conf/ is named if it sets these."""
    texts = [show(key, value) for key, value in values if value_of(work.config, key) != value]
    return " ".join(filter(None, dict.fromkeys(_GROUPS.get(text, text) for text in texts)))


_GROUPS = {
    "memory.activations=attention": "memory=keep_attention",
    "memory.activations=full": "memory=recompute",
    "memory.activations=offload_attention": "memory=offload_attention",
    "memory.activations=offload": "memory=offload",
    "optim.name=adamw_8bit": "optim=adamw_8bit",
    "optim.name=adamw": "optim=adamw",
    "quant.load_in_4bit=true": "quant=nf4",
    "quant.load_in_8bit=false": "",
    "fsdp.cpu_offload=true": "fsdp=offload",
    "fsdp.sharding_strategy=FULL_SHARD": "fsdp=full_shard",
}


def _speed(plan: MemoryPlan, gpu: Gpu) -> float:
    return tokens_per_second(plan.work, plan.policies, gpu)


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
