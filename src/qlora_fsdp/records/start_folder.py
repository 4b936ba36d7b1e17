"""Where a run finds what it continues: the checkpoint that it resumes from, and the adapter that it started from.

A run that starts from an adapter (`lora.start`) keeps a copy of it. Once there is a checkpoint, the run reads only the
copy: its settings, its tokenizer, and its weights if they are still needed. So the adapter may be moved, replaced or
removed meanwhile. Imports no torch.
"""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

from qlora_fsdp.common.files import remove_leftovers, replacing
from qlora_fsdp.common.foreign_files import find_outside, named_templates, open_regular
from qlora_fsdp.config.adapter.adapter_config import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    SETTINGS_FILE,
    TOKENIZER_MODELS,
    TOKENIZER_TEXTS,
)
from qlora_fsdp.config.adapter.lora_start import typed_folder
from qlora_fsdp.config.schema import CheckpointConfig, RunConfig
from qlora_fsdp.records import run_state


def checkpoint_to_resume(run: RunConfig, settings: CheckpointConfig) -> Path | None:
    """The folder of the checkpoint that `checkpoint.resume` asks for; None where the run starts anew.

    A batch system or torchrun starts the command again after it was preempted or a rank was lost. Such a restart
    resumes from the newest checkpoint: `run.overwrite` and `checkpoint.resume` counted for the first start, and do not
    count again. Whether the folder holds a checkpoint is not checked here.
    """
    own = run_state.checkpoint_folders(own_checkpoints(run))
    resume = settings.resume
    if own and is_restart(run):
        return own[-1]
    if resume == "none" or (resume == "auto" and run.overwrite):
        return None
    if resume != "auto":
        return Path(resume).expanduser().resolve()
    return own[-1] if own else None


def own_checkpoints(run: RunConfig) -> Path:
    """The folder of the run's own checkpoints."""
    return Path(run.folder).expanduser().resolve() / run_state.CHECKPOINTS


def is_restart(run: RunConfig) -> bool:
    """Whether an earlier attempt of this same launch has begun to train in the run folder."""
    before = run_state.read_json(Path(run.folder).expanduser() / run_state.ATTEMPT)
    now = run_state.describe_attempt(os.environ)
    restarts = before.get("restarts")
    is_whole = isinstance(restarts, list) and all(type(number) is int for number in restarts)
    return is_whole and before.get("launch") == now["launch"] and restarts < now["restarts"]


def find_start(typed: str, run: RunConfig, settings: CheckpointConfig) -> Path:
    """The folder in which the adapter of `lora.start` is read: the copy of a run that is resumed, or the one typed.

    Args:
        typed: `lora.start`.
        run: says which folder the run has, and whether it starts anew.
        settings: say which checkpoint is resumed.
    """
    checkpoint = checkpoint_to_resume(run, settings)
    run_folder = own_checkpoints(run).parent
    copy = None
    if checkpoint is not None:
        copy = checkpoint.parent.parent / run_state.START_FOLDER
    elif not run.overwrite and run_state.is_finished(run_folder):
        copy = run_folder / run_state.START_FOLDER  # a job of a sweep that has nothing left to do
    if copy is not None and (copy / ADAPTER_CONFIG).is_file():
        return copy
    return typed_folder(typed, run, settings)


def keep_start(folder: Path, run_folder: Path) -> None:
    """Copies the adapter in `folder` to the run folder, if it is not there already. Rank 0 calls this.

    Raises:
        OSError: it can't be written, or a file is none of the adapter's folder.
    """
    target = run_folder / run_state.START_FOLDER
    if folder.resolve() == target.resolve():
        return
    if outside := find_outside(folder):  # looked for again: they may have come since the settings were checked
        raise OSError(errno.ELOOP, "it leads out of the adapter's folder", str(outside[0]))
    remove_leftovers(target)
    with replacing(target) as temporary:
        temporary.mkdir()
        for name in (ADAPTER_CONFIG, SETTINGS_FILE, *TOKENIZER_TEXTS, *TOKENIZER_MODELS, *named_templates(folder)):
            if (folder / name).is_file():
                file = (folder / name).resolve()  # a link, in the hub's cache
                (temporary / name).parent.mkdir(exist_ok=True)
                with open_regular(file.parent, file.name) as source, (temporary / name).open("xb") as copy:
                    shutil.copyfileobj(source, copy)
        with (folder / ADAPTER_WEIGHTS).open("rb") as source, (temporary / ADAPTER_WEIGHTS).open("xb") as copy:
            shutil.copyfileobj(source, copy)  # weights may be links to another disk
