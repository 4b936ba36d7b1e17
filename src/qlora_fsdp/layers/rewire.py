"""Placeholder docstring."""

from __future__ import annotations

from torch import nn

from qlora_fsdp.common.errors import ConfigError, Problem
from qlora_fsdp.layers.matmul import FP8_MAX_BLOCKSIZE, FP8_MULTIPLE, Fp8Matmul
from qlora_fsdp.layers.quantized_linear import QuantizedLinear


def use_fp8(model: nn.Module) -> int:
    """Have every 4-bit layer whose sizes allow it multiply in fp8; how many do.

    Raises:
        ConfigError: none can.
    """
    matmul, num_layers = Fp8Matmul(), 0
    for layer in model.modules():
        if not isinstance(layer, QuantizedLinear) or not layer.format.is_4bit:
            continue
        if layer.out_features % FP8_MULTIPLE == 0 and layer.format.blocksize <= FP8_MAX_BLOCKSIZE:
            layer.matmul = matmul
            num_layers += 1
    if not num_layers:
        fix = "Set compute=dequantized."
        raise ConfigError([Problem("compute.matmul=fp8", "finds no 4-bit layer in this model.", fix)])
    return num_layers
