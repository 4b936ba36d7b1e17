"""What this program knows about families of models, by the `model_type` of their transformers config.

A family that is missing here still trains, with norms and residuals computed one by one. Every module that treats
families differently reads this table, so that a new family is added in one place. Whether rows are packed is no matter
of families (model/packing.py tries it), nor is the memory plan (tracing/).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Family:
    """Facts about one family.

    Attributes:
        prenorm_layer: transformers' class of its decoder layer, if the layer computes
            x + self_attn(input_layernorm(x)), and then x + mlp(post_attention_layernorm(x)); None if it does more.
    """

    prenorm_layer: str | None


FAMILIES = {
    "llama": Family("LlamaDecoderLayer"),
    "mistral": Family("MistralDecoderLayer"),
    "qwen2": Family("Qwen2DecoderLayer"),
    "qwen3": Family("Qwen3DecoderLayer"),
    "gemma2": Family(None),
    "gemma3_text": Family(None),
    "smollm3": Family("SmolLM3DecoderLayer"),
    "phi3": Family("Phi3DecoderLayer"),
}

PRENORM_LAYERS = {family.prenorm_layer for family in FAMILIES.values() if family.prenorm_layer is not None}

# Families for which Liger has kernels of norms, rotary embeddings and MLPs: those above, and these. A plan is made on
# hosts without Liger too; a run asks the package itself.
LIGER_FAMILIES = frozenset(FAMILIES) | {
    "exaone4",
    "gemma",
    "glm4",
    "gpt_oss",
    "granite",
    "llama4_text",
    "mixtral",
    "olmo2",
    "olmo3",
    "qwen3_moe",
}

# Multimodal models whose text part is one of the above: transformers builds them whole, and the text part is trained.
MULTIMODAL_FAMILIES = ("gemma3", "mistral3")
