"""The module that is sharded and trained, whatever it learns: batch in, summed loss out."""

from __future__ import annotations

from collections.abc import Sequence
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
        splits_head: where there is an output head, embeddings and head are FSDP units of their own.
        gathers_itself: of these, the ones that the model gathers where it uses them (`gather_whole`), in forward alone.
        reduces_gradients: what `shard.reduce_gradients` was told last.
    """

    splits_head = False
    gathers_itself: Sequence[nn.Module] = ()
    reduces_gradients: bool | None = None

    def __init__(self, model: peft.PeftModel) -> None:
        super().__init__()
        self.model = model

    @property
    def base(self) -> PreTrainedModel:
        """The transformers model inside PEFT's."""
        return cast(PreTrainedModel, self.model.get_base_model())

    @property
    def embeddings(self) -> nn.Module:
        """The input embeddings, without trained rows of new tokens."""
        return plain_table(self.base.get_input_embeddings())

    @property
    def head(self) -> nn.Module | None:
        """The output head, without trained rows of new tokens."""
        head = self.base.get_output_embeddings()
        return None if head is None else plain_table(head)

    @property
    def vocab_size(self) -> int:
        """Tokens that the embeddings know, new ones included."""
        return count_tokens(self.base)[0]

    @property
    def layers(self) -> list[nn.Module]:
        """The transformer layers, in order: FSDP's units and the steps of activation checkpointing."""
        return [module for module in self.base.modules() if isinstance(module, GradientCheckpointingLayer)]

    def forward(self, batch: Batch) -> Tensor:
        """Sum of the losses over the batch's targets: float32 scalar, not yet divided by their number."""
        raise NotImplementedError

    def take_metrics(self, processes: Processes) -> dict[str, float]:
        """Figures besides the loss over all forward passes in evaluation since the last call. Collective."""
        return {}

    def may_get_zero_gradient(self, name: str) -> bool:
        """Whether a trained parameter may have a gradient of zeros though all is well."""
        return False
