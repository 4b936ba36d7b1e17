"""Uploads to a stand-in of the hub: an adapter's own files, with nothing of this machine, and clear refusals."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import yaml
from safetensors.numpy import save_file

from qlora_fsdp.push import main as push
from qlora_fsdp.train import main as train
from tests.helpers.hub import Hub, started_hub


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    with started_hub() as hub:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.url)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "no token"))
        monkeypatch.setenv("HF_TOKEN", "hf_writer")
        monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "1")
        yield hub


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    """A folder such as training writes, beside files that are nobody's business."""
    folder = tmp_path / "home" / "run" / "adapter"
    folder.mkdir(parents=True)
    base = str(tmp_path / "home" / "models" / "llama")
    save_file({"a.lora_A.weight": np.ones((4, 4), np.float32)}, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"r": 4, "base_model_name_or_path": base}))
    model = {"name": "custom", "path": base, "tokenizer_path": base, "cache_folder": base, "config": {}}
    (folder / "qlora_fsdp.yaml").write_text(yaml.safe_dump({"model": model, "trained_on": "messages"}))
    (folder / "README.md").write_text(
        "---\nlibrary_name: peft\n---\n\nload('path/to/the/base/model', 'path/to/this/folder')\n"
    )
    (folder / "tokenizer.json").write_text("{}" + " " * 20_000)
    (folder / "tokenizer.model").write_bytes(b"\x00\xff")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools }}")
    (folder / "additional_chat_templates" / "notes.txt").write_text("private")
    for other in ("optimizer.pt", "notes.txt", ".env", "training_args.bin"):
        (folder / other).write_text("private")
    return folder


def test_the_adapters_own_files_are_uploaded_and_nothing_of_this_machine(
    hub: Hub, adapter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert push([f"adapter={adapter}", "repo=team/mine", "base=org/llama"]) == 0
    assert capsys.readouterr().out == f"{hub.url}/team/mine\n"
    found, private = hub.repos["team/mine"], hub.private["team/mine"]
    assert private and set(found) == {
        "adapter_model.safetensors", "adapter_config.json", "qlora_fsdp.yaml", "README.md", "tokenizer.json",
        "tokenizer.model", "additional_chat_templates/tool_use.jinja",
    }  # fmt: skip
    assert not any(str(tmp_path).encode() in content for content in found.values())
    assert found["adapter_model.safetensors"] == (adapter / "adapter_model.safetensors").read_bytes()
    assert found["tokenizer.json"] == (adapter / "tokenizer.json").read_bytes()
    assert json.loads(found["adapter_config.json"]) == {"r": 4, "base_model_name_or_path": "org/llama"}
    saved = yaml.safe_load(found["qlora_fsdp.yaml"])
    expected = {"name": "custom", "path": "org/llama", "tokenizer_path": None, "config": {}}
    assert saved == {"model": expected, "trained_on": "messages"}
    assert found["README.md"].decode() == (
        "---\nbase_model: org/llama\nlibrary_name: peft\n---\n\nload('org/llama', 'team/mine')\n"
    )
    # Again, into what is there now, without a base; one's own name need not be typed
    assert push([f"adapter={adapter}", "repo=team/mine"]) == 0
    assert "The base model is not named" in capsys.readouterr().err
    assert json.loads(hub.repos["team/mine"]["adapter_config.json"])["base_model_name_or_path"] is None
    assert push([f"adapter={adapter}", "repo=mine", "private=false"]) == 0
    assert hub.private["ada/mine"] is False


def test_secrets_paths_and_links_stay_here(
    hub: Hub, adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    card = adapter / "README.md"
    text = card.read_text()
    card.write_text(f"{text} 0123456789abcdef {tmp_path}/home/notes.txt")
    assert push([f"adapter={adapter}", "repo=team/mine"]) == 2
    said = capsys.readouterr().err
    assert "README.md holds the value of the environment variable WANDB_API_KEY." in said
    assert f"README.md names a folder of this machine, {tmp_path}/home/." in said and "0123456789abcdef" not in said
    card.unlink()
    (tmp_path / "id_rsa").write_text("secret")
    card.symlink_to(tmp_path / "id_rsa")
    assert push([f"adapter={adapter}", "repo=team/mine"]) == 2
    assert "README.md leads to a file outside the adapter's folder" in capsys.readouterr().err
    card.unlink()
    weights = adapter / "adapter_model.safetensors"
    weights.unlink()
    weights.symlink_to(tmp_path / "id_rsa")
    assert push([f"adapter={adapter}", "repo=team/mine"]) == 2
    assert "has weights that can't be read" in capsys.readouterr().err
    assert not hub.repos and not hub.requests, "nothing was asked of the hub"


@pytest.mark.parametrize(
    ("token", "repo", "refused", "parts"),
    [
        (None, "team/mine", {}, ["There is no token to write to team/mine on the hub with. Run `hf auth login`"]),
        ("hf_unknown", "team/mine", {}, ["The hub does not know the token: "]),
        ("hf_reader", "team/mine", {}, ["The hub's token laptop may only read, and can't write to team/mine."]),
        ("hf_writer", "nobody/mine", {}, ["you are no member of it. Name a repository of ada, team."]),
        ("hf_writer", "others/mine", {}, ["you may only read there. Name a repository of ada, team."]),
        ("hf_writer", "team/mine", {"/api/models": 403}, ["does not let this token write to team/mine"]),
        ("hf_writer", "team/mine", {"/api/validate": 500}, ["The hub did not take team/mine"]),
    ],
)
def test_what_the_hub_refuses_is_one_message(
    hub: Hub, adapter: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    token: str | None, repo: str, refused: dict[str, int], parts: list[str],
):  # fmt: skip
    hub.refused = refused
    monkeypatch.delenv("HF_TOKEN")
    if token is not None:
        monkeypatch.setenv("HF_TOKEN", token)
    assert push([f"adapter={adapter}", f"repo={repo}"]) == 2
    said = capsys.readouterr().err
    assert said.count("Error: ") == 1 and "Traceback" not in said
    for part in parts:
        assert part in said
    assert not any(hub.repos.values())


def test_wrong_settings_and_a_hub_that_is_not_there(
    hub: Hub, adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    for arguments, part in (
        ([], "adapter is not set."),
        ([f"adapter={adapter}", "repo=a/b/c"], "repo=a/b/c can't be the name of a repository on the hub"),
        ([f"adapter={adapter}", "repo=a/b", "quant=nf4"], "quant=nf4 is not a setting of this command. Settings are"),
        ([f"adapter={tmp_path}", "repo=a/b"], "holds no adapter: no adapter_config.json"),
    ):
        assert push(arguments) == 2
        assert part in capsys.readouterr().err
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert push([f"adapter={adapter}", "repo=team/mine"]) == 2
    assert "HF_HUB_OFFLINE is set" in capsys.readouterr().err
    assert not hub.requests


def test_a_run_pushes_its_adapter_and_outlives_a_hub_that_fails(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    settings = ["model=tiny", "data=random", "training.max_steps=2", "training.max_length=32", "hub.push=true"]
    for name, arguments, code in (("a", [], 2), ("b", ["hub.repo=a b"], 2)):
        assert train([*settings, *arguments, f"run.folder={tmp_path / name}"]) == code
        assert "hub.repo=" in capsys.readouterr().err
    assert train([*settings, "hub.repo=tiny", f"run.folder={tmp_path / 'c'}"]) == 0
    assert f"The adapter is at {hub.url}/ada/tiny" in capsys.readouterr().out
    assert "adapter_model.safetensors" in hub.repos["ada/tiny"] and hub.private["ada/tiny"]
    assert not any(str(tmp_path).encode() in content for content in hub.repos["ada/tiny"].values())

    hub.refused = {"/api/models/ada/tiny/commit": 500}
    assert train([*settings, "hub.repo=tiny", f"run.folder={tmp_path / 'd'}"]) == 0
    assert f"push adapter={tmp_path / 'd' / 'adapter'} repo=tiny private=true" in capsys.readouterr().out
    assert (tmp_path / "d" / "adapter" / "README.md").is_file()
    assert json.loads((tmp_path / "d" / "summary.json").read_text())["status"] == "finished"

    monkeypatch.setenv("HF_TOKEN", "hf_reader")
    assert train([*settings, "hub.repo=tiny", f"run.folder={tmp_path / 'e'}"]) == 2
    said = capsys.readouterr().err
    assert said.count("Error: ") == 1 and "hub.push=true: The hub's token laptop may only read" in said
    assert not (tmp_path / "e").exists(), "found out before anything is written"
