"""Mistakes about mixtures of experts, through the command: one message, which names the setting or file to change."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from qlora_fsdp.__main__ import main
from tests.helpers.scaled_checkpoints import make_fp8

WEIGHT = "model.layers.0.mlp.experts.gate_up_proj"
REFUSED = {
    "lora.lora_dropout=0.1": ["lora.lora_dropout=0.1", WEIGHT, "Set lora.lora_dropout=0.0"],
    "lora.use_dora=true": ["lora.use_dora=true", WEIGHT, "Set lora.use_dora=false"],
    "lora.init_lora_weights=orthogonal": ["lora.init_lora_weights=orthogonal", WEIGHT, "lora.experts=false"],
    "lora.target_modules=[gate]": ["lora.target_modules: model.layers.0.mlp.gate is a router", "Take it out"],
    "lora.target_modules=[gate_proj]": ["gate_proj without up_proj", WEIGHT, "Name both", "lora.experts=false"],
    "lora.target_modules=[q_proj,up_proj,down_proj]": ["up_proj without gate_proj", WEIGHT, "Name both"],
}


@pytest.fixture
def answer(own_process: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """`answer(model, ...)`: what one step of training says, which has to end with exit code 2, or another `code`."""

    def train(model: Path, *more: str, code: int = 2) -> str:
        data = ["data=random", "training.packing=false", "training.max_steps=1", "training.max_length=32"]
        assert main(["train", f"model.path={model}", *data, f"run.folder={tmp_path / 'run'}", *more]) == code
        printed = capsys.readouterr().err
        assert printed.count("Error: ") == 1 and "Traceback" not in printed
        return " ".join(printed.partition("Error: ")[2].split())

    return train


@pytest.mark.parametrize("setting", REFUSED)
def test_adapters_that_experts_can_not_have(answer, checkpoint, setting: str):
    said = answer(checkpoint("qwen3_moe"), setting)
    assert all(part in said for part in REFUSED[setting]), said


def test_more_experts_for_a_token_than_there_are(answer, checkpoint, tmp_path: Path):
    folder = Path(shutil.copytree(checkpoint("qwen3_moe"), tmp_path / "model"))
    config = json.loads((folder / "config.json").read_text()) | {"num_experts_per_tok": 9}
    (folder / "config.json").write_text(json.dumps(config))
    said = answer(folder)
    assert "sends each token to 9 experts (num_experts_per_tok), but model.layers.0.mlp has 4" in said


def test_a_router_with_nan(answer, checkpoint, tmp_path: Path):
    folder, key = Path(shutil.copytree(checkpoint("qwen3_moe"), tmp_path / "model")), "model.layers.1.mlp.gate.weight"
    file = next(file for file in folder.glob("*.safetensors") if key in load_file(file))
    tensors = load_file(file)
    tensors[key][1, 3] = math.nan
    save_file(tensors, file, {"format": "pt"})
    said = answer(folder)
    assert f"{file.name}: {key} has 1 NaN or infinite value" in said and "model.path" in said


def test_a_file_of_one_expert_is_missing(answer, checkpoint, tmp_path: Path):
    """As after a download that was interrupted, and then with an index that does not know of the expert either."""
    folder, part = Path(shutil.copytree(checkpoint("qwen3_moe"), tmp_path / "model")), ".0.mlp.experts.2.up_proj."
    files = {key: file for file in folder.glob("*.safetensors") for key in load_file(file)}
    lost = next(key for key in files if part in key)
    tensors = load_file(files[lost])
    save_file({key: tensor for key, tensor in tensors.items() if key != lost}, files[lost], {"format": "pt"})
    index = {key: file.name for key, file in files.items()}
    for known in (index | {lost: "lost.safetensors"}, {key: file for key, file in index.items() if key != lost}):
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": known}))
        said = answer(folder)
        assert ("lost.safetensors" if lost in known else lost) in said and "model.path" in said, said


def test_fp8_without_scales(answer, checkpoint, tmp_path: Path):
    folder = make_fp8(checkpoint("qwen3_moe"), tmp_path / "model")
    index = dict[str, str]()
    for file in list(folder.glob("*.safetensors")):
        tensors = {key: t for key, t in load_file(file).items() if not key.endswith("_scale_inv")}
        index |= dict.fromkeys(tensors, file.name)
        save_file(tensors, file, {"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    said = answer(folder)
    assert "weight_scale_inv" in said and "Copy or download it again" in said, said


def test_more_adapters_than_memory(answer, checkpoint):
    """Refused by the plan: no room for them is asked for."""
    said = answer(checkpoint("qwen3_moe"), "lora.r=20000000", code=3)
    assert "Lower lora.r=20000000, or set lora.experts=false: adapters take 257." in said, said
