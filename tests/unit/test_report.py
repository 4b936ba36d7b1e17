"""report.html and the status table, from the files of runs that were never run."""

from __future__ import annotations

import fcntl
import json
import os
import re
import subprocess
import sys
import time
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.quick_config import load_config

from qlora_fsdp.config.compose import to_yaml
from qlora_fsdp.records.run_state import LOCK, describe_attempt, read_run
from qlora_fsdp.report.__main__ import main as report
from qlora_fsdp.report.charts import Series, chart, smooth, ticks
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
    assert "Last loss by lora.r" in text and "1,500 of 2,000" in text and text.index(">r4<") < text.index(">r16<")
    for _, attributes in page.found:
        for x, y in re.findall(r"([\d.e+-]+),([\d.e+-]+)", attributes.get("points") or ""):
            assert 0 <= float(x) <= 520 and 0 <= float(y) <= 240
    assert tags.count("polyline") >= 2 * 4


def test_report_of_one_run_has_its_settings(runs: Path):
    assert report([str(runs / "r4"), "--output", str(runs / "one.html")]) == 0
    text = (runs / "one.html").read_text()
    assert "lora.r=4" in text and "run.name=&lt;b&gt;&amp;" in text and "Environment" in text


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
    assert smooth([1.0, None, 1.0]) == [1.0, None, pytest.approx(1.0)]
    points = Series("a", range(1200), [float(i) for i in range(1200)]).points
    assert len(points) == 600 and points[0] == (0.5, 0.5)
    texts = re.findall(r'text-anchor="end">([^<]*)<', chart("Loss", [Series("a", [0, 1], [5.79521, 5.79524])]))
    assert "5.79522" in texts and len(set(texts)) == len(texts), "labels that differ"
