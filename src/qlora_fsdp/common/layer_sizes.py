"""Sizes of a model's layers, out of its config. Whoever needs such a size asks here.

Most configs have one value for all layers. Where layers differ, transformers keeps what differs in `per_layer_config`
(Gemma 4's full attention has larger heads than its sliding one), and reading it off the config itself raises
`AmbiguousGlobalPerLayerAttributeError`, which `getattr` with a default does not catch. Some configs have a list with a
value for each layer instead. Here all of these are read alike: a value for each layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PretrainedConfig


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
