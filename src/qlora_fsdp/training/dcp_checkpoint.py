"""Checkpoints of earlier versions, which torch.distributed.checkpoint (DCP) wrote: they can still be resumed from.

    .metadata                 a pickle: shape and dtype of each tensor, and which bytes of which file have its rows
    __0_0.distcp, ...         one blob of `torch.save` after another, each with some rows of a tensor
    optimizer-00000.pt, ...   the state of adamw_8bit of each rank, by `torch.save`

Unpickling can run any command, so torch's own reader of `.metadata` is not used. The unpickler here admits the names
that DCP writes, and no others. Even these are not torch's: each stands for an object that keeps its values and does
nothing. Blobs and states are read by `torch.load(weights_only=True)`, which admits tensors and plain values only.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qlora_fsdp.training.saved_tensors import BadFile, Piece, SavedTensor, make_saved

METADATA = ".metadata"
WRAPPED = "__bnb_optimizer_quant_state__"  # where bitsandbytes puts the tensors of a state


class _Values:
    """Stands for an object of DCP's: has its attributes, and `values` where it was made or restored from a tuple."""

    values: tuple[Any, ...] = ()

    def __init__(self, *values: Any) -> None:
        self.values = values

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.__dict__.update(state)
        else:
            self.values = tuple(state)


ADMITTED: dict[tuple[str, str], Any] = {
    ("torch", "Size"): tuple,
    ("torch.serialization", "_get_layout"): _Values,
    ("pathlib", "PosixPath"): _Values,
    ("pathlib._local", "PosixPath"): _Values,  # where Python 3.13 has it
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): _Values,
    **{
        ("torch.distributed.checkpoint.metadata", name): _Values
        for name in (
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        )
    },
    **{("torch", str(dtype).removeprefix("torch.")): dtype for dtype in (torch.float32, torch.float16, torch.bfloat16)},
}


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """Called for every name in the pickle, before anything is done with it."""
        if (module, name) not in ADMITTED:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which torch.distributed.checkpoint does not write")
        return ADMITTED[module, name]


def read_index(folder: Path, files: Mapping[str, tuple[int, str]]) -> dict[str, SavedTensor]:
    """The tensors of a checkpoint by name. Pieces may only lie in `files`, which are known to be in the folder.

    Raises:
        BadFile: .metadata holds anything but what DCP writes, or pieces do not make up their tensor.
    """
    found = {}
    try:
        with (folder / METADATA).open("rb") as stream:
            metadata = _MetadataUnpickler(stream).load()
        places = {(index.fqn, getattr(index, "offset", ())): info for index, info in metadata.storage_data.items()}
        for name, entry in metadata.state_dict_metadata.items():
            dtype, pieces = entry.properties.values[0], []
            for chunk in entry.chunks:
                # A chunk is some rows, or none. A scalar of AdamW's, `step`, is seen as one row.
                start, sizes = chunk.offsets or (0,), chunk.sizes or (1,)
                if sizes[0] == 0:
                    continue
                place = places[name, chunk.offsets]
                if any(start[1:]) or sizes[1:] != entry.size[1:] or getattr(place, "transform_descriptors", None):
                    raise ValueError(f"{name} is not cut by rows")
                if place.relative_path not in files:
                    raise ValueError(f"{name} is to lie in {place.relative_path}, which is no file of this checkpoint")
                if place.offset < 0 or not 0 < place.length <= files[place.relative_path][0] - place.offset:
                    raise ValueError(f"{name} is to lie beyond the end of {place.relative_path}")
                file = folder / place.relative_path
                load = partial(_load_blob, file, name, place.offset, place.length)
                pieces.append(Piece(file, start[0], start[0] + sizes[0], load))
            pieces.sort(key=lambda piece: piece.first)
            found[name] = make_saved(name, list(entry.size or (1,)), dtype, pieces)
    except Exception as error:  # whatever was written there, it is no checkpoint of DCP's
        raise BadFile(f"{folder / METADATA} can't be used: {error}") from error
    return found


def own_file(rank: int) -> str:
    """The file in which a rank's state of adamw_8bit is."""
    return f"optimizer-{rank:05}.pt"


def read_own(file: Path) -> dict[str, Tensor]:
    """The state of adamw_8bit that a rank saved, on the CPU: by the parameter's number and the state's name.

    Raises:
        BadFile: the file can't be read, or holds other things than tensors and numbers.
    """
    try:
        own = {}
        for number, state in torch.load(file, map_location="cpu", weights_only=True).items():
            for key, value in (state | state.get(WRAPPED, {})).items():
                if key != WRAPPED:
                    own[f"{number}.{key}"] = torch.as_tensor(value)
        return own
    except Exception as error:
        raise BadFile(f"{file} can't be used: {_first_line(error)}") from error


def _load_blob(file: Path, name: str, offset: int, length: int) -> Tensor:
    try:
        with file.open("rb") as stream:
            stream.seek(offset)
            blob = io.BytesIO(stream.read(length))
        value = torch.load(blob, map_location="cpu", weights_only=True)
        if not isinstance(value, Tensor) or value.layout != torch.strided:
            raise ValueError("there is no tensor")
    except Exception as error:
        raise BadFile(f"{file} can't be used: {name}: {_first_line(error)}") from error
    return value if value.ndim else value.view(1)


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__
