"""`lora.start`: the settings of a run follow from those of the adapter, and what contradicts them is refused."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from safetensors.numpy import save_file

from qlora_fsdp.common.errors import AdapterError, ConfigError, UserError
from qlora_fsdp.config.adapter.adapter_config import TABLE_OF_ROWS, TOKEN_ROWS
from qlora_fsdp.config.adapter.lora_start import read_start
from qlora_fsdp.config.reading.compose import load_config, to_yaml
from qlora_fsdp.config.schema import Config
from qlora_fsdp.model.adapters.read_adapter import SavedAdapter
from qlora_fsdp.records.run_state import ATTEMPT, START_FOLDER, describe_attempt
from qlora_fsdp.records.start_folder import find_start, is_restart, keep_start
from qlora_fsdp.training import start_adapter as training_start

LAYER = "base_model.model.model.layers.0.self_attn.q_proj"
SAVED = {
    "peft_type": "LORA",
    "task_type": "CAUSAL_LM",
    "base_model_name_or_path": "org/Base",
    "r": 4,
    "lora_alpha": 12,
    "lora_dropout": 0.25,
    "target_modules": ["v_proj", "q_proj"],
    "rank_pattern": {"q_proj": 3},
    "use_rslora": True,
}


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    return write_adapter(tmp_path / "sft" / "adapter")


def write_adapter(folder: Path, **values: Any) -> Path:
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text(json.dumps(SAVED | values))
    shapes = {"A": (3, 8), "B": (8, 3)}
    tensors = {f"{LAYER}.lora_{letter}.weight": np.zeros(shape, np.float32) for letter, shape in shapes.items()}
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def load(adapter: Path, *argv: str) -> Config:
    return load_config([f"lora.start={adapter}", *argv], find_start=find_start)


def start_of(config: Config) -> Path:
    assert config.lora.start is not None
    return find_start(config.lora.start, config.run, config.checkpoint)


def refusal(adapter: Path, *argv: str) -> str:
    with pytest.raises(UserError) as caught:
        load(adapter, *argv)
    return str(caught.value)


def test_the_adapters_settings_are_the_runs(adapter: Path) -> None:
    config = load(adapter, "run.name=r${lora.r}")
    lora = config.lora
    assert (lora.r, lora.lora_alpha, lora.lora_dropout, lora.use_rslora) == (4, 12, 0.25, True)
    assert (lora.target_modules, lora.rank_pattern, lora.experts) == (["q_proj", "v_proj"], {"q_proj": 3}, False)
    assert config.run.name == "r4"
    assert config.model.path == "org/Base"  # as no model is named
    assert load_config([]).lora == Config().lora  # nothing of it stays


def test_what_is_written_alike_is_no_contradiction(adapter: Path, tmp_path: Path) -> None:
    """The config.yaml of the run that made the adapter, for example, names all of its settings."""
    same = ["lora.r=4", "lora.target_modules=[v_proj,q_proj]", "lora.lora_alpha=12", "lora.experts=true"]
    assert load(adapter, *same, "lora.lora_dropout=0").lora.lora_dropout == 0
    file = tmp_path / "config.yaml"
    file.write_text(to_yaml(load(adapter)))
    assert load_config(["--config", str(file)], find_start=find_start).lora == load(adapter).lora


def test_all_contradictions_are_told_at_once(adapter: Path, tmp_path: Path) -> None:
    """Those that have the schema's defaults too: somebody wrote them."""
    message = refusal(adapter, "lora.r=16", "lora.lora_alpha=32", "lora.use_dora=true", "training.max_length=x")
    assert "4 settings can't be used" in message
    assert f"lora.r=16 contradicts lora.start={adapter}, whose adapter has lora.r=4. Leave lora.r out" in message
    assert "lora.lora_alpha=32" in message and "lora.use_dora=true contradicts" in message
    assert "lora.r=64 contradicts" in refusal(adapter, "experiment=qlora_paper")
    assert "lora.target_modules=[q_proj,k_proj,v_proj,o_proj] contradicts" in refusal(adapter, "lora=attention")
    assert "lora.init_lora_weights=gaussian has no effect" in refusal(adapter, "lora.init_lora_weights=gaussian")
    (tmp_path / "my.yaml").write_text("lora: {r: 16}")
    with pytest.raises(ConfigError, match=r"lora\.r=16 contradicts"):
        load_config(["--config", str(tmp_path / "my.yaml"), f"lora.start={adapter}"])


def test_positions_stay_scaled(adapter: Path) -> None:
    """An adapter that learned scaled positions once went on with the base's own, and nothing said so."""
    scaled = {"rope_type": "yarn", "factor": 4.0, "beta_fast": 16.0}
    notes = {"model": {"path": "org/Base", "rope_scaling": scaled}}
    (adapter / "qlora_fsdp.yaml").write_text(yaml.safe_dump(notes))
    assert load(adapter).model.rope_scaling == scaled
    assert load(adapter, "model.path=/models/base").model.rope_scaling == scaled
    longer = load(adapter, "model.rope_scaling={factor: 8.0}").model
    assert longer.rope_scaling == scaled | {"factor": 8.0}


def test_another_system_prompt_is_told(adapter: Path) -> None:
    """`chat` and `evaluate` begin conversations with the adapter's own; a run has the one that is set, or none."""
    (adapter / "qlora_fsdp.yaml").write_text(yaml.safe_dump({"data": {"system_prompt": "Be terse."}}))
    start, about = SavedAdapter(adapter), read_start(adapter)
    told = "It was trained with data.system_prompt=Be terse., and this run has data.system_prompt=null."
    assert told in training_start._notes(start, about, load(adapter))
    (note,) = training_start._notes(start, about, load(adapter, "data.system_prompt=Be terse."))
    assert note.startswith("The adapter starts from")


def test_the_labels_of_a_head_keep_their_order(adapter: Path) -> None:
    notes = {"task": {"name": "sequence_classification", "labels": ["good", "bad"]}}
    (adapter / "qlora_fsdp.yaml").write_text(yaml.safe_dump(notes))
    task = "task=sequence_classification"
    message = refusal(adapter, task, "task.labels=[bad,good]")
    assert f"task.labels=[bad,good] has the labels of lora.start={adapter} in another order" in message
    assert "in that of task.labels=[good,bad]" in message
    for labels in ("good,bad", "ham,spam"):
        assert load(adapter, task, f"task.labels=[{labels}]").task.labels == labels.split(",")


@pytest.mark.parametrize("name", ["org/Base", "/models/base", "other/base", "/cache/models--org--Base/snapshots/0a1b"])
def test_the_base_may_be_elsewhere(adapter: Path, name: str) -> None:
    assert load(adapter, f"model.path={name}").model.path == name


def test_another_base_is_refused(adapter: Path) -> None:
    message = refusal(adapter, "model.path=org/Other")
    assert f"model.path=org/Other is not the base of lora.start={adapter}, which was trained on org/Base" in message
    assert "Set model.path=org/Base" in message and "base_model_name_or_path" in message
    notes = {"base_fingerprint": "0123", "model": {"path": "org/Base"}}
    (adapter / "qlora_fsdp.yaml").write_text(yaml.safe_dump(notes))
    assert load(adapter, "model.path=org/Other").model.path == "org/Other"  # its weights will be compared


def test_an_adapter_that_corrects_another_rounding_is_refused(adapter: Path) -> None:
    quant = {"load_in_4bit": False, "compressed_tensors": "int4", "group_size": 128}
    (adapter / "qlora_fsdp.yaml").write_text(yaml.safe_dump({"corrected_format": "int4", "quant": quant}))
    assert load(adapter, "quant=int4", "quant.group_size=128").quant.base_format == "int4"
    assert "quant=nf4 is not how the base of lora.start=" in refusal(adapter)
    message = refusal(adapter, "quant=int4")
    assert "quant.group_size=32 is not that of the base" in message and "Set quant.group_size=128." in message


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"peft_type": "LOHA"}, "is LOHA, bias=none; only LoRA adapters"),
        ({"bias": "all"}, "only LoRA adapters without biases"),
        ({"init_lora_weights": "pissa"}, "also changes the base's weights"),
        ({"use_bdlora": {"x": 1}}, "set lora.start to a plain LoRA"),
        ({"r": 0}, "r or rank_pattern in adapter_config.json is not what PEFT writes"),
        ({"r": 10**30}, "r or rank_pattern"),
        ({"lora_dropout": "x"}, "lora_dropout in adapter_config.json"),
        ({"use_dora": "yes"}, "use_dora in adapter_config.json"),
        ({"target_modules": [1]}, "target_modules in adapter_config.json"),
        ({"base_model_name_or_path": "${oc.env:HOME}"}, "is no plain value"),
    ],
)
def test_an_adapter_that_is_none(tmp_path: Path, values: dict[str, Any], reason: str) -> None:
    folder = write_adapter(tmp_path / "bad", **values)
    message = refusal(folder)
    assert reason.lower() in message.lower() and str(folder) in message


def test_a_folder_that_holds_none(adapter: Path, tmp_path: Path) -> None:
    assert f"Set lora.start={adapter.parent}/adapter." in refusal(adapter.parent)
    assert "holds no adapter" in refusal(tmp_path / "nothing")
    assert "model.path" not in refusal(tmp_path / "nothing"), "which an adapter would have named"
    assert "model.path=/nowhere" in refusal(tmp_path / "nothing", "model.path=/nowhere"), "somebody wrote it"
    (adapter / "chat_template.jinja").symlink_to("/etc/hostname")
    assert "chat_template.jinja leads to a file outside" in refusal(adapter)
    (adapter / "chat_template.jinja").unlink()
    (adapter / "adapter_model.safetensors").write_bytes(b"\xff" * 64)
    (adapter / "adapter_config.json").write_text(json.dumps(SAVED | {"layers_to_transform": [0]}))
    with pytest.raises(AdapterError, match="its weights can't be read"):
        load(adapter)


def test_a_run_that_resumes_reads_its_copy(adapter: Path, tmp_path: Path) -> None:
    run, other = tmp_path / "run", tmp_path / "other"
    run.mkdir()
    keep_start(adapter, run)
    (run / "checkpoints" / "step-00000002").mkdir(parents=True)
    own, typed = run / START_FOLDER, [f"run.folder={run}"]
    resume = f"checkpoint.resume={run / 'checkpoints' / 'step-00000002'}"
    (adapter / "adapter_config.json").write_text(json.dumps(SAVED | {"r": 8}))  # it is trained once more meanwhile
    assert start_of(load(adapter, *typed)) == own and load(adapter, *typed).lora.r == 4
    assert start_of(load(adapter, f"run.folder={other}", resume)) == own
    for anew in ("run.overwrite=true", "checkpoint.resume=none"):
        assert start_of(load(adapter, *typed, anew)) == adapter and load(adapter, *typed, anew).lora.r == 8
    (adapter / "adapter_config.json").unlink()
    assert load(adapter, *typed).lora.r == 4
    assert "holds no adapter" in refusal(adapter, *typed, "run.overwrite=true")


def test_only_a_later_start_of_the_same_launch_is_a_restart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config(["model=tiny", "data=random", f"run.folder={tmp_path}"])
    for name in ("SLURM_JOB_ID", "SLURM_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    now = describe_attempt(os.environ)
    for before, is_later in (
        (now | {"restarts": [0, 0]}, True),
        (now, False),
        (now | {"launch": "another", "restarts": [0, 0]}, False),
        *((damaged, False) for damaged in ({}, {"a": 1}, now | {"restarts": None}, now | {"restarts": ["0"]})),
    ):
        (tmp_path / ATTEMPT).write_text(json.dumps(before))
        assert is_restart(config.run) == is_later, before


def test_the_copy_replaces_an_earlier_one_and_nothing_else(adapter: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (adapter / "notes.txt").write_text("mine")
    of_tokenizer = ["tokenizer.model", "additional_chat_templates/tool_use.jinja"]
    for name in of_tokenizer:
        (adapter / name).parent.mkdir(exist_ok=True)
        (adapter / name).write_text("own")
    for rank in (4, 8):
        (adapter / "adapter_config.json").write_text(json.dumps(SAVED | {"r": rank}))
        keep_start(adapter, run)
    found = {str(path.relative_to(run / START_FOLDER)) for path in (run / START_FOLDER).rglob("*") if path.is_file()}
    assert found == {"adapter_config.json", "adapter_model.safetensors", *of_tokenizer}
    assert json.loads((run / START_FOLDER / "adapter_config.json").read_text())["r"] == 8
    assert [path.name for path in run.iterdir()] == [START_FOLDER]
    keep_start(run / START_FOLDER, run)  # as a run does that resumes


def test_an_adapter_in_the_hubs_cache_is_copied_where_its_links_lead(adapter: Path, tmp_path: Path) -> None:
    """`hf download` names such a folder."""
    snapshot, run = tmp_path / "models--org--name" / "snapshots" / "abc", tmp_path / "run"
    run.mkdir()
    snapshot.mkdir(parents=True)
    blobs = adapter.rename(tmp_path / "models--org--name" / "blobs")
    for file in blobs.iterdir():
        (snapshot / file.name).symlink_to(f"../../blobs/{file.name}")
    assert load(snapshot, f"run.folder={run}").lora.r == 4
    keep_start(snapshot, run)
    for file in blobs.iterdir():
        assert not (run / START_FOLDER / file.name).is_symlink()
        assert (run / START_FOLDER / file.name).read_bytes() == file.read_bytes()
    (snapshot / "tokenizer.json").symlink_to("/etc/hostname")
    with pytest.raises(OSError, match="leads out of the adapter's folder"):
        keep_start(snapshot, run)


def test_tables_with_rows_for_other_tokens_each_are_refused(tmp_path: Path) -> None:
    """Both tables have as many rows, so their shapes alone would fit."""
    tokens = {"embed_tokens": [5, 9], "lm_head": [5, 7]}
    folder = write_adapter(tmp_path / "adapter", trainable_token_indices=tokens)
    tables = ("base_model.model.model.embed_tokens", "base_model.model.lm_head")
    rows = {f"{table}.{TOKEN_ROWS}": np.zeros((2, 8), np.float32) for table in tables}
    save_file(rows, folder / "adapter_model.safetensors")
    with pytest.raises(AdapterError, match="other tokens of the head than of the embeddings"):
        SavedAdapter(folder).read_tokens()


@pytest.mark.parametrize(
    ("tokens", "num_rows"), [([2, 12], 2), (None, 2), ([2, 3], 0), ({"embed_tokens": [2], "other": [3]}, 2)]
)
def test_rows_that_do_not_fit_their_table_are_refused(tmp_path: Path, tokens: Any, num_rows: int) -> None:
    """The table is in the file, so that nothing else would tell before the rows are written into it."""
    folder = write_adapter(tmp_path / "adapter", trainable_token_indices=tokens)
    table = "base_model.model.lm_head"
    tensors = {f"{table}.{TABLE_OF_ROWS}": np.zeros((12, 8))}
    if num_rows:
        tensors[f"{table}.{TOKEN_ROWS}"] = np.zeros((num_rows, 8))
    save_file(tensors, folder / "adapter_model.safetensors")
    with pytest.raises(AdapterError, match="are not the tokens that its file has rows for"):
        SavedAdapter(folder).read_tokens()
