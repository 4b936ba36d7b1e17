"""Read row ranges of many tensors in order. Reading, copying to the GPU, and the sinks' work overlap.

A few threads read pieces of at most `PIECE_BYTES` into a ring of (pinned) buffers. The caller's thread copies each
piece to the device and hands it to the sink of the tensor that it belongs to. The ring is all the host memory that this
takes, whatever the model's size. Rows of several stored tensors that make up one tensor share a piece, so that a sink
has large pieces to work on even where each expert is a small tensor of its own.

Find NaN and infinite values in the model files while their rows are read.

The smallest and the largest value of each piece are computed on the device; one NaN in the piece makes both NaN. They
stay there until all weights are read, so that no piece is waited for. This takes a fiftieth of the time of
quantization.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType

import torch
from torch import Tensor

from qlora_fsdp.common.errors import CheckpointError
from qlora_fsdp.common.sizes import NUM_BUFFERS, PIECE_BYTES
from qlora_fsdp.common.text import plural
from qlora_fsdp.runtime.hardware import dtype_name
from qlora_fsdp.weights.safetensors_files import StoredTensor
from qlora_fsdp.weights.scaled import ScaledTensor, read_dequantized

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


class FiniteCheck:
    """Whether all values of some stored tensors are finite, as far as this rank reads them."""

    def __init__(self) -> None:
        self._found: list[tuple[Sequence[StoredTensor], torch.dtype, tuple[Tensor, Tensor]]] = []

    def watch(self, sink: Sink, spans: Sequence[Span], source: torch.dtype, dtype: torch.dtype) -> Sink:
        """A sink that looks at rows before it hands them to another.

        Args:
            sink: takes the rows.
            spans: where the rows lie.
            source: in which the rows arrive.
            dtype: what the values are cast to. One that is infinite only there counts as infinite.
        """
        return _Watching(self, sink, spans, source, dtype) if spans and source.is_floating_point else sink

    def note(self, stored: Sequence[StoredTensor], dtype: torch.dtype, values: Tensor) -> None:
        """Look at some values of one or more tensors, without waiting for the device."""
        if values.numel():
            self._found.append((stored, dtype, torch.aminmax(values)))

    def finish(self) -> None:
        """Ask the device what it found.

        Raises:
            CheckpointError: a tensor has values that are not finite. It is named, with its file and their number.
        """
        found = self._found
        self._found = []
        if not found:
            return
        ends = torch.stack([end.float() for *_, ends in found for end in ends])
        largest_values = ends.abs().view(-1, 2).amax(1).tolist()
        bad: dict[str, tuple[StoredTensor, torch.dtype]] = {}
        for (tensors, dtype, _), largest in zip(found, largest_values, strict=True):
            if largest <= torch.finfo(dtype).max:  # NaN is not
                continue
            for stored in tensors:
                if len(tensors) == 1 or _count_bad(stored, dtype)[0]:
                    bad[stored.key] = (stored, dtype)
        if bad:
            raise _not_finite(*next(iter(bad.values())), len(bad) - 1)


class _Watching(Sink):
    def __init__(
        self, check: FiniteCheck, sink: Sink, spans: Sequence[Span], source: torch.dtype, dtype: torch.dtype
    ) -> None:
        self.check = check
        self.sink = sink
        self.spans = spans
        self.source = source
        self.dtype = dtype
        self.ends = list(accumulate(span.last_row - span.first_row for span in spans))

    def put(self, rows: Tensor, first_row: int) -> None:
        begin = bisect_right(self.ends, first_row)
        end = bisect_left(self.ends, first_row + len(rows))
        tensors = [span.stored for span in self.spans[begin : end + 1]]
        self.check.note(tensors, self.dtype, rows.view(self.source))
        self.sink.put(rows, first_row)

    def finish(self) -> None:
        self.sink.finish()


def check_finite(stored: StoredTensor, values: Tensor) -> None:
    """Look at all values of a tensor that has been read as a whole.

    Raises:
        CheckpointError: some are NaN or infinite.
    """
    if values.is_floating_point():
        check = FiniteCheck()
        check.note([stored], values.dtype, values)
        check.finish()


def _not_finite(stored: StoredTensor, dtype: torch.dtype, num_others: int) -> CheckpointError:
    """The error about a tensor, which is read once more to count its values."""
    num_bad, cast = _count_bad(stored, dtype)
    others = f" So have {plural(num_others, 'other tensor')}." if num_others else ""
    return CheckpointError(
        f"{stored.file}: {stored.key} has {plural(num_bad, 'NaN or infinite value')}{cast}, with which nothing can be "
        f"computed.{others} Copy or download the file again, or set model.path to an intact model."
    )


def _count_bad(stored: StoredTensor, dtype: torch.dtype) -> tuple[int, str]:
    """Count values that are not finite; the text says so if they are finite in the file and not in `dtype`."""
    num_bad = _count(stored, torch.float32 if isinstance(stored, ScaledTensor) else stored.dtype)
    if num_bad:
        return num_bad, ""
    return _count(stored, dtype), f" in {dtype_name(dtype)}"


def _count(stored: StoredTensor, dtype: torch.dtype) -> int:
    """How many values of a tensor are not finite in a dtype."""
    if isinstance(stored, ScaledTensor):
        return sum(int((~values.isfinite()).sum()) for values in read_dequantized(stored, dtype))
    num_bad = 0
    with stored.file.open("rb") as stream:
        stream.seek(stored.offset)
        for start in range(0, stored.num_bytes, PIECE_BYTES):
            block = bytearray(stream.read(min(PIECE_BYTES, stored.num_bytes - start)))
            num_bad += int((~torch.frombuffer(block, dtype=stored.dtype).to(dtype).isfinite()).sum())
    return num_bad
