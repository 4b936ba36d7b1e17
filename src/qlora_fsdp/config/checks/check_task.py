"""Checks of the settings of the task: labels, and answers that are compared. Part of `check_settings`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from qlora_fsdp.common.errors import Problem
from qlora_fsdp.common.text import is_number
from qlora_fsdp.config.schema import (
    DataConfig,
    DataFormat,
    Kernel,
    KernelsConfig,
    LoraConfig,
    LossOn,
    LossType,
    ProblemType,
    TaskConfig,
    TaskName,
    TokenizerConfig,
    TrainingConfig,
)
from qlora_fsdp.config.settings import problem_about, problem_with, show
from qlora_fsdp.config.specs import TaskSpec


def check_labels(task: TaskConfig) -> Iterator[Problem]:
    """Yields what is wrong with the labels of a classifier."""
    if not task.has_labels:
        return
    labels = task.labels or []
    is_regression = task.problem_type is ProblemType.regression
    has_one_label = task.problem_type is ProblemType.single_label_classification
    if task.name is TaskName.token_classification and not has_one_label:
        reason = f"can't be used with {show('task.name', task.name)}: a word has one label."
        yield problem_with(task, "task.problem_type", reason, "Leave it out, or set task=sequence_classification.")
    fewest = 2 if has_one_label else 1
    if not is_regression and len(labels) < fewest:
        fix = "Set task.labels=[first,second,...], the values of label in the rows; in a YAML file if they are many."
        yield problem_with(task, "task.labels", "names too few labels.", fix)
    if len(set(labels)) < len(labels):
        yield problem_with(task, "task.labels", "names a label twice.", "Name each once.")
    weights = task.class_weights
    if weights is None:
        return
    if is_regression:
        fix = "Leave it out, or set another task.problem_type."
        yield problem_with(task, "task.class_weights", "has no effect on a regression.", fix)
    elif weights != "balanced" and not _are_weights(weights, len(labels)):
        reason = f"is neither `balanced` nor a positive number for each of the {len(labels)} labels."
        yield problem_with(task, "task.class_weights", reason, "Set task.class_weights=balanced, or such a list.")


def _are_weights(value: Any, num_labels: int) -> bool:
    if not isinstance(value, list) or len(value) != num_labels:
        return False
    return all(is_number(weight) and 0 < weight < math.inf for weight in value)


def check_labelled_rows(task: TaskConfig, data: DataConfig, training: TrainingConfig) -> Iterator[Problem]:
    """Yields settings of rows that do not go with rows that have labels."""
    if not task.has_labels:
        return
    name = show("task.name", task.name)
    if training.packing is True:
        reason = f"can't be used with {name}: a labelled row is a sequence of its own."
        yield problem_with(training, "training.packing", reason, f"Set task={task.name.value}, or training=padded.")
    if data.format is not DataFormat.auto:
        of_words = task.name is TaskName.token_classification
        keys = "tokens and labels" if of_words else "text and label"
        reason = f"has no effect with {name}: rows have {keys}."
        yield problem_with(data, "data.format", reason, "Set data.format=auto.")


def check_compared_rows(task: TaskSpec, data: DataConfig, training: TrainingConfig) -> Iterator[Problem]:
    """Yields settings of rows that do not go with comparing answers."""
    if not task.compares_answers:
        return
    name = show("task.name", task.name)
    if data.format not in (DataFormat.auto, DataFormat.random):
        keys = "prompt, chosen and rejected" if task.has_pairs else "prompt, completion and label"
        reason = f"has no effect with {name}: rows have {keys}."
        yield problem_with(data, "data.format", reason, "Set data.format=auto.")
    if data.loss_on is not LossOn.completion:
        reason = f"has no effect with {name}, which compares answers to the same prompt."
        yield problem_with(data, "data.loss_on", reason, "Leave it out.")
    if task.name is TaskName.reward and training.packing is True:
        reason = f"lets rows share a sequence, and the head of {name} sees its last token alone."
        yield problem_with(training, "training.packing", reason, "Set task=reward, or training=padded.")


def check_loss(task: TaskConfig, kernels: KernelsConfig) -> Iterator[Problem]:
    """Yields what the kernel of the loss can't compute of the loss that is asked for."""
    is_plain = task.loss_type is LossType.nll and task.label_smoothing_factor == 0.0
    if kernels.cross_entropy is Kernel.liger and not is_plain:
        is_smoothed = task.loss_type is LossType.nll
        asked = "task.label_smoothing_factor" if is_smoothed else "task.loss_type=dft"
        reason = f"can't be used with {asked}: Liger's kernel sums the plain loss over all tokens."
        yield problem_with(kernels, "kernels.cross_entropy", reason, "Set kernels.cross_entropy=auto.")


def check_preference(
    task: TaskSpec, kernels: KernelsConfig, lora: LoraConfig, tokenizer: TokenizerConfig
) -> Iterator[Problem]:
    """Yields what does not go with task=preference, and what the reference would have that has to be without it."""
    if task.name is not TaskName.preference:
        return
    if kernels.cross_entropy is Kernel.liger:
        reason = "can't be used with task.name=preference: Liger's kernel sums over all tokens, not over answers."
        yield problem_with(kernels, "kernels.cross_entropy", reason, "Set kernels.cross_entropy=auto.")
    if not task.computes_reference or lora.start is not None:
        return
    trained = {
        "tokenizer.add_tokens": tokenizer.add_tokens,
        "tokenizer.add_special_tokens": tokenizer.add_special_tokens,
        "lora.modules_to_save": lora.modules_to_save,
    }
    for key, value in trained.items():
        if value:
            reason = "is trained beside the adapter, and with preference.precompute=false the reference would have it."
            yield problem_about(key, value, reason, "Set preference.precompute=true, or leave it out.")
