"""What is built from model files, and that building leaves them as they are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.helpers.checkpoints import SHAPE, quantize_checkpoint, write_checkpoint
from tests.helpers.experts import EXPERTS, build, num_quantized
from torch import nn
from transformers import CONFIG_MAPPING, AutoConfig, Llama4Config, Llama4ForConditionalGeneration

from qlora_fsdp.common.errors import CheckpointError
from qlora_fsdp.config.schema import ModelConfig, QuantConfig, TaskConfig, TaskName
from qlora_fsdp.layers.quantized.linear import QuantizedLinear
from qlora_fsdp.model.build import BuildSettings, MetaModel, build_model
from qlora_fsdp.model.find import ModelFiles, find_model
from qlora_fsdp.model.limited_building import LARGE, LimitedBuilding

CLASSIFIER = TaskConfig(name=TaskName.sequence_classification, labels=["no", "maybe", "yes"])
CASES = {"full": TaskConfig(), "quantized": TaskConfig(), "classifier": CLASSIFIER}


def describe(meta: MetaModel) -> dict[str, Any]:
    """All that can be compared: modules are others in each build."""
    return {
        "config": meta.config.to_dict(),
        "modules": str(meta.model),
        "parameters": {name: (param.shape, param.dtype) for name, param in meta.model.named_parameters()},
        "assignments": [(a.name, a.stored, a.stored_parts, a.nested_offset, a.copies) for a in meta.assignments],
        "format": meta.format,
        "notes": meta.notes,
        "head": meta.head,
    }


@pytest.mark.parametrize("case", CASES)
def test_two_builds_from_the_same_files_are_equal(checkpoint: Callable[..., Path], tmp_path: Path, case: str):
    folder = checkpoint("llama", torch.float32)
    if case == "quantized":
        folder = quantize_checkpoint(folder, tmp_path / "quantized", load_in_4bit=True)
    files = find_model(ModelConfig(path=str(folder)), True, lambda error: error)
    before = files.config.to_dict()
    settings = BuildSettings(QuantConfig(), torch.float32, "eager", CASES[case], pad_token_id=0)
    first, second = (describe(build_model(files, settings)) for _ in range(2))
    assert first == second and files.config.to_dict() == before
    assert (first["head"] == ["score"]) == (case == "classifier")
    assert any("already quantized" in note for note in first["notes"]) == (case == "quantized")


def test_no_layer_is_taken_for_the_head_that_a_model_ties(tmp_path: Path):
    """OLMo's norms have no weights, so its last layer has the last parameter."""
    config = AutoConfig.for_model("olmo", **SHAPE, tie_word_embeddings=True)
    folder = write_checkpoint(config, tmp_path / "olmo", max_shard_size="5GB")
    options: dict[str, Any] = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    stock = load_file(quantize_checkpoint(folder, tmp_path / "quantized", **options) / "model.safetensors")
    found = {
        name for name, layer in build(folder, QuantConfig()).model.named_modules() if isinstance(layer, QuantizedLinear)
    }
    assert found == {name.removesuffix(".weight.absmax") for name in stock if name.endswith(".absmax")}


def test_files_of_llama4_with_its_towers_fill_the_text_part(tmp_path: Path):
    """transformers' class for text alone, made from a config that describes images too; the experts are quantized."""
    text = AutoConfig.for_model("llama4_text", **SHAPE, **EXPERTS["llama4_text"]).to_dict()
    sides = {"vision_output_dim": 64, "projector_input_dim": 64, "projector_output_dim": 64, "intermediate_size": 256}
    vision = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28, "patch_size": 14}
    whole = Llama4ForConditionalGeneration(Llama4Config(text_config=text, vision_config=vision | sides))
    whole.save_pretrained(tmp_path)
    meta = build(tmp_path, QuantConfig())
    note = "only the text part of Llama4ForCausalLM is used: multi_modal_projector, vision_model left out"
    assert meta.notes == [note] and num_quantized(meta) == 4


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("blip-2", "its forward wants pixel_values beside tokens"),
        ("florence2", "it is an encoder with a decoder, which writes about what the encoder has read"),
    ],
)
def test_a_class_that_can_not_learn_from_text_alone(family: str, reason: str):
    files = ModelFiles(None, CONFIG_MAPPING[family]())
    with pytest.raises(CheckpointError, match=f"can't be trained on text alone: {reason}. Set model.path"):
        build_model(files, BuildSettings(QuantConfig(), torch.float32, "eager"))


def test_a_model_of_images_alone():
    files = ModelFiles(None, CONFIG_MAPPING["vit"]())
    with pytest.raises(CheckpointError) as told:
        build_model(files, BuildSettings(QuantConfig(), torch.float32, "eager"))
    assert str(told.value).startswith("model.path=vit can't be built as AutoModelForCausalLM: Unrecognized")
    assert str(told.value).endswith(". Set model.path to another model, or task.")


def test_a_tower_that_lies_within_the_text_model():
    """GIT's image encoder has a config of its own."""
    files = ModelFiles(None, CONFIG_MAPPING["git"]())
    meta = build_model(files, BuildSettings(QuantConfig(load_in_4bit=False), torch.float32, "eager"))
    assert not any("vision" in name for name, _ in meta.model.named_parameters())
    assert any("git.image_encoder left out" in note for note in meta.notes)
    with pytest.raises(RuntimeError, match="left out"):
        meta.model.get_submodule("git.image_encoder")(torch.zeros(1))


def test_large_zeros_are_made_on_meta():
    with LimitedBuilding(on_meta=True):
        assert torch.zeros(LARGE).is_meta and torch.zeros((2, LARGE)).is_meta
        assert not torch.zeros(8, 8).is_meta and not torch.zeros(LARGE, device="cpu").is_meta


def test_numbers_are_drawn_only_for_tensors_with_memory():
    with LimitedBuilding(on_meta=True):
        on_meta, real = (nn.init.normal_(torch.empty(8, device=device)) for device in ("meta", "cpu"))
    assert on_meta._version == 0 and real._version == 1  # how often each was written to
