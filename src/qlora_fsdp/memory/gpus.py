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
UNITS = {"m": 2**-10, "g": 1.0, "t": 2**10}  # GiB, by the first letter
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
    count = 0
    name = text.lower()
    match = re.fullmatch(r"(?:(\d+)x)?([a-z0-9.-]+)", name)
    if match is not None:
        count = int(match.group(1) or 1)
        name = match.group(2)
    size = re.fullmatch(r"(\d+(?:\.\d+)?)(?:gib|gb|g)?", name)
    if size is not None and not 0 < float(size.group(1)) <= MAX_GIB:
        size = None
    if count and name in known_gpus():
        gpu = known_gpus()[name]
        note = ""
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
    found = [
        (int(mib) / 1024, name)
        for index, uuid, mib, name in query_gpus("index", "uuid", "memory.total", "name")
        if mib.isdecimal() and _is_visible(index, uuid)
    ]
    if not found:
        return None
    gib, name = min(found, key=lambda one: one[0])
    note = "as nvidia-smi found"
    gpu = find_gpu(name)
    if gpu is None:
        note += f", rates as of {gpu_of_size(gib).name}"
        gpu = replace(gpu_of_size(gib), name=name, gib=gib)
    if any(other != name for _, other in found):
        note += "; they differ: this one has the least memory"
    return _on_hosts(gpu, len(found), note)


def _is_visible(index: str, uuid: str) -> bool:
    """Whether CUDA_VISIBLE_DEVICES leaves a GPU, by its index or the beginning of its id."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return True
    wanted = [name.strip() for name in visible.split(",") if name.strip()]
    return any(index == name or uuid.startswith(name) for name in wanted)


def _on_hosts(gpu: Gpu, count: int, note: str) -> Hardware:
    """`count` GPUs on hosts of eight. Between hosts their link is the network."""
    if count > GPUS_A_HOST:
        gpu = replace(gpu, link_gb_s=min(gpu.link_gb_s, NETWORK_GB_S))
        note = "; ".join(filter(None, [note, f"{GPUS_A_HOST} GPUs a host, {NETWORK_GB_S:g} GB/s a GPU between hosts"]))
    return Hardware(gpu, count, note)


def _nearest(text: str) -> list[str]:
    """Guess what was meant: a count after the name, another sign or unit, a part of a name, or a typo."""
    count = "1"
    name = text
    count_first = re.fullmatch(r"(\d{1,4})(?:\s*[x*]\s*|\s+)(.+)", text)
    name_first = re.fullmatch(r"(.*\d[a-z]*)\s*[x*]\s*(\d{1,3})", text)
    if count_first is not None:
        count, name = count_first.groups()
    elif name_first is not None:
        name, count = name_first.groups()
    number = max(1, int(count))
    size = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]+)", name)
    if size is not None:
        unit = UNITS.get(size.group(2)[0])
        gib = 0.0 if unit is None else float(size.group(1)) * unit
        return [f"{number}x{gib:g}gib"] if 1 <= gib <= MAX_GIB else []
    near = [gpu for gpu in known_gpus() if name and (name in gpu or gpu in name)]
    if not near:
        near = difflib.get_close_matches(name, known_gpus(), n=3, cutoff=0.4)
    near.sort(key=lambda gpu: gpu != name)
    return [f"{number}x{gpu}" for gpu in near[:3]]


def gpu_of_size(gib: float) -> Gpu:
    """The GPU whose memory is nearest; of several, the first in the table, whose rates are the most common."""
    return min(known_gpus().values(), key=lambda gpu: abs(gpu.gib - gib))
