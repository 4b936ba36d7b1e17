"""Dequantize the next weight while a product runs with the one before it, in what is recorded as a CUDA graph.

Dequantization waits for memory, and a product for the multiprocessors' arithmetic. Where one follows the other, a
quarter of a short micro-batch is dequantization. But a product leaves multiprocessors idle at its end, when fewer
tiles are left than there are multiprocessors, and so do the small kernels between two products. So the next weight is
dequantized on a second stream of lower priority: its kernels take what the first stream leaves. They are the same
kernels, and give the same bits. docs/decisions.md has what that gains.

Which weight comes next is not derived from the model's code. A pass that is launched kernel by kernel notes in which
order it reads weights, and the passes that are recorded follow that order as long as they read the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from qlora_fsdp.layers.quantized.linear import QuantizedLinear


class _Started(NamedTuple):
    """A weight that is being dequantized, and the event at whose time it is there; None on a CPU."""

    layer: QuantizedLinear
    weight: Tensor
    done: torch.cuda.Event | None


class DequantizeAhead:
    """Reads the weights of a model's quantized linear layers, one ahead.

    Args:
        model: its layers read their weights here while `noting` or `reading` lasts.
        device: where they compute. On a CPU, which tests use, a weight is dequantized ahead, but not beside others.

    Attributes:
        order: the layers whose weights a pass has read, forward and backward.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self.layers = [module for module in model.modules() if isinstance(module, QuantizedLinear)]
        self.order: list[QuantizedLinear] = []
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # of the lowest priority there is
        self._index = 0
        self._next: _Started | None = None
        self._is_used = False  # whether the second stream takes part in the present pass

    @property
    def num_bytes(self) -> int:
        """Most bytes that a weight takes which is there before its time, with its scales."""
        return max((layer.dequantized_bytes for layer in self.order), default=0)

    @contextmanager
    def noting(self) -> Iterator[None]:
        """While it lasts, the layers' weights are dequantized when they are read, and `order` is made anew."""
        self.order = []
        with self._read_by(self._note):
            yield

    @contextmanager
    def reading(self) -> Iterator[None]:
        """While it lasts, each weight is dequantized when the one before it is read, if it is the next in `order`."""
        self._index, self._is_used = 0, False
        with self._read_by(self._take):
            try:
                yield
            finally:
                self._join()

    @contextmanager
    def _read_by(self, reader: Callable[[QuantizedLinear], Tensor]) -> Iterator[None]:
        for layer in self.layers:
            layer.reader = reader
        try:
            yield
        finally:
            for layer in self.layers:
                layer.reader = None

    def _note(self, layer: QuantizedLinear) -> Tensor:
        self.order.append(layer)
        return layer.dequantize()

    def _take(self, layer: QuantizedLinear) -> Tensor:
        """The weight of a layer, after the next one was started."""
        taken, self._next = self._next, None
        if taken is None or taken.layer is not layer:
            taken = self._start(layer)
        here, self._index = self.order[self._index : self._index + 2], self._index + 1
        if here[:1] == [layer] and here[1:] and _is_whole(here[1]):
            self._next = self._start(here[1])
        if taken.done is not None:
            torch.cuda.current_stream().wait_event(taken.done)
        return taken.weight

    def _start(self, layer: QuantizedLinear) -> _Started:
        """Queue the dequantization of a weight behind all that was queued on the current stream so far.

        Tensors that are made on the second stream come from memory of its own, which it may write to again when nobody
        holds the tensor. Whoever has read it was queued before, so the wait makes that safe.
        """
        if self.stream is None:
            return _Started(layer, layer.dequantize(), None)
        self.stream.wait_stream(torch.cuda.current_stream())
        self._is_used = True
        with torch.cuda.stream(self.stream):
            return _Started(layer, layer.dequantize(), self.stream.record_event())

    def _join(self) -> None:
        """Have the current stream wait for what nobody has waited for. A recording can't end before."""
        self._next = None
        if self.stream is not None and self._is_used:
            torch.cuda.current_stream().wait_stream(self.stream)


def _is_whole(layer: QuantizedLinear) -> bool:
    """Whether all rows of a layer's codes can be read now. Of a layer that FSDP has not gathered, they can't."""
    return not isinstance(layer.codes, DTensor)
