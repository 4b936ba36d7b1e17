"""Checks of the host: memory, disk, the versions of Python and packages, the hub and SLURM."""

from __future__ import annotations

import json
import os
import platform
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import cache_from_source, find_spec
from pathlib import Path
from typing import Literal

from qlora_fsdp.memory.plan import GIB

DISK_BYTES = 256 * 2**20
MIN_FREE_GIB = 20
VERSIONS = Path(__file__).parents[1] / "versions.json"  # what passed scripts/check_versions.py and what did not


@dataclass(frozen=True)
class Finding:
    """The finding of a check about one thing, with what to do unless all is well."""

    level: Literal["green", "yellow", "red"]
    what: str
    found: str
    advice: str = ""

    def __str__(self) -> str:
        advice = f"\n{'':<24}-> {self.advice}" if self.advice else ""
        return f"{self.level:<6}  {self.what:<14}  {self.found}{advice}"


def check_memory() -> Iterator[Finding]:
    """Free memory and cores, of the host or its container; and how much may be locked, as buffers are for loading."""
    import psutil

    from qlora_fsdp.data.workers import num_cores
    from qlora_fsdp.runtime.host_memory import available_bytes

    total = psutil.virtual_memory().total
    found = f"{available_bytes() / GIB:.0f} of {total / GIB:.0f} GiB free, {num_cores()} cores"
    yield Finding("green", "host memory", found)
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY or soft >= GIB:
        found = "unlimited" if soft == resource.RLIM_INFINITY else f"{soft / GIB:.0f} GiB"
        yield Finding("green", "locked memory", found)
    else:
        found = f"{soft / 2**20:.0f} MiB may be locked (ulimit -l)"
        yield Finding("yellow", "locked memory", found, "NCCL over InfiniBand needs `ulimit -l unlimited`.")


def check_disk(folder: Path) -> Iterator[Finding]:
    """Free space, and how fast a file is written and then read back, without the page cache."""
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
    write_rate = DISK_BYTES / (written - started) / 1e6
    read_rate = DISK_BYTES / (read - dropped) / 1e6
    found = f"{free:.0f} GiB free in {folder}, writes {write_rate:,.0f} MB/s, reads {read_rate:,.0f} MB/s"
    if free < MIN_FREE_GIB:
        advice = f"Less than {MIN_FREE_GIB} GiB: put run.folder and the caches elsewhere."
        yield Finding("yellow", "disk", found, advice)
    else:
        yield Finding("green", "disk", found)


def check_versions() -> Iterator[Finding]:
    """Compares Python and packages with the combinations that were tested, from the oldest to the newest."""
    table = json.loads(VERSIONS.read_text(encoding="utf-8"))
    combinations = [entry["versions"] for entry in table["tested"]]
    installed = {}
    for package in combinations[0]:
        is_python = package == "python"
        tested = sorted((combination[package] for combination in combinations), key=_numbers)
        oldest = tested[0].rpartition(".")[0]
        newest = tested[-1]
        install = f"pip install '{package}>={oldest}'"
        what = package
        if is_python:
            install = f"Install Python {oldest} or newer"
            what = "Python"
        try:
            found = platform.python_version() if is_python else version(package)
        except PackageNotFoundError:
            yield Finding("red", what, "not installed", install)
            continue
        installed[package] = _numbers(found)
        is_newer = installed[package][:2] > _numbers(newest)[:2]
        if installed[package] < _numbers(oldest):
            yield Finding("red", what, found, f"Too old: {install}")
        elif is_newer and not is_python:
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
    found = f"between those tested together: {'; '.join(map(_shown, combinations))}"
    for combination in combinations:
        if all(_numbers(combination[package])[:2] == numbers[:2] for package, numbers in installed.items()):
            found = "tested together"
    yield Finding("green", "combination", found)


def check_bytecode() -> Iterator[Finding]:
    """Whether Python keeps the bytecode that it compiles; a finding only if it does not.

    pip compiles what it installs, but not every installer does. Without bytecode each start compiles all again.
    """
    spec = find_spec("torch")
    if spec is None or spec.origin is None or Path(cache_from_source(spec.origin)).exists():  # torch has bytecode
        return
    advice = "Set PYTHONPYCACHEPREFIX to a folder that can be written."
    if sys.dont_write_bytecode:
        advice = f"Unset PYTHONDONTWRITEBYTECODE, or run `python -m compileall -q {Path(spec.origin).parents[1]}` once."
    yield Finding("yellow", "bytecode", "not kept: each start compiles torch and the others, which takes 10 s", advice)


def check_hub() -> Iterator[Finding]:
    """Whether the hub can be reached, and whether a user is logged in."""
    from huggingface_hub import constants, get_session, get_token

    if constants.HF_HUB_OFFLINE:
        yield Finding("yellow", "hub", "HF_HUB_OFFLINE is set", "Set model.path and data.path to local folders.")
        return
    try:
        get_session().head(constants.ENDPOINT, timeout=5)
    except Exception as error:  # the client in use decides which class of error this is
        advice = "Set model.path and data.path to local folders."
        yield Finding("yellow", "hub", f"can't be reached ({type(error).__name__})", advice)
        return
    if get_token() is not None:
        yield Finding("green", "hub", "reached, logged in")
    else:
        yield Finding("yellow", "hub", "reached, no login", "Gated models need `hf auth login`.")


def check_slurm() -> Iterator[Finding]:
    """Whether SLURM jobs can be submitted from this host."""
    if shutil.which("sbatch"):
        job = os.environ.get("SLURM_JOB_ID")
        yield Finding("green", "SLURM", f"in job {job}" if job else "sbatch is here: hydra/launcher=slurm submits")
    else:
        yield Finding("green", "SLURM", "no sbatch: runs start on this host")


def _shown(versions: dict[str, str]) -> str:
    return ", ".join(f"{package} {found}" for package, found in versions.items())


def _numbers(text: str) -> tuple[int, ...]:
    """(2, 13, 0) of `2.13.0+cu130`."""
    return tuple(int(part) for part in text.partition("+")[0].split(".") if part.isdigit())
