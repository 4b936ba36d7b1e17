"""`qlora-fsdp push`: upload an adapter to the Hugging Face hub."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

if __name__ == "__main__":
    from qlora_fsdp.common.startup import begin

    begin()

from qlora_fsdp.common.errors import ConfigError, Problem, UserError, print_error, refuse
from qlora_fsdp.common.hub import find_cached_model, is_repo_name
from qlora_fsdp.common.startup import end_process, quick_imports
from qlora_fsdp.config.adapter.adapter_config import adapter_problems
from qlora_fsdp.config.adapter.foreign_settings import read_base_model
from qlora_fsdp.config.adapter.lora_start import may_be_same
from qlora_fsdp.config.reading.commands import (
    BaseAndAdapterSettings,
    load_command,
    read_base_fingerprint,
    read_own_settings,
)
from qlora_fsdp.config.settings import show
from qlora_fsdp.records.upload import push_adapter
from qlora_fsdp.runtime.run_command import log, log_to_stderr

USAGE = """
Upload an adapter to the Hugging Face hub, in one commit.

usage: qlora-fsdp push adapter=DIR repo=ORG/NAME [private=false] [base=ORG/NAME] [other_base=true]

  adapter=DIR    the adapter's folder: outputs/run/adapter
  repo=ORG/NAME  the repository; NAME alone for one of your own. It is made if it is not there
  private=true   whether a new repository is private; one that is there stays as it is
  base=ORG/NAME  the base model's name on the hub, for an adapter that was trained on a folder of this machine. Its
                 weights are compared with those that the adapter was trained on, if the hub's cache has them
  other_base=true  name a base with other weights all the same, or one that can't be compared

Only the adapter's own files go there: weights, configs, tokenizer, model card. The model card may hold a held-out
prompt and what the model wrote: look at README.md before.
"""

SECONDS = 60  # for this process to meet itself


@dataclass
class PushSettings(BaseAndAdapterSettings):
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
    if not settings.other_base:
        _check_base(settings.adapter, settings.base)
    return push_adapter(Path(settings.adapter).expanduser(), settings.repo, settings.private, settings.base)


def _check_base(adapter: str, base: str | None) -> None:
    """Refuse a name of the base that stands for other weights than the adapter was trained on.

    Looked at is what the hub's cache of this machine has: nothing is downloaded. Where it has not got the model, the
    name has to be that of the folder in which training found it.

    Args:
        adapter: the adapter's folder.
        base: the name, if one was typed.

    Raises:
        AdapterError: the weights are others.
        ConfigError: they can't be compared, and the name is another one.
    """
    fingerprint = read_base_fingerprint(adapter)
    if base is None or fingerprint is None:
        return
    refuse(adapter_problems(adapter))
    cached = find_cached_model(base)
    if cached is not None:
        _compare_weights(adapter, base, cached, fingerprint)
        return
    trained_on = read_base_model(Path(adapter).expanduser())
    if trained_on is not None and not may_be_same(base, trained_on):
        reason = f"is not {trained_on}, which the adapter was trained on, and is not in the hub's cache to be compared."
        fix = f"If both are one model, run `hf download {base}` first, or type other_base=true."
        raise ConfigError([Problem(show("base", base), reason, fix)])
    log.info(f"Note: {base} is not in the hub's cache, and was compared with the adapter's base by its name alone")


def _compare_weights(adapter: str, base: str, cached: Path, fingerprint: str) -> None:
    """Refuse a base whose weights, which lie in the folder `cached`, are others than the fingerprint's."""
    with quick_imports():
        from qlora_fsdp.inference.trained import assemble_trained
        from qlora_fsdp.model.assemble import check_fingerprint
        from qlora_fsdp.runtime.processes import start_processes

    settings = BaseAndAdapterSettings(adapter, other_base=True)  # what is wrong is said here, in terms of push
    _, config = load_command([f"adapter={adapter}", f"model.path={cached}"], BaseAndAdapterSettings, USAGE)
    processes = start_processes(SECONDS, use_cpu=True)
    check_fingerprint(
        assemble_trained(config, settings, processes),
        fingerprint,
        processes,
        base=show("base", base),
        adapter=show("adapter", adapter),
        fix=". Set base to the name of these. If you want the adapter to name it all the same, type other_base=true.",
    )


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
