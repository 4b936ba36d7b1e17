"""Checks of the settings of preferences. Part of `check_settings`."""

from __future__ import annotations

from collections.abc import Iterator

from qlora_fsdp.common.errors import Problem
from qlora_fsdp.config.schema import Config, DataFormat, Kernel, LossOn, TaskName
from qlora_fsdp.config.settings import problem_with, show, value_of


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
        keys = "prompt, chosen and rejected" if config.has_pairs else "prompt, completion and label"
        reason = f"has no effect with {name}: rows have {keys}."
        yield problem_with(config, "data.format", reason, "Set data.format=auto.")
    if config.data.loss_on is not LossOn.completion:
        reason = f"has no effect with {name}, which compares answers to the same prompt."
        yield problem_with(config, "data.loss_on", reason, "Leave it out.")
    if config.task.name is TaskName.reward and config.training.packing is True:
        reason = f"lets rows share a sequence, and the head of {name} sees its last token alone."
        yield problem_with(config, "training.packing", reason, "Set task=reward, or training=padded.")
