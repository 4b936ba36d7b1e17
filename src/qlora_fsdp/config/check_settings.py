"""All checks of the settings. A command may restrict them to the settings that it uses. Imports no torch.

A check yields the problems that it finds, so that a user sees all of them at once. It may look at the files that the
settings name, but not at the device and not at the number of processes: these have checks of their own below.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec

from qlora_fsdp.common.errors import Problem
from qlora_fsdp.common.hub import is_repo_name
from qlora_fsdp.common.text import is_whole, plural
from qlora_fsdp.config.batch_size import nearest_batch, round_default, sequences_at_once
from qlora_fsdp.config.check_data import check_data
from qlora_fsdp.config.check_model import check_model
from qlora_fsdp.config.check_task import check_preference, check_task
from qlora_fsdp.config.check_training import check_training
from qlora_fsdp.config.schema import (
    AttnImplementation,
    Config,
    Dtype,
    MatmulKind,
    ShardingStrategy,
    When,
)
from qlora_fsdp.config.settings import all_settings, problem_with, show, value_of, wrong_type
from qlora_fsdp.config.trackers import check_trackers
from qlora_fsdp.config.world import World


@dataclass(frozen=True)
class Needs:
    """The settings that a command uses; whatever is wrong with the others is no news for its user.

    Attributes:
        plans_only: whether it makes a plan and nothing else, so that it uses what is planned with.
        optional: settings that training needs and the command can do without: they may be null.
        tokenizer_only: whether it uses no more of the model than a tokenizer. Where that is named, no model need be.
    """

    plans_only: bool = False
    optional: tuple[str, ...] = ()
    tokenizer_only: bool = False

    def concern(self, config: Config, problem: Problem) -> bool:
        """Whether the command's user has to mend this problem."""
        has_tokenizer = self.tokenizer_only and config.model.tokenizer_path is not None
        optional = (*self.optional, *(["model.path"] if has_tokenizer else []))
        if problem.setting in optional and value_of(config, problem.setting) is None:
            return False
        known = all_settings().get(problem.setting)
        return known is None or known.facets.is_planned or not self.plans_only


TRAINING = Needs()


def check_settings(config: Config, needs: Needs = TRAINING) -> list[Problem]:
    """Returns what is wrong with the configuration whatever it runs on, as far as a command needs it."""
    checks = (_check_facets, check_model, check_data, check_task, check_preference, check_training, check_trackers)
    problems = (problem for find in (*checks, _check_packages, _check_hub) for problem in find(config))
    return [problem for problem in problems if needs.concern(config, problem)]


def check_world(config: Config, world: World) -> list[Problem]:
    """Returns what is wrong with the configuration on this number of processes, this device and this torch."""
    return [*check_split(config, world), *_check_device(config, world)]


def check_split(config: Config, world: World) -> list[Problem]:
    """Returns what is wrong with the configuration on this number of processes, whatever the device."""
    return [*_check_slices(config, world), *_check_batch(config, world), *_check_shard_groups(config, world)]


def _check_facets(config: Config) -> Iterator[Problem]:
    """Refuses values that the schema does not list, numbers out of bounds, and what has no effect."""
    for key, setting in all_settings().items():
        value, bounds = value_of(config, key), setting.bounds
        if setting.facets.values and not any(
            value == each and type(value) is type(each) for each in setting.facets.values
        ):
            yield wrong_type(key, value)
        if setting.facets.words and value not in setting.facets.words and not is_whole(value):
            yield wrong_type(key, value)
        if bounds is not None and isinstance(value, (int, float)) and not bounds.allow(value):
            fix = f"Set {show(key, setting.default)}, the default, or another number in this range."
            yield problem_with(config, key, f"must be finite and {bounds}.", fix)
        unmet = next((when for when in setting.facets.used if not when.holds(value_of(config, when.key))), None)
        if unmet is not None and value != setting.default:
            yield _without_effect(config, key, unmet)


def _without_effect(config: Config, key: str, unmet: When) -> Problem:
    """The problem with a setting that is set where another one leaves it without effect."""
    if not unmet.values:
        return problem_with(
            config, key, f"has no effect without {unmet.key}.", f"Set {unmet.key} too, or leave it out."
        )
    if unmet.fix:
        fix = unmet.fix
    elif len(unmet.values) == 1:
        fix = show(unmet.key, unmet.values[0])
    else:
        fix = f"{unmet.key} to one of {', '.join(value.name for value in unmet.values)}"
    reason = f"has no effect with {show(unmet.key, value_of(config, unmet.key))}."
    return problem_with(config, key, reason, f"Set {fix} too, or leave {key} out.")


def _check_packages(config: Config) -> Iterator[Problem]:
    wants_flash = config.model.attn_implementation is AttnImplementation.flash_attention_2
    if wants_flash and find_spec("flash_attn_2_cuda") is None:
        fix = "Run pip install flash-attn, or set it to auto."
        reason = "needs the package flash-attn, which is not installed."
        yield problem_with(config, "model.attn_implementation", reason, fix)


def _check_hub(config: Config) -> Iterator[Problem]:
    repo = config.hub.repo
    if config.hub.push and repo is None:
        yield problem_with(config, "hub.repo", "names no repository for hub.push=true.", "Set hub.repo=ORG/NAME.")
    elif repo is not None and not is_repo_name(repo):
        yield problem_with(config, "hub.repo", "can't be the name of a repository.", "Set hub.repo=ORG/NAME.")


def _check_slices(config: Config, world: World) -> Iterator[Problem]:
    num_slices = config.distributed.num_slices
    if num_slices < 1 or world.num_ranks % num_slices == 0:
        return
    divisors = ", ".join(str(n) for n in range(1, world.num_ranks + 1) if world.num_ranks % n == 0)
    reason = f"does not divide {plural(world.num_ranks, 'rank')} into groups that share sequences."
    fix = f"Set it to one of {divisors}, or start a multiple of {num_slices} processes."
    yield problem_with(config, "distributed.context_parallel", reason, fix)


def _check_batch(config: Config, world: World) -> Iterator[Problem]:
    config = round_default(config, world.num_ranks)[0]
    micro, total = config.training.micro_batch_size, config.training.global_batch_size
    unit, num_groups = sequences_at_once(config, world.num_ranks), config.distributed.num_groups(world.num_ranks)
    if total is None or unit < 1 or total < 1 or total % unit == 0:
        return
    nearest = nearest_batch(total, unit)
    groups = f"{num_groups} ranks" if num_groups == world.num_ranks else f"{num_groups} groups of ranks"
    reason = f"is not a multiple of micro_batch_size {micro} x {groups} = {unit}."
    if micro == "auto":
        reason = f"is not a multiple of {groups}."
    yield problem_with(config, "training.global_batch_size", reason, f"Set training.global_batch_size={nearest}.")


def _check_shard_groups(config: Config, world: World) -> Iterator[Problem]:
    if config.fsdp.sharding_strategy is not ShardingStrategy.HYBRID_SHARD:
        return
    size = config.fsdp.num_shards(world.num_ranks, world.local_num_ranks)
    if size < 1 or world.num_ranks % size == 0:
        return
    divisors = [d for d in range(1, world.num_ranks + 1) if world.num_ranks % d == 0]
    nearest = min(divisors, key=lambda d: (abs(d - size), -d))
    reason = f"(groups of {size}) does not divide {world.num_ranks} ranks."
    yield problem_with(config, "fsdp.hybrid_shard_size", reason, f"Set fsdp.hybrid_shard_size={nearest}.")


def _check_device(config: Config, world: World) -> Iterator[Problem]:
    if config.training.precision is Dtype.bfloat16 and not world.has_bf16:
        reason = f"can't be used: this {'GPU' if world.device_type == 'cuda' else 'CPU'} does not compute in bfloat16."
        yield problem_with(config, "training.precision", reason, "Set training.precision=float32, or auto.")
    if config.compute.matmul is MatmulKind.fp8 and not world.has_fp8:
        reason = "can't be used: only Ada, Hopper and later GPUs multiply in fp8."
        yield problem_with(config, "compute.matmul", reason, "Set compute=dequantized.")
    if config.model.attn_implementation.is_for_gpus and world.device_type == "cpu":
        fix = "Set model.attn_implementation=auto."
        yield problem_with(config, "model.attn_implementation", "runs on GPUs only.", fix)
