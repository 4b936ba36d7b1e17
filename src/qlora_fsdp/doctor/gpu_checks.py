"""Checks of GPUs, their driver, bitsandbytes' kernels, pinned memory, and how fast several processes exchange data."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from qlora_fsdp.common.nvidia_smi import query_gpus
from qlora_fsdp.common.text import first_line
from qlora_fsdp.doctor.host import Finding
from qlora_fsdp.memory.plan import GIB

if TYPE_CHECKING:
    import torch

    from qlora_fsdp.runtime.processes import Processes

PINNED_BYTES = 256 * 2**20
REPEATS = 3
DOCTOR_MAX_LENGTH = 4096  # tokens of a row, of which a small model computes few
EXCHANGED_BYTES = {"cuda": 256 * 2**20, "cpu": 16 * 2**20}


def check_gpus() -> Iterator[Finding]:
    """Memory, dtypes, exact copies and bitsandbytes' kernels of each GPU, and whether each pair has peer access."""
    import torch

    if not torch.cuda.is_available():
        built = torch.version.cuda
        advice = f"install a driver for CUDA {built}" if built else "this torch is for CPUs: install one for CUDA"
        yield Finding("yellow", "GPU", "none seen; CPUs train small models only", f"If there is one, {advice}.")
        return
    driver = _check_driver()
    yield driver
    count = torch.cuda.device_count()
    for index in range(count):
        what = f"GPU {index}"
        name = torch.cuda.get_device_name(index)
        free, total = torch.cuda.mem_get_info(index)
        major, minor = torch.cuda.get_device_capability(index)
        found = f"{name}, {free / GIB:.1f} of {total / GIB:.1f} GiB free, sm_{major}{minor}"
        if major >= 8:
            found += ", bf16"
        if (major, minor) >= (8, 9):
            found += ", fp8"
        if major < 8:
            yield Finding("yellow", what, found, "No bf16: training.precision=auto computes in float32, slowly.")
        elif free < 0.9 * total:
            yield Finding("yellow", what, found, "Other processes hold its memory: see nvidia-smi.")
        else:
            yield Finding("green", what, found)
        with torch.cuda.device(index):  # kernels run on the current device
            checks = [_check_bytes(f"GPU {index} bytes", "cuda")]
            if driver.level == "green":  # if not, bitsandbytes has no kernels to try
                checks.append(_check_kernels(f"GPU {index} bnb", "cuda"))
        yield from checks
    pairs = [(a, b) for a in range(count) for b in range(count) if a != b]
    without = [pair for pair in pairs if not torch.cuda.can_device_access_peer(*pair)]
    if without:
        found = f"{len(without)} of {len(pairs)} pairs of GPUs can't reach one another directly"
        yield Finding("yellow", "peer access", found, "Gathering goes through host memory: prefer fsdp=shard_grad_op.")
    elif pairs:
        yield Finding("green", "peer access", "between all GPUs")


def check_recurrent_kernels() -> Iterator[Finding]:
    """What computes layers that carry a state: this program, torch, or kernels of a package if these are right.

    The package's are tried on the first GPU, by a process of its own, with a small model of Bamba.
    """
    import torch
    from transformers import BambaConfig

    from qlora_fsdp.layers.recurrent.packages import installed_packages
    from qlora_fsdp.model.trials.kernel_trial import try_kernels

    names = " and ".join(installed_packages())
    unused = f"; {names} not used" if names else ""
    yield Finding("green", "delta rule", f"gated delta rule computed by this program's own kernels{unused}")
    what = "state spaces"
    if not names or not torch.cuda.is_available():
        yield Finding("green", what, "computed by transformers' torch code")
        return
    verdict = try_kernels(BambaConfig(), DOCTOR_MAX_LENGTH, torch.device("cuda", 0), [])
    if verdict.why_not is None:
        yield Finding("green", what, f"computed by {names}")
    else:
        found = f"computed by transformers' torch code, slower ({verdict.why_not})"
        yield Finding("yellow", what, found, f"Install versions of {names} that fit this GPU and this Triton.")


def _check_driver() -> Finding:
    """The versions of the driver and of torch's CUDA, and which of its libraries bitsandbytes has loaded."""
    import torch
    from bitsandbytes import cextension

    drivers = query_gpus("driver_version")
    driver = drivers[0][0] if drivers else "of unknown version"
    found = f"driver {driver}, CUDA {torch.version.cuda} in torch, "
    if isinstance(cextension.lib, cextension.ErrorHandlerMockBNBNativeLibrary):
        advice = "Install a bitsandbytes that has a library for it, or set BNB_CUDA_VERSION to one that it has."
        return Finding("red", "CUDA", f"{found}bitsandbytes has no library for it", advice)
    return Finding("green", "CUDA", f"{found}bitsandbytes' {Path(cextension.lib._lib._name).name}")


def check_cpu_kernels() -> Iterator[Finding]:
    """bitsandbytes' kernels on the CPU, if the host has no GPU."""
    import torch

    if not torch.cuda.is_available():
        yield _check_kernels("bnb on CPU", torch.device("cpu"))


def _check_bytes(what: str, device: torch.device | str) -> Finding:
    """Whether copies made as FSDP2 gathers keep every 16-bit pattern.

    As bf16 they need not (pytorch#159333), and this project does not rely on it. As bytes they must.
    """
    import torch

    patterns = torch.arange(2**16, dtype=torch.int32, device=device).to(torch.uint16).view(torch.bfloat16)
    changed = []
    for view in (torch.bfloat16, torch.uint8):
        copied = torch.empty_like(patterns)
        torch._foreach_copy_([copied.view(view)], [patterns.view(view)])
        changed.append(int((copied.view(torch.uint16) != patterns.view(torch.uint16)).sum()))
    if changed[1]:
        found = f"{changed[1]} bit patterns change in a copy of bytes"
        return Finding("red", what, found, "Use another torch or driver.")
    found = "copied exactly as bytes"
    if changed[0]:
        found += f"; as bf16, {changed[0]} of 65,536 patterns change, so groups of bf16 alone are not used"
    return Finding("green", what, found)


def _check_kernels(what: str, device: torch.device | str) -> Finding:
    """Whether bitsandbytes quantizes a weight and restores it within the error of its format."""
    import torch

    from qlora_fsdp.layers.quantized.format import Format

    weight = torch.randn(64, 128, generator=torch.Generator().manual_seed(0)).to(device)
    errors = {}
    for format in (Format("nf4"), Format("int8")):
        codes, scales = format.quantize_rows(weight)
        again = format.dequantize({"codes": codes, "scales": scales}, 64, 128, torch.float32)
        errors[format.quant_type] = float((again - weight).norm() / weight.norm())
    found = ", ".join(f"{name} error {error:.2%}" for name, error in errors.items())
    if errors["nf4"] > 0.15 or errors["int8"] > 0.02:
        return Finding("red", what, found, "The kernels compute wrong values: reinstall bitsandbytes for this CUDA.")
    return Finding("green", what, found)


def check_pinned() -> Iterator[Finding]:
    """Whether host memory can be pinned, as loading and offloading need, and how fast it is copied to GPU 0."""
    import torch
    from torch.utils.benchmark import Timer

    if not torch.cuda.is_available():
        return
    try:
        host = torch.zeros(PINNED_BYTES, dtype=torch.uint8, pin_memory=True)
    except RuntimeError as error:
        advice = "Weights are loaded through it: allow this container more memory, or more of it locked (ulimit -l)."
        yield Finding("red", "pinned memory", f"can't be had: {first_line(error)}", advice)
        return
    copy = Timer("host.to('cuda', non_blocking=True)", globals={"host": host})
    rate = len(host) / copy.timeit(REPEATS).mean / 1e9
    yield Finding("green", "pinned memory", f"{len(host) // 2**20} MiB, copied to GPU 0 at {rate:.1f} GB/s")


def check_exchange(processes: Processes) -> Iterator[Finding]:
    """The rates of exchanges between the processes, counted as NCCL's own tests count them.

    Gradients are summed by all-reduce, layers gathered, and ranks that share sequences exchange heads by all-to-all.
    """
    import torch
    import torch.distributed as dist
    from torch.utils.benchmark import Timer

    from qlora_fsdp.runtime.rows import gather_rows

    device = processes.device
    size = processes.num_ranks
    num_bytes = EXCHANGED_BYTES[device.type] // size * size
    whole = torch.ones(num_bytes // 2, dtype=torch.bfloat16, device=device)
    part = torch.ones(num_bytes // 2 // size, dtype=torch.bfloat16, device=device)
    sent = whole[: len(part) * size]  # as much to each
    received = torch.empty_like(sent)
    exchanges: dict[str, tuple[float, Callable[[], object]]] = {
        "all-reduce": (2 * (size - 1) / size, lambda: dist.all_reduce(whole)),
        "all-gather": ((size - 1) / size, lambda: gather_rows(part, len(whole), dist.group.WORLD)),
        "all-to-all": ((size - 1) / size, lambda: dist.all_to_all_single(received, sent)),
    }
    for name, (factor, exchange) in exchanges.items():
        # Two calls before those that are timed warm it up.
        seconds = Timer("exchange()", globals={"exchange": exchange}).timeit(REPEATS).mean
        rate = num_bytes * factor / seconds / 1e9
        found = f"{rate:.1f} GB/s between {size} processes ({device.type})"
        if device.type == "cuda" and rate < 5:
            yield Finding("yellow", name, found, "Slow: look for NVLink or InfiniBand in NCCL_DEBUG=INFO.")
        else:
            yield Finding("green", name, found)
