"""`qlora-fsdp generate`: complete a prompt, or a file of prompts in batches."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if __name__ == "__main__":
    from qlora_fsdp.common.startup import begin

    begin()

from qlora_fsdp.common.errors import DataError, Problem, refuse
from qlora_fsdp.common.startup import end_process, quick_imports
from qlora_fsdp.common.text import is_unicode, plural, shorten
from qlora_fsdp.config.reading.commands import BaseAndAdapterSettings, read_trained_on
from qlora_fsdp.config.schema import Config, TaskConfig
from qlora_fsdp.config.settings import show
from qlora_fsdp.runtime.run_command import check_out, log, print_result, run_command, write_out

if TYPE_CHECKING:
    from qlora_fsdp.model.assemble import AssembledModel
    from qlora_fsdp.runtime.processes import Processes

USAGE = """
Completions of prompts on the quantized base, with an adapter or without.

usage: qlora-fsdp generate [adapter=DIR] prompt=TEXT [launch.num_processes=N] [setting=value ...]

  adapter=DIR         the adapter's folder, which also knows its base model. Without one: the base model, model.path=...
  prompt=TEXT         one prompt; the completion is printed
  prompts=FILE.jsonl  rows {"prompt": ...}, or {"messages": [...]}, to which the chat template is applied
  raw=false           a prompt is written as in training: as a user's turn for an adapter that was trained on chats, or
                      whose tokenizer has a chat template. true: the model goes on from the text as it is
  out=FILE.jsonl      the rows with their "completion" (default: printed, a row a line)
  max_new_tokens=128  at most; a completion ends earlier at the end token
  data.system_prompt=TEXT  what conversations begin with (default: what the adapter was trained with; null: nothing)
  data.template_arguments={NAME: VALUE}  what the chat template is given, such as {enable_thinking: false} (default: as
                      the adapter was trained with)
  temperature=0       0: the likeliest token each time. Above: sampled, at this temperature
  top_p=1             sample among the likeliest tokens that make up this much probability
  batch_size=N        prompts a process at a time, at most (default: 64, or as many as its GPU has memory for)
  seed=0              of sampling
  other_base=true     use the adapter on a base with other weights than those that it was trained on (default: false)

Several processes share the prompts if each can hold the whole model, and else the model's weights.

examples:
  qlora-fsdp generate adapter=outputs/run/adapter prompt="What does `textwrap.dedent(text)` do?"
  qlora-fsdp generate adapter=outputs/run/adapter prompts=asked.jsonl out=answered.jsonl launch.num_processes=4
"""

IN_UTF8 = "Type it in UTF-8."
A_ROW = 'Make each line {"prompt": "..."} or {"messages": [...]}.'
MAX_SEED = 2**31  # that of training.seed. torch takes 64 bits, in which the rank has to be too


@dataclass
class GenerateSettings(BaseAndAdapterSettings):
    """Settings of `generate`, as its --help says."""

    prompt: str | None = None
    prompts: str | None = None
    raw: bool = False
    out: str | None = None
    max_new_tokens: int = 128
    temperature: float = 0.0
    top_p: float = 1.0
    batch_size: int | None = None
    seed: int = 0


def tell_conversations(system: str | None, arguments: Mapping[str, Any]) -> None:
    """Logs how conversations are written: that may come with an adapter, out of a file that nobody has looked at.

    Args:
        system: what they begin with.
        arguments: what the chat template is given beside them.
    """
    if system:
        log.info(f"Conversations begin with a system prompt: {shorten(system)}")
    if arguments:
        log.info(f"The chat template is given {shorten(json.dumps(arguments, ensure_ascii=False))}")


def generate_completions(settings: GenerateSettings, config: Config, processes: Processes) -> None:
    """Load the model, complete every prompt, and print or write the rows in their order."""
    sources = [] if settings.prompts is None else [settings.prompts]
    problems = check_out(settings.out, sources) if processes.is_main else []
    is_empty = settings.prompt is not None and not settings.prompt.strip()
    if is_empty and not settings.raw:
        problems.append(Problem("prompt", "is empty.", 'Set prompt="...", or raw=true to begin from nothing.'))
    check_generation(settings, config.task, problems)
    rows = _read_rows(settings)
    with quick_imports():
        from qlora_fsdp.inference.trained import load_trained, num_positions

    trained = load_trained(config, settings, processes, generates=True)
    prompts = tokenize_prompts(rows, trained, settings, config.data.system_prompt)
    check_lengths(prompts, settings, num_positions(trained))
    parts = processes.gather(complete(prompts, trained, settings, processes), dict[int, str], patiently=True)
    everyone: dict[int, str] = {number: text for part in parts for number, text in part.items()}
    if not processes.is_main:
        return
    if settings.prompt is not None and settings.out is None:
        print_result(everyone[0])
        return
    lines = [json.dumps({**row, "completion": everyone[i]}, ensure_ascii=False) for i, row in enumerate(rows)]
    if settings.out is None:
        print_result("\n".join(lines))
        return
    write_out(settings.out, "\n".join(lines) + "\n")
    log.info(f"{plural(len(lines), 'completion')} in {settings.out}")


def complete(
    prompts: list[list[int]], trained: AssembledModel, settings: GenerateSettings, processes: Processes
) -> dict[int, str]:
    """The completions of this rank's share of the prompts, by their numbers. Collective.

    Args:
        prompts: token ids of each prompt.
        trained: what `load_trained` returned for a model that generates.
        settings: how to generate.
        processes: all ranks take part.
    """
    import torch

    from qlora_fsdp.data.tokenizer import ContainedTokenizer
    from qlora_fsdp.decoding.completer import Request
    from qlora_fsdp.decoding.stop_strings import StopStrings, stop_strings
    from qlora_fsdp.inference.completions import (
        complete_by_transformers,
        make_completer,
        sampling_config,
        stock_batch_size,
    )
    from qlora_fsdp.sharding.by_rows import texts_of_rank

    generation = sampling_config(trained, settings.temperature, settings.top_p, settings.max_new_tokens)
    completer = make_completer(trained, generation, processes, settings.batch_size)
    share = (processes.rank, processes.num_ranks) if completer is None else texts_of_rank(trained.model, processes)
    first, step = share
    mine = range(first, len(prompts), step)
    if completer is None:
        size = 1
        if len(prompts) > 1:
            size = stock_batch_size(trained.meta.config, trained.spec.trust_remote_code, settings.batch_size)
        completions = complete_by_transformers(
            [prompts[number] for number in mine], len(prompts), trained, generation, processes, size, settings.seed
        )
    else:
        torch.manual_seed(settings.seed * 1_000_003 + first)
        requests = [Request(prompts[number], settings.max_new_tokens) for number in mine]
        try:
            completer.complete(requests)
        finally:
            completer.release()
        completions = [request.completion for request in requests]
    stops = StopStrings(trained.tokenizer, stop_strings(generation))
    tokenizer = ContainedTokenizer(trained.tokenizer)
    texts = [stops.cut(tokenizer.decode(tokens, skip_special_tokens=True)) for tokens in completions]
    return dict(zip(mine, texts, strict=True))


def check_generation(settings: GenerateSettings, task: TaskConfig, others: Sequence[Problem]) -> None:
    """Refuse a classifier, numbers that make no sense, and prompts that are missing or given twice.

    Raises:
        ConfigError: all problems that were found.
    """
    problems = list(others)
    if not task.is_causal:
        fix = "Set adapter to one of a model that does, or use qlora-fsdp evaluate."
        problems.append(Problem(show("task.name", task.name), "writes no text.", fix))
    for name in ("max_new_tokens", "batch_size"):
        if (value := getattr(settings, name)) is None or value >= 1:
            continue
        problems.append(Problem(f"{name}={value}", "must be at least 1.", f"Set {name} higher."))
    if not 0 <= settings.seed < MAX_SEED:
        problems.append(Problem(f"seed={settings.seed}", f"must be from 0 to {MAX_SEED - 1}.", "Set seed=0."))
    if not 0 <= settings.temperature < 100:
        problems.append(
            Problem(f"temperature={settings.temperature}", "must be from 0 to 100.", "Set temperature=0.7.")
        )
    if not 0 < settings.top_p <= 1:
        problems.append(Problem(f"top_p={settings.top_p}", "must be above 0 and at most 1.", "Set top_p=0.9."))
    if (settings.prompt is None) == (settings.prompts is None):
        found = "are both set." if settings.prompt is not None else "are both missing."
        problems.append(Problem("prompt and prompts", found, 'Set prompt="..." or prompts=FILE.jsonl.'))
    elif settings.prompt is not None and not is_unicode(settings.prompt):
        problems.append(Problem("prompt", "has bytes that are no UTF-8.", IN_UTF8))
    elif settings.prompts is not None and not Path(settings.prompts).expanduser().is_file():
        problems.append(Problem(f"prompts={settings.prompts}", "is no file.", "Set prompts to a file of JSON lines."))
    refuse(problems)


def _read_rows(settings: GenerateSettings) -> list[dict[str, Any]]:
    if settings.prompts is None:
        return [{"prompt": settings.prompt}]
    from qlora_fsdp.data.row import BadRow, check_unicode

    rows: list[dict[str, Any]] = []
    for number, line in enumerate(Path(settings.prompts).expanduser().read_bytes().splitlines(), start=1):
        place = f"prompts={settings.prompts}, line {number}"
        try:
            row = json.loads(line) if line.strip() else None
            check_unicode(line, row)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{place} is not JSON: {error}. {A_ROW}") from error
        except BadRow as bad:
            raise DataError(f"{place} is {bad.kind}: {bad.detail}. Repair it.") from bad
        if row is None:
            continue
        check_prompt_row(row, place)
        rows.append(row)
    if not rows:
        raise DataError(f"prompts={settings.prompts} has no rows. Set prompts to a file of JSON lines.")
    return rows


def check_prompt_row(row: Any, place: str) -> None:
    """Check that a row has a prompt or a conversation, and nothing that a model of text can't see.

    Args:
        row: a value that was read from JSON.
        place: where it stands, for messages.

    Raises:
        DataError: it can't be completed.
    """
    from qlora_fsdp.data.columns import NOT_TEXT

    if not isinstance(row, dict) or not (isinstance(row.get("prompt"), str) or _turns(row)):
        raise DataError(f"{place} has neither prompt nor messages. {A_ROW}")
    if media := [key for key in NOT_TEXT if row.get(key)]:
        raise DataError(f"{place} has {media[0]}, and a model of text sees none. Leave the row out.")


def tokenize_prompts(
    rows: list[dict[str, Any]], trained: AssembledModel, settings: GenerateSettings, system: str | None
) -> list[list[int]]:
    """Token ids of each row's prompt or conversation, with what these begin with where they have no system message."""
    from qlora_fsdp.data.template_arguments import template_arguments
    from qlora_fsdp.inference.prompts import PromptStyle, chat_tokens, choose_style, style_tokens

    tokenizer = trained.tokenizer
    style, reason = choose_style(tokenizer, read_trained_on(settings.adapter), settings.raw)
    if any(isinstance(row.get("prompt"), str) for row in rows):
        log.info(f"Prompts: {style.value} ({reason})")
    conversations = [_turns(row) for row in rows if not isinstance(row.get("prompt"), str)]
    if style is PromptStyle.chat or conversations:
        tell_conversations(system, template_arguments(tokenizer))
    if answered := sum(map(_is_answered, conversations)):
        log.info(
            f"Note: {answered} of {plural(len(conversations), 'conversation')} end with the assistant's answer, and "
            "the completion comes after it. Leave that turn out of prompts= for the model's own answer"
        )
    found = []
    for number, row in enumerate(rows, start=1):
        place = f"row {number}"
        own = row.get("system") or system
        tools = row.get("tools")
        if isinstance(row.get("prompt"), str):
            found.append(style_tokens(style, tokenizer, row["prompt"], place, own, tools))
        else:
            found.append(chat_tokens(tokenizer, _turns(row), tools, place, own))
    return found


def _turns(row: dict[str, Any]) -> Any:
    """The conversation of a row whose prompt is no text: its messages, or a prompt that is a list of messages."""
    prompt = row.get("prompt")
    return row.get("messages") or (prompt if isinstance(prompt, list) else None)


def _is_answered(turns: Any) -> bool:
    """Whether a conversation ends with the assistant's turn, as rows of training do."""
    return isinstance(turns, list) and isinstance(turns[-1], dict) and turns[-1].get("role") == "assistant"


def check_lengths(prompts: list[list[int]], settings: GenerateSettings, limit: int | None) -> None:
    """Check that every prompt has tokens, and room for its completion.

    Args:
        prompts: token ids of each.
        settings: how many tokens a completion may have.
        limit: how many positions the model knows; None for any number.

    Raises:
        DataError: one has none, or is too long.
    """
    for number, tokens in enumerate(prompts, start=1):
        if not tokens:
            raise DataError(f"row {number}: the prompt has no token to go on from. Give it some text.")
        if limit is not None and len(tokens) + settings.max_new_tokens > limit:
            fix = "Set max_new_tokens lower." if len(tokens) < limit else "Shorten the prompt."
            raise DataError(
                f"row {number}: {len(tokens):,} tokens and max_new_tokens={settings.max_new_tokens} are more than the "
                f"{limit:,} positions that the model knows. {fix}"
            )


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code."""
    return run_command(argv, GenerateSettings, USAGE, generate_completions, optional=["data.path", "reward.functions"])


if __name__ == "__main__":
    end_process(main())
