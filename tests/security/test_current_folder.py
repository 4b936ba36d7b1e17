"""A downloaded folder as the current one: no settings in it say whom a run connects to, with which key."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from qlora_fsdp.config.trackers import check_trackers
from tests.cli.launch import SCRIPT, SHORT_STEPS, child_environment
from tests.helpers.quick_config import load_config

KEY = "0123456789abcdef0123456789abcdef01234567"
TINY = [
    *("model=tiny", "model.config.num_hidden_layers=1", "data=random", "training.max_length=32", "lora.r=4"),
    *("training.max_steps=1", "run.folder=run", *SHORT_STEPS),
]
# Files that libraries take settings from, where they find them in the current folder: trackers, HTTP clients, clouds
FILES = [
    *("wandb/settings", ".wandb/settings", "mlruns/0/meta.yaml", "mlflow.db", ".mlflow/credentials", "MLproject"),
    *(".comet.config", ".trackio/logbook/pages/index.md", ".codecarbon.config", "neptune.yml", ".aim/config"),
    *(".env", ".netrc", "_netrc", ".aws/config", "s3.json", "settings.ini", ".deepspeed_env", ".numba_config.yaml"),
    *("default_config.yaml", "nccl.conf", ".nccl.conf", "pip.conf", ".huggingface/token", ".config/fsspec/conf.json"),
]
# What a process does with files, noted from within: the interpreter loads this before anything else
AUDIT = """
import os, sys
folder, note = {folder!r}, {note!r}
def hook(event, arguments):
    if event in ("open", "os.listdir", "os.scandir") and isinstance(arguments[0], (str, bytes)):
        path = os.path.join(os.getcwd(), os.fsdecode(arguments[0]))
        if path.startswith(folder):
            line = os.path.relpath(path, folder) + chr(10)
            descriptor = os.open(note, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
            os.write(descriptor, line.encode())
            os.close(descriptor)
sys.addaudithook(hook)
"""
# A library that is only there: importing it is all that its settings need to be read
PRESENT = "import os\nos.open({note!r}, os.O_WRONLY | os.O_CREAT)\n"


@pytest.fixture
def downloaded(tmp_path: Path) -> Path:
    folder = tmp_path / "downloaded"
    for name in FILES:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("[default]\nbase_url = http://127.0.0.1:9\n")
    return folder


@pytest.fixture
def server() -> Iterator[list[str]]:
    """A server of the attacker's, and the requests that it got, beginning with its address."""
    got: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *arguments: Any) -> None:
            pass

        def do_POST(self) -> None:
            got.append(f"{self.path} {self.headers.get('Authorization')}")
            self.send_response(404)
            self.end_headers()

        do_GET = do_POST

    served = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    got.append(f"http://127.0.0.1:{served.server_port}")
    thread = threading.Thread(target=served.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    yield got
    served.shutdown()
    served.server_close()
    thread.join()


def train(folder: Path, *settings: str, **environment: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "train", *TINY, *settings],
        env=child_environment() | {"HOME": str(folder.parent)} | environment,
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout


@pytest.mark.parametrize("name", ["wandb/settings", ".wandb/settings"])
@pytest.mark.parametrize("setting", ["tracking=wandb", "tracking.report_to=[wandb]"])
def test_the_current_folder_does_not_get_the_key_of_wandb(
    tmp_path: Path, server: list[str], name: str, setting: str
) -> None:
    pytest.importorskip("wandb")
    file = tmp_path / "downloaded" / name
    file.parent.mkdir(parents=True)
    file.write_text(f"[default]\nbase_url = {server[0]}\n")
    code, printed = train(file.parents[1], setting, WANDB_API_KEY=KEY)
    assert server[1:] == [], "the key has left"
    assert code == 2, printed
    assert f"would let W&B take its settings from {file}" in printed
    assert f"Remove {name}, or start in another folder." in printed


def test_nothing_of_a_run_opens_settings_in_the_current_folder(downloaded: Path, tmp_path: Path) -> None:
    """W&B's are refused before (see above), and MLflow's; all that libraries would read stands there otherwise."""
    for name in ("wandb", ".wandb"):
        (downloaded / name / "settings").unlink()
    site, opened = tmp_path / "site", tmp_path / "opened"
    site.mkdir()
    (site / "sitecustomize.py").write_text(AUDIT.format(folder=str(downloaded), note=str(opened)))
    for library in ("comet_ml", "codecarbon", "mlflow", "trackio", "neptune", "aim", "dotenv"):
        (site / f"{library}.py").write_text(PRESENT.format(note=str(tmp_path / f"imported {library}")))
    environment = child_environment()
    environment["PYTHONPATH"] = os.pathsep.join([str(site), environment["PYTHONPATH"]])
    trackers = ["tracking.report_to=[wandb,tensorboard]", "tracking.wandb_mode=offline", "launch.num_processes=2"]
    code, printed = train(downloaded, *trackers, **environment)
    assert code == 0, printed
    assert json.loads((downloaded / "run" / "summary.json").read_text())["status"] == "finished"
    names = set(opened.read_text().splitlines())
    assert any(name.startswith("run/") for name in names), "the hook saw nothing"
    assert not names & set(FILES)
    others = {name for name in names if name.partition("/")[0] != "run"}
    assert others <= {".", "wandb", "wandb/settings", ".wandb"}, "W&B looks for its own, which aren't there"
    assert list(tmp_path.glob("imported *")) == []


def test_mlflow_is_told_where_to_go(downloaded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(downloaded)
    monkeypatch.setattr("qlora_fsdp.config.trackers.find_spec", lambda name: name)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    config = load_config(["tracking=mlflow"])
    (problem,) = check_trackers(config.tracking)
    assert str(problem).startswith("tracking.report_to=[mlflow] needs MLFLOW_TRACKING_URI: without it MLflow takes ")
    assert f"MLFLOW_TRACKING_URI=sqlite:///{Path.home() / 'mlflow.db'}" in str(problem)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "https://mlflow.example.org")
    assert list(check_trackers(config.tracking)) == []
