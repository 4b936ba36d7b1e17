"""Checks of the settings of the data. Part of `check_settings`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from qlora_fsdp.common.errors import Problem
from qlora_fsdp.common.text import printable
from qlora_fsdp.config import data_sets
from qlora_fsdp.config.schema import (
    CHAT_TEMPLATES,
    DataConfig,
    DataFormat,
    TaskConfig,
    TaskName,
    Thoughts,
    TrackingConfig,
    TrainingConfig,
)
from qlora_fsdp.config.settings import all_settings, is_default, problem_about, problem_with, several_data_sets, show

# What data.columns can rename: the keys that data/columns.py and data/labels.py look for.
_COLUMNS = (
    "messages",
    "role",
    "content",
    "tools",
    "system",
    "prompt",
    "completion",
    "instruction",
    "input",
    "output",
    "reasoning_content",
    "text",
    "text_pair",
    "label",
    "labels",
    "tokens",
    "chosen",
    "rejected",
    "margin",
    "responses",
    "ranks",
    "scores",
)
_SPLIT_FIX = "Write train, train[:5000] or train[10%:]."
_WANTS_EVALUATION = "Set data.eval_path, or data.eval_fraction=0.05."
_NOT_RANDOM = "has no effect with data.format=random."
# Settings of one data set of a mix that streams can't use, because one stream is made of all data sets.
_NOT_STREAMED = ("max_rows", "split", "name", "format", "chat_template", "columns", "system_prompt")
# What every chat template is given beside data.template_arguments, and what transformers' functions take themselves.
_OF_TEMPLATES = (
    "messages",
    "tools",
    "documents",
    "add_generation_prompt",
    "continue_final_message",
    "chat_template",
    "conversation",
    "conversations",
    "tokenize",
    "padding",
    "truncation",
    "max_length",
    "return_tensors",
    "return_dict",
    "return_assistant_tokens_mask",
    "tokenizer_kwargs",
)
# What is done with all rows, before the first of them is trained on.
_OF_ALL_ROWS = ("data.near_duplicates", "data.decontaminate", "data.min_tokens", "data.max_tokens", "data.seed")


def check_source(data: DataConfig, task: TaskConfig) -> Iterator[Problem]:
    """Yields why there are no rows, or none that the task can use."""
    is_random = data.format is DataFormat.random
    if data.path is None and not data.mix and not is_random:
        fix = "Set data.path to a file, a folder or a hub name, or data=random for a dry run."
        yield problem_with(data, "data.path", "names no data.", fix)
    elif data.is_default and task.name is not TaskName.causal_lm:
        lacks = "labels" if task.has_labels else "answers to compare"
        reason = f"is the default and has no {lacks}, which {show('task.name', task.name)} needs."
        yield problem_with(data, "data.path", reason, "Set data.path to a file, a folder or a hub name.")
    yield from _check_paths("data.path", data.path)
    yield from _check_paths("data.eval_path", data.eval_path)
    no_template = _explain_template(data.chat_template)
    if no_template is not None:
        fix = "Set data.chat_template to one of these, or null for the tokenizer's own."
        yield problem_with(data, "data.chat_template", f"is {no_template}.", fix)
    yield from _check_template_arguments(data, task)
    if data.thoughts is Thoughts.all and data.loss_on.is_everything:
        reason = f"is about answers, and {show('data.loss_on', data.loss_on)} trains on every token."
        yield problem_with(data, "data.thoughts", reason, "Leave one of them out.")


def _check_template_arguments(data: DataConfig, task: TaskConfig) -> Iterator[Problem]:
    """Yields names that are none, or that a template is given by itself, and arguments where there is no template."""
    for name in data.template_arguments:
        if name.isidentifier() and name not in _OF_TEMPLATES:
            continue
        reason = "which every template is given by itself" if name in _OF_TEMPLATES else "which is no name"
        fix = "Write {name that the template looks at: value}, such as {enable_thinking: false}."
        yield problem_with(data, "data.template_arguments", f"has {name}, {reason}.", fix)
    if data.template_arguments and task.has_labels:
        reason = f"has no effect with {show('task.name', task.name)}: rows are no conversations."
        yield problem_with(data, "data.template_arguments", reason, "Leave it out.")


def _explain_template(template: str | None) -> str | None:
    """Why there is no chat template of this name; None: there is one, or none is asked for."""
    if template is None or template in CHAT_TEMPLATES or _is_file(template):
        return None
    return f"neither a file nor one of {', '.join(CHAT_TEMPLATES)}"


def _is_file(path: str) -> bool:
    try:
        return Path(path).expanduser().is_file()
    except OSError:  # too long for a name: somebody gave a template's text in place of its file
        return False


def _check_paths(key: str, value: Any) -> Iterator[Problem]:
    """Yields what is wrong with one path, or with a list of paths; None is no mistake."""
    if value is None:
        return
    texts = value if isinstance(value, list) else [value]
    are_paths = len(texts) > 0 and all(isinstance(text, str) and text for text in texts)
    if not are_paths:
        fix = f"Set {key} to a file, a folder, a pattern, a hub name, or a list such as [a.jsonl,b.jsonl]."
        yield problem_about(key, value, f"must be {all_settings()[key].expected}.", fix)
        return
    kinds = ", ".join(data_sets.SUFFIXES)
    for path in data_sets.as_paths(value):
        named = "" if value == path else f"names {path}, which "
        if not data_sets.is_missing(path):
            local = Path(path).expanduser()
            if local.is_file() and not path.endswith(data_sets.SUFFIXES):
                yield problem_about(key, value, f"{named}is of no known kind.", f"Use one of {kinds}.")
            elif local.is_dir() and data_sets.is_without_rows(local):
                reason = f"{named}is a folder with no file of {kinds}."
                yield problem_about(key, value, reason, f"Set {key} to a file or folder that has rows.")
            continue
        if data_sets.is_pattern(path):
            reason = f"{named}matches no file, seen from {Path.cwd()}."
            fix = f"Set {key} to a pattern that does, to a folder, whose files are all read, or to a list of files."
            yield problem_about(key, value, reason, fix + several_data_sets(key))
        else:
            reason = f"{named}does not exist, seen from {Path.cwd()}."
            yield problem_about(key, value, reason, f"Set {key} to a file or folder that does.")


def check_splits(data: DataConfig) -> Iterator[Problem]:
    """Yields splits that can't be read, and those that the files here do not have."""
    splits = {"data.split": data.split, "data.eval_split": data.eval_split}
    for key, split in splits.items():
        reason = None if split is None else data_sets.explain_split(split)
        if reason is not None:
            yield problem_about(key, split, f"{reason}.", _SPLIT_FIX)
    yield from _check_absent_splits(data)


def _check_absent_splits(data: DataConfig) -> Iterator[Problem]:
    """Refuses a split that the files here do not have: all their rows would stand for it.

    A split of data.path is none of data.eval_path, for which nobody gave it. Those of hub data sets are not known yet.
    """
    find = cache(data_sets.match)  # a pattern may take long, and data.eval_path is often data.path
    for setting, key, split, path in _find_splits(data):
        if "://" in path or data_sets.explain_split(split) is not None:
            continue
        found = find(path)
        splits = data_sets.saved_splits(found)
        if not found or data_sets.split_name(split) in (splits or [data_sets.DEFAULT_SPLIT]):
            continue
        has = "which has no splits: all its rows are train"
        fix = f"Leave {key} out."
        if splits:
            has = f"which has {printable(', '.join(splits))}"
            fix = "Set it to one of these."
        yield Problem(f"{key}={split}", f"is no split of {path}, {has}.", fix, setting=setting)


def _find_splits(data: DataConfig) -> Iterator[tuple[str, str, str, str]]:
    """The setting, what a user calls it, the split that it asks for, and the path of which it asks that."""
    for path in data_sets.as_paths(data.path):
        yield "data.split", "data.split", data.split, path
    if data.eval_split is not None:
        for path in data_sets.as_paths(data.eval_path):
            yield "data.eval_split", "data.eval_split", data.eval_split, path
    for path, value in data.mix.items():
        own = value.get("split") if isinstance(value, dict) else None
        if isinstance(own, str):
            yield "data.mix", f"data.mix.{path}.split", own, path
        else:
            yield "data.mix", "data.split", data.split, path


def check_columns(data: DataConfig, task: TaskConfig) -> Iterator[Problem]:
    """Yields names of columns that no row has, and what is said to rows that are no conversations."""
    unknown = list(_check_names("data.columns", data.columns, data.columns))
    yield from unknown
    if data.columns and not unknown and data.format is DataFormat.random:
        yield problem_with(data, "data.columns", _NOT_RANDOM, "Leave it out.")
    has_rows = data.path is not None or data.mix  # `generate` has prompts, which it is for in any case
    has_chats = task.name is TaskName.causal_lm or task.writes_answers
    if data.system_prompt is not None and not has_chats and has_rows:
        reason = f"has no effect with {show('task.name', task.name)}: rows are no conversations."
        yield problem_with(data, "data.system_prompt", reason, "Leave it out.")


def _check_names(key: str, value: Any, columns: Mapping[str, str]) -> Iterator[Problem]:
    """Yields the problem with a mapping of columns in the setting `key` that names what no form of rows has."""
    unknown = [name for name in columns if name not in _COLUMNS]
    if not unknown:
        return
    reason = f"renames {', '.join(unknown)}, which no form of rows has. The names to set are {', '.join(_COLUMNS)}."
    fix = "Write {name here: name in the data}, such as {prompt: question, completion: answer}."
    swapped = {theirs: ours for ours, theirs in columns.items()}
    is_swapped = all(name in _COLUMNS for name in swapped)
    if is_swapped and key == "data.columns":
        fix = f"Did you mean {show('data.columns', swapped)}?"
    elif is_swapped:
        fix = "Swap the two names."
    yield problem_about(key, value, reason, fix)


def check_cleaning(data: DataConfig, max_length: int) -> Iterator[Problem]:
    """Yields why rows can't be left out, or why none would be left.

    Args:
        data: the section `data`.
        max_length: training.max_length, at which rows are cut.
    """
    reason = ""
    if data.format is DataFormat.random:
        reason = _NOT_RANDOM
    elif data.streaming:
        reason = "needs all rows, and with data.streaming=true these are not there."
    if reason:
        for key in _OF_ALL_ROWS:
            if not is_default(data, key):
                yield problem_with(data, key, reason, "Leave it out.")
    if data.near_duplicates is not None and find_spec("datasketch") is None:
        reason = "needs the package datasketch, which is not installed."
        yield problem_with(data, "data.near_duplicates", reason, "Run pip install datasketch, or leave it out.")
    if data.decontaminate and not data.has_evaluation:
        yield problem_with(data, "data.decontaminate", "has no evaluation data to compare with.", _WANTS_EVALUATION)
    if data.max_tokens is not None and data.max_tokens >= max_length:
        reason = f"has no effect: rows are cut at training.max_length={max_length}."
        fix = "Set it lower, or data.bad_rows=skip, which leaves out rows that would be cut."
        yield problem_with(data, "data.max_tokens", reason, fix)
    longest_key = "training.max_length"
    longest = max_length
    if data.max_tokens is not None:
        longest_key = "data.max_tokens"
        longest = data.max_tokens
    if data.min_tokens is not None and data.min_tokens > longest:
        reason = f"leaves no row: {longest_key}={longest} is below it."
        yield problem_with(data, "data.min_tokens", reason, "Set it lower.")


def check_evaluation(
    data: DataConfig, training: TrainingConfig, tracking: TrackingConfig, task: TaskConfig
) -> Iterator[Problem]:
    """Yields why there is nothing to evaluate on, or nothing to complete."""
    generates = tracking.num_generations > 0
    if not data.has_evaluation:
        if training.eval_every_steps is not None:
            reason = "has no data to evaluate on."
            yield problem_with(training, "training.eval_every_steps", reason, _WANTS_EVALUATION)
        if generates:
            reason = "has no held-out rows to complete."
            yield problem_with(tracking, "tracking.num_generations", reason, _WANTS_EVALUATION)
    if generates and not task.is_causal:
        reason = f"needs a model that answers, and task.name is {task.name.value}."
        yield problem_with(tracking, "tracking.num_generations", reason, "Set it to 0.")


def check_mix_values(data: DataConfig) -> Iterator[Problem]:
    """Yields what is wrong with the values of `data.mix`, wherever its data sets are."""
    fix = "Write {path: weight} or {path: {weight: 2, max_rows: 5000}}, with weights above 0."
    for path, value in data.mix.items():
        for mistake in data_sets.find_mistakes(value):
            yield problem_with(data, "data.mix", f"names {path}, which {mistake}.", fix)


def check_mix(data: DataConfig) -> Iterator[Problem]:
    """Yields what is wrong with a mix, or with settings that need one."""
    if not data.mix:
        if not is_default(data, "data.mix_until"):
            fix = "Set data.mix={a.jsonl: 3, b.jsonl: 1} too, or leave data.mix_until out."
            yield problem_with(data, "data.mix_until", "has no effect on one data set.", fix)
        return
    if data.path is not None:
        fix = "Set one of them: data.mix has the paths of all its data sets."
        yield problem_with(data, "data.path", f"contradicts {show('data.mix', data.mix)}.", fix)
    if data.format is DataFormat.random:
        yield problem_with(data, "data.mix", _NOT_RANDOM, "Set data.format=auto.")
    yield from check_mix_values(data)
    for path, value in data.mix.items():
        own = value if isinstance(value, dict) else {}
        yield from _check_data_set(data, path, own)


def _check_data_set(data: DataConfig, path: str, own: Mapping[str, Any]) -> Iterator[Problem]:
    """Yields what is wrong with a data set of a mix, and with its own settings where these are of the right type."""
    columns = own.get("columns")
    if isinstance(columns, dict):
        yield from _check_names("data.mix", data.mix, columns)
    template = own.get("chat_template")
    no_template = _explain_template(template) if isinstance(template, str) else None
    if no_template is not None:
        reason = f"names {path}, whose chat_template is {no_template}."
        fix = "Write one of these, or leave it out for that of data.chat_template or the tokenizer."
        yield problem_with(data, "data.mix", reason, fix)
    split = own.get("split")
    no_split = data_sets.explain_split(split) if isinstance(split, str) else None
    if no_split is not None:
        yield problem_with(data, "data.mix", f"names {path}, whose split {split} {no_split}.", _SPLIT_FIX)
    if data_sets.is_missing(path):
        reason = f"names {path}, which does not exist, seen from {Path.cwd()}."
        yield problem_with(data, "data.mix", reason, "Set data.mix={path: weight, ...} with files or folders that do.")


def check_streaming(data: DataConfig, task: TaskConfig, max_steps: int | None) -> Iterator[Problem]:
    """Yields what needs more than the rows that a stream has at a time."""
    if not data.streaming:
        return
    if max_steps is None:
        reason = "needs an end: how many rows there are is not known beforehand, so training.num_epochs tells none."
        yield problem_with(data, "data.streaming", reason, "Set training.max_steps=1000.")
    if data.eval_fraction > 0:
        reason = "can't be held out of data that is streamed."
        yield problem_with(data, "data.eval_fraction", reason, "Set data.eval_path to held-out data.")
    if data.max_rows is not None:
        reason = "is drawn from all rows, and with data.streaming=true these are not there."
        yield problem_with(data, "data.max_rows", reason, "Leave it out: training.max_steps tells the end.")
    own = [key for value in data.mix.values() if isinstance(value, dict) for key in value]
    not_streamed = [key for key in dict.fromkeys(own) if key in _NOT_STREAMED]
    if not_streamed:
        reason = f"has {', '.join(not_streamed)} of data sets, which data.streaming=true can't use."
        yield problem_with(data, "data.mix", reason, "Leave these out, or set data.streaming=false.")
    if "[" in data.split:
        reason = "counts rows, and with data.streaming=true nobody knows how many there are."
        yield problem_with(data, "data.split", reason, "Set it to the name of a split.")
    if not is_default(data, "data.mix_until"):
        reason = "needs the lengths of all data sets, and with data.streaming=true these are not known."
        yield problem_with(data, "data.mix_until", reason, "Leave it out.")
    if data.format is DataFormat.random:
        yield problem_with(data, "data.streaming", _NOT_RANDOM, "Leave it out.")
    if task.name is not TaskName.causal_lm:
        what = "labels" if task.has_labels else "answers"
        reason = f"can't be used with {show('task.name', task.name)}: {what} are counted beforehand."
        yield problem_with(data, "data.streaming", reason, "Set data.streaming=false.")
