"""How weights are dequantized in what is recorded as a CUDA graph: beside products, and once where there is room.

A layer dequantizes its weight when it reads it: in forward, and again in backward. A quarter of a short micro-batch
goes by with that. In a graph three things may be different, and none changes a bit:

- The next weight is dequantized while a product runs with the one before it. Dequantization waits for memory, and a
  product for the multiprocessors' arithmetic. A product leaves multiprocessors idle at its end, when fewer tiles are
  left than there are multiprocessors, and so do the small kernels between two products. So the next weight is
  dequantized on a second stream of lower priority: its kernels take what the first stream leaves.
- Where memory would be left over, the weights of the last layers stay as they are until backward has used them. Each
  of them takes two bytes a parameter for that time (memory/plan.py), and is dequantized once in a micro-batch.
- Or they stay until the run ends, and are dequantized once in all (`memory.keep_dequantized=run`). A graph never gives
  its memory back, so a run at its peak needs hardly more for that.

Which weight comes next is not derived from the model's code. A pass that is launched kernel by kernel notes in which
order it reads weights, and the passes that are recorded follow that order as long as they read the same.
benchmarks/measurements.md has what both gain.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from qlora_fsdp.layers.quantized.linear import QuantizedLinear


class _Weight(NamedTuple):
    """A dequantized weight, and the event at whose time it is there; None if it is there already."""

    values: Tensor
    done: torch.cuda.Event | None


class WeightReader:
    """Reads the weights of a model's quantized linear layers.

    Args:
        model: its layers read their weights here while `noting` or `reading` lasts.
        device: where they compute. On a CPU, which tests use, a weight is dequantized ahead, but not beside others.
        keeping: transformer layers whose weights are kept from forward to backward.
        holds: whether `hold` dequantizes these for all passes to come. It can't where FSDP shards the codes.

    Attributes:
        order: the layers whose weights a pass has read, forward and backward.
        kept: the layers whose weights are kept, in the order of forward.
        held: the weights that `hold` has dequantized.
    """

    def __init__(
        self, model: nn.Module, device: torch.device, keeping: Iterable[nn.Module] = (), holds: bool = False
    ) -> None:
        self.holds = holds
        self.held: dict[QuantizedLinear, Tensor] = {}
        self.layers = [module for module in model.modules() if isinstance(module, QuantizedLinear)]
        self.kept = [part for layer in keeping for part in layer.modules() if isinstance(part, QuantizedLinear)]
        self.order: list[QuantizedLinear] = []
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # of the lowest priority there is
        self._ready: dict[QuantizedLinear, _Weight] = {}
        self._index = 0
        self._keeps = False
        self._is_used = False  # whether the second stream takes part in the present pass

    @property
    def ahead_bytes(self) -> int:
        """Most bytes that a weight takes which is there before its time, with its scales."""
        return max((layer.dequantized_bytes for layer in self.order), default=0)

    def keep_within(self, room: float) -> None:
        """Keep only weights that will be read again, and of these as many of the last ones as `room` bytes take.

        A pass has to read a weight twice for that, or the weight is held for all passes.

        Args:
            room: bytes; what is left of `ahead_bytes` is for them.
        """
        num_reads = Counter(self.order)
        read = [layer for layer in num_reads if layer in self.kept and (self.holds or num_reads[layer] > 1)]
        sizes = accumulate(layer.weight_bytes for layer in reversed(read))
        num_kept = sum(self.ahead_bytes + size <= room for size in sizes)
        self.kept = read[len(read) - num_kept :]

    def hold(self) -> None:
        """Dequantize the kept weights for all passes to come. If memory is missing, they are kept until backward."""
        torch.cuda.empty_cache()  # what they would leave of the memory of launched passes, no graph could use
        try:
            self.held = {layer: layer.dequantize() for layer in self.kept}
        except torch.OutOfMemoryError:
            self.holds = False

    def release(self) -> None:
        """Free the weights that `hold` has made. There must be no graph any more that reads them."""
        self.held = {}

    @contextmanager
    def noting(self) -> Iterator[None]:
        """While it lasts, the layers' weights are dequantized when they are read, and `order` is made anew."""
        self.order = []
        with self._read_by(self._note):
            yield

    @contextmanager
    def reading(self, keeps: bool = True) -> Iterator[None]:
        """While it lasts, each weight is dequantized when the one before it is read, if it is the next in `order`.

        Args:
            keeps: whether weights that are read again are kept. Not without a backward, which would read them.
        """
        self._index = 0
        self._keeps = keeps
        self._is_used = False
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
        """The weight of a layer. It is kept if it is read again, and the next one is started."""
        weight = self._ready.pop(layer, None) or self._start(layer)
        if weight.done is not None:
            torch.cuda.current_stream().wait_event(weight.done)
        is_expected = self.order[self._index : self._index + 1] == [layer]
        following = self.order[self._index + 1 :] if is_expected else []
        self._index += 1
        if self._keeps and layer in self.kept and layer in following:
            self._ready[layer] = _Weight(weight.values, None)
        if following and following[0] not in self._ready and _is_whole(following[0]):
            self._ready[following[0]] = self._start(following[0])
        return weight.values

    def _start(self, layer: QuantizedLinear) -> _Weight:
        """A weight that is held, or one whose dequantization is queued behind all that the current stream has to do.

        Tensors that are made on the second stream come from memory of its own, which it may write to again when nobody
        holds the tensor. Whoever has read it was queued before, so the wait makes that safe.
        """
        if layer in self.held:
            return _Weight(self.held[layer], None)
        if self.stream is None:
            return _Weight(layer.dequantize(), None)
        self.stream.wait_stream(torch.cuda.current_stream())
        self._is_used = True
        with torch.cuda.stream(self.stream):
            return _Weight(layer.dequantize(), self.stream.record_event())

    def _join(self) -> None:
        """Have the current stream wait for what nobody has waited for. A recording can't end before."""
        self._ready.clear()
        if self.stream is not None and self._is_used:
            torch.cuda.current_stream().wait_stream(self.stream)


def _is_whole(layer: QuantizedLinear) -> bool:
    """Whether all rows of a layer's codes can be read now. Of a layer that FSDP has not gathered, they can't."""
    return not isinstance(layer.codes, DTensor)
