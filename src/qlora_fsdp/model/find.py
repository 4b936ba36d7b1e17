"""Find the model files that the settings name, and read what they hold without reading any weights.

The settings name a local folder, a model on the Hugging Face hub, or, for random weights, a config alone. Reading the
headers of the safetensors files is enough to know every tensor's shape, dtype and place.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from transformers import AutoConfig, PretrainedConfig

from qlora_fsdp.common.contained import LimitError, call
from qlora_fsdp.common.errors import CheckpointError, ConfigError, UserError
from qlora_fsdp.common.foreign_files import find_outside, read_json_object
from qlora_fsdp.common.hub import OTHER_FORMATS, SMALL_FILES, fetch_config_json, path_exists, without_hub
from qlora_fsdp.common.model_figures import MAX_CONFIG_BYTES, find_bad_sizes
from qlora_fsdp.common.text import name_error, shorten
from qlora_fsdp.config.model_config import check_same_model, describes_itself, read_config_json
from qlora_fsdp.config.schema import ModelConfig, Weights
from qlora_fsdp.model.positions import scale_rope
from qlora_fsdp.weights.safetensors_files import StoredTensor, read_headers

MAX_REASON = 400  # characters of a library's message
HOW_TO_TRUST = "If you trust this code, type model.trust_remote_code=true."
FirstError = Callable[[str | None], str | None]


@dataclass
class ModelFiles:
    """A base model's files.

    Attributes:
        folder: the local folder that holds them; None for `model.weights=random` from a config in the settings.
        config: transformers' config of the model.
        tensors: the stored tensors by key; empty for random weights.
    """

    folder: Path | None
    config: PretrainedConfig
    tensors: dict[str, StoredTensor] = field(default_factory=dict)


def find_model(config: ModelConfig, is_main: bool, first_error: FirstError) -> ModelFiles:
    """Locate the model files. A model on the hub is downloaded by the main process of each node. Collective.

    Args:
        config: the model's settings.
        is_main: whether this process downloads.
        first_error: `Processes.first_error`; for a single process, `lambda error: error`.

    Raises:
        CheckpointError: there is no such folder or no config.json, files are cut short or lie elsewhere, or the hub
            can't be reached.
        ConfigError: a preset states the figures of another model.
    """
    folder = _find_folder(config, is_main, first_error)
    outside = [] if folder is None else find_outside(folder)
    if outside:
        raise CheckpointError(
            f"model.path={config.path}: {outside[0].name} leads to a file outside the model's folder. Remove it, or "
            "copy that file there yourself."
        )
    try:
        if config.weights is Weights.random:
            _check_sizes(config.config)
        if folder is not None and (folder / "config.json").is_file():
            _check_sizes(_read_config(folder / "config.json"))
            # Code of the model's own may do anything anyway.
            hf_config = _read(folder, True) if config.trust_remote_code else _make_config(_read, folder, False)
            overrides = dict(config.config) if config.weights is Weights.random and config.name == "custom" else {}
        elif config.config and config.weights is Weights.random:
            values = dict(config.config)
            hf_config = _make_config(_describe, values)
            overrides = {}  # that is all of them already
        else:
            fix = "Set model.path to a folder with config.json and safetensors files."
            if folder is not None and (folder / "adapter_config.json").is_file():
                fix = f"It is an adapter: set model.path to its base, and lora.start={config.path} to train on from it."
            raise CheckpointError(f"model.path={config.path} has no config.json. {fix}")
        if not isinstance(hf_config.get_text_config(), PretrainedConfig):
            raise CheckpointError(f"model.path={config.path}: its text_config is no config. Copy or download it again.")
        check_same_model(config, hf_config.to_dict())
        of_text = overrides.pop("text_config", {})
        hf_config.get_text_config().update(overrides | of_text)
        scale_rope(hf_config.get_text_config(), config.rope_scaling)
    except UserError:
        raise
    except Exception as error:  # the file may hold anything
        reason = shorten(" ".join(str(error).split()).rstrip("."), MAX_REASON)
        fix = "Check model.path, or model.config."
        if "trust_remote_code=True" in str(error):
            reason = "it comes with code of its own"
            fix = HOW_TO_TRUST
        raise CheckpointError(f"model.path={config.path}: its config can't be used: {reason}. {fix}") from error
    tensors = {} if config.weights is Weights.random or folder is None else read_headers(folder)
    if folder is not None:
        _settle_tie(hf_config, folder, tensors)
    return ModelFiles(folder, hf_config, tensors)


def make_config(values: Mapping[str, Any], name: str) -> PretrainedConfig:
    """transformers' config with these values, which were read from a config.json or a preset.

    Raises:
        CheckpointError: transformers has no such model, or the values are none.
    """
    try:
        _check_sizes(values)
        config = _make_config(_describe, dict(values))
        if config.get_text_config() is not config and "tie_word_embeddings" not in values:  # as in `_settle_tie`
            config.tie_word_embeddings = _text_is_tied(config)
        return config
    except Exception as error:  # the file may hold anything
        reason = shorten(" ".join(str(error).split()), MAX_REASON)
        raise CheckpointError(
            f"{name}: its config can't be used: {reason}. Check model.path, or model.config; a model with code of its "
            "own can only be tried on GPUs, with experiment=dry_run."
        ) from error


def _make_config(make: Callable[..., PretrainedConfig], *args: Any) -> PretrainedConfig:
    """transformers' config, made in the process for foreign files first: its classes compute what files say.

    Raises:
        ValueError: that takes too long or too much memory.
        Exception: of any type, or a TryError: there is no such class, or the values are none of it.
    """
    try:
        call(_try_config, make, *args)
    except LimitError as error:
        raise ValueError(f"it {error}") from None
    return make(*args)


def _try_config(make: Callable[..., PretrainedConfig], *args: Any) -> None:
    make(*args)


def _read(folder: Path, trust_remote_code: bool) -> PretrainedConfig:
    with nullcontext() if trust_remote_code else without_hub():
        config: PretrainedConfig = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    return config


def _describe(values: dict[str, Any]) -> PretrainedConfig:
    values = dict(values)
    with without_hub():
        config: PretrainedConfig = AutoConfig.for_model(values.pop("model_type"), **values)
    return config


def _read_config(file: Path) -> dict[str, Any]:
    """The values of a config.json, before transformers takes them at their word.

    Raises:
        ValueError, OSError: the file is damaged.
    """
    values = read_json_object(file, MAX_CONFIG_BYTES)
    if "configuration_files" in values:
        raise ValueError("it leads to other files (configuration_files)")
    return values


def _check_sizes(values: Mapping[str, Any]) -> None:
    for problem in find_bad_sizes(values):
        raise ValueError(problem)


def _settle_tie(config: PretrainedConfig, folder: Path, tensors: Mapping[str, StoredTensor]) -> None:
    """Sets whether head and embeddings are one weight, where a multimodal config.json does not say.

    That of Mistral Small 3.1 does not. transformers then assumes that they are one, and yet takes both from files that
    have both.
    """
    text = config.get_text_config()
    if text is config or "tie_word_embeddings" in json.loads((folder / "config.json").read_text(encoding="utf-8")):
        return
    has_head = any(key.endswith("lm_head.weight") for key in tensors)
    config.tie_word_embeddings = not has_head if tensors else _text_is_tied(config)


def _text_is_tied(config: PretrainedConfig) -> bool:
    """What the text part says of a multimodal model's head and embeddings, or the whole where that says nothing."""
    return bool(getattr(config.get_text_config(), "tie_word_embeddings", config.tie_word_embeddings))


def _find_folder(config: ModelConfig, is_main: bool, first_error: FirstError) -> Path | None:
    if config.path is None:
        return None
    folder = Path(config.path).expanduser()
    needs_none = config.weights is Weights.random and describes_itself(config)
    error = None
    if is_main and not folder.is_dir() and not needs_none:
        error = _download_or_explain(config)
    error = first_error(error)  # every rank has to ask, or those that do would wait forever
    if error is not None:
        raise CheckpointError(error)
    if folder.is_dir():
        return folder
    return None if needs_none else _download(config, local_files_only=True)


def _download_or_explain(config: ModelConfig) -> str | None:
    """Get a hub model into this node's cache, or find it there. Returns an error message, or None."""
    path = config.path or ""
    if path_exists(path):
        reason = "is a GGUF file, which is not read" if path.endswith(".gguf") else "is a file"
        return f"model.path={path} {reason}. Set model.path to a folder with config.json and safetensors files."
    if config.name != "custom" and not describes_itself(config):  # before the weights: is it the preset's model?
        try:
            read_config_json(fetch_config_json(config.path or "", config.revision), config)
        except ConfigError as error:
            return str(error)
        except CheckpointError:
            pass  # the download below says more
    failures = []
    for local_files_only in (False, True):
        try:
            _download(config, local_files_only)
        except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError, ValueError) as error:
            failures.append(error)
        else:
            return None
    other = "set model to a preset" if config.weights is Weights.random else "use model.weights=random for a dry run"
    return (
        f"model.path={config.path} is no folder on {platform.node()}, and no hub model that can be had "
        f"({name_error(failures[0])}). Set model.path to a folder that every host has, log in with `hf auth login` if "
        f"the model is gated, or {other}."
    )


def _download(config: ModelConfig, local_files_only: bool) -> Path:
    """Downloads the model's files into the hub's cache, or finds them there; the weights only where they are read."""
    assert config.path is not None
    weights = [] if config.weights is Weights.random else ["*.safetensors"]
    return Path(
        snapshot_download(
            config.path,
            revision=config.revision,
            allow_patterns=[*weights, *SMALL_FILES],
            ignore_patterns=[*OTHER_FORMATS],
            local_files_only=local_files_only,
        )
    )
