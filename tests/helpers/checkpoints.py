"""Tiny random checkpoints of the families that are tested, written by transformers itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig

VOCAB = 264
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 258,
    "bos_token_id": 256,
    "eos_token_id": 257,
}
FAMILIES: dict[str, dict[str, object]] = {
    "llama": {},
    "mistral": {"sliding_window": 16, "head_dim": 16},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 32},
    "gemma2": {"head_dim": 16, "sliding_window": 16, "query_pre_attn_scalar": 16, "final_logit_softcapping": 5.0},
    "gemma3_text": {"head_dim": 16, "sliding_window": 16, "query_pre_attn_scalar": 16},
    "smollm3": {"no_rope_layer_interval": 2},
    "phi3": {"rope_scaling": None},
    "bert": {"is_decoder": True, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
}
# Models whose experts are one tensor. In the files each expert is a tensor of its own, except for gpt-oss.
MOE_FAMILIES: dict[str, dict[str, object]] = {
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "head_dim": 16},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 64},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16, "intermediate_size": 64},
    "deepseek_v3": {
        **{"n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "n_shared_experts": 1},
        **{"first_k_dense_replace": 1, "moe_intermediate_size": 64, "num_key_value_heads": 4, "q_lora_rank": 64},
        **{"kv_lora_rank": 64, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16},
    },
}


def make_checkpoint(
    family: str, folder: Path, dtype: torch.dtype = torch.bfloat16, max_shard_size: str = "100KB"
) -> Path:
    """Write a random checkpoint of a family; weights are large enough that every layer matters."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **{**SHAPE, **(FAMILIES | MOE_FAMILIES)[family]}, initializer_range=0.1)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return folder


def quantize_checkpoint(source: Path, folder: Path, **options: Any) -> Path:
    """Write `source` as transformers and bitsandbytes write it quantized; `options` as of BitsAndBytesConfig."""
    config = BitsAndBytesConfig(bnb_4bit_compute_dtype=torch.float32, **options)
    model = AutoModelForCausalLM.from_pretrained(
        source, dtype=torch.float32, quantization_config=config, device_map={"": "cpu"}
    )
    model.save_pretrained(folder)
    return folder
