"""Checks of the settings of training, sharding, memory, checkpoints and launches. Part of `check_settings`."""

from __future__ import annotations

import re
from collections.abc import Iterator

from qlora_fsdp.common.errors import Problem
from qlora_fsdp.common.text import is_whole
from qlora_fsdp.config.accelerate_file import check_accelerate_file
from qlora_fsdp.config.check_model import NO_FLOAT16
from qlora_fsdp.config.schema import (
    Config,
    DataFormat,
    Dtype,
    OnBadStep,
    ShardingStrategy,
    TaskName,
)
from qlora_fsdp.config.settings import all_settings, nearest_settings, problem_with, show, value_of

_SLURM_TIME = re.compile(r"(\d+-)?\d+(:\d\d){0,2}")


def check_training(config: Config) -> Iterator[Problem]:
    """Yields what is wrong with all sections from `fsdp` to `slurm` but `data` and `tracking`."""
    for find_problems in (_fsdp, _memory, _optim, _training, _checkpoint, check_context_parallel, _launch):
        yield from find_problems(config)


def _fsdp(config: Config) -> Iterator[Problem]:
    fsdp = config.fsdp
    if fsdp.cpu_offload and fsdp.sharding_strategy is ShardingStrategy.NO_SHARD:
        reason = "needs shards to offload, and fsdp.sharding_strategy=NO_SHARD makes none."
        yield problem_with(config, "fsdp.cpu_offload", reason, "Set fsdp=offload, or fsdp.cpu_offload=false.")
    if fsdp.cpu_offload and config.optim.name.is_for_gpus:
        reason = "keeps its state on the GPU, and with fsdp.cpu_offload=true the parameters are on the CPU."
        yield problem_with(config, "optim.name", reason, "Set optim=adamw, or fsdp.cpu_offload=false.")
    if fsdp.reshard_after_forward and not fsdp.reshards:
        reason = f"contradicts {show('fsdp.sharding_strategy', fsdp.sharding_strategy)}, with which no layer is freed."
        fix = "Set fsdp=full_shard, or fsdp.reshard_after_forward=null."
        yield problem_with(config, "fsdp.reshard_after_forward", reason, fix)


def _memory(config: Config) -> Iterator[Problem]:
    memory = config.memory
    asks_for_tiles = is_whole(memory.tile_tokens)
    why_not = why_no_tiles(config)
    if asks_for_tiles and why_not is not None:
        yield problem_with(config, "memory.tile_tokens", f"can't be used: {why_not}.", "Set memory.tile_tokens=auto.")


def _optim(config: Config) -> Iterator[Problem]:
    optim, max_steps = config.optim, config.training.max_steps
    if len(optim.betas) != 2 or not all(0 <= beta < 1 for beta in optim.betas):
        fix = "Set optim.betas=[0.9,0.999], the default."
        yield problem_with(config, "optim.betas", "must be two numbers from 0 to below 1.", fix)
    if optim.warmup_steps is not None and max_steps is not None and optim.warmup_steps >= max_steps:
        reason = f"leaves no step after the warmup: training.max_steps={max_steps}."
        yield problem_with(config, "optim.warmup_steps", reason, "Set it below training.max_steps.")


def _training(config: Config) -> Iterator[Problem]:
    training = config.training
    size = training.micro_batch_size
    if size == "auto" and training.global_batch_size is None:
        reason = "needs a global batch to divide, and training.global_batch_size=null follows from the micro-batch."
        fix = "Set training.global_batch_size=16, the default, or training.micro_batch_size=1."
        yield problem_with(config, "training.micro_batch_size", reason, fix)
    if training.deterministic and not config.model.attn_implementation.is_repeatable:
        reason = "adds gradients in any order, and training.deterministic=true asks for one."
        yield problem_with(config, "model.attn_implementation", reason, "Set model.attn_implementation=auto.")
    if training.precision is Dtype.float16:
        yield problem_with(config, "training.precision", NO_FLOAT16, "Set training.precision=auto.")
    if config.data.format is DataFormat.random and training.max_steps is None and config.data.max_rows is None:
        reason = "sets no end, and random data (data.format=random) has none."
        yield problem_with(config, "training.max_steps", reason, "Set training.max_steps=10.")


def why_no_tiles(config: Config) -> str | None:
    """Why layers can't be computed in tiles; None if they can."""
    drops = config.lora.lora_dropout > 0
    return "backward computes a tile again, and lora.lora_dropout would drop other values then" if drops else None


def _checkpoint(config: Config) -> Iterator[Problem]:
    for key in config.checkpoint.allow_changes:
        if key not in all_settings():
            nearest = nearest_settings(key)
            fix = f"Did you mean {' or '.join(nearest)}?" if nearest else "See docs/configuration.md for all settings."
            yield problem_with(config, "checkpoint.allow_changes", f"names {key}, which is no setting.", fix)

    checkpoint, training = config.checkpoint, config.training
    if checkpoint.keep_best > 0:
        every, evaluates = checkpoint.every_steps, training.eval_every_steps
        if every is None or evaluates is None or evaluates < 1 or every % evaluates:
            reason = "needs an evaluation at the step of every checkpoint."
            fix = "Set training.eval_every_steps and checkpoint.every_steps, this a multiple of that."
            yield problem_with(config, "checkpoint.keep_best", reason, fix)
    has_none = checkpoint.every_steps is None and checkpoint.every_minutes is None
    if training.on_bad_step is OnBadStep.rollback and has_none:
        fix = "Set checkpoint.every_steps=100, or training.on_bad_step=skip."
        yield problem_with(config, "training.on_bad_step", "has no checkpoints to go back to.", fix)


def check_context_parallel(config: Config) -> Iterator[Problem]:
    """Find settings that don't go with sequences that ranks share. What `auto` chooses is checked as if it were set."""
    if config.distributed.num_slices == 1:
        return
    whole = "a rank has slices, and this needs whole sequences"
    can_not = {
        "task.name": (config.task.name is not TaskName.causal_lm, whole),
        "training.router_aux_loss_coef": (config.training.router_aux_loss_coef > 0, whole),
        "tracking.num_generations": (config.tracking.num_generations > 0, whole),
        "model.attn_implementation": (
            not config.model.attn_implementation.may_share_sequences,
            "a mask is of a slice, and only attention that is told where rows start sees all of a sequence",
        ),
    }
    for key, (is_wanted, reason) in can_not.items():
        if is_wanted:
            fix = f"Set distributed.context_parallel=1, or {show(key, all_settings()[key].default)}."
            reason = f"can't be used with {show(key, value_of(config, key))}: {reason}."
            yield problem_with(config, "distributed.context_parallel", reason, fix)


def _launch(config: Config) -> Iterator[Problem]:
    yield from check_accelerate_file(config)
    time, saves_before = config.slurm.time, config.slurm.signal_seconds
    fix = "Set slurm.time=24:00:00, or 2-00:00:00 for days."
    if time is not None and not _SLURM_TIME.fullmatch(time):
        yield problem_with(config, "slurm.time", "is no time limit.", fix)
    elif time is not None and 0 < (limit := _seconds(time)) <= saves_before:  # to SLURM 0 is no limit
        reason = f"is {limit} seconds to SLURM, and {show('slurm.signal_seconds', saves_before)} before its end a run"
        yield problem_with(config, "slurm.time", f"{reason} saves and queues again: it would do nothing else.", fix)


def _seconds(time: str) -> int:
    """A time limit of SLURM's in seconds: `minutes`, `minutes:seconds` or from the left days, hours and so on."""
    days, dash, rest = time.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    hours, minutes, seconds = ([*parts, 0, 0] if dash or len(parts) == 3 else [0, *parts, 0])[:3]
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds
