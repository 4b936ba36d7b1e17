"""Writes the report of one run or of several: figures, charts, differences, settings and environment."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from qlora_fsdp.common.errors import RunFolderError
from qlora_fsdp.common.files import write_atomically
from qlora_fsdp.common.text import show_number
from qlora_fsdp.config.identity import plain_default, read_settings
from qlora_fsdp.config.settings import all_settings
from qlora_fsdp.records.run_state import GENERATIONS_FILE, RunState, find_runs, read_json, read_metrics, read_run
from qlora_fsdp.report.charts import Series, chart, smooth

NOT_COMPARED = ("run", "launch", "slurm", "tracking")  # sections that say nothing about how a run trains

STYLE = """
:root { color-scheme: light dark; --ink: #1a1a1a; --soft: #6b6b6b; --rule: #dddddd; --paper: #ffffff;
  --0: #0072b2; --1: #d55e00; --2: #009e73; --3: #cc79a7; --4: #56b4e9; --5: #e69f00; --6: #7a5cc4; --7: #555555; }
@media (prefers-color-scheme: dark) { :root { --ink: #e8e8e8; --soft: #a0a0a0; --rule: #3a3a3a; --paper: #161616;
  --0: #4aa8e0; --7: #aaaaaa; } }
body { font: 15px/1.45 system-ui, sans-serif; color: var(--ink); background: var(--paper); margin: 2rem auto;
  max-width: 1120px; padding: 0 1rem; }
h1 { font-size: 1.5rem; margin: 0; } h2 { font-size: 1.1rem; margin: 2rem 0 .5rem; }
.soft, figcaption { color: var(--soft); }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(420px, 1fr)); gap: 1rem; }
@media (max-width: 500px) { .charts { grid-template-columns: 1fr; } }
figure { margin: .8rem 0 0; } svg { width: 100%; height: auto; } svg text { font-size: 11px; fill: var(--soft); }
.grid { stroke: var(--rule); } polyline { fill: none; stroke-width: 1.5; } .faint { opacity: .3; stroke-width: 1; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
td, th { text-align: left; padding: .25rem .9rem .25rem 0; border-bottom: 1px solid var(--rule); white-space: nowrap; }
th { color: var(--soft); font-weight: normal; } pre { overflow-x: auto; font-size: 13px; } summary { cursor: pointer; }
.text td { white-space: pre-wrap; vertical-align: top; min-width: 14rem; overflow-wrap: anywhere; }
.key { display: inline-block; width: .8rem; height: .8rem; border-radius: 2px; margin-right: .4rem; }
""" + "".join(
    f".c{i} {{ stroke: var(--{i}); }} circle.c{i} {{ fill: var(--{i}); }} .key.k{i} {{ background: var(--{i}); }}\n"
    for i in range(8)
)


def write_report(folders: Sequence[Path], output: Path | None = None) -> Path:
    """Writes a report about all runs in some folders.

    Args:
        folders: run folders, or folders that hold some.
        output: the file; None for report.html in the folder that they share.

    Returns:
        The file.

    Raises:
        RunFolderError: there is no run, or the file can't be written.
    """
    folders = [folder.resolve() for folder in folders]
    found = list(dict.fromkeys(run for folder in folders for run in sorted(find_runs(folder), key=_natural)))
    if not found:
        where = ", ".join(map(str, folders))
        raise RunFolderError(f"No run is in {where}. Name a run.folder, or a folder above some.")
    root = Path(os.path.commonpath(folders))
    names = {run: run.name if run == root else str(run.relative_to(root)) for run in found}
    page = make_page(names[found[0]] if len(found) == 1 else root.name, [read(run, names[run]) for run in found])
    file = root / "report.html" if output is None else output
    try:
        write_atomically(file, page)
    except OSError as error:
        raise RunFolderError(f"{file} can't be written: {error}. Name another with --output.") from error
    return file


@dataclass(frozen=True)
class Run:
    """What a report needs to know of a run."""

    name: str
    state: RunState
    steps: list[dict[str, Any]]
    evaluations: list[dict[str, Any]]
    settings: dict[str, Any]
    summary: dict[str, Any]
    environment: dict[str, Any]
    generations: list[dict[str, Any]]


def read(folder: Path, name: str) -> Run:
    """Reads everything in a run folder that a report shows."""
    lines = list(read_metrics(folder))
    steps, evaluations = [line for line in lines if "loss" in line], [line for line in lines if "eval_loss" in line]
    summary, environment = read_json(folder / "summary.json"), read_json(folder / "environment.json")
    settings = read_settings(folder / "config.yaml")
    generations = list(read_metrics(folder, file=GENERATIONS_FILE))
    return Run(name, read_run(folder), steps, evaluations, settings, summary, environment, generations)


def make_page(title: str, runs: Sequence[Run]) -> str:
    """Returns the report as one file of HTML, without scripts and without anything from elsewhere."""
    body = [f"<h1>{escape(title)}</h1>", _figures(runs), _swept(runs), _charts(runs)]
    body += [_memory(runs[0]), _generations(runs[0]), _details(runs[0])] if len(runs) == 1 else []
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><title>{escape(title)}</title>'
        f"<style>{STYLE}</style></head><body>\n" + "\n".join(part for part in body if part) + "\n</body></html>\n"
    )


def _figures(runs: Sequence[Run]) -> str:
    """One row per run: the settings that differ, and the results."""
    differing = _differing(runs)
    rows = []
    for index, run in enumerate(runs):
        state = run.state
        cells = {"run": run.name} | {key: _value(run.settings.get(key)) for key in differing}
        cells |= {
            "status": state.status,
            "steps": show_number(state.step, ",") + (f" of {state.num_steps:,}" if state.num_steps else ""),
            "evaluation loss": show_number(state.eval_loss, ".4f"),
            "loss": show_number(state.loss, ".4f"),
            "tokens/s/GPU": show_number(state.tokens_per_second_per_gpu, ",.0f"),
            "peak GiB a GPU": show_number(state.gpu_peak_gib, ".1f"),
            "ranks": show_number(run.environment.get("num_ranks"), ""),
            "load s": show_number(run.summary.get("load_seconds"), ".1f"),
        }
        rows.append((index, cells))
    names = [name for name in rows[0][1] if any(cells[name] for _, cells in rows)]
    head = "".join(f"<th>{escape(name)}</th>" for name in names)
    body = ""
    for index, cells in rows:
        texts = [escape(cells[name]) for name in names]
        texts[0] = (f'<span class="key k{index % 8}"></span>' if len(runs) > 1 else "") + texts[0]
        body += "<tr>" + "".join(f"<td>{text}</td>" for text in texts) + "</tr>"
    errors = [f"<p>{escape(run.name)}: {escape(run.state.error)}</p>" for run in runs if run.state.error]
    return f'<div class="scroll"><table><tr>{head}</tr>{body}</table></div>{"".join(errors)}'


def _charts(runs: Sequence[Run]) -> str:
    loss: list[Series] = []
    for index, run in enumerate(runs):
        xs, ys = [line["step"] for line in run.steps], [line["loss"] for line in run.steps]
        if len(runs) == 1:
            loss.append(Series("loss of the step", xs, ys, index, "faint"))
        loss.append(Series(f"{run.name}, smoothed loss", xs, smooth(ys), index))
    evaluations = [
        Series(run.name, [e["step"] for e in run.evaluations], [e["eval_loss"] for e in run.evaluations], index, style)
        for index, run in enumerate(runs)
        for style in ("line", "dots")
    ]
    drawn = [chart("Training loss", loss), chart("Evaluation loss", evaluations)]
    for title, key in (
        ("Learning rate", "learning_rate"),
        ("Gradient norm, before clipping", "grad_norm"),
        ("Tokens a second a GPU", "tokens_per_second_per_gpu"),
        ("Peak memory of the GPU, GiB", "gpu_peak_gib"),
        ("Memory of the host process, GiB", "host_rss_gib"),
    ):
        series = [
            Series(run.name, [s["step"] for s in run.steps], [s.get(key) for s in run.steps], index)
            for index, run in enumerate(runs)
        ]
        drawn.append(chart(title, series))
    return f'<div class="charts">{"".join(drawn)}</div>'


def _swept(runs: Sequence[Run]) -> str:
    """How the loss depends on each setting that differs, with one dot per run."""
    drawn = []
    for key in _differing(runs):
        names = sorted({_value(run.settings.get(key)) for run in runs}, key=_order)
        dots = [
            Series(run.name, [names.index(_value(run.settings.get(key)))], [run.state.compared_loss], index, "dots")
            for index, run in enumerate(runs)
        ]
        drawn.append(chart(f"Last loss by {key}", dots, x_label=key, x_names=names))
    charts = "".join(drawn)
    return f'<div class="charts">{charts}</div>' if charts else ""


def _memory(run: Run) -> str:
    """The planned memory beside the measured one, phase by phase."""
    memory = run.summary.get("memory") or {}
    planned, measured = (memory.get(key) or {} for key in ("predicted", "measured"))
    columns = {
        "planned": planned.get("tensors_gib") or {},
        "tensors": measured.get("tensors_gib") or {},
        "reserved by torch": measured.get("reserved_gib") or {},
    }
    if not columns["tensors"]:  # nothing was measured, on a CPU or while the run is not over
        return ""
    phases = list(dict.fromkeys(phase for values in columns.values() for phase in values))
    rows = [[phase, *(show_number(values.get(phase), ".2f") for values in columns.values())] for phase in phases]
    rows.append(
        [
            "outside torch",
            show_number(planned.get("libraries_gib"), ".2f"),
            "",
            show_number(measured.get("outside_gib"), ".2f"),
        ]
    )
    rows.append(["needed in all", show_number(planned.get("needed_gib"), ".2f"), "", ""])
    return "<h2>Memory of a GPU by phase, GiB</h2>" + _table(["", *columns], rows)


def _generations(run: Run) -> str:
    """What the model wrote at the first evaluation and at the last one, beside what is in the data."""
    steps = sorted({row["step"] for row in run.generations})
    if not steps:
        return ""
    first, last = ([row for row in run.generations if row["step"] == step] for step in (steps[0], steps[-1]))
    head = ["prompt", f"step {steps[0]}", f"step {steps[-1]}", "in the data"]
    rows = [
        [after["prompt"], before["completion"], after["completion"], after["reference"]]
        for before, after in zip(first, last, strict=False)
    ]
    return "<h2>Generations</h2>" + _table(head, rows, "text")


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], kind: str = "") -> str:
    lines = ["".join(f"<th>{escape(text)}</th>" for text in head)]
    lines += ["".join(f"<td>{escape(text)}</td>" for text in row) for row in rows]
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return f'<div class="scroll"><table class="{kind}">{body}</table></div>'


def _details(run: Run) -> str:
    parts: list[str] = []
    changed = {k: v for k, v in run.settings.items() if k not in all_settings() or v != plain_default(k)}
    for title, text in (
        ("Settings that are not the defaults", "\n".join(f"{key}={_value(value)}" for key, value in changed.items())),
        ("All settings", "\n".join(f"{key}={_value(value)}" for key, value in run.settings.items())),
        ("Environment", json.dumps(run.environment, indent=2)),
        ("Summary", json.dumps(run.summary, indent=2)),
    ):
        is_open = " open" if not parts else ""
        parts.append(f"<details{is_open}><summary>{title}</summary><pre>{escape(text)}</pre></details>")
    return "<h2>Details</h2>" + "".join(parts)


def _differing(runs: Sequence[Run]) -> list[str]:
    """The settings that are not the same in all runs."""
    keys = dict.fromkeys(key for run in runs for key in run.settings if key.partition(".")[0] not in NOT_COMPARED)
    return [key for key in keys if len({_value(run.settings.get(key)) for run in runs}) > 1]


def _value(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _order(text: str) -> tuple[int, float, str]:
    """A key that sorts numbers by size, and words after them."""
    try:
        return 0, float(text), text
    except ValueError:
        return 1, 0.0, text


def _natural(path: Path) -> list[tuple[int, float, str]]:
    """A key that sorts as people expect: r=4 before r=16."""
    parts = re.split(r"(\d+(?:\.\d+)?)", str(path))
    return [(1, float(part), "") if index % 2 else (0, 0.0, part) for index, part in enumerate(parts)]
