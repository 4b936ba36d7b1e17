"""Check that no row, together with its padding, has more positions than the model was made for.

A model with a table of position embeddings fails beyond its end. A model that computes positions (rotary embeddings)
runs on, at positions that it was never trained on.

Stretch a model's rotary positions, so that it takes longer rows than it was made for.

A rotary embedding turns queries and keys by angles that grow with the position. Beyond the positions that a model was
trained on the angles are new to it, and what it writes falls apart. Scaling brings them back into the range that it was
trained on, and a short training at the new length adapts the model to it: `linear` divides all positions
(arXiv:2306.15595), `yarn` slows the slow turns alone and sharpens the softmax (arXiv:2309.00071), `llama3` is what
Llama 3.1 was trained with. The formulas are transformers' own (`modeling_rope_utils`); here its config is changed,
before anything is built of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from qlora_fsdp.common.errors import ConfigError, DataError
from qlora_fsdp.config.settings import problem_about
from qlora_fsdp.data.batch import padded_length
from qlora_fsdp.data.run_data import PreparedData
from qlora_fsdp.data.sequences import RandomRows, Sequences, TrainingData

_TABLES = ("position_embeddings", "wpe", "embed_positions")  # in BERT and its relatives, GPT-2, OPT
SETTING = "model.rope_scaling"
FROM_ORIGINAL = ("yarn", "llama3")  # their factor counts from what the model was trained on first
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}  # Llama 3.1's own


def num_learned_positions(model: nn.Module) -> int | None:
    """Positions that `model` has embeddings for; None if it computes them (rotary embeddings)."""
    for name, module in model.named_modules():
        if name.rpartition(".")[2] in _TABLES and isinstance(module, nn.Embedding):
            # OPT begins at its offset, RoBERTa and Longformer after the row for padding.
            padding = -1 if module.padding_idx is None else module.padding_idx
            return module.num_embeddings - int(getattr(module, "offset", padding + 1))
    return None


def first_position(model: nn.Module) -> int:
    """The position that `model` gives the first token of a row: 0, or in RoBERTa and its kin the one after padding's.

    These have a row for padding among their positions. Models that begin at an offset of their own add it themselves.
    """
    for name, module in model.named_modules():
        if name.rpartition(".")[2] == "position_embeddings" and isinstance(module, nn.Embedding):
            return 0 if module.padding_idx is None else module.padding_idx + 1
    return 0


def check_positions(model: nn.Module, config: PretrainedConfig, data: PreparedData[TrainingData]) -> str | None:
    """Check whether the longest row fits the positions that the model knows. Each packed row begins at position 0.

    Args:
        model: transformers' own, or a wrapper of it.
        config: config of its text part.
        data: all rows, or a stream of them. The longest row of a stream is unknown, so its limit counts.

    Returns:
        A note for the log if rows go beyond `max_position_embeddings` of a model that computes positions, and they are
        of random tokens, which a test of speed or memory may have, or of a stream, whose longest is unknown; else None.

    Raises:
        DataError: rows go beyond a table of positions, or beyond the positions that rotary embeddings were made for.
    """
    sets = [part for part in (data.train, data.eval) if part is not None]
    longest = max(part.longest_part if isinstance(part, Sequences) else part.max_length for part in sets)
    table = num_learned_positions(model)
    if table is not None and longest <= table < max(padded_length(part, longest) for part in sets):
        raise DataError(
            f"The longest row has {longest:,} tokens, padding makes it longer than {table:,}, and the model has "
            f"embeddings of no more positions. Set training.max_length={table}."
        )
    if table is not None and longest > table:
        raise DataError(
            f"The longest row has {longest:,} tokens, and the model has embeddings of {table:,} positions. "
            f"Set training.max_length={table}, which cuts rows there, or with data.bad_rows=skip leaves them out."
        )
    known = getattr(config, "max_position_embeddings", None)
    if table is not None or known is None or longest <= known:
        return None
    is_known = any(isinstance(part, Sequences) and not isinstance(part.rows, RandomRows) for part in sets)
    has, made = f"longest row has {longest:,} tokens", f"the model was made for {known:,} positions"
    if not is_known:
        return f"the {has if isinstance(sets[0], Sequences) else f'limit of rows is {longest:,} tokens'}, and {made}"
    stretch = ""
    if getattr(config, "rope_parameters", None):
        factor = needed_factor(config, longest)
        stretch = f"model.rope_scaling='{{rope_type: yarn, factor: {factor}}}' to stretch them, or "
    raise DataError(f"The {has}, and {made}. Set {stretch}training.max_length={known}, which cuts rows there.")


def scale_rope(config: PretrainedConfig, wanted: Mapping[str, Any]) -> None:
    """Change a text model's config to scaled rotary embeddings, and to as many positions as these reach.

    Args:
        config: the text part's config; changed in place. If several kinds of layers have rotary embeddings of their
            own, those with a sliding window stay as they are: no token looks further back than their window.
        wanted: as transformers' `rope_scaling`: `rope_type`, `factor` and what else the type takes; empty for none.

    Raises:
        ConfigError: the model has no rotary embeddings, is scaled in another way already, or the values are no use.
            `check_settings` has looked at them alone before.
    """
    if not wanted:
        return
    present = getattr(config, "rope_parameters", None)
    known = getattr(config, "max_position_embeddings", None)
    if not present or not isinstance(known, int):
        reason = f"can't be used: {config.model_type} has no rotary embeddings."
        raise ConfigError([problem_about(SETTING, dict(wanted), reason, "Leave model.rope_scaling out.")])
    nested = _kinds(present)
    parts = [present[key] for key in nested] or [present]
    originals = [_original(config, {**part, **wanted}, known) for part in parts]
    scaled = [_scaled(part, wanted, original) for part, original in zip(parts, originals, strict=True)]
    config.rope_parameters = {**present, **dict(zip(nested, scaled, strict=True))} if nested else scaled[0]
    base = originals[0] if wanted["rope_type"] in FROM_ORIGINAL else known
    config.max_position_embeddings = max(known, round(base * wanted["factor"]))
    try:
        config.standardize_rope_params()
        config.validate_rope()
    except Exception as error:  # transformers' own checks raise whatever they meet
        reason = f"is refused by transformers: {error}."
        raise ConfigError([problem_about(SETTING, dict(wanted), reason, "docs/long-rows.md has examples.")]) from error
    try:
        for layers in nested or (None,):
            ROPE_INIT_FUNCTIONS[wanted["rope_type"]](config, torch.device("cpu"), layer_type=layers)
    except Exception as error:  # such as a logarithm of 0, or of a size of heads that the config does not state
        reason = f"can't be computed by transformers for {config.model_type} ({type(error).__name__}: {error})."
        fix = f"Set {SETTING}={{rope_type:linear,factor:{wanted['factor']}}}, or leave it out."
        raise ConfigError([problem_about(SETTING, dict(wanted), reason, fix)]) from error


def write_rope(values: dict[str, Any], config: PretrainedConfig) -> None:
    """Put a config's rotary parameters into the values of a config.json, if they reach further than those there.

    Args:
        values: the text part of a config.json; changed in place.
        config: the text part's config, perhaps changed by `scale_rope`.
    """
    positions = getattr(config, "max_position_embeddings", None)
    if positions is None or positions == values.get("max_position_embeddings", positions):
        return
    values["max_position_embeddings"] = positions
    found = dict(config.rope_parameters)
    if any(isinstance(value, Mapping) for value in found.values()):
        values["rope_parameters"] = found
        return
    # The older names, which every version of transformers reads, and those who serve models.
    values.pop("rope_parameters", None)
    values["rope_theta"] = found.pop("rope_theta")
    values["rope_scaling"] = found


def needed_factor(config: PretrainedConfig, num_tokens: int) -> int:
    """The smallest whole factor that lets yarn's positions reach this many tokens."""
    present = getattr(config, "rope_parameters", None) or {}
    nested = _kinds(present)
    part = present[nested[0]] if nested else present
    return -(num_tokens // -_original(config, part, config.max_position_embeddings))


def _kinds(parameters: Mapping[str, Any]) -> list[str]:
    """The kinds of layers that have rotary parameters of their own and see whole rows; none if all layers share one."""
    return [key for key, value in parameters.items() if isinstance(value, Mapping) and key != "sliding_attention"]


def _original(config: PretrainedConfig, part: Mapping[str, Any], known: int) -> int:
    """Positions that the model was trained on before anything was scaled."""
    stated = part.get("original_max_position_embeddings") or getattr(config, "original_max_position_embeddings", None)
    return int(stated) if stated else known


def _scaled(part: Mapping[str, Any], wanted: Mapping[str, Any], original: int) -> dict[str, Any]:
    """The rotary parameters of some layers with those that are wanted."""
    own, kind = part.get("rope_type", "default"), wanted["rope_type"]
    if own not in ("default", kind):
        reason = f"contradicts the model's own scaling, rope_type={own}, which it was trained with."
        fix = f"Set {SETTING}.rope_type={own}, or leave {SETTING} out."
        raise ConfigError([problem_about(SETTING, dict(wanted), reason, fix)])
    defaults = LLAMA3 if kind == "llama3" else {}
    found = {**defaults, **part, **wanted}
    if kind in FROM_ORIGINAL:
        found["original_max_position_embeddings"] = original
    return found
