"""Stage 8, prefetch: a thread makes the next batches while the GPU works on this one."""

from __future__ import annotations

import queue
import threading
from collections.abc import Generator, Iterable

import torch

from qlora_fsdp.data.batch import Batch


def prefetch(batches: Iterable[Batch], num_ahead: int = 2) -> Generator[Batch, None, None]:
    """Yields `batches`, of which a thread makes at most `num_ahead` in advance, page-locked if there is a GPU.

    An error in the thread is raised here, where its batch would have come. Closing the iterator ends the thread.
    """
    ready: queue.Queue[Batch | Exception | None] = queue.Queue(num_ahead)  # None: there are no more
    stop = threading.Event()
    pin = torch.cuda.is_available()

    def put(item: Batch | Exception | None) -> None:
        while not stop.is_set():
            try:
                return ready.put(item, timeout=0.1)
            except queue.Full:
                continue

    def work() -> None:
        try:
            for batch in batches:
                put(batch.pin_memory() if pin else batch)
                if stop.is_set():
                    return
            put(None)
        except Exception as error:
            put(error)

    thread = threading.Thread(target=work, name="prefetch", daemon=True)
    thread.start()
    try:
        while (item := ready.get()) is not None:
            if isinstance(item, Exception):
                raise item
            yield item
    finally:
        stop.set()
        thread.join()
