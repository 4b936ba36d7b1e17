"""`qlora-fsdp prepare`: tokenizes a run's data beforehand, on a host that needs no GPU."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if __name__ == "__main__":
    from qlora_fsdp.common.startup import KEPT, begin

    begin(KEPT)

from qlora_fsdp.common.errors import Problem, refuse
from qlora_fsdp.common.startup import end_process, quick_imports
from qlora_fsdp.common.text import plural, printable
from qlora_fsdp.config.reading.command_line import WITH_VALUE
from qlora_fsdp.config.reading.commands import CommandSettings
from qlora_fsdp.config.schema import Config, DataConfig, DataFormat
from qlora_fsdp.config.settings import all_settings, problem_about
from qlora_fsdp.config.specs import DataSpec
from qlora_fsdp.runtime.run_command import run_command, tell_next

if TYPE_CHECKING:
    from qlora_fsdp.runtime.processes import Processes

USAGE = """
Tokenizes the data of a run to come into data.cache_folder: what train would do before its first step. Needs no GPU,
and of the model its tokenizer alone. Broken off in any way, the same command goes on from where it was.

usage: qlora-fsdp prepare [DATA ...] model=NAME|model.tokenizer_path=FOLDER [setting=value ...]

  DATA             in place of data.path=
  data.num_proc=N  how many processes tokenize; by default one for each CPU core

Every other setting is one of training's: prepare takes the command line of the run to come. The cache is used by any
run with the same data, tokenizer and settings of data, whatever its training.max_length and packing.

examples:
  qlora-fsdp prepare model=llama3-8b data.path=chats.jsonl
  qlora-fsdp prepare chats.jsonl more.jsonl.gz model.path=/models/my-llama data.cache_folder=/shared/cache
"""


@dataclass
class PrepareSettings(CommandSettings):
    """`prepare` has no settings of its own."""


def prepare(settings: PrepareSettings, config: Config, processes: Processes) -> None:
    """Tokenizes the data as training does, and says what it is."""
    refuse(_find_problems(config.data))
    with quick_imports():
        from qlora_fsdp.data.run_data import prepare_data, prepare_held_out
        from qlora_fsdp.model.run_tokenizer import load_run_tokenizer

    tokenizer = load_run_tokenizer(config)
    spec = DataSpec.of(config)
    if config.data.streaming:
        held_out = prepare_held_out(spec, tokenizer, processes, len(tokenizer))
        print(f"evaluation: {plural(len(held_out), 'sequence')}; all other rows are read while they are trained on")
        return
    for line in str(prepare_data(spec, tokenizer, processes, len(tokenizer)).report).splitlines():
        print(printable(line))


def _find_problems(data: DataConfig) -> list[Problem]:
    """Returns why there is nothing to prepare."""
    if data.format is DataFormat.random:
        reason = "is made while it is trained on: there is nothing to prepare."
        return [problem_about("data.format", data.format, reason, "Name data: data.path=chats.jsonl.")]
    if data.streaming and data.eval_path is None:
        reason = "tokenizes rows while they are trained on: there is nothing to prepare."
        return [problem_about("data.streaming", data.streaming, reason, "Set data.streaming=false.")]
    return []


def _name_data(words: Sequence[str]) -> list[str]:
    """The command line with data.path= in place of words that are no settings."""
    named: list[str] = []
    rest: list[str] = []
    for word, before in zip(words, ["", *words], strict=False):
        is_data = not (word.startswith("-") or "=" in word or before in WITH_VALUE or before == "=")
        is_data = is_data and word not in all_settings()  # whose value was forgotten
        (named if is_data else rest).append(word)
    if not named:
        return rest
    quoted = [json.dumps(word, ensure_ascii=False) for word in named]
    return ["data.path=" + (quoted[0] if len(quoted) == 1 else f"[{','.join(quoted)}]"), *rest]


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    arguments = _name_data(sys.argv[1:] if argv is None else argv)
    exit_code = run_command(
        arguments, PrepareSettings, USAGE, prepare, ["reward.functions"], takes_adapter=False, on_cpu=True
    )
    if exit_code == 0:
        tell_next(arguments)
    return exit_code


if __name__ == "__main__":
    end_process(main())
