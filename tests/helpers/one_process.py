"""A run of one process, for what needs no process group."""

from __future__ import annotations

import torch
from torch.distributed import HashStore

from qlora_fsdp.runtime.processes import Processes


class Alone(Processes):
    """Every rank's value is this process's."""

    def gather(self, value: object, kind: object, patiently: bool = False) -> list[object]:
        return [value]


def one_process(local_rank: int = 0) -> Alone:
    """A process that meets no other; with another local rank, it leaves to others what is done once per node."""
    return Alone(local_rank, local_rank + 1, local_rank, local_rank + 1, torch.device("cpu"), HashStore())
