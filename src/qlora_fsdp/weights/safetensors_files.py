"""What safetensors files hold, read from their headers alone.

Format: https://huggingface.co/docs/safetensors (8 bytes of header length, JSON header, then the tensors' bytes).
Headers are read here and not by `safe_open`, because our readers need the offsets: they read rows straight into memory
of their own.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch

from qlora_fsdp.common.errors import CheckpointError
from qlora_fsdp.common.foreign_files import read_json_object
from qlora_fsdp.common.sizes import PIECE_BYTES
from qlora_fsdp.common.text import list_some, shorten

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
DTYPES = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I32": torch.int32,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
}
MAX_DIMS = 64  # of a tensor, as torch has it
MAX_HEADER_BYTES = 100_000_000  # as the format's own library has it
SAMPLE_BYTES = 64  # of each tensor, which a fingerprint looks at


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file: its bytes lie row-major from byte `offset` of `file`."""

    key: str
    file: Path
    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def row_bytes(self) -> int:
        """Bytes of a row, which is what varies along the last dim, or an element of a vector."""
        return (self.shape[-1] if len(self.shape) > 1 else 1) * self.dtype.itemsize


def read_headers(folder: Path) -> dict[str, StoredTensor]:
    """All tensors of the model files in `folder`: one safetensors file, or else several with an index.

    Where there are both, the one file counts, as in transformers, which leaves an older model's index beside it.

    Raises:
        CheckpointError: there are no safetensors files, a file of the index is missing, or files are cut short or
            damaged; all of them are listed.
    """
    is_single = (folder / SINGLE_NAME).is_file()
    if not is_single and not (folder / INDEX_NAME).is_file():
        others = sorted(p.name for p in folder.glob("*.bin")) + sorted(p.name for p in folder.glob("*.pth"))
        hint = f" It has {', '.join(others[:3])}: convert these to safetensors." if others else ""
        raise CheckpointError(
            f"model.path={folder} has neither {SINGLE_NAME} nor {INDEX_NAME}.{hint} Set model.path to a folder with "
            "safetensors files, or model.weights=random for a dry run."
        )
    weight_map = {} if is_single else _read_index(folder / INDEX_NAME)
    tensors: dict[str, StoredTensor] = {}
    problems = []
    for name in sorted(set(weight_map.values())) or [SINGLE_NAME]:
        try:
            header = _read_header(folder / name)
            # Where two files have a tensor, the index says which of them is meant.
            tensors |= {key: stored for key, stored in header.items() if weight_map.get(key, name) == name}
        except (OSError, ValueError) as error:
            problems.append(f"{name}: {error}")
    if problems:
        raise CheckpointError(
            f"model.path={folder} has files that can't be read. Copy or download these again:\n{list_some(problems)}"
        )
    return tensors


def _read_index(file: Path) -> dict[str, str]:
    """The name of the file that has a tensor, by the tensor's key. Every file lies in the index's own folder.

    Raises:
        CheckpointError: the index is damaged, or names files elsewhere.
    """
    try:
        weight_map: Any = read_json_object(file, MAX_HEADER_BYTES).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ValueError("it has no weight_map, which is to name the file of each tensor")
        for key, name in weight_map.items():
            if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors"):
                what = f"{shorten(key)} is to be in {shorten(str(name))}"
                raise ValueError(f"{what}, which is no safetensors file of this folder")
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} is damaged: {error}. Copy or download it again.") from error
    return dict(weight_map)


def fingerprint_files(tensors: Iterable[StoredTensor]) -> str:
    """SHA-256 over each tensor's name, dtype, shape and the 64 bytes in its middle.

    It does not depend on how tensors are spread over files. It tells a model from another one of the same shapes, and
    reads a few KB. It is no checksum: it does not notice a change of any other byte.

    Raises:
        CheckpointError: a file can't be read.
    """
    digest, files = hashlib.sha256(), dict[Path, BinaryIO]()
    with ExitStack() as stack:
        for tensor in sorted(tensors, key=lambda tensor: tensor.key):
            digest.update(json.dumps([tensor.key, str(tensor.dtype), list(tensor.shape)]).encode())
            try:
                if tensor.file not in files:
                    files[tensor.file] = stack.enter_context(tensor.file.open("rb"))
                files[tensor.file].seek(tensor.offset + max(0, tensor.num_bytes - SAMPLE_BYTES) // 2)
                digest.update(files[tensor.file].read(min(SAMPLE_BYTES, tensor.num_bytes)))
            except OSError as error:
                raise CheckpointError(f"{tensor.file} can't be read: {error}. Copy or download it again.") from error
    return digest.hexdigest()


def same_bytes(one: StoredTensor, other: StoredTensor) -> bool:
    """Whether two tensors hold the same values. Both are read up to the first difference."""
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    with one.file.open("rb") as a, other.file.open("rb") as b:
        a.seek(one.offset)
        b.seek(other.offset)
        sizes = (min(PIECE_BYTES, one.num_bytes - start) for start in range(0, one.num_bytes, PIECE_BYTES))
        return all(a.read(size) == b.read(size) for size in sizes)


def _read_header(file: Path) -> dict[str, StoredTensor]:
    """The tensors of one file by name.

    Raises:
        OSError: the file can't be read.
        ValueError: the file is cut short, or its header contradicts itself or the file's size.
    """
    if not file.is_file():
        raise ValueError("missing, though the index names it")
    with file.open("rb") as stream:
        return parse_header(file, stream)


def parse_header(file: Path, stream: BinaryIO) -> dict[str, StoredTensor]:
    """The tensors of one file by name, given the file and what it was opened as.

    Raises:
        OSError, ValueError: as `_read_header`.
    """
    size = os.fstat(stream.fileno()).st_size
    length = int.from_bytes(stream.read(8), "little")
    if size < 8 or length > size - 8:
        raise ValueError(f"cut short inside its header ({size} bytes)")
    if length > MAX_HEADER_BYTES:
        raise ValueError(f"damaged inside its header ({length:,} bytes long)")
    try:
        header = json.loads(stream.read(length), object_pairs_hook=_without_doubles)
        if not isinstance(header, dict):
            raise ValueError("damaged inside its header, which is to name tensors")
        header.pop("__metadata__", None)
        return _place_tensors(file, header, 8 + length, size)
    except (LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"damaged inside its header ({shorten(repr(error))})") from error


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON. Of a name that is there twice, the parser would take the last."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{shorten(twice)} is there twice")
    return found


def _place_tensors(file: Path, header: dict[str, Any], data_start: int, size: int) -> dict[str, StoredTensor]:
    """The tensors that a header describes, once they are known to fill the file: no gap, and none over another."""
    tensors = {}
    for key, entry in header.items():
        name = shorten(key)
        first, end = entry["data_offsets"]
        shape = entry["shape"]
        if not isinstance(shape, list) or len(shape) > MAX_DIMS or not all(map(_is_size, [*shape, first, end])):
            raise ValueError(f"{name} has a shape or offsets that are no whole numbers of 63 bits")
        if entry["dtype"] not in DTYPES:
            dtype = shorten(str(entry["dtype"]))
            raise ValueError(f"{name} has dtype {dtype}, which is not one of {', '.join(DTYPES)}")
        tensors[key] = StoredTensor(key, file, data_start + first, tuple(shape), DTYPES[entry["dtype"]])
        if end - first != tensors[key].num_bytes:
            raise ValueError(f"{name} has bytes {first} to {end}, which its shape and dtype do not take")
    last = max((tensor.offset + tensor.num_bytes for tensor in tensors.values()), default=data_start)
    if size < last:
        raise ValueError(f"cut short: {size:,} bytes of {last:,}")
    if size > last:
        raise ValueError(f"too long: {size:,} bytes, of which its header describes {last:,}")
    end = data_start
    for tensor in sorted(tensors.values(), key=lambda tensor: (tensor.offset, tensor.num_bytes)):
        if tensor.offset != end:
            others = "overlap" if tensor.offset < end else "have a gap between them"
            raise ValueError(f"{shorten(tensor.key)} and the tensor before it {others}")
        end += tensor.num_bytes
    return tensors


def _is_size(number: Any) -> bool:
    return type(number) is int and 0 <= number < 2**63
