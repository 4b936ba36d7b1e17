"""A classifier of whole rows, or a regression, with its loss and its figures."""

from __future__ import annotations

from typing import Any

import numpy as np
import peft
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from qlora_fsdp.config.schema import ProblemType, TaskConfig
from qlora_fsdp.data.batch import Batch
from qlora_fsdp.data.labels import count_labels
from qlora_fsdp.distributed import Processes
from qlora_fsdp.metrics import classification_metrics, multi_label_metrics, regression_metrics
from qlora_fsdp.task_model import TaskModel


class SequenceClassifier(TaskModel):
    """A PEFT-wrapped model for sequence classification, with transformers' own pooling and head.

    The loss of a row is its cross-entropy; with several labels a row, the mean of their binary cross-entropies; of
    numbers, the mean of their squared errors. Rows count alike whatever the batch, so that the same data gives the same
    loss at any split: with class weights, too, the sum is divided by the number of rows.

    Args:
        model: the wrapped model, on meta or not.
        task: what its head is for.
    """

    class_weights: Tensor | None

    def __init__(self, model: peft.PeftModel, task: TaskConfig) -> None:
        super().__init__(model)
        self.task = task
        self.register_buffer("class_weights", None, persistent=False)
        self._seen: list[tuple[Tensor, Tensor]] = []

    def weigh_classes(self, labels: NDArray[np.float32]) -> None:
        """Take the class weights of the settings, or balance them by the training data's labels [num_rows, W]."""
        self.class_weights = _class_weights(self.task, labels)

    def forward(self, batch: Batch) -> Tensor:
        """Sum of the losses of the batch's rows: float32 scalar, not yet divided by their number."""
        assert batch.labels is not None
        # Positions count from 0 again where padding begins. A sequence that is padding alone attends to itself: a row
        # of the mask without a 1 would give NaN.
        columns = torch.arange(batch.input_ids.shape[1], device=batch.input_ids.device)
        attention_mask = (batch.position_ids == columns).long()
        # Positions are left to the model: RoBERTa's begin at 2.
        output = self.base(input_ids=batch.input_ids, attention_mask=attention_mask)
        is_row = ~batch.labels.isnan().any(1)
        logits, labels = output.logits.float(), batch.labels
        if not self.training:
            self._seen.append((logits[is_row].cpu(), labels[is_row].cpu()))
        return self._losses(logits, labels.nan_to_num()).masked_fill(~is_row, 0.0).sum()

    def _losses(self, logits_BK: Tensor, labels_BW: Tensor) -> Tensor:
        """The loss of each row, float32 [B]: K outputs, W numbers a row."""
        if self.task.problem_type is ProblemType.single_label_classification:
            return F.cross_entropy(logits_BK, labels_BW[:, 0].long(), self.class_weights, reduction="none")
        if self.task.problem_type is ProblemType.multi_label_classification:
            losses_BK = F.binary_cross_entropy_with_logits(
                logits_BK, labels_BW, pos_weight=self.class_weights, reduction="none"
            )
            return losses_BK.mean(1)
        return F.mse_loss(logits_BK, labels_BW, reduction="none").mean(1)

    def take_metrics(self, processes: Processes) -> dict[str, float]:
        """Accuracy, F1 and AUC (of numbers: mean absolute error, R2 and Pearson's r) of the rows seen since."""
        seen, self._seen = self._seen, []
        mine = [torch.cat(tensors).numpy() for tensors in zip(*seen, strict=True)] if seen else []
        parts = [part for part in processes.gather(mine) if part]
        if not parts:
            return {}
        logits, labels = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
        if self.task.problem_type is ProblemType.single_label_classification:
            return classification_metrics(logits, labels[:, 0].astype(np.int64))
        if self.task.problem_type is ProblemType.multi_label_classification:
            return multi_label_metrics(logits, labels.astype(bool))
        return regression_metrics(logits, labels)

    def may_get_zero_gradient(self, name: str) -> bool:
        """In the last layer, where one token reaches the head: Longformer's local attention, for one."""
        module: Any = self.layers[-1]
        prefix = next(n for n, child in self.model.named_modules() if child is module)
        return name.startswith(f"{prefix}.")


def _class_weights(task: TaskConfig, labels: NDArray[np.float32]) -> Tensor | None:
    """float32 [K]; `balanced` as scikit-learn: one label, rows / (labels x rows with it); several, without / with."""
    if task.class_weights is None:
        return None
    if task.class_weights != "balanced":
        return torch.tensor(task.class_weights, dtype=torch.float32)
    counts = np.maximum(1, np.array(list(count_labels(labels, task).values())))
    if task.problem_type is ProblemType.multi_label_classification:
        return torch.tensor((len(labels) - counts) / counts, dtype=torch.float32)
    return torch.tensor(len(labels) / (len(counts) * counts), dtype=torch.float32)
