"""What a report needs to know of a run, from the files of its folder. Imports no torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from qlora_fsdp.common.text import is_number, is_whole, plural, show_duration
from qlora_fsdp.config.recorded import read_settings
from qlora_fsdp.records.run_state import (
    CONFIG_FILE,
    ENVIRONMENT_FILE,
    GENERATIONS_FILE,
    SUMMARY_FILE,
    RunState,
    num_averaged,
    read_json,
    read_metrics,
    read_run,
)
from qlora_fsdp.records.run_summary import commands_for
from qlora_fsdp.report.charts import running_mean

SMOOTHED_PART = 50  # the smoothed loss is the mean over a 50th of the run's steps
MOST_STEPS = 10**12
ENDED_EARLY = ("failed", "interrupted", "stopped")


@dataclass(frozen=True)
class RunFiles:
    """The facts about a run that a report shows."""

    name: str
    state: RunState
    steps: list[dict[str, Any]]
    evaluations: list[dict[str, Any]]
    settings: dict[str, Any]
    summary: dict[str, Any]
    environment: dict[str, Any]
    generations: list[dict[str, Any]]
    swept: Mapping[str, str] = field(default_factory=dict)

    @property
    def span(self) -> int:
        """Steps over which the loss is smoothed; 1 in a run too short for it."""
        return max(1, round(len(self.steps) / SMOOTHED_PART))

    @property
    def smoothed_loss(self) -> list[float | None]:
        """For each step the mean loss of the last `span` steps; those whose gradient was not used have none."""
        losses = [None if line.get("skipped") else line["loss"] for line in self.steps]
        return running_mean(losses, self.span)

    @property
    def training_loss(self) -> float | None:
        """The final training loss, as everywhere: the mean of the last steps (`num_averaged`)."""
        return self.state.loss

    @property
    def num_averaged(self) -> int:
        """Steps that the final training loss is the mean of."""
        return num_averaged(sum(loss is not None for loss in self.smoothed_loss))

    @property
    def initial_eval_loss(self) -> float | None:
        """The loss of the held-out rows before training; None where that was not evaluated."""
        first = self.evaluations[0] if self.evaluations else {}
        return first.get("eval_loss") if first.get("step") == 0 else None


def read_run_files(folder: Path, name: str, swept: Mapping[str, str]) -> RunFiles:
    """Reads everything in a run folder that a report shows."""
    lines = _with_steps(read_metrics(folder))
    return RunFiles(
        name,
        read_run(folder),
        steps=[line for line in lines if _has_loss(line)],
        evaluations=[line for line in lines if is_number(line.get("eval_loss"))],
        settings=read_settings(folder / CONFIG_FILE),
        summary=read_json(folder / SUMMARY_FILE),
        environment=read_json(folder / ENVIRONMENT_FILE),
        generations=_with_steps(read_metrics(folder, file=GENERATIONS_FILE)),
        swept=swept,
    )


def _with_steps(lines: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    return [line for line in lines if is_whole(line["step"]) and 0 <= line["step"] < MOST_STEPS]


def _has_loss(line: dict[str, Any]) -> bool:
    """Whether a line of metrics.jsonl is about a training step: its loss is null if its gradient was not used."""
    return "loss" in line and (line["loss"] is None or is_number(line["loss"]))


def describe_duration(run: RunFiles) -> str:
    """When its last start began, how long that took, and how long all steps took, those of earlier starts too."""
    seconds = run.summary.get("seconds")
    is_resumed = run.summary.get("resume_seconds") is not None
    started = str(run.environment.get("time") or "")[:16].replace("T", " ")
    parts = []
    if started:
        parts.append(f"resumed {started}" if is_resumed else f"started {started}")
    if seconds is not None:
        parts.append(f"{show_duration(seconds)} from then on" if is_resumed else show_duration(seconds))
    if run.steps:
        known = [line["seconds"] for line in run.steps if is_number(line.get("seconds"))]
        in_steps = sum(known)
        parts.append(f"{show_duration(in_steps)} in all {plural(len(run.steps), 'step')}")
    if run.state.eta_seconds is not None:
        parts.append(f"{show_duration(run.state.eta_seconds)} to go")
    return ", ".join(parts)


def describe_model(run: RunFiles) -> str:
    """The base model, and how its weights are stored."""
    settings = run.settings
    path = settings.get("model.path")
    name = settings.get("model.name")
    named = f"{path} ({name})" if path and name != "custom" else str(path or name or "")
    kind = "full precision"
    compressed = settings.get("quant.compressed_tensors", "none")
    if compressed != "none":
        kind = str(compressed)
    elif settings.get("quant.load_in_4bit"):
        kind = str(settings.get("quant.bnb_4bit_quant_type", "4 bits"))
    elif settings.get("quant.load_in_8bit"):
        kind = "int8"
    return f"{named}, {kind}" if named else ""


def describe_data(run: RunFiles) -> str:
    """Describe the data that the run trains on."""
    settings = run.settings
    often = run.summary.get("mix")
    if isinstance(often, dict) and often:  # how often an epoch has the rows of each data set
        return "; ".join(f"{path}: {text}" for path, text in often.items())
    if settings.get("data.format") == "random":
        return "random tokens"
    found = settings.get("data.mix") or settings.get("data.path") or ""
    if isinstance(found, list | dict):
        return ", ".join(map(str, found))
    return str(found)


def describe_hardware(run: RunFiles) -> str:
    """The GPUs and the number of ranks."""
    environment = run.environment
    if not environment:
        return ""
    gpus = Counter(map(str, environment.get("gpus") or ()))
    parts = [f"{number} x {name}" for name, number in gpus.items()] or ["CPU"]
    ranks = environment.get("num_ranks")
    a_node = environment.get("num_ranks_a_node")
    if isinstance(ranks, int):
        parts.append(plural(ranks, "rank"))
        if isinstance(a_node, int) and 0 < a_node < ranks:
            parts.append(f"{plural(ranks // a_node, 'node')}, of which this is one")
    host = environment.get("host")
    if host:
        parts.append(f"on {host}")
    return ", ".join(parts)


def next_commands(run: RunFiles) -> list[str]:
    """The commands to type next: to use a finished run's adapter, or to resume a run that ended early."""
    adapter = run.state.adapter
    if adapter is None:
        command = run.environment.get("command")
        ended_early = run.state.status in ENDED_EARLY
        return [str(command)] if command and ended_early else []
    settings = run.settings
    is_causal = settings.get("task.name", "causal_lm") in ("causal_lm", "preference", "grpo", "distill")
    is_random = settings.get("model.weights") == "random"
    trusts_code = settings.get("model.trust_remote_code") is True
    return commands_for(adapter, is_causal, is_random, trusts_code)
