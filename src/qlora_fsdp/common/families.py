"""What this program knows about families of models; whatever treats them differently reads it here.

A family that is missing here still trains, with fewer of Liger's kernels. Whether rows are packed is no matter of
families (model/trials/packing.py tries it), nor is the memory plan (tracing/).
"""

from __future__ import annotations

# The settings of `kernels` for which Liger has kernels, by the `model_type` of the model's config. A plan is made on
# hosts without Liger too; a run asks the package itself, and a test compares the two.
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
