"""Save a run that ends while its folder can't be written: to another folder, which the message then names."""

from __future__ import annotations

import platform
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from torch import nn

from qlora_fsdp.common.disk import find_room, write_elsewhere
from qlora_fsdp.model.adapters.write import gather_trainable
from qlora_fsdp.records.record_files import records_in
from qlora_fsdp.runtime.processes import Processes
from qlora_fsdp.training.checkpoints.write import WriteAdapter


def save_checkpoint_elsewhere(
    name: str, own: Path, num_bytes: int, write: Callable[[Path], str | None], processes: Processes
) -> str | None:
    """Write a checkpoint to the first folder that takes it. Every rank calls this.

    Args:
        name: name of the checkpoint's folder.
        own: the folder of the run's checkpoints, which can't be written.
        num_bytes: what it takes, about, over all ranks.
        write: writes it to a folder, collectively; it returns what went wrong, the same on every rank.
        processes: all ranks take part.

    Returns:
        Where it is and how to go on from there, as sentences; None if no folder takes it, or the ranks share none.
    """
    places = find_room(own.parent, num_bytes) if processes.is_main else iter(())
    while (place := processes.share(next(places, None), Path | None)) is not None:
        if write(place / name) is None:
            with suppress(OSError):
                if processes.is_main:
                    records_in(own.parent).write_rest(place)
            where = processes.share(f"{place / name} on {platform.node()}", str)
            return f"It is saved in {where}. Move it to {own} once there is room; the same command goes on from there."
    return None


def save_adapter_elsewhere(own: Path, model: nn.Module, write: WriteAdapter, processes: Processes) -> str | None:
    """Write the adapter alone, as it is now, to the first folder of rank 0 that takes it. Every rank calls this.

    Returns:
        Where it is, as a sentence; None if no folder takes it.
    """
    state, text = gather_trainable(model, processes), None
    if processes.is_main:
        num_bytes = sum(value.nbytes for value in state.values())
        place = write_elsewhere(own.parent, num_bytes, lambda folder: write(folder / "adapter", state))
        if place is not None:
            where = f"{place / 'adapter'} on {platform.node()}"
            text = f"The adapter, to use or to start from (lora.start) but not to resume, is in {where}."
    shared: str | None = processes.share(text, str | None)
    return shared
