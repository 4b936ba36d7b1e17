"""What a run may replace and remove in a folder: what a run has written there, and nothing else. Imports no torch.

A run that opens its folder leaves a marker in it. A folder that happens to have files of the same names, such as a
repository with a `config.yaml` and an `adapter/`, is no run's.
"""

from __future__ import annotations

import re
from pathlib import Path

from qlora_fsdp.common.files import write_json
from qlora_fsdp.records.run_state import (
    ATTEMPT,
    CHECKPOINTS,
    CONFIG_FILE,
    CONSOLE_FILE,
    ENVIRONMENT_FILE,
    LOCK,
    MANIFEST,
    MLFLOW_FILE,
    RECORDS,
    STREAM_FILE,
    SUMMARY_FILE,
    WANDB_FILE,
    checkpoint_folders,
    read_json,
)

MARKER = ".qlora_fsdp"
MADE_BY = "qlora-fsdp"
# What a run writes under names of its own, which others may use as well. CHECKPOINTS is not among them, because every
# checkpoint is known by its own manifest.
OWN_NAMES = (
    *("adapter", CONFIG_FILE, ENVIRONMENT_FILE, SUMMARY_FILE, WANDB_FILE, MLFLOW_FILE),
    *(STREAM_FILE, *RECORDS, ATTEMPT, LOCK),
)
OWN_CHECKPOINT = re.compile(rf"{CHECKPOINTS}/step-\d{{8,}}")  # the name that a run gives it
# What no link may be, because a run writes there, or its job.
FOLLOWED = (*OWN_NAMES, MARKER, CHECKPOINTS, CONSOLE_FILE, "wandb")


def is_own(folder: Path) -> bool:
    """Whether a run has made this folder its own."""
    return read_json(folder / MARKER).get("made_by") == MADE_BY


def mark(folder: Path) -> None:
    """Makes a folder a run's, which it stays wherever it is moved.

    Raises:
        OSError: it can't be written.
    """
    if not is_own(folder):
        about = "This folder is a run's. What the run has written in it may be replaced by run.overwrite=true."
        write_json(folder / MARKER, {"made_by": MADE_BY, "about": about})


def find_obstacle(folder: Path) -> tuple[str, str] | None:
    """Why a run must not use a folder, whatever its settings allow: as the end of a sentence, and what to do."""
    names = [name for name in FOLLOWED if (folder / name).is_symlink()]
    steps = checkpoint_folders(folder / CHECKPOINTS) if not names else []
    names += [f"{CHECKPOINTS}/{path.name}" for path in steps if path.is_symlink()]
    if names:
        fix = "Remove the link. For a run on another disk, set run.folder to a folder there, which may be a link."
        return f"holds the link {', '.join(names)}, and a run follows no links in its folder.", fix
    others = [] if is_own(folder) else [name for name in OWN_NAMES if (folder / name).exists()]
    unknown = [f"{CHECKPOINTS}/{path.name}" for path in steps if not is_checkpoint(path)]
    if unknown and not others and all(OWN_CHECKPOINT.fullmatch(name) for name in unknown):  # copied in part, perhaps
        fix = "Move this away: the same command then goes on from the checkpoint before, if there is one."
        return f"holds {', '.join(unknown)}, whose {MANIFEST} is missing or damaged.", fix
    others += unknown
    if others:
        fix = "Set another run.name= or run.folder=, or move these away. Only what a run has written is replaced."
        return f"holds {', '.join(others)}, of no run.", fix
    return None


def is_checkpoint(folder: Path) -> bool:
    """Whether a folder has a manifest such as a run writes, so that it is a checkpoint, be it a damaged one."""
    manifest = read_json(folder / MANIFEST)
    return not folder.is_symlink() and {"sha256", "step", "files"} <= manifest.keys()
