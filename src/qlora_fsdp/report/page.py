"""Writes the report of one run or of several: figures, charts, differences, settings and environment.

It is one page with its style, for light and dark screens.

The sections of a report as HTML: overview, figures, charts, memory, generations, details.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from qlora_fsdp.common.errors import RunFolderError
from qlora_fsdp.common.files import write_atomically
from qlora_fsdp.common.text import plural, show_number, without_directions
from qlora_fsdp.config.recorded import plain_default
from qlora_fsdp.config.settings import all_settings
from qlora_fsdp.records.run_state import REPORT_FILE, SWEEP_FILE, RunState, find_runs, read_jobs
from qlora_fsdp.report.charts import NUM_COLOURS, Series, chart
from qlora_fsdp.report.run_files import (
    ENDED_EARLY,
    RunFiles,
    describe_data,
    describe_duration,
    describe_hardware,
    describe_model,
    next_commands,
    read_run_files,
)

STYLE = """
:root { color-scheme: light dark; --ink: #1a1a1a; --soft: #6b6b6b; --rule: #dddddd; --paper: #ffffff; --bad: #b3261e;
  --0: #0072b2; --1: #d55e00; --2: #009e73; --3: #cc79a7; --4: #56b4e9; --5: #e69f00; --6: #7a5cc4; --7: #555555; }
@media (prefers-color-scheme: dark) { :root { --ink: #e8e8e8; --soft: #a0a0a0; --rule: #3a3a3a; --paper: #161616;
  --bad: #ff8a80; --0: #4aa8e0; --7: #aaaaaa; } }
body { font: 15px/1.45 system-ui, sans-serif; color: var(--ink); background: var(--paper); margin: 2rem auto;
  max-width: 1120px; padding: 0 1rem; }
h1 { font-size: 1.5rem; margin: 0 0 .6rem; overflow-wrap: anywhere; } h2 { font-size: 1.1rem; margin: 2rem 0 .5rem; }
figcaption { color: var(--soft); } figcaption b { color: var(--ink); font-weight: 600; }
.bad { color: var(--bad); white-space: pre-wrap; overflow-wrap: anywhere; }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(420px, 1fr)); gap: 1rem; }
@media (max-width: 500px) { .charts { grid-template-columns: 1fr; } }
figure { margin: .8rem 0 0; } svg { width: 100%; height: auto; } svg text { font-size: 11px; fill: var(--soft); }
.grid { stroke: var(--rule); } polyline { fill: none; stroke-width: 1.5; } .faint { opacity: .35; stroke-width: 1; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
td, th { text-align: left; padding: .25rem .9rem .25rem 0; border-bottom: 1px solid var(--rule); white-space: nowrap; }
th { color: var(--soft); font-weight: normal; vertical-align: top; }
.facts td { white-space: pre-wrap; overflow-wrap: anywhere; } .facts { margin-bottom: 1.2rem; }
.facts pre { white-space: pre-wrap; overflow-wrap: anywhere; }
pre { overflow-x: auto; font-size: 13px; margin: .3rem 0; } summary { cursor: pointer; }
.text td { white-space: pre-wrap; vertical-align: top; min-width: 14rem; overflow-wrap: anywhere; }
.key { display: inline-block; width: .8rem; height: .8rem; border-radius: 2px; margin: 0 .4rem 0 .2rem; }
.thin { height: .15rem; vertical-align: middle; }
""" + "".join(
    f".c{i} {{ stroke: var(--{i}); }} circle.c{i} {{ fill: var(--{i}); }} .key.k{i} {{ background: var(--{i}); }}\n"
    for i in range(NUM_COLOURS)
)
NOT_COMPARED = (
    "run",
    "launch",
    "slurm",
    "skypilot",
    "kubernetes",
    "tracking",
    "hub",
)  # sections that say nothing about how a run trains


NUM_ANSWERS = 8  # of a step with rewards that a report shows


def write_report(folders: Sequence[Path], output: Path | None = None) -> Path:
    """Writes a report about all runs in some folders. Returns its file.

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
    swept_settings = {run: settings for folder in folders for run, settings in read_jobs(folder / SWEEP_FILE)}
    title = names[found[0]] if len(found) == 1 else root.name
    runs = [read_run_files(run, names[run], swept_settings.get(run, {})) for run in found]
    page = without_directions(make_page(title, runs)).encode(errors="backslashreplace").decode()  # half characters
    file = root / REPORT_FILE if output is None else output
    try:
        write_atomically(file, page)
    except OSError as error:
        raise RunFolderError(
            f"{file} can't be written: {error.strerror or error}. Name another with --output."
        ) from error
    return file


def make_page(title: str, runs: Sequence[RunFiles]) -> str:
    """Returns the report as one file of HTML, without scripts and without anything from elsewhere."""
    body = [f"<h1>{escape(title)}</h1>"]
    if len(runs) == 1:
        run = runs[0]
        body += [overview(run), charts(runs), generations(run), memory(run), details(run)]
    else:
        body += [figures(runs), swept(runs), charts(runs)]
    content = "\n".join(part for part in body if part)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><title>{escape(title)}</title>'
        f"<style>{STYLE}</style></head><body>\n{content}\n</body></html>\n"
    )


def _natural(path: Path) -> list[tuple[int, float, str]]:
    """A key that sorts as people expect: r=4 before r=16."""
    parts = re.split(r"(\d+(?:\.\d+)?)", str(path))
    return [(1, float(part), "") if index % 2 else (0, 0.0, part) for index, part in enumerate(parts)]


def overview(run: RunFiles) -> str:
    """The top of a run's own report: what it is, how it went, what there is now, and what to type next."""
    state = run.state
    status = state.status
    if state.step is not None:
        status += f", {_steps_of_all(state)} steps"
    rows = {
        "Status": status,
        "Time": describe_duration(run),
        "Model": describe_model(run),
        "Data": describe_data(run),
        "Hardware": describe_hardware(run),
        "Evaluation loss": _before_and_after(run),
        "Training loss": _training_loss(run),
    }
    doubt = run.summary.get("doubt")
    if isinstance(doubt, str):
        rows["Note"] = doubt
    if state.tokens_per_second_per_gpu:
        rows["Speed"] = f"{state.tokens_per_second_per_gpu:,.0f} tokens/s/GPU"
    if state.gpu_peak_gib:
        rows["Memory"] = f"at most {state.gpu_peak_gib:.1f} GiB a GPU in a step"
    if state.adapter:
        rows["Adapter"] = str(state.adapter)
        what_next = "Next"
    elif state.checkpoint:
        rows["Checkpoint"] = str(state.checkpoint)
        what_next = "To go on"
    else:
        what_next = "To start again"
    lines = [f"<tr><th>{name}</th><td>{escape(text)}</td></tr>" for name, text in rows.items() if text]
    commands = "\n".join(next_commands(run))
    if commands:
        lines.append(f"<tr><th>{what_next}</th><td><pre>{escape(commands)}</pre></td></tr>")
    error = f'<p class="bad">{escape(state.error)}</p>' if state.error else ""
    return f'{error}<table class="facts">{"".join(lines)}</table>'


def figures(runs: Sequence[RunFiles]) -> str:
    """One row per run: the settings that differ, and the results. The lowest loss of several runs is marked."""
    keys = differing(runs)
    compared = [run for run in runs if run.state.status not in ENDED_EARLY]
    has_eval = all(run.state.eval_loss is not None for run in compared)
    losses = {run.name: run.state.eval_loss if has_eval else run.training_loss for run in compared}
    finite = [loss for loss in losses.values() if loss is not None and math.isfinite(loss)]
    lowest = min(finite, default=None) if len(runs) > 1 else None
    rows = []
    for run in runs:
        state = run.state
        cells = {"run": run.name} | {key: value(run.settings.get(key)) for key in keys}
        cells |= {
            "status": state.status,
            "steps": _steps_of_all(state),
            "evaluation loss": show_number(state.eval_loss, ".4f"),
            "training loss": show_number(run.training_loss, ".4f"),
            "tokens/s/GPU": show_number(state.tokens_per_second_per_gpu, ",.0f"),
            "peak GiB a GPU": show_number(state.gpu_peak_gib, ".1f"),
            "ranks": show_number(run.environment.get("num_ranks"), ""),
            "load s": show_number(run.summary.get("load_seconds"), ".1f"),
        }
        if lowest is not None and losses.get(run.name) == lowest:
            cells["evaluation loss" if has_eval else "training loss"] += " (lowest)"
        rows.append(cells)
    names = [name for name in rows[0] if any(cells[name] for cells in rows)]
    head = "".join(f"<th>{escape(name)}</th>" for name in names)
    body = ""
    for index, cells in enumerate(rows):
        texts = [escape(cells[name]) for name in names]
        texts[0] = _key(index) + texts[0]
        body += "<tr>" + "".join(f"<td>{text}</td>" for text in texts) + "</tr>"
    errors = [f'<p class="bad">{escape(f"{run.name}: {run.state.error}")}</p>' for run in runs if run.state.error]
    note = "<p>The training loss is the mean over the last 50th of a run's steps.</p>"
    return f'<div class="scroll"><table><tr>{head}</tr>{body}</table></div>{note}{"".join(errors)}'


# Figures of single steps that have a chart where a run has them, by their keys in metrics.jsonl.
CURVES = {
    "learning_rate": "Learning rate",
    "grad_norm": "Gradient norm, before clipping",
    "rewards/margins": "Rewards, chosen less rejected",
    "rewards/accuracies": "Pairs whose chosen answer has the higher reward",
    "reward_std": "Spread of rewards",
    "frac_reward_zero_std": "Part of the prompts whose answers have one reward",
    "kl": "Divergence from the reference, nats a token",
    "entropy": "Entropy, nats a token",
    "teacher_log_prob": "Log-probability that the teacher gives a token of an answer",
    "completions/mean_length": "Tokens of an answer, mean",
    "completions/clipped_ratio": "Part of the answers without an end",
    "sampling/sampling_logp_difference/mean": "Log-probabilities of slots and training apart, mean",
    "sampling/sampling_logp_difference/p99": "Log-probabilities of slots and training apart, 99 % below",
    "rollout_tokens_per_second": "Tokens a second while answers are written",
    "tokens_per_second_per_gpu": "Tokens a second a GPU",
    "gpu_peak_gib": "Peak memory of the GPU, GiB",
    "host_rss_gib": "Memory of the host process, GiB",
}
_REWARD_OF_FUNCTION = re.compile(r"rewards/(.+)/mean")


def charts(runs: Sequence[RunFiles]) -> str:
    """The curves of all runs, one chart for each figure. Training and evaluation loss have a chart each."""
    drawn = [_loss_of_one(runs[0]) if len(runs) == 1 else _loss_of_several(runs)]
    evaluations = [
        Series(run.name, [e["step"] for e in run.evaluations], [e["eval_loss"] for e in run.evaluations], index, style)
        for index, run in enumerate(runs)
        for style in ("line", "dots")
    ]
    drawn.append(chart("Evaluation loss", evaluations))
    drawn += _rewards(runs)
    for key, title in CURVES.items():
        series = [
            Series(run.name, [s["step"] for s in run.steps], [s.get(key) for s in run.steps], index)
            for index, run in enumerate(runs)
        ]
        drawn.append(chart(title, series))
    return f'<div class="charts">{"".join(drawn)}</div>'


def _rewards(runs: Sequence[RunFiles]) -> list[str]:
    """Rewards of answers that the model writes: of one run each function's too, and those of held-out prompts."""
    drawn = []
    if len(runs) == 1:
        lines = runs[0].steps
        steps = [line["step"] for line in lines]
        keys = dict.fromkeys(key for line in lines for key in line if _REWARD_OF_FUNCTION.fullmatch(key))
        series = [Series("all, weighed", steps, [line.get("reward") for line in lines])]
        for colour, key in enumerate(keys, 1):
            name = key.removeprefix("rewards/").removesuffix("/mean")
            series.append(Series(name, steps, [line.get(key) for line in lines], colour))
        drawn.append(chart("Rewards, mean over the answers of a step", series, has_legend=True))
    else:
        series = [
            Series(run.name, [line["step"] for line in run.steps], [line.get("reward") for line in run.steps], index)
            for index, run in enumerate(runs)
        ]
        drawn.append(chart("Reward, mean over the answers of a step", series))
    held_out = dict.fromkeys(key for run in runs for line in run.evaluations for key in line)
    for key in held_out:
        if key != "eval_reward" and not key.startswith("eval_pass@"):
            continue
        series = [
            Series(run.name, [e["step"] for e in run.evaluations], [e.get(key) for e in run.evaluations], index, style)
            for index, run in enumerate(runs)
            for style in ("line", "dots")
        ]
        drawn.append(chart(f"Held-out prompts: {key.removeprefix('eval_')}", series))
    return drawn


def swept(runs: Sequence[RunFiles]) -> str:
    """The loss of a sweep's runs by each setting that varied, with one dot per run."""
    has_eval = all(run.state.eval_loss is not None for run in runs if run.state.status == "finished")
    drawn = []
    for key in dict.fromkeys(key for run in runs for key in run.swept):
        names = sorted({run.swept[key] for run in runs if key in run.swept}, key=_order)
        dots = [
            Series(
                run.name,
                [names.index(run.swept[key])],
                [run.state.eval_loss if has_eval else run.training_loss],
                index,
                "dots",
            )
            for index, run in enumerate(runs)
            if key in run.swept and run.state.status == "finished"
        ]
        if len(names) > 1:
            title = f"{'Evaluation' if has_eval else 'Training'} loss by {key}"
            drawn.append(chart(title, dots, x_label=key, x_names=names))
    together = "".join(drawn)
    return f'<div class="charts">{together}</div>' if together else ""


def memory(run: RunFiles) -> str:
    """The planned memory beside the measured one, phase by phase."""
    found = _part(run.summary, "memory")
    planned = _part(found, "predicted")
    measured = _part(found, "measured")
    columns = {
        "planned": _part(planned, "tensors_gib"),
        "tensors": _part(measured, "tensors_gib"),
        "reserved by torch": _part(measured, "reserved_gib"),
    }
    if not columns["tensors"]:  # nothing was measured, on a CPU or while the run is not over
        return ""
    phases = list(dict.fromkeys(phase for values in columns.values() for phase in values))
    rows = [[phase, *(show_number(values.get(phase), ".2f") for values in columns.values())] for phase in phases]
    libraries = show_number(planned.get("libraries_gib"), ".2f")
    outside = show_number(measured.get("outside_gib"), ".2f")
    rows.append(["outside torch", libraries, "", outside])
    rows.append(["needed in all", show_number(planned.get("needed_gib"), ".2f"), "", ""])
    return "<h2>Memory of a GPU by phase, GiB</h2>" + _table(["", *columns], rows)


def _cells(line: Mapping[str, Any], *keys: str) -> list[str]:
    """These values of a line as text; empty where it has none."""
    return [str(line.get(key, "")) for key in keys]


def _part(values: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """A mapping within another one; empty if it is not there."""
    return values.get(name) or {}


def generations(run: RunFiles) -> str:
    """The model's texts at the first and the last evaluation, beside those in the data; or its answers with rewards."""
    steps = sorted({row["step"] for row in run.generations})
    if not steps:
        return ""
    first = [line for line in run.generations if line["step"] == steps[0]]
    last = [line for line in run.generations if line["step"] == steps[-1]]
    if any("rewards" in line for line in last):  # each step has prompts of its own
        head = ["step", "prompt", "answer", "rewards", "in the data"]
        shown = [*first[:NUM_ANSWERS], *(last[:NUM_ANSWERS] if len(steps) > 1 else [])]
        rows = [_cells(line, "step", "prompt", "completion", "rewards", "reference") for line in shown]
    elif len(steps) == 1:
        head = ["prompt", f"step {steps[-1]}", "in the data"]
        rows = [_cells(line, "prompt", "completion", "reference") for line in last]
    else:
        head = ["prompt", f"step {steps[0]}", f"step {steps[-1]}", "in the data"]
        rows = []
        for before, after in zip(first, last, strict=False):
            rows.append(
                [*_cells(after, "prompt"), *_cells(before, "completion"), *_cells(after, "completion", "reference")]
            )
    return "<h2>What the model wrote</h2>" + _table(head, rows, "text")


def details(run: RunFiles) -> str:
    """Settings, environment and summary, as the run folder has them."""
    parts: list[str] = []
    changed = {
        key: found for key, found in run.settings.items() if key not in all_settings() or found != plain_default(key)
    }
    for title, text in (
        ("Settings that are not the defaults", _list_settings(changed)),
        ("All settings", _list_settings(run.settings)),
        ("Environment", json.dumps(run.environment, indent=2)),
        ("Summary", json.dumps(run.summary, indent=2)),
    ):
        is_open = " open" if not parts else ""
        parts.append(f"<details{is_open}><summary>{title}</summary><pre>{escape(text)}</pre></details>")
    return "<h2>Details</h2>" + "".join(parts)


def differing(runs: Sequence[RunFiles]) -> list[str]:
    """The settings that are not the same in all runs."""
    keys = dict.fromkeys(key for run in runs for key in run.settings if key.partition(".")[0] not in NOT_COMPARED)
    return [key for key in keys if len({value(run.settings.get(key)) for run in runs}) > 1]


def value(found: Any) -> str:
    """A setting's value as text."""
    return found if isinstance(found, str) else json.dumps(found)


def _list_settings(settings: Mapping[str, Any]) -> str:
    return "\n".join(f"{key}={value(found)}" for key, found in settings.items())


def _steps_of_all(state: RunState) -> str:
    """The steps of a run that are done, and how many there will be if that is known."""
    done = show_number(state.step, ",")
    return f"{done} of {state.num_steps:,}" if state.num_steps else done


def _before_and_after(run: RunFiles) -> str:
    before = run.initial_eval_loss
    after = run.state.eval_loss
    if after is None or not run.evaluations:
        return show_number(after, ".4f")
    last = run.evaluations[-1]["step"]
    if last == 0:
        return f"{after:.4f} before training"
    if before is None:
        return f"{after:.4f} at step {last:,}"
    return f"{before:.4f} before training, {after:.4f} at step {last:,}"


def _training_loss(run: RunFiles) -> str:
    loss = run.training_loss
    if loss is None:
        return ""
    last = "step" if run.num_averaged == 1 else f"{run.num_averaged} steps, their mean"
    return f"{loss:.4f} in the last {last}"


def _span(run: RunFiles) -> str:
    return f"mean of {plural(run.span, 'step')}"


def _loss_of_one(run: RunFiles) -> str:
    xs = [line["step"] for line in run.steps]
    ys = [line["loss"] for line in run.steps]
    if run.span == 1:
        return chart("Training loss of each step", [Series("loss", xs, ys)])
    series = [Series("each step", xs, ys, style="faint"), Series(_span(run), xs, run.smoothed_loss, 1)]
    return chart("Training loss", series, has_legend=True)


def _loss_of_several(runs: Sequence[RunFiles]) -> str:
    series = [
        Series(f"{run.name}, {_span(run)}", [line["step"] for line in run.steps], run.smoothed_loss, index)
        for index, run in enumerate(runs)
    ]
    return chart("Training loss, mean over a 50th of the run's steps", series)


def _key(index: int) -> str:
    return f'<span class="key k{index % NUM_COLOURS}"></span>'


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], kind: str = "") -> str:
    lines = ["".join(f"<th>{escape(text)}</th>" for text in head)]
    lines += ["".join(f"<td>{escape(text)}</td>" for text in row) for row in rows]
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return f'<div class="scroll"><table class="{kind}">{body}</table></div>'


def _order(text: str) -> tuple[int, float, str]:
    """A key that sorts numbers by size, and words after them."""
    try:
        return 0, float(text), text
    except ValueError:
        return 1, 0.0, text
