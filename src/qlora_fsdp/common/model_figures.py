"""The sizes that a model's config.json states, which anybody may have written. Imports no torch.

transformers makes as many layers, labels and positions as it is told to. So a few bytes of a file could ask for more
time and memory than there is, before the model is compared with its weights or with the hardware.

Sizes of its layers follow from them; whoever needs such a size asks here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from qlora_fsdp.common.text import shorten

if TYPE_CHECKING:
    from transformers import PretrainedConfig


MAX_CONFIG_BYTES = 2**24  # of config.json; the largest of the hub have long lists of labels

# The largest value of each size, which is far more than any model has, and the names that models give it.
_SIZES = {
    2**12: (
        "num_hidden_layers",
        "n_layer",
        "n_layers",
        "num_layers",
        "depth",
        "encoder_layers",
        "decoder_layers",
        "num_decoder_layers",
    ),
    2**16: (
        "num_attention_heads",
        "n_head",
        "n_heads",
        "num_heads",
        "num_key_value_heads",
        "num_kv_heads",
        "head_dim",
        "num_experts",
        "num_local_experts",
        "n_routed_experts",
        "num_experts_per_tok",
    ),
    2**20: ("num_labels", "hidden_size", "n_embd", "d_model", "n_positions", "n_ctx"),
    2**24: ("intermediate_size", "n_inner", "ffn_dim", "d_ff", "vocab_size"),
    2**28: ("max_position_embeddings",),
}
LARGEST = {name: limit for limit, names in _SIZES.items() for name in names}


def find_bad_sizes(config: Mapping[str, Any]) -> Iterator[str]:
    """Yields what is wrong with the sizes in a config; models of several parts have configs inside.

    Raises:
        RecursionError: it is nested too deeply.
    """
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from find_bad_sizes(value)
        largest = LARGEST.get(name)
        if largest is None or value is None:
            continue
        for size in value if isinstance(value, list) else [value]:  # some models have a size for each layer
            if type(size) is not int or not 0 <= size <= largest:
                yield f"{name}={shorten(repr(size))} is no whole number from 0 to {largest:,}"


@dataclass(frozen=True)
class HeadSizes:
    """The attention heads of a layer.

    Attributes:
        num_heads: heads of queries; 0 if the config names none.
        num_key_heads: heads of keys and values, of which each serves the same number of query heads.
        key_size: numbers of a query, and of a key.
        value_size: numbers of a value. Latent attention (DeepSeek V3) has narrower ones.
    """

    num_heads: int
    num_key_heads: int
    key_size: int
    value_size: int


def head_sizes(config: PretrainedConfig) -> tuple[HeadSizes, ...]:
    """The heads of each layer, in order; those that the config describes for layers which have none are listed too.

    Args:
        config: of a text model, or of another model's text part.
    """
    return tuple(_heads_of(layer, index) for index, layer in enumerate(_configs(config)))


def values_by_layer(config: PretrainedConfig, *names: str) -> tuple[Any, ...]:
    """For each layer, the value of the first of these names that is not None there; None if all are.

    Args:
        config: of a text model, or of another model's text part.
        names: attributes of transformers' configs.
    """
    return tuple(_first(layer, index, names) for index, layer in enumerate(_configs(config)))


def _configs(config: PretrainedConfig) -> Sequence[PretrainedConfig]:
    """A config for each layer, from which the layer's own values can be read."""
    if getattr(config, "is_heterogeneous", False):
        # Each is made when it is asked for.
        return list(config.per_layer_config)
    return [config] * (getattr(config, "num_hidden_layers", 0) or 0)


def _first(config: PretrainedConfig, index: int, names: Sequence[str]) -> Any:
    """The value of the first name that is not None in a layer's config, whose index chooses from lists."""
    for name in names:
        value = getattr(config, name, None)
        if isinstance(value, (list, tuple)):
            value = value[index] if index < len(value) else None
        if value is not None:
            return value
    return None


def _heads_of(config: PretrainedConfig, index: int) -> HeadSizes:
    num_heads = _first(config, index, ["num_attention_heads"]) or 0
    nope = _first(config, index, ["qk_nope_head_dim"]) or 0
    rope = _first(config, index, ["qk_rope_head_dim"]) or 0
    if nope + rope:  # latent attention, whose keys and values are made for every head
        value_size = _first(config, index, ["v_head_dim"]) or nope + rope
        return HeadSizes(num_heads, num_heads, nope + rope, value_size)
    hidden = _first(config, index, ["hidden_size"]) or 0
    size = _first(config, index, ["head_dim"]) or hidden // (num_heads or 1)
    num_key_heads = _first(config, index, ["num_key_value_heads"]) or num_heads
    return HeadSizes(num_heads, num_key_heads, size, size)
