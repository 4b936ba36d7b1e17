"""The model card of an adapter, README.md: what it was trained on and how, how well, and how to use it.

Names, prompts and what the model wrote come from others' files. So the front matter is dumped by yaml, texts stand in
fences longer than any in them, and control characters are left out.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from qlora_fsdp import __version__
from qlora_fsdp.common.hub import LOCAL_BASE
from qlora_fsdp.common.text import plural, printable, printable_lines

MAX_EXAMPLE = 1500  # characters of a prompt, or of what the model wrote
MAX_LICENSE_BYTES = 2**16  # of a card in which a license is looked for
VLLM_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # the values that vLLM's --max-lora-rank has


@dataclass(frozen=True)
class CardData:
    """A data set that was trained on.

    Attributes:
        name: its hub name, or the name of a local file or folder without the path to it.
        on_hub: whether it is a hub name.
        num_rows: rows that were trained on; None for a stream.
    """

    name: str
    on_hub: bool
    num_rows: int | None


@dataclass(frozen=True)
class CardFacts:
    """The facts about a run that its model card tells.

    Attributes:
        base: the base model's hub name; None for a local folder or random weights.
        base_name: what the base is called otherwise: its preset's name, or the name of its folder.
        license: the base model's license, by its name on the hub; None if unknown.
        data: what was trained on; empty for random tokens.
        start: the folder of the adapter that was trained on, without the path to it; None for a new adapter.
        settings: what was set, by the setting's name or in words, in the order of the table.
        num_steps: optimizer steps of the whole run.
        is_final: whether all of them are done; else the adapter is part of a checkpoint.
        scales_rope: whether its rotary embeddings are not those of the base's files.
        eval_losses: losses of the held-out rows by the number of steps done; empty if there are none.
        train_losses: mean losses of the first and of the last training steps; None if there are none.
        num_averaged: steps that each of these is the mean of.
        doubt: what the run's figures say against the adapter; None if nothing.
        rank: the largest of the adapter.
        needs_export: why vLLM serves it only as `merge write=adapter` writes it; None if that is not so.
        needs_merge: why vLLM can't serve it beside its base in any form; None if it can.
        prompt: how a prompt is written for the adapter.
        example: a prompt and what the model wrote; None if it wrote nothing during training.
        loss: what the losses are means of.
    """

    base: str | None
    base_name: str = "a local model"
    license: str | None = None
    data: tuple[CardData, ...] = ()
    start: str | None = None
    settings: tuple[tuple[str, str], ...] = ()
    num_steps: int = 0
    is_final: bool = True
    scales_rope: bool = False
    eval_losses: tuple[tuple[int, float], ...] = ()
    train_losses: tuple[float, float] | None = None
    num_averaged: int = 10
    doubt: str | None = None
    rank: int = 8
    needs_export: str | None = None
    needs_merge: str | None = None
    prompt: str = ""
    example: tuple[str, str] | None = None
    loss: str = "loss per token, in nats"


def make_card(facts: CardFacts, usage: str, quantized_usage: str = "", is_classifier: bool = False) -> str:
    """Returns the text of README.md.

    Args:
        facts: about the run.
        usage: Python code that loads the adapter onto its base.
        quantized_usage: the same onto the quantized base, where that needs more than the usual; or empty.
        is_classifier: whether the model gives labels instead of text, and so is not served.
    """
    base = f"[{facts.base}](https://huggingface.co/{facts.base})" if facts.base else code(facts.base_name)
    parts = [
        f"# LoRA adapter for {facts.base or code(facts.base_name)}",
        f"A LoRA adapter for {base}, trained with qlora-fsdp {__version__}: {_steps(facts)}{_start(facts)}.",
        "## Data",
        _data(facts),
        "## Loss",
        _losses(facts),
        "## Settings",
        _table(("Setting", "Value"), facts.settings),
        "## Use",
        fence(usage, "python"),
    ]
    if quantized_usage:
        parts += [
            "Onto a quantized base, in which these layers must stay in full precision:",
            fence(quantized_usage, "python"),
        ]
    if not is_classifier:
        parts += _serving(facts)
        if facts.prompt:
            parts += ["## Prompts", facts.prompt]
        if facts.example is not None:
            prompt, written = (_cut(text) for text in facts.example)
            parts += ["## Example", "A held-out prompt:", fence(prompt), "What the model wrote:", fence(written)]
    return f"---\n{_front_matter(facts, is_classifier)}---\n\n" + "\n\n".join(parts) + "\n"


def fence(text: str, language: str = "") -> str:
    """Returns text as a block of code that nothing in the text can end."""
    marks = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{marks}{language}\n{printable_lines(text)}\n{marks}"


def read_license(folder: Path | None) -> str | None:
    """Reads the license that a model's own card names, by its name on the hub; None if it names none."""
    if folder is None:
        return None
    try:
        with (folder / "README.md").open("rb") as stream:
            text = stream.read(MAX_LICENSE_BYTES).decode("utf-8", "replace")
    except OSError:
        return None
    found = re.match(r"---\n(?:[^\n]*\n)*?license:[ \t]*([a-z0-9.+-]{1,40})[ \t]*\n", text)
    return found[1] if found else None


def _front_matter(facts: CardFacts, is_classifier: bool) -> str:
    names = [printable(data.name) for data in facts.data if data.on_hub]
    values: dict[str, Any] = {
        "base_model": facts.base and printable(facts.base),
        "license": facts.license and printable(facts.license),
        "library_name": "peft",
        "pipeline_tag": None if is_classifier else "text-generation",
        "datasets": names or None,
        "tags": ["lora", "qlora", "qlora-fsdp"],
    }
    text: str = yaml.safe_dump({key: value for key, value in values.items() if value is not None}, sort_keys=False)
    return text


def _steps(facts: CardFacts) -> str:
    steps = plural(facts.num_steps, "step")
    return steps if facts.is_final else f"a checkpoint of a run of {steps}"


def _start(facts: CardFacts) -> str:
    return "" if facts.start is None else f" on from the adapter {code(facts.start)}"


def _data(facts: CardFacts) -> str:
    if not facts.data:
        return "Random tokens: the adapter is of a test of speed or memory."
    rows = []
    for data in facts.data:
        name = f"[{data.name}](https://huggingface.co/datasets/{data.name})" if data.on_hub else code(data.name)
        rows.append((name, "streamed" if data.num_rows is None else f"{data.num_rows:,}"))
    return _table(("Data", "Rows"), rows, is_code=False)


def _losses(facts: CardFacts) -> str:
    rows = []
    if facts.eval_losses:
        (first, before), (last, after) = facts.eval_losses[0], facts.eval_losses[-1]
        if last > first:
            of_what = "before training" if first == 0 else f"after {plural(first, 'step')}"
            rows.append(("held-out rows", f"{before:.4f} {of_what}", f"{after:.4f} after {plural(last, 'step')}"))
        else:
            rows.append(("held-out rows", "", f"{after:.4f} after {plural(last, 'step')}"))
    if facts.train_losses is not None:
        start, end = facts.train_losses
        steps = "step" if facts.num_averaged == 1 else f"{facts.num_averaged} steps"
        rows.append(("training rows", f"{start:.4f} in the first {steps}", f"{end:.4f} in the last {steps}"))
    if not rows:
        return "No loss was recorded."
    note = f"Mean {facts.loss}." + ("" if facts.eval_losses else " No held-out rows were evaluated.")
    if facts.doubt is not None:
        note += f" **{facts.doubt}**"
    return f"{_table(('Loss on', 'Before', 'After'), rows, is_code=False)}\n\n{note}"


def _serving(facts: CardFacts) -> list[str]:
    if facts.needs_merge is not None:
        why = f"vLLM does not serve this adapter beside its base, because {facts.needs_merge}. Make one model of both:"
        command = "qlora-fsdp merge adapter=path/to/this/folder out=merged\nvllm serve merged"
        return [why, fence(command, "sh")]
    rank = next((rank for rank in VLLM_RANKS if rank >= facts.rank), facts.rank)
    start = f"vllm serve {facts.base or LOCAL_BASE} --enable-lora --max-lora-rank {rank} \\\n  --lora-modules adapter="
    if facts.needs_export is not None:
        why = (
            f"This folder is for PEFT. vLLM wants its layers in another form, because {facts.needs_export}; "
            "qlora-fsdp merge write=adapter writes them for vLLM, in which the adapter is then a model of the name "
            "`adapter`:"
        )
        export = "qlora-fsdp merge adapter=path/to/this/folder out=for-vllm write=adapter"
        return [why, fence(f"{export}\n{start}for-vllm", "sh")]
    command = f"{start}path/to/this/folder"
    return ["With vLLM, in which the adapter is then a model of the name `adapter`:", fence(command, "sh")]


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], is_code: bool = True) -> str:
    lines = [head, ["---"] * len(head)]
    lines += [[row[0], *map(code, row[1:])] if is_code else row for row in rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def code(text: str) -> str:
    """Returns a text of one line as code in a table's cell."""
    plain = printable(text).replace("`", "'").replace("|", "\\|")
    return f"`{plain}`" if plain.strip() else ""


def _cut(text: str) -> str:
    return text if len(text) <= MAX_EXAMPLE else f"{text[:MAX_EXAMPLE]} ..."
