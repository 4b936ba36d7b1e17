"""What a run on a GPU does without: it goes on with the next best where results stay the same, and says so once."""

from __future__ import annotations

from importlib.util import find_spec

import torch
from bitsandbytes import cextension

from qlora_fsdp.common.errors import ConfigError, DeviceError, Problem
from qlora_fsdp.config.schema import Config, Dtype, Kernel, MatmulKind
from qlora_fsdp.runtime.hardware import has_bfloat16


def replace_missing(config: Config, device: torch.device) -> list[str]:
    """Switch off what the installed libraries can't do on this device. Attention has its own choice (`attention.py`).

    Args:
        config: `kernels.fuse_layers` is set to false where Triton is missing.
        device: where the model runs; on a CPU nothing is missing.

    Returns:
        A line for each part that is missing, with what takes its place.

    Raises:
        DeviceError: bitsandbytes has no binary for this GPU's CUDA, so that nothing can be quantized.
        ConfigError: fp8 without Triton; no other kernel computes the same.
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
    wanted = Kernel.auto in (kernels.rms_norm, kernels.rotary, kernels.glu, kernels.cross_entropy)
    if wanted and find_spec("triton") is not None and find_spec("liger_kernel") is None:
        notes.append("liger-kernel is not installed: torch computes in its place (slower): pip install qlora-fsdp[gpu]")
    return notes


def check_bitsandbytes(config: Config, device: torch.device) -> None:
    """Refuse a bitsandbytes whose library for this CUDA could not be loaded; it would fail in the middle of loading.

    On a CPU, or where nothing is quantized, none is needed.

    Raises:
        DeviceError: with its own reason.
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
