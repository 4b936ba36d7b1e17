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

# The settings of `kernels` for which Liger has kernels, by family. A plan is made on hosts without Liger too; a run
# asks the package itself, and a test compares the two.
_ALL = ("rms_norm", "rotary", "glu")
_WITHOUT_ROTARY = ("rms_norm", "glu")
LIGER_KERNELS = {
    "deepseek_v2": _WITHOUT_ROTARY,
    "deepseek_v3": _WITHOUT_ROTARY,
    "deepseek_v4": ("rms_norm",),
    "exaone4": _ALL,
    "falcon_h1": _ALL,
    "gemma": _ALL,
    "gemma2": _ALL,
    "gemma3_text": _ALL,
    "gemma4_text": _WITHOUT_ROTARY,
    "glm4": _WITHOUT_ROTARY,
    "gpt_oss": ("rms_norm", "rotary"),
    "granite": _ALL,
    "hunyuan_v1_dense": _ALL,
    "hunyuan_v1_moe": _ALL,
    "llama": _ALL,
    "llama4_text": _ALL,
    "ministral": _ALL,
    "mistral": _ALL,
    "mixtral": _ALL,
    "olmo2": _ALL,
    "olmo3": _ALL,
    "phi3": _ALL,
    "qwen2": _ALL,
    "qwen3": _ALL,
    "qwen3_5_text": _WITHOUT_ROTARY,
    "qwen3_moe": _ALL,
    "qwen3_next": _WITHOUT_ROTARY,
    "smollm3": _ALL,
}

# Multimodal models whose text part is one of the above: transformers builds them whole, and the text part is trained.
MULTIMODAL_FAMILIES = ("gemma3", "mistral3")
