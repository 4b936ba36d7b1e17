"""A reward model: a number for each answer to a prompt, higher for the one that was chosen."""

from __future__ import annotations

from collections.abc import Sequence

import peft
import torch
from torch import Tensor
from torch.nn import functional as F

from qlora_fsdp.data.batch import Batch
from qlora_fsdp.model.classifier import may_be_unseen
from qlora_fsdp.model.task_model import TaskModel
from qlora_fsdp.runtime.processes import Processes

FIGURES = ("rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies")


class RewardModel(TaskModel):
    """A PEFT-wrapped classifier with one output, transformers' own pooling and head, and a new head without bias.

    The loss of a pair is that of Bradley and Terry, -log sigmoid(r_chosen - r_rejected - margin), as TRL's
    RewardTrainer has it. Every pair counts the same whatever batch it is in.
    """

    def __init__(self, model: peft.PeftModel) -> None:
        super().__init__(model)
        self._sums: Tensor | None = None  # of figures and of the pairs that they are about: [K, 2]

    def forward(self, batch: Batch) -> Tensor:
        """Sum of the losses of the batch's pairs, not divided by their number: float32 scalar."""
        assert batch.num_tokens is not None
        length = batch.input_ids.shape[1]
        # A sequence of padding alone passes for real tokens: a row of the mask without a 1 would give NaN.
        num_tokens = torch.where(batch.num_tokens > 0, batch.num_tokens, length)
        attention_mask = (torch.arange(length, device=num_tokens.device) < num_tokens[:, None]).long()
        output = self.base(input_ids=batch.input_ids, attention_mask=attention_mask)
        rewards_P2 = output.logits.float()[: batch.num_answers].view(-1, 2)
        differences = rewards_P2[:, 0] - rewards_P2[:, 1]
        self._add(rewards_P2.detach(), differences.detach())
        return -F.logsigmoid(differences if batch.margins is None else differences - batch.margins).sum()

    def _add(self, rewards_P2: Tensor, differences: Tensor) -> None:
        values = torch.stack([*rewards_P2.T, differences, (differences > 0).float()]).double().sum(1)
        sums = torch.stack([values, torch.full_like(values, len(differences))], 1)
        self._sums = sums if self._sums is None else self._sums + sums

    def take_sums(self) -> Tensor | None:
        """Sums of the figures and the number of pairs since the last call, float64 [K, 2] on the device."""
        sums, self._sums = self._sums, None
        return sums

    def name_figures(self, sums: Sequence[float]) -> dict[str, float]:
        """Figures by name, of the numbers of `take_sums`, one after another and summed over ranks."""
        pairs = zip(FIGURES, sums[::2], sums[1::2], strict=True)
        return {name: value / count for name, value, count in pairs if count}

    def take_metrics(self, processes: Processes) -> dict[str, float]:
        """The figures of all ranks since the last call. Collective."""
        sums = self.take_sums()
        return self.name_figures(processes.sum([0.0] * (2 * len(FIGURES)) if sums is None else sums.flatten().tolist()))

    def forget_outputs(self) -> None:
        """Drop what `take_metrics` would take into account."""
        self._sums = None

    def may_get_zero_gradient(self, name: str) -> bool:
        """Parameters of the last layer may, and rows of new tokens."""
        return may_be_unseen(self, name)
