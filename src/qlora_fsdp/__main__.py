"""`qlora-fsdp COMMAND ...`, or `python -m qlora_fsdp COMMAND ...`: every command of the package under one name.

It answers within a second: only the command that is asked for is imported.
"""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any, NoReturn, cast

from qlora_fsdp import __version__
from qlora_fsdp.common.errors import ConfigError, Problem, print_error
from qlora_fsdp.common.startup import KEPT, NO_RUN, begin, end_process, end_with_the_reader, is_rank

# Name: module, what it does
COMMANDS = {
    "train": ("qlora_fsdp.train", "train an adapter on all GPUs of this host; sweeps and batch jobs too"),
    "preflight": ("qlora_fsdp.preflight", "does a run fit, and how long will it take? needs no GPU"),
    "preview": ("qlora_fsdp.preview", "rows as the model will see them, and what is trained on"),
    "convert": ("qlora_fsdp.config.convert.__main__", "a file of axolotl, LLaMA-Factory or TRL as one of --config"),
    "prepare": ("qlora_fsdp.prepare", "tokenize the data of a run beforehand; needs no GPU"),
    "evaluate": ("qlora_fsdp.evaluate", "an adapter's loss on data, or its score in a benchmark"),
    "score": ("qlora_fsdp.score", "a teacher's probabilities of the answers in the data, for task=distill"),
    "generate": ("qlora_fsdp.generate", "complete prompts"),
    "predict": ("qlora_fsdp.predict.__main__", "classes, rewards or texts for a file of rows, on all GPUs, resumable"),
    "chat": ("qlora_fsdp.chat", "talk to a model"),
    "merge": ("qlora_fsdp.merge", "make one model of base and adapter"),
    "push": ("qlora_fsdp.push", "publish an adapter on the hub"),
    "status": ("qlora_fsdp.status", "how runs are doing"),
    "report": ("qlora_fsdp.report.__main__", "write a page about a run, or one that compares several"),
    "doctor": ("qlora_fsdp.doctor.__main__", "can this host train, and what would be in the way?"),
    "schema": ("qlora_fsdp.config.reading.json_schema", "print a JSON schema of the settings, for editors"),
    "completion": ("qlora_fsdp.launch.completion", 'complete words in this shell: eval "$(qlora-fsdp completion)"'),
}
ONLY_PRINT = ("preflight", "status", "schema", "completion")
HELP = {"-h", "--help"}
GO_ON = ("resume", "continue")  # what people type for a run that has stopped
TAKE_RANKS = (
    "evaluate",
    "generate",
    "predict",
    "score",
    "chat",
    "doctor",
)  # besides train: with launch.num_processes=N

USAGE = """\
Fine-tune large language models with QLoRA on FSDP2.

usage: qlora-fsdp COMMAND [group=option ...] [setting=value ...]

{commands}

examples:
  qlora-fsdp train model=llama3-8b data.path=chats.jsonl
  qlora-fsdp train model=tiny data=random training.max_steps=10 launch.num_processes=2
  qlora-fsdp generate adapter=outputs/run/adapter prompt="What does textwrap.dedent do?"

options:
  --help      this page; qlora-fsdp COMMAND --help is that of a command
  --version   the version"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command that the command line names: its exit code, or 2 if there is no such command."""
    name, *rest = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    begin({"train": NO_RUN, "prepare": KEPT}.get(name, ""))
    if name in ONLY_PRINT or {name, *rest} & HELP:
        end_with_the_reader()
    if name in {"help", *HELP}:
        print(USAGE.format(commands="\n".join(f"  {key:<12}{COMMANDS[key][1]}" for key in COMMANDS)))
        return 0
    if name == "--version":
        print(f"qlora-fsdp {__version__}")
        return 0
    if name not in COMMANDS:
        error = ConfigError([_no_command(name)])
        print_error(error)
        return error.exit_code
    return _run(name, rest)


def command() -> NoReturn:
    """Does what `main` says, and ends the process with its exit code."""
    end_process(main())


def _run(name: str, argv: list[str]) -> int:
    module, may_start_ranks = COMMANDS[name][0], not is_rank(os.environ)
    if name in TAKE_RANKS and may_start_ranks and any(text.lstrip("+").startswith("launch.") for text in argv):
        from qlora_fsdp.launch.ranks import start_command

        return start_command(module.removesuffix(".__main__"), argv)
    more: dict[str, Any] = {}
    if name == "train":
        more = {"starts_ranks": may_start_ranks}
    elif name == "completion":
        more = {"commands": {key: COMMANDS[key][0] for key in COMMANDS}}
    return cast(int, import_module(module).main(argv, **more))


def _no_command(name: str) -> Problem:
    if name.lstrip("-") in COMMANDS:
        return Problem(name, "is no command.", f"Did you mean qlora-fsdp {name.lstrip('-')}?")
    if name in GO_ON:
        return Problem(
            name, "is no command.", "Type the command of the run again: it goes on from its last checkpoint."
        )
    if "=" in name or name.startswith("-"):
        return Problem(name, "is no command.", f"Name one first: qlora-fsdp train {name} ...")
    near = difflib.get_close_matches(name, COMMANDS, n=1)
    fix = f"Did you mean qlora-fsdp {near[0]}?" if near else f"The commands are {', '.join(COMMANDS)}."
    return Problem(name, "is no command.", fix)


if __name__ == "__main__":
    command()
