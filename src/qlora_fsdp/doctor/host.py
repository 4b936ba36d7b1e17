"""Checks of host memory and disk."""

from __future__ import annotations

import os
import resource
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from qlora_fsdp.doctor.finding import Finding
from qlora_fsdp.memory.plan import GIB

DISK_BYTES = 256 * 2**20
MIN_FREE_GIB = 20


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
    rates = [DISK_BYTES / seconds / 1e6 for seconds in (written - started, read - dropped)]
    found = f"{free:.0f} GiB free in {folder}, writes {rates[0]:,.0f} MB/s, reads {rates[1]:,.0f} MB/s"
    advice = f"Less than {MIN_FREE_GIB} GiB: put run.folder and the caches elsewhere." if free < MIN_FREE_GIB else ""
    yield Finding("yellow" if advice else "green", "disk", found, advice)
