"""What the environment gave to settings, such as a key, is in no file that a run leaves behind."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from qlora_fsdp.config.recorded import read_settings
from qlora_fsdp.train import main

SECRET = "s3cr3t-0123456789"
EXPERIMENT = """# @package _global_
run: {name: keyed}
model: {name: "${oc.env:VICTIMS_KEY}-tiny", revision: "${model.name}"}
tracking: {report_to: [wandb, tensorboard]}
data: {name: "${oc.decode:${oc.env:VICTIMS_KEY}}"}
slurm: {setup: ["export KEY=s3cr3t-0123456789"]}
checkpoint: {every_steps: 1}
"""


def test_no_file_of_a_finished_run_holds_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("VICTIMS_KEY", SECRET)
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "conf" / "experiment").mkdir(parents=True)
    (tmp_path / "conf" / "experiment" / "keyed.yaml").write_text(EXPERIMENT)
    settings = ["model=tiny", "data=random", "training.max_steps=2", "training.max_length=16"]
    settings += ["tracking.wandb_mode=offline"]
    assert main(["--config-dir", "conf", "experiment=keyed", *settings]) == 0
    run = tmp_path / "outputs" / "keyed"
    files = [file for file in run.rglob("*") if file.is_file()]
    names = {file.name for file in files}
    assert {"config.yaml", "train.log", "report.html", "manifest.json", "qlora_fsdp.yaml", "README.md"} <= names
    assert [file for file in files if SECRET.encode() in file.read_bytes()] == []

    written = yaml.safe_load((run / "config.yaml").read_text())
    assert written["model"]["revision"] == "${model.name}" and written["run"]["folder"] == "outputs/${run.name}"
    assert read_settings(run / "config.yaml")["run.folder"] == "outputs/keyed"
    assert read_settings(run / "config.yaml")["model.revision"] == "${oc.env:VICTIMS_KEY}-tiny"
    assert "Model: ${oc.env:VICTIMS_KEY}-tiny, " in (run / "train.log").read_text()
