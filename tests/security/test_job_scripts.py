"""What paths and settings hold is data in a job script: the shell runs none of it, and SLURM obeys none of it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from qlora_fsdp.launch.slurm import CONTROL_CHARACTER
from qlora_fsdp.train import main

BASE = ["model=tiny", "data=random", "training.max_steps=1", "hydra/launcher=slurm"]
EVIL = """a $(touch ran-1) `touch ran-2` 'b' "c" #d ;touch ran-3;"""
# What srun does, for one task: its own options end at the command.
SRUN = """#!/usr/bin/env bash
while [[ $1 != bash ]]; do shift; done
SLURM_NODEID=7 exec "$@"
"""
PYTHON = f"""#!{sys.executable}
import json, os, sys
if "qlora_fsdp.launch.run_accelerate" in sys.argv:
    json.dump([os.environ["QLORA_FSDP_RUN_KEY"], *sys.argv[1:]], open(os.environ["FOUND"], "w"))
"""


def quoted(text: str) -> str:
    return "'" + re.sub(r"(\\*)'", r"\1\1\'", text) + "'"


@pytest.mark.parametrize(("nodes", "num_jobs"), [(1, 1), (2, 2)])
def test_a_script_runs_nothing_of_its_paths(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    nodes: int,
    num_jobs: int,
):
    monkeypatch.chdir(tmp_path)
    home = tmp_path / EVIL
    home.mkdir()
    tools = tmp_path / "tools"
    tools.mkdir()
    for file, text in {
        tools / "srun": SRUN,
        home / "python": PYTHON,
        tools / "scontrol": "#!/bin/sh\necho node-0\n",
    }.items():
        file.write_text(text)
        file.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(home / "python"))
    (home / "own.yaml").write_text("distributed_type: MULTI_GPU\n")
    argv = [
        *BASE,
        "launch.dry_run=true",
        f"slurm.nodes={nodes}",
        f"launch.config_file={quoted(str(home / 'own.yaml'))}",
    ]
    argv += [f"run.folder={quoted(str(home / 'run'))}", f"tracking.project={quoted(EVIL)}"]
    if num_jobs > 1:
        argv = ["-m", *argv, "lora.r=2,4"]
    assert main(argv) == 0
    script = capsys.readouterr().out
    own = {"PATH": f"{tools}:{os.environ['PATH']}", "FOUND": str(tmp_path / "found.json")}
    own |= {"SLURM_ARRAY_TASK_ID": "1", "SLURM_JOB_ID": "3", "SLURM_JOB_NODELIST": "node-[0-1]"}
    done = subprocess.run(["bash", "-c", script], env=os.environ | own, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    assert [path.name for path in tmp_path.rglob("ran-*")] == []
    key, *words = json.loads((tmp_path / "found.json").read_text())
    assert re.fullmatch("[0-9a-f]{32}", key)
    assert words[:2] == ["-m", "qlora_fsdp.launch.run_accelerate"]
    launcher, training = words[2 : words.index("-m", 2)], words[words.index("-m", 2) + 2 :]
    options = dict(zip(launcher[::2], launcher[1::2], strict=True))
    assert options["--config_file"] == str(home / "own.yaml")
    expected = {"--machine_rank": "7", "--main_process_ip": "node-0", "--main_process_port": "20003"}
    assert {key: options[key] for key in expected if nodes > 1} == (expected if nodes > 1 else {})
    folder = str(home / "run") + ("/lora.r=4" if num_jobs > 1 else "")
    assert f"run.folder={quoted(folder)}" in training and f"tracking.project={quoted(EVIL)}" in training


def test_a_job_does_not_print_through_a_link(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "console.log").symlink_to(tmp_path / "authorized_keys")
    assert main([*BASE, "launch.dry_run=true", f"run.folder={tmp_path}"]) == 2
    assert "holds the link console.log, and a run follows no links" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("setting", "shown"),
    [
        ("slurm.partition='main\n#SBATCH --wrap=x'", "slurm.partition=main?#SBATCH --wrap=x has a line break"),
        ("slurm.options=['--qos=a\r\nid']", "slurm.options=--qos=a??id has a line break"),
        ("slurm.account='a\x1bb'", "slurm.account=a?b has a line break"),
        ("run.folder='a\ntouch ran-1'", "touch ran-1 has a line break"),
    ],
)
def test_a_line_of_its_own_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], setting: str, shown: str
):
    monkeypatch.chdir(tmp_path)
    assert main([*BASE, "launch.dry_run=true", setting]) == 2
    captured = capsys.readouterr()
    assert shown in captured.err and "#!/usr/bin/env bash" not in captured.out


def test_letters_of_other_languages_are_no_control_characters():
    assert CONTROL_CHARACTER.search("daten/ä 行\u3000\u00a0") is None
