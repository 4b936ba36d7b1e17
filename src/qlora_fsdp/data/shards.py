"""Tokenize rows for the cache shard by shard, in worker processes, so that an interrupted run loses little work.

The rows of a source are divided into shards of some megabytes by their length alone. A shard is a file that gets its
name once it is whole. So Ctrl-C, a kill or a full disk costs each process the shard that it was at.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from qlora_fsdp.common.contained import TOO_LONG
from qlora_fsdp.common.errors import DataError
from qlora_fsdp.common.startup import KEPT, end_with
from qlora_fsdp.data.chats.template import too_slow
from qlora_fsdp.data.tokenize import Columns
from qlora_fsdp.data.workers import Tokenize, become_worker

if TYPE_CHECKING:
    import datasets

SHARD_BYTES = 8 * 2**20  # of raw rows: some seconds of tokenizing
LEAST_SHARDS = 64  # of less data, so that many processes have something to do
ROWS_A_BATCH = 100  # rows may be whole books, and a batch is in memory together with its offsets
SECONDS_BETWEEN_LOOKS = 0.5
SCHEMA = pa.schema(
    [
        *(("place", pa.string()), ("problem", pa.string()), ("detail", pa.string())),
        *(("tokens", pa.list_(pa.int32())), ("is_target", pa.list_(pa.bool_())), ("labels", pa.list_(pa.float32()))),
        ("flags", pa.uint8()),
    ]
)

Progress = Callable[[int], object]  # called with the rows done since the last call


def find_bounds(num_bytes: NDArray[np.int64], may_divide: bool) -> NDArray[np.int64]:
    """Divides rows into shards of about the same bytes: the first row of each, and the number of rows.

    `num_bytes` [num_rows] is of each row; only if it `may_divide`, there is more than one shard.
    """
    ends = np.cumsum(num_bytes)
    total = int(ends[-1]) if len(ends) else 0
    num_shards = max(LEAST_SHARDS, -(-total // SHARD_BYTES)) if may_divide else 1
    wanted = total * np.arange(1, num_shards) // num_shards
    inner = np.searchsorted(ends, wanted, side="right")
    return np.unique([0, *inner, len(num_bytes)]).astype(np.int64)


@dataclass(frozen=True)
class Shards:
    """The shards of a source.

    Attributes:
        folder: where they are.
        bounds: int64 [num_shards + 1], the first row of each, and the number of rows.
    """

    folder: Path
    bounds: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def file(self, shard: int) -> Path:
        return self.folder / f"{shard:06}.arrow"

    def num_rows(self, shard: int) -> int:
        return int(self.bounds[shard + 1] - self.bounds[shard])

    def find_missing(self) -> list[int]:
        """Those that are still to be made. What others have left half made is removed."""
        for file in self.folder.glob("*.tmp"):
            file.unlink()
        return [shard for shard in range(len(self)) if not self._is_whole(shard)]

    def make(self, shard: int, raw: datasets.Dataset, tokenize: Tokenize, on_progress: Progress) -> None:
        """Tokenizes the rows of a shard.

        Args:
            shard: its number.
            raw: raw rows, with columns `place` and `row`.
            tokenize: makes columns of tokens (`tokenize.COLUMNS`) of these.
            on_progress: gets the number of rows done since its last call.
        """
        temporary = self.file(shard).with_suffix(".tmp")
        with pa.OSFile(str(temporary), "wb") as sink, pa.ipc.new_file(sink, SCHEMA) as writer:
            first, last = self.bounds[shard : shard + 2].tolist()
            for start in range(first, last, ROWS_A_BATCH):
                rows = raw[start : min(start + ROWS_A_BATCH, last)]
                writer.write_batch(_to_batch(tokenize(rows)))
                on_progress(len(rows["row"]))
        temporary.rename(self.file(shard))

    def make_all(
        self,
        missing: Sequence[int],
        num_processes: int,
        raw: datasets.Dataset,
        tokenize: Tokenize,
        on_progress: Progress,
    ) -> None:
        """Makes the shards `missing`, in processes of their own, which can be ended whatever a library is at there.

        Raises:
            DataError: a row stops the tokenizing, or a process was killed.
            OSError: the disk is full, or can't be written.
        """
        num_processes = min(num_processes, len(missing))
        _in_workers(partial(self.make, raw=raw, tokenize=tokenize), missing, num_processes, on_progress)

    def read(self, shard: int) -> list[pa.Table]:
        """The rows of a shard, in tables of some hundred."""
        with pa.memory_map(str(self.file(shard))) as stream, pa.ipc.open_file(stream) as reader:
            return [pa.Table.from_batches([reader.get_batch(n)]) for n in range(reader.num_record_batches)]

    def _is_whole(self, shard: int) -> bool:
        """Whether it is there. After a power failure a file may have its name and not all of its content."""
        try:
            with pa.memory_map(str(self.file(shard))) as stream, pa.ipc.open_file(stream):
                return True
        except (OSError, pa.ArrowInvalid):
            self.file(shard).unlink(missing_ok=True)
            return False


def _to_batch(columns: Columns) -> pa.RecordBatch:
    arrays = []
    for field in SCHEMA:
        values: list[Any] = columns[field.name]
        if pa.types.is_list(field.type):
            offsets = np.cumsum([0, *map(len, values)], dtype=np.int32)
            flat = np.concatenate([np.asarray(value, field.type.value_type.to_pandas_dtype()) for value in values])
            arrays.append(pa.ListArray.from_arrays(offsets, pa.array(flat, field.type.value_type)))
        else:
            arrays.append(pa.array(values, field.type))
    return pa.RecordBatch.from_arrays(arrays, schema=SCHEMA)


def _in_workers(job: Callable[..., None], numbers: Sequence[int], num_processes: int, on_progress: Progress) -> None:
    """Calls `job(number, on_progress=...)` for each number, in processes forked off this one that end when it does.

    They see what this process has in memory, so nothing is sent to them and nothing comes back but counts.
    """
    context = multiprocessing.get_context("fork")
    others = set(multiprocessing.active_children())
    counted = context.Value("q", 0)
    shown = 0
    with ProcessPoolExecutor(num_processes, context, _begin, (job, counted, os.getpid())) as pool:
        pending = {pool.submit(_run, number) for number in numbers}
        workers = set(multiprocessing.active_children()) - others
        try:
            while pending:
                finished, pending = wait(pending, SECONDS_BETWEEN_LOOKS, FIRST_COMPLETED)
                before = shown
                shown = counted.value
                on_progress(shown - before)
                for future in finished:
                    future.result()
        except BaseException as error:
            for worker in workers:
                worker.kill()  # a row may be long, and nothing is lost but the shards that they are at
            if isinstance(error, BrokenProcessPool):
                for worker in workers:
                    worker.join()
                if -TOO_LONG in [worker.exitcode for worker in workers]:
                    raise too_slow() from error
                raise DataError(
                    "A process that tokenizes was killed, as a rule for want of memory (`dmesg` names what the kernel"
                    f" kills). {num_processes} were running: set data.num_proc lower. {KEPT}"
                ) from error
            raise
    on_progress(counted.value - shown)


_job: Callable[[int], None]  # of a worker: what it was forked for


def _begin(job: Callable[..., None], counted: Any, parent: int) -> None:
    """Prepares a worker."""
    become_worker()
    end_with(parent, signal.SIGKILL)
    gc.freeze()  # else collecting garbage would copy the pages that are shared with the parent

    def count(num_rows: int) -> None:
        with counted.get_lock():
            counted.value += num_rows

    global _job
    _job = partial(job, on_progress=count)


def _run(number: int) -> None:
    _job(number)
