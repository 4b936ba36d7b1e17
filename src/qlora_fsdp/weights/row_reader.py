"""Read row ranges of many tensors, in order, with reading, copying to the GPU and the caller's work overlapped.

A few threads read pieces of at most `PIECE_BYTES` into a ring of (pinned) buffers. The caller's thread copies each to
the device and hands it to the request that asked for it. Host memory is the ring, whatever the model's size.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from queue import SimpleQueue

import torch
from torch import Tensor

from qlora_fsdp.common.errors import CheckpointError
from qlora_fsdp.common.sizes import NUM_BUFFERS, PIECE_BYTES
from qlora_fsdp.weights.safetensors_files import StoredTensor

MAX_READERS = 8


@dataclass
class Request:
    """Rows [first_row, last_row) of a stored tensor, seen as rows of `row_bytes` bytes.

    Attributes:
        put: called with (uint8 [n, row_bytes] on the device, index of its first row relative to `first_row`), in order.
            The tensor is only valid during the call.
        finish: called once after the last `put`, also when there are no rows; may hold a collective, because every
            rank finishes its requests in the same order.
    """

    stored: StoredTensor
    row_bytes: int
    first_row: int
    last_row: int
    put: Callable[[Tensor, int], None]
    finish: Callable[[], None] = lambda: None

    @property
    def num_bytes(self) -> int:
        return (self.last_row - self.first_row) * self.row_bytes


@dataclass
class _Buffer:
    host: Tensor
    copied: torch.cuda.Event | None = None  # set when the copy to the GPU has been enqueued


@dataclass(frozen=True)
class _Piece:
    request: Request
    row: int  # relative to the request's first row
    num_rows: int


def run_requests(
    requests: Sequence[Request],
    device: torch.device,
    on_progress: Callable[[int], None],
    num_readers: int = MAX_READERS,
) -> None:
    """Serve all requests in order.

    Args:
        requests: the same sequence of tensors on every rank; the rows are each rank's own.
        device: where `put` gets its tensors.
        on_progress: called with the number of bytes of each piece served.
        num_readers: threads that read.

    Raises:
        CheckpointError: a file can't be read, or ends early.
    """
    if not requests:  # random weights: no host memory for buffers
        return
    largest_row = max(request.row_bytes for request in requests)
    buffer_bytes = max(PIECE_BYTES, largest_row)
    cuda = device.type == "cuda"
    free: SimpleQueue[_Buffer] = SimpleQueue()
    for _ in range(NUM_BUFFERS):
        free.put(_Buffer(torch.empty(buffer_bytes, dtype=torch.uint8, pin_memory=cuda)))
    files: dict[str, int] = {}

    def read(piece: _Piece, file: int) -> _Buffer:
        buffer = free.get()
        if buffer.copied is not None:
            buffer.copied.synchronize()
        request = piece.request
        start = request.stored.offset + (request.first_row + piece.row) * request.row_bytes
        target = buffer.host.numpy().data[: piece.num_rows * request.row_bytes]
        while target:
            try:
                count = os.preadv(file, [target], start)
            except OSError as error:
                raise _unreadable(request.stored, str(error)) from error
            if count == 0:
                raise _unreadable(request.stored, "it ends early")
            target, start = target[count:], start + count
        return buffer

    pieces = _split(requests, buffer_bytes)
    pool = ThreadPoolExecutor(num_readers, thread_name_prefix="read")
    pending: deque[tuple[_Piece | Request, Future[_Buffer] | None]] = deque()

    def submit_next() -> bool:
        for item in pieces:
            if isinstance(item, Request):
                pending.append((item, None))
                continue
            name = str(item.request.stored.file)
            if name not in files:
                try:
                    files[name] = os.open(name, os.O_RDONLY)
                except OSError as error:
                    raise _unreadable(item.request.stored, str(error)) from error
            pending.append((item, pool.submit(read, item, files[name])))
            return True
        return False

    try:
        for _ in range(NUM_BUFFERS - 1):
            submit_next()
        while pending:
            item, future = pending.popleft()
            if future is None:
                assert isinstance(item, Request)
                item.finish()
                continue
            assert isinstance(item, _Piece)
            buffer = future.result()
            size = item.num_rows * item.request.row_bytes
            rows = buffer.host[:size].to(device, non_blocking=True).view(item.num_rows, item.request.row_bytes)
            if cuda:
                buffer.copied = torch.cuda.Event()
                buffer.copied.record()
            item.request.put(rows, item.row)
            free.put(buffer)
            submit_next()
            on_progress(size)
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
        for file in files.values():
            os.close(file)


def _unreadable(stored: StoredTensor, reason: str) -> CheckpointError:
    return CheckpointError(
        f"{stored.file} can't be read at {stored.key}: {reason}. Copy or download it again into model.path."
    )


def _split(requests: Sequence[Request], buffer_bytes: int) -> Iterator[_Piece | Request]:
    """The pieces of each request, then the request itself as the sign to finish it."""
    for request in requests:
        num_rows = request.last_row - request.first_row
        rows_a_piece = max(1, buffer_bytes // request.row_bytes)
        for row in range(0, num_rows, rows_a_piece):
            yield _Piece(request, row, min(rows_a_piece, num_rows - row))
        yield request
