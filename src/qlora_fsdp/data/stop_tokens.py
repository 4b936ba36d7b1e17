"""The tokens at which generation stops: the tokenizer's end token, and those of the model's generation_config.json.

Many models have several. Those of GLM 4.5 are the markers of the roles that may follow an answer, and that of its
tokenizer is never written by its chat template. The tokenizer of a run remembers them, as everything that writes or
reads rows has it at hand.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers.utils.hub import cached_file

from qlora_fsdp.common.foreign_files import read_json_object
from qlora_fsdp.common.model_figures import MAX_CONFIG_BYTES
from qlora_fsdp.config.schema import ModelConfig

GENERATION_FILE = "generation_config.json"
BYTES = "bytes"  # model.tokenizer_path of the built-in tokenizer
_REMEMBERED = "_ids_of_generation_config"  # an attribute of the tokenizer, which is copied and sent to workers with it


def remember_stop_tokens(tokenizer: PreTrainedTokenizerBase, model: ModelConfig) -> None:
    """Lets the tokenizer remember the ids of `eos_token_id` in the model's generation_config.json.

    Where `model.tokenizer_path` is set, a model of the hub is looked for in the hub's cache alone. Ids that are no
    added tokens of the tokenizer are left out: they belong to another one, which `model.tokenizer_path` has replaced.
    A file that can't be read names none; generating refuses it by name.
    """
    place = model.path
    if place is None and model.tokenizer_path != BYTES:
        place = model.tokenizer_path
    may_download = model.tokenizer_path is None  # else nothing else is needed of the model's files
    ids = []
    if place is not None:
        revision = model.revision if place == model.path else None
        ids = _read_ids(place, revision, may_download)
    known = tokenizer.added_tokens_decoder
    setattr(tokenizer, _REMEMBERED, tuple(token_id for token_id in ids if token_id in known))


def stop_ids(tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """The ids of all tokens at which generation stops, the tokenizer's own end token first."""
    own = [tokenizer.eos_token_id] if isinstance(tokenizer.eos_token_id, int) else []
    remembered: tuple[int, ...] = getattr(tokenizer, _REMEMBERED, ())
    return tuple(dict.fromkeys([*own, *remembered]))


def stop_texts(tokenizer: PreTrainedTokenizerBase) -> tuple[str, ...]:
    """These tokens as chat templates write them."""
    known = tokenizer.added_tokens_decoder
    texts = [known[token_id].content for token_id in stop_ids(tokenizer) if token_id in known]
    return tuple(text for text in texts if text)


def _read_ids(place: str, revision: str | None, may_download: bool) -> list[int]:
    """The ids in the generation_config.json of a folder or of a model of the hub; none where there is no such file."""
    folder = Path(place).expanduser()
    try:
        if folder.is_dir():
            file = folder / GENERATION_FILE
        else:
            found = cached_file(place, GENERATION_FILE, revision=revision, local_files_only=not may_download)
            file = Path(found or "")
        values = read_json_object(file, MAX_CONFIG_BYTES)
    except (OSError, ValueError):
        return []
    ids: Any = values.get("eos_token_id")
    return [each for each in (ids if isinstance(ids, list) else [ids]) if type(each) is int]
