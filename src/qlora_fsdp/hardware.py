"""What the hardware can do: the dtype to compute in, and the rates that figures are compared with."""

from __future__ import annotations

import resource
from pathlib import Path

import torch

from qlora_fsdp.config.schema import Dtype
from qlora_fsdp.errors import DeviceError

GIB = 2**30

# Dense bf16 matrix rates by the vendors' datasheets, in FLOP/s; the first name contained in the GPU's wins.
PEAK_FLOPS = {
    "B200": 2250e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "L40": 181e12,
    "A10G": 70e12,
    "RTX 6000 Ada": 364e12,
    "RTX 5090": 210e12,
    "RTX 4090": 165e12,
    "RTX 3090": 71e12,
    "A6000": 155e12,
}


def choose_dtype(precision: Dtype, device: torch.device) -> torch.dtype:
    """The dtype of activations and matrix products.

    `auto` is bfloat16 on a GPU that has it. On a CPU it is float32: without bf16 instructions a bf16 backward is over
    100 times slower.

    Raises:
        DeviceError: bfloat16 was asked for on a GPU without it.
    """
    has_bf16 = device.type == "cpu" or torch.cuda.is_bf16_supported(including_emulation=False)
    if precision is Dtype.bfloat16 and not has_bf16:
        raise DeviceError(
            f"training.precision=bfloat16 can't be used: {torch.cuda.get_device_name(device)} has no bfloat16. "
            "Set training.precision=float32."
        )
    if precision is Dtype.auto:
        return torch.bfloat16 if device.type == "cuda" and has_bf16 else torch.float32
    return getattr(torch, precision.value)  # type: ignore[no-any-return]


def peak_flops(device: torch.device) -> float | None:
    """Dense bf16 FLOP/s of the GPU by its datasheet; None if it is not in the table, or on a CPU."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((rate for part, rate in PEAK_FLOPS.items() if part in name), None)


def gpu_peak_gib(device: torch.device, reset: bool = False) -> float | None:
    """Most GPU memory allocated by tensors since the last reset, in GiB; None on a CPU."""
    if device.type != "cuda":
        return None
    peak = torch.cuda.max_memory_allocated(device) / GIB
    if reset:
        torch.cuda.reset_peak_memory_stats(device)
    return peak


def host_rss_gib() -> float:
    """Most host memory this process ever held, in GiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB


def host_rss_now_gib() -> float:
    """Host memory this process holds now, page cache of mapped files excluded, in GiB."""
    with Path("/proc/self/status").open() as status:
        fields = dict(line.split(":", 1) for line in status)
    return int(fields["RssAnon"].split()[0]) * 1024 / GIB
