"""Frozen embeddings and a frozen head, read from the memory of the other GPUs.

A batch looks up few rows of the embeddings: 1,024 tokens need 8 MiB of the 1 GiB that Llama 3 8B has. So each rank
reads these rows where they are, and the table is not gathered. The kernel that looks rows up does so itself, because
CUDA maps the other GPUs' memory into its own.

The loss needs the whole head, in every micro-batch. If layers stay gathered, there is memory to spare: the head is read
once for the run, and stays too; the rank's own rows have been loaded to their place in it. If layers are freed, the
model gathers the head for each use (layers/head_loss.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn

from qlora_fsdp.layers import QuantizedLayer
from qlora_fsdp.layers.head_loss import HeadLoss
from qlora_fsdp.model.tasks.task_model import TaskModel
from qlora_fsdp.runtime.peers import PeerPlace, PeerTable, start_copies, wait_for
from qlora_fsdp.sharding.shard import embedding_and_head_units

ReadRows = Callable[[int, int], Tensor]  # rows [first, last) of a parameter


def ends_to_read(model: TaskModel, stay_gathered: bool) -> list[nn.Module]:
    """Those of embeddings and head that are read, of what the model gathers itself.

    A head in int8 is not: it would be held as int8 and used in bf16, and whoever wants int8 wants to save memory.

    Args:
        model: with FSDP units, on meta.
        stay_gathered: whether layers stay gathered between forward and backward.
    """
    found = [module for module in embedding_and_head_units(model) if module in model.gathered_by_model]
    stays = stay_gathered and not isinstance(model.head, QuantizedLayer)
    return [module for module in found if module is model.embeddings or stays]


class PeerEnds:
    """Embeddings and head of a sharded model, as far as each rank reads them from the others.

    Args:
        model: its embeddings and head are on meta.
        places: where their parameters lie, by the id of the parameter on meta; with room for a whole head.
        device: where they are used.

    Attributes:
        embeddings: the embeddings' parameters by name; none if they are gathered.
        head: the whole weight of the head, which is complete from `connect` on; None if it is gathered.
    """

    def __init__(self, model: TaskModel, places: Mapping[int, PeerPlace], device: torch.device) -> None:
        self.model = model
        self.device = device
        self.head: Tensor | None = None
        self._copies: list[tuple[Tensor, Tensor]] = []
        self.embeddings: dict[str, PeerTable] = {}
        for name, param in model.embeddings.named_parameters(recurse=False):
            if id(param) in places:
                rows = [part.view(param.dtype).view(-1, *param.shape[1:]) for part in places[id(param)].parts]
                self.embeddings[name] = PeerTable(rows)
        weight = None if model.head is None else dict(model.head.named_parameters(recurse=False)).get("weight")
        place = places.get(id(weight))
        if weight is not None and place is not None and place.whole is not None:
            self.head = place.whole.view(weight.dtype).view(weight.shape)
            self._copies = place.copies_to(place.whole)

    def connect(self) -> None:
        """Have the model read them from now on. To be called when all ranks have loaded theirs."""
        self.model.embedding_tables = list(self.embeddings.values())
        if self.head is not None:
            wait_for(start_copies(self._copies, self.device), self.device)
            cast(HeadLoss, self.model.base.get_output_embeddings().forward).whole_weight = self.head

    def readers(self) -> Iterator[tuple[Tensor, ReadRows]]:
        """For the proof: each parameter that is read, and what reads its rows [first, last) as the model does."""
        for name, table in self.embeddings.items():
            yield self.model.embeddings.get_parameter(name), table.slice
        if self.head is not None:
            yield cast(nn.Module, self.model.head).get_parameter("weight"), partial(rows_between, self.head)


def rows_between(rows: Tensor, first: int, last: int) -> Tensor:
    """Rows first to last - 1 of a tensor."""
    return rows[first:last]
