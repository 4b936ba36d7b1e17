"""Fill a sharded model: each rank reads its own rows, quantizes them on its device, and writes them to its shard.

An `Assignment` is one weight of the model: the module and parameter that hold it, and the tensors in the files that it
is made of. weights/assign.py has found these. A weight comes from one of three sources:

- a tensor in full precision, which is cast to the model's dtype and quantized where its layer is quantized;
- codes and scales that bitsandbytes has made, whose bytes are taken as they are;
- no file (`model.weights=random`, a new classification head): a matrix gets random numbers, a norm ones, a bias zeros.

Rows arrive in pieces, in order. A sink takes the pieces of one tensor (`put`) and is told when they are all there
(`finish`): `_Copy` copies them, `_Pack` packs bitsandbytes' codes, and `_Quantize` quantizes.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from qlora_fsdp.layers import Format, QuantizedLayer
from qlora_fsdp.runtime.rows import gather_rows, local_rows, local_tensor, shard_group
from qlora_fsdp.weights.assignment import Assignment
from qlora_fsdp.weights.composed import Piece, as_composed
from qlora_fsdp.weights.finite import FiniteCheck
from qlora_fsdp.weights.row_reader import Request, Sink, Span, run_requests
from qlora_fsdp.weights.safetensors_files import StoredTensor

# Rows that share a seed. A rank can begin at any of these blocks, so that values don't depend on the number of ranks.
RANDOM_ROWS = 256
Progress = Callable[[int], None]  # called with the bytes read


def ignore_progress(num_bytes: int) -> None:
    """A `Progress` that shows nothing."""


def fill(
    assignments: Sequence[Assignment],
    device: torch.device,
    dtype: torch.dtype,
    std: float,
    seed: int,
    on_progress: Progress = ignore_progress,
) -> None:
    """Fill every assignment's shard: from the model files, or randomly if the files have no tensor for it.

    The arguments are those of `fill_from_files` and `fill_randomly`.
    """
    fill_randomly([a for a in assignments if a.stored is None], device, dtype, std, seed, on_progress)
    fill_from_files([a for a in assignments if a.stored is not None], device, dtype, on_progress)


def fill_from_files(
    assignments: Sequence[Assignment],
    device: torch.device,
    dtype: torch.dtype,
    on_progress: Progress = ignore_progress,
) -> None:
    """Fill every assignment's shard from the model files.

    Args:
        assignments: in the same order on every rank.
        device: where weights are quantized. Double quantization also gathers the scales of all ranks there.
        dtype: the model's dtype, to which full-precision weights are cast before they are quantized, as
            `from_pretrained(dtype=...)` does.
        on_progress: called with the bytes read.

    Raises:
        CheckpointError: a file can't be read, or this rank's rows have NaN or infinite values.
    """
    requests: list[Request] = []
    finite = FiniteCheck()
    for assignment in assignments:
        if assignment.stored_parts:
            requests.extend(_prequantized_requests(assignment, finite))
        else:
            requests.append(_full_precision_request(assignment, device, dtype, finite))
    run_requests(requests, device, on_progress)
    finite.finish()


def fill_randomly(
    assignments: Sequence[Assignment],
    device: torch.device,
    dtype: torch.dtype,
    std: float,
    seed: int,
    on_progress: Progress = ignore_progress,
) -> None:
    """Fill every shard with random weights, which are the same for a seed whatever the number of ranks.

    Matrices are normal with the standard deviation `std`; vectors are ones (norms) or, for biases, zeros.
    """
    for assignment in assignments:
        # Counted from the weight, because a quantized parameter has rows of packed codes.
        is_matrix = assignment.parameter.ndim > 1
        width = assignment.layer.in_features if assignment.is_quantized else assignment.parameter.shape[-1]
        first, last = _local_rows_of(assignment.parameter, width if is_matrix else 1, assignment.num_elements)
        if not is_matrix:
            local_tensor(assignment.parameter).fill_(0.0 if assignment.attribute == "bias" else 1.0)
        else:
            sink = _make_sink(assignment, device, dtype, dtype, width)
            for start, rows in _random_rows(assignment.name, first, last, width, std, seed, device, dtype):
                sink.put(rows, start - first)
            sink.finish()
        on_progress((last - first) * (width if is_matrix else 1) * dtype.itemsize)


def _random_rows(
    name: str, first: int, last: int, width: int, std: float, seed: int, device: torch.device, dtype: torch.dtype
) -> Iterator[tuple[int, Tensor]]:
    """Rows [first, last) of a random matrix, in pieces: index of the piece's first row, and `dtype` [rows, width]."""
    for block in range(first // RANDOM_ROWS, math.ceil(last / RANDOM_ROWS)):
        generator = torch.Generator(device).manual_seed(zlib.crc32(f"{seed}/{name}/{block}".encode()))
        rows = torch.empty(RANDOM_ROWS, width, dtype=dtype, device=device).normal_(0.0, std, generator=generator)
        begin, end = max(first, block * RANDOM_ROWS), min(last, (block + 1) * RANDOM_ROWS)
        yield begin, rows[begin - block * RANDOM_ROWS : end - block * RANDOM_ROWS]


def _local_rows_of(param: Tensor, row_elements: int, num_elements: int) -> tuple[int, int]:
    """[first, last) of the rows of `row_elements` elements that this rank holds of a weight of `num_elements`."""
    if param.ndim == 0:
        return 0, 1
    per_index = num_elements // row_elements // max(1, param.shape[0])  # rows that lie at one index of dim 0
    first, last = local_rows(param)
    return first * per_index, last * per_index


def _full_precision_request(
    assignment: Assignment, device: torch.device, dtype: torch.dtype, finite: FiniteCheck
) -> Request:
    assert assignment.stored is not None
    stored, param = as_composed(assignment.stored), assignment.parameter
    cast_to = assignment.layer.format.source_dtype(dtype) if assignment.is_quantized else param.dtype
    row_elements = stored.shape[-1] if stored.is_transposed else stored.row_elements
    first, last = _local_rows_of(param, row_elements, assignment.num_elements)
    sink = _make_sink(assignment, device, stored.dtype, dtype, row_elements)
    row_bytes = stored.row_elements * stored.dtype.itemsize
    if stored.is_transposed:
        # Each matrix of which this rank has a row is read whole, as one row of bytes.
        height, width = stored.shape[-1], stored.row_elements
        begin, end = first // width, max(first // width, -(last // -width))
        matrices = [Piece(p.stored, p.first_row // height, p.num_rows // height) for p in stored.pieces]
        spans, row_bytes = find_spans(matrices, begin, end), row_bytes * height
        sink = _Transpose(sink, stored.dtype, (height, width), first - begin * width, last - first)
    else:
        spans = find_spans(stored.pieces, first, last)
    return Request(spans, row_bytes, finite.watch(sink, spans, cast_to))


def find_spans(pieces: Sequence[Piece], first: int, last: int) -> list[Span]:
    """Where the rows [first, last) of a tensor that is composed of pieces lie."""
    spans, start = [], 0
    for piece in pieces:
        begin, end = max(first, start), min(last, start + piece.num_rows)
        if begin < end:
            shift = piece.first_row - start
            spans.append(Span(piece.stored, begin + shift, end + shift))
        start += piece.num_rows
    return spans


def _make_sink(
    assignment: Assignment, device: torch.device, source_dtype: torch.dtype, dtype: torch.dtype, row_elements: int
) -> Sink:
    """Make the sink for a weight whose rows of `row_elements` elements arrive in `source_dtype`."""
    if assignment.is_quantized:
        return _Quantize(assignment.layer, device, source_dtype, dtype)
    return _Copy(local_tensor(assignment.parameter).view(-1, row_elements), source_dtype)


def _prequantized_requests(assignment: Assignment, finite: FiniteCheck) -> list[Request]:
    """Requests for codes and scales made by bitsandbytes.

    The files store them as flat tensors; here they are read as rows.
    """

    def copy(name: str, row_bytes: int, row_range: tuple[int, int], target: Tensor) -> Request:
        spans = [Span(stored_parts[name], *row_range)]
        return Request(spans, row_bytes, finite.watch(_Copy(target, torch.float32), spans, torch.float32))

    layer, format, stored_parts = assignment.layer, assignment.layer.format, assignment.stored_parts
    assert isinstance(assignment.stored, StoredTensor)
    num_blocks = layer.in_features // format.blocksize
    code_bytes = layer.in_features // 2 if format.is_4bit else layer.in_features
    row_range, scales = local_rows(assignment.parameter), local_tensor(layer.scales)
    codes = [Span(assignment.stored, *row_range)]
    requests = [Request(codes, code_bytes, _Pack(local_tensor(layer.codes), format))]
    if not format.double_quant:
        row_bytes = 4 * (num_blocks if format.is_4bit else 1)
        return [*requests, copy("scales", row_bytes, row_range, scales)]
    quantized_scales = [Span(stored_parts["scales"], *row_range)]
    requests.append(Request(quantized_scales, num_blocks, _Pack(scales, format)))
    # Our nested_scales have one element more than the tensor in the files: the mean of the scales, which bitsandbytes
    # stores apart (`nested_offset`), comes last.
    first, last = local_rows(layer.nested_scales)
    nested = local_tensor(layer.nested_scales)
    num_groups = layer.nested_scales.shape[0] - 1
    if last == num_groups + 1 and last > first:
        assert assignment.nested_offset is not None
        nested[-1] = assignment.nested_offset
    last = max(first, min(last, num_groups))
    return [*requests, copy("nested_scales", 4, (first, last), nested)]


class _Copy(Sink):
    """Casts rows of `source_dtype` to the dtype of `target` and copies them.

    `target` is this rank's rows of a parameter.
    """

    def __init__(self, target: Tensor, source_dtype: torch.dtype) -> None:
        self.target, self.source_dtype = target, source_dtype

    def put(self, rows: Tensor, first_row: int) -> None:
        values = rows.view(self.source_dtype).view(-1, *self.target.shape[1:])
        self.target[first_row : first_row + len(values)].copy_(values)


class _Transpose(Sink):
    """Takes whole matrices, a matrix a row, and hands on the rows of their transposes that this rank holds.

    Args:
        sink: takes the rows.
        dtype: of the matrices.
        shape: of a matrix as it comes: [height, width]. Its transpose has `width` rows.
        first_row: the first row wanted, counted from the first matrix of the request.
        num_rows: how many are wanted.
    """

    def __init__(self, sink: Sink, dtype: torch.dtype, shape: tuple[int, int], first_row: int, num_rows: int) -> None:
        self.sink, self.dtype, self.shape, self.first_row, self.num_rows = sink, dtype, shape, first_row, num_rows

    def put(self, rows: Tensor, first_row: int) -> None:
        height, width = self.shape
        turned = rows.view(self.dtype).view(-1, height, width).mT.reshape(-1, height)
        start = first_row * width - self.first_row  # of what came, counted from the first row wanted
        begin, end = max(0, -start), min(len(turned), self.num_rows - start)
        if begin < end:
            self.sink.put(turned[begin:end].view(torch.uint8), start + begin)

    def finish(self) -> None:
        self.sink.finish()


class _Pack(Sink):
    """Packs rows of bytes into the layer's storage dtype and writes them."""

    def __init__(self, target: Tensor, format: Format) -> None:
        self.target, self.format = target, format

    def put(self, rows: Tensor, first_row: int) -> None:
        _write(self.target[first_row : first_row + len(rows)], self.format.pack(rows))


class _Quantize(Sink):
    """Casts rows to `dtype`, quantizes them, and fills the layer's codes; its scales follow once all rows are there."""

    def __init__(
        self, layer: QuantizedLayer, device: torch.device, source_dtype: torch.dtype, dtype: torch.dtype
    ) -> None:
        self.layer, self.device, self.source_dtype, self.dtype = layer, device, source_dtype, dtype
        self.codes = local_tensor(layer.codes)
        self.absmax: list[Tensor] = []

    def put(self, rows: Tensor, first_row: int) -> None:
        codes, absmax = self.layer.format.quantize_rows(rows.view(self.source_dtype).to(self.dtype))
        _write(self.codes[first_row : first_row + len(codes)], codes)
        self.absmax.append(absmax)

    def finish(self) -> None:
        layer, format = self.layer, self.layer.format
        shape = (0, layer.in_features // format.blocksize) if format.is_4bit else (0,)
        absmax = torch.cat([torch.empty(shape, device=self.device), *self.absmax])
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
