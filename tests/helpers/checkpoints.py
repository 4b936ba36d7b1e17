"""Tiny random checkpoints of the families that are tested, written by transformers itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    BitsAndBytesConfig,
    PretrainedConfig,
)

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
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 64}
LATENT = {"q_lora_rank": 64, "kv_lora_rank": 64, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16}
DELTA = {
    **{"linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4},
    **{"head_dim": 16, "layer_types": ["linear_attention", "full_attention"]},
}
# Sizes that differ between layers, keys and values that later layers take from earlier ones, embeddings for each layer.
GEMMA4 = {
    **{"num_hidden_layers": 4, "num_kv_shared_layers": 2, "sliding_window": 16, "head_dim": 16, "global_head_dim": 32},
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
}
PER_LAYER = {"hidden_size_per_layer_input": 64, "vocab_size_per_layer_input": VOCAB}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16}
# Families that are not in every list of tests; mechanisms that these have and those above do not.
OTHER_FAMILIES: dict[str, dict[str, object]] = {
    "qwen3_moe": {**EXPERTS, "num_experts": 4, "head_dim": 16},
    "qwen2_moe": {**EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 64},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16, "sliding_window": 16},
    "deepseek_v3": {
        **{**EXPERTS, **LATENT, "n_routed_experts": 4, "n_group": 2, "topk_group": 1, "head_dim": 8},
        **{"num_key_value_heads": 4, "first_k_dense_replace": 1},
    },
    "glm4": {"head_dim": 16},
    "glm4_moe": {**EXPERTS, "n_routed_experts": 4, "head_dim": 16},
    "llama4_text": {"num_local_experts": 4, "head_dim": 16, "intermediate_size_mlp": 128, "attention_chunk_size": 16},
    "gemma3n_text": {
        **{"head_dim": 16, "num_kv_shared_layers": 0, "hidden_size_per_layer_input": 64, "laurel_rank": 64},
        **{"vocab_size_per_layer_input": 264, "layer_types": ["sliding_attention", "full_attention"]},
        **{"activation_sparsity_pattern": [0.95, 0.0], "sliding_window": 16, "intermediate_size": [128, 128]},
    },
    "gemma4_text": {**GEMMA4, **PER_LAYER},
    "gemma4_unified_text": {
        **GEMMA4,
        "num_kv_shared_layers": 0,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
    },
    "olmo2": {},
    "olmo3": {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]},
    "granite": {"logits_scaling": 2.0},
    "granitemoe": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "granitemoehybrid": {**MAMBA, "num_local_experts": 4, "layer_types": ["linear_attention", "full_attention"]},
    "starcoder2": {},
    "gpt_neox": {},
    "stablelm": {},
    "cohere": {},
    "cohere2": {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"], "head_dim": 16},
    "falcon": {"multi_query": False},
    "nemotron": {"head_dim": 16},
    "qwen3_next": {**DELTA, **EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 64},
    "qwen3_5_text": DELTA,
    "bamba": {**MAMBA, "attn_layer_indices": [1]},
    "lfm2": {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},
    "jamba": {"num_hidden_layers": 5, "num_experts": 4, "mamba_d_state": 8, "mamba_dt_rank": 64},
    "gpt2": {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "opt": {"ffn_dim": 128, "word_embed_proj_dim": 64, "dropout": 0.0},
    "bloom": {},
}
# What people train in 2026 beside some of those above.
RECENT_FAMILIES: dict[str, dict[str, object]] = {
    "qwen3_5_moe_text": {**DELTA, **EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 64},
    "glm4_moe_lite": {**EXPERTS, **LATENT, "n_routed_experts": 4, "num_key_value_heads": 4},
    "mistral4": {**EXPERTS, **LATENT, "n_routed_experts": 4, "num_key_value_heads": 4},
    "ministral3": {"head_dim": 16},
    "nemotron_h": {
        **{"num_hidden_layers": 4, "hybrid_override_pattern": "ME*M", "head_dim": 16, "mlp_hidden_act": "relu2"},
        **{"mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 2, "ssm_state_size": 16, "chunk_size": 16},
        **{"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64},
        "moe_shared_expert_intermediate_size": 64,
    },
}


def make_checkpoint(
    family: str, folder: Path, dtype: torch.dtype = torch.bfloat16, max_shard_size: str = "100KB", seed: int = 0
) -> Path:
    """Write a random checkpoint of a family; weights are large enough that every layer matters."""
    config = AutoConfig.for_model(family, **SHAPE | (FAMILIES | OTHER_FAMILIES)[family], initializer_range=0.1)
    return write_checkpoint(config, folder, dtype, max_shard_size, seed)


def write_checkpoint(
    config: PretrainedConfig,
    folder: Path,
    dtype: torch.dtype = torch.bfloat16,
    max_shard_size: str = "100KB",
    seed: int = 0,
) -> Path:
    """Write a random checkpoint of a config. What transformers begins with zeros, such as biases, is random too."""
    torch.manual_seed(seed)
    model = _auto_class(config).from_config(config, dtype=dtype)
    for value in model.state_dict().values():
        if value.is_floating_point() and not value.any():
            value.normal_(std=0.1)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return folder


def _auto_class(config: PretrainedConfig) -> Any:
    is_causal = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING
    return AutoModelForCausalLM if is_causal else AutoModelForImageTextToText


def quantize_checkpoint(source: Path, folder: Path, **options: Any) -> Path:
    """Write `source` as transformers and bitsandbytes write it quantized; `options` as of BitsAndBytesConfig."""
    config = BitsAndBytesConfig(bnb_4bit_compute_dtype=torch.float32, **options)
    model = AutoModelForCausalLM.from_pretrained(
        source, dtype=torch.float32, quantization_config=config, device_map={"": "cpu"}
    )
    model.save_pretrained(folder)
    return folder
