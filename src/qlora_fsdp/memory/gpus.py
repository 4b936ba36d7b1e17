"""Known GPUs with their memory and rates (gpus.yaml), and the parser of preflight's `hardware=`."""

from __future__ import annotations

import difflib
import os
import re
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import yaml

from qlora_fsdp.common.errors import ConfigError, Problem
from qlora_fsdp.common.nvidia_smi import query_gpus

GPUS_A_HOST = 8
MAX_GIB = 1024  # a larger number is not understood as the memory of a GPU
NETWORK_GB_S = 25.0  # per GPU, between hosts


@dataclass(frozen=True)
class Gpu:
    """A kind of GPU. gpus.yaml explains the fields."""

    name: str
    contains: str
    gib: float
    tflops: float
    fp8_tflops: float
    memory_gb_s: float
    link_gb_s: float
    host_gb_s: float


@dataclass(frozen=True)
class Hardware:
    """A number of GPUs of one kind."""

    gpu: Gpu
    count: int
    note: str = ""

    @property
    def local_count(self) -> int:
        """GPUs per host."""
        return min(self.count, GPUS_A_HOST)


@cache
def known_gpus() -> dict[str, Gpu]:
    """Every GPU of gpus.yaml by its name."""
    table = yaml.safe_load((Path(__file__).parent / "gpus.yaml").read_text(encoding="utf-8"))
    return {name: Gpu(name, **values) for name, values in table.items()}


def find_gpu(device_name: str) -> Gpu | None:
    """The GPU for which torch has this name, e.g. `NVIDIA H200`; None if it is not in the table."""
    return next((gpu for gpu in known_gpus().values() if gpu.contains in device_name), None)


def parse_hardware(text: str) -> Hardware:
    """Parse `COUNTxNAME` (8xh200) or `COUNTxGIB` (2x24gib). A name or size alone means one GPU.

    Raises:
        ConfigError: the text is neither. The message has the names that were probably meant.
    """
    match = re.fullmatch(r"(?:(\d+)x)?([a-z0-9.-]+)", text.lower())
    count = int(match.group(1) or 1) if match else 0
    name = match.group(2) if match else text.lower()
    size = re.fullmatch(r"(\d+(?:\.\d+)?)(?:gib|gb|g)?", name)
    if size is not None and not 0 < float(size.group(1)) <= MAX_GIB:
        size = None
    if count and name in known_gpus():
        gpu, note = known_gpus()[name], ""
    elif count and size is not None:
        gib = float(size.group(1))
        gpu = gpu_of_size(gib)
        note = f"rates as of {gpu.name}, whose memory is nearest"
        gpu = replace(gpu, name=f"{gib:g} GiB", gib=gib)
    else:
        near = _nearest(text.lower())
        fix = f"Did you mean {' or '.join(near)}?" if near else "Set hardware=2x24gib, or another of these."
        reason = "is no GPU known here. It is COUNTxGIB, such as 2x24gib, or COUNTxNAME with one of "
        raise ConfigError([Problem(f"hardware={text}", f"{reason}{', '.join(known_gpus())}.", fix)])
    return _on_hosts(gpu, count, note)


def visible_hardware() -> Hardware | None:
    """The GPUs of this host that CUDA_VISIBLE_DEVICES leaves, as nvidia-smi names them; None if there are none.

    If they differ, the one with the least memory stands for all.
    """
    rows = [row for row in query_gpus("index", "uuid", "memory.total", "name") if row[2].isdecimal()]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        wanted = [name.strip() for name in visible.split(",") if name.strip()]
        rows = [row for row in rows if any(row[0] == name or row[1].startswith(name) for name in wanted)]
    if not rows:
        return None
    least = min(rows, key=lambda row: int(row[2]))
    gib, name = int(least[2]) / 1024, least[3]
    gpu = find_gpu(name)
    notes = ["as nvidia-smi found" if gpu else f"as nvidia-smi found, rates as of {gpu_of_size(gib).name}"]
    if any(row[3] != name for row in rows):
        notes.append("they differ: this one has the least memory")
    gpu = gpu or replace(gpu_of_size(gib), name=name, gib=gib)
    return _on_hosts(gpu, len(rows), "; ".join(notes))


def _on_hosts(gpu: Gpu, count: int, note: str) -> Hardware:
    """`count` GPUs on hosts of eight. Between hosts their link is the network."""
    if count > GPUS_A_HOST:
        gpu = replace(gpu, link_gb_s=min(gpu.link_gb_s, NETWORK_GB_S))
        note = "; ".join(filter(None, [note, f"{GPUS_A_HOST} GPUs a host, {NETWORK_GB_S:g} GB/s a GPU between hosts"]))
    return Hardware(gpu, count, note)


def _nearest(text: str) -> list[str]:
    """Guess what was meant: a count after the name, another sign or unit, a part of a name, or a typo."""
    before = re.fullmatch(r"(\d{1,4})(?:\s*[x*]\s*|\s+)(.+)", text)
    name_first = re.fullmatch(r"(.*\d[a-z]*)\s*[x*]\s*(\d{1,3})", text)
    count, name = before.groups() if before else name_first.groups()[::-1] if name_first else ("1", text)
    size = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]+)", name)
    if size is not None:
        gib = float(size.group(1)) * {"m": 2**-10, "t": 2**10}.get(size.group(2)[0], 1)
        is_size = size.group(2)[0] in "gmt" and 1 <= gib <= MAX_GIB
        return [f"{max(1, int(count))}x{gib:g}gib"] if is_size else []
    known = [gpu for gpu in known_gpus() if name and (name in gpu or gpu in name)]
    known = known or difflib.get_close_matches(name, known_gpus(), n=3, cutoff=0.4)
    return [f"{max(1, int(count))}x{gpu}" for gpu in sorted(known, key=lambda gpu: gpu != name)[:3]]


def gpu_of_size(gib: float) -> Gpu:
    """The GPU whose memory is nearest; of several, the first in the table, whose rates are the most common."""
    return min(known_gpus().values(), key=lambda gpu: abs(gpu.gib - gib))
