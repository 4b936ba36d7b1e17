"""Shrink a model's config, so that a model of the same classes can be tried in a fraction of a second.

Whether a model keeps packed rows apart depends on its classes and on the structure that its config describes, but not
on its widths. So widths, vocabularies and numbers of experts are made small here, and attention windows are made
shorter than the rows of the trial. Of layers that are alike, one is kept. Llama 3 405B and DeepSeek V3 shrink to two
layers, which compute in milliseconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from typing import Any

from transformers import PretrainedConfig

# hidden = heads x head size: many configs state the one by the others
HIDDEN = 64
NUM_HEADS = 4
HEAD_DIM = 16
VOCAB = 64
WINDOW = 8  # tokens that a windowed layer sees; the rows that are tried have more
MAX_PARAMETERS = 20_000_000  # a config with more is one whose sizes have names that are not known here

# Sizes by the names that configs give them. A size that is smaller already stays.
_SIZES = {
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), VOCAB),
    "word_embed_proj_dim": HIDDEN,
    "linear_num_heads": NUM_HEADS,
    **dict.fromkeys(("head_dim", "global_head_dim", "v_head_dim", "qk_nope_head_dim", "linear_head_dim"), HEAD_DIM),
    **dict.fromkeys(("qk_rope_head_dim", "rotary_dim", "laurel_rank", "mamba_dt_rank"), HEAD_DIM // 2),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "hidden_size_per_layer_input"), HEAD_DIM),
    **dict.fromkeys(
        (
            "intermediate_size",
            "ffn_dim",
            "n_inner",
            "ffn_hidden_size",
            "block_ff_dim",
            "intermediate_size_mlp",
            "moe_intermediate_size",
            "shared_expert_intermediate_size",
            "shared_intermediate_size",
            "moe_shared_expert_intermediate_size",
            "expert_ffn_hidden_size",
            "encoder_ffn_dim",
            "decoder_ffn_dim",
        ),
        HIDDEN,
    ),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "top_k_experts"), 2),
    **dict.fromkeys(("moe_k", "moe_topk", "moe_top_k", "n_group", "num_expert_group"), 2),
    **dict.fromkeys(("n_shared_experts", "moe_num_shared_experts"), 2),
    **dict.fromkeys(("mamba_d_state", "ssm_state_size", "mamba_d_head", "mamba_head_dim"), HEAD_DIM),
    **dict.fromkeys(("mamba_n_groups", "n_groups", "linear_num_key_heads"), 2),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), HEAD_DIM),
    **dict.fromkeys(("mamba_chunk_size", "chunk_size"), WINDOW),
}
# Sizes that are set even where they are smaller already: the width, and the heads, which must divide it.
_HEADS = ("num_attention_heads", "n_head", "n_heads", "encoder_attention_heads", "decoder_attention_heads")
_WIDTHS = {**dict.fromkeys(("hidden_size", "n_embd", "d_model"), HIDDEN), **dict.fromkeys(_HEADS, NUM_HEADS)}
# Numbers of tokens from which on something changes. Those that no sequence reaches stay.
_WINDOWS = ("sliding_window", "attention_chunk_size", "window_size", "floor_scale")
_KEY_HEADS = ("num_key_value_heads", "num_kv_heads", "num_global_key_value_heads")
# heads of a width of their own
_EXPANSIONS = (("mamba_n_heads", "mamba_expand"), ("mamba_num_heads", "expand"), ("num_heads", "expand"))
_RANDOM = ("dropout", "pdrop", "layerdrop", "jitter")  # parts of the names of what draws random numbers in training
# What a config derives from its other values, or says of its files.
_DROPPED = (
    "quantization_config",
    "dtype",
    "transformers_version",
    "id2label",
    "label2id",
    "qk_head_dim",
    "mamba_headdim",
    "attention_hidden_size",
    "attention_head_dim",
    "kv_channels",
)
_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
_NUM_FIRST = ("first_k_dense_replace", "num_dense_layers")  # layers at the beginning that are of another kind
_NUM_LAST = ("num_kv_shared_layers",)  # and at the end


# Settings by which every n-th layer is of another kind, and how: whether layer i is, from n and the config's values.
_PERIODS: dict[str, Callable[[int, int, Mapping[str, Any]], bool]] = {
    "decoder_sparse_step": lambda layer, n, values: (layer + 1) % n == 0,
    "attn_layer_period": lambda layer, n, values: layer % n == values.get("attn_layer_offset", 0),
    "expert_layer_period": lambda layer, n, values: layer % n == values.get("expert_layer_offset", 0),
    "moe_layer_freq": lambda layer, n, values: layer % n == 0,
    "moe_layer_interval": lambda layer, n, values: (layer + 1) % n == 0,
}


def miniature(config: PretrainedConfig, max_length: int) -> PretrainedConfig:
    """The config of a small model with the same structure: at least one layer of each kind, in the same order.

    Of a model with towers for images or sound the text part is made small. The towers stay as they are: no text goes
    through them, and a trial takes them out before they get any memory.

    Args:
        config: of a model. It stays as it is.
        max_length: tokens of the longest sequence.

    Raises:
        ValueError, KeyError, TypeError or AttributeError: its sizes can't be made small and still fit one another.
    """
    text = config.get_text_config()
    if text is config:
        return _small_text(config, max_length)
    places = [key for key, value in vars(config).items() if value is text]
    if not places:
        raise ValueError(f"the text part of {type(config).__name__} is no part of its own")
    small = deepcopy(config)
    setattr(small, places[0], _small_text(text, max_length))
    return small


def _small_text(config: PretrainedConfig, max_length: int) -> PretrainedConfig:
    """The same for the config of a text model, or of another model's text part."""
    values = {key: value for key, value in config.to_dict().items() if key not in _DROPPED}
    small = _shrink_all(values)
    of_layers = _by_index(values)
    for key in _WINDOWS:
        window = values.get(key)
        if isinstance(window, int) and WINDOW < window < max_length:
            small[key] = WINDOW
    _fit_together(small, values)
    for key, entries in of_layers.items():
        small[key] = {}
        for layer, entry in entries.items():
            small_entry = _shrink_all(entry)
            small[key][layer] = small_entry | _fit_layer(small | small_entry, values | entry)
    layers = _choose_layers(small, config.num_hidden_layers)
    if layers is not None:
        _keep_layers(small, config, layers)
    return type(config).from_dict(small)


def _shrink_all(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a config, each as small as a trial needs it by itself."""
    return {key: _shrink(key, value) for key, value in values.items()}


def _shrink(key: str, value: Any) -> Any:
    if isinstance(value, bool) or value is None:
        return value
    if key in _WIDTHS or key in _SIZES:
        return _shrink_size(key, value)
    is_random = any(name in key for name in _RANDOM)
    if is_random and isinstance(value, float):
        return 0.0
    if key in _TOKENS:  # within the small vocabulary
        return _TOKENS.index(key)
    return value


def _shrink_size(key: str, value: Any) -> Any:
    """A size, or a list with one for each layer; what is neither stays."""
    if isinstance(value, int) and key in _WIDTHS:
        return _WIDTHS[key]
    if isinstance(value, int):
        return min(value, _SIZES[key])
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_shrink(key, item) for item in value]
    return value


def _fit_together(small: dict[str, Any], values: Mapping[str, Any]) -> None:
    """Set the sizes that follow from others: groups of heads, groups of experts, rotary factors."""
    small |= _fit_heads(small, values)
    if values.get("topk_group") is not None:
        key = "n_group" if "n_group" in values else "num_expert_group"
        small["topk_group"] = 1 if values["topk_group"] < values.get(key, 1) else small.get(key, 1)
    small |= _fit_recurrent(small, values)
    for key in ("rope_parameters", "rope_scaling"):
        if isinstance(values.get(key), Mapping):
            small[key] = _shrink_rope(values[key], small.get("head_dim") or HEAD_DIM)
    _fit_rotated_share(small, values)


def _fit_rotated_share(small: dict[str, Any], values: Mapping[str, Any]) -> None:
    """Set the share of a head that is rotated, where a config states it beside the two parts of the head."""
    rope = values.get("rope_parameters")
    rotated, size = values.get("qk_rope_head_dim"), values.get("head_dim")
    if not isinstance(rope, Mapping) or not rotated or not size:
        return
    if rope.get("partial_rotary_factor") == rotated / size:
        small["rope_parameters"]["partial_rotary_factor"] = small["qk_rope_head_dim"] / small["head_dim"]


def _fit_recurrent(small: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, int]:
    """The numbers and widths of heads of layers that carry a state."""
    fitting: dict[str, int] = {}
    for name, expand in _EXPANSIONS:
        if values.get(name) is not None:
            fitting[name] = int(values.get(expand, 2) * HIDDEN) // HEAD_DIM
    width = values.get("mamba_d_head")
    if width == "auto" or isinstance(width, int):
        fitting["mamba_d_head"] = HEAD_DIM
    if values.get("mamba_d_ssm") is not None:
        fitting["mamba_n_heads"] = NUM_HEADS
        fitting["mamba_d_ssm"] = NUM_HEADS * HEAD_DIM
    if values.get("linear_num_value_heads") is not None:
        repeats = values["linear_num_value_heads"] // max(1, values["linear_num_key_heads"])
        fitting["linear_num_value_heads"] = min(repeats, 2) * small["linear_num_key_heads"]
    return fitting


def _fit_heads(small: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, int]:
    """The numbers and widths of heads that follow from others, of a small model."""
    fitting: dict[str, int] = {}
    heads = next((values[key] for key in _HEADS if values.get(key)), None)
    if heads is not None:
        for key in _KEY_HEADS:
            found = values.get(key)
            if found is not None:  # one for all, one for each, or groups
                fitting[key] = NUM_HEADS if found == heads else min(found, 2)
    fitting |= _fit_head_dim(small, values)
    return fitting


def _fit_head_dim(small: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, int]:
    """The width of a head where a config states it beside its rotated part, or that and the other one."""
    size = values.get("head_dim")
    rotated = values.get("qk_rope_head_dim")
    plain = values.get("qk_nope_head_dim")
    if size is None or not rotated:
        return {}
    if size == rotated:
        return {"head_dim": small["qk_rope_head_dim"]}
    if plain and size == rotated + plain:
        return {"head_dim": small["qk_rope_head_dim"] + small["qk_nope_head_dim"]}
    return {}


def _fit_layer(small: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, int]:
    """The heads of a layer with sizes of its own, as far as they differ from those of the model.

    Args:
        small: the small model's sizes, with the layer's own.
        values: the same at full size.
    """
    return {key: size for key, size in _fit_heads(small, values).items() if small[key] != size}


def _shrink_rope(values: Mapping[str, Any], head_dim: int) -> dict[str, Any]:
    """Rotary embeddings whose lists (a factor, or a share of the positions, for each frequency) fit a small head."""
    small: dict[str, Any] = {}
    num_rotated = int(head_dim * (values.get("partial_rotary_factor") or 1.0)) // 2
    for key, value in values.items():
        if isinstance(value, Mapping):
            small[key] = _shrink_rope(value, head_dim)
        elif key in ("short_factor", "long_factor"):
            small[key] = list(value)[:num_rotated]
        elif key == "mrope_section":
            parts = [max(1, size * num_rotated // sum(value)) for size in value]
            small[key] = [num_rotated - sum(parts[1:]), *parts[1:]]
        else:
            small[key] = value
    return small


def _choose_layers(values: Mapping[str, Any], num_layers: int) -> list[int] | None:
    """The layers to keep: the first of each kind, and two at least. None if all are kept.

    Where kinds follow from a period, such as `attn_layer_period`, layers can't be left out between others: all are
    kept up to the last first one.
    """
    kinds = _kinds(values, num_layers)
    chosen = sorted({kind: layer for layer, kind in reversed(list(enumerate(kinds)))}.values())
    if any(_period(values, name) > 1 for name in _PERIODS):
        chosen = list(range(chosen[-1] + 1))
    if len(chosen) == 1 < num_layers:
        chosen = [0, 1]
    return chosen if len(chosen) < num_layers else None


def _kinds(values: Mapping[str, Any], num_layers: int) -> list[tuple[str, ...]]:
    """For each layer, the values that the config has for it."""
    columns = [*_listed(values, num_layers), *_counted(values, num_layers), *_periodic(values, num_layers)]
    return [tuple(str(column[layer]) for column in columns) for layer in range(num_layers)]


def _listed(values: Mapping[str, Any], num_layers: int) -> Iterator[Sequence[Any]]:
    """Values for each layer, one sequence for each list or mapping of the config that is about layers."""
    yield from _per_layer(values, num_layers).values()
    for some in _indices(values, num_layers).values():
        yield [layer in some for layer in range(num_layers)]
    for entries in _by_index(values).values():
        yield [entries.get(layer) for layer in range(num_layers)]


def _counted(values: Mapping[str, Any], num_layers: int) -> Iterator[Sequence[Any]]:
    """The same for each number of layers at the beginning or at the end that are of another kind."""
    for name in _NUM_FIRST:
        if values.get(name):
            yield [layer < values[name] for layer in range(num_layers)]
    for name in _NUM_LAST:
        if values.get(name):
            yield [layer >= num_layers - values[name] for layer in range(num_layers)]
    if values.get("moe_layer_start_index"):
        yield [layer >= values["moe_layer_start_index"] for layer in range(num_layers)]


def _periodic(values: Mapping[str, Any], num_layers: int) -> Iterator[Sequence[Any]]:
    """The same for each setting by which every n-th layer is of another kind."""
    for name, is_other in _PERIODS.items():
        if name in values:
            period = _period(values, name)
            yield [is_other(layer, period, values) for layer in range(num_layers)]


def _period(values: Mapping[str, Any], name: str) -> int:
    found = values.get(name)
    return found if isinstance(found, int) and found > 0 else 1


def _per_layer(values: Mapping[str, Any], num_layers: int) -> dict[str, Sequence[Any]]:
    """The lists that have an entry for each layer."""
    indices = _indices(values, num_layers)
    return {
        key: value
        for key, value in values.items()
        if isinstance(value, (list, tuple)) and len(value) == num_layers > 1 and key not in indices
    }


def _indices(values: Mapping[str, Any], num_layers: int) -> dict[str, Sequence[int]]:
    """The lists of some layers' numbers. A list of a 0 or a 1 for each layer is none."""
    return {
        key: value
        for key, value in values.items()
        if isinstance(value, (list, tuple))
        and key.endswith(("_idxs", "_indices", "_layers"))
        and all(isinstance(item, int) and 0 <= item < num_layers for item in value)
        and sorted(set(value)) == list(value)
    }


def _by_index(values: Mapping[str, Any]) -> dict[str, dict[int, Any]]:
    """The mappings from some layers' numbers to what is different in these."""
    return {
        key: {int(layer): entry for layer, entry in value.items()}
        for key, value in values.items()
        if isinstance(value, Mapping) and value and all(str(layer).isdecimal() for layer in value)
    }


def _keep_layers(small: dict[str, Any], config: PretrainedConfig, layers: Sequence[int]) -> None:
    """Make `small` the config of these layers alone."""
    num_layers = config.num_hidden_layers
    kept = _entries_of(small, num_layers, layers)
    for name in _NUM_FIRST:
        if small.get(name):
            small[name] = sum(layer < small[name] for layer in layers)
    for name in _NUM_LAST:
        if small.get(name):
            small[name] = sum(layer >= num_layers - small[name] for layer in layers)
    small |= kept
    small[config.attribute_map.get("num_hidden_layers", "num_hidden_layers")] = len(layers)


def _entries_of(small: Mapping[str, Any], num_layers: int, layers: Sequence[int]) -> dict[str, Any]:
    """The lists and mappings that are about layers, for these alone, which are numbered anew."""
    kept: dict[str, Any] = {}
    for key, value in _per_layer(small, num_layers).items():
        kept[key] = [value[layer] for layer in layers]
    for key, numbers in _indices(small, num_layers).items():
        kept[key] = [index for index, layer in enumerate(layers) if layer in numbers]
    for key, entries in _by_index(small).items():
        kept[key] = {index: entries[layer] for index, layer in enumerate(layers) if layer in entries}
    return kept
