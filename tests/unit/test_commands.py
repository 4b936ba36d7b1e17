"""The settings of the commands that take an adapter: saved ones, and what is typed."""

from __future__ import annotations

import errno
import os
from contextlib import nullcontext, suppress
from pathlib import Path

import pytest
from omegaconf import OmegaConf
from tests.helpers.lines import broken_pipe

from qlora_fsdp.common.errors import ConfigError, RunFolderError
from qlora_fsdp.config.adapter.adapter_config import SETTINGS_FILE
from qlora_fsdp.config.adapter.foreign_settings import described
from qlora_fsdp.config.reading.commands import CommandSettings, load_command, saved_settings
from qlora_fsdp.config.reading.compose import load_config
from qlora_fsdp.config.schema import Config, TaskName
from qlora_fsdp.config.settings import value_of
from qlora_fsdp.generate import main as generate
from qlora_fsdp.runtime import run_command

TASK_LABELS = "task.labels=['1e5','yes','a: b']"


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    config = load_config(["model=tiny", "data=random", "quant=fp4", "quant.embeddings=int8"])
    (tmp_path / SETTINGS_FILE).write_text(saved_settings(config))
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": null}')
    (tmp_path / "adapter_model.safetensors").touch()
    return tmp_path


def load(adapter: Path, *typed: str) -> Config:
    return load_command([f"adapter={adapter}", *typed], CommandSettings, "")[1]


def test_saved_settings_stand_where_nothing_is_typed(adapter: Path) -> None:
    config = load(adapter, "quant.bnb_4bit_use_double_quant=false")
    assert (config.model.name, config.quant.bnb_4bit_quant_type.value) == ("tiny", "fp4")
    assert config.quant.embeddings.value == "int8"
    assert not config.quant.bnb_4bit_use_double_quant


def test_a_file_of_settings_wins_over_saved_ones_and_what_is_typed_over_both(adapter: Path, tmp_path: Path) -> None:
    file = tmp_path / "my.yaml"
    file.write_text("quant: {bnb_4bit_use_double_quant: false}\ndata: held_out.jsonl\ntraining: {max_steps: 5}\n")
    config = load(adapter, "--config", str(file), "quant.embeddings=none")
    assert (config.quant.bnb_4bit_quant_type.value, config.quant.bnb_4bit_use_double_quant) == ("fp4", False)
    assert (config.quant.embeddings.value, config.data.path) == ("none", "held_out.jsonl")
    assert (config.training.max_steps, load(adapter).data.path, load(adapter).training.max_steps) == (5, None, 1)


def test_an_adapter_that_was_saved_with_every_setting_still_loads(adapter: Path) -> None:
    """Training once wrote all settings of these sections."""
    config = load_config(["model=tiny", "data=random", "quant=fp4", "model.cache_folder=/of/another/machine"])
    sections = {name: OmegaConf.structured(getattr(config, name)) for name in ("model", "tokenizer", "quant", "task")}
    (adapter / SETTINGS_FILE).write_text(OmegaConf.to_yaml(OmegaConf.create(sections)))
    loaded = load(adapter)
    assert (loaded.model.name, loaded.quant.bnb_4bit_quant_type.value) == ("tiny", "fp4")
    assert loaded.model.cache_folder is None


def test_what_is_saved_can_be_read_again(adapter: Path) -> None:
    typed = ["model=llama3-8b", "quant=int8", "task=sequence_classification", TASK_LABELS, "model.revision='1e5'"]
    config = load_config([*typed, "tokenizer.add_tokens=['no','null']", "model.trust_remote_code=true"])
    text = saved_settings(config, [1e-05, 2.0, 3e20])
    (adapter / SETTINGS_FILE).write_text(text)
    loaded = load(adapter)
    assert "trust_remote_code" not in text
    assert loaded.task.class_weights == [1e-05, 2.0, 3e20]
    for key in set(described()) - {"task.class_weights"}:
        assert value_of(loaded, key) == value_of(config, key), key


def test_a_group_that_is_typed_wins_over_the_saved_settings(adapter: Path) -> None:
    config = load(adapter, "quant=int8")
    assert (config.quant.load_in_4bit, config.quant.load_in_8bit) == (False, True)
    assert config.model.name == "tiny"
    assert load(adapter, "model=llama3-8b").model.name == "llama3-8b"
    config = load(adapter, "task=sequence_classification", "task.labels=[a,b]")
    assert config.task.name is TaskName.sequence_classification
    assert not config.training.packing
    labels = ["1e5", "yes", "a: b"]
    (adapter / SETTINGS_FILE).write_text(saved_settings(load(adapter, "task=sequence_classification", TASK_LABELS)))
    assert load(adapter, "quant=int8").task.labels == labels


def test_rows_stay_unpacked_where_training_left_them_so(adapter: Path) -> None:
    assert load(adapter).training.packing
    (adapter / SETTINGS_FILE).write_text(saved_settings(load_config(["model=tiny", "data=random", "training=padded"])))
    assert not load(adapter, "quant=int8").training.packing
    assert load(adapter, "training=packed").training.packing


def test_random_weights_are_made_again_by_the_seed_that_made_them(adapter: Path) -> None:
    (adapter / SETTINGS_FILE).write_text(saved_settings(load_config(["model=tiny", "data=random", "training.seed=7"])))
    assert (load(adapter).training.seed, load(adapter, "training.seed=1").training.seed) == (7, 1)
    own = ["model=tiny", "model.weights=checkpoint", "model.path=org/Base", "data=random", "training.seed=7"]
    assert "seed" not in saved_settings(load_config(own))


def test_an_experiment_does_not_take_the_place_of_the_saved_settings(adapter: Path) -> None:
    with pytest.raises(ConfigError, match="experiment can't be used with adapter="):
        load(adapter, "experiment=qlora_paper")


@pytest.mark.parametrize("text", ["lora.r=3", "++lora.use_dora=true", "lora=default", "optim=adamw_8bit"])
def test_settings_of_training_beside_an_adapter(text: str, adapter: Path) -> None:
    with pytest.raises(ConfigError, match="has no effect with adapter=, which has been trained already"):
        load(adapter, text)


def test_settings_and_bases_that_are_not_there(adapter: Path) -> None:
    (adapter / SETTINGS_FILE).write_text("model: [")
    with pytest.raises(ConfigError, match=f"{adapter}/{SETTINGS_FILE} can't be read: line 1: expected the node"):
        load(adapter)
    (adapter / SETTINGS_FILE).unlink()
    assert load(adapter).model.path is None


@pytest.mark.parametrize("typed", ["no_such_setting=1", "quant.load_in_4bit=perhaps"])
def test_beside_a_mistake_only_what_the_command_uses_is_told(adapter: Path, capfd, typed: str) -> None:
    assert generate([f"adapter={adapter}", "prompt=x", typed]) == 2
    told = capfd.readouterr().err
    assert typed in told and "data.path" not in told


def test_a_bad_value_that_an_adapter_has_is_told_with_its_file(adapter: Path, capfd) -> None:
    file = adapter / SETTINGS_FILE
    saved = file.read_text().replace("embeddings: int8", "embeddings: int7")
    file.write_text(saved + "data: {system_prompt: [a, b]}\n")
    assert generate([f"adapter={adapter}", "prompt=x", "quant.embeddings=int6"]) == 2
    told = capfd.readouterr().err
    assert f"{file}: data.system_prompt=[a,b] must be text" in told
    assert " quant.embeddings=int6 must be" in told and f"{file}: quant" not in told


def test_labels_that_are_typed_keep_the_order_of_the_head(adapter: Path) -> None:
    (adapter / SETTINGS_FILE).write_text("task: {name: sequence_classification, labels: [good, bad]}\n")
    with pytest.raises(ConfigError, match=r"task.labels=\[bad,good\] has the labels of adapter=.* in another order"):
        load(adapter, "model=tiny", "task.labels=[bad,good]")
    assert load(adapter, "model=tiny", "task.labels=[ham,spam]").task.labels == ["ham", "spam"]


def test_what_an_output_file_does_not_take_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As where the disk has filled up during hours of generation."""

    def refuse(path: Path, text: str) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(run_command, "write_atomically", refuse)
    with pytest.raises(RunFolderError, match=r"out=a can't be written: .*No space.* printed above\. Set out to"):
        run_command.write_out("a", "one\ntwo\n")
    assert capsys.readouterr().out == "one\ntwo\n"


def test_a_result_that_stdout_does_not_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file on a full disk is an error, and no success without its result; a pipe that nobody reads is none."""
    for stream, expected in (
        (broken_pipe(), nullcontext()),
        (
            os.fdopen(os.open("/dev/full", os.O_WRONLY), "w"),
            pytest.raises(RunFolderError, match=r"printed: .*No space.* Set out to a file"),
        ),
    ):
        monkeypatch.setattr("sys.stdout", stream)
        with expected:
            run_command.print_result("A result.")
        with suppress(OSError):
            stream.close()
