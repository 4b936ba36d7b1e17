"""Which checkpoint a run resumes from, and whether it would still be the same run."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from qlora_fsdp.common.errors import ConfigError, Problem, ResumeError
from qlora_fsdp.common.files import write_json
from qlora_fsdp.common.text import plural, printable
from qlora_fsdp.config.recorded import find_changes
from qlora_fsdp.config.schema import (
    CheckpointConfig,
    DataConfig,
    DistributedConfig,
    FsdpConfig,
    Optimizer,
    Run,
    RunConfig,
    ShardingStrategy,
    TrainingConfig,
)
from qlora_fsdp.config.settings import all_settings, show
from qlora_fsdp.config.world import AUTO
from qlora_fsdp.data.sequences import TrainingData
from qlora_fsdp.records.run_state import ATTEMPT, CHECKPOINTS, MANIFEST, checkpoint_folders, describe_attempt, step_of
from qlora_fsdp.records.start_folder import checkpoint_to_resume, own_checkpoints
from qlora_fsdp.training.checkpoints.checkpoint import (
    ANEW,
    Checkpoint,
    read_manifest,
    remove_checkpoints,
    resume_hint,
)

SLICES = "distributed.context_parallel"
OPEN = ("training.micro_batch_size", "fsdp.sharding_strategy")  # what `auto` chooses by the memory plan
WHOLE_OR_SPLIT = (ShardingStrategy.NO_SHARD.value, ShardingStrategy.FULL_SHARD.value)
NEWEST = ("true", "yes", "last", "latest", "newest")  # so other trainers call it
PACKING = "training.packing"
MAKES_SEQUENCES = ("data.", PACKING, "training.max_length", "training.seed")  # beginnings of settings


def find_checkpoint(run: RunConfig, settings: CheckpointConfig) -> Checkpoint | None:
    """The checkpoint that `checkpoint.resume` asks for; None where the run starts anew. Rank 0 calls this.

    Raises:
        ResumeError: the checkpoint is missing or not whole.
    """
    folder = checkpoint_to_resume(run, settings)
    resume = settings.resume
    if folder is None:
        return None
    if folder.parent != own_checkpoints(run) and not (folder / MANIFEST).exists():
        inside = checkpoint_folders(folder) or checkpoint_folders(folder / CHECKPOINTS)
        adapter = (folder.parents[1] if folder.parent.name == CHECKPOINTS else folder) / "adapter"
        fix = resume_hint(folder)
        if inside:
            fix = f"Set checkpoint.resume={inside[-1]}, the newest in it."
        elif adapter.is_dir() and not checkpoint_folders(adapter.parent / CHECKPOINTS):
            fix = (
                "A run that has finished keeps checkpoints only with checkpoint.every_steps. To train its adapter on, "
                f"set lora.start={adapter} in place of checkpoint.resume."
            )
        if (folder.parent / MANIFEST).exists():
            fix = f"Set checkpoint.resume={folder.parent}, which it is a part of."
        elif resume.lower() in NEWEST:
            fix = "Set checkpoint.resume=auto, the default, to go on from the newest in run.folder."
        reason = f"has no {MANIFEST}" if folder.exists() else "does not exist"
        raise ResumeError(f"checkpoint.resume={resume} is no checkpoint: it {reason}. {fix}")
    return read_manifest(folder)


def resumed_run(settings: CheckpointConfig) -> Path | None:
    """The folder of the run whose checkpoint `checkpoint.resume` names; None if it names none."""
    if settings.resume in ("auto", "none"):
        return None
    return Path(settings.resume).expanduser().resolve().parents[1]  # run/checkpoints/step


def is_own(checkpoint: Checkpoint | None, run: RunConfig) -> bool:
    """Whether the checkpoint is in the run's own folder."""
    return checkpoint is not None and checkpoint.folder.parent == own_checkpoints(run)


def begin_attempt(checkpoint: Checkpoint | None, run_folder: Path) -> None:
    """Record that from now on the checkpoints in the run folder are this run's, also for a restart. Rank 0 calls this.

    Checkpoints that do not lead up to `checkpoint` are removed; where the run starts anew, these are all.
    """
    folder = run_folder / CHECKPOINTS
    folders = checkpoint_folders(folder)
    keep = []
    if checkpoint is not None and checkpoint.folder in folders:
        keep = folders[: folders.index(checkpoint.folder) + 1]
    remove_checkpoints(folder, keep)
    write_json(run_folder / ATTEMPT, describe_attempt(os.environ))


def choices_of(
    checkpoint: Checkpoint, num_ranks: int, training: TrainingConfig, distributed: DistributedConfig, fsdp: FsdpConfig
) -> dict[str, Any]:
    """What was chosen for settings that are `auto` when the checkpoint was written, by key.

    At the same number of ranks, and of slices, a run goes on with it, so that its sums are made in the same order.
    """
    is_open = distributed.context_parallel == AUTO
    num_slices = checkpoint.settings.get(SLICES, 1)
    has_other_slices = not is_open and num_slices != distributed.num_slices
    if num_ranks != checkpoint.num_ranks or has_other_slices:
        return {}
    found: dict[str, Any] = {}
    if is_open:
        found[SLICES] = num_slices
    size_key, strategy_key = OPEN
    size = checkpoint.settings.get(size_key)
    is_size = isinstance(size, int) and size > 0
    if training.micro_batch_size == AUTO and is_size:
        found[size_key] = size
    strategy = checkpoint.settings.get(strategy_key)
    possible = WHOLE_OR_SPLIT if fsdp.may_be_whole else WHOLE_OR_SPLIT[1:]
    if fsdp.sharding_strategy is ShardingStrategy.auto and strategy in possible:
        found[strategy_key] = ShardingStrategy(strategy)
    return found


def settings_of(recorded: Mapping[str, Any], num_ranks: int) -> dict[str, Any]:
    """Every setting by its key, as in a manifest. A global batch size that follows from the ranks is written out."""
    size = recorded["training.global_batch_size"]
    if not size:
        num_slices = recorded[SLICES] if isinstance(recorded[SLICES], int) else 1
        size = recorded["training.micro_batch_size"] * max(1, num_ranks // num_slices)
    return {**recorded, "training.global_batch_size": size}


def check_changes(
    checkpoint: Checkpoint, settings: Mapping[str, Any], optimizer: Optimizer, num_ranks: int
) -> list[str]:
    """Allowed differences from the run that wrote the checkpoint, each as `new (was old)`.

    Args:
        checkpoint: what the run resumes from.
        settings: the run's, as `settings_of` makes them.
        optimizer: the run's.
        num_ranks: all ranks.

    Raises:
        ConfigError: a difference makes it another run, and checkpoint.allow_changes does not list it or can't allow it.
    """
    keeps_shards = optimizer.is_bitsandbytes and num_ranks == checkpoint.num_ranks  # else said below
    changes, problems = [], []
    for key, (value, old) in find_changes(settings, checkpoint.settings).items():
        was = printable(show("", old)[1:])
        run = all_settings()[key].facets.run
        if run is Run.fixed:
            reason = f"was {was} when {checkpoint.folder} was written, and what is saved there fits nothing else."
            fix = f"Set {key}={was}, or checkpoint.resume=none to start anew."
            problems.append(Problem(show(key, value), reason, fix))
            continue
        may_change = run.is_same and not (keeps_shards and run is Run.same_shards)
        if may_change or key in settings["checkpoint.allow_changes"]:
            is_chosen = key in (*OPEN, SLICES) and show("", value) == f"={AUTO}"  # the user need not have changed it
            now = f"{key} chosen anew" if is_chosen else show(key, value)
            changes.append(f"{now} (was {was})")
        else:
            reason = f"was {was} when {checkpoint.folder} was written: it would be another run."
            fix = f"Set {key}={was}, or checkpoint.allow_changes=[{key}], or checkpoint.resume=none to start anew."
            problems.append(Problem(show(key, value), reason, fix))
    if num_ranks != checkpoint.num_ranks:
        changes.append(f"{plural(num_ranks, 'rank')} (was {checkpoint.num_ranks})")
        if optimizer.is_bitsandbytes:
            reason = (
                f"keeps its state by rank: {plural(num_ranks, 'rank')} can't go on from the {checkpoint.num_ranks} of"
            )
            fix = f"Start {plural(checkpoint.num_ranks, 'rank')}, or set checkpoint.resume=none to start anew."
            problems.append(Problem(show("optim.name", optimizer), f"{reason} {checkpoint.folder}.", fix))
    if problems:
        raise ConfigError(problems)
    return changes


def check_data(
    checkpoint: Checkpoint,
    data: TrainingData,
    settings: DataConfig,
    packing: bool | str,
    allow_changes: Sequence[str],
) -> None:
    """Refuse data that changed under the same settings, because rows would be seen twice or skipped.

    Args:
        checkpoint: what the run resumes from.
        data: what it is to train on.
        settings: the section `data`.
        packing: `training.packing`, as it was typed.
        allow_changes: settings that may differ.

    Raises:
        ResumeError: the data changed, and no setting that may change explains that.
    """
    found = data.describe()
    is_allowed = any(key.startswith(MAKES_SEQUENCES) for key in allow_changes)
    if found == checkpoint.data or is_allowed:
        return
    was = checkpoint.settings.get(PACKING)
    if was is not None and was != packing:
        reason = f"was {printable(show('', was)[1:])} when {checkpoint.folder} was written: the rows are in other"
        fix = f"Set {PACKING} to that, or set checkpoint.allow_changes=[{PACKING}]. Or set {ANEW}"
        raise ResumeError(f"{show(PACKING, packing)} {reason} sequences. {fix}")
    key, value = ("data.mix", settings.mix) if settings.mix else ("data.path", settings.path)
    before = {name: checkpoint.data.get(name) for name in found}
    changed = [name for name in found if found[name] != before[name]]
    counts = ", ".join(f"{name} is {found[name]}, was {printable(str(before[name]))}" for name in changed)
    if settings.streaming:
        counts += ". Files that are streamed are known by their place, size and time of change, and a copy has others"
    raise ResumeError(
        f"{show(key, value)} is not the data that {checkpoint.folder} was trained on: {counts}. "
        f"Bring the data back, or set checkpoint.allow_changes=[{key}]. Or set {ANEW}"
    )


def check_step(checkpoint: Checkpoint, num_steps: int) -> None:
    """Refuse a checkpoint of a step that this run does not reach: it would end at once, as if it had trained.

    Raises:
        ResumeError: the checkpoint is of a later step.
    """
    if checkpoint.step > num_steps:
        raise ResumeError(
            f"{checkpoint.folder} is of step {checkpoint.step}, and this run has {num_steps} steps. Set "
            f"checkpoint.resume=FOLDER to an earlier checkpoint, or {ANEW}"
        )


def check_base(checkpoint: Checkpoint, base: str | None, path: str | None, allow_changes: Sequence[str]) -> None:
    """Refuse another base model under the same path and of the same shapes, on which the adapter was not trained.

    Raises:
        ResumeError: it is another one, and no `model` setting may change.
    """
    is_allowed = any(key.startswith("model.") for key in allow_changes)
    if checkpoint.base is not None and base != checkpoint.base and not is_allowed:
        raise ResumeError(
            f"model.path={path} holds other weights than when {checkpoint.folder} was written. Bring the "
            f"files back, or set checkpoint.allow_changes=[model.path] to go on with these. Or set {ANEW}"
        )


def describe_kept(run: RunConfig, settings: CheckpointConfig) -> str:
    """What a run that a signal ends can be resumed from, for its message."""
    own = checkpoint_folders(own_checkpoints(run))
    resume = settings.resume
    if not own:
        return "No step is saved: the same command starts again."
    setting = show("checkpoint.resume", resume) if resume != "auto" else "run.overwrite=true"
    without = f"without {setting} " if resume != "auto" or run.overwrite else ""
    return f"Step {step_of(own[-1])} is saved: {without}the same command goes on from there."
