"""Checkpoints: from one of these a run goes on as if it had never stopped.

run.folder/checkpoints/step-00000100/
    .metadata, __0_0.distcp, ...    trained parameters and AdamW's state, sharded (torch.distributed.checkpoint)
    optimizer-00000.pt, ...         the state of adamw_8bit, which can't be sharded anew: a file a rank
    adapter/                        the adapter, as PEFT loads it
    manifest.json                   written last: step, settings, and size and SHA-256 of every other file

There is no more to save: the order of the data, the learning rate, the loss's divisor and the seed of dropout are
functions of the step. A folder of this name is whole, because it is written under another one and renamed
(checkpoint_write.py). So is one that is removed: it is renamed first.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from qlora_fsdp.common.errors import ResumeError
from qlora_fsdp.common.files import digest_file
from qlora_fsdp.records.run_state import checkpoint_folders
from qlora_fsdp.runtime.processes import Processes
from qlora_fsdp.runtime.rows import local_tensor
from qlora_fsdp.training.optim import LocalAdamW8bit

MANIFEST = "manifest.json"
ANEW = "checkpoint.resume=none to start anew, which removes the checkpoints in run.folder."


@dataclass(frozen=True)
class Checkpoint:
    """What a manifest says.

    Attributes:
        folder: where it is.
        step: optimizer steps done.
        num_ranks: of the run that wrote it.
        settings: every setting by its dotted key, as plain values.
        data: counts that tell the training data from other data.
        base: fingerprint of the base model's files; None: it was made up, or the checkpoint is older than this.
        eval_losses: (step, loss) of the evaluations before this step's.
        files: size and SHA-256 of every other file, by its path in the folder.
    """

    folder: Path
    step: int
    num_ranks: int
    settings: dict[str, Any]
    data: dict[str, int]
    base: str | None = None
    eval_losses: list[tuple[int, float]] = field(default_factory=list)
    files: dict[str, tuple[int, str]] = field(default_factory=dict)


def another(folder: Path) -> str:
    """What to do when the checkpoint in `folder` can't be gone on from: it names the one before, if there is one."""
    older = [path for path in checkpoint_folders(folder.parent) if path < folder]
    return f"Set checkpoint.resume={older[-1] if older else 'FOLDER to another checkpoint'}, or {ANEW}"


def read_manifest(folder: Path) -> Checkpoint:
    """What is in a checkpoint.

    Raises:
        ResumeError: no whole checkpoint is there.
    """
    try:
        manifest = json.loads((folder / MANIFEST).read_bytes())
        digest = manifest.pop("sha256")
        if digest != digest_manifest(manifest):
            raise ValueError("its checksum does not match")
        return Checkpoint(folder, **manifest)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ResumeError(f"{folder / MANIFEST} can't be used: {reason}. {another(folder)}") from error


def verify_files(checkpoint: Checkpoint, processes: Processes) -> None:
    """Compare every file with the manifest; the ranks share the work.

    Raises:
        ResumeError: a file is missing or differs.
    """
    for name in sorted(checkpoint.files)[processes.rank :: processes.num_ranks]:
        size, digest = checkpoint.files[name]
        file = checkpoint.folder / name
        try:
            found = (file.stat().st_size, digest_file(file))
        except OSError as error:
            raise ResumeError(f"{file} can't be read: {error.strerror}. {another(checkpoint.folder)}") from error
        if found != (size, digest):
            what = (
                f"has {found[0]} bytes, not {size}"
                if found[0] != size
                else "has another checksum than it was written with"
            )
            raise ResumeError(f"{file} is damaged: it {what}. {another(checkpoint.folder)}")
    processes.wait(patiently=True)


def load_checkpoint(
    checkpoint: Checkpoint, model: nn.Module, optimizer: torch.optim.Optimizer, processes: Processes
) -> None:
    """Fill the trainable parameters and the optimizer's state, sharded in whatever way; every rank calls this.

    Raises:
        ResumeError: it is of another model.
    """
    if not isinstance(optimizer, LocalAdamW8bit):
        _allocate_state(optimizer)
    state, reader = trained_state(model, optimizer), FileSystemReader(checkpoint.folder)
    saved = {
        name: entry.size
        for name, entry in reader.read_metadata().state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    for name in sorted(saved.keys() | state.keys()):
        here, there = (tuple(state[name].shape) if name in state else None), saved.get(name)
        if there is None or here != tuple(there):
            raise ResumeError(
                f"{checkpoint.folder} is of another model or adapter: {name} is {_shape(there)} there and "
                f"{_shape(here)} here. {another(checkpoint.folder)}"
            )
    load(state, storage_reader=reader, process_group=processes.patient_group)
    if isinstance(optimizer, LocalAdamW8bit):
        file = checkpoint.folder / f"optimizer-{processes.rank:05}.pt"
        values = torch.load(file, map_location=processes.device, weights_only=True)
        optimizer.inner.load_state_dict(optimizer.inner.state_dict() | {"state": values})


def remove_checkpoints(folder: Path, keep: list[Path]) -> None:
    """Remove every checkpoint in `folder` but these, and what an interrupted save or removal has left there."""
    for path in checkpoint_folders(folder):
        if path not in keep:
            path.rename(temporary_name(path))
    for path in folder.glob(".step-*.tmp"):
        shutil.rmtree(path)


def trained_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Trainable parameters and the optimizer's tensors for each, by names that hold for any sharding."""
    state: dict[str, Tensor] = {}
    for name, param in model.named_parameters():
        if param.requires_grad:
            state[f"model.{name}"] = param.detach()
            state |= {f"optimizer.{name}.{key}": value for key, value in optimizer.state[param].items()}
    return state


def _allocate_state(optimizer: torch.optim.Optimizer) -> None:
    """AdamW's state as before the first step, to load into."""
    for group in optimizer.param_groups:
        for param in group["params"]:
            optimizer.state[param] = {
                "step": torch.zeros((), dtype=torch.float32, device=local_tensor(param).device),
                "exp_avg": torch.zeros_like(param),
                "exp_avg_sq": torch.zeros_like(param),
            }


def temporary_name(folder: Path) -> Path:
    """What a checkpoint is called that is being written or removed."""
    return folder.with_name(f".{folder.name}.tmp")


def digest_manifest(manifest: dict[str, Any]) -> str:
    """SHA-256 of a manifest, which it has itself under `sha256`."""
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _shape(size: Any) -> str:
    return "missing" if size is None else f"of shape {list(size)}"
