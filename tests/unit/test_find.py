"""Which config a model is built from: that of the preset, of a folder or of the hub; and what the plan says of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.checkpoints import FAMILIES, SHAPE
from tests.helpers.quick_config import load_config

from qlora_fsdp import train
from qlora_fsdp.common.errors import CheckpointError, ConfigError
from qlora_fsdp.config.model_config import check_same_model
from qlora_fsdp.config.schema import DataConfig, ModelConfig, QuantConfig
from qlora_fsdp.config.specs import ModuleSpec
from qlora_fsdp.data import tokenizer as tokenizers
from qlora_fsdp.data.tokenizer import load_tokenizer
from qlora_fsdp.model import find
from qlora_fsdp.model.build import BuildSettings, build_model
from qlora_fsdp.model.find import ModelFiles
from qlora_fsdp.tracing.model_tracer import trace_config

LLAMA: dict[str, Any] = {"model_type": "llama", **SHAPE}
DRY_RUN = ["experiment=dry_run", "training.max_steps=1", "training.max_length=32", "data.max_rows=4"]


def write(folder: Path, config: dict[str, Any]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def find_model(*settings: str) -> ModelFiles:
    return find.find_model(load_config([*DRY_RUN, *settings]).model, is_main=True, first_error=lambda error: error)


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The patterns of files that were asked of a hub whose every model is a tiny Llama."""
    patterns = []

    def download(name: str, *, allow_patterns: list[str], **more: Any) -> str:
        patterns.append(allow_patterns)
        return str(write(tmp_path / "hub", LLAMA))

    monkeypatch.setattr(find, "snapshot_download", download)
    monkeypatch.setattr(find, "fetch_config_json", lambda *named: write(tmp_path / "hub", LLAMA) / "config.json")
    return patterns


def test_random_weights_are_of_the_folders_config(tmp_path: Path) -> None:
    folder = write(tmp_path / "mine", LLAMA)
    assert find_model(f"model.path={folder}").config.hidden_size == SHAPE["hidden_size"]
    changed = find_model(f"model.path={folder}", "model.config.num_hidden_layers=7").config
    assert (changed.num_hidden_layers, changed.hidden_size) == (7, SHAPE["hidden_size"])


def test_figures_of_ones_own_go_over_the_text_part(tmp_path: Path) -> None:
    text = {"model_type": "gemma3_text", **SHAPE}
    folder = write(tmp_path / "mine", {"model_type": "gemma3", "text_config": text})
    config = find_model(f"model.path={folder}", "model.config.num_hidden_layers=7").config
    assert config.get_text_config().num_hidden_layers == 7


@pytest.mark.parametrize("weights", ["random", "checkpoint"])
def test_a_preset_is_not_mixed_with_another_model(weights: str, tmp_path: Path) -> None:
    path = f"model.path={write(tmp_path / 'mine', LLAMA)}"
    with pytest.raises(ConfigError, match=r"is another model than model=llama3-8b: hidden_size is 64 and not 4096"):
        find_model("model=llama3-8b", path, f"model.weights={weights}")


def test_a_long_figure_of_another_model_is_told_by_its_beginning() -> None:
    preset = ModelConfig(name="llama3-8b", path="mine", config={"model_type": "llama"})
    with pytest.raises(ConfigError, match=rf"model_type is {'l' * 40}\.\.\. and not llama"):
        check_same_model(preset, {"model_type": "l" * 60})


def test_a_preset_goes_with_another_copy_of_its_model(tmp_path: Path) -> None:
    """A finetune has tokens of its own, and keeps them."""
    preset = load_config(["model=llama3-8b"]).model.config
    folder = write(tmp_path / "mine", {**preset, "eos_token_id": 128009})
    assert find_model("model=llama3-8b", f"model.path={folder}").config.eos_token_id == 128009


def test_a_preset_needs_no_download(asked: list[list[str]]) -> None:
    assert find_model("model=llama3-8b").config.hidden_size == 4096
    assert asked == []


def test_random_weights_of_a_hub_model_need_no_weights(asked: list[list[str]]) -> None:
    assert find_model("model.path=org/name").config.hidden_size == SHAPE["hidden_size"]
    assert asked and not any("*.safetensors" in patterns for patterns in asked)


@pytest.mark.parametrize("weights", ["random", "checkpoint"])
def test_a_hub_model_is_compared_before_its_weights_are_downloaded(weights: str, asked: list[list[str]]) -> None:
    with pytest.raises(CheckpointError, match=r"model\.path=org/name is another model than model=llama3-8b"):
        find_model("model=llama3-8b", "model.path=org/name", f"model.weights={weights}")
    assert asked == []


def test_a_hub_model_that_can_not_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **more: Any) -> str:
        raise OSError("no network")

    monkeypatch.setattr(find, "snapshot_download", fail)
    with pytest.raises(CheckpointError, match=r"OSError: no network.*, or set model to a preset\."):
        find_model("model.path=org/name")


def test_dry_run_of_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Through the command line: it runs the folder's model, and refuses a preset that is another."""
    folder = write(tmp_path / "mine", LLAMA)
    command = [*DRY_RUN, f"model.path={folder}", f"run.folder={tmp_path / 'run'}"]
    assert train.main([*command, "model=llama3-8b", "run.overwrite=true"]) == 2
    assert "hidden_size is 64 and not 4096" in capsys.readouterr().err
    assert train.main([*command, "run.overwrite=true"]) == 0
    assert f"Model: {folder}, 0.11 M parameters" in (tmp_path / "run" / "train.log").read_text()


PLANNED = {family: {"model_type": family, **SHAPE, **more} for family, more in FAMILIES.items() if family != "bert"}
VISION = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
WHOLE = {
    "gemma3": {"text_config": PLANNED["gemma3_text"], "vision_config": VISION},
    "mistral3": {"text_config": PLANNED["mistral"], "vision_config": {**VISION, "model_type": "pixtral"}},
}


@pytest.mark.parametrize("family", [*PLANNED, "gemma3", "mistral3"])
def test_what_is_planned_is_built(family: str, tmp_path: Path) -> None:
    """With as many parameters as preflight counts."""
    config = PLANNED[family] if family in PLANNED else {"model_type": family, **WHOLE[family]}
    files = find_model(f"model.path={write(tmp_path / 'mine', config)}")
    built = build_model(files, BuildSettings(QuantConfig(load_in_4bit=False), files.config.dtype, "eager")).model
    settings = load_config(["quant=none"])
    planned = trace_config(files.config, settings).parts(ModuleSpec.of(settings))
    assert sum(param.numel() for param in built.parameters()) == planned.num_parameters


def test_a_folder_of_an_adapter_is_told_what_it_is_for(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=f"It is an adapter: .* lora.start={tmp_path} to train on from it"):
        find_model(f"model.path={tmp_path}")


def test_code_of_a_models_own_is_told_by_the_setting_that_lets_it_run(tmp_path: Path) -> None:
    write(tmp_path, {"model_type": "own", "auto_map": {"AutoConfig": "own.OwnConfig"}})
    (tmp_path / "own.py").write_text("")
    with pytest.raises(CheckpointError, match=r"code of its own\. If you .* model\.trust_remote_code=true\."):
        find_model(f"model.path={tmp_path}")


def test_a_tokenizer_that_can_not_be_loaded_is_told_by_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, LLAMA)
    model = ModelConfig(path=str(tmp_path))
    with pytest.raises(CheckpointError, match=r"it has none of tokenizer\.json, tokenizer\.model, .*\. Set model"):
        load_tokenizer(model, DataConfig())
    (tmp_path / "tokenizer.model").write_bytes(b"no model")
    monkeypatch.setattr(tokenizers, "find_spec", lambda name: None)
    with pytest.raises(CheckpointError, match=r"its tokenizer\.model needs `pip install sentencepiece`"):
        load_tokenizer(model, DataConfig())


def test_a_text_part_that_says_nothing_of_its_head():
    """As Qwen3-VL's: the whole says it."""
    assert find.make_config({"model_type": "qwen3_vl"}, "mine").tie_word_embeddings is False
    assert find.make_config({"model_type": "qwen3_vl", "tie_word_embeddings": True}, "mine").tie_word_embeddings is True
