"""Prompts that transformers completes several at a time: each has the completion that it has alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from qlora_fsdp import generate
from qlora_fsdp.inference.completions import why_not_padded
from tests.helpers.checkpoints import write_checkpoint
from tests.helpers.families import make_config
from tests.helpers.lines import write_lines
from tests.helpers.ranks import run_ranks
from tests.helpers.runs import printed_by

pytestmark = pytest.mark.distributed
PROMPTS = ["the cat sat", "rain", "old town and birds sang on"]


@pytest.mark.parametrize("family", ["llama", "jamba", "qwen3_next", "nemotron_h"])
def test_padding_is_heeded(family: str):
    assert why_not_padded(make_config(family), False) is None


def test_prompts_are_completed_one_at_a_time_where_padding_is_seen(tmp_path: Path):
    """DeepSeek V4 makes one key of every few tokens, and begins to count where the padding does."""
    config = make_config("deepseek_v4")
    assert "beside a longer prompt" in str(why_not_padded(config, False))
    base = write_checkpoint(config, tmp_path / "base", torch.float32)
    prompts = write_lines(tmp_path / "prompts.jsonl", [{"prompt": prompt} for prompt in PROMPTS])
    common = [f"model.path={base}", "model.tokenizer_path=bytes", "quant=none", "max_new_tokens=8"]
    (found,) = run_ranks(1, printed_by, generate.main, [*common, f"prompts={prompts}"])
    alone = [run_ranks(1, printed_by, generate.main, [*common, f"prompt={prompt}"])[0] for prompt in PROMPTS]
    assert [json.loads(line)["completion"] + "\n" for line in found.splitlines()] == alone
