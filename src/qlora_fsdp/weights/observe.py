"""Tell others of a weight at the one time when it is there twice: as the files have it, and quantized."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from torch import Tensor, nn

from qlora_fsdp.weights.row_reader import Sink

# Called for a layer once it is quantized, with this rank's rows of its weight as the files have them, on the device of
# quantization: [n, in_features]. It may hold a collective: every rank calls it for the same layers in the same order.
Observers = Mapping[nn.Module, Callable[[Tensor], None]]
NO_OBSERVERS: Observers = MappingProxyType({})


class Observe(Sink):
    """Hands rows on to be quantized, and holds them until that is done, to tell an observer.

    Args:
        sink: quantizes the rows.
        observer: is called at the end, with all rows.
        row_elements: columns of the weight.
        device: where the rows are.
        source_dtype: the dtype in which they arrive.
    """

    def __init__(
        self,
        sink: Sink,
        observer: Callable[[Tensor], None],
        row_elements: int,
        device: torch.device,
        source_dtype: torch.dtype,
    ) -> None:
        self.sink = sink
        self.observer = observer
        self.source_dtype = source_dtype
        self.held = [torch.empty(0, row_elements, dtype=source_dtype, device=device)]

    def put(self, rows: Tensor, first_row: int) -> None:
        self.sink.put(rows, first_row)
        self.held.append(rows.view(self.source_dtype).clone())

    def finish(self) -> None:
        self.sink.finish()
        rows = torch.cat(self.held)
        self.held = []
        self.observer(rows)
