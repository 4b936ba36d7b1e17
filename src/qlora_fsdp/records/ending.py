"""What a run that has finished says last: its losses, its files, and what to type next. Imports no torch."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from qlora_fsdp.common.text import plural, show_duration
from qlora_fsdp.config.schema import Config, Weights
from qlora_fsdp.records.run_state import REPORT_FILE, read_metrics


def describe_end(config: Config, folder: Path, summary: Mapping[str, Any]) -> str:
    """Returns the last lines of a run's log."""
    lines = [f"Finished: {plural(summary['steps'], 'step')} in {show_duration(summary['seconds'])}."]
    first = next((line["loss"] for line in read_metrics(folder) if line.get("loss") is not None), None)
    lines += _before_and_after("training loss", first, summary.get("final_loss"))
    lines += _before_and_after("evaluation loss", summary.get("initial_eval_loss"), summary.get("eval_loss"))
    is_causal, is_random = config.task.is_causal, config.model.weights is Weights.random
    commands = commands_for(folder / "adapter", is_causal, is_random, config.model.trust_remote_code)
    named = {"adapter": folder / "adapter", "report": folder / REPORT_FILE}
    lines += [f"  {name:<16} {path}" for name, path in named.items() if path.exists()]
    return "\n".join([*lines, "Next:", *(f"  {command}" for command in commands)])


def commands_for(adapter: Path, is_causal: bool, is_random: bool, trusts_code: bool) -> list[str]:
    """Returns the commands that can use an adapter, as one types them."""
    given = f"adapter={shlex.quote(str(adapter))}"
    loaded = given + trust(trusts_code)
    commands = [ask(loaded, adapter) if is_causal else f"qlora-fsdp evaluate {loaded} data.path=FILE"]
    if not is_random:
        merged = shlex.quote(str(adapter.with_name("merged")))
        commands.append(f"qlora-fsdp merge {loaded} out={merged}")
        commands.append(f"qlora-fsdp push {given} repo=ORG/NAME")
    return commands


def trust(trusts_code: bool) -> str:
    """Returns what the next command needs to run the model's own code: an adapter's folder can't allow it."""
    return " model.trust_remote_code=true" if trusts_code else ""


def ask(given: str, folder: Path) -> str:
    """Returns the command that lets a model write: `chat`, where the tokenizer in its folder has a chat template.

    Args:
        given: what names the model, such as `adapter=FOLDER`.
        folder: of the adapter or the model, with its tokenizer.
    """
    config = folder / "tokenizer_config.json"  # older versions of transformers wrote the template into it
    has_template = (folder / "chat_template.jinja").is_file() or (
        config.is_file() and '"chat_template"' in config.read_text(encoding="utf-8")
    )
    return f"qlora-fsdp chat {given}" if has_template else f'qlora-fsdp generate {given} prompt="..."'


def _before_and_after(name: str, before: float | None, after: float | None) -> list[str]:
    if before is None or after is None:
        return []
    return [f"  {name:<16} {before:.4f} -> {after:.4f}"]
