"""The tensors in a checkpoint: which file has which rows of each, and how these rows are written, checked and read.

Every rank writes one file, `rank-00000.safetensors`, with the rows that it holds of each trained tensor. `index.json`
says what they add up to, so that any number of ranks can read them:

    {"tensors": {"model.layers.0.lora_A.weight": {
        "dtype": "F32",
        "shape": [16, 4096],
        "pieces": [["rank-00000.safetensors", 0, 8], ["rank-00001.safetensors", 8, 16]]  file, first row, last row + 1
    }}}

The state of bitsandbytes' optimizers can't be cut into other rows. It is in the same file under names that begin with
`own.`, and the index does not mention it: only the rank with the same number reads it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qlora_fsdp.common.foreign_files import open_regular, read_small
from qlora_fsdp.common.text import printable
from qlora_fsdp.weights.safetensors_files import DTYPES, StoredTensor, parse_header

INDEX = "index.json"
OWN = "own."
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class BadFile(Exception):
    """A file of a checkpoint contradicts itself or another one; the message names the file and the tensor."""

    def __init__(self, message: str) -> None:
        super().__init__(printable(message))


@dataclass(frozen=True)
class Piece:
    """Rows [first, last) of a tensor, which are in one file; `find` says where they lie in it and what they are."""

    file: Path
    first: int
    last: int
    find: Callable[[], StoredTensor]


@dataclass(frozen=True)
class SavedTensor:
    """A tensor whose rows are spread over files."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: tuple[Piece, ...]


def rank_file(rank: int) -> str:
    """The file that a rank writes."""
    return f"rank-{rank:05}.safetensors"


def write_index(folder: Path, whole: Mapping[str, Tensor], rows: Sequence[Mapping[str, tuple[int, int]]]) -> None:
    """Write index.json.

    Args:
        folder: the checkpoint's.
        whole: for every trained tensor a tensor of its whole shape and its dtype, whose values are not looked at.
        rows: by rank, which rows [first, last) of each tensor are in that rank's file.
    """
    tensors: dict[str, dict[str, Any]] = {
        name: {"dtype": DTYPE_NAMES[tensor.dtype], "shape": list(tensor.shape), "pieces": []}
        for name, tensor in whole.items()
    }
    for rank, own_rows in enumerate(rows):
        for name, (first, last) in own_rows.items():
            tensors[name]["pieces"].append((rank_file(rank), first, last))
    for entry in tensors.values():
        entry["pieces"].sort(key=lambda piece: piece[1])
    (folder / INDEX).write_text(json.dumps({"tensors": tensors}))


def read_index(folder: Path, files: Collection[str]) -> dict[str, SavedTensor]:
    """The tensors of a checkpoint by name. Pieces may only lie in `files`, which are known to be in the folder.

    Raises:
        BadFile: the index can't be read, or pieces do not make up their tensor.
    """
    header = cache(_read_header)
    found = {}
    try:
        for name, entry in json.loads(read_small(folder, INDEX))["tensors"].items():
            pieces = []
            for file, first, last in entry["pieces"]:
                if file not in files:
                    raise ValueError(f"{name} is to lie in {file}, which is no file of this checkpoint")
                pieces.append(Piece(folder / file, first, last, partial(_find_piece, folder / file, name, header)))
            found[name] = _make_saved(name, entry["shape"], DTYPES[entry["dtype"]], pieces)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise BadFile(f"{folder / INDEX} can't be used: {_describe(error)}") from error
    return found


def _make_saved(name: str, shape: list[int], dtype: torch.dtype, pieces: list[Piece]) -> SavedTensor:
    """A saved tensor, once its pieces are known to hold each of its rows exactly once.

    Raises:
        ValueError: they do not, or something is of another type.
    """
    if not shape or not all(type(size) is int and size > 0 for size in shape):
        raise ValueError(f"{name} has the shape {shape}")
    end = 0
    for piece in pieces:
        if not type(piece.first) is type(piece.last) is int or piece.first != end or piece.last <= end:
            raise ValueError(f"{name} has rows [{piece.first}, {piece.last}) in {piece.file.name}, after [0, {end})")
        end = piece.last
    if end != shape[0]:
        raise ValueError(f"{name} has {shape[0]} rows, and its pieces have {end}")
    return SavedTensor(name, tuple(shape), dtype, tuple(pieces))


def read_rows(saved: SavedTensor, target: Tensor, first_row: int) -> None:
    """Fill `target`, rows [first_row, first_row + len(target)) of a saved tensor, on any device.

    Raises:
        BadFile: a piece can't be read, or is not what the index says.
    """
    for piece in saved.pieces:
        begin, end = max(first_row, piece.first), min(first_row + len(target), piece.last)
        if begin < end:
            stored = piece.find()
            check_like(piece.file, saved.name, stored, (piece.last - piece.first, *saved.shape[1:]), saved.dtype)
            rows = read_stored(stored)
            target[begin - first_row : end - first_row].copy_(rows[begin - piece.first : end - piece.first])


def check_like(file: Path, name: str, value: StoredTensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Compare what a file has under a name with what is wanted, before memory is taken for it.

    Raises:
        BadFile: shape or dtype differ.
    """
    if tuple(value.shape) != shape or value.dtype != dtype:
        found = f"{list(value.shape)} in {value.dtype}"
        raise BadFile(f"{file} can't be used: {name} is {found}, not {list(shape)} in {dtype}")


def read_own(file: Path) -> dict[str, StoredTensor]:
    """Where the state of bitsandbytes' optimizer of a rank lies: by the parameter's number and the state's name.

    Raises:
        BadFile: the file can't be read.
    """
    return {name.removeprefix(OWN): stored for name, stored in _read_header(file).items() if name.startswith(OWN)}


def read_stored(stored: StoredTensor) -> Tensor:
    """The tensor, on the CPU. It is read, not mapped: memory that is mapped would count as this process's own.

    Raises:
        BadFile: the file can't be read.
    """
    data = bytearray(stored.num_bytes)
    try:
        with open_regular(stored.file.parent, stored.file.name) as stream:
            stream.seek(stored.offset)
            if stream.readinto(data) != len(data):
                raise ValueError("it ends early")
    except (OSError, ValueError) as error:
        raise BadFile(f"{stored.file} can't be used: {stored.key}: {_describe(error)}") from error
    flat = torch.frombuffer(data, dtype=stored.dtype) if data else torch.empty(0, dtype=stored.dtype)
    return flat.view(stored.shape)


def _find_piece(file: Path, name: str, header: Callable[[Path], dict[str, StoredTensor]]) -> StoredTensor:
    stored = header(file).get(name)
    if stored is None:
        raise BadFile(f"{file} can't be used: it lacks {name}, which {INDEX} says is there")
    return stored


def _read_header(file: Path) -> dict[str, StoredTensor]:
    try:
        with open_regular(file.parent, file.name) as stream:
            return parse_header(file, stream)
    except (OSError, ValueError) as error:
        raise BadFile(f"{file} can't be used: {_describe(error)}") from error


def _describe(error: Exception) -> str:
    if isinstance(error, OSError):
        return error.strerror or str(error)
    return f"it lacks {error}" if isinstance(error, KeyError) else str(error)
