"""The tokenizer of a run, for commands that look at its data alone: they assemble no model and so start sooner.

Whether a model has learned the markers of a chat template is seen by its rows of the embeddings, before it is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from transformers import PreTrainedTokenizerBase

from qlora_fsdp.common.module_names import is_target
from qlora_fsdp.config.adapter.lora_start import SETTING
from qlora_fsdp.config.schema import Config, ModelConfig, TokenizerConfig
from qlora_fsdp.config.specs import DataSpec
from qlora_fsdp.data.chats.markers import chosen_markers, explain_untrained
from qlora_fsdp.data.tokenizer import AddedTokens, extend_tokenizer, find_tokenizer, load_tokenizer
from qlora_fsdp.records.start_folder import find_start
from qlora_fsdp.weights.safetensors_files import StoredTensor

if TYPE_CHECKING:
    from qlora_fsdp.model.adapters.read_adapter import SavedAdapter

# The names by which models store their input embeddings.
EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight", "embed_in.weight")


def load_run_tokenizer(config: Config) -> PreTrainedTokenizerBase:
    """Load the tokenizer that the run will use, with the tokens that it adds."""
    if config.lora.start is None:
        tokenizer = load_tokenizer(config.model, config.data)
    else:
        from qlora_fsdp.model.adapters.read_adapter import SavedAdapter  # imports PEFT, which takes seconds

        start = SavedAdapter(find_start(config.lora.start, config.run, config.checkpoint), SETTING)
        folder = tokenizer_folder(start, config.model, start.read_tokens())
        tokenizer = find_tokenizer(config.model, config.data, None, folder, trains=False)
    extend_tokenizer(tokenizer, config.tokenizer)
    return tokenizer


def tokenizer_folder(start: SavedAdapter, model: ModelConfig, tokens: AddedTokens) -> Path | None:
    """The folder of the tokenizer of a run that trains on from `start`; None: the one that the settings name.

    The adapter's is used unless the settings name one. Tokens that the adapter added are known to its own alone.
    """
    return start.folder if model.tokenizer_path is None or tokens.ids else None


def check_chat_rows(
    tensors: Mapping[str, StoredTensor],
    tokenizer: PreTrainedTokenizerBase,
    data: DataSpec,
    added: TokenizerConfig,
    modules_to_save: Sequence[str],
) -> list[str]:
    """A note if the markers of data.chat_template are tokens that the model has never learned; else none.

    Base models reserve tokens that they were not trained on. Their rows are zeros, or all alike, so that the model
    can't tell one marker from another. Of the embeddings only these rows are read.

    Args:
        tensors: the model's stored tensors; maybe none.
        tokenizer: with new tokens added.
        data: its chat templates.
        added: tokens whose rows are trained.
        modules_to_save: modules that are trained in full.
    """
    tables = [tensor for key, tensor in tensors.items() if key.endswith(EMBEDDINGS) and len(tensor.shape) == 2]
    trained = {*added.add_tokens, *added.add_special_tokens}
    markers = [marker for marker in chosen_markers(data) if marker not in trained]
    if len(tables) != 1 or is_target(tables[0].key.removesuffix(".weight"), modules_to_save):
        return []
    vocabulary = tokenizer.get_vocab()
    ids = {marker: vocabulary.get(marker, -1) for marker in markers}
    rows = {marker: _read_row(tables[0], row) for marker, row in ids.items() if 0 <= row < tables[0].shape[0]}
    untrained = [
        marker
        for marker, row in rows.items()
        if not row.any() or any(torch.equal(row, other) for name, other in rows.items() if name != marker)
    ]
    return [explain_untrained(untrained, data)] if untrained else []


def _read_row(table: StoredTensor, row: int) -> torch.Tensor:
    num_bytes = table.shape[1] * table.dtype.itemsize
    with table.file.open("rb") as file:
        file.seek(table.offset + row * num_bytes)
        return torch.frombuffer(bytearray(file.read(num_bytes)), dtype=table.dtype)
