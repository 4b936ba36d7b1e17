"""Stretch a model's rotary positions, so that it takes longer rows than it was made for.

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
from transformers import PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from qlora_fsdp.common.errors import ConfigError
from qlora_fsdp.config.settings import problem_about

SETTING = "model.rope_scaling"
FROM_ORIGINAL = ("yarn", "llama3")  # their factor counts from what the model was trained on first
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}  # Llama 3.1's own


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
