"""Which checkpoint a run goes on from, and whether it would still be the same run."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Any

from qlora_fsdp.checkpoint import ANOTHER, Checkpoint, checkpoint_folders, read_manifest, remove_checkpoints
from qlora_fsdp.config.schema import Config, Optimizer
from qlora_fsdp.config.settings import all_settings, show, value_of
from qlora_fsdp.data.sequences import Sequences
from qlora_fsdp.errors import ConfigError, Problem, ResumeError

# What changes no number, or only the rounding of sums. A setting that is not here is part of what the run is.
HARMLESS_SECTIONS = ("run", "fsdp", "memory", "kernels", "checkpoint", "tracking", "distributed")
HARMLESS = (
    "model.name",
    "model.attn_implementation",
    "model.trust_remote_code",
    "data.num_proc",
    "data.cache_folder",
    "training.micro_batch_size",
    "training.eval_every_steps",
)
# The state of adamw_8bit is saved a file a rank, so the shards must stay as they are.
SHARDS = ("fsdp.sharding_strategy", "fsdp.hybrid_shard_size")


def find_checkpoint(config: Config) -> Checkpoint | None:
    """The checkpoint that `checkpoint.resume` means; None: start anew. For rank 0.

    Raises:
        ResumeError: it is not there or not whole.
    """
    resume = config.checkpoint.resume
    if resume == "none" or (resume == "auto" and config.run.overwrite):
        return None
    if resume != "auto":
        return read_manifest(Path(resume).expanduser().resolve())
    folders = checkpoint_folders(_own_folder(config))
    return read_manifest(folders[-1]) if folders else None


def is_own(checkpoint: Checkpoint | None, config: Config) -> bool:
    """Whether the run goes on in the folder that it began in."""
    return checkpoint is not None and checkpoint.folder.parent == _own_folder(config)


def remove_later_checkpoints(checkpoint: Checkpoint | None, folder: Path) -> None:
    """Remove from `folder` what does not lead up to `checkpoint`: all, where that is not there. For rank 0."""
    folders = checkpoint_folders(folder)
    keep = []
    if checkpoint is not None and checkpoint.folder in folders:
        keep = folders[: folders.index(checkpoint.folder) + 1]
    remove_checkpoints(folder, keep)


def plain_settings(config: Config, num_ranks: int) -> dict[str, Any]:
    """Every setting by its key, as JSON has it; a global batch size that follows from the ranks is spelt out."""
    settings = {key: _plain(value_of(config, key)) for key in all_settings()}
    settings["training.global_batch_size"] = (
        config.training.global_batch_size or config.training.micro_batch_size * num_ranks
    )
    return settings


def check_changes(checkpoint: Checkpoint, config: Config, num_ranks: int) -> list[str]:
    """What differs from the run that wrote the checkpoint, and may: `new (was old)`.

    Raises:
        ConfigError: something differs that makes it another run and is not in checkpoint.allow_changes.
    """
    is_8bit = config.optim.name is Optimizer.adamw_8bit
    changes, problems = [], []
    for key, value in plain_settings(config, num_ranks).items():
        old = checkpoint.settings.get(key, _plain(all_settings()[key].default))
        if value == old:
            continue
        is_harmless = key.partition(".")[0] in HARMLESS_SECTIONS or key in HARMLESS
        if (is_harmless and not (is_8bit and key in SHARDS)) or key in config.checkpoint.allow_changes:
            changes.append(f"{show(key, value)} (was {show('', old)[1:]})")
        else:
            reason = f"was {show('', old)[1:]} when {checkpoint.folder} was written: it would be another run."
            fix = f"Set {show(key, old)}, or checkpoint.allow_changes=[{key}], or checkpoint.resume=none to start anew."
            problems.append(Problem(show(key, value), reason, fix))
    if num_ranks != checkpoint.num_ranks:
        changes.append(f"{num_ranks} ranks (was {checkpoint.num_ranks})")
        if is_8bit:
            reason = f"keeps its state by rank: {num_ranks} ranks can't go on from the {checkpoint.num_ranks} of"
            fix = f"Start {checkpoint.num_ranks} processes, or set checkpoint.resume=none to start anew."
            problems.append(Problem("optim.name=adamw_8bit", f"{reason} {checkpoint.folder}.", fix))
    if problems:
        raise ConfigError(problems)
    return changes


def describe_data(data: Sequences) -> dict[str, int]:
    """Counts that tell training data from other data."""
    tokens, targets = int(data.lengths.sum()), int(data.num_targets.sum())
    return {"num_sequences": len(data), "num_tokens": tokens, "num_target_tokens": targets}


def check_data(checkpoint: Checkpoint, data: Sequences, config: Config) -> None:
    """Refuse data that changed under the same settings: rows would be seen twice or skipped.

    Raises:
        ResumeError: it did, and no changed `data` or `training` setting that is allowed explains it.
    """
    found = describe_data(data)
    is_allowed = any(key.startswith(("data.", "training.")) for key in config.checkpoint.allow_changes)
    if found != checkpoint.data and not is_allowed:
        counts = ", ".join(f"{name} is {found[name]}, was {checkpoint.data.get(name)}" for name in found)
        raise ResumeError(
            f"data.path={config.data.path} is not the data that {checkpoint.folder} was trained on: {counts}. Bring "
            f"the data back, or set checkpoint.allow_changes=[data.path]. {ANOTHER}"
        )


def _own_folder(config: Config) -> Path:
    return Path(config.run.folder).expanduser().resolve() / "checkpoints"


def _plain(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value
