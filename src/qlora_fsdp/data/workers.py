"""Worker processes that tokenize rows of a stream, so that training's own Python threads do not wait for it.

Those that tokenize a whole source, before training, are in shards.py: they send nothing back.
"""

from __future__ import annotations

import os
import signal
import weakref
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from queue import SimpleQueue

from qlora_fsdp.common import contained
from qlora_fsdp.common.errors import DataError
from qlora_fsdp.data.chats.template import too_slow
from qlora_fsdp.data.tokenize import Columns

Tokenize = Callable[[Columns], Columns]
MapBatches = Callable[[Iterable[Columns]], Iterable[Columns]]

# Of a terminal or a batch system. They come to every process of a job, and the workers' parent decides when they end.
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
CPU_LIMIT = Path("/sys/fs/cgroup/cpu.max")  # of a container: microseconds of CPU time, and of how many


def num_cores() -> int:
    """CPU cores that this process may use, and that its container may keep busy."""
    cores = len(os.sched_getaffinity(0))
    with suppress(OSError, ValueError):
        limit, period = map(int, CPU_LIMIT.read_text().split())  # "max" is no number
        cores = min(cores, -(-limit // period))
    return max(1, cores)


def become_worker() -> None:
    """Prepares a process that tokenizes."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    contained.contain_itself()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the workers have the cores already


class Workers:
    """Processes that tokenize batches of rows. They start with the first batch, and end when this process is gone.

    Each has a pipe, which is closed when this process ends in whatever way. A pool of concurrent.futures has semaphores
    beside, which it complains about where a process ends at once.
    """

    def __init__(self, tokenize: Tokenize, num_workers: int) -> None:
        self.tokenize, self.num_workers = tokenize, num_workers
        self._threads = ThreadPoolExecutor(num_workers, "worker")  # each waits for a process
        self._idle: SimpleQueue[tuple[Connection, BaseProcess]] = SimpleQueue()
        self._is_started = False

    def map(self, batches: Iterable[Columns]) -> Iterator[Columns]:
        """The batches, tokenized, in their order.

        Raises:
            DataError: a worker has been killed.
        """
        if not self._is_started:
            self._start()
        return self._threads.map(self._ask, batches)

    def _start(self) -> None:
        # A fork of this process would have its locks, and a GPU that it can't use. The server imports once for all.
        context = get_context("forkserver")
        context.set_forkserver_preload([__name__, "qlora_fsdp.data.tokenize"])
        for _ in range(self.num_workers):
            mine, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, self.tokenize), daemon=True)
            process.start()
            theirs.close()
            weakref.finalize(self, mine.close)  # also before multiprocessing waits for its processes at the end
            self._idle.put((mine, process))
        self._is_started = True

    def _ask(self, batch: Columns) -> Columns:
        pipe, process = self._idle.get()
        try:
            pipe.send(batch)
            result: Columns | Exception = pipe.recv()
        except (EOFError, OSError) as error:
            process.join()
            if process.exitcode == -contained.TOO_LONG:
                raise too_slow() from error
            raise DataError(
                "A process that tokenizes was killed, by the system for memory perhaps. Set data.num_proc lower."
            ) from error
        finally:
            self._idle.put((pipe, process))
        if isinstance(result, Exception):
            raise result
        return result


def _serve(pipe: Connection, tokenize: Tokenize) -> None:
    """Tokenize batches in a worker process."""
    become_worker()
    with suppress(EOFError, OSError):  # the process that has started it is gone
        while True:
            batch = pipe.recv()
            try:
                result: Columns | Exception = tokenize(batch)
            except Exception as error:
                result = error
            pipe.send(result)
