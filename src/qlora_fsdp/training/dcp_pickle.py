"""Unpickle what torch.distributed.checkpoint and `torch.save` wrote, also where somebody forged it.

Unpickling can run any command and fill any memory, so neither torch's readers nor pickle's usual one are used. Only the
opcodes and the names that honest files have exist here. A name stands for an object that keeps some values and does
nothing. Tuples and attributes are few, because a small file could otherwise ask for any number of copies of a long one.
Tuples are not nested deeply, because the interpreter crashes when it hashes one that is.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from typing import Any, ClassVar

import torch

from qlora_fsdp.common.limits import limited_memory

MAX_ITEMS = 64  # of a tuple: the longest are the parts of a path
MAX_BYTES = 2**30  # of memory for all that a pickle makes; the largest honest one, of 32 MiB, takes 0.6 GiB
MAX_STATE = 16  # attributes of an object
LOAD: dict[int, Any] = pickle._Unpickler.dispatch  # what each opcode does
OPCODES = (
    pickle.PROTO + pickle.FRAME + pickle.STOP + pickle.MARK + pickle.MEMOIZE + pickle.BINPUT + pickle.LONG_BINPUT
    + pickle.BINGET + pickle.LONG_BINGET + pickle.NONE + pickle.NEWTRUE + pickle.NEWFALSE + pickle.BININT
    + pickle.BININT1 + pickle.BININT2 + pickle.LONG1 + pickle.BINFLOAT + pickle.BINUNICODE + pickle.SHORT_BINUNICODE
    + pickle.EMPTY_TUPLE + pickle.TUPLE + pickle.TUPLE1 + pickle.TUPLE2 + pickle.TUPLE3 + pickle.EMPTY_LIST
    + pickle.APPEND + pickle.APPENDS + pickle.EMPTY_DICT + pickle.SETITEM + pickle.SETITEMS + pickle.GLOBAL
    + pickle.STACK_GLOBAL + pickle.REDUCE + pickle.NEWOBJ + pickle.BUILD + pickle.BINPERSID
)  # fmt: skip


class Values:
    """Stands for an object: has its attributes, and `values` where it was made or restored from a tuple."""

    values: tuple[Any, ...] = ()

    def __init__(self, *values: Any) -> None:
        self.values = values


def int_tuple(value: Any) -> tuple[int, ...]:
    """The value itself, if it is a shape or an offset.

    Raises:
        ValueError: it is anything else.
    """
    if type(value) is not tuple or len(value) > 8 or not all(type(n) is int and 0 <= n < 2**63 for n in value):
        raise ValueError("a shape or an offset is not a few whole numbers")
    return value


def _empty_dict() -> dict[Any, Any]:
    return {}


NAMES: dict[tuple[str, str], Any] = {
    ("torch", "Size"): int_tuple,
    ("torch.serialization", "_get_layout"): Values,
    ("pathlib", "PosixPath"): Values,
    ("pathlib._local", "PosixPath"): Values,  # where Python 3.13 has it
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): Values,
    **{
        ("torch.distributed.checkpoint.metadata", name): Values
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
    # What `torch.save` writes of a tensor.
    ("torch._utils", "_rebuild_tensor_v2"): Values,
    ("collections", "OrderedDict"): _empty_dict,
    ("torch", "FloatStorage"): torch.float32,
    ("torch", "HalfStorage"): torch.float16,
    ("torch", "BFloat16Storage"): torch.bfloat16,
    ("torch", "ByteStorage"): torch.uint8,
    ("torch", "CharStorage"): torch.int8,
    ("torch", "LongStorage"): torch.int64,
}


def unpickle(content: bytes) -> Any:
    """The value that was pickled, made of plain values, dtypes and `Values`.

    Raises:
        Exception: of any class, where the content is not what an honest file has.
    """
    try:
        with limited_memory(MAX_BYTES):
            return _Unpickler(io.BytesIO(content)).load()
    except MemoryError:  # an opcode is a byte, and what it makes takes 100
        raise pickle.UnpicklingError(f"it takes more than {MAX_BYTES // 2**30} GiB of memory") from None
    except KeyError as error:  # of the table
        raise pickle.UnpicklingError("it has an opcode that torch.distributed.checkpoint does not write") from error


def _checked(load: Callable[[Any], None]) -> Callable[[Any], None]:
    """Also refuses a long tuple, or one of tuples that hold tuples, once it has been made."""

    def load_and_check(unpickler: Any) -> None:
        load(unpickler)
        inner = [item for item in unpickler.stack[-1] if type(item) is tuple]
        if len(unpickler.stack[-1]) > MAX_ITEMS or any(type(item) is tuple for items in inner for item in items):
            raise pickle.UnpicklingError("it has a tuple that is too long or too deep")

    return load_and_check


class _Unpickler(pickle._Unpickler):  # the one in Python, whose memo is a dict and whose opcodes are in a table
    stack: list[Any]
    dispatch: ClassVar[dict[int, Any]] = {opcode: LOAD[opcode] for opcode in OPCODES} | {
        opcode: _checked(LOAD[opcode]) for opcode in pickle.TUPLE + pickle.TUPLE1 + pickle.TUPLE2 + pickle.TUPLE3
    }

    def find_class(self, module: str, name: str) -> Any:
        """Called for every name in the pickle, before anything is done with it."""
        if (module, name) not in NAMES:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which torch.distributed.checkpoint does not write")
        return NAMES[module, name]

    def persistent_load(self, pid: Any) -> Any:
        """Return the reference that `torch.save` pickles in place of a tensor's bytes."""
        return Values(*pid) if type(pid) is tuple else Values()

    def load_reduce(self) -> None:
        if type(self.stack[-1]) is not tuple:
            raise pickle.UnpicklingError("it calls something with what is no tuple")
        LOAD[pickle.REDUCE[0]](self)

    dispatch[pickle.REDUCE[0]] = load_reduce

    def load_newobj(self) -> None:
        args = self.stack.pop()
        if self.stack.pop() is not Values or args != ():
            raise pickle.UnpicklingError("it makes an object that torch.distributed.checkpoint does not write")
        self.stack.append(Values())

    dispatch[pickle.NEWOBJ[0]] = load_newobj

    def load_build(self) -> None:
        state, value = self.stack.pop(), self.stack[-1]
        if type(value) is not Values or type(state) not in (dict, tuple) or len(state) > MAX_STATE:
            raise pickle.UnpicklingError("it gives an object other attributes than torch.distributed.checkpoint does")
        if isinstance(state, dict):
            value.__dict__.update(state)
        else:
            value.values = state

    dispatch[pickle.BUILD[0]] = load_build
