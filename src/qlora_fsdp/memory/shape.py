"""The shape of a model, read from its config alone. It is enough to count bytes and operations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from textwrap import shorten
from typing import Any

from qlora_fsdp.common.errors import CheckpointError
from qlora_fsdp.common.families import MULTIMODAL_FAMILIES, PLANNED_FAMILIES
from qlora_fsdp.config.model_config import text_part

# What transformers assumes for keys that a config.json leaves out. Those of small Gemma 3 models leave out several.
DEFAULTS: dict[str, dict[str, int]] = {
    "mistral": {"num_key_value_heads": 8},
    "qwen3": {"head_dim": 128},
    "smollm3": {"num_key_value_heads": 4, "tie_word_embeddings": True},
    "gemma3_text": {
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "vocab_size": 262208,
        "tie_word_embeddings": True,
    },
}

MAX_LAYERS = 1000  # the largest models have some 130, and every layer is planned by itself
MAX_SIZE = 2**30  # of anything else

NORMS = ("input_layernorm", "post_attention_layernorm")
POST_NORMS = (*NORMS, "pre_feedforward_layernorm", "post_feedforward_layernorm")
HEAD_NORMS = ("self_attn.q_norm", "self_attn.k_norm")


@dataclass(frozen=True)
class Linear:
    """A linear layer of a transformer layer.

    Attributes:
        name: as in the model, without `model.layers.N.`, e.g. `self_attn.q_proj`.
    """

    name: str
    out_features: int
    in_features: int
    has_bias: bool = False


@dataclass(frozen=True)
class ModelShape:
    """A decoder whose layers are all alike.

    Attributes:
        linears: the linear layers of one transformer layer.
        norms: the norms of one transformer layer: names without `model.layers.N.`, and numbers of weights.
        has_head_norms: whether the queries and keys of each head are normalized (Qwen 3, Gemma 3).
        has_post_norms: whether the outputs of attention and MLP are normalized too (Gemma 3).
        has_fused_linears: whether q, k and v are one linear layer, and gate and up another (Phi 3).
        is_tied: whether embeddings and head share their weight.
        has_softcap: whether logits go through a tanh.
    """

    model_type: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    linears: tuple[Linear, ...]
    norms: dict[str, int]
    has_head_norms: bool
    has_post_norms: bool
    has_fused_linears: bool
    is_tied: bool
    has_softcap: bool

    @property
    def query_size(self) -> int:
        """Width of the queries: number of heads times head size."""
        return self.num_heads * self.head_dim

    @property
    def key_size(self) -> int:
        """Width of the keys, which is also that of the values."""
        return self.num_kv_heads * self.head_dim

    @property
    def layer_weights(self) -> int:
        """Elements of the matrices of one transformer layer."""
        return sum(linear.out_features * linear.in_features for linear in self.linears)

    @property
    def vocab_weights(self) -> int:
        """Elements of the embeddings, which are as many as those of the head."""
        return self.vocab_size * self.hidden_size

    @property
    def num_parameters(self) -> int:
        """Parameters of the base model, as its authors count them."""
        biases = sum(linear.out_features for linear in self.linears if linear.has_bias)
        layer = self.layer_weights + biases + sum(self.norms.values())
        return self.num_layers * layer + self.hidden_size + self.vocab_weights * (1 if self.is_tied else 2)


def model_shape(config: Mapping[str, Any]) -> ModelShape | None:
    """The shape that a transformers config describes.

    Args:
        config: the content of config.json. For a multimodal model its text part is used.

    Returns:
        The shape; None if the plan does not know the model's family.

    Raises:
        CheckpointError: a size is missing, or is no size.
    """
    text = text_part(config)
    if text is not config and config.get("model_type") not in MULTIMODAL_FAMILIES:
        return None
    config = text
    family = config.get("model_type", "")
    if family not in PLANNED_FAMILIES:
        return None
    config = DEFAULTS.get(family, {}) | dict(config)
    hidden, heads = _size(config, "hidden_size"), _size(config, "num_attention_heads")
    inner = _size(config, "intermediate_size")
    kv_heads = _size(config, "num_key_value_heads", default=heads)
    head_dim = _size(config, "head_dim", default=max(1, hidden // heads))
    is_gemma = family.startswith("gemma")
    has_head_norms, has_fused_linears = family in ("qwen3", "gemma3_text"), family == "phi3"
    attention_bias = family == "qwen2" or bool(config.get("attention_bias", False))
    mlp_bias = bool(config.get("mlp_bias", False))
    query, key = heads * head_dim, kv_heads * head_dim
    if has_fused_linears:
        inputs = [Linear("self_attn.qkv_proj", query + 2 * key, hidden)]
        gates = [Linear("mlp.gate_up_proj", 2 * inner, hidden)]
    else:
        widths = {"q": query, "k": key, "v": key}
        inputs = [Linear(f"self_attn.{name}_proj", width, hidden, attention_bias) for name, width in widths.items()]
        gates = [Linear(f"mlp.{name}_proj", inner, hidden, mlp_bias) for name in ("gate", "up")]
    attention_out = Linear("self_attn.o_proj", hidden, query, attention_bias and family != "qwen2")
    down = Linear("mlp.down_proj", hidden, inner, mlp_bias)
    norms = dict.fromkeys(POST_NORMS if is_gemma else NORMS, hidden)
    return ModelShape(
        model_type=family,
        hidden_size=hidden,
        intermediate_size=inner,
        num_layers=_size(config, "num_hidden_layers", MAX_LAYERS),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=_size(config, "vocab_size"),
        linears=(*inputs, attention_out, *gates, down),
        norms=norms | dict.fromkeys(HEAD_NORMS if has_head_norms else (), head_dim),
        has_head_norms=has_head_norms,
        has_post_norms=is_gemma,
        has_fused_linears=has_fused_linears,
        is_tied=bool(config.get("tie_word_embeddings", False)),
        has_softcap=bool(config.get("final_logit_softcapping")),
    )


def _size(config: Mapping[str, Any], name: str, most: int = MAX_SIZE, default: int | None = None) -> int:
    """A figure of the config. The file may hold anything."""
    value = config.get(name)
    if value is None and default is not None:
        return default
    if type(value) is int and 0 < value <= most:
        return value
    has = f"has {name}={shorten(repr(value), 40)}" if name in config else f"has no {name}"
    raise CheckpointError(
        f"The model's config {has}, which must be a whole number from 1 to {most:,}. Correct config.json, or copy or "
        "download it again."
    )
