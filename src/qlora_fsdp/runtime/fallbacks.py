"""Replacements for libraries that are missing on a GPU host.

If the results stay the same, the run continues with the next best kernels, and logs once what is missing.
"""

from __future__ import annotations

from importlib.util import find_spec

import torch
from bitsandbytes import cextension

from qlora_fsdp.common.errors import ConfigError, DeviceError, Problem
from qlora_fsdp.config.schema import Config, Dtype, Kernel, MatmulKind
from qlora_fsdp.runtime.hardware import has_bfloat16


def replace_missing(config: Config, device: torch.device) -> list[str]:
    """Switch off what the installed libraries can't do on this device. layers/attention/choose.py chooses attention.

    Args:
        config: `kernels.fuse_layers` is set to false here if Triton is missing.
        device: where the model runs. Nothing is missing on a CPU.

    Returns:
        A line for each missing part, which says what takes its place.

    Raises:
        DeviceError: bitsandbytes has no binary for this GPU's version of CUDA, so nothing can be quantized.
        ConfigError: fp8 without Triton. No other kernel computes the same results.
    """
    if device.type != "cuda":
        return []
    check_bitsandbytes(config, device)
    notes = []
    if config.training.precision is Dtype.auto and not has_bfloat16(device):
        notes.append("this GPU has no bfloat16: float32 computes in its place (slower, with twice the activations)")
    if find_spec("triton") is None:
        if config.compute.matmul is MatmulKind.fp8:
            fix = "pip install triton, or set compute.matmul=dequantized."
            raise ConfigError([Problem("compute.matmul=fp8", "needs Triton, which is not installed.", fix)])
        config.kernels.fuse_layers = False
        note = "Triton is not installed: torch and bitsandbytes compute without fused kernels (slower): "
        notes.append(f"{note}pip install triton")
    kernels = config.kernels
    wanted = Kernel.auto in (kernels.of_layers, kernels.cross_entropy)
    if wanted and find_spec("triton") is not None and find_spec("liger_kernel") is None:
        notes.append("liger-kernel is not installed: torch computes in its place (slower): pip install qlora-fsdp[gpu]")
    return notes


def check_bitsandbytes(config: Config, device: torch.device) -> None:
    """Refuse a bitsandbytes whose library for this version of CUDA could not be loaded.

    Otherwise the run would fail while it loads the model. On a CPU, or if nothing is quantized, no library is needed.

    Raises:
        DeviceError: it has none; the message quotes the reason that bitsandbytes gives.
    """
    if device.type != "cuda" or not (config.quant.load_in_4bit or config.quant.load_in_8bit):
        return
    library = cextension.lib
    if isinstance(library, cextension.ErrorHandlerMockBNBNativeLibrary):
        raise DeviceError(
            f"bitsandbytes can't use this GPU: it has no library for CUDA {torch.version.cuda}. Install a bitsandbytes "
            f"that has one, set BNB_CUDA_VERSION to one that it has, or set quant=none. It says: "
            f"{' '.join(library.error_msg.split())}"
        )
