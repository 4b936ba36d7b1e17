"""The model card of a merged model, README.md: what it was made of, what it keeps of that, and how to use it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from qlora_fsdp import __version__
from qlora_fsdp.common.hub import hub_name
from qlora_fsdp.common.text import printable
from qlora_fsdp.inference.merge_report import MergeReport
from qlora_fsdp.model.adapters.model_card import GGUF_COMMANDS, SERVER_COMMANDS, code, fence

FOLDER = "path/to/this/folder"
LOADING = """\
from transformers import {auto_class}, AutoTokenizer

folder = "path/to/this/folder"
tokenizer = AutoTokenizer.from_pretrained(folder)
model = {auto_class}.from_pretrained(folder, dtype="auto")"""


def make_merged_card(
    base: str | None,
    format: str,
    onto: str,
    auto_class: str | None,
    report: MergeReport | str,
    has_bitsandbytes: bool,
    gguf_files: Sequence[str],
) -> str:
    """Returns the text of README.md.

    Args:
        base: the base model's name on the hub or its folder, of which the last part is shown; None if unknown.
        format: in which the weights are written, in words.
        onto: what the adapter was merged onto, in words.
        auto_class: transformers' class that loads the model; None for a classifier, which is not served.
        report: what the model keeps of what was trained, or why that is not known.
        has_bitsandbytes: whether its weights are codes of bitsandbytes, which SGLang has to be told.
        gguf_files: the names of the GGUF files beside it.
    """
    named = hub_name(base)
    shown = f"[{named}](https://huggingface.co/{named})" if named else code(Path(base or "a base model").name)
    parts = [
        f"# {named or code(Path(base or 'a base model').name)} with an adapter merged into it",
        f"{shown} and a LoRA adapter in one model, made by qlora-fsdp {__version__}: merged onto {onto}, {format}.",
        "## What it keeps of what was trained",
        _describe(report),
    ]
    if auto_class is not None:
        parts += ["## Use", fence(LOADING.format(auto_class=auto_class), "python")]
        options = " --load-format bitsandbytes" if has_bitsandbytes else ""
        parts += ["With vLLM or SGLang:", fence(SERVER_COMMANDS.format(folder=FOLDER, options=options), "sh")]
    if gguf_files:
        parts += ["With llama.cpp or Ollama:", fence(GGUF_COMMANDS.format(folder=FOLDER, file=gguf_files[0]), "sh")]
    front = _front_matter(named, auto_class)
    return f"---\n{front}---\n\n" + "\n\n".join(parts) + "\n"


def _front_matter(base: str | None, auto_class: str | None) -> str:
    values: dict[str, Any] = {
        "base_model": base and printable(base),
        "library_name": "transformers",
        "pipeline_tag": None if auto_class is None else "text-generation",
        "tags": ["qlora", "qlora-fsdp", "merge"],
    }
    text: str = yaml.safe_dump({key: value for key, value in values.items() if value is not None}, sort_keys=False)
    return text


def _describe(report: MergeReport | str) -> str:
    if isinstance(report, str):
        return f"Not measured: {report}"
    rows = report.table()
    cells = [list(rows[0]), ["---"] * len(rows[0]), *(list(row.values()) for row in rows)]
    lines = [f"| {' | '.join(line)} |" for line in cells]
    note = (
        f"On {report.num_rows} {_name_rows(report.rows)}, {report.num_target_tokens} predicted tokens; means of a "
        "token, in nats. The divergence is that of a model's predictions from those of the adapter as trained."
    )
    return "\n".join(lines) + f"\n\n{note}"


def _name_rows(rows: str) -> str:
    """What the rows are; of a file its name without the path to it, as the card may be published."""
    start = "rows of "
    return start + Path(rows.removeprefix(start)).name if rows.startswith(start) else rows
