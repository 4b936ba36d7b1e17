"""The formats in which `merge` writes linear layers as codes: bitsandbytes' and those of compressed-tensors.

A format takes consecutive rows of a weight at a time, so that no weight need be there as a whole, and makes the tensors
of the file of what it made of all of them. Its codes, scales and layouts are those of the package whose format it is.

    nf4, fp4   bitsandbytes, blocks of 64, double quantization; transformers loads them
    int4       compressed-tensors' pack-quantized: symmetric, groups of 32, 64 or 128 along a row
    fp8        float-quantized: float8_e4m3fn with a scale a row; inputs are rounded to fp8 token by token (W8A8)
    nvfp4      nvfp4-pack-quantized: E2M1 in groups of 16 with fp8 scales, and one scale of the whole weight (W4A16)
    mxfp4      mxfp4-pack-quantized: E2M1 in groups of 32 with powers of two as scales (W4A16)

vLLM and transformers load the last four (transformers with the package itself).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Literal, cast

import bitsandbytes.functional as bnb
import torch
from torch import Tensor
from transformers.utils.versions import require_version

from qlora_fsdp.common.sizes import BLOCKSIZE, GROUP_SIZES, NESTED_BLOCKSIZE
from qlora_fsdp.inference.rounding import round_to_points
from qlora_fsdp.layers.quantized.compressed import FP4_BOOK
from qlora_fsdp.layers.quantized.format import Format, code_book
from qlora_fsdp.runtime.hardware import dtype_name

FORMATS = ("nf4", "fp4", "int4", "fp8", "nvfp4", "mxfp4")
PACKAGE_NAME = "compressed-tensors"
PACKAGE_VERSION = "0.17"  # the first, as in pyproject.toml
# Of their mean size, what rounding to the nearest may change of weights that lie on the grid of a format already: that
# they were stored in 16 bits changes 0.2 %, and rounding to the finest of the formats, fp8, changes others by 2 %.
ON_GRID = 0.01
ON_STEPS = 0.05  # the same of a group's own steps, from whose points others are 0.1 (nvfp4) or 0.2 (int4) away
LARGEST_CODES = (8, 7, 6, 5)  # that a group of an integer grid of 4 bits may have
LARGEST_FP4 = (6, 4)  # the same of 4-bit floats: some quantizers leave groups the last point
SCALE_BITS = 16


@dataclass(frozen=True)
class Grid:
    """The grid of rows whose base lies on one.

    Attributes:
        base: the base's own rows, which lie on the grid of the format: float32 [n, in_features].
        drawn: float32 [n, in_features] in [0, 1), by which sums are rounded at random; None: they are to the nearest.
    """

    base: Tensor
    drawn: Tensor | None


class WeightFormat(ABC):
    """How a merge writes the weights of linear layers.

    Attributes:
        name: as the setting `quantize` has it.
        group_size: consecutive weights of a row that share a scale; None where a whole row does.
        bits: that a weight takes, with its share of the scales.
        has_experts: whether it is also for experts of which the files have a matrix each.
        has_whole_scale: whether a scale belongs to the whole weight, which layers share that a server joins.
        decompresses: whether transformers needs the memory of the whole model in full precision to compute with it.
        computes_in: the only dtype in which transformers computes with it; None: in any.
    """

    name: str
    group_size: int | None
    bits: float
    has_experts: bool
    has_whole_scale: bool
    decompresses: bool
    computes_in: torch.dtype | None = None

    def fits(self, in_features: int) -> bool:
        """Whether rows of this length are whole groups."""
        return self.group_size is None or in_features % self.group_size == 0

    def fix_for(self, in_features: int) -> str | None:
        """The setting with which rows would be whole groups that are none now; None if there is none."""
        return None

    @abstractmethod
    def encode(
        self, rows: Tensor, scale_dtype: torch.dtype, largest: Tensor | None, grid: Grid | None
    ) -> dict[str, Tensor]:
        """Codes and scales of some rows of a weight.

        Args:
            rows: [n, in_features] of any float dtype, on any device.
            scale_dtype: in which scales are stored, for formats that leave it open.
            largest: the largest magnitude of the weights that share a scale, for formats with `has_whole_scale`.
            grid: on which the base's rows lie; None: on none, and they are rounded to the nearest.
        """

    @abstractmethod
    def decode(self, parts: Mapping[str, Tensor]) -> Tensor:
        """The values that `encode`'s parts stand for: float32 [n, in_features]."""

    @abstractmethod
    def join(self, key: str, pieces: Sequence[Mapping[str, Tensor]], dtype: torch.dtype) -> dict[str, Tensor]:
        """The tensors of the file for a weight, on the CPU.

        Args:
            key: of the weight in the files without codes.
            pieces: what `encode` made of all its rows, in their order.
            dtype: in which the base computed in training.
        """

    @abstractmethod
    def config(self, linears: Sequence[str], in_files: Sequence[str], dtype: torch.dtype) -> dict[str, Any]:
        """The `quantization_config` of a config.json.

        Args:
            linears: names of the model's linear layers that have no codes.
            in_files: names of all modules that have none, as they are in the files.
            dtype: in which the base computed in training.
        """

    def holds(self, rows: Tensor, scale_dtype: torch.dtype, largest: Tensor | None) -> bool:
        """Whether weights lie on this format's grid, as far as these rows say: rounding hardly changes them."""
        error = self.decode(self.encode(rows, scale_dtype, largest, None)) - rows.float()
        return bool(error.abs().mean() < ON_GRID * rows.float().abs().mean())


class BitsandbytesFormat(WeightFormat):
    """nf4 or fp4 with double quantization, as training has them by default."""

    group_size = BLOCKSIZE
    bits = 4 + 8 / BLOCKSIZE + 32 / (BLOCKSIZE * NESTED_BLOCKSIZE)
    has_experts = False  # transformers would look for a layer for each
    has_whole_scale = False
    decompresses = False

    def __init__(self, name: Literal["nf4", "fp4"]) -> None:
        self.name = name
        self.format = Format(name, storage=torch.uint8)

    def encode(
        self, rows: Tensor, scale_dtype: torch.dtype, largest: Tensor | None, grid: Grid | None
    ) -> dict[str, Tensor]:
        if grid is not None and grid.drawn is not None:
            rows = round_at_random(rows.float(), self.name, grid.drawn)
        codes, absmax = self.format.quantize_rows(rows)
        return {"codes": codes, "scales": absmax}

    def decode(self, parts: Mapping[str, Tensor]) -> Tensor:
        num_rows, row_bytes = parts["codes"].shape
        return self.format.dequantize(parts, num_rows, 2 * row_bytes, torch.float32)

    def join(self, key: str, pieces: Sequence[Mapping[str, Tensor]], dtype: torch.dtype) -> dict[str, Tensor]:
        codes = torch.cat([piece["codes"] for piece in pieces])
        absmax = torch.cat([piece["scales"] for piece in pieces])
        offset = absmax.mean()
        scales, nested = bnb.quantize_blockwise(absmax.flatten() - offset, blocksize=NESTED_BLOCKSIZE)
        book = code_book(self.name, codes.device).clone()  # safetensors refuses tensors that share memory
        shape = torch.Size((len(codes), 2 * codes.shape[1]))
        state = bnb.QuantState(scales, shape, book, BLOCKSIZE, self.name, dtype, offset, nested)
        parts = {f"{key}.{name}": part.cpu() for name, part in state.as_dict(packed=True).items()}
        return {key: codes.view(-1, 1).cpu()} | parts

    def config(self, linears: Sequence[str], in_files: Sequence[str], dtype: torch.dtype) -> dict[str, Any]:
        return {
            "quant_method": "bitsandbytes",
            "load_in_4bit": True,
            "bnb_4bit_quant_type": self.name,
            "bnb_4bit_use_double_quant": True,
            "bnb_4bit_compute_dtype": dtype_name(dtype),
            "llm_int8_skip_modules": list(linears) or None,
        }


def round_at_random(values: Tensor, quant_type: str, drawn: Tensor) -> Tensor:
    """Move each value of a weight to one of the two points of its block's grid between which it lies.

    Args:
        values: float32 [rows, columns], whole rows of a weight; columns are a multiple of the block size.
        quant_type: nf4 or fp4, the format in which the weight is written.
        drawn: numbers in [0, 1), of the same shape.

    Returns:
        Values of the same shape. bitsandbytes' `quantize_4bit`, which rounds to the nearest, gives the codes of the
        points that were chosen.
    """
    points = code_book(quant_type, values.device).unique()  # ascending; fp4's book has zero twice
    blocks = values.reshape(-1, BLOCKSIZE)
    absmax = blocks.abs().amax(1, keepdim=True)
    scaled = blocks / absmax.clamp_min(torch.finfo(torch.float32).tiny)
    return (round_to_points(scaled, points, drawn.view_as(scaled)) * absmax).view(values.shape)


@dataclass(frozen=True)
class _Kind:
    """A format of compressed-tensors.

    Attributes:
        preset: its name among the package's preset schemes.
        layout: its name among the package's compressors.
        group_size: consecutive weights of a row that share a scale; None for the whole row.
        bits: of a weight without its scales.
        scale_bits: of one scale.
        has_whole_scale: whether a scale belongs to the whole weight.
    """

    preset: str
    layout: str
    group_size: int | None
    bits: int
    scale_bits: int
    has_whole_scale: bool = False


KINDS = {
    "int4": _Kind("W4A16", "pack-quantized", 32, 4, SCALE_BITS),
    "fp8": _Kind("FP8_DYNAMIC", "float-quantized", None, 8, SCALE_BITS),
    "nvfp4": _Kind("NVFP4A16", "nvfp4-pack-quantized", 16, 4, 8, has_whole_scale=True),
    "mxfp4": _Kind("MXFP4A16", "mxfp4-pack-quantized", 32, 4, 8),
}


class CompressedTensorsFormat(WeightFormat):
    """A format of compressed-tensors, whose compressors make codes and layouts."""

    decompresses = True

    def __init__(self, name: str, group_size: int | None = None) -> None:
        kind = KINDS[name]
        self.name = name
        self.kind = kind
        self.group_size = group_size or kind.group_size
        self.bits = kind.bits + (kind.scale_bits / self.group_size if self.group_size is not None else 0)
        self.has_whole_scale = kind.has_whole_scale
        if kind.scale_bits == 8:
            # The package (0.20) decompresses 4-bit floats to it, whatever is asked.
            self.computes_in = torch.bfloat16
        # transformers (5.23) leaves out the whole weight's scale when it decompresses experts.
        self.has_experts = not kind.has_whole_scale

    def fix_for(self, in_features: int) -> str | None:
        if self.name != "int4":
            return None
        sizes = [size for size in GROUP_SIZES if in_features % size == 0]
        return f"group_size={max(sizes)}" if sizes else None

    @cached_property
    def scheme(self) -> Any:
        """The package's QuantizationScheme."""
        from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme

        scheme = preset_name_to_scheme(self.kind.preset, ["Linear"])
        assert scheme.weights is not None
        if self.group_size is not None:
            scheme.weights.group_size = self.group_size
        return scheme

    @cached_property
    def compressor(self) -> Any:
        """The package's class that makes and reads the layout."""
        from compressed_tensors.compressors import BaseCompressor

        return BaseCompressor.get_value_from_registry(self.kind.layout)

    def encode(
        self, rows: Tensor, scale_dtype: torch.dtype, largest: Tensor | None, grid: Grid | None
    ) -> dict[str, Tensor]:
        from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

        rows = rows.float()
        groups = self._in_groups(rows)
        absmax = groups.abs().amax(-1)
        whole_scale = None
        if self.has_whole_scale:
            assert largest is not None
            whole_scale = generate_gparam(-largest, largest)
        scales, _ = calculate_qparams(-absmax, absmax, self.scheme.weights, global_scale=whole_scale)
        if self.scheme.weights.scale_dtype is None:
            scales = scales.to(scale_dtype).clamp_min(torch.finfo(scale_dtype).tiny)
        if grid is not None and self.name == "int4":
            scales = _keep_steps(self._in_groups(grid.base), groups, scales)
        if grid is not None and grid.drawn is not None:
            step = scales.float().unsqueeze(-1)
            if whole_scale is not None:
                step = step / whole_scale
            points = self._points(rows.device)
            rows = (round_to_points(groups / step, points, grid.drawn.view_as(groups)) * step).flatten(1)
        parts = {"weight": rows, "weight_scale": scales}
        if whole_scale is not None:
            parts["weight_global_scale"] = whole_scale
        return cast(dict[str, Tensor], self.compressor.compress(parts, self.scheme))

    def decode(self, parts: Mapping[str, Tensor]) -> Tensor:
        weight: Tensor = self.compressor.decompress(dict(parts), self.scheme)["weight"]
        return weight.float()

    def join(self, key: str, pieces: Sequence[Mapping[str, Tensor]], dtype: torch.dtype) -> dict[str, Tensor]:
        prefix = key.removesuffix("weight")
        joined: dict[str, Tensor] = {}
        for name, first in pieces[0].items():
            if name == "weight_global_scale":  # one for all rows
                value = first
            elif name == "weight_shape":
                value = torch.stack([piece[name] for piece in pieces])
                value = torch.stack([value[:, 0].sum(), value[0, 1]])
            else:
                value = torch.cat([piece[name] for piece in pieces])
            joined[f"{prefix}{name}"] = value.cpu()
        return joined

    def config(self, linears: Sequence[str], in_files: Sequence[str], dtype: torch.dtype) -> dict[str, Any]:
        from compressed_tensors.quantization import QuantizationConfig

        groups = {"group_0": self.scheme}
        ignore = sorted({*linears, *in_files})
        about = QuantizationConfig(
            config_groups=groups, format=self.kind.layout, quantization_status="compressed", ignore=ignore
        )
        return cast(dict[str, Any], about.model_dump(mode="json", exclude_none=True))

    def holds(self, rows: Tensor, scale_dtype: torch.dtype, largest: Tensor | None) -> bool:
        groups = self._in_groups(rows.float())
        if self.name == "int4":
            _, error = _find_steps(groups)
            return bool(error.mean() < ON_STEPS)
        if self.name == "nvfp4":
            # Its groups' own steps: by another scale of the whole weight, all points of the grid lie elsewhere.
            error = _steps_off_points(groups, self._points(rows.device))
            return bool(error.mean() < ON_STEPS)
        return super().holds(rows, scale_dtype, largest)

    def _in_groups(self, rows: Tensor) -> Tensor:
        """Rows as groups that share a scale: [n, groups, group_size]."""
        groups: Tensor = rows.unflatten(-1, (-1, self.group_size or rows.shape[-1]))
        return groups

    def _points(self, device: torch.device) -> Tensor:
        """The values of the codes, ascending: float32."""
        if self.name == "int4":
            return torch.arange(-8, 8, dtype=torch.float32, device=device)
        if self.name == "fp8":
            codes = torch.arange(256, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn).float()
            values = codes[codes.isfinite()]
        else:
            values = torch.tensor(FP4_BOOK, device=device)
        points: Tensor = values.unique()
        return points


def _find_steps(groups: Tensor) -> tuple[Tensor, Tensor]:
    """The step between the points of the integer grid on which a group lies, by its own values.

    The package divides the largest magnitude by 7.5, others by 7 or 8: what lies on their grids does not lie on its.

    Returns:
        The steps, and by how many steps the values lie off the grid on average; both float32 [n, groups].
    """
    absmax = groups.abs().amax(-1).clamp_min(torch.finfo(torch.float32).tiny)
    steps = torch.stack([absmax / code for code in LARGEST_CODES])
    scaled = groups / steps.unsqueeze(-1)
    errors = (scaled - scaled.round()).abs().mean(-1)
    error, chosen = errors.min(0)
    return steps.gather(0, chosen.unsqueeze(0))[0], error


def _keep_steps(base: Tensor, groups: Tensor, scales: Tensor) -> Tensor:
    """The scales of groups whose base lies on an integer grid: its own, unless the sum is larger than its last point.

    Args:
        base: float32 [n, groups, group_size].
        groups: of the sum, of the same shape.
        scales: the package's for the sum [n, groups], in the dtype in which they are stored.
    """
    steps, _ = _find_steps(base)
    is_below = groups.amax(-1) < steps * 7.5  # the codes are -8 to 7
    is_above = -groups.amin(-1) < steps * 8.5
    return torch.where(is_below & is_above, steps.to(scales.dtype), scales)


def _steps_off_points(groups: Tensor, points: Tensor) -> Tensor:
    """By how many steps of its own a group's values lie off the points of 4-bit floats on average.

    Args:
        groups: float32 [n, groups, group_size].
        points: float32, those of the codes.

    Returns:
        float32 [n, groups].
    """
    absmax = groups.abs().amax(-1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
    errors = []
    for code in LARGEST_FP4:
        distances = (groups / (absmax / code)).unsqueeze(-1) - points
        errors.append(distances.abs().amin(-1).mean(-1))
    return torch.stack(errors).amin(0)


def make_format(name: str | None, group_size: int | None) -> WeightFormat | None:
    """The format that the settings name; None for none."""
    if name is None:
        return None
    if name in KINDS:
        return CompressedTensorsFormat(name, group_size)
    return BitsandbytesFormat(cast(Literal["nf4", "fp4"], name))


def find_package_problem() -> str | None:
    """What is wrong with the installed package, to follow `quantize=...`; None if nothing is."""
    reason = f"needs the package {PACKAGE_NAME}"
    try:
        require_version(f"{PACKAGE_NAME}>={PACKAGE_VERSION}")
    except PackageNotFoundError:
        return f"{reason}, which is not installed."
    except ImportError:
        return f"{reason} in version {PACKAGE_VERSION} or a later one; {version(PACKAGE_NAME)} is installed."
    return None
