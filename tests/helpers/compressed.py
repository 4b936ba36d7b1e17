"""What the package compressed-tensors makes of a weight, as a whole and on its own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from qlora_fsdp.config.schema import QuantConfig
from qlora_fsdp.layers.quantized.format import Format
from qlora_fsdp.weights.scaled import scale_values

PRESETS = {"int4": "W4A16", "fp8": "FP8_DYNAMIC", "mxfp4": "MXFP4A16"}
LAYOUTS = {"int4": "pack-quantized", "fp8": "float-quantized", "mxfp4": "mxfp4-pack-quantized"}


def compress(weight: Tensor, name: str, group_size: int, scale_dtype: torch.dtype) -> tuple[dict[str, Tensor], Any]:
    """The package's tensors of a weight [rows, columns], and its scheme.

    Scales are rounded to `scale_dtype` before the values are divided by them, in float32.
    """
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme
    from compressed_tensors.quantization.utils import calculate_qparams

    scheme = preset_name_to_scheme(PRESETS[name], ["Linear"])
    assert scheme.weights is not None
    if name == "int4":
        scheme.weights.group_size = group_size
    values = weight.float()
    size = scheme.weights.group_size or weight.shape[1]
    absmax = values.unflatten(1, (-1, size)).abs().amax(2)
    scales, _ = calculate_qparams(-absmax, absmax, scheme.weights)
    if name != "mxfp4":  # whose powers of two are exact
        scales = scales.to(scale_dtype).clamp_min(torch.finfo(scale_dtype).tiny)
    compressor = BaseCompressor.get_value_from_registry(LAYOUTS[name])
    return compressor.compress({"weight": values, "weight_scale": scales}, scheme), scheme


def package_parts(weight: Tensor, format: Format) -> dict[str, Tensor]:
    """The package's codes and scales of a weight in our order: the first of two codes is in the high half of a byte."""
    found, _ = compress(weight, format.quant_type, format.blocksize, format.scale_dtype)
    if format.quant_type == "fp8":
        return {"codes": found["weight"].view(torch.uint8), "scales": found["weight_scale"].flatten().float()}
    packed = found["weight_packed"].contiguous().view(torch.uint8)
    scales = found["weight_scale"]
    if format.quant_type == "mxfp4":
        scales = scale_values(scales).bfloat16()
    return {"codes": (packed >> 4) | (packed << 4), "scales": scales}


def through_package(weight: Tensor, quant: QuantConfig) -> Tensor:
    """A weight of any number of dimensions, quantized and dequantized by the package, in its own dtype."""
    from compressed_tensors.compressors import BaseCompressor

    name = quant.compressed_tensors.value
    found, scheme = compress(weight.flatten(0, -2), name, quant.group_size, weight.dtype)
    compressor = BaseCompressor.get_value_from_registry(LAYOUTS[name])
    values: Tensor = compressor.decompress(found, scheme)["weight"]
    return values.to(weight.dtype).view(weight.shape)
