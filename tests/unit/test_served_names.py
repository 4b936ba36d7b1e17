"""Adapters of checkpoints whose files have other names than transformers' classes: PEFT's, and a server's.

A server is stood in for by the class of the whole checkpoint, whose modules are named as the files are, in stock PEFT.
tests/serving runs a real one.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import peft
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tests.helpers.checkpoints import DELTA, EXPERTS, SHAPE
from tests.helpers.lines import write_lines
from tests.helpers.quick_config import load_config
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from qlora_fsdp import generate, merge
from qlora_fsdp.config.world import World
from qlora_fsdp.training.run import run

INPUT_IDS = torch.arange(40).view(2, 20) * 7 % 256
SEEN = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "image_size": 28, "patch_size": 14}
QWEN_TOWER = {**SEEN, "depth": 1, "num_heads": 2, "out_hidden_size": 64, "num_position_embeddings": 4}
MIXTURE = {**EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 64}
LLAMA4 = {"num_local_experts": 4, "head_dim": 16, "intermediate_size_mlp": 128, "attention_chunk_size": 16}
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3_5": {"text_config": {**SHAPE, **DELTA}, "vision_config": QWEN_TOWER},
    "qwen3_5_moe": {"text_config": {**SHAPE, **DELTA, **MIXTURE}, "vision_config": QWEN_TOWER},
    "llama4": {
        "text_config": {**SHAPE, **LLAMA4},
        "vision_config": {**SEEN, "num_attention_heads": 2, "vision_output_dim": 64},
    },
}
CASES = {  # the model, and whether its files have a tensor for each expert
    "qwen3_5": ("qwen3_5", True),
    "qwen3_5_moe, an expert a tensor": ("qwen3_5_moe", True),
    "qwen3_5_moe, all experts in one": ("qwen3_5_moe", False),
    "llama4": ("llama4", False),
}


class Made(NamedTuple):
    """A checkpoint, the run that trained an adapter on it, and the adapter as it was written for servers."""

    base: Path
    run: Path
    exported: Path


def train(base: Path, folder: Path, *more: str) -> Path:
    rows = write_lines(folder.parent / "rows.jsonl", [{"text": "The quick brown fox jumps over the lazy dog."}])
    settings = [f"model.path={base}", f"run.folder={folder}", f"data.path={rows}", "model.tokenizer_path=bytes"]
    settings += ["quant=none", "training.precision=float32", "training.max_steps=4", "training.learning_rate=3e-2"]
    settings += ["training.max_length=64", "training.packing=false", f"data.cache_folder={folder.parent / 'cache'}"]
    run(load_config([*settings, *more]), World())
    return folder


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Made]:
    found: dict[str, Made] = {}

    def make(case: str) -> Made:
        if case not in found:
            family, is_original = CASES[case]
            folder = tmp_path_factory.mktemp("made")
            torch.manual_seed(0)
            config = AutoConfig.for_model(family, **CONFIGS[family], initializer_range=0.1, tie_word_embeddings=False)
            model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
            model.save_pretrained(folder / "base", save_original_format=is_original)
            trained = train(folder / "base", folder / "run")
            arguments = [f"adapter={trained / 'adapter'}", f"out={folder / 'exported'}", "write=adapter"]
            assert merge.main(arguments) == 0
            found[case] = Made(folder / "base", trained, folder / "exported")
        return found[case]

    return make


def logits(auto_class: Any, base: Path, adapter: Path | None) -> Tensor:
    """Of the base, or of the base with the adapter, by stock libraries."""
    model = auto_class.from_pretrained(base, dtype=torch.float32).eval()
    if adapter is not None:
        model = peft.PeftModel.from_pretrained(model, adapter).eval()
    with torch.no_grad():
        return model(input_ids=INPUT_IDS).logits


def keys_of(folder: Path) -> set[str]:
    found: set[str] = set()
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as tensors:
            found |= set(tensors.keys())
    return found


@pytest.mark.parametrize("case", CASES)
def test_the_adapter_is_for_peft_and_the_export_has_the_names_of_the_files(made: Callable[[str], Made], case: str):
    base, trained, exported = made(case)
    before = logits(AutoModelForCausalLM, base, None)
    after = logits(AutoModelForCausalLM, base, trained / "adapter")
    assert (after - before).abs().max() > 1e-2
    in_files = keys_of(base)
    layers = {key.partition(".lora_")[0].removeprefix("base_model.model.") for key in keys_of(exported)}
    experts = {layer for layer in layers if layer.endswith((".experts", ".experts.base_layer"))}
    assert all(f"{layer}.weight" in in_files for layer in layers - experts)
    modules = {layer.removesuffix(".base_layer") for layer in experts}
    assert bool(modules) == (case in ("qwen3_5_moe, all experts in one", "llama4"))
    assert all(f"{module}.gate_up_proj" in in_files for module in modules)


@pytest.mark.parametrize("case", [case for case in CASES if case != "qwen3_5_moe, an expert a tensor"])
def test_the_export_computes_what_the_adapter_does_where_modules_have_the_names_of_the_files(
    made: Callable[[str], Made], case: str
):
    base, trained, exported = made(case)
    expected = logits(AutoModelForCausalLM, base, trained / "adapter")
    found = logits(AutoModelForImageTextToText, base, exported)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


def test_an_export_with_an_adapter_for_each_expert_adds_what_the_adapter_does(made: Callable[[str], Made], tmp_path):
    base, trained, exported = made("qwen3_5_moe, an expert a tensor")
    weights = {key: value for file in base.glob("*.safetensors") for key, value in load_file(file).items()}
    tensors = load_file(exported / "adapter_model.safetensors")
    config = json.loads((exported / "adapter_config.json").read_text())
    for key in [key for key in tensors if ".lora_A." in key]:
        name = key.removeprefix("base_model.model.").replace(".lora_A.", ".")
        product = tensors[key.replace(".lora_A.", ".lora_B.")] @ tensors[key]
        weights[name] += config["lora_alpha"] / config["r"] * product
    model = AutoModelForImageTextToText.from_pretrained(base, dtype=torch.float32)
    model.save_pretrained(tmp_path / "added")
    (file,) = (tmp_path / "added").glob("*.safetensors")
    save_file(weights, file, {"format": "pt"})
    expected = logits(AutoModelForCausalLM, base, trained / "adapter")
    torch.testing.assert_close(
        logits(AutoModelForImageTextToText, tmp_path / "added", None), expected, rtol=0, atol=1e-4
    )


@pytest.mark.parametrize("case", CASES)
def test_it_is_said_which_adapter_is_whose(
    made: Callable[[str], Made], case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    _, trained, _ = made(case)
    card = (trained / "adapter" / "README.md").read_text()
    said = (trained / "train.log").read_text()
    command = f"qlora-fsdp merge adapter={trained / 'adapter'} out={trained / 'for-vllm'} write=adapter"
    reason = "because the base's files, by which vLLM knows layers, have other names ("
    assert command in said
    assert ("an expert a tensor" in case) == (reason not in said)
    assert "Note: the adapter is for PEFT. For vLLM it has to be written once more, because" in said
    assert "This folder is for PEFT. vLLM wants its layers in another form, because" in card
    assert "out=for-servers write=adapter" in card and "--lora-modules adapter=for-servers" in card
    capsys.readouterr()
    assert merge.main([f"adapter={trained / 'adapter'}", f"out={tmp_path / 'out'}", "write=adapter"]) == 0
    told = capsys.readouterr().err
    assert f"an adapter as vLLM reads it, by --lora-modules NAME={tmp_path / 'out'}" in told
    assert f"For PEFT and qlora-fsdp is {trained / 'adapter'}." in told


@pytest.mark.parametrize("case", ["qwen3_5"])
def test_an_export_in_use_here_is_told(made: Callable[[str], Made], case: str, capsys: pytest.CaptureFixture[str]):
    exported = made(case).exported
    base = f"model.path={made(case).base}"
    assert generate.main([f"adapter={exported}", base, "model.tokenizer_path=bytes", "prompt=a"]) == 2
    told = " ".join(capsys.readouterr().err.split())
    assert "calls layers as other files or classes of the model do" in told
    assert "Set adapter to the adapter that it was written from." in told


def test_a_layer_that_is_a_part_of_a_tensor_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """HRM's files have query, key, value and a gate in one tensor, and its model has four layers."""
    config = AutoConfig.for_model("hrm_text", **SHAPE, head_dim=16)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path / "base")
    trained = train(tmp_path / "base", tmp_path / "run", "training.max_steps=1")
    reason = "self_attn.q_proj is a part of a larger tensor in the base's files"
    assert reason in (trained / "train.log").read_text()
    assert reason in (trained / "adapter" / "README.md").read_text()
    capsys.readouterr()
    assert merge.main([f"adapter={trained / 'adapter'}", f"out={tmp_path / 'out'}", "write=adapter"]) == 2
    told = " ".join(capsys.readouterr().err.split())
    assert "no server applies an adapter of a part. Set write=model" in told
    assert "model.H_module.layers.0.self_attn.q_proj" in told and not (tmp_path / "out").exists()
    assert merge.main([f"adapter={trained / 'adapter'}", f"out={tmp_path / 'model'}"]) == 0


def test_a_base_in_a_folder_loads_from_any_other_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    config = AutoConfig.for_model("llama", **SHAPE)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path / "here" / "base")
    monkeypatch.chdir(tmp_path / "here")
    folder = train(Path("base"), tmp_path / "run")
    (tmp_path / "there").mkdir()
    monkeypatch.chdir(tmp_path / "there")
    model = peft.AutoPeftModelForCausalLM.from_pretrained(folder / "adapter")
    assert any("lora_" in name for name, _ in model.named_parameters())
    assert generate.main([f"adapter={folder / 'adapter'}", "prompt=the", "max_new_tokens=1"]) == 0
