"""Which processes the ranks are, and which of those on this host are still running."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import psutil

from qlora_fsdp.runtime.processes import Processes


class Neighbours:
    """Where each rank's process runs; those of this host can be looked at. All ranks take part in making it."""

    def __init__(self, processes: Processes) -> None:
        host = (platform.node(), Path("/proc/self/ns/pid").stat().st_ino)  # ids of processes hold in one namespace
        self._places = processes.gather((host, os.getpid()), tuple[tuple[str, int], int])
        self._here = {
            rank: psutil.Process(pid)
            for rank, (where, pid) in enumerate(self._places)
            if where == host and rank != processes.rank
        }

    def gone(self) -> list[int]:
        """Ranks of this host whose process has ended."""
        return [rank for rank, process in self._here.items() if _state(process) in (None, psutil.STATUS_ZOMBIE)]

    def describe(self, rank: int) -> str:
        """A rank's process for a message: its id, its host, and its state where that can be seen."""
        (host, _), pid = self._places[rank]
        state = _state(self._here[rank]) if rank in self._here else None
        return f"process {pid} on {host}" + ("" if state in (None, psutil.STATUS_ZOMBIE) else f" (it is {state})")

    def cpu_seconds(self) -> list[float]:
        """Processor time of each rank's process, by rank; 0 for this rank and those of other hosts."""
        return [_cpu_seconds(self._here[rank]) if rank in self._here else 0.0 for rank in range(len(self._places))]


def _state(process: psutil.Process) -> str | None:
    try:
        return str(process.status()) if process.is_running() else None
    except psutil.NoSuchProcess:
        return None


def _cpu_seconds(process: psutil.Process) -> float:
    try:
        times = process.cpu_times()
        return float(times.user + times.system)
    except psutil.Error:
        return 0.0
