"""Labels of rows, what is wrong with some, and the figures of predictions."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from qlora_fsdp.config.schema import BadRows, Config, DataConfig, ProblemType, TaskConfig, TaskName, TrainingConfig
from qlora_fsdp.data import PreparedData, collate, prepare_data
from qlora_fsdp.data.tokenizer import byte_tokenizer
from qlora_fsdp.errors import DataError
from qlora_fsdp.metrics import classification_metrics, multi_label_metrics, regression_metrics

SINGLE, MULTI, REGRESSION = ProblemType


def prepare(folder: Path, rows: list[object], form: ProblemType, labels: list[str] | None) -> PreparedData:
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = Config(
        task=TaskConfig(TaskName.sequence_classification, form, labels),
        data=DataConfig(path=str(file), cache_folder=str(folder / "cache"), bad_rows=BadRows.truncate),
        training=TrainingConfig(max_length=16, packing=False),
    )
    return prepare_data(config, byte_tokenizer(), is_main=True, wait=lambda error: error, vocab_size=259)


@pytest.mark.parametrize(
    ("form", "labels", "values", "expected"),
    [
        (SINGLE, ["no", "yes"], ["yes", "no", 1], [[1], [0], [1]]),
        (MULTI, ["a", "b", "c"], [["a", "c"], [], [1]], [[1, 0, 1], [0, 0, 0], [0, 1, 0]]),
        (REGRESSION, None, [1.5, [2], -3], [[1.5], [2], [-3]]),
        (REGRESSION, ["x", "y"], [[1, 2], [3, 4], [5, 6]], [[1, 2], [3, 4], [5, 6]]),
    ],
)
def test_labels_reach_the_batch(tmp_path: Path, form: ProblemType, labels: list[str] | None, values, expected):
    data = prepare(tmp_path, [{"text": "abc", "label": value} for value in values], form, labels).train
    batch = collate(data, np.arange(3), pad_to=None, micro_batch_size=4)
    assert batch.labels is not None
    np.testing.assert_array_equal(batch.labels[:3], np.array(expected, np.float32))
    assert batch.labels[3].isnan().all()  # padding alone: no loss
    assert data.num_target_tokens(np.arange(3)) == 3
    assert batch.input_ids[0].tolist() == [256, *b"abc", 258, 258, 258, 258]


def test_rows_that_can_not_be_used_are_named(tmp_path: Path):
    rows = [
        {"text": "good", "label": "yes"},
        {"text": "x" * 40, "labels": 0},
        {"text": "a", "label": "Yes"},
        {"text": "a", "label": 2},
        {"text": "a", "label": True},
        {"text": "a"},
        {"label": "yes"},
        {"text": " ", "label": "yes"},
        {"text": 3, "label": "yes"},
    ]
    data = prepare(tmp_path, rows, SINGLE, ["no", "yes"])
    report = str(data.report)
    for part in (
        "9 rows read, 2 used",
        "3 rows left out (wrong label): rows.jsonl:3 ('Yes' is neither one of task.labels (no, yes) nor an index",
        "rows.jsonl:6 (no label (keys: text))",
        "1 row cut (longer than training.max_length): rows.jsonl:2 (41 tokens)",
        "labels: no 1, yes 1",
    ):
        assert part in report
    with pytest.raises(DataError, match=r"no usable row(.|\n)*task.labels"):
        prepare(tmp_path, rows[2:], SINGLE, ["no", "yes"])


def test_figures_of_one_label_a_row():
    logits = np.array([[2, 1, 0], [0, 3, 1], [1, 0, 0], [0, 1, 5]], np.float32)
    found = classification_metrics(logits, np.array([0, 1, 1, 2]))
    # F1 of class 0: 2/3, of class 1: 2/3, of class 2: 1. Class 1 has probabilities .245 .844* .212* .018: AUC 3/4.
    assert found == pytest.approx({"accuracy": 0.75, "f1": 7 / 9, "auc": (1 + 3 / 4 + 1) / 3})


def test_figures_of_two_labels_with_ties_and_a_class_that_never_occurs():
    logits = np.array([[0, 0], [0, 0], [1, 0], [0, 1]], np.float32)
    found = classification_metrics(logits, np.array([0, 1, 0, 1]))
    assert found == pytest.approx({"accuracy": 0.75, "f1": (4 / 5 + 2 / 3) / 2, "auc": 0.875})
    assert classification_metrics(logits, np.zeros(4, int)) == pytest.approx({"accuracy": 0.75, "f1": (6 / 7) / 2})


def test_figures_of_several_labels_a_row():
    logits = np.array([[1, -1], [-1, 1], [1, 1]], np.float32)
    found = multi_label_metrics(logits, np.array([[1, 0], [1, 1], [0, 1]], bool))
    assert found == pytest.approx({"accuracy": 1 / 3, "f1": (1 / 2 + 1) / 2, "auc": (1 / 4 + 1) / 2})


def test_figures_of_numbers():
    found = regression_metrics(np.array([[1.0], [2], [4]]), np.array([[1.0], [2], [3]]))
    assert found == pytest.approx({"mean_absolute_error": 1 / 3, "r2": 0.5, "pearson_r": 0.9819805})
