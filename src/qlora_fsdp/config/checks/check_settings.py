"""All checks of the settings. A command may restrict them to the settings that it uses. Imports no torch.

A check yields the problems that it finds, so that a user sees all of them at once. It may look at the files that the
settings name, but not at the device and not at the number of processes: these have checks of their own below.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from qlora_fsdp.common.errors import Problem
from qlora_fsdp.common.text import is_whole, plural
from qlora_fsdp.config.checks import check_data, check_launch, check_model, check_rollouts, check_task, check_training
from qlora_fsdp.config.schema import (
    ComputeConfig,
    Config,
    DataFormat,
    DistributedConfig,
    Dtype,
    FsdpConfig,
    MatmulKind,
    ModelConfig,
    OptimConfig,
    ShardingStrategy,
    TrainingConfig,
    When,
)
from qlora_fsdp.config.settings import Setting, all_settings, problem_about, problem_with, show, values_of, wrong_type
from qlora_fsdp.config.specs import TaskSpec
from qlora_fsdp.config.trackers import check_trackers
from qlora_fsdp.config.world import World, nearest_batch, round_default, sequences_at_once


@dataclass(frozen=True)
class Needs:
    """The settings that a command uses; whatever is wrong with the others is no news for its user.

    Attributes:
        plans_only: whether it makes a plan and nothing else, so that it uses what is planned with.
        optional: settings that training needs and the command can do without: they may be null or an empty list.
        tokenizer_only: whether it uses no more of the model than a tokenizer. Where that is named, no model need be.
    """

    plans_only: bool = False
    optional: tuple[str, ...] = ()
    tokenizer_only: bool = False

    def concern(self, values: Mapping[str, Any], problem: Problem) -> bool:
        """Whether the command's user has to mend this problem.

        Args:
            values: the value of every setting, by its key.
            problem: what is wrong.
        """
        can_do_without = problem.setting in self.optional
        if problem.setting == "model.path" and self.tokenizer_only and values["model.tokenizer_path"] is not None:
            can_do_without = True
        if can_do_without and values[problem.setting] in (None, []):
            return False
        known = all_settings().get(problem.setting)
        return known is None or known.facets.is_planned or not self.plans_only


TRAINING = Needs()


def check_settings(config: Config, needs: Needs = TRAINING) -> list[Problem]:
    """Returns what is wrong with the configuration whatever it runs on, as far as a command needs it."""
    values = values_of(config)
    problems = [*check_facets(values), *_find_problems(config)]
    if not needs.plans_only:
        problems += check_model.check_packages(config.model)
    return [problem for problem in problems if needs.concern(values, problem)]


def _find_problems(config: Config) -> Iterator[Problem]:
    """What no setting says by itself: all checks, with the groups of settings that each looks at."""
    data = config.data
    lora = config.lora
    model = config.model
    quant = config.quant
    task = TaskSpec.of(config)
    tracking = config.tracking
    training = config.training
    yield from check_model.check_model(model, is_dry_run=data.format is DataFormat.random)
    yield from check_model.check_rope_scaling(model)
    yield from check_model.check_tokens(config.tokenizer)
    yield from check_model.check_compute(config.compute, quant, training.precision)
    yield from check_model.check_quant(quant, training.precision)
    yield from check_model.check_embeddings(quant, lora, config.tokenizer)
    yield from check_model.check_lora(lora, quant)
    yield from check_model.check_rounding_start(lora, quant, model, task)
    yield from check_data.check_source(data, config.task)
    yield from check_data.check_splits(data)
    yield from check_data.check_columns(data, config.task)
    yield from check_data.check_cleaning(data, training.max_length)
    yield from check_data.check_evaluation(data, training, tracking, config.task)
    yield from check_data.check_mix(data)
    yield from check_data.check_streaming(data, config.task, training.max_steps)
    yield from check_task.check_labels(config.task)
    yield from check_task.check_labelled_rows(config.task, data, training)
    yield from check_task.check_compared_rows(task, data, training)
    yield from check_task.check_loss(config.task, config.kernels)
    yield from check_task.check_preference(task, config.kernels, lora, config.tokenizer)
    yield from check_rollouts.check_rollouts(config)
    yield from check_rollouts.check_rewards(config.task, config.reward)
    yield from check_training.check_fsdp(config.fsdp, config.optim)
    yield from check_training.check_tiles(config.memory, lora)
    yield from check_training.check_optim(config.optim, training.max_steps)
    yield from check_training.check_steps(training, data, config.task)
    yield from check_training.check_repeatable(training, model.attn_implementation)
    yield from check_training.check_checkpoints(config.checkpoint, training)
    yield from check_training.check_criterion(training, data, config.task)
    yield from check_training.check_context_parallel(
        config.distributed, config.task, training, tracking, model.attn_implementation
    )
    yield from check_launch.check_accelerate_file(config.launch)
    yield from check_launch.check_time_limit(config.slurm)
    yield from check_trackers(tracking)
    yield from check_training.check_repository(config.hub)


def check_facets(values: Mapping[str, Any]) -> Iterator[Problem]:
    """Refuses values that the schema does not list, numbers out of bounds, and what has no effect.

    Args:
        values: the value of every setting, by its key.
    """
    for key, setting in all_settings().items():
        value = values[key]
        if not _is_listed(setting, value):
            yield wrong_type(key, value)
        bounds = setting.bounds
        if bounds is not None and isinstance(value, (int, float)) and not bounds.allow(value):
            fix = f"Set {show(key, setting.default)}, the default, or another number in this range."
            yield problem_about(key, value, f"must be finite and {bounds}.", fix)
        unmet = [when for when in setting.facets.used if not when.holds(values[when.key])]
        if unmet and value != setting.default:
            yield _without_effect(key, value, unmet[0], values[unmet[0].key])


def check_typed(keys: Iterable[str], values: Mapping[str, Any]) -> Iterator[Problem]:
    """Refuses settings that are typed and have no effect, where `check_facets` can't tell: their values are defaults.

    Null, false and the like wish for nothing: they are typed over what a file says.

    Args:
        keys: the settings that are typed.
        values: the value of every setting, by its key.
    """
    for key in keys:
        setting = all_settings().get(key)
        if setting is None or not setting.default or values[key] != setting.default:
            continue
        unmet = [when for when in setting.facets.used if not when.holds(values[when.key])]
        if unmet:
            yield _without_effect(key, setting.default, unmet[0], values[unmet[0].key])


def _is_listed(setting: Setting, value: Any) -> bool:
    """Whether a value is among those that the setting lists, if it lists any."""
    if setting.facets.values:
        return any(value == listed and type(value) is type(listed) for listed in setting.facets.values)
    if setting.facets.words:
        return value in setting.facets.words or is_whole(value)
    return True


def _without_effect(key: str, value: Any, unmet: When, other: Any) -> Problem:
    """The problem with a setting that is set where another one, with the value `other`, leaves it without effect."""
    if not unmet.values:
        fix = f"Set {unmet.key} too, or leave it out."
        return problem_about(key, value, f"has no effect without {unmet.key}.", fix)
    if unmet.fix:
        fix = unmet.fix
    elif len(unmet.values) == 1:
        fix = show(unmet.key, unmet.values[0])
    else:
        fix = f"{unmet.key} to one of {', '.join(value.name for value in unmet.values)}"
    reason = f"has no effect with {show(unmet.key, other)}."
    return problem_about(key, value, reason, f"Set {fix} too, or leave {key} out.")


def check_world(config: Config, world: World) -> list[Problem]:
    """Returns what is wrong with the configuration on this number of processes, this device and this torch."""
    problems = check_split(config, world)
    problems += _check_device(config.training, config.optim, config.compute, config.model, world)
    return problems


def check_split(config: Config, world: World) -> list[Problem]:
    """Returns what is wrong with the configuration on this number of processes, whatever the device."""
    if config.task.writes_answers:  # a batch counts prompts, and whatever is answered is divided by its length
        return [*_check_slices(config.distributed, world), *_check_shard_groups(config.fsdp, world)]
    return [
        *_check_slices(config.distributed, world),
        *_check_batch(round_default(config, world.num_ranks)[0].training, config.distributed, world),
        *_check_shard_groups(config.fsdp, world),
    ]


def _check_slices(distributed: DistributedConfig, world: World) -> Iterator[Problem]:
    num_slices = distributed.num_slices
    if num_slices < 1 or world.num_ranks % num_slices == 0:
        return
    divisors = ", ".join(map(str, _divisors(world.num_ranks)))
    reason = f"does not divide {plural(world.num_ranks, 'rank')} into groups that share sequences."
    fix = f"Set it to one of {divisors}, or start a multiple of {num_slices} processes."
    yield problem_with(distributed, "distributed.context_parallel", reason, fix)


def _check_batch(training: TrainingConfig, distributed: DistributedConfig, world: World) -> Iterator[Problem]:
    """Refuses a global batch that ranks can't share. The default has been rounded."""
    total = training.global_batch_size
    unit = sequences_at_once(training, distributed, world.num_ranks)
    if total is None or unit < 1 or total < 1 or total % unit == 0:
        return
    num_groups = distributed.num_groups(world.num_ranks)
    groups = f"{num_groups} ranks" if num_groups == world.num_ranks else f"{num_groups} groups of ranks"
    micro = training.micro_batch_size
    reason = f"is not a multiple of micro_batch_size {micro} x {groups} = {unit}."
    if micro == "auto":
        reason = f"is not a multiple of {groups}."
    fix = f"Set training.global_batch_size={nearest_batch(total, unit)}."
    yield problem_with(training, "training.global_batch_size", reason, fix)


def _check_shard_groups(fsdp: FsdpConfig, world: World) -> Iterator[Problem]:
    if fsdp.sharding_strategy is not ShardingStrategy.HYBRID_SHARD:
        return
    size = fsdp.num_shards(world.num_ranks, world.local_num_ranks)
    if size < 1 or world.num_ranks % size == 0:
        return
    nearest = min(_divisors(world.num_ranks), key=lambda divisor: (abs(divisor - size), -divisor))
    reason = f"(groups of {size}) does not divide {world.num_ranks} ranks."
    yield problem_with(fsdp, "fsdp.hybrid_shard_size", reason, f"Set fsdp.hybrid_shard_size={nearest}.")


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def _check_device(
    training: TrainingConfig, optim: OptimConfig, compute: ComputeConfig, model: ModelConfig, world: World
) -> Iterator[Problem]:
    if training.precision is Dtype.bfloat16 and not world.has_bf16:
        device = "GPU" if world.device_type == "cuda" else "CPU"
        reason = f"can't be used: this {device} does not compute in bfloat16."
        fix = "Set training.precision=float32, or auto."
        yield problem_with(training, "training.precision", reason, fix)
    if compute.matmul is MatmulKind.fp8 and not world.has_fp8:
        reason = "can't be used: only Ada, Hopper and later GPUs multiply in fp8."
        yield problem_with(compute, "compute.matmul", reason, "Set compute=dequantized.")
    if model.attn_implementation.is_for_gpus and world.device_type == "cpu":
        fix = "Set model.attn_implementation=auto."
        yield problem_with(model, "model.attn_implementation", "runs on GPUs only.", fix)
    if optim.name.is_paged and world.device_type == "cpu":
        unpaged = optim.name.value.removeprefix("paged_").removesuffix("_32bit")
        reason = "has pages that go to host memory, which only CUDA has."
        yield problem_with(optim, "optim.name", reason, f"Set optim={unpaged}.")
