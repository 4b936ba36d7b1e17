"""How rows are rounded to compressed-tensors' formats, in plain torch, so that training does not need the package.

The scale of a group is its largest magnitude over that of the codes, in float32, rounded to the dtype in which it is
stored. Values over the rounded scale, in float32, go to the nearest code. tests/unit/test_compressed_formats.py
compares codes and scales with the package's own.

int4 ("pack-quantized", symmetric): integers from -8 to 7, and the largest magnitude of a group stands for 7.5. A code
is the integer plus 8.
fp8 ("float-quantized"): float8_e4m3fn, and the largest magnitude of a row stands for 448.
mxfp4 ("mxfp4-pack-quantized"; Open Compute Project, Microscaling Formats, version 1.0): 4-bit floats in groups of 32,
whose scale is a power of two. The largest magnitude of a group lies between 3.5 and 7 times its scale.
nvfp4 ("nvfp4-pack-quantized"; NVIDIA): 4-bit floats in groups of 16, whose scale is float8_e4m3fn over the global scale
of the weight. The largest magnitude of a group stands for 6, and the scale of the weight's largest group for 448.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

INT4_BOOK = tuple(float(code - 8) for code in range(16))
INT4_LARGEST = 7.5  # that the largest magnitude of a group stands for
FP8_LARGEST = 448.0
FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # of E2M1 without its sign, which is the highest bit
FP4_BOOK = (*FP4_VALUES, *(-value for value in FP4_VALUES))
FP4_LARGEST = FP4_VALUES[-1]
MXFP4_GROUP = 32
NVFP4_GROUP = 16
NVFP4_ZERO_SCALE = 0.125  # of groups whose scale would be rounded to zero
SMALLEST_POWER = -127  # that a byte of exponents holds
ZERO_SCALE = torch.finfo(torch.float32).eps  # of groups of zeros


def quantize_int4(rows: Tensor, group_size: int, scale_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Round rows to int4.

    Args:
        rows: of any float dtype [n, in_features].
        group_size: consecutive weights of a row that share a scale.
        scale_dtype: the dtype of scales.

    Returns:
        codes: uint8 [n, in_features / 2]; the first of two codes is in the high half of a byte.
        scales: `scale_dtype` [n, in_features / group_size].
    """
    groups = rows.float().unflatten(1, (-1, group_size))
    scales = _find_scales(groups.abs().amax(2), INT4_LARGEST, scale_dtype)
    codes = (groups / scales.float().unsqueeze(2)).clamp_(-8, 7).round_().add_(8).to(torch.uint8).flatten(1)
    return (codes[:, ::2] << 4) | codes[:, 1::2], scales


def quantize_fp8(rows: Tensor, scale_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Round rows to fp8.

    Args:
        rows: of any float dtype [n, in_features].
        scale_dtype: the dtype of scales.

    Returns:
        codes: float8_e4m3fn [n, in_features].
        scales: `scale_dtype` [n].
    """
    rows = rows.float()
    scales = _find_scales(rows.abs().amax(1), FP8_LARGEST, scale_dtype)
    scaled = (rows / scales.float().unsqueeze(1)).clamp_(-FP8_LARGEST, FP8_LARGEST)
    return scaled.to(torch.float8_e4m3fn), scales


def quantize_mxfp4(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Round rows to mxfp4.

    Args:
        rows: of any float dtype [n, in_features].

    Returns:
        codes: uint8 [n, in_features / 2]; the first of two codes is in the high half of a byte.
        scales: bfloat16 [n, in_features / 32], which holds every power of two that the format has.
    """
    groups = rows.float().unflatten(1, (-1, MXFP4_GROUP))
    fractions, exponents = torch.frexp(groups.abs().amax(2))
    # From 1.75 on a magnitude counts as the next power of two, as it would be rounded with one bit behind the point.
    powers = torch.where(fractions >= 1.75 / 2, exponents, exponents - 1)
    powers = torch.where(fractions == 0, SMALLEST_POWER, powers - 2).clamp_min(SMALLEST_POWER)
    scales = torch.ldexp(torch.ones_like(fractions), powers)
    return _round_to_fp4(groups / scales.unsqueeze(2)), scales.bfloat16()


def find_global_scale(largest: Tensor) -> Tensor:
    """The global scale of an nvfp4 weight, by which the scales of its groups are divided.

    Args:
        largest: the largest magnitude of the whole weight, float32 of any shape.

    Returns:
        float32 of the same shape; 1 where the weight is zero or too small for a finite one, as the package's
        `generate_gparam` has it.
    """
    scale = FP8_LARGEST * FP4_LARGEST / largest.clamp_min(torch.finfo(torch.float32).tiny)
    return scale.nan_to_num(nan=1.0, posinf=1.0)


def quantize_nvfp4(rows: Tensor, global_scale: Tensor) -> tuple[Tensor, Tensor]:
    """Round rows to nvfp4.

    Args:
        rows: of any float dtype [n, in_features].
        global_scale: of the whole weight (`find_global_scale`): float32 [1].

    Returns:
        codes: uint8 [n, in_features / 2]; the first of two codes is in the high half of a byte.
        scales: float8_e4m3fn [n, in_features / 16], to be divided by the global scale.
    """
    groups = rows.float().unflatten(1, (-1, NVFP4_GROUP))
    wanted = global_scale * (groups.abs().amax(2) / FP4_LARGEST)
    scales = wanted.clamp_max(FP8_LARGEST).to(torch.float8_e4m3fn).float()
    scales = torch.where(scales == 0, NVFP4_ZERO_SCALE, scales)
    codes = _round_to_fp4(groups / (scales / global_scale).unsqueeze(2))
    return codes, scales.to(torch.float8_e4m3fn)


def _round_to_fp4(groups: Tensor) -> Tensor:
    """The codes of the nearest 4-bit floats.

    Args:
        groups: values over the scales of their groups, float32 [n, groups, group_size].

    Returns:
        uint8 [n, groups * group_size / 2]; the first of two codes is in the high half of a byte.
    """
    codes = torch.bucketize(groups.abs(), _fp4_bounds(groups.device), out_int32=True).to(torch.uint8)
    codes = (codes | (groups < 0).to(torch.uint8) << 3).flatten(1)
    return (codes[:, ::2] << 4) | codes[:, 1::2]


@cache
def _fp4_bounds(device: torch.device) -> Tensor:
    """Up to which magnitude each code but the last is the nearest: float32 [7]. A tie goes to the even code."""
    values = torch.tensor(FP4_VALUES)
    middles = (values[:-1] + values[1:]) / 2
    below = middles.nextafter(torch.zeros(()))
    is_even = torch.arange(len(middles)) % 2 == 0
    return torch.where(is_even, middles, below).to(device)


def _find_scales(absmax: Tensor, largest: float, dtype: torch.dtype) -> Tensor:
    """The scales of groups whose largest magnitudes are given."""
    scales = absmax / largest
    scales = torch.where(scales == 0, ZERO_SCALE, scales)
    return scales.to(dtype).clamp_min(torch.finfo(dtype).tiny)
