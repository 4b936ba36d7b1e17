"""What the plan and the layers both go by: one module says it, or a test here compares the two sides."""

from __future__ import annotations

import itertools

import peft
import pytest
import torch
from peft.tuners.tuners_utils import check_target_module_exists
from peft.utils.other import get_pattern_key
from transformers.quantizers.quantizers_utils import should_convert_module

from qlora_fsdp.common.module_names import fits_pattern, is_skipped, is_target
from qlora_fsdp.common.quantized_shapes import STORAGE_BYTES
from qlora_fsdp.config.schema import LoraConfig, QuantConfig, QuantStorage, QuantType4bit
from qlora_fsdp.layers import QuantizedLinear, parse_storage
from qlora_fsdp.memory.parameter_bytes import layer_parameters, sum_bytes
from qlora_fsdp.memory.shape import model_shape
from qlora_fsdp.model.build import choose_format

NAMES = [
    "model.embed_tokens",
    "model.layers.0.self_attn.q_proj",
    "model.layers.1.self_attn.o_proj",
    "model.layers.1.mlp.gate_proj",
    "model.layers.11.mlp.gate_up_proj",
    "model.layers.11.mlp.down_proj",
    "lm_head",
]


@pytest.mark.parametrize("storage", list(QuantStorage))
def test_storage_takes_the_bytes_of_its_dtype(storage: QuantStorage):
    assert STORAGE_BYTES[storage.value] == parse_storage(storage.value).itemsize


QUANTS = [
    *(
        QuantConfig(bnb_4bit_quant_type=kind, bnb_4bit_use_double_quant=double, bnb_4bit_quant_storage=storage)
        for kind, double, storage in itertools.product(QuantType4bit, (False, True), QuantStorage)
    ),
    *(QuantConfig(load_in_8bit=True, load_in_4bit=False, bnb_4bit_quant_storage=storage) for storage in QuantStorage),
]


@pytest.mark.parametrize("quant", QUANTS, ids=str)
def test_plan_counts_the_tensors_of_a_quantized_layer(quant: QuantConfig):
    """Odd numbers of rows and of blocks, so that rows are padded and the last group of scales is short."""
    sizes = {"hidden_size": 448, "intermediate_size": 192, "num_attention_heads": 7, "num_hidden_layers": 1}
    shape = model_shape({"model_type": "llama", "vocab_size": 10, **sizes})
    assert shape is not None
    format, found = choose_format(quant), {"codes": 0, "scales": 0}
    assert format is not None
    for linear in shape.linears:
        layer = QuantizedLinear(linear.in_features, linear.out_features, False, format, torch.bfloat16)
        for name, param in layer.named_parameters():
            found["codes" if name == "codes" else "scales"] += param.numel() * param.itemsize
    planned = sum_bytes(layer_parameters(shape, 0, quant, LoraConfig(), 2))
    assert (planned.codes, planned.scales) == (found["codes"], found["scales"])


TARGETS = ["q_proj", "proj", "mlp.gate_proj", "model.layers.1.self_attn.o_proj", "lm_head"]


@pytest.mark.parametrize("targets", [TARGETS, TARGETS[:1], [], r".*\.1\.mlp\..*", "gate_proj", r".*(q|up)_proj"])
def test_targets_are_those_of_peft(targets: list[str] | str):
    config = peft.LoraConfig()
    config.target_modules = targets  # as PEFT's own set would be: its constructor takes lists alone
    assert [is_target(name, targets) for name in NAMES] == [
        bool(check_target_module_exists(config, name)) for name in NAMES
    ]


@pytest.mark.parametrize("pattern", ["q_proj", "proj", r"layers\.1\..*", "down_proj|o_proj", "model", r"mlp\.gate"])
def test_patterns_are_those_of_peft(pattern: str):
    assert [fits_pattern(name, pattern) for name in NAMES] == [
        get_pattern_key([pattern], name) == pattern for name in NAMES
    ]


@pytest.mark.parametrize(
    "skip", ["lm_head", "proj", "model.layers.1", r".*o_proj", "mlp.gate", r"model\.layers\..*\.mlp"]
)
def test_skipped_modules_are_those_of_transformers(skip: str):
    assert [is_skipped(name, [skip]) for name in NAMES] == [not should_convert_module(name, [skip]) for name in NAMES]
