"""Checks of the settings of training, sharding, memory, checkpoints and uploads. Part of `check_settings`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from qlora_fsdp.common.errors import Problem
from qlora_fsdp.common.hub import is_repo_name
from qlora_fsdp.common.text import is_whole, plural
from qlora_fsdp.config.checks.check_model import NO_FLOAT16
from qlora_fsdp.config.criterion import LOSS, Criterion, make_pruner
from qlora_fsdp.config.schema import (
    AttnImplementation,
    CheckpointConfig,
    DataConfig,
    DataFormat,
    DistributedConfig,
    Dtype,
    FsdpConfig,
    HubConfig,
    LoraConfig,
    MemoryConfig,
    OnBadStep,
    OptimConfig,
    ShardingStrategy,
    TaskConfig,
    TaskName,
    TrackingConfig,
    TrainingConfig,
)
from qlora_fsdp.config.settings import all_settings, example_of, nearest_settings, problem_with, show

_WHOLE = "a rank has slices, and this needs whole sequences"
_OF_SLICES = "a mask is of a slice, and only attention that is told where rows start sees all of a sequence"


def check_fsdp(fsdp: FsdpConfig, optim: OptimConfig) -> Iterator[Problem]:
    """Yields what contradicts the way in which parameters are sharded."""
    if fsdp.cpu_offload and fsdp.sharding_strategy is ShardingStrategy.NO_SHARD:
        reason = "needs shards to offload, and fsdp.sharding_strategy=NO_SHARD makes none."
        yield problem_with(fsdp, "fsdp.cpu_offload", reason, "Set fsdp=offload, or fsdp.cpu_offload=false.")
    if fsdp.cpu_offload and optim.name.is_bitsandbytes:
        reason = "keeps its state on the GPU, and with fsdp.cpu_offload=true the parameters are on the CPU."
        yield problem_with(optim, "optim.name", reason, "Set optim=adamw, or fsdp.cpu_offload=false.")
    if fsdp.reshard_after_forward and not fsdp.reshards:
        reason = f"contradicts {show('fsdp.sharding_strategy', fsdp.sharding_strategy)}, with which no layer is freed."
        fix = "Set fsdp=full_shard, or fsdp.reshard_after_forward=null."
        yield problem_with(fsdp, "fsdp.reshard_after_forward", reason, fix)


def check_tiles(memory: MemoryConfig, lora: LoraConfig) -> Iterator[Problem]:
    """Yields why layers can't be computed in tiles, where somebody asks for it."""
    reason = explain_no_tiles(lora)
    if is_whole(memory.tile_tokens) and reason is not None:
        yield problem_with(memory, "memory.tile_tokens", f"can't be used: {reason}.", "Set memory.tile_tokens=auto.")


def explain_no_tiles(lora: LoraConfig) -> str | None:
    """Why layers can't be computed in tiles; None if they can."""
    if lora.lora_dropout > 0:
        return "backward computes a tile again, and lora.lora_dropout would drop other values then"
    return None


def check_optim(optim: OptimConfig, max_steps: int | None) -> Iterator[Problem]:
    """Yields what is wrong with the optimizer's settings, given training.max_steps."""
    are_decays = len(optim.betas) == 2 and all(0 <= beta < 1 for beta in optim.betas)
    if not are_decays:
        fix = "Set optim.betas=[0.9,0.999], the default."
        yield problem_with(optim, "optim.betas", "must be two numbers from 0 to below 1.", fix)
    if optim.warmup_steps is not None and max_steps is not None and optim.warmup_steps >= max_steps:
        reason = f"leaves no step after the warmup: the run has {plural(max_steps, 'step')}."
        yield problem_with(optim, "optim.warmup_steps", reason, "Set it below that, or train for more steps.")
    yield from _check_schedule(optim)


def _check_schedule(optim: OptimConfig) -> Iterator[Problem]:
    """Yields arguments of the learning rate's shape that it does not have, or that are no such numbers."""
    shape = optim.lr_scheduler_type
    for name, value in optim.lr_scheduler_kwargs.items():
        known = shape.arguments
        key, limit = "optim.lr_scheduler_kwargs", math.inf
        if name not in known:
            has = f"it has {', '.join(known)}" if known else "it has none"
            reason = f"names {name}, and {show('optim.lr_scheduler_type', shape)} has no such argument: {has}."
            yield problem_with(optim, key, reason, "Leave it out.")
            continue
        if name.endswith(("_rate", "_ratio")):
            limit = 1.0
        if not 0 <= value <= limit or (name == "num_cycles" and value != max(1, int(value))):
            allowed = "at least 0" if math.isinf(limit) else "from 0 to 1"
            if name == "num_cycles":
                allowed = "a whole number of at least 1"
            reason = f"has {name}={value:g}, which must be {allowed}."
            yield problem_with(optim, key, reason, f"{known[name]:g} is the default of {name}.")


def check_steps(training: TrainingConfig, data: DataConfig, task: TaskConfig) -> Iterator[Problem]:
    """Yields what is wrong with the steps themselves."""
    if training.micro_batch_size == "auto" and training.global_batch_size is None:
        reason = "needs a global batch to divide, and training.global_batch_size=null follows from the micro-batch."
        fix = "Set training.global_batch_size=16, the default, or training.micro_batch_size=1."
        yield problem_with(training, "training.micro_batch_size", reason, fix)
    if training.precision is Dtype.float16:
        yield problem_with(training, "training.precision", NO_FLOAT16, "Set training.precision=auto.")
    if training.group_by_length and training.packing is not False:
        reason = "is of padded rows: packed sequences are of one length."
        yield problem_with(training, "training.group_by_length", reason, "Set training=padded, or leave it out.")
    if training.group_by_length and (data.streaming or task.name.writes_answers):
        shown = show("data.streaming", True) if data.streaming else show("task.name", task.name)
        reason = f"needs the lengths of all rows, and with {shown} these are not known."
        yield problem_with(training, "training.group_by_length", reason, "Leave it out.")
    has_end = training.max_steps is not None or data.max_rows is not None
    if data.format is DataFormat.random and not has_end:
        reason = "sets no end, and random data (data.format=random) has none."
        yield problem_with(training, "training.max_steps", reason, "Set training.max_steps=10.")


def check_repeatable(training: TrainingConfig, attention: AttnImplementation) -> Iterator[Problem]:
    """Yields why a run would not repeat to the bit, where it is to."""
    if training.deterministic and not attention.is_repeatable:
        key = "model.attn_implementation"
        reason = "adds gradients in any order, and training.deterministic=true asks for one."
        yield Problem(show(key, attention), reason, f"Set {key}=auto.", setting=key)


def check_checkpoints(checkpoint: CheckpointConfig, training: TrainingConfig) -> Iterator[Problem]:
    """Yields what is wrong with `checkpoint`, and what needs checkpoints and has none."""
    yield from _check_allowed(checkpoint)
    if checkpoint.best_at_end and checkpoint.keep_best == 0:
        reason = "needs the best checkpoint, and checkpoint.keep_best=0 keeps the newest ones alone."
        fix = "Set checkpoint.keep_best=1, and checkpoint.every_steps and training.eval_every_steps to one number."
        yield problem_with(checkpoint, "checkpoint.best_at_end", reason, fix)
    if checkpoint.keep_best > 0 and not _are_evaluated(checkpoint.every_steps, training.eval_every_steps):
        reason = "needs an evaluation at the step of every checkpoint."
        fix = "Set training.eval_every_steps and checkpoint.every_steps, this a multiple of that."
        yield problem_with(checkpoint, "checkpoint.keep_best", reason, fix)
    has_none = checkpoint.every_steps is None and checkpoint.every_minutes is None
    if training.on_bad_step is OnBadStep.rollback and has_none:
        fix = "Set checkpoint.every_steps=100, or training.on_bad_step=skip."
        yield problem_with(training, "training.on_bad_step", "has no checkpoints to go back to.", fix)


def check_criterion(training: TrainingConfig, data: DataConfig, task: TaskConfig) -> Iterator[Problem]:
    """Yields why a run can't be judged by the figure that is named, or not by the pruner."""
    criterion = Criterion.of(training)
    key = "training.metric_for_best_model"
    if criterion.name != LOSS and not data.has_evaluation:
        reason = "is a figure of evaluations, and no rows are held out."
        yield problem_with(training, key, reason, "Set data.eval_fraction=0.05, or leave it out.")
    elif criterion.name != LOSS and task.name is TaskName.causal_lm:
        reason = f"is no figure of {show('task.name', task.name)}, whose evaluations have the loss alone."
        yield problem_with(training, key, reason, f"Set {key}=loss.")
    if training.pruner is None:
        return
    try:
        make_pruner(training.pruner, training.pruner_kwargs)
    except ImportError:
        fix = "Run pip install optuna, or leave it out."
        yield problem_with(training, "training.pruner", "needs the package optuna, which is not installed.", fix)
    except (TypeError, ValueError) as error:
        key = "training.pruner_kwargs"
        reason = f"can't be used with {show('training.pruner', training.pruner)}: {error}."
        yield problem_with(training, key, reason, f"Set {example_of(key)}, or the like.")


def _check_allowed(checkpoint: CheckpointConfig) -> Iterator[Problem]:
    """Yields a problem for each of `checkpoint.allow_changes` that is no setting."""
    for key in checkpoint.allow_changes:
        if key in all_settings():
            continue
        nearest = nearest_settings(key)
        fix = f"Did you mean {' or '.join(nearest)}?" if nearest else "See docs/configuration.md for all settings."
        yield problem_with(checkpoint, "checkpoint.allow_changes", f"names {key}, which is no setting.", fix)


def _are_evaluated(every_steps: int | None, eval_every_steps: int | None) -> bool:
    """Whether there is an evaluation at the step of every checkpoint."""
    if every_steps is None or eval_every_steps is None or eval_every_steps < 1:
        return False
    return every_steps % eval_every_steps == 0


def check_context_parallel(
    distributed: DistributedConfig,
    task: TaskConfig,
    training: TrainingConfig,
    tracking: TrackingConfig,
    attention: AttnImplementation,
) -> Iterator[Problem]:
    """Yields settings that don't go with sequences that ranks share. What `auto` chooses is checked as if it were set.

    Args:
        distributed: the section `distributed`.
        task: the section `task`.
        training: the section `training`.
        tracking: the section `tracking`.
        attention: model.attn_implementation.
    """
    if distributed.num_slices == 1:
        return
    refused: list[tuple[str, Any, str]] = []
    if task.name is not TaskName.causal_lm:
        refused.append(("task.name", task.name, _WHOLE))
    if task.neftune_noise_alpha is not None:
        refused.append(("task.neftune_noise_alpha", task.neftune_noise_alpha, _WHOLE))
    if training.router_aux_loss_coef > 0:
        refused.append(("training.router_aux_loss_coef", training.router_aux_loss_coef, _WHOLE))
    if tracking.num_generations > 0:
        refused.append(("tracking.num_generations", tracking.num_generations, _WHOLE))
    if not attention.may_share_sequences:
        refused.append(("model.attn_implementation", attention, _OF_SLICES))
    for key, value, why in refused:
        reason = f"can't be used with {show(key, value)}: {why}."
        fix = f"Set distributed.context_parallel=1, or {show(key, all_settings()[key].default)}."
        yield problem_with(distributed, "distributed.context_parallel", reason, fix)


def check_repository(hub: HubConfig) -> Iterator[Problem]:
    """Yields why there is no repository to upload to."""
    if hub.push and hub.repo is None:
        yield problem_with(hub, "hub.repo", "names no repository for hub.push=true.", "Set hub.repo=ORG/NAME.")
    elif hub.repo is not None and not is_repo_name(hub.repo):
        yield problem_with(hub, "hub.repo", "can't be the name of a repository.", "Set hub.repo=ORG/NAME.")
