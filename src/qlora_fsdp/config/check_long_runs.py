"""Do the settings of checkpoints and of launches make sense? Part of `check_settings`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from qlora_fsdp.common.errors import Problem
from qlora_fsdp.config.schema import Config, OnBadStep
from qlora_fsdp.config.settings import all_settings, nearest_settings, problem_with


def check_checkpoint(config: Config) -> Iterator[Problem]:
    """What is wrong with when checkpoints are written and what they are used for."""
    for key in config.checkpoint.allow_changes:
        if key not in all_settings():
            nearest = nearest_settings(key)
            fix = f"Did you mean {' or '.join(nearest)}?" if nearest else "See docs/configuration.md for all settings."
            yield problem_with(config, "checkpoint.allow_changes", f"names {key}, which is no setting.", fix)

    checkpoint, training = config.checkpoint, config.training
    if checkpoint.keep_best > 0:
        every, evaluates = checkpoint.every_steps, training.eval_every_steps
        if every is None or evaluates is None or evaluates < 1 or every % evaluates:
            reason = "needs an evaluation at the step of every checkpoint."
            fix = "Set training.eval_every_steps and checkpoint.every_steps, this a multiple of that."
            yield problem_with(config, "checkpoint.keep_best", reason, fix)
    if (
        training.on_bad_step is OnBadStep.rollback
        and checkpoint.every_steps is None
        and checkpoint.every_minutes is None
    ):
        fix = "Set checkpoint.every_steps=100, or training.on_bad_step=skip."
        yield problem_with(config, "training.on_bad_step", "has no checkpoints to go back to.", fix)


def check_launch(config: Config) -> Iterator[Problem]:
    """What is wrong with how jobs are to be started."""
    if config.launch.config_file is not None and not Path(config.launch.config_file).expanduser().is_file():
        fix = "Set it to an accelerate config such as accelerate_configs/one_node.yaml, or null."
        yield problem_with(config, "launch.config_file", f"is no file, seen from {Path.cwd()}.", fix)
    time = config.slurm.time
    if time is not None and not re.fullmatch(r"(\d+-)?\d+(:\d\d){0,2}", time):
        yield problem_with(
            config, "slurm.time", "is no time limit.", "Set slurm.time=24:00:00, or 2-00:00:00 for days."
        )
