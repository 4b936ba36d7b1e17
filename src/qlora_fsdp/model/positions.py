"""Check that no row, together with its padding, has more positions than the model was made for.

A model with a table of position embeddings fails beyond its end. A model that computes positions (rotary embeddings)
runs on, at positions that it was never trained on.
"""

from __future__ import annotations

from torch import nn
from transformers import PretrainedConfig

from qlora_fsdp.common.errors import DataError
from qlora_fsdp.data.batch import padded_length
from qlora_fsdp.data.run_data import PreparedData
from qlora_fsdp.data.sequences import RandomRows, Sequences, TrainingData
from qlora_fsdp.model.rope import needed_factor

_TABLES = ("position_embeddings", "wpe", "embed_positions")  # in BERT and its relatives, GPT-2, OPT


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
