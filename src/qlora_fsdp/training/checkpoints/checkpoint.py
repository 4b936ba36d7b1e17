"""Checkpoints: a run that resumes from one continues as if it had never stopped.

A checkpoint is a folder:

    run.folder/checkpoints/step-00000100/
        rank-00000.safetensors, ...   what each rank held: rows of the trained parameters and of the optimizer's state
        index.json                    shape and dtype of each of these tensors, and which file has which of its rows
        adapter/                      the adapter, in the files that PEFT loads
        manifest.json                 step, settings, and size and SHA-256 of every other file

Nothing else has to be saved. The order of the data, the learning rate, the divisor of the loss and the seed of dropout
all follow from the step. Reading these files executes nothing: they are JSON and raw tensor bytes.

The life of a checkpoint, and the function of each step:

1. The loop asks whether a checkpoint is due, and has it written: `saver.Saver.is_due`, `after_step`.
2. Training waits while each rank copies what it will write to host memory: `write.HostCopy.take`.
3. Training continues, and a thread on each rank (`thread.CheckpointThread`) writes that copy:
   `write.write_checkpoint`. All files go to a folder with a temporary name (`temporary_name`). Each rank writes its own
   file (`_write_own_file`); then rank 0 writes the index, the adapter and last the manifest, and renames the folder
   (`_complete`). A folder named `step-...` is therefore always whole.
4. Rank 0 removes checkpoints that are not to be kept, each of which it renames first: `remove_checkpoints`.
5. A run that starts finds the checkpoint that it has to resume from, and compares its settings, data and base model
   with that checkpoint's: `resume.find_checkpoint`, `check_changes`, `check_data`, `check_base`.
6. It compares every file with the manifest: `read_manifest`, `verify_files`.
7. Each rank reads the rows that it holds now into its parameters and optimizer: `load_checkpoint`. What the index says
   is checked against these (`saved_tensors.py`).
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch import Tensor, nn

from qlora_fsdp.common.errors import ResumeError, UserError
from qlora_fsdp.common.files import digest_stream, remove
from qlora_fsdp.common.foreign_files import open_regular, read_small
from qlora_fsdp.common.text import printable
from qlora_fsdp.records.check_run_folder import is_checkpoint
from qlora_fsdp.records.run_state import MANIFEST, checkpoint_folders
from qlora_fsdp.runtime.hardware import is_shortage
from qlora_fsdp.runtime.processes import Processes
from qlora_fsdp.runtime.rows import local_rows, local_tensor
from qlora_fsdp.training.checkpoints.saved_tensors import (
    INDEX,
    BadFile,
    SavedTensor,
    check_like,
    rank_file,
    read_index,
    read_own,
    read_rows,
    read_stored,
)
from qlora_fsdp.training.optim import LocalBitsandbytes, state_before_first_step
from qlora_fsdp.weights.safetensors_files import StoredTensor

MAX_COUNT = 2**31 - 1  # steps or ranks
MAX_DEPTH = 32  # of the lists and dicts in a manifest
TEMPORARY_NAME = re.compile(r"\.step-\d{8,}\.[0-9a-f]+\.tmp")  # as `temporary_name` makes it
ANEW = "checkpoint.resume=none to start anew, which removes the checkpoints in run.folder."


@dataclass(frozen=True)
class Checkpoint:
    """The fields of a checkpoint's manifest.

    Attributes:
        step: optimizer steps done.
        num_ranks: ranks of the run that wrote it.
        settings: every setting by its dotted key, as plain values.
        data: counts that tell the training data from other data.
        base: fingerprint of the base model's files. None where the base model is random.
        eval_losses: (step, loss) of the evaluations before this step's.
        eval_metrics: (step, the task's other figures) of the same.
        files: size and SHA-256 of every other file, by its path in the folder.
    """

    folder: Path
    step: int
    num_ranks: int
    settings: dict[str, Any]
    data: dict[str, int]
    base: str | None = None
    eval_losses: list[tuple[int, float]] = field(default_factory=list)
    eval_metrics: list[tuple[int, dict[str, float]]] = field(default_factory=list)
    files: dict[str, tuple[int, str]] = field(default_factory=dict)


def resume_hint(folder: Path) -> str:
    """Advice for a checkpoint in `folder` that can't be used. It names the checkpoint before, if there is one."""
    older = [path for path in checkpoint_folders(folder.parent) if path < folder]
    return f"Set checkpoint.resume={older[-1] if older else 'FOLDER to another checkpoint'}, or {ANEW}"


def read_manifest(folder: Path) -> Checkpoint:
    """Read what is in a checkpoint; its other files are not looked at.

    Raises:
        ResumeError: there is no whole checkpoint.
    """
    try:
        manifest = json.loads(read_small(folder, MANIFEST))
        digest = manifest.pop("sha256")
        if digest != digest_manifest(manifest):
            raise ValueError("its checksum does not match")
        checkpoint = Checkpoint(folder, **manifest)
        _check_types(checkpoint)
        return checkpoint
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else printable(str(error))
        raise ResumeError(f"{folder / MANIFEST} can't be used: {reason}. {resume_hint(folder)}") from error


def _check_types(checkpoint: Checkpoint) -> None:
    """Anybody may have written the manifest, checksum and all: its values must be what the rest of the code expects.

    Raises:
        ValueError, TypeError, AttributeError: they are not.
    """
    for name, (size, digest) in checkpoint.files.items():
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts:
            raise ValueError(f"it lists {name}, which is not in the folder")
        if not name.isprintable():
            raise ValueError(f"it lists {name}, which is no name of a checkpoint's file")
        if type(size) is not int or type(digest) is not str:
            raise ValueError(f"it has no size and checksum of {name}")
    if not _is_count(checkpoint.step) or not _is_count(checkpoint.num_ranks) or checkpoint.num_ranks == 0:
        raise ValueError("its step or number of ranks is no number")
    if not isinstance(checkpoint.settings, dict) or not isinstance(checkpoint.data, dict):
        raise ValueError("its settings or data are no names with values")
    if not _is_flat([checkpoint.settings, checkpoint.data, checkpoint.base], MAX_DEPTH):
        raise ValueError("its settings or data are nested deeply")
    if not isinstance(checkpoint.eval_losses, list):
        raise ValueError("its evaluation losses are no list")
    for step, loss in checkpoint.eval_losses:
        if not _is_count(step) or not _is_figure(loss):
            raise ValueError("its evaluation losses are no numbers")
    if not isinstance(checkpoint.eval_metrics, list):
        raise ValueError("its evaluations' figures are no list")
    for step, figures in checkpoint.eval_metrics:
        if not _is_count(step) or not all(_is_figure(value) for value in figures.values()):
            raise ValueError("its evaluations' figures are no numbers")


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= MAX_COUNT


def _is_figure(value: Any) -> bool:
    return type(value) is float or (type(value) is int and abs(value) <= MAX_COUNT)


def _is_flat(value: Any, depth: int) -> bool:
    """Whether lists and dicts are nested at most `depth` deep; rank 0 could not send others to the other ranks."""
    if not isinstance(value, (list, dict)):
        return True
    return depth > 0 and all(
        _is_flat(item, depth - 1) for item in (value.values() if isinstance(value, dict) else value)
    )


def verify_files(checkpoint: Checkpoint, processes: Processes) -> None:
    """Compare every file with the manifest. Every rank calls this, and the ranks share the work.

    Raises:
        ResumeError: a file is missing or differs.
    """
    for name in sorted(checkpoint.files)[processes.rank :: processes.num_ranks]:
        size, digest = checkpoint.files[name]
        file, what = checkpoint.folder / name, None
        try:
            with open_regular(checkpoint.folder, name) as stream:
                found = os.fstat(stream.fileno()).st_size
                if found != size:  # a file of any size would be read to its end otherwise
                    what = f"has {found} bytes, not {size}"
                elif digest_stream(stream) != digest:
                    what = "has another checksum than it was written with"
        except OSError as error:
            raise ResumeError(f"{file} can't be read: {error.strerror}. {resume_hint(checkpoint.folder)}") from error
        if what is not None:
            raise ResumeError(f"{file} is damaged: it {what}. {resume_hint(checkpoint.folder)}")
    processes.wait(patiently=True)


def load_checkpoint(
    checkpoint: Checkpoint, model: nn.Module, optimizer: torch.optim.Optimizer, processes: Processes
) -> None:
    """Fill the trainable parameters and the optimizer's state, however they are sharded now. Every rank calls this.

    Raises:
        ResumeError: the checkpoint is of another model, or its files contradict one another; on every rank.
    """
    error = None
    try:
        _load(checkpoint, model, optimizer, processes.rank)
    except BadFile as own_error:
        error = f"{own_error}. {resume_hint(checkpoint.folder)}"
    except Exception as own_error:  # a net for what a forged file has brought about elsewhere
        if isinstance(own_error, (MemoryError, UserError)) or (
            isinstance(own_error, RuntimeError) and is_shortage(own_error)
        ):
            raise
        reason = f"{type(own_error).__name__}: {printable(str(own_error))[:300]}"
        error = f"{checkpoint.folder} can't be used: {reason}. {resume_hint(checkpoint.folder)}"
    error = processes.first_error(error)
    if error is not None:
        raise ResumeError(error)


@torch.no_grad()
def _load(checkpoint: Checkpoint, model: nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> None:
    folder, files = checkpoint.folder, checkpoint.files
    if INDEX not in files:
        raise BadFile(f"{folder} has no {INDEX}, so another version of this program wrote it")
    saved = read_index(folder, files)
    if not isinstance(optimizer, LocalBitsandbytes):
        for param in (param for group in optimizer.param_groups for param in group["params"]):
            optimizer.state[param] = state_before_first_step(optimizer, param)
    state = trained_state(model, optimizer)
    for name in sorted(saved.keys() | state.keys()):
        here = _describe(state[name]) if name in state else "missing"
        there = _describe(saved[name]) if name in saved else "missing"
        if here != there:
            raise BadFile(f"{folder} is of another model or adapter: {name} is {there} there and {here} here")
    for name, tensor in state.items():
        read_rows(saved[name], local_tensor(tensor), local_rows(tensor)[0])
    if isinstance(optimizer, LocalBitsandbytes):
        name = rank_file(rank)
        if name not in files:
            raise BadFile(f"{folder / name} can't be used: it is no file of this checkpoint")
        _load_own_state(optimizer, folder / name, read_own(folder / name))


def _load_own_state(optimizer: LocalBitsandbytes, file: Path, saved: dict[str, StoredTensor]) -> None:
    """Give each parameter the state of bitsandbytes' optimizer that this rank saved, once it is like a new one."""
    inner = optimizer.inner
    inner.state.clear()
    for number, (_, param) in enumerate(optimizer.pairs):
        if not any(name.startswith(f"{number}.") for name in saved):
            continue  # it has no state yet: every step before the checkpoint was skipped
        optimizer.init_state(number)
        state = inner.state[param]
        for key, new in state.items():
            name, like = f"{number}.{key}", torch.as_tensor(new)
            if name not in saved:
                raise BadFile(f"{file} can't be used: it lacks {name}")
            check_like(file, name, saved[name], tuple(like.shape), like.dtype)
            value = read_stored(saved[name])
            if getattr(new, "is_paged", False):
                new.copy_(value)  # into the pages that it has
            elif isinstance(new, Tensor):
                state[key] = value.to(param.device)
            else:
                state[key] = value.item()


def remove_checkpoints(folder: Path, keep: list[Path]) -> None:
    """Remove every checkpoint in `folder` except `keep`, and what an interrupted save or removal has left there."""
    for path in checkpoint_folders(folder):
        if path not in keep and is_checkpoint(path):  # others may have put other things there
            path.rename(temporary_name(path, secrets.token_hex(8)))
    for path in folder.glob(".step-*.tmp"):
        if TEMPORARY_NAME.fullmatch(path.name):
            remove(path)


def trained_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Trainable parameters and the optimizer's tensors for each, by names that do not depend on the sharding.

    These are the live tensors. Each has rows: a scalar, such as AdamW's `step`, is seen as one row.
    """
    state: dict[str, Tensor] = {}
    for name, param in model.named_parameters():
        if param.requires_grad:
            state[f"model.{name}"] = param.detach()
            for key, value in optimizer.state[param].items():
                state[f"optimizer.{name}.{key}"] = value if value.ndim else value.view(1)
    return state


def temporary_name(folder: Path, token: str) -> Path:
    """The name of a checkpoint's folder while it is being written or removed, which nobody can guess beforehand."""
    return folder.with_name(f".{folder.name}.{token}.tmp")


def digest_manifest(manifest: dict[str, Any]) -> str:
    """SHA-256 of a manifest without its entry `sha256`, which holds this value."""
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _describe(tensor: Tensor | SavedTensor) -> str:
    dtype = "" if tensor.dtype == torch.float32 else f" in {tensor.dtype}"
    return f"of shape {list(tensor.shape)}{dtype}"
