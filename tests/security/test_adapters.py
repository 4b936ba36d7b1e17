"""Attacks by the files of an adapter, or of the base model that it names, on someone who only uses the adapter.

What the settings beside an adapter may say is tested in test_foreign_settings.py.
"""

from __future__ import annotations

import json
import os
import string
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from qlora_fsdp import generate, merge
from qlora_fsdp.common import module_names
from qlora_fsdp.common.errors import CheckpointError
from qlora_fsdp.common.foreign_files import find_outside
from qlora_fsdp.data.tokenizer import byte_tokenizer
from qlora_fsdp.inference import gguf_files
from tests.helpers.checkpoints import make_checkpoint

SECRET = "hf_this_is_a_secret"
MODULE = "model.layers.0.self_attn.q_proj"
ESCAPE = "\x1b]0;owned\x07"


class Adapter:
    """A folder with a LoRA adapter of one layer, which fits a tiny base model."""

    def __init__(self, folder: Path, base: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder, self.base, self.capsys = folder, base, capsys
        folder.mkdir()
        size = json.loads((base / "config.json").read_text())["hidden_size"]
        shapes = {"A": (4, size), "B": (size, 4)}
        tensors = {f"base_model.model.{MODULE}.lora_{m}.weight": torch.zeros(shape) for m, shape in shapes.items()}
        save_file(tensors, folder / "adapter_model.safetensors")
        self.write_config()
        self.write_settings({})

    def write_config(self, **values: Any) -> None:
        config = {"peft_type": "LORA", "bias": "none", "r": 4, "target_modules": [MODULE], "task_type": "CAUSAL_LM"}
        self.write_json("adapter_config.json", config | values)

    def write_settings(self, model: dict[str, Any], **sections: Any) -> None:
        model = {"path": str(self.base)} | model
        settings = {"model": model, "quant": {"load_in_4bit": False}} | sections
        (self.folder / "qlora_fsdp.yaml").write_text(yaml.safe_dump(settings))

    def write_json(self, name: str, values: dict[str, Any]) -> None:
        (self.folder / name).write_text(json.dumps(values))

    def use(self, *typed: str) -> tuple[int, str]:
        """What the victim types, and the exit code and text that they see."""
        code = generate.main([f"adapter={self.folder}", "prompt=Hello", "max_new_tokens=2", *typed])
        shown = self.capsys.readouterr()
        return code, shown.out + shown.err

    def refusal(self, *typed: str) -> str:
        """The message with which the adapter is refused, without the secret."""
        code, shown = self.use(*typed)
        assert code == 2, shown
        assert "Error: " in shown and "Traceback" not in shown and SECRET not in shown
        return shown


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_checkpoint("llama", tmp_path_factory.mktemp("base") / "llama", torch.float32)
    byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def adapter(base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Adapter:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)
    copy = tmp_path / "base"
    copy.mkdir()
    for file in base.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    return Adapter(tmp_path / "adapter", copy, capsys)


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    """A file of the victim's with a line for each token, as a vocabulary has."""
    file = tmp_path / "secret.txt"
    file.write_text(f"alpha\n{SECRET}\n")
    return file


def test_an_honest_adapter_is_used(adapter: Adapter) -> None:
    byte_tokenizer().save_pretrained(adapter.folder)
    code, shown = adapter.use()
    assert code == 0, shown


ASCII = sorted(set(string.printable) - set(string.whitespace))


@pytest.mark.parametrize(
    "arguments",
    [
        {"tokenizer_class": "BertTokenizer", "vocab": "SECRET", "extra_special_tokens": ASCII},
        {"tokenizer_class": "BertTokenizer", "vocab": "/proc/self/environ", "extra_special_tokens": ASCII},
        {"tokenizer_class": "BertTokenizer", "init_inputs": ["SECRET"]},
        {"tokenizer_class": "GPT2Tokenizer", "vocab": "SECRET", "merges": "SECRET"},
        {"tokenizer_class": "GPT2Tokenizer", "vocab": {"a": 0, "b": 1}, "merges": "SECRET"},
        {"tokenizer_class": "GemmaTokenizer", "vocab_file": "SECRET"},
        {"tokenizer_class": "LlamaTokenizer", "merges_file": "SECRET"},
        {"tokenizer_class": "PreTrainedTokenizerFast", "gguf_file": "../secret.txt"},
        {"tokenizer_class": "PreTrainedTokenizerFast", "fast_tokenizer_files": ["../tokenizer.4.0.0.json"]},
    ],
)
@pytest.mark.parametrize("name", ["tokenizer_config.json", "special_tokens_map.json"])
@pytest.mark.parametrize("place", ["adapter", "base"])
def test_a_file_of_the_victims_does_not_become_the_vocabulary(
    adapter: Adapter, secret: Path, name: str, arguments: dict[str, Any], place: str
) -> None:
    folder = adapter.folder if place == "adapter" else adapter.base
    (folder / "tokenizer.json").unlink(missing_ok=True)
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "BertTokenizer"}')
    (folder / name).write_text(json.dumps(arguments).replace("SECRET", str(secret)))
    message = adapter.refusal()
    assert f"in its {name} would open files that the tokenizer's folder does not hold" in message


@pytest.mark.parametrize("place", ["adapter", "base"])
@pytest.mark.parametrize("name", ["vocab.txt", "chat_template.jinja", "additional_chat_templates/x.jinja", "my_token"])
def test_a_file_behind_a_link_is_not_read(adapter: Adapter, secret: Path, name: str, place: str) -> None:
    folder = adapter.folder if place == "adapter" else adapter.base
    byte_tokenizer().save_pretrained(folder)
    (folder / name).unlink(missing_ok=True)
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).symlink_to(secret)
    assert f"{Path(name).name} leads to a file outside the" in adapter.refusal()


@pytest.mark.parametrize("place", ["adapter", "base"])
def test_a_merge_copies_nothing_that_links_lead_to(adapter: Adapter, secret: Path, tmp_path: Path, place: str) -> None:
    name = "my_token" if place == "adapter" else "readme.txt"
    ((adapter.folder if place == "adapter" else adapter.base) / name).symlink_to(secret)
    assert merge.main([f"adapter={adapter.folder}", f"out={tmp_path / 'merged'}"]) == 2
    assert f"{name} leads to a file outside the" in adapter.capsys.readouterr().err
    assert not (tmp_path / "merged").exists()


@pytest.fixture
def converters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """llama.cpp's folder, whose converters leave `converted` behind."""
    monkeypatch.setattr(gguf_files, "gguf_problems", lambda *about: [])  # of packages that may not be installed
    folder = tmp_path / "llama.cpp"
    folder.mkdir()
    for name in (gguf_files.MODEL_CONVERTER, gguf_files.ADAPTER_CONVERTER):
        (folder / name).write_text(
            "import sys\nfrom pathlib import Path\n"
            f"Path({str(tmp_path / 'converted')!r}).touch()\n"
            "Path(sys.argv[sys.argv.index('--outfile') + 1]).write_text('GGUF')\n"
        )
    return folder


@pytest.mark.parametrize("write", ["model", "adapter"])
@pytest.mark.parametrize(
    ("place", "name", "values"),
    [
        ("base", "config.json", {"auto_map": {"AutoTokenizer": ["evil.X", "evil.X"]}}),
        ("base", "tokenizer_config.json", {"auto_map": ["evil.X", "evil.X"]}),
        ("base", "tokenizer_config.json", {"inner": [{"auto_map": {}}]}),
        ("adapter", "tokenizer_config.json", {"auto_map": {"AutoTokenizer": ["evil.X", "evil.X"]}}),
    ],
)
def test_a_converter_runs_no_code_of_a_model(
    adapter: Adapter, converters: Path, tmp_path: Path, write: str, place: str, name: str, values: dict[str, Any]
) -> None:
    """llama.cpp's own says trust_remote_code=True to transformers; files of the hub are named by auto_map too."""
    if place == "adapter":
        byte_tokenizer().save_pretrained(adapter.folder)
    file = (adapter.folder if place == "adapter" else adapter.base) / name
    file.write_text(json.dumps(json.loads(file.read_text()) | values))
    typed = [f"adapter={adapter.folder}", f"out={tmp_path / 'merged'}", f"write={write}", "gguf=q8_0"]
    assert merge.main([*typed, f"llama_cpp={converters}"]) == 2
    message = adapter.capsys.readouterr().err
    assert f"{file} names code that comes with it (auto_map)" in message
    assert "model.trust_remote_code=true" in message and "leave gguf out" in message
    assert not (tmp_path / "merged").exists() and not (tmp_path / "converted").exists()


def test_a_converter_runs_code_of_a_base_that_is_trusted(adapter: Adapter, converters: Path, tmp_path: Path) -> None:
    (adapter.base / "tokenizer_config.json").write_text('{"auto_map": {}}')
    with pytest.raises(CheckpointError, match="auto_map"):
        gguf_files.write_gguf_model(adapter.base, ["q8_0"], str(converters), trusts_code=False)
    assert not (tmp_path / "converted").exists()
    gguf_files.check_code(adapter.base, adapter.folder, trusts_code=True)
    gguf_files.write_gguf_model(adapter.base, ["q8_0"], str(converters), trusts_code=True)
    assert (tmp_path / "converted").exists()
    adapter.write_json("tokenizer_config.json", {"auto_map": {}})
    with pytest.raises(CheckpointError, match="for the base model alone"):
        gguf_files.check_code(adapter.base, adapter.folder, trusts_code=True)


def test_code_of_an_adapter_does_not_get_into_a_merged_model(adapter: Adapter, tmp_path: Path) -> None:
    """Where it would take the place of the base's own, which may be trusted."""
    for folder, text in ((adapter.base, "# of the base"), (adapter.folder, "# of the adapter")):
        (folder / "tokenization_my.py").write_text(text)
    assert merge.main([f"adapter={adapter.folder}", f"out={tmp_path / 'merged'}", "report=false"]) == 0
    assert (tmp_path / "merged" / "tokenization_my.py").read_text() == "# of the base"


@pytest.mark.parametrize("name", ["qlora_fsdp.yaml", "chat_template.jinja"])
def test_nobody_waits_for_a_pipe(adapter: Adapter, name: str) -> None:
    (adapter.folder / name).unlink(missing_ok=True)
    os.mkfifo(adapter.folder / name)
    assert f"{name} leads to a file outside" in adapter.refusal()


@pytest.mark.parametrize("inside", ["", "checkpoint-500"])
def test_links_that_honest_people_have(adapter: Adapter, tmp_path: Path, inside: str) -> None:
    blobs, snapshot = tmp_path / "hub" / "blobs", tmp_path / "hub" / "snapshots" / "abc" / inside
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for number, file in enumerate(sorted(adapter.base.iterdir())):
        file.rename(blobs / str(number))
        (snapshot / file.name).symlink_to(os.path.relpath(blobs / str(number), snapshot))
    (snapshot / ".#lock").symlink_to("nowhere")
    (tmp_path / "my_model").symlink_to(snapshot)
    code, shown = adapter.use(f"model.path={tmp_path / 'my_model'}")
    assert code == 0, shown


def test_blobs_of_a_snapshot_may_not_be_elsewhere(tmp_path: Path, secret: Path) -> None:
    snapshot = tmp_path / "evil" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (tmp_path / "evil" / "blobs").symlink_to(tmp_path)
    (snapshot / "vocab.txt").symlink_to("../../blobs/secret.txt")
    assert find_outside(snapshot) == [snapshot / "vocab.txt"]


@pytest.mark.parametrize("place", ["beside the adapter", "named by its settings"])
def test_trust_in_a_base_is_none_in_the_adapters_tokenizer(adapter: Adapter, tmp_path: Path, place: str) -> None:
    folder = adapter.folder
    if place == "named by its settings":
        folder = tmp_path / "tokenizer"
        folder.mkdir()
        adapter.write_settings({"tokenizer_path": str(folder)})
    names = {"tokenizer_class": "X", "auto_map": {"AutoTokenizer": ["evil.X", "evil.X"]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    (folder / "evil.py").write_text(f"open({str(tmp_path / 'owned')!r}, 'w')\n")
    message = adapter.refusal("model.trust_remote_code=true")
    assert "may not come with code of its own" in message and str(folder) in message
    assert not (tmp_path / "owned").exists()


def test_control_characters_do_not_reach_the_terminal(adapter: Adapter) -> None:
    adapter.write_settings({"path": f"a{ESCAPE}"})
    assert "\x1b" not in adapter.refusal()


@pytest.mark.parametrize(
    "values",
    [
        {"target_modules": "(.+)+#"},
        {"target_modules": "(.|..)*#"},
        {"target_modules": [MODULE], "rank_pattern": {"(.+)+#": 4}},
        {"target_modules": [MODULE], "alpha_pattern": {"(.+)+#": 4}},
    ],
)
def test_a_regular_expression_does_not_hang(
    adapter: Adapter, values: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module_names, "MATCHING_SECONDS", 1.0)
    adapter.write_config(**values)
    assert "regular expression takes too long" in adapter.refusal()


def test_a_regular_expression_of_the_settings_does_not_hang(adapter: Adapter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module_names, "MATCHING_SECONDS", 1.0)
    adapter.write_settings({}, quant={"load_in_4bit": True, "llm_int8_skip_modules": ["(.+)+#"]})
    assert "regular expression takes too long" in adapter.refusal()


@pytest.mark.parametrize(
    "values",
    [
        {"r": 10**30},
        {"r": 2**40},
        {"r": "x"},
        {"rank_pattern": {MODULE: 10**30}},
        {"rank_pattern": [1]},
        {"lora_alpha": 10**400},
        {"alpha_pattern": {MODULE: "x"}},
        {"target_modules": [1]},
        {"target_modules": "("},
        {"modules_to_save": [1]},
    ],
)
def test_settings_that_peft_does_not_write(adapter: Adapter, values: dict[str, Any]) -> None:
    adapter.write_config(**values)
    assert f"adapter={adapter.folder}" in adapter.refusal() or values["target_modules"] == "("


@pytest.mark.parametrize("text", ["[", "[" * 100_000, "null", '{"eos_token_id": "x"}'])
@pytest.mark.parametrize(
    "name", ["config.json", "generation_config.json", "adapter_config.json", "tokenizer_config.json"]
)
def test_files_that_are_no_json(adapter: Adapter, name: str, text: str) -> None:
    folder = adapter.base if name in ("config.json", "generation_config.json") else adapter.folder
    (folder / name).write_text(text)
    adapter.refusal()


@pytest.mark.parametrize(
    "values",
    [
        {"repetition_penalty": "x"},
        {"repetition_penalty": -1},
        {"eos_token_id": 1.5},
        {"eos_token_id": True},
        {"num_beams": 200_000},
    ],
)
def test_generation_settings_of_a_wrong_type(adapter: Adapter, values: dict[str, Any]) -> None:
    (adapter.base / "generation_config.json").write_text(json.dumps(values))
    [(key, value)] = values.items()
    assert f"base/generation_config.json sets {key} to {json.dumps(value)}, which" in adapter.refusal()


def test_generation_settings_that_transformers_refuses(adapter: Adapter) -> None:
    (adapter.base / "generation_config.json").write_text('{"bad_words_ids": "x"}')
    assert "base/generation_config.json: `bad_words_ids` has to be" in adapter.refusal()


def test_stop_strings_of_the_model_files(adapter: Adapter) -> None:
    (adapter.base / "generation_config.json").write_text('{"stop_strings": ["END"]}')
    code, shown = adapter.use()
    assert code == 0, shown


@pytest.mark.parametrize(
    "ids", [[3 * 10**7], [-1], ["a"], [1.5], [True], 7, {"embed_tokens": 3}, [4 * 10**12], [10**30]]
)
def test_rows_of_new_tokens_are_those_of_the_file(adapter: Adapter, ids: Any) -> None:
    adapter.write_config(trainable_token_indices=ids)
    assert "trainable_token_indices" in adapter.refusal()


def test_rows_for_tokens_of_the_head_alone_are_named(adapter: Adapter) -> None:
    """The message once said to set model.path to another model."""
    file = adapter.folder / "adapter_model.safetensors"
    rows = {"base_model.model.lm_head.token_adapter.trainable_tokens_delta": torch.zeros(1, 64)}
    save_file(load_file(file) | rows, file)
    adapter.write_config(trainable_token_indices={"lm_head": [5]})
    shown = adapter.refusal()
    assert f"adapter={adapter.folder}: trainable_token_indices" in shown and "of the head alone" in shown
    assert "model.path" not in shown


def test_one_row_asks_for_no_millions_before_it(adapter: Adapter) -> None:
    file = adapter.folder / "adapter_model.safetensors"
    rows = {"base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta": torch.zeros(1, 64)}
    save_file(load_file(file) | rows, file)
    adapter.write_config(trainable_token_indices=[3 * 10**7])
    assert "token 30000000 can't get a row" in adapter.refusal()


@pytest.mark.parametrize(
    ("number", "message"),
    [(10**7, "can't get a row"), (2**32 - 1, "has a token with the id 4,294,967,295, and no model knows more than")],
)
def test_a_token_of_the_tokenizer_asks_for_no_billions_of_rows(adapter: Adapter, number: int, message: str) -> None:
    byte_tokenizer().save_pretrained(adapter.folder)
    file = adapter.folder / "tokenizer.json"
    values = json.loads(file.read_text())
    values["added_tokens"].append(values["added_tokens"][-1] | {"id": number, "content": "<big>"})
    values["model"]["vocab"]["<big>"] = number
    file.write_text(json.dumps(values))
    adapter.write_settings({}, tokenizer={"add_tokens": ["<new>"]})
    assert message in adapter.refusal()


def test_a_tokenizer_at_which_the_library_panics(adapter: Adapter) -> None:
    """Its panics are no `Exception`."""
    byte_tokenizer().save_pretrained(adapter.folder)
    file = adapter.folder / "tokenizer.json"
    values = json.loads(file.read_text())
    values["post_processor"]["special_tokens"] = {}
    file.write_text(json.dumps(values))
    assert "No tokenizer could be loaded from" in adapter.refusal()


def test_a_number_of_thousands_of_digits(adapter: Adapter) -> None:
    (adapter.folder / "qlora_fsdp.yaml").write_text(f"model: {{name: {'9' * 9000}}}")
    assert "an integer has more than 64 bits" in adapter.refusal()
    (adapter.folder / "qlora_fsdp.yaml").write_text(f"model: {{name: 0x{'f' * 9000}}}")  # a text, of nothing that is
    assert "model.path=null names no model" in adapter.refusal()
    (adapter.folder / "qlora_fsdp.yaml").write_text(f"? {'9' * 9000}\n: {{name: 1}}")
    assert "an integer has more than 64 bits" in adapter.refusal()
    (adapter.folder / "qlora_fsdp.yaml").write_text(f"? 0x{'f' * 9000}\n: {{name: 1}}")
    refusal = adapter.refusal()
    assert len(refusal) < 1000 and "it may only describe the model" in refusal
    (adapter.folder / "qlora_fsdp.yaml").write_text("model: {name: !!int x}")
    assert "!!int stands before another value" in adapter.refusal()


@pytest.mark.parametrize(
    "values",
    [{"num_hidden_layers": 10.5}, {"hidden_size": "x"}, {"num_attention_heads": 0}, {"rope_parameters": [1]}],
)
def test_a_config_that_no_model_can_be_made_from(adapter: Adapter, values: dict[str, Any]) -> None:
    config = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 1, "vocab_size": 300} | values
    adapter.write_settings({"path": None, "tokenizer_path": "bytes", "weights": "random", "config": config})
    assert "model.path=" in adapter.refusal()


def test_a_text_config_that_is_none(adapter: Adapter) -> None:
    file = adapter.base / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"text_config": 5}))
    assert "its text_config is no config" in adapter.refusal()


def test_a_kernel_is_not_named_under_another_name(adapter: Adapter) -> None:
    adapter.write_settings({"weights": "random", "config": {"_attn_implementation_internal": "attacker/kernel"}})
    assert "names code to run" in adapter.refusal()
