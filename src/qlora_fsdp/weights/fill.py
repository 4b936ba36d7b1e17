"""Fill a sharded model: each rank reads its own rows, quantizes them on its device, and writes them to its shard.

What to fill is a list of `Assignment`s, one for each weight of the model. An assignment names the module and parameter
that hold the weight, and the tensors in the files that the weight is made of; weights/assign.py has found them. A
weight comes from one of three sources:

- Tensors in full precision. They are cast to the model's dtype, and quantized if their layer is. Tensors in FP8 or
  MXFP4 are dequantized first.
- Codes and scales that bitsandbytes or compressed-tensors has made. Their bytes are taken as they are.
- No file (`model.weights=random`, or a new classification head). A matrix gets random numbers, a norm ones, and a bias
  zeros.

For a weight from files, this module makes `RowRequest`s: which rows this rank needs, and the sink that takes them.
row_reader.py reads the rows, and the sinks (sinks.py) cast, quantize and write them to the shard.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from qlora_fsdp.runtime.rows import local_rows, local_tensor
from qlora_fsdp.weights.composed import Assignment, StoredRows, as_composed
from qlora_fsdp.weights.observe import NO_OBSERVERS, Observe, Observers
from qlora_fsdp.weights.row_reader import FiniteCheck, RowRequest, Sink, Span, run_requests
from qlora_fsdp.weights.safetensors_files import StoredTensor
from qlora_fsdp.weights.scaled import ScaledTensor
from qlora_fsdp.weights.sinks import (
    Copy,
    Dequantize,
    HoldGlobalScales,
    HoldScales,
    KeepCodes,
    Pack,
    Quantize,
    QuantizeWhole,
    Transpose,
)

# Random rows are drawn in blocks of this many, each with a seed of its own. So a rank can begin at any block, and the
# values do not depend on the number of ranks.
RANDOM_ROWS = 256
Progress = Callable[[int], None]  # called with the bytes read


def _ignore_progress(num_bytes: int) -> None:
    """A `Progress` that shows nothing."""


def fill_shards(
    assignments: Sequence[Assignment],
    device: torch.device,
    dtype: torch.dtype,
    std: float,
    seed: int,
    on_progress: Progress = _ignore_progress,
    observers: Observers = NO_OBSERVERS,
) -> None:
    """Fill every assignment's shard: from the model files, or randomly if the files have no tensor for it.

    Random weights are the same for a seed, whatever the number of ranks.

    Args:
        assignments: in the same order on every rank.
        device: where weights are quantized, or drawn.
        dtype: the model's dtype.
        std: standard deviation of random matrices.
        seed: seed of random matrices.
        on_progress: called with the bytes read or drawn.
        observers: told of weights that are quantized, by the layers that get them.

    Raises:
        CheckpointError: as `fill_from_files` does.
    """
    _fill_randomly([a for a in assignments if a.stored is None], device, dtype, std, seed, on_progress, observers)
    fill_from_files([a for a in assignments if a.stored is not None], device, dtype, on_progress, observers)


def fill_from_files(
    assignments: Sequence[Assignment],
    device: torch.device,
    dtype: torch.dtype,
    on_progress: Progress = _ignore_progress,
    observers: Observers = NO_OBSERVERS,
) -> None:
    """Fill every assignment's shard from the model files.

    Args:
        assignments: in the same order on every rank.
        device: where weights are quantized. Double quantization also gathers the scales of all ranks there.
        dtype: the model's dtype, to which full-precision weights are cast before they are quantized, as
            `from_pretrained(dtype=...)` does.
        on_progress: called with the bytes read.
        observers: told of weights that are quantized, by the layers that get them.

    Raises:
        CheckpointError: a file can't be read, or this rank's rows have NaN or infinite values.
    """
    requests: list[RowRequest] = []
    finite = FiniteCheck()
    for assignment in assignments:
        if assignment.stored_parts:
            requests.extend(_prequantized_requests(assignment, finite))
        elif assignment.keeps_codes:
            requests.extend(_kept_requests(assignment, finite))
        else:
            requests.extend(_requests(assignment, device, dtype, finite, observers))
    run_requests(requests, device, on_progress)
    finite.finish()


def _fill_randomly(
    assignments: Sequence[Assignment],
    device: torch.device,
    dtype: torch.dtype,
    std: float,
    seed: int,
    on_progress: Progress,
    observers: Observers,
) -> None:
    """Fill matrices with normally distributed numbers, the vectors of norms with ones, and biases with zeros."""
    for assignment in assignments:
        if assignment.parameter.ndim <= 1:
            vector = local_tensor(assignment.parameter)
            vector.fill_(0.0 if assignment.attribute == "bias" else 1.0)
            on_progress(vector.numel() * dtype.itemsize)
            continue
        # A quantized layer's parameter holds packed codes, so the width is that of the weight itself.
        width = assignment.layer.in_features if assignment.is_quantized else assignment.parameter.shape[-1]
        first, last = _local_rows_of(assignment.parameter, width, assignment.num_elements)
        sink = _make_sink(assignment, device, dtype, dtype, width, observers)
        for start, rows in _random_rows(assignment.name, first, last, width, std, seed, device, dtype):
            sink.put(rows, start - first)
        sink.finish()
        on_progress((last - first) * width * dtype.itemsize)


def _random_rows(
    name: str, first: int, last: int, width: int, std: float, seed: int, device: torch.device, dtype: torch.dtype
) -> Iterator[tuple[int, Tensor]]:
    """Rows [first, last) of a random matrix, in pieces: index of the piece's first row, and `dtype` [rows, width]."""
    for block in range(first // RANDOM_ROWS, math.ceil(last / RANDOM_ROWS)):
        generator = torch.Generator(device).manual_seed(zlib.crc32(f"{seed}/{name}/{block}".encode()))
        rows = torch.empty(RANDOM_ROWS, width, dtype=dtype, device=device).normal_(0.0, std, generator=generator)
        start = block * RANDOM_ROWS
        begin = max(first, start)
        end = min(last, start + RANDOM_ROWS)
        if begin < end:  # a rank may have no rows
            yield begin, rows[begin - start : end - start]


def _local_rows_of(param: Tensor, row_elements: int, num_elements: int) -> tuple[int, int]:
    """Which rows of a weight this rank holds, as [first, last).

    FSDP splits dim 0 of `param`. One index of dim 0 has one row of a matrix, but many rows of a weight with more
    dimensions, such as the experts' [experts, rows, columns].
    """
    if param.ndim == 0:
        return 0, 1
    rows_per_index = num_elements // row_elements // max(1, param.shape[0])
    first, last = local_rows(param)
    return first * rows_per_index, last * rows_per_index


def _requests(
    assignment: Assignment, device: torch.device, dtype: torch.dtype, finite: FiniteCheck, observers: Observers
) -> list[RowRequest]:
    """Requests for this rank's rows of a weight that bitsandbytes has not quantized.

    A weight that is scaled by blocks in the files has two requests or three. The first read its scales, so that they
    are at hand when the last reads its rows, which are dequantized with them.
    """
    assert assignment.stored is not None
    stored = as_composed(assignment.stored)
    param = assignment.parameter
    example = stored.pieces[0].stored  # all pieces have one dtype, and either all have scales or none
    own_dtype = dtype if assignment.is_quantized else param.dtype
    # The sink gets values of the first dtype, and casts them to the second. A value that the cast makes infinite is
    # reported too.
    arriving = own_dtype if isinstance(example, ScaledTensor) else stored.dtype
    cast_to = assignment.layer.format.source_dtype(dtype) if assignment.is_quantized else param.dtype
    row_elements = stored.shape[-1] if stored.is_transposed else stored.row_elements
    first, last = _local_rows_of(param, row_elements, assignment.num_elements)
    sink = _make_sink(assignment, device, arriving, dtype, row_elements, observers)
    height = 1
    pieces: Sequence[StoredRows] = stored.pieces
    if stored.is_transposed:
        # A row of the model's matrix is a column of the stored one, [height, width], and has an element in each of its
        # rows. So every matrix of which this rank holds a row is read whole: from here on it counts as a single row.
        height = stored.shape[-1]
        width = stored.row_elements
        begin = first // width
        end = -(last // -width)
        sink = Transpose(sink, arriving, (height, width), first - begin * width, last - first)
        pieces = [StoredRows(p.stored, p.first_row // height, p.num_rows // height) for p in pieces]
        first, last = begin, max(begin, end)
    spans = _find_spans(pieces, first, last)
    rows = [Span(span.stored, span.first_row * height, span.last_row * height) for span in spans]
    if not isinstance(example, ScaledTensor):
        sink = finite.watch(sink, spans, arriving, cast_to)
        return [RowRequest(spans, example.row_bytes * height, sink)]
    scales = HoldScales(example.scales.dtype, rows)
    scale_bytes = example.scales_per_row * example.scales.dtype.itemsize
    requests = [RowRequest([_scales_of(span) for span in rows], scale_bytes, scales)]
    global_scales = _hold_global_scales(example, rows, requests)
    values = Dequantize(finite.watch(sink, rows, arriving, cast_to), example, scales, global_scales, arriving)
    return [*requests, RowRequest(spans, example.row_bytes * height, values)]


def _kept_requests(assignment: Assignment, finite: FiniteCheck) -> list[RowRequest]:
    """Requests for this rank's rows of codes and scales that are in the files as the layer has them.

    Scales come first, as in `_requests`.
    """
    assert assignment.stored is not None
    stored = as_composed(assignment.stored)
    example = stored.pieces[0].stored
    assert isinstance(example, ScaledTensor)
    first, last = _local_rows_of(assignment.parameter, stored.row_elements, assignment.num_elements)
    rows = _find_spans(stored.pieces, first, last)
    scale_dtype = example.scales.dtype
    scale_spans = [_scales_of(span) for span in rows]
    scales = HoldScales(scale_dtype, rows)
    watched: Sink = scales
    if scale_dtype.itemsize > 1:  # others are looked at with what they mean
        watched = finite.watch(scales, scale_spans, scale_dtype, scale_dtype)
    requests = [RowRequest(scale_spans, example.scales_per_row * scale_dtype.itemsize, watched)]
    global_scales = _hold_global_scales(example, rows, requests)
    codes = KeepCodes(assignment.layer, rows, scales, global_scales, finite)
    return [*requests, RowRequest(rows, example.row_bytes, codes)]


def _hold_global_scales(
    example: ScaledTensor, rows: Sequence[Span], requests: list[RowRequest]
) -> HoldGlobalScales | None:
    """A sink that gets the global scales of this rank's rows, by a request that is added; None if they have none.

    Args:
        example: one of the tensors that the rows lie in.
        rows: where they lie.
        requests: those before.
    """
    if example.global_scale is None:
        return None
    spans: list[Span] = []
    for span in rows:
        assert isinstance(span.stored, ScaledTensor)
        assert span.stored.global_scale is not None
        spans.append(Span(span.stored.global_scale, 0, 1))
    sink = HoldGlobalScales(example.global_scale.dtype, rows)
    requests.append(RowRequest(spans, example.global_scale.dtype.itemsize, sink))
    return sink


def _scales_of(span: Span) -> Span:
    """The rows of the tensor of scales that belong to consecutive rows of a scaled tensor."""
    assert isinstance(span.stored, ScaledTensor)
    begin = span.stored.scale_rows(span.first_row, span.first_row + 1)
    end = span.stored.scale_rows(span.last_row - 1, span.last_row)
    return Span(span.stored.scales, int(begin), int(end) + 1)


def _find_spans(pieces: Sequence[StoredRows], first: int, last: int) -> list[Span]:
    """Where rows [first, last) of a tensor lie in the files. The tensor is made of pieces, one below the other."""
    spans: list[Span] = []
    start = 0
    for piece in pieces:
        begin = max(first, start)
        end = min(last, start + piece.num_rows)
        if begin < end:
            shift = piece.first_row - start
            spans.append(Span(piece.stored, begin + shift, end + shift))
        start += piece.num_rows
    return spans


def _make_sink(
    assignment: Assignment,
    device: torch.device,
    source_dtype: torch.dtype,
    dtype: torch.dtype,
    row_elements: int,
    observers: Observers,
) -> Sink:
    """The sink that writes a weight to this rank's shard. Its rows of `row_elements` arrive in `source_dtype`."""
    if assignment.is_quantized:
        kind = QuantizeWhole if assignment.layer.format.has_global_scale else Quantize
        sink = kind(assignment.layer, device, source_dtype, dtype)
        observer = observers.get(assignment.layer)
        if observer is None:
            return sink
        return Observe(sink, observer, row_elements, device, source_dtype)
    return Copy(local_tensor(assignment.parameter).view(-1, row_elements), source_dtype)


def _prequantized_requests(assignment: Assignment, finite: FiniteCheck) -> list[RowRequest]:
    """Requests for this rank's rows of codes and scales that bitsandbytes has made.

    The files store each of them as one flat tensor. A row of the weight is a fixed number of its bytes, so the reader
    can take it for a tensor with rows.
    """
    layer = assignment.layer
    format = layer.format
    stored_parts = assignment.stored_parts
    assert isinstance(assignment.stored, StoredTensor)

    def copy(name: str, row_bytes: int, row_range: tuple[int, int], target: Tensor) -> RowRequest:
        spans = [Span(stored_parts[name], *row_range)]
        return RowRequest(
            spans, row_bytes, finite.watch(Copy(target, torch.float32), spans, torch.float32, torch.float32)
        )

    num_blocks = layer.in_features // format.blocksize
    code_bytes = layer.in_features // 2 if format.is_4bit else layer.in_features
    row_range = local_rows(assignment.parameter)
    scales = local_tensor(layer.scales)
    codes = [Span(assignment.stored, *row_range)]
    requests = [RowRequest(codes, code_bytes, Pack(local_tensor(layer.codes), format))]
    if not format.double_quant:
        row_bytes = 4 * (num_blocks if format.is_4bit else 1)
        return [*requests, copy("scales", row_bytes, row_range, scales)]
    quantized_scales = [Span(stored_parts["scales"], *row_range)]
    requests.append(RowRequest(quantized_scales, num_blocks, Pack(scales, format)))
    # Our nested_scales have one element more than the tensor in the files. That last one is the mean of the scales,
    # which bitsandbytes stores in a tensor of its own (`nested_offset`). The rank that holds the end writes it.
    first, last = local_rows(layer.nested_scales)
    nested = local_tensor(layer.nested_scales)
    num_groups = layer.nested_scales.shape[0] - 1
    if last == num_groups + 1 and last > first:
        assert assignment.nested_offset is not None
        nested[-1] = assignment.nested_offset
    last = max(first, min(last, num_groups))
    return [*requests, copy("nested_scales", 4, (first, last), nested)]
