"""What libraries raise when QLoRA and FSDP2 meet elsewhere: each cause, provoked, and what it does here instead.

docs/errors.md explains them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import bitsandbytes as bnb
import peft
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint as recompute
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from qlora_fsdp.common.errors import CheckpointError
from qlora_fsdp.config.schema import ModelConfig, QuantConfig
from qlora_fsdp.layers.quantized.format import Format
from qlora_fsdp.layers.quantized.linear import QuantizedLinear
from qlora_fsdp.model.build import BuildSettings, build_model
from qlora_fsdp.model.find import find_model


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """A mesh of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def sharded(layer: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """The layer, sharded and gathered again: as its forward sees it."""
    unit = fully_shard(nn.Sequential(layer), mesh=mesh)
    assert isinstance(unit, FSDPModule)
    unit.unshard()
    return layer


def tiny_llama() -> PreTrainedModel:
    sizes = {"vocab_size": 32, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}
    return AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", num_attention_heads=2, **sizes))


def test_only_tensors_of_floating_point_can_require_gradients() -> None:
    with pytest.raises(RuntimeError, match="Only Tensors of floating point and complex dtype can require gradients"):
        nn.Parameter(torch.zeros(2, dtype=torch.uint8))
    layer = QuantizedLinear(64, 8, bias=False, format=Format("nf4", storage=torch.uint8), dtype=torch.float32)
    assert not any(param.requires_grad for param in layer.parameters())


def test_fsdp2_loses_the_quant_state_of_bitsandbytes(mesh: DeviceMesh, caplog: pytest.LogCaptureFixture) -> None:
    theirs = bnb.nn.Linear4bit(64, 64, bias=False, quant_storage=torch.bfloat16).to("cpu")
    assert theirs.weight.quant_state is not None
    assert not hasattr(sharded(theirs, mesh).weight, "quant_state")
    theirs.quant_state = None  # as of a module that was built on meta and filled by FSDP
    with pytest.raises((AssertionError, ValueError)):  # bitsandbytes 0.50.2: ValueError: quant_state is required
        theirs(torch.randn(2, 64))
    assert "FP4 quantization state not initialized" in caplog.text
    with pytest.raises(AssertionError):  # never quantized: its weight is still a matrix
        bnb.nn.Linear4bit(64, 64, bias=False)(torch.randn(2, 64))

    ours = QuantizedLinear(64, 64, bias=False, format=Format("nf4"), dtype=torch.float32, device="cpu")
    codes, scales = ours.format.quantize_rows(torch.randn(64, 64))
    with torch.no_grad():
        ours.codes.view(torch.uint8).copy_(codes.view(torch.uint8))
        ours.scales.copy_(scales)
    expected = ours.weight.clone()
    unit = fully_shard(nn.Sequential(ours), mesh=mesh)
    assert all(isinstance(param, DTensor) for param in unit.parameters()), "codes and scales are sharded"
    unit.unshard()
    assert torch.equal(ours.weight, expected)


def test_compress_statistics_is_gone_from_a_sharded_weight(mesh: DeviceMesh) -> None:
    model = tiny_llama()
    attention = model.model.layers[0].self_attn
    attention.q_proj = bnb.nn.Linear4bit(64, 64, bias=False, quant_storage=torch.bfloat16).to("cpu")
    sharded(attention.q_proj, mesh)
    model.is_loaded_in_4bit = True
    with pytest.raises(AttributeError, match="object has no attribute 'compress_statistics'"):
        peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"]))


@pytest.mark.skipif(torch.__version__ < "2.13", reason="FSDP2 shards no integers yet: another of these messages")
def test_cb_is_gone_from_a_sharded_int8_weight(mesh: DeviceMesh) -> None:
    theirs = bnb.nn.Linear8bitLt(64, 64, bias=False, has_fp16_weights=False).to("cpu")
    with pytest.raises(AttributeError, match="object has no attribute 'CB'"):
        sharded(theirs, mesh)(torch.randn(2, 64))


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_element_0_of_tensors_does_not_require_grad() -> None:
    embedding, layer = nn.Embedding(4, 8).requires_grad_(False), nn.Linear(8, 8)
    hidden = embedding(torch.tensor([1]))
    with pytest.raises(RuntimeError, match="element 0 of tensors does not require grad"):
        recompute(layer, hidden, use_reentrant=True).sum().backward()
    recompute(layer, hidden, use_reentrant=False).sum().backward()  # as model/activations.py does it
    assert layer.weight.grad is not None


def test_key_error_modules_to_save() -> None:
    model = peft.get_peft_model(tiny_llama(), peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"]))
    lora_alone = {name: value for name, value in model.state_dict().items() if "lora_" in name}
    with pytest.raises(KeyError, match="modules_to_save"):
        peft.get_peft_model_state_dict(model, state_dict=lora_alone)
    # export.gather_trainable takes all that requires gradients, which has both.
    trainable = {name: param for name, param in model.named_parameters() if param.requires_grad}
    assert any("lm_head" in name for name in peft.get_peft_model_state_dict(model, state_dict=trainable))


def test_a_tensor_missing_from_the_files_is_named_and_never_left_on_meta(
    tmp_path: Path, checkpoint: Callable[..., Path]
) -> None:
    with pytest.raises(NotImplementedError, match="Cannot copy out of meta tensor; no data!"):
        nn.Linear(2, 2, device="meta").to("cpu")
    good, missing = checkpoint("llama"), "model.layers.1.self_attn.q_proj.weight"
    for file in good.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    index_file = tmp_path / "model.safetensors.index.json"
    index = json.loads(index_file.read_text())
    lost_file = index["weight_map"][missing]
    index["weight_map"] = {key: file for key, file in index["weight_map"].items() if file != lost_file}
    index_file.write_text(json.dumps(index))
    files = find_model(ModelConfig(path=str(tmp_path)), is_main=True, first_error=lambda error: error)
    with pytest.raises(CheckpointError, match="missing from the files:(?s:.)*" + missing.replace(".", r"\.")):
        build_model(files, BuildSettings(QuantConfig(), torch.float32, "sdpa"))
