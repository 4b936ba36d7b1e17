"""A classifier of whole rows or of single tokens, or a regression, with its loss and its figures.

The figures are scikit-learn's; those of entities are defined as in seqeval.

A reward model is a classifier with one output.
"""

from __future__ import annotations

from collections.abc import Sequence
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
from qlora_fsdp.model.tasks.task_model import TaskModel
from qlora_fsdp.runtime.processes import Processes

Floats = NDArray[np.floating]
Bools = NDArray[np.bool_]


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


def classification_metrics(logits_NK: Floats, labels_N: NDArray[np.int64]) -> dict[str, float]:
    """Accuracy, macro F1 and macro one-vs-rest AUC for rows with one label each.

    F1 leaves out classes that are neither labelled nor predicted, AUC classes that no row or every row has.
    """
    from sklearn.metrics import accuracy_score, f1_score

    predicted_N = logits_NK.argmax(1)
    # AUC compares rows with one another. Probabilities can be compared, logits of different rows can not.
    shifted_NK = np.exp(logits_NK - logits_NK.max(1, keepdims=True))
    probabilities_NK = shifted_NK / shifted_NK.sum(1, keepdims=True)
    return {
        "accuracy": float(accuracy_score(labels_N, predicted_N)),
        "f1": float(f1_score(labels_N, predicted_N, average="macro")),
    } | _mean_auc(probabilities_NK, labels_N[:, None] == np.arange(logits_NK.shape[1]))


def multi_label_metrics(logits_NK: Floats, truth_NK: Bools) -> dict[str, float]:
    """Accuracy (all labels of a row right), macro F1 and macro AUC for rows with any number of labels each."""
    from sklearn.metrics import accuracy_score, f1_score

    chosen_NK = logits_NK > 0
    # One class at a time: scikit-learn takes a single column for two classes.
    f1_K = [
        f1_score(truth_N, chosen_N, zero_division=0.0)
        for truth_N, chosen_N in zip(truth_NK.T, chosen_NK.T, strict=True)
    ]
    return {
        "accuracy": float(accuracy_score(truth_NK, chosen_NK)),
        "f1": float(np.mean(f1_K)),
    } | _mean_auc(logits_NK, truth_NK)


def regression_metrics(predicted_NK: Floats, truth_NK: Floats) -> dict[str, float]:
    """Mean absolute error, and means of R2 and Pearson's r over the outputs whose truth and prediction vary."""
    from sklearn.metrics import mean_absolute_error, r2_score

    predicted_NK, truth_NK = predicted_NK.astype(np.float64), truth_NK.astype(np.float64)
    figures = {"mean_absolute_error": float(mean_absolute_error(truth_NK, predicted_NK))}
    varies_K = (np.ptp(truth_NK, 0) > 0) & (np.ptp(predicted_NK, 0) > 0)
    if not varies_K.any():
        return figures
    predicted_NK, truth_NK = predicted_NK[:, varies_K], truth_NK[:, varies_K]
    r_K = [
        np.corrcoef(predicted_N, truth_N)[0, 1] for predicted_N, truth_N in zip(predicted_NK.T, truth_NK.T, strict=True)
    ]
    return figures | {"r2": float(r2_score(truth_NK, predicted_NK)), "pearson_r": float(np.mean(r_K))}


def _mean_auc(scores_NK: Floats, truth_NK: Bools) -> dict[str, float]:
    """Mean of the areas under the ROC curves of those classes that some rows have and others lack; {} without any."""
    from sklearn.metrics import roc_auc_score

    aucs = [
        roc_auc_score(truth_N, scores_N)
        for scores_N, truth_N in zip(scores_NK.T, truth_NK.T, strict=True)
        if truth_N.any() and not truth_N.all()
    ]
    return {"auc": float(np.mean(aucs))} if aucs else {}


def name_entities(names: Sequence[str]) -> bool:
    """Whether the labels mark entities: B-city begins a city, I-city continues it, O is outside of all entities.

    Also known are E-city for a last word, and S-city for an entity of one word.
    """
    return (
        "O" in names and len(names) > 1 and all(name == "O" or name[:2] in ("B-", "I-", "E-", "S-") for name in names)
    )


def entity_metrics(
    logits_NK: Floats, labels_N: NDArray[np.int64], is_first_N: Bools, names: Sequence[str]
) -> dict[str, float]:
    """Accuracy of single words, and precision, recall and F1 of entities that are right from first to last word.

    `is_first_N` marks the first word of each row, before which an entity ends.
    """
    predicted_N = logits_NK.argmax(1)
    true, found = (_entities([names[index] for index in tags], is_first_N) for tags in (labels_N, predicted_N))
    num_right = len(true & found)
    return {
        "accuracy": float((predicted_N == labels_N).mean()),
        "precision": num_right / max(1, len(found)),
        "recall": num_right / max(1, len(true)),
        "f1": 2 * num_right / max(1, len(true) + len(found)),
    }


def _separates(before: str, mark: str) -> bool:
    """Whether an entity ends with the first of two marks in a row, or another one begins with the second."""
    return before in ("O", "E", "S") or mark in ("B", "S")


def _entities(tags: Sequence[str], is_first: Bools) -> set[tuple[int, int, str]]:
    """Each entity's first word, the word after its last, and its kind.

    An I- that continues nothing begins an entity, as in conlleval.
    """
    entities = set()
    start = 0
    kind = ""
    before = "O"
    for position, tag in enumerate([*tags, "O"]):
        mark, _, its_kind = tag.partition("-")
        starts_row = position == len(tags) or bool(is_first[position])
        begins = starts_row or its_kind != kind or _separates(before, mark)
        if before != "O" and (mark == "O" or begins):
            entities.add((start, position, kind))
        if mark != "O" and begins:
            start = position
        kind, before = its_kind, mark
    return entities


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
