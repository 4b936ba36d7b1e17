"""Rows and the positions that a model knows: beyond a table of them it fails; beyond others it guesses."""

from __future__ import annotations

from torch import nn
from transformers import PretrainedConfig

from qlora_fsdp.common.errors import DataError
from qlora_fsdp.data.run_data import PreparedData
from qlora_fsdp.data.sequences import Sequences, TrainingData

_TABLES = ("position_embeddings", "wpe", "embed_positions")  # BERT and its kin, GPT-2, OPT


def num_learned_positions(model: nn.Module) -> int | None:
    """Positions that `model` has an embedding each for; None where it computes them (rotary embeddings)."""
    for name, module in model.named_modules():
        if name.rpartition(".")[2] in _TABLES and isinstance(module, nn.Embedding):
            # OPT begins at its offset; RoBERTa and Longformer behind the row of padding.
            padding = -1 if module.padding_idx is None else module.padding_idx
            return module.num_embeddings - int(getattr(module, "offset", padding + 1))
    return None


def check_positions(model: nn.Module, config: PretrainedConfig, data: PreparedData[TrainingData]) -> str | None:
    """Whether the longest row fits the positions that the model knows; packed rows begin at 0 each.

    Args:
        model: transformers' own, or a wrapper of it.
        config: of its text part.
        data: with all rows, or a stream of them, of which the length is known no better than by its limit.

    Returns:
        A note for the log where rows go beyond `max_position_embeddings` of a model that computes positions; or None.

    Raises:
        DataError: rows go beyond a table of positions.
    """
    sets = [part for part in (data.train, data.eval) if part is not None]
    longest = max(
        int(part.rows.lengths[part.row_ids].max()) if isinstance(part, Sequences) else part.max_length for part in sets
    )
    table = num_learned_positions(model)
    if table is not None and longest > table:
        raise DataError(
            f"The longest row has {longest:,} tokens, and the model has embeddings of {table:,} positions. "
            f"Set training.max_length={table}, which cuts rows there, or with data.bad_rows=skip leaves them out."
        )
    known = getattr(config, "max_position_embeddings", None)
    if table is None and known is not None and longest > known:
        return (
            f"the longest row has {longest:,} tokens, and the model was made for {known:,} positions "
            f"(max_position_embeddings); training.max_length={known} cuts rows there"
        )
    return None
