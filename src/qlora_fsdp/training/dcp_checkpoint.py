"""Checkpoints of earlier versions, which torch.distributed.checkpoint (DCP) wrote: they can still be resumed from.

    .metadata                 a pickle: shape and dtype of each tensor, and which bytes of which file have its rows
    __0_0.distcp, ...         one blob of `torch.save` after another, each with some rows of a tensor
    optimizer-00000.pt, ...   the state of adamw_8bit of each rank, by `torch.save`

`torch.save` writes a zip archive: a pickle, and one member with the bytes of each tensor. Every pickle is read by
`dcp_pickle.py`, which runs nothing. Of the archives only the list of members is read, and where their bytes lie;
`saved_tensors.py` then reads these as it does those of a safetensors file.
"""

from __future__ import annotations

import os
import zipfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from qlora_fsdp.common.foreign_files import MAX_SMALL_BYTES, open_regular, read_small
from qlora_fsdp.common.text import first_line
from qlora_fsdp.training.dcp_pickle import MAX_STATE, Values, int_tuple, unpickle
from qlora_fsdp.training.saved_tensors import BadFile, Piece, SavedTensor, make_saved
from qlora_fsdp.weights.safetensors_files import StoredTensor

METADATA = ".metadata"
WRAPPED = "__bnb_optimizer_quant_state__"  # where bitsandbytes puts the tensors of a state
MAX_MESSAGE = 300  # characters of what went wrong


def read_index(folder: Path, files: Mapping[str, tuple[int, str]]) -> dict[str, SavedTensor]:
    """The tensors of a checkpoint by name. Pieces may only lie in `files`, which are known to be in the folder.

    Raises:
        BadFile: .metadata holds anything but what DCP writes, or pieces do not make up their tensor.
    """
    found = {}
    try:
        metadata = unpickle(read_small(folder, METADATA))
        places = {
            (_name(index.fqn), int_tuple(getattr(index, "offset", ()))): info
            for index, info in metadata.storage_data.items()
        }
        for name, entry in metadata.state_dict_metadata.items():
            dtype, whole, pieces = entry.properties.values[0], int_tuple(entry.size), []
            if not isinstance(dtype, torch.dtype):
                raise ValueError(f"{_name(name)} has no dtype")
            for chunk in entry.chunks:
                # A chunk is some rows, or none. A scalar of AdamW's, `step`, is seen as one row.
                offsets = int_tuple(chunk.offsets)
                start, sizes = offsets or (0,), int_tuple(chunk.sizes) or (1,)
                if sizes[0] == 0:
                    continue
                place = places.pop((name, offsets), None)  # each place is used once, so that there are few pieces
                if place is None or any(start[1:]) or sizes[1:] != whole[1:] or _is_transformed(place):
                    raise ValueError(f"{_name(name)} is not cut by rows")
                file = _name(place.relative_path)
                if file not in files:
                    raise ValueError(f"{name} is to lie in {file}, which is no file of this checkpoint")
                offset, length = int_tuple((place.offset, place.length))
                if not 0 < length <= files[file][0] - offset:
                    raise ValueError(f"{name} is to lie beyond the end of {file}")
                find = partial(_find_blob, folder / file, name, offset, length)
                pieces.append(Piece(folder / file, start[0], start[0] + sizes[0], find))
            pieces.sort(key=lambda piece: piece.first)
            found[_name(name)] = make_saved(name, list(whole or (1,)), dtype, pieces)
    except Exception as error:  # whatever was written there, it is no checkpoint of DCP's
        raise BadFile(f"{folder / METADATA} can't be used: {_first_line(error)}") from error
    return found


def own_file(rank: int) -> str:
    """The file in which a rank's state of adamw_8bit is."""
    return f"optimizer-{rank:05}.pt"


def read_own(file: Path) -> dict[str, StoredTensor | Tensor]:
    """The state of adamw_8bit that a rank saved, by the parameter's number and the state's name.

    Returns:
        Where each tensor lies; a number, which is in the pickle, as a tensor.

    Raises:
        BadFile: the file can't be read, or holds other things than tensors and numbers.
    """
    try:
        own: dict[str, StoredTensor | Tensor] = {}
        with open_regular(file.parent, file.name) as stream:
            size = os.fstat(stream.fileno()).st_size
            states, members = _read_archive(stream, 0, size)
        for number, state in states.items():
            wrapped = state.get(WRAPPED, {})
            if type(number) is not int or len(state) + len(wrapped) > MAX_STATE:
                raise ValueError("it has more than the states of parameters")
            for key, value in [*state.items(), *wrapped.items()]:
                name = f"{number}.{_name(key)}"
                if isinstance(value, Values):
                    own[name] = _place(file, name, value, members)
                elif type(value) in (int, float):
                    own[name] = torch.as_tensor(value)
                elif key != WRAPPED:
                    raise ValueError(f"{name} is no tensor and no number")
        return own
    except Exception as error:
        raise BadFile(f"{file} can't be used: {_first_line(error)}") from error


def _find_blob(file: Path, name: str, offset: int, length: int) -> StoredTensor:
    """Find the bytes of a tensor in its blob. A scalar counts as one row."""
    try:
        with open_regular(file.parent, file.name) as stream:
            value, members = _read_archive(stream, offset, length)
        return _place(file, name, value, members, scalar=(1,))
    except Exception as error:
        raise BadFile(f"{file} can't be used: {name}: {_first_line(error)}") from error


def _read_archive(stream: BinaryIO, start: int, length: int) -> tuple[Any, dict[str, tuple[int, int]]]:
    """Read a part of a file that `torch.save` wrote.

    Returns:
        What was saved, with `Values` for tensors; and first byte in the file and number of bytes by storage.
    """
    members, pickles = {}, []
    part = _Part(stream, start, length)
    for info in zipfile.ZipFile(part).infolist():
        if info.compress_type != zipfile.ZIP_STORED or info.compress_size != info.file_size:
            raise ValueError("it is compressed")
        part.seek(info.header_offset + 26)  # where a member's header has the lengths of its name and its extra field
        lengths = part.read(4)
        first = info.header_offset + 30 + int.from_bytes(lengths[:2], "little") + int.from_bytes(lengths[2:], "little")
        if info.file_size > length - first:
            raise ValueError("it ends early")
        name = info.filename.partition("/")[2]
        if name == "data.pkl":
            pickles.append((first, info.file_size))
        members[name.removeprefix("data/")] = (start + first, info.file_size)
    ((first, size),) = pickles
    part.seek(first)
    return unpickle(part.read(size)), members


def _place(
    file: Path, name: str, value: Any, members: dict[str, tuple[int, int]], scalar: tuple[int, ...] = ()
) -> StoredTensor:
    """Where the bytes of a tensor lie, given the arguments of `_rebuild_tensor_v2`.

    Raises:
        Exception: of any class, where it is no tensor whose rows lie one after another.
    """
    storage, offset, shape, strides = value.values[:4]
    kind, dtype, key, *_ = storage.values
    start, num_bytes = members[_name(key)]
    (offset,), shape, strides = int_tuple((offset,)), int_tuple(shape), int_tuple(strides)
    expected = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size != 1 and stride != expected:
            raise ValueError(f"the values of {name} do not lie one after another")
        expected *= size
    stored = StoredTensor(name, file, start + offset * dtype.itemsize, shape or scalar, dtype)
    if kind != "storage" or offset * dtype.itemsize + stored.num_bytes > num_bytes:
        raise ValueError(f"{name} is to lie beyond the end of its storage")
    return stored


class _Part:
    """A part of a file, as a file that zipfile can read. No more is read at once than an honest archive needs."""

    def __init__(self, stream: BinaryIO, start: int, length: int) -> None:
        self.stream, self.start, self.length, self.position = stream, start, length, 0

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        position = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self.position, os.SEEK_END: self.length}[whence]
        if position < 0:
            raise OSError("it ends early")
        self.position = position
        return position

    def read(self, size: int = -1) -> bytes:
        rest = max(0, self.length - self.position)
        size = rest if size < 0 else min(size, rest)
        if size > MAX_SMALL_BYTES:
            raise ValueError(f"its list of tensors has more than {MAX_SMALL_BYTES:,} bytes")
        self.stream.seek(self.start + self.position)
        content = self.stream.read(size)
        self.position += len(content)
        return content


def _is_transformed(place: Any) -> bool:
    return bool(getattr(place, "transform_descriptors", None))


def _name(value: Any) -> str:
    """The value itself, if it is a text.

    Raises:
        ValueError: it is anything else, which is not shown: a few bytes of a pickle can have a text of any length.
    """
    if type(value) is not str:
        raise ValueError("a name is no text")
    return value


def _first_line(error: Exception) -> str:
    return first_line(error)[:MAX_MESSAGE]
