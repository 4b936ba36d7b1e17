"""`python -m qlora_fsdp.doctor`: can this host train, and what would be in the way?

Each check gives findings: green, yellow (training runs, but ...) or red (it does not), with what to do. Under
`torchrun` or `accelerate launch` the processes also measure what they exchange.
"""

from __future__ import annotations

import json
import os
import platform
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from qlora_fsdp.errors import RankError, UserError, print_error

if TYPE_CHECKING:
    from qlora_fsdp.distributed import Processes

USAGE = """
Can this host train? Versions, GPUs, bitsandbytes, memory, disk, hub, SLURM; green, yellow or red, with what to do.

usage: [torchrun ... -m | accelerate launch -m | python -m] qlora_fsdp.doctor [--json FILE] [--folder DIR]

  --json FILE   write the findings there too
  --folder DIR  measure this disk: where models are, or run folders (default: this folder)

With N processes it also measures all-reduce and all-gather between them. The exit code is 1 if anything is red.
"""

VERSIONS = Path(__file__).parent / "versions.json"  # what passed scripts/check_versions.py, and what did not
GIB = 2**30
DISK_BYTES = 256 * 2**20
EXCHANGED_BYTES = {"cuda": 256 * 2**20, "cpu": 16 * 2**20}
MIN_FREE_GIB = 20
COLORS = {"green": "\033[32m", "yellow": "\033[33m", "red": "\033[31m"}


@dataclass(frozen=True)
class Finding:
    """One thing looked at: what was found, and what to do unless all is well."""

    level: Literal["green", "yellow", "red"]
    what: str
    found: str
    advice: str = ""

    def __str__(self) -> str:
        return f"{self.level:<6}  {self.what:<14}  {self.found}" + (
            f"\n{'':<24}-> {self.advice}" if self.advice else ""
        )


def check_versions() -> Iterator[Finding]:
    """Python and packages against the combinations that were tested, from the oldest to the newest."""
    table = json.loads(VERSIONS.read_text(encoding="utf-8"))
    combinations = [entry["versions"] for entry in table["tested"]]
    installed = {}
    for package in combinations[0]:
        tested = sorted((combination[package] for combination in combinations), key=_numbers)
        oldest, newest = tested[0].rpartition(".")[0], tested[-1]
        install = "Install Python" if package == "python" else f"pip install '{package}>={oldest}'"
        what = "Python" if package == "python" else package
        try:
            found = platform.python_version() if package == "python" else version(package)
        except PackageNotFoundError:
            yield Finding("red", what, "not installed", install)
            continue
        installed[package] = _numbers(found)
        if installed[package] < _numbers(oldest):
            yield Finding("red", what, found, f"Too old: {install}{f' {oldest} or newer' * (package == 'python')}")
        elif installed[package][:2] > _numbers(newest)[:2] and package != "python":
            yield Finding("yellow", what, found, f"Newer than what is tested ({newest}); if it fails, try that.")
        else:
            yield Finding("green", what, found)
    for bad in table["known_bad"]:
        named = {package: _numbers(text) for package, text in bad["versions"].items()}
        if all(installed.get(package, ())[: len(numbers)] == numbers for package, numbers in named.items()):
            found = f"{_shown(bad['versions'])}: {bad['reason']}"
            yield Finding("red", "combination", found, f"Install one that passed: {_shown(combinations[-1])}.")
            return
    installed.pop("python")
    same = [c for c in combinations if all(_numbers(c[p])[:2] == found[:2] for p, found in installed.items())]
    between = f"between those tested together: {'; '.join(_shown(c) for c in combinations)}"
    yield Finding("green", "combination", "tested together" if same else between)


def check_gpus() -> Iterator[Finding]:
    """Each GPU: memory, what it computes in, the copies of bytes, the kernels of bitsandbytes; and GPUs in pairs."""
    import torch

    if not torch.cuda.is_available():
        built = torch.version.cuda
        advice = f"install a driver for CUDA {built}" if built else "this torch is for CPUs: install one for CUDA"
        yield Finding("yellow", "GPU", "none seen; CPUs train small models only", f"If there is one, {advice}.")
        return
    yield _check_driver()
    count = torch.cuda.device_count()
    for index in range(count):
        free, total = torch.cuda.mem_get_info(index)
        major, minor = torch.cuda.get_device_capability(index)
        what, busy = f"GPU {index}", free < 0.9 * total
        found = (
            f"{torch.cuda.get_device_name(index)}, {free / GIB:.1f} of {total / GIB:.1f} GiB free, sm_{major}{minor}"
        )
        found += (", bf16" if major >= 8 else "") + (", fp8" if (major, minor) >= (8, 9) else "")
        if major < 8:
            yield Finding("yellow", what, found, "No bf16: training.precision=auto computes in float32, slowly.")
        elif busy:
            yield Finding("yellow", what, found, "Other processes hold its memory: see nvidia-smi.")
        else:
            yield Finding("green", what, found)
        with torch.cuda.device(index):  # kernels start on the current one
            checks = [_check_bytes(f"GPU {index} bytes", "cuda"), _check_kernels(f"GPU {index} bnb", "cuda")]
        yield from checks
    pairs = [(a, b) for a in range(count) for b in range(count) if a != b]
    without = [pair for pair in pairs if not torch.cuda.can_device_access_peer(*pair)]
    if without:
        found = f"{len(without)} of {len(pairs)} pairs of GPUs can't reach one another directly"
        yield Finding("yellow", "peer access", found, "Gathering goes through host memory: prefer fsdp=shard_grad_op.")
    elif pairs:
        yield Finding("green", "peer access", "between all GPUs")


def _check_driver() -> Finding:
    """The driver, torch's CUDA, and which of its libraries bitsandbytes has taken."""
    import torch
    from bitsandbytes import cextension

    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    driver = subprocess.run(query, capture_output=True, text=True, check=False).stdout.split() if _has(query[0]) else []
    found = f"driver {driver[0] if driver else 'of unknown version'}, CUDA {torch.version.cuda} in torch, "
    if isinstance(cextension.lib, cextension.ErrorHandlerMockBNBNativeLibrary):
        advice = "Install a bitsandbytes that has a library for it, or set BNB_CUDA_VERSION to one that it has."
        return Finding("red", "CUDA", f"{found}bitsandbytes has no library for it", advice)
    return Finding("green", "CUDA", f"{found}bitsandbytes' {Path(cextension.lib._lib._name).name}")


def check_cpu_kernels() -> Iterator[Finding]:
    """bitsandbytes on the CPU, where a machine without a GPU trains."""
    import torch

    if not torch.cuda.is_available():
        yield _check_kernels("bnb on CPU", torch.device("cpu"))


def _check_bytes(what: str, device: object) -> Finding:
    """Whether bf16 copies as FSDP2 gathers keep every bit pattern (pytorch#159333); gathered as bytes they must."""
    import torch

    patterns = torch.arange(2**16, dtype=torch.int32, device=device).to(torch.uint16).view(torch.bfloat16)  # type: ignore[call-overload]
    changed = []
    for view in (torch.bfloat16, torch.uint8):
        copied = torch.empty_like(patterns)
        torch._foreach_copy_([copied.view(view)], [patterns.view(view)])
        changed.append(int((copied.view(torch.uint16) != patterns.view(torch.uint16)).sum()))
    if changed[1]:
        return Finding(
            "red", what, f"{changed[1]} bit patterns change in a copy of bytes", "Use another torch or driver."
        )
    note = (
        f"; as bf16, {changed[0]} of 65,536 patterns change, so groups of bf16 alone are not used" if changed[0] else ""
    )
    return Finding("green", what, f"copied exactly as bytes{note}")


def _check_kernels(what: str, device: object) -> Finding:
    """Whether bitsandbytes quantizes, and gets the weight back within the error of its format."""
    import torch

    from qlora_fsdp.quantized import Format

    weight = torch.randn(64, 128, generator=torch.Generator().manual_seed(0)).to(device)  # type: ignore[call-overload]
    errors = {}
    for format in (Format("nf4"), Format("int8")):
        codes, scales = format.quantize_rows(weight)
        again = format.dequantize({"codes": codes, "scales": scales}, 64, 128, torch.float32)
        errors[format.quant_type] = float((again - weight).norm() / weight.norm())
    found = ", ".join(f"{name} error {error:.2%}" for name, error in errors.items())
    if errors["nf4"] > 0.15 or errors["int8"] > 0.02:
        return Finding("red", what, found, "The kernels compute wrong values: reinstall bitsandbytes for this CUDA.")
    return Finding("green", what, found)


def check_memory() -> Iterator[Finding]:
    """Host memory, and how much of it may be locked: loading reads into locked buffers."""
    import psutil

    memory = psutil.virtual_memory()
    cores = len(os.sched_getaffinity(0))
    yield Finding(
        "green", "host memory", f"{memory.available / GIB:.0f} of {memory.total / GIB:.0f} GiB free, {cores} cores"
    )
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY or soft >= GIB:
        yield Finding(
            "green", "locked memory", "unlimited" if soft == resource.RLIM_INFINITY else f"{soft / GIB:.0f} GiB"
        )
    else:
        found = f"{soft / 2**20:.0f} MiB may be locked (ulimit -l)"
        yield Finding("yellow", "locked memory", found, "NCCL over InfiniBand needs `ulimit -l unlimited`.")


def check_pinned() -> Iterator[Finding]:
    """Whether host memory can be pinned, as loading and offloading do, and how fast it is copied to the first GPU."""
    import torch

    if not torch.cuda.is_available():
        return
    try:
        host = torch.zeros(EXCHANGED_BYTES["cuda"], dtype=torch.uint8, pin_memory=True)
    except RuntimeError as error:
        advice = "Weights are loaded through it: allow this container more memory, or more of it locked (ulimit -l)."
        yield Finding("red", "pinned memory", f"can't be had: {str(error).partition(chr(10))[0]}", advice)
        return
    device = torch.device("cuda")
    for repeat in range(4):
        if repeat == 1:
            _synchronize(device)
            started = time.perf_counter()
        host.to(device, non_blocking=True)
    _synchronize(device)
    rate = 3 * len(host) / (time.perf_counter() - started) / 1e9
    yield Finding("green", "pinned memory", f"{len(host) // 2**20} MiB, copied to GPU 0 at {rate:.1f} GB/s")


def check_disk(folder: Path) -> Iterator[Finding]:
    """Free space, and the speed of writing, and of reading what was written without the page cache."""
    free = shutil.disk_usage(folder).free / GIB
    started = time.perf_counter()
    with tempfile.TemporaryFile(dir=folder) as file:
        block = os.urandom(2**20)
        for _ in range(DISK_BYTES // len(block)):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        written = time.perf_counter()
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        dropped = time.perf_counter()
        file.seek(0)
        while file.read(2**20):
            pass
        read = time.perf_counter()
    rates = [DISK_BYTES / seconds / 1e6 for seconds in (written - started, read - dropped)]
    found = f"{free:.0f} GiB free in {folder}, writes {rates[0]:,.0f} MB/s, reads {rates[1]:,.0f} MB/s"
    advice = f"Less than {MIN_FREE_GIB} GiB: put run.folder and the caches elsewhere." if free < MIN_FREE_GIB else ""
    yield Finding("yellow" if advice else "green", "disk", found, advice)


def check_hub() -> Iterator[Finding]:
    """Whether models can be downloaded, and as whom."""
    from huggingface_hub import constants, get_session, get_token

    if constants.HF_HUB_OFFLINE:
        yield Finding("yellow", "hub", "HF_HUB_OFFLINE is set", "Set model.path and data.path to local folders.")
        return
    try:
        get_session().head(constants.ENDPOINT, timeout=5)
    except Exception as error:  # any failure of any client means the same here
        advice = "Set model.path and data.path to local folders."
        yield Finding("yellow", "hub", f"can't be reached ({type(error).__name__})", advice)
        return
    logged_in = get_token() is not None
    advice = "" if logged_in else "Gated models need `hf auth login`."
    yield Finding(
        "green" if logged_in else "yellow", "hub", "reached, " + ("logged in" if logged_in else "no login"), advice
    )


def check_slurm() -> Iterator[Finding]:
    """Whether jobs can be submitted from here."""
    if shutil.which("sbatch"):
        job = os.environ.get("SLURM_JOB_ID")
        yield Finding("green", "SLURM", f"in job {job}" if job else "sbatch is here: hydra/launcher=slurm submits")
    else:
        yield Finding("green", "SLURM", "no sbatch: runs start on this host")


def check_exchange(processes: Processes) -> Iterator[Finding]:
    """Rates of all-reduce and all-gather between the processes, as NCCL's own tests count them."""
    import torch
    import torch.distributed as dist

    from qlora_fsdp.shards import gather_rows

    device, size = processes.device, processes.num_ranks
    num_bytes = EXCHANGED_BYTES[device.type] // size * size
    whole = torch.ones(num_bytes // 2, dtype=torch.bfloat16, device=device)
    part = torch.ones(num_bytes // 2 // size, dtype=torch.bfloat16, device=device)
    exchanges: dict[str, tuple[float, Callable[[], object]]] = {
        "all-reduce": (2 * (size - 1) / size, lambda: dist.all_reduce(whole)),
        "all-gather": ((size - 1) / size, lambda: gather_rows(part, len(whole), dist.group.WORLD)),
    }
    for name, (factor, exchange) in exchanges.items():
        for repeat in range(4):
            if repeat == 1:
                _synchronize(device)
                started = time.perf_counter()
            exchange()
        _synchronize(device)
        rate = 3 * num_bytes * factor / (time.perf_counter() - started) / 1e9
        found = f"{rate:.1f} GB/s between {size} processes ({device.type})"
        slow = device.type == "cuda" and rate < 5
        advice = "Slow: look for NVLink or InfiniBand in NCCL_DEBUG=INFO." if slow else ""
        yield Finding("yellow" if slow else "green", name, found, advice)


def _synchronize(device: object) -> None:
    import torch

    if getattr(device, "type", None) == "cuda":
        torch.cuda.synchronize()


def _has(program: str) -> bool:
    return shutil.which(program) is not None


def _shown(versions: dict[str, str]) -> str:
    return ", ".join(f"{package} {found}" for package, found in versions.items())


def _numbers(text: str) -> tuple[int, ...]:
    """(2, 13, 0) of `2.13.0+cu130`."""
    return tuple(int(part) for part in text.partition("+")[0].split(".") if part.isdigit())


def diagnose(folder: Path) -> list[Finding]:
    """What every check finds; one that fails is itself a finding."""
    checks: list[tuple[str, Callable[[], Iterator[Finding]]]] = [
        ("versions", check_versions),
        ("GPUs", check_gpus),
        ("bitsandbytes", check_cpu_kernels),
        ("memory", check_memory),
        ("pinned memory", check_pinned),
        ("disk", lambda: check_disk(folder)),
        ("hub", check_hub),
        ("SLURM", check_slurm),
    ]
    findings: list[Finding] = []
    for name, check in checks:
        try:
            findings += check()
        except Exception as error:  # whatever is broken here is what this command is for
            findings.append(Finding("red", name, f"{type(error).__name__}: {error}", "Mend this first."))
    return findings


def main(argv: Sequence[str] | None = None) -> int:
    """Check and print. Returns 1 if anything is red, else 0."""
    import argparse

    parser = argparse.ArgumentParser("qlora_fsdp.doctor", usage=USAGE.partition("usage: ")[2], add_help=False)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--folder", type=Path, default=Path())
    parser.add_argument("-h", "--help", action="store_true")
    options = parser.parse_args(argv)
    is_main = os.environ.get("RANK", "0") == "0"
    if options.help:
        print(USAGE.strip() if is_main else "", end="\n" if is_main else "")
        return 0
    findings: list[Finding] = diagnose(options.folder) if is_main else []
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        findings += _exchanged()
    if not is_main:
        return 0
    colored = sys.stdout.isatty()
    for finding in findings:
        line = str(finding)
        print(line.replace(finding.level, f"{COLORS[finding.level]}{finding.level}\033[0m", 1) if colored else line)
    if options.json is not None:
        options.json.write_text(
            json.dumps([asdict(finding) for finding in findings], indent=1) + "\n", encoding="utf-8"
        )
    return int(any(finding.level == "red" for finding in findings))


def _exchanged() -> list[Finding]:
    from qlora_fsdp.distributed import start_processes, stop_processes

    try:
        processes = start_processes(120)
        return list(check_exchange(processes))
    except (UserError, RuntimeError) as error:
        if not isinstance(error, UserError):
            error = RankError(str(error))
        print_error(error)
        return [Finding("red", "processes", str(error).partition("\n")[0], "See docs/errors.md.")]
    finally:
        stop_processes()


if __name__ == "__main__":
    sys.exit(main())
