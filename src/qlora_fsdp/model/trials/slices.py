"""Check whether ranks can share the sequences of a model (`distributed.context_parallel`), and choose the attention.

Ranks can share a sequence only if its tokens meet nowhere but in attention, and if that attention is told where rows
start. A small model shows whether that is so (packing.py). This module checks the other conditions.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from transformers import PretrainedConfig

from qlora_fsdp.common.errors import ConfigError
from qlora_fsdp.common.model_figures import head_sizes
from qlora_fsdp.config.settings import problem_about
from qlora_fsdp.layers.attention.choose import FLASH_4, VARLEN, why_not_by_starts
from qlora_fsdp.layers.attention.sliced import check_heads
from qlora_fsdp.model.trials.attention_by_starts import BY_STARTS, register_stand_ins
from qlora_fsdp.model.trials.packing import Traits, class_name

SETTING = "distributed.context_parallel"
FIX = "Set distributed.context_parallel=1."
_BY_LONGEST = ("dynamic", "longrope")  # types of rotary embeddings whose factors follow from a batch's longest position


def check_slices(model: PretrainedConfig, num_slices: int, max_length: int, traits: Traits) -> None:
    """Refuse to let ranks share the sequences of a model that can't be computed in slices.

    Args:
        model: the model's config.
        num_slices: ranks that are to share a sequence.
        max_length: most tokens of a row.
        traits: what a small model of its class has shown.

    Raises:
        ConfigError: its tokens meet outside attention, its heads can't be divided, or its positions depend on others.
    """
    text = model.get_text_config()
    if traits.why_not_sliced is not None:
        reason = f"can't be used with {class_name(model)}, whose sequences can't be cut: {traits.why_not_sliced}."
        raise ConfigError([problem_about(SETTING, num_slices, reason, FIX)])
    for num_heads in {layer.num_heads for layer in head_sizes(text)}:
        check_heads(num_heads, num_slices)
    kind = _kind_by_longest(text, max_length)
    if kind is not None:
        reason = f"can't be used with rope_type {kind}: a slice would take the factors of its own longest position."
        fix = f"Set {SETTING}=1, or training.max_length to what the model was trained on first."
        raise ConfigError([problem_about(SETTING, num_slices, reason, fix)])


def _kind_by_longest(text: PretrainedConfig, max_length: int) -> str | None:
    """The type of rotary embeddings whose factors would differ between slices of such a length; None if none would."""
    known = getattr(text, "max_position_embeddings", None) or max_length
    parameters = getattr(text, "rope_parameters", None) or {}
    for part in (parameters, *(value for value in parameters.values() if isinstance(value, Mapping))):
        kind = part.get("rope_type")
        if kind in _BY_LONGEST and max_length > part.get("original_max_position_embeddings", known):
            return str(kind)
    return None


def whole_attention(
    attention: str, slower: str | None, model: PretrainedConfig, num_slices: int, device: torch.device
) -> str:
    """The attention that computes whole sequences where ranks share them: one that is told where rows start.

    Args:
        attention: what `choose_attention` has chosen.
        slower: its note.
        model: the model's config.
        num_slices: ranks that share a sequence.
        device: where the model runs. On a CPU plain torch computes it, with matrices of all queries and keys.

    Raises:
        ConfigError: here no such attention computes the model.
    """
    if attention in (VARLEN, FLASH_4):
        return attention
    reason = why_not_by_starts(model.get_text_config()) if device.type == "cpu" else slower
    if device.type == "cpu" and reason is None:
        register_stand_ins()
        return BY_STARTS
    reason = f"needs attention that is told where rows start: {reason or f'{attention} is not'}."
    raise ConfigError([problem_about(SETTING, num_slices, reason, FIX)])
