"""FP8 and MXFP4 by rows: the values of transformers' own functions, and what is said about files that are wrong."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.helpers.experts import FORMATS, build, make_experts
from tests.helpers.scaled_checkpoints import make_fp8, make_mxfp4, to_fp8
from torch import Tensor
from transformers.integrations.finegrained_fp8 import Fp8Dequantize, _dequantize_fp8_weight
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from qlora_fsdp.common.errors import CheckpointError
from qlora_fsdp.weights.fill import fill_from_files
from qlora_fsdp.weights.safetensors_files import read_headers
from qlora_fsdp.weights.scaled import ScaledTensor, attach_scales, read_dequantized

FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
MXFP4 = {"quant_method": "mxfp4"}


def read(folder: Path, tensors: dict[str, Tensor], quantization: dict, name: str, dtype: torch.dtype) -> Tensor:
    save_file(tensors, folder / "model.safetensors")
    stored = attach_scales(read_headers(folder), quantization)[name]
    assert isinstance(stored, ScaledTensor)
    return torch.cat(list(read_dequantized(stored, dtype))).view(stored.shape)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(256, 384), (3, 256, 128), (128, 128)])
def test_fp8_in_whole_blocks(tmp_path: Path, shape: tuple[int, ...], dtype: torch.dtype):
    values, scales = to_fp8(torch.randn(shape), (128, 128))
    found = read(tmp_path, {"w": values, "w_scale_inv": scales}, FP8, "w", dtype)
    assert found.equal(Fp8Dequantize(None)._dequantize_one(values, scales, dtype))


@pytest.mark.parametrize("shape", [(576, 256), (130, 200), (2, 64, 300), (5, 7)])
def test_fp8_whose_last_blocks_are_smaller(tmp_path: Path, shape: tuple[int, ...]):
    values, scales = to_fp8(torch.randn(shape), (128, 128))
    found = read(tmp_path, {"w": values, "w_scale_inv": scales}, FP8, "w", torch.float32)
    assert found.equal(_dequantize_fp8_weight(values, scales, [128, 128], torch.float32))


@pytest.mark.parametrize("scale_shape", [(), (1,), (1, 1)])
def test_fp8_with_one_scale(tmp_path: Path, scale_shape: tuple[int, ...]):
    values, scales = torch.randn(6, 10).to(torch.float8_e4m3fn), torch.tensor(0.3).view(scale_shape)
    tensors = {"w": values, "w_scale_inv": scales, "w.activation_scale": torch.ones(1)}
    found = read(tmp_path, tensors, {"quant_method": "fp8", "weight_block_size": None}, "w", torch.float32)
    assert found.equal(values.float() * 0.3)


def test_fp8_in_blocks_that_no_integer_counts(tmp_path: Path):
    """A block larger than the tensor is as large as the tensor, whatever a file says."""
    values, scales = torch.randn(6, 10).to(torch.float8_e4m3fn), torch.full((1, 1), 0.3)
    found = read(
        tmp_path, {"w": values, "w_scale_inv": scales}, {**FP8, "weight_block_size": [2**70] * 2}, "w", torch.float32
    )
    assert found.equal(values.float() * 0.3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_mxfp4(tmp_path: Path, dtype: torch.dtype):
    blocks = torch.randint(0, 256, (3, 10, 4, 16), dtype=torch.uint8)
    blocks[0, 0] = torch.arange(64).view(4, 16)
    scales = torch.randint(0 if dtype != torch.float16 else 110, 254, blocks.shape[:-1], dtype=torch.uint8)
    found = read(tmp_path, {"w_blocks": blocks, "w_scales": scales}, MXFP4, "w", dtype)
    assert found.mT.equal(convert_moe_packed_tensors(blocks, scales, dtype=dtype))


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, Tensor]]:
    """The tensors of a small checkpoint in FP8 or MXFP4, and its folder."""
    base = tmp_path_factory.mktemp("scaled")
    make_fp8(make_experts("qwen3_moe", base / "qwen3", max_shard_size="1GB"), base / "fp8")
    make_mxfp4(make_experts("gpt_oss", base / "gpt", max_shard_size="1GB"), base / "mxfp4")
    return lambda method: (base / method, load_file(base / method / "model.safetensors"))


def refusal(source: Path, folder: Path, tensors: dict[str, Tensor], config: str | None = None) -> str:
    """What is said about files with these tensors."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(config or (source / "config.json").read_text())
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError) as caught:
        meta = build(folder, FORMATS["nf4"])
        meta.model.to_empty(device="cpu")
        fill_from_files(meta.assignments, torch.device("cpu"), torch.bfloat16)
    return str(caught.value)


EXPERT = "model.layers.0.mlp.experts.7.up_proj.weight"


def test_scales_that_are_lost_or_do_not_fit(experts, tmp_path: Path):
    source, tensors = experts("fp8")
    lost = {key: t for key, t in tensors.items() if key != f"{EXPERT}_scale_inv"}
    said = refusal(source, tmp_path / "lost", lost)
    assert "The checkpoint is in fp8, and 1 of its tensors can't be" in said
    assert f"{EXPERT} has no {EXPERT}_scale_inv" in said
    other = tensors | {f"{EXPERT}_scale_inv": torch.ones(3, 5)}
    assert f"{EXPERT}_scale_inv (float32 [3, 5]) does not fit {EXPERT} (float8_e4m3fn [64, 64])" in refusal(
        source, tmp_path / "other", other
    )
    codes = tensors | {EXPERT: tensors[EXPERT].view(torch.int8)}
    assert f"does not fit {EXPERT} (int8 [64, 64])" in refusal(source, tmp_path / "codes", codes)
    missing = {key: t for key, t in tensors.items() if key not in (EXPERT, f"{EXPERT}_scale_inv")}
    assert f"1 missing from the files:\n  - {EXPERT}" in refusal(source, tmp_path / "missing", missing)

    source, tensors = experts("mxfp4")
    name = "model.layers.1.mlp.experts.down_proj"
    del tensors[f"{name}_scales"]
    assert f"{name}_blocks has no {name}_scales" in refusal(source, tmp_path / "mxfp4", tensors)


def test_fp8_that_the_config_does_not_declare(experts, tmp_path: Path):
    source, tensors = experts("fp8")
    config = (source / "config.json").read_text().replace('"quantization_config"', '"another_config"')
    plain = {key: t for key, t in tensors.items() if not key.endswith("_scale_inv")}
    said = refusal(source, tmp_path / "undeclared", plain, config)
    assert "model.layers.0.mlp.experts.gate_up_proj: codes in torch.float8_e4m3fn without their scales" in said


def test_tensors_of_two_kinds_for_one(experts, tmp_path: Path):
    source, tensors = experts("fp8")
    del tensors[f"{EXPERT}_scale_inv"]
    mixed = tensors | {EXPERT: torch.zeros(64, 64, dtype=torch.bfloat16)}
    said = refusal(source, tmp_path / "mixed", mixed)
    assert "gate_up_proj: of tensors in bfloat16 and float8_e4m3fn with 2 scales of float32 a row" in said


@pytest.mark.parametrize("what", ["value", "scale"])
def test_values_that_are_not_finite(experts, tmp_path: Path, what: str):
    source, tensors = experts("fp8")
    if what == "value":
        tensors[EXPERT].view(torch.uint8)[5, 3] = 0x7F
    else:
        tensors[f"{EXPERT}_scale_inv"][1, 1] = math.inf
    count = "1 NaN or infinite value" if what == "value" else "1024 NaN or infinite values"
    said = refusal(source, tmp_path / "fp8", tensors).replace(",", "")
    assert f"{EXPERT} has {count}" in said

    source, tensors = experts("mxfp4")
    name = "model.layers.1.mlp.experts.down_proj"
    tensors[f"{name}_scales"][2, 3, 1] = 255
    tensors[f"{name}_blocks"][2, 3, 1] = 0x12
    assert f"{name}_blocks has 32 NaN or infinite values" in refusal(source, tmp_path / "mxfp4", tensors)
