"""Checkpoints already quantized by bitsandbytes, whole and torn."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.helpers.checkpoints import quantize_checkpoint

from qlora_fsdp.common.errors import CheckpointError
from qlora_fsdp.config.schema import ModelConfig, QuantConfig, Weights
from qlora_fsdp.layers.quantized.linear import QuantizedLinear
from qlora_fsdp.model.build import BuildSettings, build_model
from qlora_fsdp.model.find import find_model

LAYER = "model.layers.1.mlp.up_proj"


def build(folder: Path, weights: Weights = Weights.checkpoint):
    files = find_model(ModelConfig(path=str(folder), weights=weights), True, lambda error: error)
    return build_model(files, BuildSettings(QuantConfig(), torch.float32, "eager"))


@pytest.mark.parametrize(
    ("options", "lost"),
    [
        ({"load_in_4bit": True}, f"{LAYER}.weight.absmax"),
        ({"load_in_4bit": True, "bnb_4bit_use_double_quant": True}, f"{LAYER}.weight.nested_absmax"),
        ({"load_in_4bit": True}, f"{LAYER}.weight.quant_state.bitsandbytes__fp4"),
        ({"load_in_8bit": True}, f"{LAYER}.SCB"),
    ],
)
def test_scales_that_are_lost_are_named(checkpoint: Callable[..., Path], tmp_path: Path, options: dict, lost: str):
    folder = quantize_checkpoint(checkpoint("llama", torch.float32), tmp_path / "quantized", **options)
    tensors = load_file(folder / "model.safetensors")
    del tensors[lost]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"does not fit its config\.json") as caught:
        build(folder)
    assert (lost if "absmax" in lost else f"{LAYER}.weight") in str(caught.value)


def test_random_weights_are_quantized_as_asked(checkpoint: Callable[..., Path], tmp_path: Path):
    folder = quantize_checkpoint(checkpoint("llama", torch.float32), tmp_path / "quantized", load_in_8bit=True)
    built = build(folder, Weights.random)
    formats = {m.format.quant_type for m in built.model.modules() if isinstance(m, QuantizedLinear)}
    assert formats == {"nf4"} and built.notes == []


def test_other_quantization_methods_are_refused(checkpoint: Callable[..., Path], tmp_path: Path):
    folder = shutil.copytree(checkpoint("llama"), tmp_path / "gptq")
    config = (folder / "config.json").read_text()
    (folder / "config.json").write_text(config.replace("{", '{"quantization_config": {"quant_method": "gptq"},', 1))
    with pytest.raises(CheckpointError, match="gptq"):
        build(folder)
