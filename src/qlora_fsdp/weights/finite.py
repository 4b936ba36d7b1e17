"""Find NaN and infinite values in the model files while their rows are read.

The smallest and the largest value of each piece are computed on the device; one NaN in the piece makes both NaN. They
stay there until all weights are read, so that no piece is waited for. This takes a fiftieth of the time of
quantization.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from qlora_fsdp.common.errors import CheckpointError
from qlora_fsdp.common.sizes import PIECE_BYTES
from qlora_fsdp.common.text import plural
from qlora_fsdp.runtime.hardware import dtype_name
from qlora_fsdp.weights.row_reader import Sink, Span
from qlora_fsdp.weights.safetensors_files import StoredTensor
from qlora_fsdp.weights.scaled import ScaledTensor, read_dequantized


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
