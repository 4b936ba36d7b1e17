"""Checks of the settings of the task: labels, and answers that are compared. Part of `check_settings`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from qlora_fsdp.common.errors import Problem
from qlora_fsdp.common.text import is_number
from qlora_fsdp.config.schema import Config, DataFormat, Kernel, LossOn, ProblemType, TaskName
from qlora_fsdp.config.settings import problem_with, show, value_of
from qlora_fsdp.config.specs import TaskSpec


def check_task(config: Config) -> Iterator[Problem]:
    """Yields what is wrong with `task`, and with the settings of data that do not fit it."""
    task = config.task
    if not task.has_labels:
        return
    if config.training.packing is True:
        reason = f"can't be used with {show('task.name', task.name)}: a labelled row is a sequence of its own."
        yield problem_with(config, "training.packing", reason, f"Set task={task.name.value}, or training=padded.")
    if config.data.format is not DataFormat.auto:
        of_words = task.name is TaskName.token_classification
        keys = "tokens and labels" if of_words else "text and label"
        reason = f"has no effect with {show('task.name', task.name)}: rows have {keys}."
        yield problem_with(config, "data.format", reason, "Set data.format=auto.")
    is_regression = task.problem_type is ProblemType.regression
    labels = task.labels or []
    if task.name is TaskName.token_classification and task.problem_type is not ProblemType.single_label_classification:
        reason = f"can't be used with {show('task.name', task.name)}: a word has one label."
        yield problem_with(config, "task.problem_type", reason, "Leave it out, or set task=sequence_classification.")
    if not is_regression and len(labels) < (2 if task.problem_type is ProblemType.single_label_classification else 1):
        fix = "Set task.labels=[first,second,...], the values of label in the rows; in a YAML file if they are many."
        yield problem_with(config, "task.labels", "names too few labels.", fix)
    if len(set(labels)) < len(labels):
        yield problem_with(config, "task.labels", "names a label twice.", "Name each once.")
    weights = task.class_weights
    if weights is None:
        return
    if is_regression:
        fix = "Leave it out, or set another task.problem_type."
        yield problem_with(config, "task.class_weights", "has no effect on a regression.", fix)
    elif weights != "balanced" and not _are_weights(weights, len(labels)):
        reason = f"is neither `balanced` nor a positive number for each of the {len(labels)} labels."
        yield problem_with(config, "task.class_weights", reason, "Set task.class_weights=balanced, or such a list.")


def _are_weights(value: Any, num_labels: int) -> bool:
    if not isinstance(value, list) or len(value) != num_labels:
        return False
    return all(is_number(w) and 0 < w < math.inf for w in value)


def check_preference(config: Config) -> Iterator[Problem]:
    """Yields what does not go with answers that are compared."""
    if config.task.compares_answers:
        yield from _data(config)
    if config.task.name is TaskName.preference:
        yield from _others(config)


def _others(config: Config) -> Iterator[Problem]:
    """Find settings of other sections that don't go with task=preference."""
    if config.kernels.cross_entropy is Kernel.liger:
        reason = "can't be used with task.name=preference: Liger's kernel sums over all tokens, not over answers."
        yield problem_with(config, "kernels.cross_entropy", reason, "Set kernels.cross_entropy=auto.")
    has_own_reference = config.preference.precompute or config.lora.start is not None
    if has_own_reference or not config.preference.loss.needs_reference:
        return
    for key in ("tokenizer.add_tokens", "tokenizer.add_special_tokens", "lora.modules_to_save"):
        if value_of(config, key):
            reason = "is trained beside the adapter, and with preference.precompute=false the reference would have it."
            yield problem_with(config, key, reason, "Set preference.precompute=true, or leave it out.")


def _data(config: Config) -> Iterator[Problem]:
    """Find settings of data that don't go with comparing answers."""
    name = show("task.name", config.task.name)
    if config.data.format not in (DataFormat.auto, DataFormat.random):
        keys = "prompt, chosen and rejected" if TaskSpec.of(config).has_pairs else "prompt, completion and label"
        reason = f"has no effect with {name}: rows have {keys}."
        yield problem_with(config, "data.format", reason, "Set data.format=auto.")
    if config.data.loss_on is not LossOn.completion:
        reason = f"has no effect with {name}, which compares answers to the same prompt."
        yield problem_with(config, "data.loss_on", reason, "Leave it out.")
    if config.task.name is TaskName.reward and config.training.packing is True:
        reason = f"lets rows share a sequence, and the head of {name} sees its last token alone."
        yield problem_with(config, "training.packing", reason, "Set task=reward, or training=padded.")
