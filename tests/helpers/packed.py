"""Do packed rows see one another? A plain check with stock transformers, independent of the trial that runs make."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from tests.helpers.checkpoints import FAMILIES, SHAPE

EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 64}
LATENT = {"q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16}
DELTA = {
    **{"linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4},
    **{"head_dim": 16, "layer_types": ["linear_attention", "full_attention"]},
}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16}
# Small configs by family, on top of SHAPE. What runs meet in files is made at its real size in `real_config`.
SMALL: dict[str, dict[str, object]] = {
    **FAMILIES,
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
        **{"head_dim": 16, "num_kv_shared_layers": 0, "hidden_size_per_layer_input": 8, "laurel_rank": 8},
        **{"vocab_size_per_layer_input": 264, "layer_types": ["sliding_attention", "full_attention"]},
        **{"activation_sparsity_pattern": [0.95, 0.0], "sliding_window": 16, "intermediate_size": [128, 128]},
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
    "jamba": {"num_hidden_layers": 5, "num_experts": 4, "mamba_d_state": 8, "mamba_dt_rank": 8},
    "gpt2": {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "opt": {"ffn_dim": 128, "word_embed_proj_dim": 64},
    "bloom": {},
}
# What the defaults of a family leave out of its real configs.
REAL: dict[str, dict[str, object]] = {
    "nemotron": {"num_key_value_heads": 8},
    "lfm2": {"num_hidden_layers": 16, "full_attn_idxs": [2, 5, 8, 10, 12, 14]},
    "granitemoehybrid": {"layer_types": (["linear_attention"] * 5 + ["full_attention"] + ["linear_attention"] * 4) * 4}
    | {"num_hidden_layers": 40, "position_embedding_type": None},
    "bamba": {"attn_layer_indices": [9, 18, 27]},
    "bert": {"is_decoder": True},
    "granite": {"logits_scaling": 8.0},
}
# What is known of each: with a mask, and where rows' starts are all that is known.
SEE_ONE_ANOTHER = {"gpt_oss", "falcon", "jamba", "opt", "bloom", "bert"}
NEED_KERNELS = {"granitemoehybrid", "qwen3_next", "qwen3_5_text", "bamba", "lfm2"}


def real_config(family: str) -> PretrainedConfig:
    """A family's config at the size that its class has by default, which is that of a published model."""
    return AutoConfig.for_model(family, **REAL.get(family, {}))


def packed_rows_stay_apart(family: str) -> bool:
    """Whether rows one behind another, with positions that begin anew, have the logits that they have alone."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **{**SHAPE, **SMALL[family]}, initializer_range=0.3)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    rows = [torch.randint(0, 250, (length,)) for length in (18, 30, 22)]
    with torch.no_grad():
        alone = [model(input_ids=row[None], use_cache=False).logits[0] for row in rows]
        packed = _pack(model, rows)
        changed = _pack(model, [row.flip(0) if index != 1 else row for index, row in enumerate(rows)])
    largest = max(float(logits.abs().max()) for logits in alone)
    is_equal = all(float((a - b).abs().max()) < 1e-4 * largest for a, b in zip(packed, alone, strict=True))
    return is_equal and float((packed[1] - changed[1]).abs().max()) < 1e-4 * largest


def _pack(model: torch.nn.Module, rows: list[Tensor]) -> list[Tensor]:
    positions = torch.cat([torch.arange(len(row)) for row in rows])
    logits = model(input_ids=torch.cat(rows)[None], position_ids=positions[None], use_cache=False).logits[0]
    return list(logits.split([len(row) for row in rows]))
