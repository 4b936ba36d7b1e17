"""How rows are rounded to compressed-tensors' formats, in plain torch, so that training does not need the package.

The scale of a group is its largest magnitude over that of the codes, in float32, rounded to the dtype in which it is
stored. Values over the rounded scale, in float32, go to the nearest code. tests/unit/test_compressed_formats.py
compares codes and scales with the package's own.

int4 ("pack-quantized", symmetric): integers from -8 to 7, and the largest magnitude of a group stands for 7.5. A code
is the integer plus 8.
fp8 ("float-quantized"): float8_e4m3fn, and the largest magnitude of a row stands for 448.
"""

from __future__ import annotations

import torch
from torch import Tensor

INT4_BOOK = tuple(float(code - 8) for code in range(16))
INT4_LARGEST = 7.5  # that the largest magnitude of a group stands for
FP8_LARGEST = 448.0
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


def _find_scales(absmax: Tensor, largest: float, dtype: torch.dtype) -> Tensor:
    """The scales of groups whose largest magnitudes are given."""
    scales = absmax / largest
    scales = torch.where(scales == 0, ZERO_SCALE, scales)
    return scales.to(dtype).clamp_min(torch.finfo(dtype).tiny)
