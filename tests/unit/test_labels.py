"""Labels of rows, what is wrong with some, and the figures of predictions."""

from __future__ import annotations

from pathlib import Path

import datasets
import numpy as np
import pytest
from tests.helpers.lines import write_lines
from tests.helpers.one_process import one_process

from qlora_fsdp.common.errors import DataError
from qlora_fsdp.config.schema import BadRows, Config, DataConfig, ProblemType, TaskConfig, TaskName, TrainingConfig
from qlora_fsdp.config.specs import DataSpec
from qlora_fsdp.data.batch import collate
from qlora_fsdp.data.labels import label_first_tokens, read_labels
from qlora_fsdp.data.row import BadRow
from qlora_fsdp.data.run_data import PreparedData, prepare_data
from qlora_fsdp.data.tokenizer import byte_tokenizer
from qlora_fsdp.model.tasks.classifier import (
    _balance,
    classification_metrics,
    entity_metrics,
    multi_label_metrics,
    name_entities,
    regression_metrics,
)

SINGLE, MULTI, REGRESSION = ProblemType


def prepare(
    folder: Path, rows: list[object], form: ProblemType, labels: list[str] | None, name: str = "sequence_classification"
) -> PreparedData:
    file = folder / "rows.jsonl"
    write_lines(file, rows)
    config = Config(
        task=TaskConfig(TaskName[name], form, labels),
        data=DataConfig(
            path=str(file), cache_folder=str(folder / "cache"), bad_rows=BadRows.truncate, deduplicate=False
        ),
        training=TrainingConfig(max_length=16, packing=False),
    )
    return prepare_data(DataSpec.of(config), byte_tokenizer(), one_process(), 259)


@pytest.mark.parametrize(
    ("form", "labels", "values", "expected"),
    [
        (SINGLE, ["no", "yes"], ["yes", "no", 1], [[1], [0], [1]]),
        (MULTI, ["a", "b", "c"], [["a", "c"], [], [1]], [[1, 0, 1], [0, 0, 0], [0, 1, 0]]),
        (MULTI, ["a", "b", "c"], [[0, 1, 1], [1.0, 0.0, 0.0], [2]], [[0, 1, 1], [1, 0, 0], [0, 0, 1]]),
        (MULTI, ["a", "b"], [[0, 1], [1, 0], [0.0, 1.0]], [[0, 1], [1, 0], [0, 1]]),  # 0 or 1 for each, in all rows
        (MULTI, ["a", "b"], [[False, True], [], [1]], [[0, 1], [0, 0], [0, 1]]),
        (MULTI, ["a", "b"], [["b", "a"], [], [0]], [[1, 1], [0, 0], [1, 0]]),
        (MULTI, ["1", "0"], [[0, 1], [], [1]], [[1, 1], [0, 0], [1, 0]]),  # names
        (SINGLE, ["no", "yes"], ["1", 1.0, "no"], [[1], [1], [0]]),  # as CSV and pandas have them
        (SINGLE, ["3", "2", "1"], [1, "2", 3.0], [[2], [1], [0]]),  # a name before an index
        (SINGLE, ["false", "true"], [True, False, "true"], [[1], [0], [1]]),
        (REGRESSION, None, [1.5, [2], -3], [[1.5], [2], [-3]]),
        (REGRESSION, None, ["1.5", " 2", "-3e0"], [[1.5], [2], [-3]]),
        (REGRESSION, ["x", "y"], [[1, 2], [3, 4], [5, 6]], [[1, 2], [3, 4], [5, 6]]),
    ],
)
def test_labels_reach_the_batch(tmp_path: Path, form: ProblemType, labels: list[str] | None, values, expected):
    data = prepare(tmp_path, [{"text": "abc", "label": value} for value in values], form, labels).train
    batch = collate(data, np.arange(3), micro_batch_size=4)
    assert batch.labels is not None and batch.label_positions is not None
    np.testing.assert_array_equal(batch.labels, np.array(expected, np.float32))
    assert batch.label_positions.tolist() == [0, 1, 2]  # the fourth sequence is padding alone: no loss
    assert batch.attention_mask.sum(1).tolist() == [4, 4, 4, 8]
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
        "rows.jsonl:6 (no label (keys: text; data.columns={label: NAME} says which it is))",
        "1 row cut (longer than training.max_length): rows.jsonl:2 (41 tokens)",
        "labels: no 1, yes 1",
    ):
        assert part in report
    with pytest.raises(DataError, match=r"no usable row(.|\n)*task.labels"):
        prepare(tmp_path, rows[2:], SINGLE, ["no", "yes"])


@pytest.mark.parametrize(
    ("form", "labels", "value", "reason"),
    [
        (
            SINGLE,
            ["1", "2", "3"],
            0,
            "0 is neither one of task.labels (1, 2, 3) nor",
        ),  # no index where names are numbers
        (SINGLE, ["0.5", "1.5", "2.5"], 2, "2 is neither one of task.labels (0.5, 1.5, 2.5) nor"),
        (SINGLE, ["no", "yes"], 0.5, "0.5 is neither"),
        (SINGLE, ["no", "yes"], "1" * 5000, f"'{'1' * 79}... is neither"),  # more digits than Python reads as a number
        (MULTI, ["a", "b", "c"], ["a", 1, 1], "which names a label twice"),
        (MULTI, ["a", "b", "c"], [1, 0, 1, 1], "which names a label twice"),
        (MULTI, ["a", "b", "c"], [True, False], "True is neither"),
        (REGRESSION, None, "nan", "label is 'nan', not a finite number"),
        (REGRESSION, ["x", "y"], [1], "label is [1], not 2 finite numbers"),
    ],
)
def test_labels_that_can_not_be_read(form: ProblemType, labels: list[str] | None, value: object, reason: str):
    with pytest.raises(BadRow) as caught:
        read_labels({"label": value}, TaskConfig(TaskName.sequence_classification, form, labels))
    assert reason in caught.value.detail


def test_a_number_is_the_label_of_that_name():
    stars = TaskConfig(TaskName.sequence_classification, SINGLE, ["0.5", "1.0", "1.5", "2.0"])
    values = [0.5, 1.0, 1.5, 2.0, "2.0"]
    assert [read_labels({"label": value}, stars) for value in values] == [[0], [1], [2], [3], [3]]
    assert read_labels({"label": 2.0}, TaskConfig(TaskName.sequence_classification, SINGLE, ["1", "2"])) == [1]


@pytest.mark.parametrize(("labels", "values"), [(["a", "b"], [[0, 1], []]), (["a", "b"], [["a"], [1, 0]])])
def test_lists_that_may_be_indices_or_a_number_for_each_label_are_refused(tmp_path: Path, labels, values):
    rows = [{"text": "abc", "label": value} for value in values]
    with pytest.raises(DataError, match=r"It can't be told, as (.|\n)*Write names in all rows \(\[\"a\", \"b\"\]\)"):
        prepare(tmp_path, rows, MULTI, labels)


def test_words_give_their_first_token_a_label(tmp_path: Path):
    names = ["O", "B-x", "I-x"]
    rows = [
        {"tokens": ["New", "York", "is", "é"], "ner_tags": [1, "I-x", -100, 0]},
        {"tokens": ["a", "", "b"], "labels": ["O", "B-x", None]},
        {"tokens": ["long"] * 9, "tags": [0] * 9},
        {"tokens": ["a", "b"], "labels": [0]},
        {"tokens": ["a"], "labels": ["Z"]},
        {"tokens": ["a"], "labels": [-100]},
        {"tokens": [" "], "labels": [0]},
        {"tokens": "a b", "labels": [0, 0]},
        {"text": "a", "labels": [0]},
        {"tokens": ["a"], "label": [0]},
    ]
    data = prepare(tmp_path, rows, SINGLE, names, "token_classification")
    batch = collate(data.train, np.arange(3), micro_batch_size=4)
    assert batch.labels is not None and batch.label_positions is not None
    assert batch.input_ids[0].tolist() == [256, *"New York is é".encode(), 258]
    # Bytes 1, 5 and 13 of row 0, byte 1 of row 1, and of row 2 what is left of it: three words.
    assert batch.label_positions.tolist() == [1, 5, 13, 16 + 1, 32 + 1, 32 + 6, 32 + 11]
    assert batch.labels.tolist() == [[1], [2], [0], [0], [0], [0], [0]]
    assert data.train.num_target_tokens(np.arange(3)) == 7
    np.testing.assert_array_equal(data.train.labels_of(np.array([1, 0])), [[0], [1], [2], [0]])
    report = str(data.report)
    for part in (
        "1 row cut (longer than training.max_length): rows.jsonl:3 (45 tokens)",
        "rows.jsonl:4 (labels has 1, not a list of one label for each of the 2 tokens)",
        "rows.jsonl:5 ('Z' is neither one of task.labels",
        "1 row left out (no target token): rows.jsonl:6 (no word has a label)",
        "1 row left out (empty): rows.jsonl:7 (tokens is empty)",
        "1 row left out (wrong types): rows.jsonl:8 (tokens is not a list of words)",
        "rows.jsonl:9 (no tokens (keys: text, labels; data.columns={tokens: NAME}",
        "rows.jsonl:10 (no labels (keys: tokens, label; data.columns={labels: NAME}",
        "labels: O 5, B-x 1, I-x 1",
    ):
        assert part in report


def test_a_token_of_two_words_has_the_label_of_the_first():
    offsets = [
        (0, 0),
        (0, 1),
        (1, 4),
        (4, 6),
        (0, 0),
    ]  # "a bc de": the second token is " bc", the third " de" cut short
    assert label_first_tokens(["a", "bc", "de"], [0, 1, 2], offsets) == ([False, True, True, True, False], [0, 1, 2])
    assert label_first_tokens(["a", "bc"], [0, 1], [(0, 4)]) == ([True], [0])


def test_figures_of_entities_are_those_of_seqeval():
    names = ["O", "B-x", "I-x", "B-y", "I-y"]
    truth = ["B-x", "I-x", "O", "B-y", "I-y", "B-x"]  # rows of five words and one
    found = ["B-x", "I-x", "I-x", "I-y", "I-y", "I-x"]  # the first x is too long; I- alone begins an entity
    logits = np.eye(5)[[names.index(tag) for tag in found]]
    labels, is_first = np.array([names.index(tag) for tag in truth]), np.array([1, 0, 0, 0, 0, 1], bool)
    # Two of three entities are right: seqeval 1.2.2 gives these figures.
    expected = {"accuracy": 3 / 6, "precision": 2 / 3, "recall": 2 / 3, "f1": 2 / 3}
    assert entity_metrics(logits, labels, is_first, names) == pytest.approx(expected)
    assert name_entities(names) and not name_entities(["O", "NN", "VB"]) and not name_entities(["yes", "no"])


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


def test_balanced_weights_of_labels_that_all_rows_have_or_none_are_positive():
    labels = np.array([[1, 1, 0], [1, 0, 0], [1, 0, 0], [1, 0, 0]], np.float32)
    task = TaskConfig(TaskName.sequence_classification, MULTI, ["all", "one", "none"])
    assert _balance(task, labels).tolist() == [0.25, 3.0, 3.0]


@pytest.mark.parametrize("kind", ["parquet", "arrow", "saved", "columns"])
def test_the_order_of_labels_that_a_table_states_is_no_other(tmp_path: Path, kind: str):
    """`datasets` writes indices into the rows, and their names beside them."""
    words, name = kind == "arrow", {"columns": "stars", "arrow": "ner_tags"}.get(kind, "label")
    feature = datasets.ClassLabel(names=["neg", "pos"])
    given = {"tokens": [["a", "b"]] * 2, name: [[0, 1]] * 2} if words else {"text": ["a", "b"], name: [0, 1]}
    text = datasets.Value("string")
    features = {"tokens": datasets.List(text), name: datasets.List(feature)} if words else {"text": text, name: feature}
    rows = datasets.Dataset.from_dict(given, features=datasets.Features(features))
    path = tmp_path / "rows.parquet"
    if kind in ("parquet", "columns"):
        rows.to_parquet(path)
    else:
        path = tmp_path / "rows"
        rows.save_to_disk(path)

    def prepare_as(*labels: str) -> PreparedData:
        config = Config(
            task=TaskConfig(
                TaskName.token_classification if words else TaskName.sequence_classification, labels=[*labels]
            ),
            data=DataConfig(path=str(path), cache_folder=str(tmp_path / "cache")),
            training=TrainingConfig(max_length=16, packing=False),
        )
        config.data.columns = {"label": "stars"} if kind == "columns" else {}
        return prepare_data(DataSpec.of(config), byte_tokenizer(), one_process(), 259)

    with pytest.raises(DataError, match=rf"column {name} has their indices. Set task.labels=\[neg,pos\]"):
        prepare_as("pos", "neg")
    prepare_as("NEG", "pos")
    prepare_as("good", "bad")
