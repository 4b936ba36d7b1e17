"""Tables that have something of each token for every layer, which are units of their own (Gemma 3n and 4)."""

import peft
import pytest
import torch
from tests.helpers.checkpoints import PER_LAYER, VOCAB
from transformers import AutoConfig, AutoModelForCausalLM

from qlora_fsdp.model.tasks.causal_lm import CausalLM

OPT = {
    "vocab_size": 96,
    "hidden_size": 32,
    "word_embed_proj_dim": 16,
    "ffn_dim": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 40,
}
GEMMA4 = {
    **PER_LAYER,
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "global_head_dim": 32,
    "layer_types": ["sliding_attention", "full_attention"],
    "num_kv_shared_layers": 0,
}


def find_tables(kind: str, shape: dict[str, object], targets: list[str]) -> list[str]:
    with torch.device("meta"):
        base = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **shape))
    adapted = peft.get_peft_model(base, peft.LoraConfig(target_modules=targets), low_cpu_mem_usage=True)
    names = {module: name for name, module in base.named_modules()}
    return [names[table] for table in CausalLM(adapted, transform=None).per_layer_tables]


def test_a_wide_table_of_positions_is_none() -> None:
    assert find_tables("opt", OPT, ["q_proj"]) == []


@pytest.mark.parametrize("targets", [["q_proj"], ["q_proj", "embed_tokens"]])
def test_a_table_is_found_beside_plain_and_adapted_embeddings(targets: list[str]) -> None:
    assert find_tables("gemma4_text", GEMMA4, targets) == ["model.embed_tokens_per_layer"]
