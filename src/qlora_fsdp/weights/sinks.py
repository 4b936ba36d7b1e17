"""What becomes of rows that are read: they are copied, packed or quantized into this rank's shard.

Rows arrive in pieces, in order. A sink takes the pieces of one tensor (`put`) and is told when they are all there
(`finish`). `Copy`, `Pack` and `Quantize` write to a shard. `Dequantize` and `Transpose` stand before them, for tensors
that the files have in another form than the model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from qlora_fsdp.layers import Format, QuantizedLayer
from qlora_fsdp.runtime.rows import gather_rows, local_rows, local_tensor, shard_group
from qlora_fsdp.weights.row_reader import Sink, Span
from qlora_fsdp.weights.scaled import ScaledTensor, dequantize_rows


class Copy(Sink):
    """Casts rows of `source_dtype` to the dtype of `target` and copies them.

    `target` is this rank's rows of a parameter.
    """

    def __init__(self, target: Tensor, source_dtype: torch.dtype) -> None:
        self.target = target
        self.source_dtype = source_dtype

    def put(self, rows: Tensor, first_row: int) -> None:
        values = rows.view(self.source_dtype).view(-1, *self.target.shape[1:])
        self.target[first_row : first_row + len(values)].copy_(values)


class Transpose(Sink):
    """Takes the rows of whole matrices, and hands on the rows of their transposes that this rank holds.

    Args:
        sink: takes the rows.
        dtype: the dtype of the matrices.
        shape: the shape of a matrix as it comes: [height, width]. Its transpose has `width` rows. A piece is one or
            more whole matrices.
        first_row: the first row wanted, counted from the first of all matrices that come.
        num_rows: how many are wanted.
    """

    def __init__(self, sink: Sink, dtype: torch.dtype, shape: tuple[int, int], first_row: int, num_rows: int) -> None:
        self.sink = sink
        self.dtype = dtype
        self.shape = shape
        self.next_row = -first_row  # the next row to come, counted from the first wanted
        self.num_rows = num_rows

    def put(self, rows: Tensor, first_row: int) -> None:
        height, width = self.shape
        turned = rows.view(self.dtype).view(-1, height, width).mT.contiguous().view(-1, height)
        start = self.next_row
        self.next_row += len(turned)
        begin = max(0, -start)
        end = min(len(turned), self.num_rows - start)
        if begin < end:
            self.sink.put(turned[begin:end].view(torch.uint8), start + begin)

    def finish(self) -> None:
        self.sink.finish()


class HoldScales(Sink):
    """Keeps the scales of a tensor that is scaled by blocks, until its rows have come.

    Args:
        dtype: the dtype of the scales.
        rows: where this rank's rows lie, in tensors that are scaled. What comes is the scales of each span, in order.
    """

    def __init__(self, dtype: torch.dtype, rows: Sequence[Span]) -> None:
        self.dtype = dtype
        self.rows = rows
        self.held: list[Tensor] = []
        self.index: Tensor | None = None  # for each row, which row of the scales it has: int64 [rows]

    def put(self, rows: Tensor, first_row: int) -> None:
        self.held.append(rows.view(self.dtype).clone())

    def of(self, first_row: int, num_rows: int) -> Tensor:
        """The scales of some of this rank's rows: [rows, scales]."""
        if len(self.held) > 1:
            self.held = [torch.cat(self.held)]
        (held,) = self.held
        if self.index is None:
            self.index = torch.cat(list(self._find_index())).to(held.device)
        return held[self.index[first_row : first_row + num_rows]]

    def _find_index(self) -> Iterator[Tensor]:
        start = 0
        for span in self.rows:
            assert isinstance(span.stored, ScaledTensor)
            found = span.stored.scale_rows(span.first_row, span.last_row)
            yield found - found[0] + start
            start += int(found[-1] - found[0]) + 1

    def free(self) -> None:
        self.held = []
        self.index = None


class Dequantize(Sink):
    """Hands on the values of rows that are scaled by blocks.

    Args:
        sink: takes the rows, in `dtype`.
        stored: one of the tensors whose rows come.
        scales: has their scales, which come before them.
        dtype: the dtype of the values.
    """

    def __init__(self, sink: Sink, stored: ScaledTensor, scales: HoldScales, dtype: torch.dtype) -> None:
        self.sink = sink
        self.stored = stored
        self.scales = scales
        self.dtype = dtype
        self.num_rows = 0  # so far

    def put(self, rows: Tensor, first_row: int) -> None:
        rows = rows.view(-1, self.stored.row_bytes)  # what comes may be whole matrices
        scales = self.scales.of(self.num_rows, len(rows))
        values = dequantize_rows(rows.view(self.stored.dtype), scales, self.stored.block[1], self.dtype)
        self.sink.put(values.view(torch.uint8), self.num_rows)
        self.num_rows += len(rows)

    def finish(self) -> None:
        self.scales.free()
        self.sink.finish()


class Pack(Sink):
    """Packs rows of bytes into the layer's storage dtype and writes them."""

    def __init__(self, target: Tensor, format: Format) -> None:
        self.target = target
        self.format = format

    def put(self, rows: Tensor, first_row: int) -> None:
        _write(self.target[first_row : first_row + len(rows)], self.format.pack(rows))


class Quantize(Sink):
    """Casts rows to `dtype`, quantizes them, and fills the layer's codes; its scales follow once all rows are there."""

    def __init__(
        self, layer: QuantizedLayer, device: torch.device, source_dtype: torch.dtype, dtype: torch.dtype
    ) -> None:
        self.layer = layer
        self.device = device
        self.source_dtype = source_dtype
        self.dtype = dtype
        self.codes = local_tensor(layer.codes)
        self.absmax: list[Tensor] = []

    def put(self, rows: Tensor, first_row: int) -> None:
        codes, absmax = self.layer.format.quantize_rows(rows.view(self.source_dtype).to(self.dtype))
        _write(self.codes[first_row : first_row + len(codes)], codes)
        self.absmax.append(absmax)

    def finish(self) -> None:
        layer = self.layer
        format = layer.format
        none = (0, layer.in_features // format.blocksize) if format.is_4bit else (0,)
        absmax = torch.cat([torch.empty(none, device=self.device), *self.absmax])
        self.absmax = []
        if not format.double_quant:
            _write(local_tensor(layer.scales), absmax)
            return
        # Double quantization subtracts the mean of all scales, and quantizes them in groups of 256 that may span ranks.
        # So the scales of all ranks are gathered, every rank quantizes all of them, and keeps its own rows.
        group = shard_group(layer.codes)
        scales, nested_scales = format.quantize_scales(gather_rows(absmax, layer.out_features, group))
        for param, whole in ((layer.scales, scales), (layer.nested_scales, nested_scales)):
            first, last = local_rows(param)
            _write(local_tensor(param), whole[first:last])


def _write(target: Tensor, source: Tensor) -> None:
    """Copy raw bytes between any two devices, never converting the dtype."""
    assert target.shape == source.shape and target.dtype == source.dtype
    if target.numel():
        target.view(torch.uint8).copy_(source.contiguous().view(torch.uint8))
