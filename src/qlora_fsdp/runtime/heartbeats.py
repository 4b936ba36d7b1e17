"""Finds ranks that stand still, whatever the other ranks wait in.

A thread on every rank writes a beat to the store where the processes met, several times within
`distributed.timeout_seconds`, and reads the beats of all ranks. Two rules decide that a rank is lost:

1. Its beats stay the same for longer than the timeout. A stopped process (SIGSTOP, a debugger) and a dead host write
   none. A rank that is merely slow does: it compiles, loads, evaluates or saves in its main thread.
2. On GPUs, no main thread has moved for longer than the timeout, and this rank has begun fewer NCCL collectives than
   another one. The others then wait for this one, in a collective for which NCCL's watchdog would abort them a minute
   later. On a CPU gloo's own timeout ends such a wait.

The thread needs the interpreter's lock (GIL). torch releases it wherever a main thread waits for other ranks or for the
GPU: in collectives and `Work.wait`, in the store's methods, in operators, `.item()`, `synchronize()` and `backward()`.
Triton's launcher releases it too, and so does recording an event behind a full queue (seen with torch 2.11 on an H200).
A C function that keeps the lock, for example while a large library is imported, stops the beats. So a rank of this host
that uses processor time counts as alive without them.

A rank measures silence by how often it looks at the beats, and one look adds only a bounded time. A job that was
suspended as a whole (Ctrl-Z) and continued therefore loses no rank.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.distributed_c10d import _world

from qlora_fsdp.common.run_key import seal, unseal
from qlora_fsdp.common.text import printable
from qlora_fsdp.runtime.board import Board

PACKAGE = Path(__file__).parents[1]
LONGEST_INTERVAL_SECONDS = 5.0
RANKS_PER_SECOND = 16  # every rank reads every beat: with many ranks less often, to spare the store
BEATS_PER_TIMEOUT = 10
NUM_FUNCTIONS = 6  # of the main thread's stack, in messages


@dataclass(frozen=True)
class Beat:
    """A rank's message about itself.

    Attributes:
        number: rises with every beat.
        place: where in this package the main thread is, for people.
        position: a number that changes when the main thread moves.
        num_collectives: collectives that it has begun on its GPU; always 0 on a CPU.
    """

    number: int
    place: str
    position: int
    num_collectives: int


UNKNOWN = Beat(0, "at a place that is not known", 0, 0)


class Unchanged:
    """For how long a value has been the same, counted in looks.

    Args:
        longest_look: seconds that one look counts for at most.
    """

    def __init__(self, longest_look: float) -> None:
        self.longest_look = longest_look
        self.seconds = 0.0
        self._value: object = None
        self._looked_at: float | None = None

    def look(self, value: object, now: float) -> float:
        """Seconds for which the value has been the same, this look (at `now`, a monotonic clock) included."""
        passed = 0.0 if self._looked_at is None else min(now - self._looked_at, self.longest_look)
        self.seconds = self.seconds + passed if value == self._value else 0.0
        self._value, self._looked_at = value, now
        return self.seconds


class Judge:
    """Applies both rules to the beats of all ranks."""

    def __init__(self, num_ranks: int, timeout_seconds: float) -> None:
        self.timeout_seconds = timeout_seconds
        longest = 2 * beat_interval(num_ranks, timeout_seconds)
        self._silences = [Unchanged(longest) for _ in range(num_ranks)]
        self._stands = [Unchanged(longest) for _ in range(num_ranks)]

    def find_lost(self, beats: Sequence[Beat], cpu_seconds: Sequence[float], now: float) -> dict[int, str]:
        """Look at all beats.

        Args:
            beats: by rank, as just read from the store.
            cpu_seconds: processor time that each rank's process has used; any constant where that is unknown.
            now: by this host's monotonic clock.

        Returns:
            The lost ranks, each with the end of a sentence about its process.
        """
        silences = [
            silence.look((beat.number, cpu), now)
            for silence, beat, cpu in zip(self._silences, beats, cpu_seconds, strict=True)
        ]
        stands = [
            stand.look((beat.position, beat.num_collectives), now)
            for stand, beat in zip(self._stands, beats, strict=True)
        ]
        silent = [rank for rank, seconds in enumerate(silences) if seconds > self.timeout_seconds]
        if silent:
            return {r: f"gave its last sign of life {silences[r]:.0f} s ago, {beats[r].place}" for r in silent}
        fewest = min(beat.num_collectives for beat in beats)
        behind = [rank for rank, beat in enumerate(beats) if beat.num_collectives == fewest]
        if len(behind) == len(beats) or min(stands) <= self.timeout_seconds:
            return {}
        what = "The other ranks wait for it in a collective"
        return {r: f"has stood still for {stands[r]:.0f} s, {beats[r].place}. {what}" for r in behind}


class Heartbeats:
    """The beats of this rank, and what those of the others show.

    Args:
        rank: this one.
        num_ranks: all of them.
        device: where this rank computes.
        store: for the beats alone.
        timeout_seconds: `distributed.timeout_seconds`.
        key: the run's secret, with which beats are signed.
    """

    def __init__(
        self, rank: int, num_ranks: int, device: torch.device, store: Board, timeout_seconds: float, key: str
    ) -> None:
        self.device = device
        self.store = store
        self.key = key
        self.interval = beat_interval(num_ranks, timeout_seconds)
        self._keys = [f"beat/{rank}" for rank in range(num_ranks)]
        self._own_key = self._keys[rank]
        self._judge = Judge(num_ranks, timeout_seconds)
        self._number, self._is_due_at = 0, 0.0
        self._write()

    def exchange(self, cpu_seconds: Callable[[], Sequence[float]]) -> dict[int, str]:
        """Write a beat and read all, if that is due; every rank must have made its Heartbeats before.

        Returns:
            The ranks that are lost, as `Judge.find_lost` tells.
        """
        if time.monotonic() < self._is_due_at:
            return {}
        self._write()
        return self._judge.find_lost(self.read(), cpu_seconds(), time.monotonic())

    def read(self) -> list[Beat]:
        """The last beat of every rank. What others than the ranks have written there counts as no sign of life."""
        beats = [unseal(Beat, stored, self.key) or UNKNOWN for stored in self.store.multi_get(self._keys)]
        return [replace(beat, place=printable(beat.place)) for beat in beats]

    def _write(self) -> None:
        self._number += 1
        place, position = _find_main_thread()
        beat = Beat(self._number, place, position, _count_collectives(self.device))
        self.store.set(self._own_key, seal(beat, self.key))
        self._is_due_at = time.monotonic() + self.interval


def beat_interval(num_ranks: int, timeout_seconds: float) -> float:
    """Seconds between two beats."""
    return min(timeout_seconds / BEATS_PER_TIMEOUT, LONGEST_INTERVAL_SECONDS + num_ranks / RANKS_PER_SECOND)


def _find_main_thread() -> tuple[str, int]:
    """Find where the main thread is: as text for people, and as a number that changes when it moves."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    functions = []
    places = []
    where = ""
    while frame is not None:
        code = frame.f_code
        places.append((id(code), frame.f_lasti))
        if (file := Path(code.co_filename)).is_relative_to(PACKAGE):
            where = where or f"{file.relative_to(PACKAGE)}:{frame.f_lineno}"
            functions.append(code.co_name)
        frame = frame.f_back
    called = " > ".join(reversed(functions[:NUM_FUNCTIONS]))
    return f"in {called} ({where})" if where else "before it began", hash(tuple(places))


def _count_collectives(device: torch.device) -> int:
    """NCCL collectives that this process has begun, in all groups; nothing waits for the GPU."""
    total = 0
    for group in list(_world.pg_map) if device.type == "cuda" else []:
        with suppress(RuntimeError):  # the group has no backend for GPUs
            backend: Any = group._get_backend(device)  # its numbers are not in torch's stubs
            total += backend._get_sequence_number_for_group() if backend.name() == "nccl" else 0
    return total
