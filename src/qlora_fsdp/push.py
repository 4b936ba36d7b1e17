"""`qlora-fsdp push`: upload an adapter to the Hugging Face hub."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

if __name__ == "__main__":
    from qlora_fsdp.common.startup import begin

    begin()

from qlora_fsdp.common.errors import ConfigError, Problem, UserError, print_error
from qlora_fsdp.common.hub_names import is_repo_name
from qlora_fsdp.common.startup import end_process
from qlora_fsdp.config.commands import AdapterSettings, read_own_settings
from qlora_fsdp.config.settings import show
from qlora_fsdp.records.hub import push_adapter
from qlora_fsdp.runtime.run_command import log_to_stderr

USAGE = """
Upload an adapter to the Hugging Face hub, in one commit.

usage: qlora-fsdp push adapter=DIR repo=ORG/NAME [private=false] [base=ORG/NAME]

  adapter=DIR    the adapter's folder: outputs/run/adapter
  repo=ORG/NAME  the repository; NAME alone for one of your own. It is made if it is not there
  private=true   whether a new repository is private; one that is there stays as it is
  base=ORG/NAME  the base model's name on the hub, for an adapter that was trained on a folder of this machine

Only the adapter's own files go there: weights, configs, tokenizer, model card. The model card may hold a held-out
prompt and what the model wrote: look at README.md before.
"""


@dataclass
class PushSettings(AdapterSettings):
    """Settings of `push`, as its --help says."""

    repo: str | None = None
    private: bool = True
    base: str | None = None


def push(settings: PushSettings) -> str:
    """Check the settings, and upload. Returns the repository's address."""
    problems = []
    if settings.adapter is None:
        problems.append(Problem("adapter", "is not set.", "Set adapter to the folder that training wrote."))
    if settings.repo is None:
        problems.append(Problem("repo", "is not set.", "Set repo=ORG/NAME."))
    for name, value in (("repo", settings.repo), ("base", settings.base)):
        if value is not None and not is_repo_name(value):
            reason = "can't be the name of a repository on the hub."
            problems.append(Problem(show(name, value), reason, f"Set {name}=ORG/NAME."))
    if problems or settings.adapter is None or settings.repo is None:
        raise ConfigError(problems)
    return push_adapter(Path(settings.adapter).expanduser(), settings.repo, settings.private, settings.base)


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code."""
    log_to_stderr()
    try:
        settings = read_own_settings(sys.argv[1:] if argv is None else argv, PushSettings, USAGE)
        print(push(settings))
    except UserError as error:
        print_error(error)
        return error.exit_code
    return 0


if __name__ == "__main__":
    end_process(main())
