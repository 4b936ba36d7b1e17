"""report.html and the status table, from the files of runs that were never run."""

from __future__ import annotations

import fcntl
import html
import json
import math
import os
import re
import subprocess
import sys
import time
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.lines import write_lines
from tests.helpers.quick_config import load_config

from qlora_fsdp.config.reading.compose import to_yaml
from qlora_fsdp.records.run_state import LOCK, describe_attempt, read_run
from qlora_fsdp.report.__main__ import main as report
from qlora_fsdp.report.charts import Series, chart, running_mean, ticks
from qlora_fsdp.report.page import write_report
from qlora_fsdp.report.run_files import read_run_files
from qlora_fsdp.report.sweep_table import describe_job, show_results
from qlora_fsdp.status import main as status


def make_run(folder: Path, r: int, summary: dict[str, Any] | None, num_steps: int = 1500) -> None:
    folder.mkdir(parents=True)
    config = load_config(["model=tiny", "data=random", "training.max_steps=9", f"lora.r={r}", "run.name=<b>&"])
    (folder / "config.yaml").write_text(to_yaml(config))
    (folder / "environment.json").write_text(json.dumps({"num_ranks": 2}))
    common = {"num_steps": 2000, "seconds": 2.0, "tokens_per_second_per_gpu": 50.0, "gpu_peak_gib": 3.5}
    lines = [
        {"step": step, "loss": None if step == 7 else 3 / step + r, "grad_norm": 1.0, **common}
        for step in range(1, num_steps + 1)
    ]
    lines.insert(1000, {"step": 1000, "eval_loss": r + 0.25})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 15')
    if summary is not None:
        (folder / "summary.json").write_text(json.dumps(summary))


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    for r, summary in ((16, {"status": "finished", "steps": 1500, "eval_loss": 16.25}), (4, None)):
        make_run(tmp_path / "all" / f"r{r}", r, summary)
    return tmp_path / "all"


class Page(HTMLParser):
    """Collects what a page has, and whether its tags are balanced."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_report_compares_runs_in_one_file_that_needs_nothing_else(runs: Path, capsys: pytest.CaptureFixture[str]):
    assert report([str(runs)]) == 0
    assert capsys.readouterr().out.strip() == str(runs / "report.html")
    text = (runs / "report.html").read_text()
    page = Page(text)
    assert not page.open
    tags = [tag for tag, _ in page.found]
    assert not {"script", "link", "img", "iframe"} & set(tags) and "url(" not in text and "http" not in text
    assert "1,500 of 2,000" in text and text.index(">r4<") < text.index(">r16<")
    assert "loss by" not in text, "they are not of a sweep"
    assert "16.2500" in text and "4.2500 (lowest)" in text
    for _, attributes in page.found:
        for x, y in re.findall(r"([\d.e+-]+),([\d.e+-]+)", attributes.get("points") or ""):
            assert 0 <= float(x) <= 520 and 0 <= float(y) <= 240
    assert tags.count("polyline") >= 2 * 4


def test_report_of_one_run_has_its_settings(runs: Path):
    assert report([str(runs / "r4"), "--output", str(runs / "one.html")]) == 0
    text = (runs / "one.html").read_text()
    assert "lora.r=4" in text and "run.name=&lt;b&gt;&amp;" in text and "Environment" in text


def plain(file: Path) -> str:
    """The text of a page, without tags."""
    return html.unescape(re.sub(r"<[^>]*>", " ", file.read_text().partition("</style>")[2]))


def test_the_top_of_a_report_says_what_there_is_and_what_to_type_next(tmp_path: Path):
    folder = tmp_path / "my run"
    make_run(folder, 4, {"status": "finished", "steps": 1500, "eval_loss": 4.25, "seconds": 3600.0})
    (folder / "adapter").mkdir()
    (folder / "adapter" / "chat_template.jinja").touch()
    assert report([str(folder)]) == 0
    text = plain(folder / "report.html")
    top = text.partition("Learning rate")[0]
    for part in (
        "finished, 1,500 of 2,000 steps",
        "1:00:00, 0:50:00 in all 1,500 steps",
        "tiny, nf4",
        "random tokens",
        "CPU, 2 ranks",
        f"qlora-fsdp chat adapter='{folder}/adapter'",
    ):
        assert part in top, part
    # The smoothed line says over how many steps, and ends near the final loss, the mean of the last ten steps.
    (mean,) = set(re.findall(r"mean of 30 steps, ([\d.]+) at the end", top))
    (loss,) = re.findall(r"Training loss +([\d.]+) in the last 10 steps", top)
    assert float(loss) == pytest.approx(float(mean), abs=1e-4) and float(loss) == pytest.approx(4.002, abs=1e-3)
    assert re.search(r"Evaluation loss +4\.2500 at step 1,000", top)


def test_a_failed_report_begins_with_the_reason(runs: Path):
    summary = {"status": "failed", "error": "cuda:0 is out of memory.\nSet <b>"}
    (runs / "r4" / "summary.json").write_text(json.dumps(summary))
    (runs / "r4" / "environment.json").write_text(json.dumps({"command": "python -m qlora_fsdp.train a=b"}))
    assert report([str(runs / "r4")]) == 0
    text = plain(runs / "r4" / "report.html")
    assert text.index("Set <b>") < text.index("failed, 1,500") < text.index("python -m qlora_fsdp.train a=b")
    assert "To start again" in text and "qlora-fsdp chat" not in text


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    """A sweep that was copied from another machine. A job failed, and has no loss to compare."""
    jobs = []
    for r in (4, 16, 64):
        status = {"status": "failed" if r == 64 else "finished", "eval_loss": 0.5 + r}
        make_run(tmp_path / "sweep" / f"r={r}", r, status, num_steps=20)
        jobs.append({"overrides": {"lora.r": str(r), "quant": "nf4"}, "folder": f"/cluster/sweep/r={r}"})
    (tmp_path / "sweep" / "sweep.json").write_text(json.dumps({"jobs": jobs}))
    return tmp_path / "sweep"


def test_the_report_of_a_sweep_shows_losses_by_what_was_swept(sweep: Path):
    write_report([sweep])
    page = (sweep / "report.html").read_text()
    (figure,) = re.findall(r"<figure><figcaption><b>Evaluation loss by lora.r</b>.*?</figure>", page)
    assert figure.count("<circle") == 2 and "by quant" not in page
    assert "4.5000 (lowest)" in page


def test_a_sweep_that_was_moved_has_its_jobs_where_they_are(sweep: Path, capsys: pytest.CaptureFixture[str]):
    assert status([str(sweep)]) == 0
    states = [line.split()[:2] for line in capsys.readouterr().out.splitlines()]
    assert states[1:4] == [["r=16", "finished"], ["r=4", "finished"], ["r=64", "failed"]] and len(states) == 4
    assert report([str(sweep)]) == 0
    losses = [job["eval_loss"] for job in json.loads((sweep / "sweep.json").read_text())["jobs"]]
    assert losses == [4.5, 16.5, 64.5] and "16.5000" in capsys.readouterr().out


def test_a_sweep_that_may_only_be_read_is_reported_elsewhere(
    sweep: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def refuse(folder: Path, jobs: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("qlora_fsdp.report.__main__.write_results", refuse)
    assert report([str(sweep), "--output", str(tmp_path / "mine.html")]) == 0
    found = capsys.readouterr()
    assert "sweep.json and sweep.csv stay as they are: [Errno 13]" in found.err and "4.5000" in found.out
    assert (tmp_path / "mine.html").is_file()


def test_a_diverged_run_is_not_the_best_and_hides_no_other(tmp_path: Path):
    losses = {"a": math.nan, "b": 2.0, "c": 3.0}
    for name, loss in losses.items():
        make_run(tmp_path / name, 16, {"status": "finished", "eval_loss": loss}, num_steps=10)
    table = show_results(tmp_path, [describe_job(tmp_path / name, {"job": name}) for name in losses])
    assert [line.split()[:2] for line in table.splitlines() if "*" in line] == [["*", "b"]]
    assert report([str(tmp_path)]) == 0
    assert re.findall(r"[\w.]+ \(lowest\)", (tmp_path / "report.html").read_text()) == ["2.0000 (lowest)"]


def test_runs_are_compared_by_evaluation_loss_though_one_failed_before_it(tmp_path: Path):
    for r, loss in ((4, 3.0), (16, 2.0)):
        make_run(tmp_path / f"r={r}", r, {"status": "finished", "eval_loss": loss}, num_steps=10)
    make_run(tmp_path / "failed", 8, {"status": "failed"}, num_steps=0)
    (tmp_path / "failed" / "metrics.jsonl").write_text("")
    assert report([str(tmp_path)]) == 0
    assert re.findall(r"[\w.]+ \(lowest\)", (tmp_path / "report.html").read_text()) == ["2.0000 (lowest)"]


def test_the_training_loss_of_a_report_leaves_out_steps_whose_gradient_was_not_used(tmp_path: Path):
    losses = [2.0, 3.0, 1e20, *[4.0] * 97]
    lines = [{"step": n, "loss": loss} | ({"skipped": True} if n == 2 else {}) for n, loss in enumerate(losses)]
    write_lines(tmp_path / "metrics.jsonl", lines)
    run = read_run_files(tmp_path, "run", {})
    assert run.span == 2 and run.smoothed_loss[:4] == [2.0, 2.5, None, 4.0]
    assert run.training_loss == 4.0


def test_lines_that_are_no_figures_are_left_out(runs: Path):
    common = '"num_steps": 9, "seconds": 1, "tokens_per_second_per_gpu": 1'
    with (runs / "r16" / "metrics.jsonl").open("a") as file:
        file.write(f'\n{{"step": "<b>", "loss": 1, {common}}}\n{{"step": 3, "loss": NaN, {common}}}\n')
        file.write('{"step": 4, "eval_loss": null}\n')
    (runs / "r16" / "generations.jsonl").write_text('{"step": 1, "prompt": ["<script>"]}\n{"step": []}\n')
    write_report([runs / "r16"])
    assert "<script>" not in (runs / "r16" / "report.html").read_text()


def test_report_of_one_run_has_memory_by_phase_against_the_plan(runs: Path):
    planned = {"tensors_gib": {"load": 9.5, "forward": 19.25}, "libraries_gib": 1.75, "needed_gib": 23.5}
    measured = {"tensors_gib": {"load": 9.46, "proof": 10.1, "forward": 19.75}, "reserved_gib": {"forward": 21.4}}
    memory = {"predicted": planned, "measured": measured | {"outside_gib": 1.5}}
    (runs / "r16" / "summary.json").write_text(json.dumps({"status": "finished", "memory": memory}))
    assert report([str(runs / "r16")]) == 0
    text = re.sub(r"</?t[dr]>", " ", (runs / "r16" / "report.html").read_text())
    for cells in ("load   9.50   9.46", "forward   19.25   19.75   21.40", "proof     10.10", "needed in all   23.50"):
        assert re.search(r"\s+".join(map(re.escape, cells.split())), text), cells


def test_without_runs_it_says_so(tmp_path: Path, runs: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "empty").mkdir()
    assert [command([str(tmp_path / "empty")]) for command in (report, status)] == [2, 2]
    assert capsys.readouterr().err.count("No run is in") == 2
    assert [command([str(runs), "/nowhere"]) for command in (report, status)] == [2, 2]
    assert capsys.readouterr().err.count("/nowhere is not there") == 2


def test_status_tells_a_run_that_was_killed_from_one_that_runs(runs: Path, capsys: pytest.CaptureFixture[str]):
    (runs / "r4" / LOCK).touch()
    with (runs / "r4" / LOCK).open("rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        state = read_run(runs / "r4")
        assert (state.status, state.step, state.num_steps, state.eval_loss) == ("running", 1500, 2000, 4.25)
        assert state.eta_seconds == pytest.approx(1000)
    assert read_run(runs / "r4").status == "stopped"
    (runs / "r4" / "checkpoints" / "step-00001400").mkdir(parents=True)
    (runs / "r4" / "checkpoints" / "step-00001400" / "manifest.json").touch()
    assert status([str(runs)]) == 0
    out = capsys.readouterr().out
    assert re.search(r"^r16 +finished +1500/2000 .*16\.2500", out, re.MULTILINE)
    assert re.search(r"^r4 +stopped +1500/2000 .* step 1400, 0:\d\d:\d\d ago", out, re.MULTILINE)
    assert "r4: ended without a word" in out and "The same command goes on from step 1400." in out
    os.utime(runs / "r4" / "environment.json", (0, 0))
    (runs / "r4" / LOCK).unlink()  # a file system without locks
    assert read_run(runs / "r4").status == "running", "something was written just now"
    os.utime(runs / "r4" / "metrics.jsonl", (time.time() - 1000,) * 2)
    assert read_run(runs / "r4").status == "stopped"


def test_a_run_whose_adapter_is_there_has_finished_though_its_summary_had_no_room(runs: Path):
    (runs / "r4" / LOCK).touch()
    (adapter := runs / "r4" / "adapter").mkdir()
    assert read_run(runs / "r4").status == "finished" and read_run(runs / "r4").adapter == adapter
    os.utime(adapter, (0, 0))  # of a run before in this folder
    assert read_run(runs / "r4").status == "stopped"


def test_status_does_not_wait_for_a_queue_that_hangs(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "squeue").write_text(f"#!/bin/sh\ntouch {tmp_path / 'asked'}\nexec sleep 1000\n")
    (tmp_path / "squeue").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr("qlora_fsdp.status.SLURM_SECONDS", 1)
    assert status([str(runs)]) == 0
    assert "squeue" not in capsys.readouterr().out and not (tmp_path / "asked").exists(), "no run is a job of SLURM's"
    (runs / "r16" / "slurm.json").write_text('{"job_id": "7"}')
    assert status([str(runs)]) == 0
    out = capsys.readouterr().out
    assert "finished" in out and "squeue does not answer: nothing came within 1 seconds." in out


@pytest.mark.parametrize("module", ["status", "report", "launch.multirun", "launch.local", "launch.slurm"])
def test_no_torch_is_imported(module: str):
    program = (
        f"import sys, qlora_fsdp.{module}; assert not {{'torch', 'transformers', 'accelerate'}} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_a_restart_is_told_from_a_new_start():
    first = describe_attempt({"SLURM_JOB_ID": "7"})
    again = describe_attempt({"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "1"})
    assert first["launch"] == again["launch"] and first["restarts"] < again["restarts"]
    assert describe_attempt({"SLURM_JOB_ID": "8"})["launch"] != first["launch"]


def test_charts():
    assert ticks(0.0, 1.0) == [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
    assert ticks(1e-4, 2.1e-4)[0] <= 1e-4 and ticks(3.0, 3.0)[-1] > 3.0
    # A run of one step: the running mean may differ from the loss by rounding alone
    assert "<circle" in chart("Loss", [Series("loss", [1.0], [5.8538]), Series("mean", [1.0], [5.853800000000001])])
    labels = re.findall(r'text-anchor="middle">([^<]*)<', chart("Loss", [Series("loss", [0, 0], [5.8, 5.7])]))
    assert labels == ["0"], "one evaluation"
    labels = re.findall(r'text-anchor="middle">([^<]*)<', chart("Loss", [Series("loss", [1, 3], [5.8, 5.7])]))
    assert labels == ["1", "2", "3"], "steps are whole"
    assert running_mean([1.0, None, 2.0, float("nan"), 6.0], 3) == [1.0, None, 1.5, None, 4.0]
    assert running_mean([1.0, 2.0, 4.0], 1) == [1.0, 2.0, 4.0]
    points = Series("a", range(10_000), [9.0 if i == 5000 else float(i % 2) for i in range(10_000)]).points
    assert len(points) <= 600 and (5000, 9.0) in points, "a spike of one step is seen"
    assert [x for x, _ in points] == sorted(x for x, _ in points)
    texts = re.findall(r'text-anchor="end">([^<]*)<', chart("Loss", [Series("a", [0, 1], [5.79521, 5.79524])]))
    assert "5.79522" in texts and len(set(texts)) == len(texts), "labels that differ"


def test_a_report_tells_how_often_the_rows_of_a_mix_were_seen(tmp_path: Path):
    often = {"a.jsonl": "7 rows 1.86 times", "b.jsonl": "40 rows once"}
    make_run(tmp_path / "run", 8, {"status": "finished", "mix": often}, num_steps=20)
    write_report([tmp_path / "run"])
    assert "a.jsonl: 7 rows 1.86 times; b.jsonl: 40 rows once" in (tmp_path / "run" / "report.html").read_text()


def test_a_run_on_its_own_answers_has_curves_and_answers_with_rewards(tmp_path: Path):
    figures = {"reward": 0.25, "rewards/correct/mean": 0.5, "rewards/brief/mean": 0.125, "kl": 0.01, "entropy": 1.5}
    figures |= {"completions/mean_length": 40.0, "sampling/sampling_logp_difference/mean": 0.001}
    lines = [{"step": n, "loss": 0.1, **figures} for n in range(1, 4)]
    held_out = {"step": 3, "eval_loss": -0.25, "eval_reward": 0.25, "eval_pass@1": 0.125, "eval_pass@8": 0.5}
    write_lines(tmp_path / "metrics.jsonl", [*lines, held_out])
    answers = [
        {"step": n, "prompt": f"<{n}>", "completion": f"answer {n}", "reference": "4", "rewards": f"{n} (correct {n})"}
        for n in range(1, 4)
    ]
    write_lines(tmp_path / "generations.jsonl", answers)
    (tmp_path / "environment.json").write_text("{}")
    (tmp_path / "config.yaml").write_text("task:\n  name: grpo\n")
    write_report([tmp_path])
    text = (tmp_path / "report.html").read_text()
    titles = (
        "Rewards, mean over the answers of a step",
        "Divergence from the reference",
        "Entropy",
        "Tokens of an answer",
    )
    titles += ("Log-probabilities of slots and training apart, mean", "Held-out prompts: reward", "pass@1", "pass@8")
    for title in titles:
        assert title in text
    for name, value in (("all, weighed", "0.25"), ("correct", "0.5"), ("brief", "0.125")):
        assert f"{name}, {value} at the end" in text
    for n in (1, 3):
        assert f"<td>&lt;{n}&gt;</td><td>answer {n}</td><td>{n} (correct {n})</td><td>4</td>" in text
    assert "answer 2" not in text


def test_the_table_of_a_sweep_fits_a_narrow_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Columns that sweep.csv has too give way, the least wanted first; in a file or a pipe all stay."""
    make_run(tmp_path / "a", 16, {"status": "finished", "eval_loss": 2.0}, num_steps=10)
    jobs = [describe_job(tmp_path / "a", {"training.learning_rate": "0.0001"})]
    whole = show_results(tmp_path, jobs)
    assert "final_loss" in whole
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "50")
    narrow = show_results(tmp_path, jobs)
    assert max(map(len, narrow.splitlines())) <= 50 < max(map(len, whole.splitlines()))
    assert "training.learning_rate" in narrow and "2.0000" in narrow
