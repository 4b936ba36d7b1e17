"""How a model's files want text to be generated: their generation_config.json, which anybody may have written."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers import GenerationConfig

from qlora_fsdp.common.errors import CheckpointError
from qlora_fsdp.common.foreign_files import read_json_object
from qlora_fsdp.common.model_figures import MAX_CONFIG_BYTES
from qlora_fsdp.common.text import shorten
from qlora_fsdp.decoding.sampling import why_not
from qlora_fsdp.model.assemble import AssembledModel

GENERATION_FILE = "generation_config.json"
LIMIT = 2**63  # of numbers; torch has none above


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < LIMIT


def _are_ids(value: Any) -> bool:
    ids = value if isinstance(value, list) else [value]
    return all(type(each) is int and abs(each) < LIMIT for each in ids)


# What the values of a generation_config.json have to be, of those of which transformers does not say it clearly.
_FITS: Mapping[str, Callable[[Any], bool]] = {
    **dict.fromkeys(("temperature", "top_k", "top_p", "min_p", "typical_p", "guidance_scale", "max_time"), _is_number),
    **dict.fromkeys(("max_length", "max_new_tokens", "min_length", "min_new_tokens", "num_beams"), _is_number),
    **dict.fromkeys(("num_return_sequences", "no_repeat_ngram_size", "prompt_lookup_num_tokens"), _is_number),
    **dict.fromkeys(("eos_token_id", "pad_token_id", "forced_eos_token_id", "suppress_tokens"), _are_ids),
    "repetition_penalty": lambda value: _is_number(value) and value > 0,
}


def generation_config(trained: AssembledModel) -> GenerationConfig:
    """The generation_config.json of the model files, with the tokenizer's end and padding where it has none.

    Raises:
        CheckpointError: the file can't be read, or a value in it can't be used.
    """
    file = None if trained.files.folder is None else trained.files.folder / GENERATION_FILE
    config = GenerationConfig() if file is None or not file.is_file() else _read_generation(file)
    if config.eos_token_id is None:
        config.eos_token_id = trained.tokenizer.eos_token_id
    config.pad_token_id = trained.tokenizer.pad_token_id
    return config


@contextmanager
def blaming_file(trained: AssembledModel, config: GenerationConfig) -> Iterator[None]:
    """Around transformers' `generate`, which looks at most settings of a generation_config.json only by then.

    Raises:
        CheckpointError: it can't generate with a setting that is not known here.
    """
    try:
        yield
    except (TypeError, ValueError) as error:
        reason = why_not(config)
        if reason is None:
            raise
        file = f"{trained.files.folder}/{GENERATION_FILE}"
        raise CheckpointError(
            f"transformers can't generate with {file}: {str(error).strip()} ({reason}). Correct it there, or remove it."
        ) from error


def _read_generation(file: Path) -> GenerationConfig:
    try:
        values = read_json_object(file, MAX_CONFIG_BYTES)
        bad = next((key for key, fits in _FITS.items() if values.get(key) is not None and not fits(values[key])), None)
        config = GenerationConfig() if bad else GenerationConfig.from_pretrained(str(file.parent))
    except Exception as error:  # the file may hold anything
        raise CheckpointError(f"{file} can't be used: {error}. Correct it, or copy it again.") from error
    if bad is not None:
        value = shorten(json.dumps(values[bad]))
        raise CheckpointError(f"{file} sets {bad} to {value}, which can't be used. Correct it there, or remove it.")
    return config
