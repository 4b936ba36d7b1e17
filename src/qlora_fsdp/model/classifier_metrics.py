"""Figures of classifiers: plain numpy, by the definitions of scikit-learn, for entities of seqeval."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.floating]
Bools = NDArray[np.bool_]


def classification_metrics(logits_NK: Floats, labels_N: NDArray[np.int64]) -> dict[str, float]:
    """Accuracy, macro F1 and macro one-vs-rest AUC of one label a row; NaN-free: classes without rows are left out."""
    predicted_N = logits_NK.argmax(1)
    truth_NK = labels_N[:, None] == np.arange(logits_NK.shape[1])
    chosen_NK = predicted_N[:, None] == np.arange(logits_NK.shape[1])
    # One class against the rest is ranked by its probability, so that rows can be compared.
    shifted_NK = np.exp(logits_NK - logits_NK.max(1, keepdims=True))
    probabilities_NK = shifted_NK / shifted_NK.sum(1, keepdims=True)
    occurs_K = (truth_NK | chosen_NK).any(0)
    return {
        "accuracy": float((predicted_N == labels_N).mean()),
        "f1": float(_f1(truth_NK, chosen_NK)[occurs_K].mean()),
    } | _mean_auc(probabilities_NK, truth_NK)


def multi_label_metrics(logits_NK: Floats, truth_NK: Bools) -> dict[str, float]:
    """Accuracy (all labels of a row right), macro F1 and macro AUC of any number of labels a row."""
    chosen_NK = logits_NK > 0
    return {
        "accuracy": float((chosen_NK == truth_NK).all(1).mean()),
        "f1": float(_f1(truth_NK, chosen_NK).mean()),
    } | _mean_auc(logits_NK, truth_NK)


def name_entities(names: Sequence[str]) -> bool:
    """Whether labels mark entities: B-city begins one, I-city goes on, O is outside (also E- for ends, S- alone)."""
    return (
        "O" in names and len(names) > 1 and all(name == "O" or name[:2] in ("B-", "I-", "E-", "S-") for name in names)
    )


def entity_metrics(
    logits_NK: Floats, labels_N: NDArray[np.int64], is_first_N: Bools, names: Sequence[str]
) -> dict[str, float]:
    """Accuracy of single words, and precision, recall and F1 of entities that are right from first to last word.

    Args:
        logits_NK: of the words, one row after another.
        labels_N: indices of their labels.
        is_first_N: whether a word is the first of its row.
        names: of the labels.
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
    """First word, word behind the last, and kind of each. An I- that continues nothing begins one, as in conlleval."""
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


def regression_metrics(predicted_NK: Floats, truth_NK: Floats) -> dict[str, float]:
    """Mean absolute error, and means over the outputs of R2 and Pearson's r where the truth varies."""
    predicted_NK, truth_NK = predicted_NK.astype(np.float64), truth_NK.astype(np.float64)
    errors = {"mean_absolute_error": float(np.abs(predicted_NK - truth_NK).mean())}
    centred_NK, guessed_NK = truth_NK - truth_NK.mean(0), predicted_NK - predicted_NK.mean(0)
    total_K, guessed_K = (centred_NK**2).sum(0), (guessed_NK**2).sum(0)
    varies_K = (total_K > 0) & (guessed_K > 0)
    if not varies_K.any():
        return errors
    r2_K = 1 - ((predicted_NK - truth_NK) ** 2).sum(0)[varies_K] / total_K[varies_K]
    r_K = (centred_NK * guessed_NK).sum(0)[varies_K] / np.sqrt(total_K * guessed_K)[varies_K]
    return errors | {"r2": float(r2_K.mean()), "pearson_r": float(r_K.mean())}


def _f1(truth_NK: Bools, chosen_NK: Bools) -> Floats:
    """2 TP / (2 TP + FP + FN) of each class; 0 where it is neither there nor predicted."""
    both_K = (truth_NK & chosen_NK).sum(0)
    f1_K: Floats = 2 * both_K / np.maximum(1, truth_NK.sum(0) + chosen_NK.sum(0))
    return f1_K


def _mean_auc(scores_NK: Floats, truth_NK: Bools) -> dict[str, float]:
    """Mean over classes of the chance that a row of the class scores above one that is not; ties count a half."""
    aucs = []
    for scores_N, truth_N in zip(scores_NK.T, truth_NK.T, strict=True):
        positive = int(truth_N.sum())
        negative = len(truth_N) - positive
        if positive and negative:
            _, group_N, sizes = np.unique(scores_N, return_inverse=True, return_counts=True)
            ranks_N = (np.cumsum(sizes) - (sizes - 1) / 2)[group_N]  # from 1; the mean of tied ones
            aucs.append((ranks_N[truth_N].sum() - positive * (positive + 1) / 2) / (positive * negative))
    return {"auc": float(np.mean(aucs))} if aucs else {}
