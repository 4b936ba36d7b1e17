"""A cache of quantized weights in files, so that later runs and the jobs of a sweep read a quarter of the bytes.

An entry of the cache is a folder of safetensors files in bitsandbytes' format. It holds the layers that are quantized,
and nothing else. Its name is a digest of everything that its bytes depend on: the base model's fingerprint,
the layers, and how and where they are quantized. An entry is written under a temporary name and renamed. Only one
process per node looks at it at a time.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import torch
from bitsandbytes.functional import QuantState
from filelock import FileLock, Timeout
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from qlora_fsdp.common.errors import CheckpointError
from qlora_fsdp.common.files import digest_files, remove, remove_leftovers, replacing
from qlora_fsdp.common.foreign_files import (
    check_owner,
    close_to_others,
    find_cache,
    lock_mode,
    open_cache,
    read_digests,
    read_json_object,
)
from qlora_fsdp.common.sizes import NESTED_BLOCKSIZE
from qlora_fsdp.common.text import first_line
from qlora_fsdp.layers.quantized.format import Format, code_book, dynamic_map
from qlora_fsdp.layers.quantized.linear import QuantizedLinear
from qlora_fsdp.records.run_folder import log
from qlora_fsdp.runtime.processes import Processes
from qlora_fsdp.weights.assign import match_quantized
from qlora_fsdp.weights.composed import Assignment
from qlora_fsdp.weights.fill import fill_from_files
from qlora_fsdp.weights.safetensors_files import INDEX_NAME, fingerprint_files, read_headers
from qlora_fsdp.weights.stored_quantization import int8_state_names, weight_shape

DEFAULT_FOLDER = "~/.cache/qlora_fsdp/quantized"
CACHE_VERSION = 1  # to be raised when the same settings give other bytes
MANIFEST = "cache.json"
MAX_MANIFEST_BYTES = 2**20  # a digest for each file of 2 GiB
FILE_BYTES = 2 * 2**30  # of quantized weights per file; they are in host memory while the file is written


def use_cache(
    assignments: Sequence[Assignment],
    base: str | None,
    folder: str | None,
    dtype: torch.dtype,
    processes: Processes,
    writes: bool = True,
) -> list[Assignment]:
    """Let the weights that have to be quantized come from the cache, which is written first where it lacks them.

    Args:
        assignments: all of the model's.
        base: fingerprint of the base model's files.
        folder: model.cache_folder.
        dtype: the model's dtype, to which weights are cast before they are quantized.
        processes: all ranks take part; the first rank of each node writes.
        writes: write an entry that is missing or damaged.

    Returns:
        Assignments that lead to the same bytes. Where the cache can't be used, they are those that were given.

    Raises:
        CheckpointError: the entry lacks tensors, although it is the one that was written.
    """
    read = [a for a in assignments if a.is_quantized and a.stored is not None and not a.keeps_codes]
    chosen = [a for a in read if a.layer.format.is_bitsandbytes]
    if not chosen:
        reason = "it is for bitsandbytes' formats" if read else "nothing is read that has to be quantized"
        log.info(f"No cache of quantized weights: {reason}")
        return list(assignments)
    device = processes.device
    layers = [[a.name, a.layer.out_features, a.layer.in_features, _describe(a.layer.format)] for a in chosen]
    identity = json.dumps([CACHE_VERSION, base, str(dtype), device.type, layers])
    entry = find_cache(folder, DEFAULT_FOLDER) / hashlib.sha256(identity.encode()).hexdigest()[:32]
    error = _prepare(entry, folder, chosen, dtype, device, writes) if processes.is_local_main else None
    error = processes.first_error(error)
    if error is not None:
        log.warning(
            f"No cache of quantized weights: model.cache_folder={entry.parent} can't be used: {error}. Weights are "
            "quantized as they are loaded."
        )
        return list(assignments)
    tensors = read_headers(entry)
    found = {a.name: match_quantized(a.name, a.layer, tensors) for a in chosen}
    problems = [name for match in found.values() for name in match.missing]
    problems += [match.problem for match in found.values() if match.problem is not None]
    if problems:
        raise CheckpointError(f"{entry} is damaged: {problems[0]}. Remove it.")
    log.info(f"Quantized weights come from {entry}")
    return [found[a.name].assignment or a if a.name in found else a for a in assignments]


def _prepare(
    entry: Path,
    typed: str | None,
    chosen: Sequence[Assignment],
    dtype: torch.dtype,
    device: torch.device,
    writes: bool,
) -> str | None:
    """Write an entry that is missing or damaged, if it may be written. Returns why it can't be used, None if it can."""
    missing = f"training with these settings has not written {entry.name} there"
    try:
        problem = _find_damage(entry) if entry.is_dir() else missing
        if problem is not None:  # a whole entry is not written again: its folder may be read-only
            if not writes:
                return problem
            open_cache(typed, DEFAULT_FOLDER)
            with _alone(entry):
                _make(entry, typed, chosen, dtype, device)
        check_owner(entry, typed)
    except (OSError, SafetensorError) as failure:
        return str(failure)
    return None


@contextmanager
def _alone(entry: Path) -> Iterator[None]:
    """Hold the entry's lock: other runs, and other nodes that share the folder, wait for the first."""
    lock = FileLock(entry.with_suffix(".lock"), mode=lock_mode(entry.parent))
    with suppress(Timeout):
        lock.acquire(timeout=0)
    if not lock.is_locked:
        log.info(f"Waiting for the run that writes quantized weights to {entry}")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _make(
    entry: Path, typed: str | None, chosen: Sequence[Assignment], dtype: torch.dtype, device: torch.device
) -> None:
    """Write the entry where it is missing or damaged."""
    if entry.is_dir():
        problem = _find_damage(entry)
        if problem is None:
            return
        log.warning(f"The cache of quantized weights is damaged and made anew: {problem}")
        remove(entry)
    remove_leftovers(entry)
    with replacing(entry) as temporary:
        temporary.mkdir()
        log.info(f"Writing the quantized weights of {len(chosen)} layers to {entry}, for this run and later ones")
        _write(temporary, chosen, dtype, device)
        close_to_others(temporary, typed, {tensor.file for a in chosen for tensor in a.stored_tensors})


def _find_damage(entry: Path) -> str | None:
    """What is wrong with an entry: files missing, cut short or with other bytes than were written.

    Every byte is read, some 1 to 2 GB/s on each of NUM_DIGESTERS threads. The load that follows finds the files in
    memory, as far as that has room.
    """
    try:
        manifest = read_json_object(entry / MANIFEST, MAX_MANIFEST_BYTES)
        if fingerprint_files(read_headers(entry).values()) != manifest["fingerprint"]:
            return f"{entry} has other values"
        found = read_digests(entry, manifest["files"])
        changed = [name for name, digest in manifest["files"].items() if found[name] != digest]
        return f"{entry / changed[0]} has other bytes than were written" if changed else None
    except (CheckpointError, OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return first_line(error)


def _write(folder: Path, chosen: Sequence[Assignment], dtype: torch.dtype, device: torch.device) -> None:
    weight_map: dict[str, str] = {}
    for number, group in enumerate(_groups(chosen), start=1):
        layers = [
            QuantizedLinear(a.layer.in_features, a.layer.out_features, False, a.layer.format, dtype, device)
            for a in group
        ]
        parts = [replace(a, module=layer) for a, layer in zip(group, layers, strict=True)]
        fill_from_files(parts, device, dtype)
        tensors: dict[str, Tensor] = {}
        for a, layer in zip(group, layers, strict=True):
            tensors |= _as_bitsandbytes(a.name, layer, weight_shape(a.layer), dtype)
        name = f"quantized-{number:05}.safetensors"
        save_file(tensors, folder / name, {"format": "pt"})
        weight_map |= dict.fromkeys(tensors, name)
    if device.type == "cuda":
        torch.cuda.empty_cache()
    (folder / INDEX_NAME).write_text(json.dumps({"weight_map": weight_map}, indent=1))
    manifest = {
        "fingerprint": fingerprint_files(read_headers(folder).values()),
        "files": digest_files(folder, sorted(set(weight_map.values()))),
    }
    (folder / MANIFEST).write_text(json.dumps(manifest))


def _as_bitsandbytes(
    name: str, layer: QuantizedLinear, shape: tuple[int, ...], dtype: torch.dtype
) -> dict[str, Tensor]:
    """A weight's tensors under the names and in the shapes in which bitsandbytes saves them; on the CPU."""
    format = layer.format
    scales = layer.scales.detach()
    if not format.is_4bit:
        codes = format.unpack(layer.codes.detach(), layer.in_features).view(torch.int8).view(shape)
        scales_name, format_name = int8_state_names(name)
        return {name: codes.cpu(), scales_name: scales.cpu(), format_name: torch.zeros((), dtype=torch.uint8)}
    codes = format.unpack(layer.codes.detach(), layer.in_features // 2)
    nested, offset = None, None
    if format.double_quant:
        scales = format.unpack(scales, layer.in_features // format.blocksize)
        values, map = layer.nested_scales.detach(), dynamic_map(scales.device)
        nested = QuantState(values[:-1].contiguous(), code=map, blocksize=NESTED_BLOCKSIZE, dtype=torch.float32)
        offset = values[-1]
    state = QuantState(
        scales.flatten(),
        torch.Size(shape),
        code_book(format.quant_type, scales.device).clone(),
        format.blocksize,
        format.quant_type,
        dtype,
        offset,
        nested,
    )
    described = {f"{name}.{key}": value.cpu() for key, value in state.as_dict(packed=True).items()}
    return {name: codes.reshape(-1, 1).cpu(), **described}


def _groups(chosen: Sequence[Assignment]) -> Iterator[list[Assignment]]:
    """The weights of each file, in order."""
    group: list[Assignment] = []
    num_bytes = 0
    for a in chosen:
        group.append(a)
        num_bytes += a.layer.format.num_bytes(a.layer.out_features, a.layer.in_features)
        if num_bytes >= FILE_BYTES:
            yield group
            group, num_bytes = [], 0
    if group:
        yield group


def _describe(format: Format) -> list[object]:
    """The facts of a format on which the bytes depend. The dtype in which they are stored is none of them."""
    return [format.quant_type, format.double_quant, format.blocksize]
