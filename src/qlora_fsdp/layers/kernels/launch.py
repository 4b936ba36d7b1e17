"""What the Triton kernels' modules share: Triton itself, and launches that do nothing on meta.

The memory plan runs layers on meta tensors, which have shapes and no memory (tracing/trace.py). The functions around
the kernels then allocate what they allocate on a GPU, and only the launch is left out: the bytes of its tensors are
counted in its place. So a new kernel is planned without being described a second time. That works on hosts without
Triton too, such as a laptop: only names are missing there.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator"

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import cache
from threading import Thread
from typing import Any

import torch
from torch import Tensor

from qlora_fsdp.common.sizes import next_power_of_two

try:
    import triton
    import triton.language as tl
    from triton.runtime.errors import OutOfResources

    HAS_TRITON = True
except ImportError:
    HAS_TRITON = False

    class _NoTriton:
        """The names that the kernels' modules use while they are imported, and in the functions around the kernels."""

        constexpr = int

        @staticmethod
        def jit(function: Any = None, **options: Any) -> Any:
            return (lambda decorated: decorated) if function is None else function

        @staticmethod
        def cdiv(x: int, y: int) -> int:
            return -(x // -y)

        next_power_of_2 = staticmethod(next_power_of_two)

    triton = tl = _NoTriton
    OutOfResources = RuntimeError

__all__ = [
    "as_on_a_gpu",
    "bytes_moved",
    "has_kernels",
    "has_tensor_cores",
    "kernel",
    "moves",
    "runs_kernels",
    "standing_for",
    "starting_triton",
    "times",
    "tl",
    "triton",
]
_plans_gpu: ContextVar[bool] = ContextVar("plans_gpu", default=False)
_times: ContextVar[int] = ContextVar("times", default=1)
_moved: ContextVar[Callable[[int], None] | None] = ContextVar("moved", default=None)


class kernel:  # a decorator
    """Put on top of `@triton.jit`: the kernel is launched as always, but if its first argument is on meta, counted.

    `num_stages` is how many tiles are in shared memory at a time, the one that is computed with and those that are
    loaded ahead. It is chosen for GPUs with 227 KiB for a block, as an H100 has. An A100 has 163 KiB, GeForce and L40
    99 KiB: what does not fit there is launched with fewer.
    """

    def __init__(self, function: Any) -> None:
        self.function = function
        self.stages: dict[Any, int] = {}  # by what was asked for: how many fit, if those do not

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(first: Tensor, *args: Any, **options: Any) -> None:
            if first.is_meta:
                moves(sum(arg.nbytes for arg in (first, *args) if isinstance(arg, Tensor)))
            elif "num_stages" in options:
                self._launch(grid, (first, *args), options)
            else:
                self.function[grid](first, *args, **options)

        return launch

    def _launch(self, grid: tuple[int, ...], args: tuple[Any, ...], options: dict[str, Any]) -> None:
        asked = (args[0].dtype, *options.items())
        stages = self.stages.get(asked, options["num_stages"])
        while True:
            try:
                self.function[grid](*args, **{**options, "num_stages": stages})
                return
            except OutOfResources:  # before anything was launched
                if stages == 1:
                    raise
                stages -= 1
                self.stages[asked] = stages


@triton.jit
def _zero(x):
    tl.store(x, 0)


@contextmanager
def starting_triton(device: torch.device) -> Iterator[None]:
    """While something else goes on, such as loading weights, a thread launches a first kernel, if there is a GPU.

    A process's first launch takes 0.3 seconds and more, because Triton reads all of its own files to see whether what
    it compiled for other processes is still good. An error will come again where a kernel is needed.
    """

    def start() -> None:
        with suppress(Exception), torch.cuda.device(device):
            _zero[(1,)](torch.empty(1, device=device))

    if device.type != "cuda":
        yield
        return
    thread = Thread(target=start, daemon=True)
    thread.start()
    try:
        yield
    finally:
        thread.join()


def moves(num_bytes: int) -> None:
    """Count what a kernel would read and write, which is not launched because its tensors are on meta."""
    count = _moved.get()
    if count is not None:
        count(num_bytes)


@contextmanager
def bytes_moved(count: Callable[[int], None]) -> Iterator[None]:
    """While it lasts, `count` is called with the bytes of every kernel that is left out."""
    token = _moved.set(count)
    try:
        yield
    finally:
        _moved.reset(token)


@contextmanager
def standing_for(number: int) -> Iterator[None]:
    """While it lasts, what is computed on meta stands for `number` equal computations, one after another."""
    token = _times.set(_times.get() * number)
    try:
        yield
    finally:
        _times.reset(token)


def times() -> int:
    """How many computations one on meta stands for now."""
    return _times.get()


def runs_kernels(tensor: Tensor) -> bool:
    """Whether layers use the kernels for a tensor: it is on a GPU, or on meta while a GPU's run is planned."""
    return tensor.is_cuda or (tensor.is_meta and _plans_gpu.get())


def has_kernels(tensor: Tensor) -> bool:
    """The same where no setting says whether kernels are used: a GPU without Triton has none."""
    return runs_kernels(tensor) and (tensor.is_meta or HAS_TRITON)


@cache
def has_tensor_cores(device: torch.device) -> bool:
    """Whether a GPU runs kernels that multiply with NVIDIA's tensor cores in bfloat16: with Triton, from Ampere on."""
    is_nvidia = device.type == "cuda" and torch.version.hip is None
    return HAS_TRITON and is_nvidia and torch.cuda.get_device_capability(device) >= (8, 0)


@contextmanager
def as_on_a_gpu(planned: bool = True) -> Iterator[None]:
    """While it lasts, layers do with meta tensors what they do on a GPU. `planned=False` changes nothing."""
    token = _plans_gpu.set(planned)
    try:
        yield
    finally:
        _plans_gpu.reset(token)
