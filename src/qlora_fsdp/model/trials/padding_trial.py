"""Compute padded rows with a small classifier whose attention gets no mask, and each of them alone, and compare.

A decoder's tokens see what comes before them, and padding comes last: so attention that is told nothing of padding, as
`varlen` is, computes the rows of a decoder's classifier too. An encoder's tokens see the padding. Which of the two a
class is, this trial finds out as row_trial.py does for packed rows: the reference is stock transformers with eager
attention, one row at a time and without padding.
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from qlora_fsdp.common.text import name_error
from qlora_fsdp.model.trials.attention_by_starts import BY_SEQUENCES
from qlora_fsdp.model.trials.row_trial import (
    FIRST_TOKEN,
    Result,
    RowTrial,
    compute_alone,
    embedded_by,
    largest_difference,
    raise_shortage,
    stock,
    weights_of,
)

NUM_LABELS = 3
PAD = FIRST_TOKEN - 1


def why_mask_is_needed(trial: RowTrial, auto_class: Any) -> str | None:
    """Why attention without a mask does not compute a classifier's padded rows; None if it does.

    Args:
        trial: gives the small model's config, weights and rows.
        auto_class: transformers' class for the task, e.g. `AutoModelForSequenceClassification`.
    """
    if trial.error is not None:
        return trial.error
    config = deepcopy(trial.small)
    config.num_labels, config.pad_token_id = NUM_LABELS, PAD
    try:
        with stock():
            alone = compute_alone(trial.build("eager", config, auto_class), trial.rows)
            padded = _compute_padded(trial.build(BY_SEQUENCES, config, auto_class), trial.rows)
    except Exception as error:  # classes and configs are transformers', or come with a model
        raise_shortage(error)
        return f"padded rows can't be computed without a mask ({name_error(error)})"
    of_logits, of_gradients = trial.tolerances
    for what, tolerance, found, expected in (
        ("logits", of_logits, padded.logits, alone.logits),
        ("gradients", of_gradients, padded.gradients, alone.gradients),
    ):
        difference = largest_difference(found, expected)
        if not difference <= tolerance:
            return f"tokens see the padding (without a mask, {what} change by {difference:.1g} of the largest)"
    return None


def _compute_padded(model: PreTrainedModel, rows: list[Tensor]) -> Result:
    """All rows in one batch, as training computes them."""
    input_ids = pad_sequence(rows, batch_first=True, padding_value=PAD).to(model.device)
    with embedded_by(model) as embedded:
        found = model(input_ids=input_ids, attention_mask=(input_ids != PAD).long()).logits
    outputs = [each if each.ndim == 1 else each[: len(row)] for each, row in zip(found, rows, strict=True)]
    total = sum((output * weights_of(index, output)).sum() for index, output in enumerate(outputs))
    gradient = torch.autograd.grad(total, embedded)[0]
    gradients = [each[: len(row)] for each, row in zip(gradient, rows, strict=True)]
    return Result([output.detach() for output in outputs], gradients)
