"""Statistics of labels: how many numbers a label has, how often each label occurs, and its name."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from typing_extensions import assert_never

from qlora_fsdp.config.schema import ProblemType, TaskConfig


def num_outputs(task: TaskConfig) -> int:
    """Number of outputs of the head."""
    return len(task.labels) if task.labels else 1


def label_width(task: TaskConfig) -> int:
    """Numbers per label."""
    return 1 if task.problem_type is ProblemType.single_label_classification else num_outputs(task)


def count_labels(labels: NDArray[np.float32], task: TaskConfig) -> dict[str, int]:
    """How often each of `labels` [num_labels, width], as `read_labels` gives them, occurs; empty for a regression."""
    names = task.labels or []
    match task.problem_type:
        case ProblemType.single_label_classification:
            counts = np.bincount(labels[:, 0].astype(np.int64), minlength=len(names))
        case ProblemType.multi_label_classification:
            counts = labels.sum(0).astype(np.int64)
        case ProblemType.regression:
            return {}
        case other:
            assert_never(other)
    return dict(zip(names, counts.tolist(), strict=True))


def name_labels(labels: NDArray[np.float32], task: TaskConfig) -> str:
    """The names of labels, for people to read. `labels` is [num_labels, width], as `read_labels` gives them."""
    names = task.labels or []
    match task.problem_type:
        case ProblemType.single_label_classification:
            return " ".join(names[int(index)] for index in labels[:, 0])
        case ProblemType.multi_label_classification:
            return " ".join(names[index] for index in np.flatnonzero(labels[0])) or "none"
        case ProblemType.regression:
            return " ".join(f"{number:g}" for number in labels[0])
        case other:
            assert_never(other)
