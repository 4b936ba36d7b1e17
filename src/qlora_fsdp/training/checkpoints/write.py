"""Write a checkpoint while training continues: copy the state to host memory, and make files of the copy in a thread.

Training waits for the copy alone. The files are written under a temporary name, synchronized to the disk and read back
for their checksums. The folder gets its name once every rank is done. The life of a checkpoint is told in
`checkpoint.py`.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from qlora_fsdp.common.files import digest_file, disk_reason, is_write_error
from qlora_fsdp.common.sizes import SLAB_BYTES, round_up
from qlora_fsdp.records.record_files import check_own
from qlora_fsdp.records.run_state import MANIFEST
from qlora_fsdp.runtime.processes import Processes
from qlora_fsdp.runtime.rows import local_rows, local_tensor, replica_of
from qlora_fsdp.training.checkpoints.checkpoint import (
    Checkpoint,
    digest_manifest,
    temporary_name,
    trained_state,
)
from qlora_fsdp.training.checkpoints.saved_tensors import (
    INDEX,
    OWN,
    BadFile,
    rank_file,
    read_index,
    read_rows,
    write_index,
)
from qlora_fsdp.training.optim import LocalBitsandbytes

ALIGNMENT = 64  # bytes
MODEL = "model."  # what the names of parameters begin with in `trained_state`
WriteAdapter = Callable[[Path, dict[str, Tensor]], None]
Rows = dict[str, tuple[int, int]]  # which rows [first, last) a rank has of each tensor
FileFacts = dict[str, tuple[int, str]]  # size and SHA-256, by the path in the checkpoint's folder


@dataclass(frozen=True)
class Snapshot:
    """A copy of everything that one rank writes, all of it from the same moment.

    Attributes:
        tensors: the tensors of its file, on the CPU, by name.
        rows: which rows [first, last) these are, of each tensor that other ranks have other rows of.
        whole: a meta tensor of the shape and dtype of every trained tensor, whole: the same on every rank.
    """

    tensors: dict[str, Tensor]
    rows: dict[str, tuple[int, int]]
    whole: dict[str, Tensor]


class HostCopy:
    """Host memory for snapshots, pinned where there is a GPU. Every snapshot uses it again: there is one at a time.

    Thousands of small tensors share a few slabs, because pinning each of them would take longer than copying it.
    """

    def __init__(self) -> None:
        self.buffers: dict[str, Tensor] = {}
        self.slab = torch.empty(0, dtype=torch.uint8)  # what is left of the newest

    @property
    def num_bytes(self) -> int:
        """Bytes of the last snapshot, without bitsandbytes' own state."""
        return sum(buffer.nbytes for buffer in self.buffers.values())

    @torch.no_grad()
    def take(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> Snapshot:
        """Copy the trainable parameters and the optimizer's state; this overwrites the last snapshot.

        Where several ranks hold the same rows of a tensor, one of them copies and writes these.
        """
        tensors = {}
        rows = {}
        whole = {}
        for position, (name, value) in enumerate(trained_state(model, optimizer).items()):
            local, (replica, num_replicas) = local_tensor(value), replica_of(value)
            whole[name] = torch.empty(value.shape, dtype=value.dtype, device="meta")
            if local.numel() and position % num_replicas == replica:
                tensors[name], rows[name] = self._copy(name, local), local_rows(value)
        if isinstance(optimizer, LocalBitsandbytes):
            for number, (_, param) in enumerate(optimizer.pairs):
                for key, value in optimizer.inner.state[param].items():
                    tensors[f"{OWN}{number}.{key}"] = torch.as_tensor(value).to("cpu", copy=True)
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # the copies are in the queue
        return Snapshot(tensors, rows, whole)

    def _copy(self, name: str, source: Tensor) -> Tensor:
        if name not in self.buffers:
            if _aligned_size(source) > len(self.slab):
                size = max(_aligned_size(source), SLAB_BYTES)
                self.slab = torch.empty(size, dtype=torch.uint8, pin_memory=source.is_cuda)
            self.buffers[name], self.slab = _cut(self.slab, source)
        return self.buffers[name].copy_(source, non_blocking=True)


def write_checkpoint(
    content: Checkpoint, snapshot: Snapshot, write_adapter: WriteAdapter, processes: Processes
) -> str | None:
    """Write a checkpoint, whole or not at all; every rank calls this, from whichever thread.

    Args:
        content: the folder to write, and the manifest without `files`.
        snapshot: this rank's.
        write_adapter: writes the adapter to a folder, given the trained parameters, whole, by name; rank 0 calls it.
        processes: all ranks take part, with a group that no other thread uses. No collective touches a GPU.

    Returns:
        What went wrong, on whichever rank, after which nothing is left behind. None where the checkpoint is written.

    Raises:
        RuntimeError: contact to another rank is lost; the temporary folder stays.
    """
    errors: list[str] = []
    temporary = temporary_name(content.folder, secrets.token_hex(8))
    if processes.is_main:
        with _noting(errors):
            check_own(content.folder.parent.parent)
            temporary.parent.mkdir(exist_ok=True)
            temporary.mkdir()
    temporary, is_made = processes.share((temporary, not errors), tuple[Path, bool])
    facts: FileFacts = {}
    with _noting(errors):
        if is_made:
            facts = _write_own_file(temporary, snapshot, processes.rank)
    everyone = processes.gather((snapshot.rows, facts, errors), tuple[Rows, FileFacts, list[str]])
    error = next((text for _, _, texts in everyone for text in texts), None)
    if processes.is_main:
        if error is None:
            with _noting(errors):
                _complete(content, temporary, snapshot, write_adapter, [(rows, facts) for rows, facts, _ in everyone])
            error = next(iter(errors), None)
        if error is not None:
            shutil.rmtree(temporary, ignore_errors=True)
    result: str | None = processes.share(error, str | None)
    return result


def _write_own_file(temporary: Path, snapshot: Snapshot, rank: int) -> FileFacts:
    """Write the file that is this rank's own, also where it has no rows of any tensor."""
    temporary.mkdir(parents=True, exist_ok=True)  # a disk that is not rank 0's, which `_complete` finds out
    file = temporary / rank_file(rank)
    save_file(snapshot.tensors, file)
    return _describe_files(temporary, [file])


def _complete(
    content: Checkpoint,
    temporary: Path,
    snapshot: Snapshot,
    write_adapter: WriteAdapter,
    everyone: list[tuple[dict[str, tuple[int, int]], FileFacts]],
) -> None:
    """Write what all ranks' files need to be a checkpoint: index, adapter and manifest; then rename the folder.

    Everything is on the disk before the folder has its name, so it is also whole if the host stops at any moment.
    """
    files = {name: facts for _, own_files in everyone for name, facts in own_files.items()}
    for name, (size, _) in files.items():
        file = temporary / name
        if not file.exists() or file.stat().st_size != size:
            raise OSError(f"{file} is not what its rank wrote: is run.folder shared by all nodes?")
    write_index(temporary, snapshot.whole, [rows for rows, _ in everyone])
    write_adapter(temporary / "adapter", _read_parameters(temporary, set(files)))
    written = list((temporary / "adapter").rglob("*"))  # a tokenizer may have a folder of chat templates
    folders = [path for path in written if path.is_dir()]
    files |= _describe_files(temporary, [temporary / INDEX, *(path for path in written if path.is_file())])
    manifest = asdict(replace(content, files=files))
    del manifest["folder"]
    (temporary / MANIFEST).write_text(json.dumps({"sha256": digest_manifest(manifest), **manifest}, indent=1))
    for path in (temporary / MANIFEST, *folders, temporary / "adapter", temporary):
        _sync(path)
    temporary.rename(content.folder)
    _sync(content.folder.parent)


def _read_parameters(folder: Path, files: set[str]) -> dict[str, Tensor]:
    """The trained parameters, whole, by name, from the files that all ranks have just written: this takes no GPU.

    They are cut from one block, which goes back to the system when it is freed. The C library would keep small ones.
    """
    saved = {name: tensor for name, tensor in read_index(folder, files).items() if name.startswith(MODEL)}
    likes = {name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") for name, tensor in saved.items()}
    block = torch.empty(sum(map(_aligned_size, likes.values())), dtype=torch.uint8)
    whole = {}
    for name, like in likes.items():
        values, block = _cut(block, like)
        read_rows(saved[name], values, 0)
        whole[name.removeprefix(MODEL)] = values
    return whole


def _cut(block: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
    """A tensor of the shape and dtype of `like`, made of the start of a block of uint8, and the rest of the block."""
    part = block[: like.numel() * like.itemsize]
    return part.view(like.dtype).view(like.shape), block[_aligned_size(like) :]


def _aligned_size(tensor: Tensor) -> int:
    return round_up(tensor.numel() * tensor.itemsize, ALIGNMENT)


def _describe_files(folder: Path, files: list[Path]) -> FileFacts:
    """Size and checksum of files, once they are on the disk."""
    facts = {}
    for file in files:
        _sync(file)
        facts[str(file.relative_to(folder))] = (file.stat().st_size, digest_file(file))
    return facts


def _sync(path: Path) -> None:
    """Wait until a file, or a folder's list of names, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _noting(errors: list[str]) -> Iterator[None]:
    """Note an error instead of raising it, so that this rank still meets the others and can tell them."""
    try:
        yield
    except Exception as error:
        if not (is_write_error(error) or isinstance(error, (RuntimeError, BadFile))):
            raise
        errors.append(disk_reason(error))
