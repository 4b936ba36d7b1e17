"""What this program knows about families of models, by the `model_type` of their transformers config.

A family that is missing here still trains: with layers computed one by one, and no memory plan. Every module that
treats families differently reads this table, so that a new family is added in one place. Imports nothing heavy: the
plan reads it without torch. Whether rows are packed is no matter of families: model/packing.py tries it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Family:
    """Facts about one family.

    Attributes:
        gated_mlp: transformers' class of its MLP, whose forward is down(act(gate(x)) * up(x)).
        prenorm_layer: transformers' class of its decoder layer, if the layer computes
            x + self_attn(input_layernorm(x)), and then x + mlp(post_attention_layernorm(x)); None if it does more.
        is_planned: memory/shape.py derives its sizes from its config.
    """

    gated_mlp: str
    prenorm_layer: str | None
    is_planned: bool


FAMILIES = {
    "llama": Family("LlamaMLP", "LlamaDecoderLayer", is_planned=True),
    "mistral": Family("MistralMLP", "MistralDecoderLayer", is_planned=True),
    "qwen2": Family("Qwen2MLP", "Qwen2DecoderLayer", is_planned=True),
    "qwen3": Family("Qwen3MLP", "Qwen3DecoderLayer", is_planned=True),
    "gemma2": Family("Gemma2MLP", None, is_planned=False),
    "gemma3_text": Family("Gemma3MLP", None, is_planned=True),
    "smollm3": Family("SmolLM3MLP", "SmolLM3DecoderLayer", is_planned=True),
    "phi3": Family("Phi3MLP", "Phi3DecoderLayer", is_planned=True),
}

GATED_MLPS = {family.gated_mlp for family in FAMILIES.values()}
PRENORM_LAYERS = {family.prenorm_layer for family in FAMILIES.values() if family.prenorm_layer is not None}
PLANNED_FAMILIES = tuple(name for name, family in FAMILIES.items() if family.is_planned)

# Multimodal models whose text part is one of the above: transformers builds them whole, and the text part is trained.
MULTIMODAL_FAMILIES = ("gemma3", "mistral3")
