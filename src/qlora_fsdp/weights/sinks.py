"""What becomes of rows that are read: they are copied, packed or quantized into this rank's shard.

Rows arrive in pieces, in order. A sink takes the pieces of one tensor (`put`) and is told when they are all there
(`finish`). `Copy`, `Pack`, `Quantize` and `QuantizeWhole` write to a shard. `Dequantize` and `Transpose` stand before
them, for tensors that the files have in another form than the model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from qlora_fsdp.layers.quantized.compressed import find_global_scale
from qlora_fsdp.layers.quantized.format import VALUES_A_TIME, Format
from qlora_fsdp.layers.quantized_layer import QuantizedLayer
from qlora_fsdp.runtime.rows import find_largest, gather_rows, local_rows, local_tensor, shard_group
from qlora_fsdp.weights.row_reader import FiniteCheck, Sink, Span
from qlora_fsdp.weights.scaled import ScaledTensor, dequantize_rows, scale_values


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


class HoldGlobalScales(HoldScales):
    """The same of global scales. What comes is the one of the tensor of each span, in order."""

    def _find_index(self) -> Iterator[Tensor]:
        for number, span in enumerate(self.rows):
            yield torch.full((span.last_row - span.first_row,), number)


class Dequantize(Sink):
    """Hands on the values of rows that are scaled by blocks.

    Args:
        sink: takes the rows, in `dtype`.
        stored: one of the tensors whose rows come.
        scales: has their scales, which come before them.
        global_scales: has by what the scales are divided; None: by nothing.
        dtype: the dtype of the values.
    """

    def __init__(
        self,
        sink: Sink,
        stored: ScaledTensor,
        scales: HoldScales,
        global_scales: HoldGlobalScales | None,
        dtype: torch.dtype,
    ) -> None:
        self.sink = sink
        self.stored = stored
        self.scales = scales
        self.global_scales = global_scales
        self.dtype = dtype
        self.num_rows = 0  # so far

    def put(self, rows: Tensor, first_row: int) -> None:
        rows = rows.view(-1, self.stored.row_bytes)  # what comes may be whole matrices
        scales = self.scales.of(self.num_rows, len(rows))
        if self.global_scales is not None:
            scales = scales.float() / self.global_scales.of(self.num_rows, len(rows))
        values = dequantize_rows(self.stored, rows.view(self.stored.dtype), scales, self.dtype)
        self.sink.put(values.view(torch.uint8), self.num_rows)
        self.num_rows += len(rows)

    def finish(self) -> None:
        self.scales.free()
        if self.global_scales is not None:
            self.global_scales.free()
        self.sink.finish()


class KeepCodes(Sink):
    """Writes codes and scales of compressed-tensors, or of MXFP4, to a layer that has them in the same format.

    Args:
        layer: gets them.
        rows: where this rank's rows lie.
        scales: has their scales, which come before them.
        global_scales: has by what the scales of nvfp4 are divided; None of other formats.
        finite: looks at what may stand for NaN: codes of FP8, exponents of mxfp4, and the scales of nvfp4.
    """

    def __init__(
        self,
        layer: QuantizedLayer,
        rows: Sequence[Span],
        scales: HoldScales,
        global_scales: HoldGlobalScales | None,
        finite: FiniteCheck,
    ) -> None:
        self.layer = layer
        self.format = layer.format
        self.stored = [span.stored for span in rows]
        self.scales = scales
        self.global_scales = global_scales
        self.finite = finite
        self.codes = local_tensor(layer.codes)
        self.own_scales = local_tensor(layer.scales)

    def put(self, rows: Tensor, first_row: int) -> None:
        codes = rows.view(torch.uint8).view(-1, self.stored[0].row_bytes)
        if self.format.is_4bit:
            codes = (codes << 4) | (codes >> 4)  # the first of two codes is in the low half there
        else:
            self.finite.note(self.stored, torch.bfloat16, codes.view(torch.float8_e4m3fn).bfloat16())
        some = slice(first_row, first_row + len(codes))
        scales = self.scales.of(first_row, len(codes))
        if scales.dtype == torch.uint8:
            scales = scale_values(scales).bfloat16()
            self.finite.note(self.stored, torch.bfloat16, scales)
        if self.global_scales is not None:
            whole = self.global_scales.of(first_row, len(codes))
            self.finite.note(self.stored, torch.float32, scales.float() / whole)
            _write(local_tensor(self.layer.global_scales)[some], whole.flatten())
        _write(self.codes[some], self.format.pack(codes))
        _write(self.own_scales[some], self.format.pack_scales(scales))

    def finish(self) -> None:
        self.scales.free()
        if self.global_scales is not None:
            self.global_scales.free()


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
        self.scales: list[Tensor] = []

    def put(self, rows: Tensor, first_row: int) -> None:
        codes, scales = self.layer.format.quantize_rows(rows.view(self.source_dtype).to(self.dtype))
        _write(self.codes[first_row : first_row + len(codes)], codes)
        self.scales.append(scales)

    def finish(self) -> None:
        layer = self.layer
        format = layer.format
        if not format.double_quant:
            target = local_tensor(layer.scales)
            if self.scales:
                _write(target, torch.cat(self.scales))
            self.scales = []
            return
        none = torch.empty(0, layer.in_features // format.blocksize, device=self.device)
        absmax = torch.cat([none, *self.scales])
        self.scales = []
        # Double quantization subtracts the mean of all scales, and quantizes them in groups of 256 that may span ranks.
        # So the scales of all ranks are gathered, every rank quantizes all of them, and keeps its own rows.
        group = shard_group(layer.codes)
        scales, nested_scales = format.quantize_scales(gather_rows(absmax, layer.out_features, group))
        for param, whole in ((layer.scales, scales), (layer.nested_scales, nested_scales)):
            first, last = local_rows(param)
            _write(local_tensor(param), whole[first:last])


class QuantizeWhole(Sink):
    """Casts rows to `dtype`, and quantizes them once all are there, by the largest magnitude of all ranks' rows.

    Until then the device holds this rank's rows of the one weight. Files are read once so, and the ranks tell one
    another one number.
    """

    def __init__(
        self, layer: QuantizedLayer, device: torch.device, source_dtype: torch.dtype, dtype: torch.dtype
    ) -> None:
        self.layer = layer
        self.device = device
        self.source_dtype = source_dtype
        self.dtype = dtype
        self.held: Tensor | None = None
        self.largest: list[Tensor] = []  # magnitudes, one of each piece

    def put(self, rows: Tensor, first_row: int) -> None:
        values = rows.view(self.source_dtype)
        if self.held is None:
            num_rows = len(local_tensor(self.layer.codes))
            self.held = torch.empty(num_rows, self.layer.in_features, dtype=self.dtype, device=self.device)
        some = self.held[first_row : first_row + len(values)]
        some.copy_(values)
        self.largest.append(torch.stack(torch.aminmax(some)).abs().amax().float())

    def finish(self) -> None:
        layer = self.layer
        none = torch.zeros((), device=self.device)
        largest = find_largest(torch.stack([none, *self.largest]).amax(0, keepdim=True), shard_group(layer.codes))
        global_scale = find_global_scale(largest)
        codes_of_rank = local_tensor(layer.codes)
        scales_of_rank = local_tensor(layer.scales)
        local_tensor(layer.global_scales).copy_(global_scale.expand(len(codes_of_rank)))
        held = self.held
        self.held = None
        self.largest = []
        if held is None:
            return
        step = max(1, VALUES_A_TIME // layer.in_features)  # so that the codes of all rows are not there twice
        for start in range(0, len(held), step):
            codes, scales = layer.format.quantize_rows(held[start : start + step], global_scale)
            _write(codes_of_rank[start : start + step], codes)
            _write(scales_of_rank[start : start + step], scales)


def _write(target: Tensor, source: Tensor) -> None:
    """Copy raw bytes between any two devices, never converting the dtype."""
    assert target.shape == source.shape and target.dtype == source.dtype
    if target.numel():
        target.view(torch.uint8).copy_(source.contiguous().view(torch.uint8))
