"""Worker processes that tokenize rows of a stream, so that training's own Python threads do not wait for it."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context, parent_process
from typing import Any

from qlora_fsdp.common.errors import DataError

RowBatch = dict[str, list[Any]]  # columns as `tokenize.RowTokenizer` takes and gives them
Tokenize = Callable[[RowBatch], RowBatch]
MapBatches = Callable[[Iterable[RowBatch]], Iterable[RowBatch]]

# Of a terminal or a batch system. They come to every process of a job, and this process decides when workers end.
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


class Workers:
    """Processes that tokenize batches of rows. They start with the first batch, and end when this process is gone.

    Args:
        tokenize: makes token rows of raw rows, as `RowTokenizer` does.
        num_workers: processes.
    """

    def __init__(self, tokenize: Tokenize, num_workers: int) -> None:
        # A fork of this process would have its locks, and a GPU that it can't use. The server imports once for all.
        context = get_context("forkserver")
        context.set_forkserver_preload([__name__, "qlora_fsdp.data.tokenize"])
        self._pool = ProcessPoolExecutor(num_workers, context, _begin, (tokenize,))

    def map(self, batches: Iterable[RowBatch]) -> Iterator[RowBatch]:
        """The batches, tokenized, in their order.

        Raises:
            DataError: a worker has been killed.
        """
        try:
            yield from self._pool.map(_tokenize, batches)
        except BrokenProcessPool as error:
            raise DataError(
                "A process that tokenizes was killed, by the system for memory perhaps. Set data.num_proc lower."
            ) from error


_own: list[Tokenize] = []  # of a worker: what it has been started for


def _begin(tokenize: Tokenize) -> None:
    """Prepares a worker."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the workers have the cores already
    _own.append(tokenize)
    threading.Thread(target=_end_with_parent, name="parent", daemon=True).start()


def _end_with_parent() -> None:
    parent = parent_process()
    if parent is not None:
        parent.join()
    os._exit(0)


def _tokenize(batch: RowBatch) -> RowBatch:
    return _own[0](batch)
