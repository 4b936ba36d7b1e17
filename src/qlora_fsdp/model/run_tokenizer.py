"""The tokenizer of a run, for commands that look at its data alone: they assemble no model and so start sooner."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from transformers import PreTrainedTokenizerBase

from qlora_fsdp.config.adapter.start_adapter import SETTING
from qlora_fsdp.config.schema import Config, ModelConfig
from qlora_fsdp.data.tokenizer import AddedTokens, extend_tokenizer, find_tokenizer, load_tokenizer
from qlora_fsdp.records.start_folder import find_start

if TYPE_CHECKING:
    from qlora_fsdp.model.adapters.read import SavedAdapter


def load_run_tokenizer(config: Config) -> PreTrainedTokenizerBase:
    """Load the tokenizer that the run will use, with the tokens that it adds."""
    if config.lora.start is None:
        tokenizer = load_tokenizer(config.model, config.data)
    else:
        from qlora_fsdp.model.adapters.read import SavedAdapter  # imports PEFT, which takes seconds

        start = SavedAdapter(find_start(config), SETTING)
        folder = tokenizer_folder(start, config.model, start.read_tokens())
        tokenizer = find_tokenizer(config.model, config.data, None, folder, trains=False)
    extend_tokenizer(tokenizer, config.tokenizer)
    return tokenizer


def tokenizer_folder(start: SavedAdapter, model: ModelConfig, tokens: AddedTokens) -> Path | None:
    """The folder of the tokenizer of a run that trains on from `start`; None: the one that the settings name.

    The adapter's is used unless the settings name one. Tokens that the adapter added are known to its own alone.
    """
    return start.folder if model.tokenizer_path is None or tokens.ids else None
