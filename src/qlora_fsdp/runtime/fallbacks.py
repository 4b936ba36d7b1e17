"""Replacements for libraries that are missing on a GPU host.

If the results stay the same, the run continues with the next best kernels, and logs once what is missing.
"""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec

import torch
from bitsandbytes import cextension

from qlora_fsdp.common.errors import ConfigError, DeviceError, Problem
from qlora_fsdp.config.schema import Dtype, Kernel, KernelsConfig, MatmulKind, QuantConfig
from qlora_fsdp.config.specs import ModuleSpec
from qlora_fsdp.runtime.hardware import has_bfloat16


def replace_missing(modules: ModuleSpec, precision: Dtype, device: torch.device) -> tuple[KernelsConfig, list[str]]:
    """Switch off what the installed libraries can't do on this device. layers/attention/choose.py chooses attention.

    Args:
        modules: what the settings ask for.
        precision: `training.precision`.
        device: where the model runs. Nothing is missing on a CPU.

    Returns:
        The kernels, without fused layers if Triton is missing; and a line for each missing part, which says what takes
        its place.

    Raises:
        DeviceError: bitsandbytes has no binary for this GPU's version of CUDA, so nothing can be quantized.
        ConfigError: fp8 without Triton. No other kernel computes the same results.
    """
    kernels = modules.kernels
    if device.type != "cuda":
        return kernels, []
    check_bitsandbytes(modules.quant, device)
    notes = []
    if precision is Dtype.auto and not has_bfloat16(device):
        notes.append("this GPU has no bfloat16: float32 computes in its place (slower, with twice the activations)")
    if find_spec("triton") is None:
        if modules.compute.matmul is MatmulKind.fp8:
            fix = "pip install triton, or set compute.matmul=dequantized."
            raise ConfigError([Problem("compute.matmul=fp8", "needs Triton, which is not installed.", fix)])
        kernels = replace(kernels, fuse_layers=False)
        note = "Triton is not installed: torch and bitsandbytes compute without fused kernels (slower): "
        notes.append(f"{note}pip install triton")
    wanted = Kernel.auto in (kernels.of_layers, kernels.cross_entropy)
    if wanted and find_spec("triton") is not None and find_spec("liger_kernel") is None:
        notes.append("liger-kernel is not installed: torch computes in its place (slower): pip install qlora-fsdp[gpu]")
    return kernels, notes


def check_bitsandbytes(quant: QuantConfig, device: torch.device) -> None:
    """Refuse a bitsandbytes whose library for this version of CUDA could not be loaded.

    Otherwise the run would fail while it loads the model. On a CPU, or if nothing is quantized, no library is needed.

    Raises:
        DeviceError: it has none; the message quotes the reason that bitsandbytes gives.
    """
    if device.type != "cuda" or not (quant.load_in_4bit or quant.load_in_8bit):
        return
    library = cextension.lib
    if isinstance(library, cextension.ErrorHandlerMockBNBNativeLibrary):
        raise DeviceError(
            f"bitsandbytes can't use this GPU: it has no library for CUDA {torch.version.cuda}. Install a bitsandbytes "
            f"that has one, set BNB_CUDA_VERSION to one that it has, or set quant=none. It says: "
            f"{' '.join(library.error_msg.split())}"
        )
