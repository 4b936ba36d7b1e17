"""A reward model: a number for each answer to a prompt, higher for the one that was chosen."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from qlora_fsdp.data.batch import Batch
from qlora_fsdp.model.tasks.classifier import may_be_unseen
from qlora_fsdp.model.tasks.task_model import TaskModel


class RewardModel(TaskModel):
    """A PEFT-wrapped classifier with one output, transformers' own pooling and head, and a new head without bias.

    The loss of a pair is that of Bradley and Terry, -log sigmoid(r_chosen - r_rejected - margin), as TRL's
    RewardTrainer has it. Every pair counts the same whatever batch it is in.
    """

    figure_names = ("rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies")

    def forward(self, batch: Batch) -> Tensor:
        """Sum of the losses of the batch's pairs, not divided by their number: float32 scalar."""
        output = self.base(input_ids=batch.input_ids, attention_mask=batch.attention_mask)
        rewards_P2 = output.logits.float()[: batch.num_answers].view(-1, 2)
        differences = rewards_P2[:, 0] - rewards_P2[:, 1]
        values = torch.stack([*rewards_P2.T, differences, (differences > 0).float()]).detach()
        self.add_figures(values, torch.ones_like(values, dtype=torch.bool))
        return -F.logsigmoid(differences if batch.margins is None else differences - batch.margins).sum()

    def may_get_zero_gradient(self, name: str) -> bool:
        """Parameters of the last layer may, and rows of new tokens."""
        return may_be_unseen(self, name)
