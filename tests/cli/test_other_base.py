"""An adapter on another base of the same shapes: refused by every command that uses one, unless it is asked for."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from qlora_fsdp.data.tokenizer import byte_tokenizer
from tests.cli.launch import SCRIPT, child_environment, run_forked
from tests.helpers.checkpoints import make_checkpoint
from tests.helpers.hub import Hub, started_hub
from tests.helpers.ranks import run_ranks
from tests.helpers.runs import settings, train_here

OVERRIDE = "other_base=true"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("other_base")


@pytest.fixture(scope="module")
def bases(folder: Path) -> dict[str, Path]:
    """A base, and one of the same shapes, as a model's base and instruct versions are."""
    made = {}
    for seed, name in enumerate(["base", "instruct"]):
        made[name] = make_checkpoint("llama", folder / name, torch.float32, seed=seed)
        byte_tokenizer().save_pretrained(made[name])
    return made


@pytest.fixture(scope="module")
def adapter(folder: Path, bases: dict[str, Path], rows: Path) -> Path:
    run = [f"run.folder={folder / 'run'}", "training.max_steps=1", "model.tokenizer_path=null"]
    run_ranks(1, train_here, settings(bases["base"], rows, *run))
    return folder / "run" / "adapter"


def commands(rows: Path, out: Path) -> dict[str, list[str]]:
    return {
        "merge": ["merge", f"out={out}"],
        "evaluate": ["evaluate", f"data.path={rows}", f"data.cache_folder={out.parent}", "training.max_length=64"],
        "generate": ["generate", "prompt=the cat", "max_new_tokens=2", "raw=true"],
        "chat": ["chat", "max_new_tokens=2", "data.chat_template=chatml"],
    }


@pytest.mark.parametrize("command", commands(Path(), Path()))
def test_other_weights_are_refused(
    command: str, bases: dict[str, Path], adapter: Path, rows: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    typed = [*commands(rows, out)[command], f"adapter={adapter}", f"model.path={bases['instruct']}"]
    code, printed = run_forked(tmp_path, *typed, text="hi\n")
    assert code == 2, printed
    message = f"Error: model.path={bases['instruct']} holds other weights than those that adapter={adapter} was trained"
    assert message in printed
    assert "Set model.path to the model that it was trained on." in printed
    assert f"type {OVERRIDE}" in printed
    assert "Traceback" not in printed
    assert not out.exists()
    code, printed = run_forked(tmp_path, *typed, OVERRIDE, text="hi\n")
    assert code == 0, printed


def test_the_same_weights_elsewhere_are_no_other_base(bases: dict[str, Path], adapter: Path, tmp_path: Path) -> None:
    moved = shutil.copytree(bases["base"], tmp_path / "moved")
    typed = ["generate", "prompt=the cat", "max_new_tokens=2", "raw=true", f"adapter={adapter}", f"model.path={moved}"]
    code, printed = run_forked(tmp_path, *typed)
    assert code == 0, printed


def test_a_run_starts_on_another_base_where_that_is_asked_for(
    bases: dict[str, Path], adapter: Path, rows: Path, tmp_path: Path
) -> None:
    typed = ["train", f"lora.start={adapter}", f"model.path={bases['instruct']}", f"data.path={rows}"]
    typed += ["training.max_steps=1", "training.max_length=64", f"run.folder={tmp_path / 'run'}"]
    typed += [f"data.cache_folder={tmp_path}"]
    code, printed = run_forked(tmp_path, *typed)
    assert code == 2, printed
    assert "holds other weights than those that lora.start=" in printed
    assert "set lora.other_base=true" in printed
    code, printed = run_forked(tmp_path, *typed, "lora.other_base=true", "run.overwrite=true")
    assert code == 0, printed
    code, printed = run_forked(tmp_path, *typed[:1], *typed[2:], "lora.other_base=true", "run.overwrite=true")
    assert code == 2 and "lora.other_base=true has no effect" in printed, printed


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, bases: dict[str, Path], tmp_path: Path) -> Iterator[Hub]:
    """A hub, and a cache of it in which both bases are, under names that do not tell which was trained on."""
    for name, base in bases.items():
        repo = tmp_path / "cache" / f"models--org--{name}"
        shutil.copytree(base, repo / "snapshots" / ("0" * 40))
        (repo / "refs").mkdir()
        (repo / "refs" / "main").write_text("0" * 40)
    with started_hub() as hub:
        monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.setenv("HF_TOKEN", "hf_writer")
        yield hub


def test_an_adapter_is_not_pushed_under_the_name_of_another_base(hub: Hub, adapter: Path, tmp_path: Path) -> None:
    """`push` is a program of its own here, which reads where the hub is when it starts."""
    typed = [sys.executable, str(SCRIPT), "push", f"adapter={adapter}", "repo=team/mine"]

    def push(*more: str) -> tuple[int, str]:
        done = subprocess.run(
            [*typed, *more],
            env=child_environment() | {"HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        return done.returncode, done.stdout + done.stderr

    code, printed = push("base=org/instruct")
    assert code == 2, printed
    assert f"Error: base=org/instruct holds other weights than those that adapter={adapter} was trained on." in printed
    assert f"type {OVERRIDE}" in printed
    code, printed = push("base=org/unknown")
    assert code == 2, printed
    assert "base=org/unknown is not " in printed and "`hf download org/unknown`" in printed
    assert not hub.requests, "nothing was asked of the hub"
    for more in (["base=org/base"], ["base=org/instruct", OVERRIDE]):
        code, printed = push(*more)
        assert code == 0, printed
        named = json.loads(hub.repos["team/mine"]["adapter_config.json"])["base_model_name_or_path"]
        assert f"base={named}" == more[0]
