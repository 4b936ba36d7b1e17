"""Checks of the settings of the data. Part of `check_settings`."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from qlora_fsdp.common.errors import Problem
from qlora_fsdp.common.text import printable
from qlora_fsdp.config.data_paths import as_paths, is_missing, is_pattern, match, saved_splits
from qlora_fsdp.config.data_sets import DEFAULT_SPLIT, explain_split, find_mistakes, split_name
from qlora_fsdp.config.schema import CHAT_TEMPLATES, Config, DataConfig, DataFormat, TaskName
from qlora_fsdp.config.settings import all_settings, is_default, problem_with, several_data_sets, show, value_of

# What data.columns can rename: the keys that data/columns.py and data/labels.py look for.
_COLUMNS = (
    *("messages", "role", "content", "tools", "system", "prompt", "completion", "instruction", "input", "output"),
    *("text", "label", "labels", "tokens", "chosen", "rejected", "margin", "responses", "ranks", "scores"),
)
_SPLIT_FIX = "Write train, train[:5000] or train[10%:]."
# Settings of one data set of a mix that streams can't use, because one stream is made of all data sets.
_NOT_STREAMED = ("max_rows", "split", "name", "format", "chat_template", "columns", "system_prompt")
# What is done with all rows, before the first of them is trained on.
_OF_ALL_ROWS = ("near_duplicates", "decontaminate", "min_tokens", "max_tokens", "seed")


def check_data(config: Config) -> Iterator[Problem]:
    """Yields what is wrong with `data`, and with the evaluation that it is to feed."""
    for find_problems in (_data, _splits, _columns, _cleaning, _evaluation, _mix, _streaming):
        yield from find_problems(config)


def _data(config: Config) -> Iterator[Problem]:
    data = config.data
    is_random = data.format is DataFormat.random
    if data.path is None and not data.mix and not is_random:
        fix = "Set data.path to a file, a folder or a hub name, or data=random for a dry run."
        yield problem_with(config, "data.path", "names no data.", fix)
    elif data.is_default and config.task.name is not TaskName.causal_lm:
        lacks = "labels" if config.task.has_labels else "answers to compare"
        reason = f"is the default and has no {lacks}, which {show('task.name', config.task.name)} needs."
        yield problem_with(config, "data.path", reason, "Set data.path to a file, a folder or a hub name.")
    for key in ("data.path", "data.eval_path"):
        yield from _paths(config, key)
    if no_template := _find_no_template(data.chat_template):
        fix = "Set data.chat_template to one of these, or null for the tokenizer's own."
        yield problem_with(config, "data.chat_template", f"is {no_template}.", fix)


def _find_no_template(template: str | None) -> str | None:
    """Why there is no chat template of this name; None: there is one, or none is asked for."""
    if template is None or template in CHAT_TEMPLATES or _is_file(template):
        return None
    return f"neither a file nor one of {', '.join(CHAT_TEMPLATES)}"


def _paths(config: Config, key: str) -> Iterator[Problem]:
    value = value_of(config, key)
    texts = value if isinstance(value, list) else [value]
    if value is not None and not (texts and all(isinstance(text, str) and text for text in texts)):
        fix = f"Set {key} to a file, a folder, a pattern, a hub name, or a list such as [a.jsonl,b.jsonl]."
        yield problem_with(config, key, f"must be {all_settings()[key].expected}.", fix)
        return
    for path in filter(is_missing, as_paths(value)):
        named = "" if value == path else f"names {path}, which "
        here = f"seen from {Path.cwd()}"
        if is_pattern(path):
            fix = f"Set {key} to a pattern that does, to a folder, whose files are all read,"
            fix += " or to a list of files." + several_data_sets(key)
            yield problem_with(config, key, f"{named}matches no file, {here}.", fix)
        else:
            fix = f"Set {key} to a file or folder that does."
            yield problem_with(config, key, f"{named}does not exist, {here}.", fix)


def _splits(config: Config) -> Iterator[Problem]:
    for key in ("data.split", "data.eval_split"):
        value = value_of(config, key)
        if value is not None and (reason := explain_split(value)):
            yield problem_with(config, key, f"{reason}.", _SPLIT_FIX)
    yield from _absent_splits(config.data)


def _absent_splits(data: DataConfig) -> Iterator[Problem]:
    """Refuses a split that the files here do not have: all their rows would stand for it.

    A split of data.path is none of data.eval_path, for which nobody gave it. Those of hub data sets are not known yet.
    """
    asked = [("data.split", "data.split", data.split, path) for path in as_paths(data.path)]
    if data.eval_split is not None:
        asked += [("data.eval_split", "data.eval_split", data.eval_split, path) for path in as_paths(data.eval_path)]
    for path, value in data.mix.items():
        own = value.get("split") if isinstance(value, dict) else None
        key = f"data.mix.{path}.split" if isinstance(own, str) else "data.split"
        asked.append(("data.mix", key, own if isinstance(own, str) else data.split, path))
    find = cache(match)  # a pattern may take long, and data.eval_path is often data.path
    for setting, key, split, path in asked:
        name, found = split_name(split), [] if "://" in path else find(path)
        splits = saved_splits(found)
        if not (found or "://" in path) or name in (splits or [DEFAULT_SPLIT]) or explain_split(split):
            continue
        has = f"which has {printable(', '.join(splits))}" if splits else "which has no splits: all its rows are train"
        fix = "Set it to one of these." if splits else f"Leave {key} out."
        yield Problem(f"{key}={split}", f"is no split of {path}, {has}.", fix, setting=setting)


def _columns(config: Config) -> Iterator[Problem]:
    columns = config.data.columns
    unknown = list(_names(config, "data.columns", columns))
    yield from unknown
    if columns and not unknown and config.data.format is DataFormat.random:
        yield problem_with(config, "data.columns", "has no effect with data.format=random.", "Leave it out.")
    has_rows = config.data.path is not None or config.data.mix  # `generate` has prompts, which it is for in any case
    if config.data.system_prompt is not None and config.task.name is not TaskName.causal_lm and has_rows:
        reason = f"has no effect with {show('task.name', config.task.name)}: rows are no conversations."
        yield problem_with(config, "data.system_prompt", reason, "Leave it out.")


def _names(config: Config, key: str, columns: dict[str, str]) -> Iterator[Problem]:
    """The problem with a mapping of columns in the setting `key` that names what no form of rows has."""
    unknown = [name for name in columns if name not in _COLUMNS]
    if unknown:
        swapped = {theirs: ours for ours, theirs in columns.items()}
        reason = f"renames {', '.join(unknown)}, which no form of rows has. The names to set are {', '.join(_COLUMNS)}."
        fix = "Write {name here: name in the data}, such as {prompt: question, completion: answer}."
        if all(name in _COLUMNS for name in swapped):
            fix = f"Did you mean {show('data.columns', swapped)}?" if key == "data.columns" else "Swap the two names."
        yield problem_with(config, key, reason, fix)


def _cleaning(config: Config) -> Iterator[Problem]:
    data, max_length = config.data, config.training.max_length
    reason = ""
    if data.format is DataFormat.random:
        reason = "has no effect with data.format=random."
    elif data.streaming:
        reason = "needs all rows, and with data.streaming=true these are not there."
    for key in _OF_ALL_ROWS if reason else ():
        if not is_default(config, f"data.{key}"):
            yield problem_with(config, f"data.{key}", reason, "Leave it out.")
    if data.near_duplicates is not None and find_spec("datasketch") is None:
        reason = "needs the package datasketch, which is not installed."
        yield problem_with(config, "data.near_duplicates", reason, "Run pip install datasketch, or leave it out.")
    if data.decontaminate and data.eval_path is None and data.eval_fraction == 0:
        fix = "Set data.eval_path, or data.eval_fraction=0.05."
        yield problem_with(config, "data.decontaminate", "has no evaluation data to compare with.", fix)
    if data.max_tokens is not None and data.max_tokens >= max_length:
        reason = f"has no effect: rows are cut at training.max_length={max_length}."
        fix = "Set it lower, or data.bad_rows=skip, which leaves out rows that would be cut."
        yield problem_with(config, "data.max_tokens", reason, fix)
    longest = max_length if data.max_tokens is None else data.max_tokens
    if data.min_tokens is not None and data.min_tokens > longest:
        key = "training.max_length" if data.max_tokens is None else "data.max_tokens"
        yield problem_with(config, "data.min_tokens", f"leaves no row: {key}={longest} is below it.", "Set it lower.")


def _evaluation(config: Config) -> Iterator[Problem]:
    data = config.data
    if data.eval_path is None and data.eval_fraction == 0:
        fix = "Set data.eval_path, or data.eval_fraction=0.05."
        if config.training.eval_every_steps is not None:
            yield problem_with(config, "training.eval_every_steps", "has no data to evaluate on.", fix)
        if config.tracking.num_generations > 0:
            yield problem_with(config, "tracking.num_generations", "has no held-out rows to complete.", fix)
    if config.tracking.num_generations > 0 and config.task.name not in (TaskName.causal_lm, TaskName.preference):
        reason = f"needs a model that answers, and task.name is {config.task.name.value}."
        yield problem_with(config, "tracking.num_generations", reason, "Set it to 0.")


def _is_file(path: str) -> bool:
    try:
        return Path(path).expanduser().is_file()
    except OSError:  # too long for a name: somebody gave a template's text in place of its file
        return False


def mix_problems(config: Config) -> Iterator[Problem]:
    """Yields what is wrong with the values of `data.mix`, wherever its data sets are."""
    for path, value in config.data.mix.items():
        for mistake in find_mistakes(value):
            fix = "Write {path: weight} or {path: {weight: 2, max_rows: 5000}}, with weights above 0."
            yield problem_with(config, "data.mix", f"names {path}, which {mistake}.", fix)


def _mix(config: Config) -> Iterator[Problem]:
    data = config.data
    if not data.mix:
        if not is_default(config, "data.mix_until"):
            fix = "Set data.mix={a.jsonl: 3, b.jsonl: 1} too, or leave data.mix_until out."
            yield problem_with(config, "data.mix_until", "has no effect on one data set.", fix)
        return
    if data.path is not None:
        fix = "Set one of them: data.mix has the paths of all its data sets."
        yield problem_with(config, "data.path", f"contradicts {show('data.mix', data.mix)}.", fix)
    if data.format is DataFormat.random:
        yield problem_with(config, "data.mix", "has no effect with data.format=random.", "Set data.format=auto.")
    yield from mix_problems(config)
    for path, value in data.mix.items():
        own = value if isinstance(value, dict) else {}
        if isinstance(own.get("columns"), dict):
            yield from _names(config, "data.mix", own["columns"])
        template = own.get("chat_template")
        if isinstance(template, str) and (no_template := _find_no_template(template)):
            fix = "Write one of these, or leave it out for that of data.chat_template or the tokenizer."
            yield problem_with(config, "data.mix", f"names {path}, whose chat_template is {no_template}.", fix)
        if isinstance(own.get("split"), str) and (no_split := explain_split(own["split"])):
            yield problem_with(config, "data.mix", f"names {path}, whose split {own['split']} {no_split}.", _SPLIT_FIX)
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
    own = [key for value in data.mix.values() if isinstance(value, dict) for key in value if key in _NOT_STREAMED]
    if own:
        reason = f"has {', '.join(dict.fromkeys(own))} of data sets, which data.streaming=true can't use."
        yield problem_with(config, "data.mix", reason, "Leave these out, or set data.streaming=false.")
    if "[" in data.split:
        reason = "counts rows, and with data.streaming=true nobody knows how many there are."
        yield problem_with(config, "data.split", reason, "Set it to the name of a split.")
    if not is_default(config, "data.mix_until"):
        reason = "needs the lengths of all data sets, and with data.streaming=true these are not known."
        yield problem_with(config, "data.mix_until", reason, "Leave it out.")
    if data.format is DataFormat.random:
        yield problem_with(config, "data.streaming", "has no effect with data.format=random.", "Leave it out.")
    if config.task.name is not TaskName.causal_lm:
        what = "labels" if config.task.has_labels else "answers"
        reason = f"can't be used with {show('task.name', config.task.name)}: {what} are counted beforehand."
        yield problem_with(config, "data.streaming", reason, "Set data.streaming=false.")
