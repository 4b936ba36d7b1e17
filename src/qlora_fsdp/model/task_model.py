"""The module that is sharded and trained, whatever its task: it takes a batch and returns the summed loss."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import cast

import peft
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from qlora_fsdp.data.batch import Batch
from qlora_fsdp.layers.token_rows import plain_table
from qlora_fsdp.model.new_tokens import count_tokens
from qlora_fsdp.runtime.processes import Processes


class TaskModel(nn.Module):
    """A PEFT-wrapped transformers model with the loss of its task.

    Args:
        model: the wrapped model, on meta or not.

    Attributes:
        splits_head: whether embeddings and output head are FSDP units of their own, if the model has such a head.
        gathered_by_model: those of these two units that the model gathers itself, where forward uses them
            (`gather_whole`).
        sums_gradients: what `shard.set_gradient_sync` was told last.
        looks_ahead: whether `look_ahead` is to be called before the losses of a step's or an evaluation's batches.
    """

    splits_head = False
    gathered_by_model: Sequence[nn.Module] = ()
    sums_gradients: bool | None = None
    looks_ahead = False

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

    @property
    def vocab_size(self) -> int:
        """Number of tokens that the embeddings know, new ones included."""
        return count_tokens(self.base)[0]

    @property
    def layers(self) -> list[nn.Module]:
        """The transformer layers in order. Each is an FSDP unit, and has its own activation policy."""
        return [module for module in self.base.modules() if isinstance(module, GradientCheckpointingLayer)]

    def forward(self, batch: Batch) -> Tensor:
        """Sum of the losses of the batch's targets, not divided by their number: float32 scalar."""
        raise NotImplementedError

    def look_ahead(self, batches: Iterable[Batch], processes: Processes) -> None:
        """See all of this rank's batches of a step, or of an evaluation, before their losses are asked for. Collective.

        Args:
            batches: on the host.
            processes: all ranks take part.
        """

    def with_reference(self, batch: Batch) -> Batch:
        """A batch on the device with what has to be computed for it by another call of the model. Collective."""
        return batch

    def take_sums(self) -> Tensor | None:
        """Take this rank's sums over the forward passes since the last call, besides the loss; None: there are none."""
        return None

    def name_figures(self, sums: Sequence[float]) -> dict[str, float]:
        """Figures by name, of the numbers of `take_sums`, one after another and summed over ranks."""
        return {}

    def take_metrics(self, processes: Processes) -> dict[str, float]:
        """Figures besides the loss, over all evaluation passes since the last call. Collective."""
        return {}

    def may_get_zero_gradient(self, name: str) -> bool:
        """Whether a trained parameter may have a gradient of zeros without anything being wrong."""
        return False

    def forget_outputs(self) -> None:
        """Drop what `take_sums` and `take_metrics` would take into account."""
