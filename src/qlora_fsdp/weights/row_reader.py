"""Read row ranges of many tensors in order. Reading, copying to the GPU, and the sinks' work overlap.

A few threads read pieces of at most `PIECE_BYTES` into a ring of (pinned) buffers. The caller's thread copies each
piece to the device and hands it to the sink of the tensor that it belongs to. The ring is all the host memory that this
takes, whatever the model's size. Rows of several stored tensors that make up one tensor share a piece, so that a sink
has large pieces to work on even where each expert is a small tensor of its own.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType

import torch
from torch import Tensor

from qlora_fsdp.common.errors import CheckpointError
from qlora_fsdp.common.sizes import NUM_BUFFERS, PIECE_BYTES
from qlora_fsdp.weights.safetensors_files import StoredTensor

NUM_READERS = 8  # threads that read


class Sink(ABC):
    """Takes the rows of one tensor, a piece at a time and in order."""

    @abstractmethod
    def put(self, rows: Tensor, first_row: int) -> None:
        """Take the next rows.

        Args:
            rows: uint8 [n, row_bytes] on the device; valid during the call only.
            first_row: index of the first of them, counted from the request's first row.
        """

    def finish(self) -> None:  # noqa: B027  # most sinks have nothing to do then
        """Called once after the last `put`, also where there are no rows.

        This may hold a collective, because every rank finishes its requests in the same order.
        """


@dataclass(frozen=True)
class Span:
    """Rows [first_row, last_row) of a stored tensor."""

    stored: StoredTensor
    first_row: int
    last_row: int


@dataclass(frozen=True)
class RowRequest:
    """Consecutive rows of `row_bytes` bytes, which lie in one or more stored tensors, and who takes them."""

    spans: Sequence[Span]
    row_bytes: int
    sink: Sink


def run_requests(
    requests: Sequence[RowRequest],
    device: torch.device,
    on_progress: Callable[[int], None],
) -> None:
    """Serve all requests in order.

    Args:
        requests: the same sequence of tensors on every rank; the rows are each rank's own.
        device: where the sinks get their rows.
        on_progress: called with the number of bytes of each piece, once it is served.

    Raises:
        CheckpointError: a file can't be read, or ends early.
    """
    if not requests:  # random weights: no host memory for buffers
        return
    cuda = device.type == "cuda"
    with _ReadAhead(requests, cuda) as reader:
        for item, buffer in reader:
            if buffer is None:
                assert isinstance(item, RowRequest)
                item.sink.finish()
                continue
            assert isinstance(item, _Piece)
            row_bytes = item.request.row_bytes
            size = sum(span.last_row - span.first_row for span in item.spans) * row_bytes
            rows = buffer.host[:size].to(device, non_blocking=True).view(-1, row_bytes)
            if cuda:
                buffer.copied = torch.cuda.Event()
                buffer.copied.record()
            item.request.sink.put(rows, item.row)
            reader.give_back(buffer)
            on_progress(size)


@dataclass
class _Buffer:
    host: Tensor
    copied: torch.cuda.Event | None = None  # set when the copy to the GPU has been enqueued


@dataclass(frozen=True)
class _Piece:
    request: RowRequest
    row: int  # counted from the request's first row
    spans: Sequence[Span]  # a part of the request's


class _ReadAhead:
    """Reads the pieces of all requests, in order, some pieces ahead of whoever iterates over it.

    It yields each piece with the buffer that holds it, which has to be given back. After its last piece it yields the
    request itself, without a buffer.
    """

    def __init__(self, requests: Sequence[RowRequest], pins_memory: bool) -> None:
        buffer_bytes = max(PIECE_BYTES, *(request.row_bytes for request in requests))
        self.free: SimpleQueue[_Buffer] = SimpleQueue()
        for _ in range(NUM_BUFFERS):
            self.free.put(_Buffer(torch.empty(buffer_bytes, dtype=torch.uint8, pin_memory=pins_memory)))
        self.items = _split(requests, buffer_bytes)
        self.pending: deque[tuple[_Piece | RowRequest, Future[_Buffer] | None]] = deque()
        self.files: dict[Path, int] = {}
        self.pool = ThreadPoolExecutor(NUM_READERS, thread_name_prefix="read")

    def __enter__(self) -> _ReadAhead:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.pool.shutdown(wait=True, cancel_futures=True)
        for file in self.files.values():
            os.close(file)

    def __iter__(self) -> Iterator[tuple[_Piece | RowRequest, _Buffer | None]]:
        for _ in range(NUM_BUFFERS - 1):
            self._submit_next()
        while self.pending:
            item, future = self.pending.popleft()
            yield item, None if future is None else future.result()

    def give_back(self, buffer: _Buffer) -> None:
        """Let another piece be read into the buffer."""
        self.free.put(buffer)
        self._submit_next()

    def _submit_next(self) -> None:
        """Have the next piece read; requests that are complete before it follow in their place."""
        for item in self.items:
            if isinstance(item, RowRequest):
                self.pending.append((item, None))
                continue
            for stored in (span.stored for span in item.spans):
                if stored.file not in self.files:
                    try:
                        self.files[stored.file] = os.open(stored.file, os.O_RDONLY)
                    except OSError as error:
                        raise _unreadable(stored, str(error)) from error
            self.pending.append((item, self.pool.submit(self._read, item)))
            return

    def _read(self, piece: _Piece) -> _Buffer:
        """Read a piece into the next buffer that is free; runs in a thread of the pool."""
        buffer = self.free.get()
        row_bytes = piece.request.row_bytes
        if buffer.copied is not None:
            buffer.copied.synchronize()
        room = buffer.host.numpy().data
        for span in piece.spans:
            size = (span.last_row - span.first_row) * row_bytes
            _read_into(room[:size], self.files[span.stored.file], span.stored, span.first_row * row_bytes)
            room = room[size:]
        return buffer


def _read_into(target: memoryview, file: int, stored: StoredTensor, start: int) -> None:
    """Fill `target` with the tensor's bytes from `start` on."""
    start += stored.offset
    while target:
        try:
            count = os.preadv(file, [target], start)
        except OSError as error:
            raise _unreadable(stored, str(error)) from error
        if count == 0:
            raise _unreadable(stored, "it ends early")
        target = target[count:]
        start += count


def _unreadable(stored: StoredTensor, reason: str) -> CheckpointError:
    return CheckpointError(
        f"{stored.file} can't be read at {stored.key}: {reason}. Copy or download it again into model.path."
    )


def _split(requests: Sequence[RowRequest], buffer_bytes: int) -> Iterator[_Piece | RowRequest]:
    """The pieces of each request, then the request itself, as the sign to finish it."""
    for request in requests:
        rows_per_piece = max(1, buffer_bytes // request.row_bytes)
        spans: list[Span] = []
        row = 0  # the first of the piece that is being filled
        num_rows = 0  # that it has so far
        for span in request.spans:
            first = span.first_row
            while first < span.last_row:
                last = min(span.last_row, first + rows_per_piece - num_rows)
                spans.append(Span(span.stored, first, last))
                num_rows += last - first
                first = last
                if num_rows == rows_per_piece:
                    yield _Piece(request, row, spans)
                    spans = []
                    row += num_rows
                    num_rows = 0
        if spans:
            yield _Piece(request, row, spans)
        yield request
