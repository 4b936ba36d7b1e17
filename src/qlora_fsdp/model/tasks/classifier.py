"""A classifier of whole rows or of single tokens, or a regression, with its loss and its figures."""

from __future__ import annotations

from typing import Any

import numpy as np
import peft
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F
from typing_extensions import assert_never

from qlora_fsdp.config.schema import ProblemType, TaskConfig, TaskName
from qlora_fsdp.data.batch import Batch
from qlora_fsdp.data.labels import count_labels
from qlora_fsdp.data.sequences import TrainingData
from qlora_fsdp.model.tasks.classifier_metrics import (
    classification_metrics,
    entity_metrics,
    multi_label_metrics,
    name_entities,
    regression_metrics,
)
from qlora_fsdp.model.tasks.task_model import TaskModel
from qlora_fsdp.runtime.processes import Processes


class Classifier(TaskModel):
    """A PEFT-wrapped model for sequence or token classification, with transformers' own pooling and head.

    A row with one label, or a labelled token, has its cross-entropy as its loss. A row with several labels has the mean
    of their binary cross-entropies, and a row with numbers the mean of their squared errors. Every row or token counts
    the same whatever batch it is in, so that the same data gives the same loss however it is split. This is why the sum
    of the losses is divided by their number, and not by the sum of the class weights as torch would do.
    """

    class_weights: Tensor | None
    reads_outputs = True

    def __init__(self, model: peft.PeftModel, task: TaskConfig) -> None:
        super().__init__(model)
        self.task = task
        self.register_buffer("class_weights", None, persistent=False)
        # What evaluation has computed since the last figures: logits, labels, and which of them begin a row.
        self._seen: list[tuple[Tensor, ...]] = []

    def weigh_classes(self, data: TrainingData, device: torch.device) -> None:
        """Take the class weights of the settings, or balance them by the training data's labels."""
        weights = self.task.class_weights
        if weights == "balanced":
            self.class_weights = _balance(self.task, data.labels_of(np.arange(len(data)))).to(device)
        elif weights is not None:
            self.class_weights = torch.tensor(weights, dtype=torch.float32, device=device)

    def forward(self, batch: Batch) -> Tensor:
        """Sum of the losses of the batch's labels, not divided by their number: float32 scalar."""
        assert batch.labels is not None and batch.label_positions is not None
        # The model makes its own positions, because they differ: RoBERTa's begin at 2.
        output = self.base(input_ids=batch.input_ids, attention_mask=batch.attention_mask)
        logits_NK, labels_NW = output.logits.float().flatten(0, -2)[batch.label_positions], batch.labels
        if not self.training:
            rows = batch.label_positions
            if self.task.name is TaskName.token_classification:
                rows = rows // batch.input_ids.shape[1]
            is_first = torch.ones_like(rows, dtype=torch.bool)
            is_first[1:] = rows[1:] != rows[:-1]
            seen = (tensor.cpu() for tensor in (logits_NK, labels_NW, is_first))
            self._seen.append(tuple(seen if batch.is_label is None else (part[batch.is_label.cpu()] for part in seen)))
        losses = self._losses(logits_NK, labels_NW)
        return (losses if batch.is_label is None else losses.masked_fill(~batch.is_label, 0.0)).sum()

    def _losses(self, logits_NK: Tensor, labels_NW: Tensor) -> Tensor:
        """The loss of each of N labels, float32 [N], from K outputs and W numbers per label."""
        match self.task.problem_type:
            case ProblemType.single_label_classification:
                return F.cross_entropy(logits_NK, labels_NW[:, 0].long(), self.class_weights, reduction="none")
            case ProblemType.multi_label_classification:
                losses_NK = F.binary_cross_entropy_with_logits(
                    logits_NK, labels_NW, pos_weight=self.class_weights, reduction="none"
                )
                return losses_NK.mean(1)
            case ProblemType.regression:
                return F.mse_loss(logits_NK, labels_NW, reduction="none").mean(1)
            case _:
                assert_never(self.task.problem_type)

    def forget_outputs(self) -> None:
        """Drop what `take_metrics` would take into account."""
        self._seen = []

    def take_metrics(self, processes: Processes) -> dict[str, float]:
        """Figures of the rows of all ranks since the last call. Collective.

        Classifiers have accuracy, F1 and AUC; regressions mean absolute error, R2 and Pearson's r. If the labels mark
        entities (B-city, I-city, O), there are accuracy, and precision, recall and F1 of whole entities.
        """
        seen, self._seen = self._seen, []
        mine = [torch.cat(tensors).numpy() for tensors in zip(*seen, strict=True)] if seen else []
        parts = [part for part in processes.gather(mine, list[np.ndarray]) if part]
        if not parts:
            return {}
        logits, labels, is_first = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
        if self.task.name is TaskName.token_classification and name_entities(self.task.labels or []):
            return entity_metrics(logits, labels[:, 0].astype(np.int64), is_first, self.task.labels or [])
        match self.task.problem_type:
            case ProblemType.single_label_classification:
                return classification_metrics(logits, labels[:, 0].astype(np.int64))
            case ProblemType.multi_label_classification:
                return multi_label_metrics(logits, labels.astype(bool))
            case ProblemType.regression:
                return regression_metrics(logits, labels)
            case _:
                assert_never(self.task.problem_type)

    def may_get_zero_gradient(self, name: str) -> bool:
        """Parameters of the last layer may, and rows of new tokens."""
        return may_be_unseen(self, name)


def may_be_unseen(model: TaskModel, name: str) -> bool:
    """Whether a batch may give a parameter a gradient of zeros.

    The head sees one token of the last layer alone: in Longformer, for example, local attention has no influence on
    that token. And a batch may have none of the new tokens that have rows.
    """
    module: Any = model.layers[-1]
    prefix = next(n for n, child in model.model.named_modules() if child is module)
    return name.startswith(f"{prefix}.") or ".trainable_tokens_delta." in name


def _balance(task: TaskConfig, labels: NDArray[np.float32]) -> Tensor:
    """Class weights by which rare labels count more: float32 [K].

    With one label per row these are scikit-learn's balanced weights: rows / (labels x rows with that label). With
    several, a label's weight is the number of rows without it over the number of rows with it. A number of 0 counts as
    1, so that every weight is positive: a label that all rows have is learned too.

    Args:
        task: tells whether a row has one label or several.
        labels: the labels of all rows, [rows, W].
    """
    counts = np.maximum(1, np.array(list(count_labels(labels, task).values())))
    if task.problem_type is ProblemType.multi_label_classification:
        return torch.tensor(np.maximum(1, len(labels) - counts) / counts, dtype=torch.float32)
    return torch.tensor(len(labels) / (len(counts) * counts), dtype=torch.float32)
