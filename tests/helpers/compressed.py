"""What the package compressed-tensors makes of a weight, as a whole and on its own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from qlora_fsdp.config.schema import QuantConfig
from qlora_fsdp.layers.quantized.format import Format
from qlora_fsdp.weights.scaled import scale_values

PRESETS = {"int4": "W4A16", "fp8": "FP8_DYNAMIC", "mxfp4": "MXFP4A16", "nvfp4": "NVFP4A16"}
LAYOUTS = {
    "int4": "pack-quantized",
    "fp8": "float-quantized",
    "mxfp4": "mxfp4-pack-quantized",
    "nvfp4": "nvfp4-pack-quantized",
}
NVFP4_PARTS = ("weight_packed", "weight_scale", "weight_global_scale")


def compress(weight: Tensor, name: str, group_size: int, scale_dtype: torch.dtype) -> tuple[dict[str, Tensor], Any]:
    """The package's tensors of a weight [rows, columns], and its scheme.

    Scales of int4 and fp8 are rounded to `scale_dtype` before the values are divided by them, in float32.
    """
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    scheme = preset_name_to_scheme(PRESETS[name], ["Linear"])
    assert scheme.weights is not None
    if name == "int4":
        scheme.weights.group_size = group_size
    values = weight.float()
    size = scheme.weights.group_size or weight.shape[1]
    absmax = values.unflatten(1, (-1, size)).abs().amax(2)
    parts = {"weight": values}
    if name == "nvfp4":
        parts["weight_global_scale"] = generate_gparam(values.amin(), values.amax())
    scales, _ = calculate_qparams(-absmax, absmax, scheme.weights, parts.get("weight_global_scale"))
    if name in ("int4", "fp8"):  # the others have a dtype of their own
        scales = scales.to(scale_dtype).clamp_min(torch.finfo(scale_dtype).tiny)
    parts["weight_scale"] = scales
    compressor = BaseCompressor.get_value_from_registry(LAYOUTS[name])
    return compressor.compress(parts, scheme), scheme


def package_parts(weight: Tensor, format: Format) -> dict[str, Tensor]:
    """The package's codes and scales of a weight in our order: the first of two codes is in the high half of a byte."""
    found, _ = compress(weight, format.quant_type, format.blocksize, format.scale_dtype)
    if format.quant_type == "fp8":
        return {"codes": found["weight"].view(torch.uint8), "scales": found["weight_scale"].flatten().float()}
    packed = found["weight_packed"].contiguous().view(torch.uint8)
    scales = found["weight_scale"]
    if format.quant_type == "mxfp4":
        scales = scale_values(scales).bfloat16()
    parts = {"codes": (packed >> 4) | (packed << 4), "scales": scales}
    if format.quant_type == "nvfp4":
        parts["global_scales"] = found["weight_global_scale"].expand(len(weight))
    return parts


def through_package(weight: Tensor, quant: QuantConfig) -> Tensor:
    """A weight of any number of dimensions, quantized and dequantized by the package, in its own dtype."""
    from compressed_tensors.compressors import BaseCompressor

    name = quant.compressed_tensors.value
    found, scheme = compress(weight.flatten(0, -2), name, quant.group_size, weight.dtype)
    if name == "nvfp4":
        return nvfp4_values(found).to(weight.dtype).view(weight.shape)
    compressor = BaseCompressor.get_value_from_registry(LAYOUTS[name])
    values: Tensor = compressor.decompress(found, scheme)["weight"]
    return values.to(weight.dtype).view(weight.shape)


def nvfp4_values(parts: dict[str, Tensor]) -> Tensor:
    """What the package's tensors of a weight in nvfp4 stand for, in float32; its compressor rounds them to bfloat16."""
    from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
    from compressed_tensors.quantization.lifecycle.forward import dequantize

    packed = parts["weight_packed"]
    rows, row_bytes = packed.shape
    codes = unpack_fp4_from_uint8(packed, rows, 2 * row_bytes, torch.float32)
    scales = parts["weight_scale"].float()
    values: Tensor = dequantize(codes, scales, global_scale=parts["weight_global_scale"], dtype=torch.float32)
    return values
