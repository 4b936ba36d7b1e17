"""The module that is sharded and trained, whatever its task: it takes a batch and returns the summed loss."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import cast

import peft
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from qlora_fsdp.data.batch import Batch
from qlora_fsdp.layers.head_loss import LogitTransform
from qlora_fsdp.layers.token_rows import plain_table
from qlora_fsdp.model.new_tokens import count_tokens
from qlora_fsdp.model.swap_layers import find_per_layer_tables
from qlora_fsdp.runtime.peers import PeerTable
from qlora_fsdp.runtime.processes import Processes


class TaskModel(nn.Module):
    """A PEFT-wrapped transformers model with the loss of its task.

    Attributes:
        transform: what makes the logits of the output of a causal model's head. The head then computes the loss, and
            embeddings and head are FSDP units of their own. None if the model makes logits, or has none.
        gathered_by_model: those of these two units that the model gathers itself, where forward uses them
            (`gather_whole`).
        embedding_tables: the embeddings' parameters, if their rows are read from others (sharding/peer_weights.py).
        sums_gradients: the last value given to `shard.set_gradient_sync`.
        looks_ahead: whether `look_ahead` must be called before the losses of a step's or an evaluation's batches.
        figure_names: what the task tells besides the loss.
        reads_outputs: whether the host reads what an evaluation computes, which a CUDA graph can't hold.
    """

    transform: LogitTransform | None = None
    gathered_by_model: Sequence[nn.Module] = ()
    embedding_tables: Sequence[PeerTable] = ()
    sums_gradients: bool | None = None
    looks_ahead = False
    figure_names: Sequence[str] = ()
    reads_outputs = False
    _sums: Tensor | None = None

    def __init__(self, model: peft.PeftModel) -> None:
        super().__init__()
        self.model = model

    @property
    def base(self) -> PreTrainedModel:
        """The transformers model inside PEFT's."""
        return cast(PreTrainedModel, self.model.get_base_model())

    @property
    def embeddings(self) -> nn.Module:
        """The input embeddings, without the trained rows of new tokens."""
        return plain_table(self.base.get_input_embeddings())

    @property
    def head(self) -> nn.Module | None:
        """The output head, without the trained rows of new tokens; None for a classifier."""
        head = self.base.get_output_embeddings()
        return None if head is None else plain_table(head)

    @contextmanager
    def without_dropout(self) -> Iterator[None]:
        """A context in which the model computes as in use: in eval() mode, and as before behind it."""
        was_training = self.training
        self.eval()
        try:
            yield
        finally:
            self.train(was_training)

    @property
    def per_layer_tables(self) -> list[nn.Embedding]:
        """Frozen tables that have something of each token for every layer."""
        tables = find_per_layer_tables(self.base)
        return [table for table in tables if not any(param.requires_grad for param in table.parameters(recurse=False))]

    @property
    def vocab_size(self) -> int:
        """Number of tokens that the embeddings know, new ones included."""
        return count_tokens(self.base)[0]

    @property
    def layers(self) -> list[nn.Module]:
        """The transformer layers in order. Each is an FSDP unit, and has its own activation policy.

        Zamba's have others in them, which are parts of theirs.
        """
        found = [module for module in self.base.modules() if isinstance(module, GradientCheckpointingLayer)]
        inner = {part for layer in found for part in layer.modules() if part is not layer}
        return [layer for layer in found if layer not in inner]

    def forward(self, batch: Batch) -> Tensor:
        """Sum of the losses of the batch's targets, not divided by their number: float32 scalar."""
        raise NotImplementedError

    def look_ahead(self, batches: Iterable[Batch], processes: Processes) -> None:
        """See all of this rank's batches of a step, or an evaluation, before their losses are asked for. Collective."""

    def with_reference(self, batch: Batch) -> Batch:
        """The batch, on the device, with the reference's log-probabilities if a call of the model gives them."""
        return batch

    def add_figures(self, values: Tensor, is_about: Tensor) -> None:
        """Add to the sums of the task's figures: values [K, n], a row for each of `figure_names`, and which count."""
        self.add_sums(torch.stack([(values * is_about).double().sum(1), is_about.double().sum(1)], 1))

    def add_sums(self, sums: Tensor) -> None:
        """Add to the sums of the figures' values and to their numbers: float64 [K, 2]."""
        if self._sums is None:
            self._sums = torch.zeros_like(sums)
        self._sums += sums

    def take_sums(self) -> Tensor | None:
        """For each figure the sum of its values since the last call, and their number: float64 [K, 2] on the device.

        Ranks sum what this returns, and `name_figures` makes figures of it. None without figures.
        """
        if self._sums is None:
            return None
        sums = self._sums.clone()
        self._sums.zero_()
        return sums

    def name_figures(self, sums: Sequence[float]) -> dict[str, float]:
        """The means of the figures by name, from what `take_sums` returned, flattened and summed over ranks."""
        pairs = zip(self.figure_names, sums[::2], sums[1::2], strict=True)
        return {name: value / count for name, value, count in pairs if count}

    def take_metrics(self, processes: Processes) -> dict[str, float]:
        """The task's figures over all evaluation passes of all ranks since the last call. Collective."""
        sums = self.take_sums()
        mine = [0.0] * (2 * len(self.figure_names)) if sums is None else sums.flatten().tolist()
        return self.name_figures(processes.sum(mine)) if mine else {}

    def judge_step(self, step: int, loss: float) -> str | None:
        """Why nothing can be learned from one of a run's first steps; None if something can. Asked before its update.

        Args:
            step: optimizer steps done before it.
            loss: of the step, over all ranks.
        """
        return None

    def may_get_zero_gradient(self, name: str) -> bool:
        """Whether a trained parameter may have a gradient of zeros without anything being wrong."""
        return False

    def forget_outputs(self) -> None:
        """Drop what has been collected. The tensor stays, because a CUDA graph of the loss adds to it."""
        if self._sums is not None:
            self._sums.zero_()


def are_tied(embeddings: nn.Module, head: nn.Module) -> bool:
    """Whether embeddings and head share a weight."""
    return bool({id(param) for param in embeddings.parameters()} & {id(param) for param in head.parameters()})
