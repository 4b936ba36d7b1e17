"""A tokenizer's files, which anybody may have written: they are checked before and after transformers reads them."""

from __future__ import annotations

import json
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase
from transformers.utils.hub import cached_file

from qlora_fsdp.common.errors import CheckpointError
from qlora_fsdp.common.foreign_files import find_outside
from qlora_fsdp.common.model_figures import LARGEST
from qlora_fsdp.common.text import shorten
from qlora_fsdp.config.schema import ModelConfig

MAX_TEMPLATE = 2**20  # characters of a tokenizer's chat templates
VOCABULARY_FILES = ("tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt")

# transformers passes every value of these files to the tokenizer's class, which opens some of them as paths.
ARGUMENT_FILES = ("tokenizer_config.json", "special_tokens_map.json")
# These are replaced by the folder's own files. Old tokenizers still have the paths of those who saved them.
UNUSED_PATHS = ("tokenizer_file", "special_tokens_map_file")


def load_from_files(model: ModelConfig) -> PreTrainedTokenizerBase:
    """Loads the tokenizer of `model.tokenizer_path`, or of `model.path` if that is not set, as it stands there.

    Raises:
        CheckpointError: there is none, or its files can't be used or would read others.
    """
    path = model.tokenizer_path or model.path
    fix = "Set model.tokenizer_path to a folder that has one, or to `bytes` for the built-in byte tokenizer."
    if path is None:
        raise CheckpointError(f"There is no tokenizer: neither model.tokenizer_path nor model.path is set. {fix}")
    # transformers would look for a mistyped folder on the hub, and fail with a message about the network.
    if path.startswith(("/", "./", "../", "~")) and not Path(path).expanduser().is_dir():
        raise CheckpointError(f"There is no tokenizer: {path} is not a folder. {fix}")
    place = str(Path(path).expanduser()) if Path(path).expanduser().is_dir() else path
    revision = model.revision if path == model.path else None
    try:
        _check_arguments(place, revision)
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            place, revision=revision, trust_remote_code=model.trust_remote_code
        )
        tokenizer("a", verbose=False)  # some settings are looked at only here
    except BaseException as error:  # from_pretrained raises a dozen types for files that are missing or broken
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":  # of `tokenizers`, in Rust
            raise
        raise CheckpointError(
            f"No tokenizer could be loaded from {path}: {_explain(Path(place), error)}. {fix}"
        ) from error
    # A folder with config.json alone gives a tokenizer that knows its special tokens and no others.
    if len(tokenizer) <= len(tokenizer.all_special_tokens):
        raise CheckpointError(f"{path} has no tokenizer files. {fix}")
    problem = _vocabulary_problem(tokenizer) or _template_problem(tokenizer.chat_template)
    if problem is not None:
        raise CheckpointError(f"The tokenizer of {path} {problem} Repair it, or {fix[:1].lower()}{fix[1:]}")
    return tokenizer


def _explain(folder: Path, error: BaseException) -> str:
    """Why no tokenizer could be loaded. Where files are missing, transformers names packages that would not help."""
    reason = " ".join(str(error).split()).rstrip(".")
    if not folder.is_dir() or not ("tiktoken" in reason or "sentencepiece" in reason):
        return reason
    if not any((folder / name).is_file() for name in VOCABULARY_FILES):
        return f"it has none of {', '.join(VOCABULARY_FILES)}"
    if (folder / "tokenizer.model").is_file() and find_spec("sentencepiece") is None:
        return "its tokenizer.model needs `pip install sentencepiece`, or tiktoken if it is one of tiktoken's"
    return reason


def _vocabulary_problem(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """Why a tokenizer could not be saved: `tokenizers` then makes a list of all ids up to the largest one."""
    largest = max(tokenizer.get_vocab().values())
    if largest >= LARGEST["vocab_size"]:
        return f"has a token with the id {largest:,}, and no model knows more than {LARGEST['vocab_size']:,} tokens."
    return None


def _template_problem(template: Any) -> str | None:
    """Why a tokenizer's chat templates can't be used, or can't be saved with the adapter once it has been trained."""
    if isinstance(template, dict):
        bad = [name for name in template if not isinstance(name, str) or re.fullmatch(r"\w[\w.-]*", name) is None]
        if bad:
            return f"names a chat template {shorten(str(bad[0]))}, which can't be the name of a file."
    texts = list(template.values()) if isinstance(template, dict) else [template]
    if not all(text is None or isinstance(text, str) for text in texts):
        return "has a chat template that is no text."
    if sum(len(text or "") for text in texts) > MAX_TEMPLATE:
        return f"has chat templates of more than {MAX_TEMPLATE:,} characters."
    return None


def _check_arguments(place: str, revision: str | None) -> None:
    """Checks that a tokenizer's files, which anybody may have written, name no files outside their folder.

    Such a file would become the vocabulary: its text could be read in what the model generates.

    Raises:
        ValueError: they do.
    """
    outside = find_outside(Path(place)) if Path(place).is_dir() else []
    if outside:
        raise ValueError(f"{outside[0].name} leads to a file outside the folder.")
    for name in ARGUMENT_FILES:
        file = cached_file(
            place,
            name,
            revision=revision,
            _raise_exceptions_for_gated_repo=False,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
        )
        arguments = {} if file is None else json.loads(Path(file).read_text(encoding="utf-8"))
        json.dumps(arguments, ensure_ascii=False).encode()  # as it will be saved; half a character can't be
        bad = [key for key, value in arguments.items() if _is_path(key, value)]
        if bad:
            raise ValueError(f"{bad[0]} in its {name} would open files that the tokenizer's folder does not hold.")


def _is_path(key: str, value: Any) -> bool:
    match key:
        case "vocab" | "merges":
            return isinstance(value, str)  # and not the vocabulary itself
        case "init_inputs" | "gguf_file":
            return bool(value)
        case "fast_tokenizer_files":
            return "/" in str(value)
        case _:
            is_used = key.endswith("_file") and key not in UNUSED_PATHS
            return is_used and value is not None and Path(str(value)).is_file()  # transformers asks the same
