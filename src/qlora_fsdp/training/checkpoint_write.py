"""Write a checkpoint while training goes on: a copy in host memory, which training waits for, and files made of that.

Files are written under a temporary name, read back for their checksums, and get their name once every rank is done.
"""

from __future__ import annotations

import json
import os
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from qlora_fsdp.common.files import digest_file
from qlora_fsdp.common.sizes import SLAB_BYTES
from qlora_fsdp.runtime.processes import Processes
from qlora_fsdp.runtime.rows import local_tensor
from qlora_fsdp.training.checkpoint import MANIFEST, Checkpoint, digest_manifest, temporary_name, trained_state
from qlora_fsdp.training.optim import LocalAdamW8bit

ALIGNMENT = 64  # bytes
WriteAdapter = Callable[[Path, dict[str, Tensor]], None]

# Of `load(no_dist=True)`, which rank 0 calls by itself on purpose.
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")


@dataclass(frozen=True)
class Snapshot:
    """What is saved, as it was at one moment.

    Attributes:
        state: the live parameters and optimizer tensors by name, for their shapes and shards; values are not read.
        values: this rank's part of each, on the CPU.
        own_state: the state of adamw_8bit, on the CPU: by parameter, then by name. None: of another optimizer.
    """

    state: dict[str, Tensor]
    values: dict[str, Tensor]
    own_state: dict[int, dict[str, Any]] | None


class HostCopy:
    """Host memory for snapshots, pinned where there is a GPU, and the same for every one: there is one at a time.

    Thousands of small tensors share a few slabs: pinning each would take longer than copying it. Each has a storage of
    its own in a slab: of a part of a storage, FileSystemWriter makes a copy, and keeps all copies until it is done.
    """

    def __init__(self) -> None:
        self.buffers: dict[str, Tensor] = {}
        self.slab = torch.empty(0, dtype=torch.uint8)  # what is left of the newest

    @torch.no_grad()
    def take(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> Snapshot:
        """Copy the trainable parameters and the optimizer's state; what the last snapshot held is overwritten."""
        state = trained_state(model, optimizer)
        values = {name: self._copy(name, local_tensor(value)) for name, value in state.items()}
        own_state = None
        if isinstance(optimizer, LocalAdamW8bit):
            own_state = {}
            for index, tensors in optimizer.inner.state_dict()["state"].items():
                own_state[index] = {
                    key: value.to("cpu", copy=True) if isinstance(value, Tensor) else value
                    for key, value in tensors.items()
                }
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # the copies are in the queue
        return Snapshot(state, values, own_state)

    def _copy(self, name: str, source: Tensor) -> Tensor:
        if name not in self.buffers:
            size = _aligned_size(source)
            if size > len(self.slab):
                self.slab = torch.empty(max(size, SLAB_BYTES), dtype=torch.uint8, pin_memory=source.is_cuda)
            self.buffers[name], self.slab = _cut(self.slab, source)
        return self.buffers[name].copy_(source, non_blocking=True)


def _cut(block: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
    """A tensor of the shape and dtype of `like`, made of the start of a block of uint8, and the rest of the block.

    Its storage is its own, though the memory is the block's: safetensors refuses tensors that share a storage.
    """
    num_bytes = like.numel() * like.itemsize
    part = torch.frombuffer(block.numpy(), dtype=torch.uint8, count=num_bytes) if num_bytes else block[:0]
    return part.view(like.dtype).view(like.shape), block[_aligned_size(like) :]


def _aligned_size(tensor: Tensor) -> int:
    return -(tensor.numel() * tensor.itemsize // -ALIGNMENT) * ALIGNMENT


class _FromSnapshot(DefaultSavePlanner):
    """Plans by the live tensors' shards, and writes the snapshot's values."""

    def __init__(self, values: dict[str, Tensor]) -> None:
        super().__init__()
        self.values = values

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        return self.values[index.fqn]


def write_checkpoint(
    content: Checkpoint, snapshot: Snapshot, write_adapter: WriteAdapter, processes: Processes
) -> str | None:
    """Write a checkpoint, whole or not at all; every rank calls this, from whichever thread.

    Args:
        content: the folder to write, and the rest of the manifest but for `files`.
        snapshot: this rank's.
        write_adapter: writes the adapter to a folder, given the trained parameters, whole, by name; rank 0 calls it.
        processes: all ranks take part; with a group that no other thread uses.

    Returns:
        What went wrong, on whichever rank; None: the checkpoint is there. An error leaves nothing behind.

    Raises:
        RuntimeError: contact to another rank is lost; the temporary folder stays.
    """
    temporary, rank = temporary_name(content.folder), processes.rank
    mine: list[Path] = []
    errors: list[str] = []
    with _noting(errors):
        if processes.is_main:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True, exist_ok=True)  # a rank that is ahead makes it too
    # Whatever fails, the collectives within go on: each rank comes to the last of them and tells the others there.
    with _noting(errors):
        writer = FileSystemWriter(temporary, sync_files=True, per_thread_copy_ahead=0)
        planner = _FromSnapshot(snapshot.values)
        save(snapshot.state, storage_writer=writer, planner=planner, process_group=processes.group)
        mine += temporary.glob(f"__{rank}_*.distcp")
        if snapshot.own_state is not None:
            mine.append(temporary / f"optimizer-{rank:05}.pt")
            torch.save(snapshot.own_state, mine[-1])
        if processes.is_main:
            write_adapter(temporary / "adapter", _read_parameters(temporary, snapshot.state))
            mine += [temporary / ".metadata", *(temporary / "adapter").iterdir()]
    files: dict[str, tuple[int, str]] = {}
    with _noting(errors):
        for file in mine:
            _sync(file)
            files[str(file.relative_to(temporary))] = (file.stat().st_size, digest_file(file))
    everyone = processes.gather((files, errors))
    error = next((text for _, texts in everyone for text in texts), None)
    if processes.is_main:
        failures: list[str] = []
        if error is None:
            with _noting(failures):
                found = {name: facts for files, _ in everyone for name, facts in files.items()}
                _finish(replace(content, files=found), temporary)
        if error is not None or failures:
            shutil.rmtree(temporary, ignore_errors=True)
        error = error or next(iter(failures), None)
    result: str | None = processes.share(error)
    return result


def _read_parameters(folder: Path, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The trained parameters, whole, by name, from what all ranks have just written: that takes no GPU.

    In one block, which goes back to the system when it is freed; thousands of small ones the C library would keep.
    """
    prefix = "model."
    wanted = {name: value for name, value in state.items() if name.startswith(prefix)}
    block = torch.empty(sum(map(_aligned_size, wanted.values())), dtype=torch.uint8)
    whole = {}
    for name, value in wanted.items():
        whole[name], block = _cut(block, value)
    load(whole, storage_reader=FileSystemReader(folder), no_dist=True)
    return {name.removeprefix(prefix): value for name, value in whole.items()}


@contextmanager
def _noting(errors: list[str]) -> Iterator[None]:
    try:
        yield
    except CheckpointException as error:  # by rank; not an Exception
        errors += [_describe(wrapped[0]) for _, wrapped in sorted(error.failures.items())]
    except (OSError, SafetensorError, RuntimeError) as error:
        errors.append(_describe(error))


def _describe(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__


def _finish(content: Checkpoint, temporary: Path) -> None:
    """The manifest, then the name; what was renamed is on the disk whole, also if the host stops now."""
    for name, (size, _) in content.files.items():
        if (temporary / name).stat().st_size != size:
            raise OSError(f"{temporary / name} is not what its rank wrote: is run.folder shared by all nodes?")
    manifest = asdict(content)
    del manifest["folder"]
    text = json.dumps({"sha256": digest_manifest(manifest), **manifest}, indent=1)
    (temporary / MANIFEST).write_text(text)
    for path in (temporary / MANIFEST, temporary / "adapter", temporary):
        _sync(path)
    temporary.rename(content.folder)
    _sync(content.folder.parent)


def _sync(path: Path) -> None:
    """Wait until a file, or a folder's list of names, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
