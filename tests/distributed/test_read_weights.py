"""LongCat Flash, whose router multiplies with a linear layer's weight and never calls the layer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig

from qlora_fsdp import generate
from tests.helpers.checkpoints import SHAPE, write_checkpoint
from tests.helpers.lines import write_lines
from tests.helpers.ranks import run_ranks
from tests.helpers.runs import printed_by

pytestmark = pytest.mark.distributed
LATENT = {"q_lora_rank": 64, "kv_lora_rank": 64, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16}
EXPERTS = {"n_routed_experts": 4, "zero_expert_num": 2, "moe_topk": 2, "expert_ffn_hidden_size": 32}
PROMPTS = ["the cat sat", "rain"]


def test_shards_write_what_the_whole_model_writes(tmp_path: Path):
    sizes = {name: value for name, value in SHAPE.items() if name not in ("num_hidden_layers", "intermediate_size")}
    more = {"num_layers": 2, "ffn_hidden_size": 64, "head_dim": 16, "num_key_value_heads": 4}
    config = AutoConfig.for_model("longcat_flash", **sizes | LATENT | EXPERTS | more, initializer_range=0.1)
    base = write_checkpoint(config, tmp_path / "base", torch.float32)
    write_lines(tmp_path / "prompts.jsonl", [{"prompt": prompt} for prompt in PROMPTS])
    argv = [f"model.path={base}", "model.tokenizer_path=bytes", f"prompts={tmp_path / 'prompts.jsonl'}"]
    argv += ["max_new_tokens=8"]
    (whole,) = run_ranks(1, printed_by, generate.main, argv)
    first, _ = run_ranks(2, printed_by, generate.main, [*argv, "fsdp.sharding_strategy=FULL_SHARD"])
    assert [json.loads(line) for line in first.splitlines()] == [json.loads(line) for line in whole.splitlines()]
