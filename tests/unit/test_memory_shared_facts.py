"""Rules and sizes that two sides go by, compared with each other."""

from __future__ import annotations

import peft
import pytest
from peft.tuners.tuners_utils import check_target_module_exists
from peft.utils.other import get_pattern_key

from qlora_fsdp.common.module_names import fits_pattern, is_target

NAMES = [
    "model.embed_tokens",
    "model.layers.0.self_attn.q_proj",
    "model.layers.1.self_attn.o_proj",
    "model.layers.1.mlp.gate_proj",
    "model.layers.11.mlp.gate_up_proj",
    "model.layers.11.mlp.down_proj",
    "lm_head",
]


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
