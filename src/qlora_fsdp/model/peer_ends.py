"""Frozen embeddings and a frozen head, read from the memory of the other GPUs.

A batch looks up few rows of the embeddings: 1,024 tokens need 8 MiB of the 1 GiB that Llama 3 8B has. So each rank
reads these rows where they are, and the table is not gathered. The kernel that looks rows up does so itself, because
CUDA maps the other GPUs' memory into its own.

The loss needs the whole head, in every micro-batch. If layers stay gathered, there is memory to spare: the head is read
once for the run, and stays too. If not, the model gathers it for each use (layers/head_loss.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import cast

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from qlora_fsdp.layers import QuantizedLayer
from qlora_fsdp.layers.head_loss import HeadLoss
from qlora_fsdp.model.shard import embedding_and_head_units
from qlora_fsdp.model.task_model import TaskModel
from qlora_fsdp.runtime.peers import PeerTable

ReadRows = Callable[[int, int], Tensor]


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
        parts: the rows of their parameters that each rank holds, uint8, by the id of the parameter on meta.
    """

    def __init__(self, model: TaskModel, parts: Mapping[int, Sequence[Tensor]]) -> None:
        self.model = model
        self.embeddings = _tables(model.embeddings, parts)
        self.head = {} if model.head is None else _tables(model.head, parts)
        self.whole_head: Tensor | None = None

    def connect(self) -> None:
        """Have the model read them from now on. To be called when all ranks have loaded theirs."""
        self.model.embedding_tables = list(self.embeddings.values())
        if "weight" in self.head:
            loss = cast(HeadLoss, self.model.base.get_output_embeddings().forward)
            loss.whole_weight = self.whole_head = self.head["weight"].whole()

    def readers(self) -> Iterator[tuple[Tensor, ReadRows]]:
        """For the proof: each parameter that is read, and what reads its rows [first, last) as the model does."""
        for name, table in self.embeddings.items():
            yield self.model.embeddings.get_parameter(name), table.slice
        if self.whole_head is not None:
            yield cast(nn.Module, self.model.head).get_parameter("weight"), self._slice_of_head

    def _slice_of_head(self, first: int, last: int) -> Tensor:
        assert self.whole_head is not None
        return self.whole_head[first:last]


def _tables(module: nn.Module, parts: Mapping[int, Sequence[Tensor]]) -> dict[str, PeerTable]:
    """The tables of those of a module's own parameters that are read, by name."""
    tables = {}
    for name, param in module.named_parameters(recurse=False):
        if id(param) in parts:
            assert isinstance(param, DTensor)
            shape = param.to_local().shape
            tables[name] = PeerTable([part.view(param.dtype).view(shape) for part in parts[id(param)]])
    return tables
