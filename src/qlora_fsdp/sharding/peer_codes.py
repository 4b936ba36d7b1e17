"""Gather the codes of transformer layers by reading them from the memory of the other GPUs.

Codes are some 90 % of a layer's bytes, and they never change in a run. So a rank can copy those of another rank at any
time, without asking it. FSDP would gather them with NCCL instead, whose kernels take multiprocessors from the products
that run beside them, and would copy each layer into a flat buffer and out of it again. Copy engines take nothing from
the products, and write codes to where they are used (runtime/peers.py; measured in benchmarks/measurements.md).

FSDP still says when: it gathers a layer ahead, and frees it. But for a tensor that has `fsdp_pre_all_gather` it calls
that where it would begin a gather, and `fsdp_post_all_gather` where it would wait for its end. These two are torch's
extension points for tensors that are gathered in a way of their own. What is trained, and whatever else is no codes,
goes through NCCL as before.

Whole codes lie in buffers that stay where they are:

- If layers are freed after their forward, there are as many sets of buffers as layers can be gathered at a time. Layer
  i uses set i modulo their number. Each gather fills a set anew.
- If layers stay gathered, each has a set of its own, which is filled once for the whole run. The rank's own rows are
  loaded to their place in it, and are nowhere else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from qlora_fsdp.layers import QuantizedLayer
from qlora_fsdp.runtime.peers import PeerPlace, start_copies, wait_for

TOKEN_BYTES = 16  # FSDP asks for something to gather of each tensor


@dataclass(eq=False)
class Buffer:
    """Memory for one whole tensor of codes of a layer that is gathered.

    Attributes:
        bytes: uint8.
        holder: the layer whose codes it has now.
    """

    bytes: Tensor
    holder: QuantizedLayer | None = None


@dataclass(eq=False)
class Codes:
    """The codes of a quantized layer.

    Attributes:
        layer: the module that has them.
        shape: of all rows.
        buffer: where all rows are put together.
        copies: destination and source of each rank's rows.
    """

    layer: QuantizedLayer
    shape: torch.Size
    buffer: Buffer
    copies: list[tuple[Tensor, Tensor]]

    @property
    def whole(self) -> Tensor:
        """All rows, in the buffer."""
        num_bytes = self.shape.numel() * self.layer.codes.element_size()
        return self.buffer.bytes[:num_bytes].view(self.layer.codes.dtype).view(self.shape)


class PeerCodes:
    """The codes of all transformer layers of a sharded model, which each rank reads from the others.

    Args:
        found: of each transformer layer, in the order in which they run, what has codes to be read, on meta; those of
            most bytes first.
        places: where their codes lie, by the id of the codes on meta.
        num_sets: sets of buffers. None: layers stay gathered, and the places have room for whole codes.
        device: where the layers compute.
    """

    def __init__(
        self,
        found: Sequence[Sequence[QuantizedLayer]],
        places: Mapping[int, PeerPlace],
        num_sets: int | None,
        device: torch.device,
    ) -> None:
        self.device = device
        self.stays = num_sets is None
        self.token = torch.empty(TOKEN_BYTES, dtype=torch.uint8, device=device)
        sets = [] if num_sets is None else _make_sets(found, num_sets, device)
        self.codes = []
        for index, modules in enumerate(found):
            for number, module in enumerate(modules):
                place = places[id(module.codes)]
                buffer = Buffer(place.whole) if place.whole is not None else sets[index % len(sets)][number]
                # What was saved for backward need not be told that its memory is written to: it gets the same values.
                copies = place.copies_to(buffer.bytes.data)
                self.codes.append(Codes(module, module.codes.shape, buffer, copies))

    def connect(self) -> None:
        """Have FSDP read codes from now on. To be called when all ranks have loaded theirs."""
        for codes in self.codes:
            param = codes.layer.codes
            assert isinstance(param, DTensor)
            local: Any = param._local_tensor  # what FSDP itself holds; `to_local` returns a view of it
            local.fsdp_pre_all_gather = partial(self._begin, codes)
            local.fsdp_post_all_gather = partial(self._end, codes)
            if self.stays:
                wait_for(self._read(codes), self.device)

    def _begin(self, codes: Codes, mesh: Any, size: Any, stride: Any, module: Any, policy: Any) -> tuple[Any, Any]:
        """What FSDP calls where it would begin to gather. Returns what it gathers instead, and what `_end` gets."""
        return (self.token,), None if self.stays else self._read(codes)

    def _end(self, codes: Codes, outputs: Any, copied: Any, dtype: torch.dtype, *, out: Tensor | None = None) -> Any:
        """What FSDP calls where it would wait. The first time it asks where the whole is, and what of it to free."""
        wait_for(copied, self.device)
        return (codes.whole, ()) if out is None else None

    def _read(self, codes: Codes) -> torch.cuda.Event | None:
        """Start to put all rows of the codes together in their buffer.

        Raises:
            RuntimeError: another layer that is still gathered has its codes there.
        """
        holder = codes.buffer.holder
        if holder is not None and holder is not codes.layer and not isinstance(holder.codes, DTensor):
            raise RuntimeError("Two layers are gathered at a time whose codes have the same place.")
        codes.buffer.holder = codes.layer
        return start_copies(codes.copies, self.device)


def _make_sets(found: Sequence[Sequence[QuantizedLayer]], number: int, device: torch.device) -> list[list[Buffer]]:
    """Sets of buffers, each with room for any of the layers that use it."""
    sets = []
    for index in range(min(number, len(found))):
        sizes = [[module.codes.nbytes for module in modules] for modules in found[index::number]]
        largest = map(max, zip_longest(*sizes, fillvalue=0))
        sets.append([Buffer(torch.empty(size, dtype=torch.uint8, device=device)) for size in largest])
    return sets
