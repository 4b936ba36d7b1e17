"""Figures of classifiers and regressions, by scikit-learn; figures of entities are defined as in seqeval.

scikit-learn takes a second to import, so each function that needs it imports it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.floating]
Bools = NDArray[np.bool_]


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


def _entities(tags: Sequence[str], is_first: Bools) -> set[tuple[int, int, str]]:
    """Each entity's first word, the word after its last, and its kind.

    An I- that continues nothing begins an entity, as in conlleval.
    """
    entities, start, kind, before = set(), 0, "", "O"
    for position, tag in enumerate([*tags, "O"]):
        mark, _, its_kind = tag.partition("-")
        starts_row = position == len(tags) or bool(is_first[position])
        begins = mark in ("B", "S") or before in ("O", "E", "S") or its_kind != kind or starts_row
        if before != "O" and (mark == "O" or begins):
            entities.add((start, position, kind))
        if mark != "O" and begins:
            start = position
        kind, before = its_kind, mark
    return entities
