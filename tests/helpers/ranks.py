"""Run a function on several ranks, each a process of its own, and bring back what every rank returned or raised.

On a CPU the processes are forked from a server that has imported the libraries already, so that a world starts in under
a second. With a GPU they are spawned, because the libraries touch CUDA when imported and a fork can't use it then.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import pickle
import random
import signal
import socket
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from datetime import timedelta
from functools import cache
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist

from tests.helpers.guard.unpickle_nothing import refuse_objects

PRELOADED = ["tests.helpers.preloaded"]
GRACE_SECONDS = 3.0  # for the other ranks to say what they think went wrong, once one has failed
MOST_OUTPUT = 8000  # characters of a failed rank's output in the message


class RanksFailed(AssertionError):
    """Some rank raised, died or took too long. The message has each rank's error, traceback included."""


def run_ranks(
    num_ranks: int, function: Callable[..., Any], *args: Any, gpu: bool = False, timeout_seconds: float = 600
) -> list[Any]:
    """Call `function(*args)` on every rank, with the environment that torchrun would set; its results, by rank.

    Args:
        num_ranks: processes to start.
        function: importable from its module; it and its arguments and result are pickled.
        gpu: let the ranks see the GPUs, of which each takes one.
        timeout_seconds: for all of it; then every rank is killed.

    Raises:
        RanksFailed: naming the ranks. The others are killed.
    """
    with TemporaryDirectory() as folder:
        logs = [Path(folder) / f"{rank}.log" for rank in range(num_ranks)]
        ranks = StartedRanks(logs, function, *args, gpu=gpu)
        try:
            results, errors = _collect(ranks.pipes, time.monotonic() + timeout_seconds)
        finally:
            ranks.kill()
        for rank in set(range(num_ranks)) - results.keys() - errors.keys():
            errors[rank] = f"killed: no result within {timeout_seconds:.0f} s, or another rank failed"
        outputs = {rank: logs[rank].read_text(errors="replace")[-MOST_OUTPUT:] for rank in errors}
    if errors:
        told = (f"rank {rank}: {text}\nIts output ends:\n{outputs[rank]}" for rank, text in sorted(errors.items()))
        raise RanksFailed("\n".join(told))
    return [results[rank] for rank in range(num_ranks)]


def start_process(function: Callable[..., Any], *args: Any, gpu: bool = False) -> BaseProcess:
    """A process that calls `function(*args)` and ends: forked from the server, or with `gpu` a new one."""
    context = multiprocessing.get_context("spawn" if gpu else "forkserver")
    if not gpu:
        context.set_forkserver_preload(PRELOADED)
    process = context.Process(target=_call, args=(function, *args), daemon=True)
    with nullcontext() if gpu else _hidden_gpus():
        process.start()
    return process


def _call(function: Callable[..., Any], *args: Any) -> None:
    """Calls a function in a process that ends with this one, and may yet have children of its own, as commands have."""
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    function(*args)


class StartedRanks:
    """The processes of a world; each sends what `function(*args)` returned or raised through its pipe.

    Args:
        logs: a file for the output of each rank.
        function: as of `run_ranks`; also `args` and `gpu`.
    """

    def __init__(self, logs: Sequence[Path], function: Callable[..., Any], *args: Any, gpu: bool = False) -> None:
        self.meeting = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.pipes, self.processes = [], []
        for rank, log in enumerate(logs):
            mine, theirs = multiprocessing.Pipe(duplex=False)
            told = (rank, len(logs), self.meeting.port, log, theirs)
            self.processes.append(start_process(_run_rank, *told, function, args, gpu=gpu))
            theirs.close()
            self.pipes.append(mine)

    def kill(self) -> None:
        """End all processes. One that still lives writes to its log where each of its threads stands."""
        for process in self.processes:
            with suppress(ProcessLookupError):  # it ends by itself just now
                if process.is_alive():
                    os.kill(process.pid, signal.SIGUSR2)
            process.join(GRACE_SECONDS)
            process.kill()
            process.join()


_hiding = threading.Lock()  # ranks may be started by several threads


@contextmanager
def _hidden_gpus() -> Iterator[None]:
    """No GPU for processes that start meanwhile, the fork server above all."""
    with _hiding:
        before = os.environ.get("CUDA_VISIBLE_DEVICES")
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        try:
            yield
        finally:
            del os.environ["CUDA_VISIBLE_DEVICES"]
            if before is not None:
                os.environ["CUDA_VISIBLE_DEVICES"] = before


def once(world: Callable[..., Any]) -> Callable[..., Any]:
    """`world`, called once for the same arguments; also if it fails, so that not every test of it waits again."""

    @cache
    def call(*args: Any) -> tuple[Any, RanksFailed | None]:
        try:
            return world(*args), None
        except RanksFailed as error:
            return None, error

    def result(*args: Any) -> Any:
        value, error = call(*args)
        if error is not None:
            raise error
        return value

    return result


def _collect(pipes: list[Connection], deadline: float) -> tuple[dict[int, Any], dict[int, str]]:
    """Results and errors by rank, until all have reported, time is up, or a rank has failed and the grace is over."""
    results: dict[int, Any] = {}
    errors: dict[int, str] = {}
    waiting = {pipe: rank for rank, pipe in enumerate(pipes)}
    while waiting and time.monotonic() < deadline:
        for pipe in wait(list(waiting), timeout=max(0.0, deadline - time.monotonic())):
            assert isinstance(pipe, Connection)
            rank = waiting.pop(pipe)
            try:
                value, error = pickle.loads(pipe.recv_bytes())
            except (EOFError, ConnectionError):
                value, error = None, "died without a word"
            if error is None:
                results[rank] = value
            else:
                errors[rank] = error
                deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
    return results, errors


def _run_rank(
    rank: int,
    num_ranks: int,
    port: int,
    log: Path,
    pipe: Connection,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)  # ranks may share it
    os.dup2(output, 1)
    os.dup2(output, 2)
    faulthandler.register(signal.SIGUSR2, chain=True)  # `kill` asks where the threads stand; then the process ends
    torch.set_num_threads(1)
    refuse_objects(dist.distributed_c10d, dist)
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MEETING_PORT": str(port),
        "OMP_NUM_THREADS": "1",
    }
    try:
        message = (function(*args), None)
    except SystemExit:
        raise
    except BaseException:
        message = (None, traceback.format_exc())
    pipe.send_bytes(pickle.dumps(message))  # not `send`, which hands tensors over as files that end with the process


def _free_port() -> int:
    """A port below those that the system gives out by itself, so that nothing takes it before the ranks do."""
    while True:
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port := random.SystemRandom().randrange(15000, 32000)))
            return port


def be_a_host() -> None:
    """Let this rank take itself for the only one of its host, so that it meets the others over the network."""
    os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}


class Meeting:
    """Where the ranks of a world agree on a new port, so that a process can join one process group after another."""

    num_worlds = 0

    @classmethod
    def new_port(cls) -> None:
        """Set MASTER_PORT to a port that is free, the same on every rank. Every rank calls it equally often."""
        store = dist.TCPStore("127.0.0.1", int(os.environ["MEETING_PORT"]), timeout=timedelta(seconds=60))
        cls.num_worlds += 1
        if os.environ["RANK"] == "0":
            store.set(f"port/{cls.num_worlds}", str(_free_port()))
        os.environ["MASTER_PORT"] = store.get(f"port/{cls.num_worlds}").decode()
