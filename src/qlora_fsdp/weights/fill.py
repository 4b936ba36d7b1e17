"""Fill a sharded model: each rank reads its own rows, quantizes them where they will live, and writes its shard.

Three kinds of source tensors: full precision (cast to the model's dtype, then quantized where the layer is quantized),
already quantized by bitsandbytes (bytes are taken as they are), and made up (`model.weights=random`).
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from qlora_fsdp.layers import QuantizedLayer
from qlora_fsdp.runtime.rows import gather_rows, local_rows, local_tensor, shard_group
from qlora_fsdp.weights.row_reader import Request, run_requests
from qlora_fsdp.weights.safetensors_files import StoredTensor

RANDOM_ROWS = 256  # rows that share a random generator
Progress = Callable[[int], None]  # called with the bytes read


def ignore_progress(num_bytes: int) -> None:
    """For who shows none."""


@dataclass(frozen=True)
class Assignment:
    """One weight of the model and where it comes from.

    Attributes:
        name: its name in the model, e.g. `model.layers.0.self_attn.q_proj.weight`.
        module: the module that holds it; for `weight` of a `QuantizedLayer` its parts are filled.
        attribute: the parameter's (or buffer's) name in the module.
        stored: the checkpoint's tensor, in full precision or int8/packed codes; None for random weights.
        stored_parts: of a weight already quantized: tensor of each part (`scales`, `nested_scales`).
        nested_offset: of a weight already double-quantized: the mean taken off its scales.
        copies: keys under which the files hold it again, of a tied table; these are not read.
    """

    name: str
    module: nn.Module
    attribute: str
    stored: StoredTensor | None = None
    stored_parts: dict[str, StoredTensor] = field(default_factory=dict)
    nested_offset: float | None = None
    copies: tuple[str, ...] = ()

    @property
    def parameter(self) -> Tensor:
        """The tensor whose rows decide what this rank reads."""
        attribute = "codes" if self.is_quantized else self.attribute
        parameter = self.module._parameters.get(attribute)
        value = self.module._buffers[attribute] if parameter is None else parameter
        assert value is not None
        return value

    @property
    def is_quantized(self) -> bool:
        return isinstance(self.module, QuantizedLayer) and self.attribute == "weight"

    def num_bytes(self, dtype: torch.dtype) -> int:
        """Bytes to read for the whole weight; of a made-up one, what it would take in `dtype`."""
        if self.stored is None:
            return self.num_elements * dtype.itemsize
        return self.stored.num_bytes + sum(part.num_bytes for part in self.stored_parts.values())

    @property
    def num_elements(self) -> int:
        if self.is_quantized:
            assert isinstance(self.module, QuantizedLayer)
            return self.module.out_features * self.module.in_features
        return self.parameter.numel()


def fill(
    assignments: Sequence[Assignment],
    device: torch.device,
    dtype: torch.dtype,
    std: float,
    seed: int,
    on_progress: Progress = ignore_progress,
) -> None:
    """Fill every assignment's shard: from the checkpoint's files, or randomly where they have nothing (a new head).

    Arguments as of `fill_from_files` and `fill_randomly`.
    """
    fill_randomly([a for a in assignments if a.stored is None], device, dtype, std, seed, on_progress)
    fill_from_files([a for a in assignments if a.stored is not None], device, dtype, on_progress)


def fill_from_files(
    assignments: Sequence[Assignment],
    device: torch.device,
    dtype: torch.dtype,
    on_progress: Progress = ignore_progress,
) -> None:
    """Fill every assignment's shard from the checkpoint's files.

    Args:
        assignments: in the same order on every rank.
        device: where weights are quantized; the collectives of double quantization run there.
        dtype: the model's dtype, to which full-precision weights are cast before they are quantized, as
            `from_pretrained(dtype=...)` does.
        on_progress: called with the bytes read.
    """
    requests: list[Request] = []
    for assignment in assignments:
        if assignment.stored_parts:
            requests.extend(_prequantized_requests(assignment))
        elif assignment.is_quantized:
            requests.append(_quantize_request(assignment, device, dtype))
        else:
            requests.append(_plain_request(assignment))
    run_requests(requests, device, on_progress)


def fill_randomly(
    assignments: Sequence[Assignment],
    device: torch.device,
    dtype: torch.dtype,
    std: float,
    seed: int,
    on_progress: Progress = ignore_progress,
) -> None:
    """Fill every shard with random weights, the same for a seed whatever the number of ranks.

    Matrices are normal with deviation `std`; vectors are ones (norms) or, for biases, zeros.
    """
    for assignment in assignments:
        first, last = local_rows(assignment.parameter)
        if assignment.is_quantized:
            layer = assignment.module
            assert isinstance(layer, QuantizedLayer)
            sink = _Quantizer(layer, device)
            for start, rows in _random_rows(assignment.name, first, last, layer.in_features, std, seed, device, dtype):
                sink.put(rows, start - first)
            sink.finish()
        else:
            target = local_tensor(assignment.parameter)
            if target.ndim < 2:
                target.fill_(0.0 if assignment.attribute == "bias" else 1.0)
            else:
                width = target[0].numel() if len(target) else 0
                for start, rows in _random_rows(assignment.name, first, last, width, std, seed, device, dtype):
                    target[start - first : start - first + len(rows)].copy_(rows.view(-1, *target.shape[1:]))
        on_progress(
            (last - first) * (assignment.num_elements // max(1, assignment.parameter.shape[0])) * dtype.itemsize
        )


def _random_rows(
    name: str, first: int, last: int, width: int, std: float, seed: int, device: torch.device, dtype: torch.dtype
) -> Iterator[tuple[int, Tensor]]:
    """Rows [first, last) of a random matrix, in pieces: index of the piece's first row, and `dtype` [rows, width]."""
    for block in range(first // RANDOM_ROWS, -(last // -RANDOM_ROWS)):
        generator = torch.Generator(device).manual_seed(zlib.crc32(f"{seed}/{name}/{block}".encode()))
        rows = torch.empty(RANDOM_ROWS, width, dtype=dtype, device=device).normal_(0.0, std, generator=generator)
        begin, end = max(first, block * RANDOM_ROWS), min(last, (block + 1) * RANDOM_ROWS)
        yield begin, rows[begin - block * RANDOM_ROWS : end - block * RANDOM_ROWS]


class _Quantizer:
    """Takes a layer's rows as they come, in full precision, and fills its parts."""

    def __init__(self, layer: QuantizedLayer, device: torch.device) -> None:
        self.layer, self.device = layer, device
        self.codes = local_tensor(layer.codes)
        self.absmax: list[Tensor] = []

    def put(self, weight: Tensor, row: int) -> None:
        codes, absmax = self.layer.format.quantize_rows(weight)
        _write(self.codes[row : row + len(codes)], codes)
        self.absmax.append(absmax)

    def finish(self) -> None:
        layer, format = self.layer, self.layer.format
        shape = (0, layer.in_features // format.blocksize) if format.is_4bit else (0,)
        absmax = torch.cat([torch.empty(shape, device=self.device), *self.absmax])
        self.absmax = []
        if not format.double_quant:
            _write(local_tensor(layer.scales), absmax)
            return
        # The mean and the groups of 256 run over all rows: every rank computes them from the same gathered scales.
        group = shard_group(layer.codes)
        scales, nested_scales = format.quantize_scales(gather_rows(absmax, layer.out_features, group))
        for param, whole in ((layer.scales, scales), (layer.nested_scales, nested_scales)):
            first, last = local_rows(param)
            _write(local_tensor(param), whole[first:last])


def _quantize_request(assignment: Assignment, device: torch.device, dtype: torch.dtype) -> Request:
    layer, stored = assignment.module, assignment.stored
    assert isinstance(layer, QuantizedLayer) and stored is not None
    sink: list[_Quantizer] = []  # made at the first piece, so that few layers hold buffers at a time

    def quantizer() -> _Quantizer:
        if not sink:
            sink.append(_Quantizer(layer, device))
        return sink[0]

    def finish() -> None:
        quantizer().finish()
        sink.clear()

    return Request(
        stored,
        layer.in_features * stored.dtype.itemsize,
        *local_rows(assignment.parameter),
        put=lambda rows, row: quantizer().put(rows.view(stored.dtype).to(dtype), row),
        finish=finish,
    )


def _plain_request(assignment: Assignment) -> Request:
    stored, param = assignment.stored, assignment.parameter
    assert stored is not None
    if param.ndim == 0:
        return Request(stored, stored.num_bytes, 0, 1, put=lambda rows, _: _fill_scalar(param, rows, stored.dtype))
    target = local_tensor(param)

    def put(rows: Tensor, row: int) -> None:
        values = rows.view(stored.dtype).view(-1, *target.shape[1:])
        target[row : row + len(values)].copy_(values)

    return Request(stored, stored.num_bytes // max(1, stored.shape[0]), *local_rows(param), put=put)


def _fill_scalar(param: Tensor, rows: Tensor, dtype: torch.dtype) -> None:
    local_tensor(param).copy_(rows.flatten().view(dtype)[0])


def _prequantized_requests(assignment: Assignment) -> list[Request]:
    """Requests for codes and scales that are already bitsandbytes' own: flat there, rows here."""
    layer = assignment.module
    assert isinstance(layer, QuantizedLayer) and assignment.stored is not None
    format = layer.format
    num_blocks = layer.in_features // format.blocksize
    code_bytes = layer.in_features // 2 if format.is_4bit else layer.in_features
    rows = local_rows(assignment.parameter)
    codes, scales = local_tensor(layer.codes), local_tensor(layer.scales)

    def put_packed(target: Tensor) -> Callable[[Tensor, int], None]:
        return lambda piece, row: _write(target[row : row + len(piece)], format.pack(piece))

    def put_floats(target: Tensor) -> Callable[[Tensor, int], None]:
        def put(piece: Tensor, row: int) -> None:
            values = piece.view(torch.float32).view(-1, *target.shape[1:])
            target[row : row + len(values)].copy_(values)

        return put

    requests = [Request(assignment.stored, code_bytes, *rows, put=put_packed(codes))]
    stored_scales = assignment.stored_parts["scales"]
    if format.double_quant:
        requests.append(Request(stored_scales, num_blocks, *rows, put=put_packed(scales)))
        first, last = local_rows(layer.nested_scales)
        nested = local_tensor(layer.nested_scales)
        num_groups = layer.nested_scales.shape[0] - 1
        if last == num_groups + 1 and last > first:  # the last element is the offset, which is not in the file
            assert assignment.nested_offset is not None
            nested[-1] = assignment.nested_offset
        stored_nested = assignment.stored_parts["nested_scales"]
        requests.append(Request(stored_nested, 4, first, max(first, min(last, num_groups)), put=put_floats(nested)))
    else:
        row_bytes = 4 * (num_blocks if format.is_4bit else 1)
        requests.append(Request(stored_scales, row_bytes, *rows, put=put_floats(scales)))
    return requests


def _write(target: Tensor, source: Tensor) -> None:
    """Copy bytes, on any pair of devices; never through another dtype."""
    assert target.shape == source.shape and target.dtype == source.dtype
    if target.numel():
        target.view(torch.uint8).copy_(source.contiguous().view(torch.uint8))
