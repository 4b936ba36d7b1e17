"""What the hardware offers: the dtype to compute in, the memory that is available, and the GPU's peak rate."""

from __future__ import annotations

import re
import resource
from pathlib import Path

import torch

from qlora_fsdp.common.errors import ConfigError, DeviceError, Problem
from qlora_fsdp.common.text import show_bytes
from qlora_fsdp.config.schema import Dtype
from qlora_fsdp.memory.gpus import find_gpu, gpu_of_size
from qlora_fsdp.memory.plan import CUDA_CONTEXT, GIB
from qlora_fsdp.memory.plan_run import Machine
from qlora_fsdp.memory.search import MARGIN
from qlora_fsdp.runtime.host_memory import available_bytes
from qlora_fsdp.runtime.peers import can_read_peers
from qlora_fsdp.runtime.processes import Processes


def has_bfloat16(device: torch.device) -> bool:
    """Whether a device computes in bfloat16 without emulation. A CPU counts as one that does, though it may be slow."""
    return device.type == "cpu" or torch.cuda.is_bf16_supported(including_emulation=False)


def choose_dtype(precision: Dtype, device: torch.device) -> torch.dtype:
    """The dtype of activations and matrix products.

    `auto` chooses bfloat16 on a GPU that supports it. On a CPU it chooses float32, because a backward pass in bfloat16
    is over 100 times slower there without special instructions.

    Raises:
        DeviceError: bfloat16 was asked for on a GPU that does not support it.
    """
    if precision is Dtype.bfloat16 and not has_bfloat16(device):
        raise DeviceError(
            f"training.precision=bfloat16 can't be used: {torch.cuda.get_device_name(device)} has no bfloat16. "
            "Set training.precision=float32."
        )
    if precision is Dtype.auto:
        return torch.bfloat16 if device.type == "cuda" and has_bfloat16(device) else torch.float32
    return getattr(torch, precision.value)  # type: ignore[no-any-return]


def dtype_name(dtype: torch.dtype) -> str:
    """`bfloat16` for torch.bfloat16."""
    return str(dtype).removeprefix("torch.")


def peak_flops(device: torch.device) -> float | None:
    """FLOP/s of dense bf16 products by the GPU's datasheet; None on a CPU and for a GPU that is not in our table."""
    gpu = find_gpu(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    return None if gpu is None else gpu.tflops * 1e12


def find_machine(target_gib: float | None, processes: Processes) -> Machine:
    """Find out what machine the ranks run on. If their GPUs differ, the smallest amount of memory counts.

    Raises:
        ConfigError: `memory.target_gib` is more than a GPU has.
    """
    device, host = processes.device, available_bytes()
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        room = min(total, free + torch.cuda.memory_reserved(device) + CUDA_CONTEXT)  # what we hold already is ours
        name = torch.cuda.get_device_name(device)
        gpu = find_gpu(name) or gpu_of_size(total / GIB)
    else:
        total = room = host // processes.local_num_ranks
        gpu = gpu_of_size(total / GIB)
    room, total, host = (int(-least) for least in processes.max([-room, -total, -host]))
    if target_gib is not None and device.type == "cuda" and target_gib * GIB > total:
        reason = f"is more than the GPU has: {total / GIB:.1f} GiB."
        raise ConfigError([Problem(f"memory.target_gib={target_gib:g}", reason, "Set memory.target_gib=null.")])
    target = room * (1 - MARGIN) if target_gib is None else target_gib * GIB
    num_ranks = processes.num_ranks
    local_num_ranks = processes.local_num_ranks
    is_cuda = device.type == "cuda"
    return Machine(num_ranks, local_num_ranks, target, gpu, is_cuda, host, can_read_peers(processes))


def hold_to(target: float, libraries: int, device: torch.device) -> None:
    """Limit torch's allocator to `target` bytes, less the `libraries` bytes that CUDA and NCCL take outside of it."""
    if device.type == "cuda":
        total = torch.cuda.mem_get_info(device)[1]
        torch.cuda.set_per_process_memory_fraction(min(1.0, max(0.0, target - libraries) / total), device)


def is_shortage(error: BaseException) -> bool:
    """Whether memory ran out: torch's allocator raises a class of its own, CUDA's calls and NCCL say so in the text."""
    return isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error) or is_host_shortage(error)


def is_host_shortage(error: BaseException) -> bool:
    """Whether it is the host's memory that ran out: Python has an error for it, torch's allocator says so."""
    return isinstance(error, MemoryError) or "DefaultCPUAllocator" in str(error)


def quote_shortage(error: BaseException, device: str = "The GPU") -> str:
    """Say what ran out of memory and how much was asked for: half a sentence, without a full stop."""
    if is_host_shortage(error):
        asked = re.search(r"allocate (\d+) bytes", str(error))
        return f"The host is out of memory{f': {show_bytes(int(asked[1]))} could not be allocated' if asked else ''}"
    first_sentence = str(error).partition("\n")[0].partition(". ")[0]
    return f"{device} is out of memory: {first_sentence}"


def host_rss_gib() -> float:
    """The most host memory that this process has ever held, in GiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB


def host_rss_now_gib() -> float:
    """Host memory that this process holds now, in GiB, without the page cache of mapped files."""
    with Path("/proc/self/status").open() as status:
        fields = dict(line.split(":", 1) for line in status)
    return int(fields["RssAnon"].split()[0]) * 1024 / GIB
