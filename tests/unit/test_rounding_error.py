"""Adapters that start from the rounding's error are the best of their rank, and bring the model nearer to the full."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft.utils.loftq_utils import _low_rank_decomposition
from safetensors.torch import load_file, save_file
from tests.helpers.checkpoints import quantize_checkpoint
from tests.helpers.one_process import one_process
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, PreTrainedModel

from qlora_fsdp.common.errors import AdapterError, CheckpointError
from qlora_fsdp.config.schema import (
    CompressedFormat,
    EmbeddingStorage,
    LoraConfig,
    ModelConfig,
    QuantConfig,
    QuantType4bit,
)
from qlora_fsdp.layers.lora import LoraLinear
from qlora_fsdp.layers.quantized.linear import QuantizedLinear
from qlora_fsdp.model.adapters.apply import apply_adapters
from qlora_fsdp.model.adapters.initialize import initialize_adapters
from qlora_fsdp.model.adapters.rounding_error import RoundingErrors, check_can_correct, nearest_of_rank
from qlora_fsdp.model.build import BuildSettings, build_model
from qlora_fsdp.model.find import find_model
from qlora_fsdp.sharding.shard import place_model
from qlora_fsdp.weights.fill import fill_from_files

CPU = torch.device("cpu")
PLAIN = {"load_in_4bit": False}
FORMATS: dict[str, tuple[QuantConfig, dict[str, Any]]] = {
    "nf4": (QuantConfig(), {}),
    "nf4, alpha of a layer": (QuantConfig(bnb_4bit_use_double_quant=False), {"alpha_pattern": {"q_proj": 3}}),
    "fp4, ranks that differ": (QuantConfig(bnb_4bit_quant_type=QuantType4bit.fp4), {"rank_pattern": {"v_proj": 5}}),
    "int8, rsLoRA": (QuantConfig(load_in_8bit=True, **PLAIN), {"use_rslora": True}),
    "int4": (QuantConfig(compressed_tensors=CompressedFormat.int4, **PLAIN), {}),
    "fp8": (QuantConfig(compressed_tensors=CompressedFormat.fp8, **PLAIN), {}),
    "mxfp4": (QuantConfig(compressed_tensors=CompressedFormat.mxfp4, **PLAIN), {}),
    "nvfp4": (QuantConfig(compressed_tensors=CompressedFormat.nvfp4, **PLAIN), {}),
}


def build(folder: Path, quant: QuantConfig, lora: LoraConfig) -> tuple[Any, Any]:
    """PEFT's model on meta, and what fills its base."""
    files = find_model(ModelConfig(path=str(folder)), True, lambda error: error)
    meta = build_model(files, BuildSettings(quant, torch.float32, "eager"))
    return apply_adapters(meta.model, lora), meta.assignments


def load(folder: Path, quant: QuantConfig, lora: LoraConfig) -> tuple[Any, RoundingErrors]:
    """The model with its weights, and with adapters that start from the rounding's error."""
    model, assignments = build(folder, quant, lora)
    place_model(model, CPU, CPU)
    errors = RoundingErrors(model, 0, one_process())
    fill_from_files(assignments, CPU, torch.float32, observers=errors.observers())
    errors.finish()
    initialize_adapters(model, True, 0, filled=errors.layers.values())
    return model.eval(), errors


def divergence(full: Tensor, model: PreTrainedModel, ids: Tensor) -> float:
    """Mean KL divergence of the model's next tokens from those of the full model, in nats."""
    ours = model(input_ids=ids).logits.log_softmax(-1)
    of_tokens = F.kl_div(ours, full.log_softmax(-1), log_target=True, reduction="none").sum(-1)
    return of_tokens.mean().item()


@pytest.mark.parametrize("name", FORMATS)
def test_it_is_the_best_of_its_rank_and_nearer_to_the_full_model(checkpoint: Callable[..., Path], name: str):
    quant, more = FORMATS[name]
    folder = checkpoint("llama")
    model, errors = load(folder, quant, LoraConfig(r=8, lora_alpha=24, init_lora_weights="loftq", **more))
    full = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    weights = dict(full.named_parameters())
    names = {module: name.removeprefix("base_model.model.") for name, module in model.named_modules()}
    assert len(errors.layers) == 14
    for layer, module in errors.layers.items():
        error = weights[f"{names[module]}.weight"].detach() - layer.weight
        of_peft = _low_rank_decomposition(error, module.r["default"])
        ours = module.get_delta_weight("default")  # with the scaling
        torch.testing.assert_close(ours, of_peft["L"] @ of_peft["R"], rtol=0, atol=1e-4 * error.abs().max().item())
        sizes = [module.lora_A["default"].weight.norm(dim=1), module.lora_B["default"].weight.norm(dim=0)]
        torch.testing.assert_close(*sizes)  # the singular values are in equal shares in both
    ids = torch.arange(60).view(2, 30) * 7 % 256
    with torch.no_grad():
        expected = full(input_ids=ids).logits
        corrected = divergence(expected, model, ids)
        with model.disable_adapter():
            rounded = divergence(expected, model, ids)
    assert corrected < 0.9 * rounded


@pytest.mark.parametrize("shape", [(6, 40), (40, 6)])
def test_what_has_no_error_starts_as_without(shape: tuple[int, int]):
    plain = torch.randn(8, shape[1], generator=torch.Generator().manual_seed(0))
    lora_a, lora_b = nearest_of_rank(torch.zeros(shape), plain)
    assert torch.equal(lora_a, plain) and not lora_b.any()
    matrix = torch.outer(torch.arange(shape[0]), torch.ones(shape[1])).float()
    lora_a, lora_b = nearest_of_rank(matrix, plain)
    torch.testing.assert_close(lora_b @ lora_a, matrix)
    assert torch.equal(lora_a[1:], plain[1:]) and not lora_b[:, 1:].any()


@pytest.mark.parametrize(
    ("family", "targets", "said"),
    [
        ("qwen3_moe", "all-linear", "model.layers.0.mlp.experts has an adapter for each expert. .* lora.experts=false"),
        ("llama", ["q_proj", "embed_tokens"], "model.embed_tokens is a table of embeddings. .* lora.target_modules"),
    ],
)
def test_what_has_no_such_start_is_named(checkpoint: Callable[..., Path], family: str, targets: Any, said: str):
    model, assignments = build(checkpoint(family), QuantConfig(), LoraConfig(target_modules=targets))
    with pytest.raises(AdapterError, match=f"lora.init_lora_weights=loftq is for linear layers, and {said}"):
        check_can_correct(model, assignments)


def test_a_head_in_int8_is_not_corrected(checkpoint: Callable[..., Path]):
    """It is in another format than the base, and by far the largest weight."""
    quant = QuantConfig(embeddings=EmbeddingStorage.int8)
    model, _ = build(checkpoint("llama"), quant, LoraConfig(target_modules=["q_proj", "lm_head"]))
    head = model.get_base_model().get_output_embeddings()
    assert isinstance(head, LoraLinear) and isinstance(head.base_layer, QuantizedLinear)
    assert head not in RoundingErrors(model, 0, one_process()).layers.values()


def test_a_weight_that_is_no_number_ends_the_run_by_its_name(checkpoint: Callable[..., Path], tmp_path: Path):
    """It would end in the decomposition, on one rank, while the others wait."""
    folder = shutil.copytree(checkpoint("llama"), tmp_path / "damaged")
    name = "model.layers.0.self_attn.q_proj.weight"
    for file in folder.glob("*.safetensors"):
        tensors = load_file(file)
        if name in tensors:
            tensors[name][3, 4] = torch.nan
            save_file(tensors, file, {"format": "pt"})
    with pytest.raises(CheckpointError, match=name):
        load(folder, QuantConfig(), LoraConfig(init_lora_weights="loftq"))


def test_a_base_of_codes_is_refused(checkpoint: Callable[..., Path], tmp_path: Path):
    folder = quantize_checkpoint(checkpoint("llama", torch.float32), tmp_path / "quantized", load_in_4bit=True)
    model, assignments = build(folder, QuantConfig(), LoraConfig(target_modules=["q_proj"]))
    said = r"have no full weights. Set lora.init_lora_weights=true, or model.path.*\n.*layers.0.self_attn.q_proj"
    with pytest.raises(AdapterError, match=said):
        check_can_correct(model, assignments)
