"""Tiny checkpoints in FP8, MXFP4 and compressed-tensors' formats, written as the hub has them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    CompressedTensorsConfig,
    FineGrainedFP8Config,
    Mxfp4Config,
    PreTrainedModel,
)

from tests.helpers.compressed import LAYOUTS, compress

FP8_MAX = 448.0


def load_dequantized(folder: Path, dtype: torch.dtype = torch.bfloat16) -> PreTrainedModel:
    """What stock transformers makes of such files in full precision."""
    method = json.loads((folder / "config.json").read_text())["quantization_config"]["quant_method"]
    configs = {
        "fp8": FineGrainedFP8Config(dequantize=True),
        "mxfp4": Mxfp4Config(dequantize=True),
        "compressed-tensors": CompressedTensorsConfig(dequantize=True),
    }
    config = configs[method]
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, quantization_config=config)


def to_fp8(weight: Tensor, block: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Values, and the scale of each block of [..., rows, columns]; the last blocks may be smaller."""
    height, width = block
    rows, columns = weight.shape[-2:]
    padded = torch.nn.functional.pad(weight.float(), (0, -columns % width, 0, -rows % height))
    blocks = padded.unflatten(-1, (-1, width)).unflatten(-3, (-1, height))
    scales = blocks.abs().amax((-3, -1)) / FP8_MAX
    spread = scales.repeat_interleave(height, -2).repeat_interleave(width, -1)[..., :rows, :columns]
    return (weight.float() / spread).to(torch.float8_e4m3fn), scales


def make_fp8(source: Path, folder: Path, block: tuple[int, int] = (32, 32), scale_dtype: Any = torch.float32) -> Path:
    """`source` with its projections in FP8; norms, routers, embeddings and head stay."""

    def convert(key: str, tensor: Tensor) -> dict[str, Tensor]:
        if "_proj" not in key or tensor.ndim < 2:
            return {key: tensor}
        values, scales = to_fp8(tensor, block)
        if scale_dtype == torch.float8_e8m0fnu:
            scales = scales.log2().ceil().exp2()
            spread = scales.repeat_interleave(block[0], -2).repeat_interleave(block[1], -1)
            values = (tensor.float() / spread).to(torch.float8_e4m3fn)
        return {key: values, f"{key}_scale_inv": scales.to(scale_dtype)}

    return _rewrite(source, folder, convert, {"quant_method": "fp8", "weight_block_size": list(block)})


def make_mxfp4(source: Path, folder: Path) -> Path:
    """gpt-oss with random experts in MXFP4."""
    random = torch.Generator().manual_seed(0)

    def convert(key: str, tensor: Tensor) -> dict[str, Tensor]:
        if "experts" not in key or tensor.ndim != 3:
            return {key: tensor}
        shape = (tensor.shape[0], tensor.shape[2], tensor.shape[1] // 32, 16)  # the transpose of each matrix
        blocks = torch.randint(0, 256, shape, dtype=torch.uint8, generator=random)
        scales = torch.randint(118, 126, shape[:-1], dtype=torch.uint8, generator=random)
        return {f"{key}_blocks": blocks, f"{key}_scales": scales}

    return _rewrite(source, folder, convert, {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})


def make_compressed(
    source: Path, folder: Path, name: str, group_size: int = 32, scale_dtype: torch.dtype = torch.bfloat16
) -> Path:
    """`source` with its projections in int4 or fp8, as the package compressed-tensors writes them."""
    from compressed_tensors.quantization import QuantizationConfig, QuantizationStatus

    schemes: list[Any] = []

    def convert(key: str, tensor: Tensor) -> dict[str, Tensor]:
        if not key.endswith("_proj.weight") or tensor.ndim != 2:
            return {key: tensor}
        parts, scheme = compress(tensor, name, group_size, scale_dtype)
        schemes.append(scheme)
        return {f"{key.removesuffix('weight')}{part}": value for part, value in parts.items()}

    made = _rewrite(source, folder, convert, {})
    described = QuantizationConfig(
        config_groups={"group_0": schemes[0]},
        format=LAYOUTS[name],
        quantization_status=QuantizationStatus.COMPRESSED,
        ignore=["lm_head"],
    )
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = json.loads(described.model_dump_json())
    (folder / "config.json").write_text(json.dumps(config))
    return made


def _rewrite(source: Path, folder: Path, convert: Any, quantization: dict[str, Any]) -> Path:
    folder.mkdir(parents=True)
    weight_map = {}
    for file in sorted(source.glob("*.safetensors")):
        tensors = {name: t for key, tensor in load_file(file).items() for name, t in convert(key, tensor).items()}
        save_file({name: t.contiguous() for name, t in tensors.items()}, folder / file.name, {"format": "pt"})
        weight_map |= dict.fromkeys(tensors, file.name)
    config = json.loads((source / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": quantization}))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    if (source / "generation_config.json").is_file():
        shutil.copyfile(source / "generation_config.json", folder / "generation_config.json")
    return folder
