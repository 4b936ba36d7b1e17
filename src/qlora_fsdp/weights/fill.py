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
from qlora_fsdp.weights.finite import FiniteCheck
from qlora_fsdp.weights.row_reader import Request, Sink, run_requests

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
        first, last = local_rows(assignment.parameter)
        # Counted from the weight, because a quantized parameter has rows of packed codes.
        row_elements = assignment.num_elements // max(1, assignment.parameter.shape[0])
        if assignment.parameter.ndim < 2:
            local_tensor(assignment.parameter).fill_(0.0 if assignment.attribute == "bias" else 1.0)
        else:
            sink = _make_sink(assignment, device, dtype, dtype)
            for start, rows in _random_rows(assignment.name, first, last, row_elements, std, seed, device, dtype):
                sink.put(rows, start - first)
            sink.finish()
        on_progress((last - first) * row_elements * dtype.itemsize)


def _random_rows(
    name: str, first: int, last: int, width: int, std: float, seed: int, device: torch.device, dtype: torch.dtype
) -> Iterator[tuple[int, Tensor]]:
    """Rows [first, last) of a random matrix, in pieces: index of the piece's first row, and `dtype` [rows, width]."""
    for block in range(first // RANDOM_ROWS, math.ceil(last / RANDOM_ROWS)):
        generator = torch.Generator(device).manual_seed(zlib.crc32(f"{seed}/{name}/{block}".encode()))
        rows = torch.empty(RANDOM_ROWS, width, dtype=dtype, device=device).normal_(0.0, std, generator=generator)
        begin, end = max(first, block * RANDOM_ROWS), min(last, (block + 1) * RANDOM_ROWS)
        yield begin, rows[begin - block * RANDOM_ROWS : end - block * RANDOM_ROWS]


def _full_precision_request(
    assignment: Assignment, device: torch.device, dtype: torch.dtype, finite: FiniteCheck
) -> Request:
    stored, param = assignment.stored, assignment.parameter
    assert stored is not None
    cast_to = assignment.layer.format.source_dtype(dtype) if assignment.is_quantized else param.dtype
    sink = finite.watch(_make_sink(assignment, device, stored.dtype, dtype), stored, cast_to)
    if param.ndim == 0:
        return Request(stored, stored.num_bytes, 0, 1, sink)
    row_elements = assignment.num_elements // max(1, param.shape[0])
    return Request(stored, row_elements * stored.dtype.itemsize, *local_rows(param), sink)


def _make_sink(assignment: Assignment, device: torch.device, source_dtype: torch.dtype, dtype: torch.dtype) -> Sink:
    """Make the sink for a weight whose rows arrive in `source_dtype`."""
    if assignment.is_quantized:
        return _Quantize(assignment.layer, device, source_dtype, dtype)
    return _Copy(local_tensor(assignment.parameter), source_dtype)


def _prequantized_requests(assignment: Assignment, finite: FiniteCheck) -> list[Request]:
    """Requests for codes and scales made by bitsandbytes.

    The files store them as flat tensors; here they are read as rows.
    """

    def copy(name: str, target: Tensor) -> Sink:
        return finite.watch(_Copy(target, torch.float32), stored_parts[name], torch.float32)

    layer, format, stored_parts = assignment.layer, assignment.layer.format, assignment.stored_parts
    assert assignment.stored is not None
    num_blocks = layer.in_features // format.blocksize
    code_bytes = layer.in_features // 2 if format.is_4bit else layer.in_features
    row_range, scales = local_rows(assignment.parameter), local_tensor(layer.scales)
    requests = [Request(assignment.stored, code_bytes, *row_range, _Pack(local_tensor(layer.codes), format))]
    if not format.double_quant:
        row_bytes = 4 * (num_blocks if format.is_4bit else 1)
        return [*requests, Request(stored_parts["scales"], row_bytes, *row_range, copy("scales", scales))]
    requests.append(Request(stored_parts["scales"], num_blocks, *row_range, _Pack(scales, format)))
    # Our nested_scales have one element more than the tensor in the files: the mean of the scales, which bitsandbytes
    # stores apart (`nested_offset`), comes last.
    first, last = local_rows(layer.nested_scales)
    nested = local_tensor(layer.nested_scales)
    num_groups = layer.nested_scales.shape[0] - 1
    if last == num_groups + 1 and last > first:
        assert assignment.nested_offset is not None
        nested[-1] = assignment.nested_offset
    last = max(first, min(last, num_groups))
    requests.append(Request(stored_parts["nested_scales"], 4, first, last, copy("nested_scales", nested)))
    return requests


class _Copy(Sink):
    """Casts rows of `source_dtype` to the dtype of `target` and copies them.

    `target` is this rank's rows of a parameter.
    """

    def __init__(self, target: Tensor, source_dtype: torch.dtype) -> None:
        self.target = target if target.ndim else target.view(1)
        self.source_dtype = source_dtype

    def put(self, rows: Tensor, first_row: int) -> None:
        values = rows.view(self.source_dtype).view(-1, *self.target.shape[1:])
        self.target[first_row : first_row + len(values)].copy_(values)


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
