"""Do the settings of a mix, of streaming and of new tokens make sense? Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

from qlora_fsdp.common.errors import Problem
from qlora_fsdp.config.schema import Config, DataFormat, TaskName
from qlora_fsdp.config.settings import problem_with, show

_SUFFIXES = (".jsonl", ".json", ".csv", ".parquet", ".txt", ".md", ".gz", ".bz2", ".xz", ".zst")  # data/row_files


def check_data(config: Config) -> Iterator[Problem]:
    """Yields what is wrong with `data.mix`, `data.streaming` and `tokenizer`."""
    yield from _mix(config)
    yield from _streaming(config)
    yield from _tokens(config)


def is_missing(path: str) -> bool:
    """Whether a path to data is not there: what is written as a path, or as a file, is no name of a hub data set."""
    is_local = path.startswith(("/", "./", "../", "~")) or path.endswith(_SUFFIXES)
    return is_local and not Path(path).expanduser().exists()


def _mix(config: Config) -> Iterator[Problem]:
    data = config.data
    if not data.mix:
        return
    if data.path is not None:
        fix = "Set one of them: data.mix has the paths of all its data sets."
        yield problem_with(config, "data.path", f"contradicts {show('data.mix', data.mix)}.", fix)
    if data.format is DataFormat.random:
        yield problem_with(config, "data.mix", "has no effect with data.format=random.", "Set data.format=auto.")
    bad = [path for path, weight in data.mix.items() if not 0 < weight < math.inf]
    if bad:
        fix = "Give each path a weight above 0, or leave it out."
        yield problem_with(config, "data.mix", f"has a weight that is not positive: {', '.join(bad)}.", fix)
    for path in data.mix:
        if is_missing(path):
            fix = "Set data.mix={path: weight, ...} with files or folders that do."
            yield problem_with(config, "data.mix", f"names {path}, which does not exist, seen from {Path.cwd()}.", fix)


def _streaming(config: Config) -> Iterator[Problem]:
    data = config.data
    if not data.streaming:
        return
    if config.training.max_steps is None:
        reason = "needs an end: how many rows there are is not known beforehand, so training.num_epochs tells none."
        yield problem_with(config, "data.streaming", reason, "Set training.max_steps=1000.")
    if data.eval_fraction > 0:
        reason = "can't be held out of data that is streamed."
        yield problem_with(config, "data.eval_fraction", reason, "Set data.eval_path to held-out data.")
    if data.max_rows is not None:
        reason = "is drawn from all rows, and with data.streaming=true these are not there."
        yield problem_with(config, "data.max_rows", reason, "Leave it out: training.max_steps tells the end.")
    if data.format is DataFormat.random:
        yield problem_with(config, "data.streaming", "has no effect with data.format=random.", "Leave it out.")
    if config.task.name is not TaskName.causal_lm:
        reason = f"can't be used with {show('task.name', config.task.name)}: labels are counted beforehand."
        yield problem_with(config, "data.streaming", reason, "Set data.streaming=false.")


def _tokens(config: Config) -> Iterator[Problem]:
    wanted = [*config.tokenizer.add_tokens, *config.tokenizer.add_special_tokens]
    for key in ("add_tokens", "add_special_tokens"):
        if any(not token.strip() for token in getattr(config.tokenizer, key)):
            fix = 'Set tokens of at least one letter, e.g. ["<call>","</call>"].'
            yield problem_with(config, f"tokenizer.{key}", "has a token that is empty.", fix)
    twice = sorted({token for token in wanted if wanted.count(token) > 1})
    if twice:
        reason = f"names a token twice, or one that tokenizer.add_special_tokens names too: {', '.join(twice)}."
        yield problem_with(config, "tokenizer.add_tokens", reason, "Name each once.")
