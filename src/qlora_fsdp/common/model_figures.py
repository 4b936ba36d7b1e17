"""The sizes that a model's config.json states, which anybody may have written. Imports no torch.

transformers makes as many layers, labels and positions as it is told to. So a few bytes of a file could ask for more
time and memory than there is, before the model is compared with its weights or with the hardware.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from qlora_fsdp.common.text import shorten

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
