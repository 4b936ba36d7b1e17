"""Choose the files of an adapter's folder to upload: its own ones, without secrets or paths of this machine."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

import yaml

from qlora_fsdp.common.errors import ConfigError, Problem, refuse
from qlora_fsdp.common.foreign_files import named_templates
from qlora_fsdp.common.hub_names import LOCAL_BASE, hub_name
from qlora_fsdp.config.adapter_config import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    SETTINGS_FILE,
    TOKENIZER_MODELS,
    TOKENIZER_TEXTS,
    adapter_problems,
)
from qlora_fsdp.config.settings import show

# An adapter's config, a classifier's labels, and the tokenizer. Nothing else is uploaded.
TEXT_FILES = ("README.md", ADAPTER_CONFIG, SETTINGS_FILE, "config.json", *TOKENIZER_TEXTS)
BINARY_FILES = (ADAPTER_WEIGHTS, *TOKENIZER_MODELS)

CHECKED = ("README.md", ADAPTER_CONFIG, SETTINGS_FILE, "config.json", "tokenizer_config.json")
SECRET_NAME = re.compile(r"(?:^|_)(?:TOKEN|KEY|SECRET|PASSWORD|PASSWD|CREDENTIALS?)(?:_|$)", re.IGNORECASE)
MIN_SECRET = 8  # characters; shorter values are words that any file may hold
THIS_FOLDER = "path/to/this/folder"  # what the model card calls the adapter's own folder


def read_uploads(folder: Path, repo: str, base: str | None) -> tuple[dict[str, bytes | Path], list[str]]:
    """Reads what is uploaded of an adapter's folder.

    Returns:
        Contents by file name, or the file itself where it is large; and notes for the user.

    Raises:
        ConfigError: the folder holds no adapter, or a file leads out of it, or a text holds a path of this machine or
            a secret of the environment.
    """
    _check_folder(folder)
    try:
        names = [*TEXT_FILES, *named_templates(folder)]
        texts = {name: (folder / name).read_text("utf-8") for name in names if (folder / name).is_file()}
        texts[ADAPTER_CONFIG], named = _publish_base(texts[ADAPTER_CONFIG], base)
        if SETTINGS_FILE in texts:
            texts[SETTINGS_FILE] = _publish_settings(texts[SETTINGS_FILE], named)
        if "README.md" in texts:
            texts["README.md"] = _publish_card(texts["README.md"], repo, named)
        if "config.json" in texts:
            values = json.loads(texts["config.json"])
            values.pop("_name_or_path", None)
            texts["config.json"] = json.dumps(values, indent=2) + "\n"
    except (OSError, ValueError, TypeError, AttributeError, yaml.YAMLError) as error:
        raise _unreadable(folder, f"can't be read: {error}.") from error
    refuse(_find_private(texts, folder))
    notes = []
    if named is None:
        notes.append("The base model is not named, as it has no name on the hub here. base=ORG/NAME names it")
    uploads: dict[str, bytes | Path] = {name: text.encode() for name, text in texts.items()}
    uploads |= {name: folder / name for name in BINARY_FILES if (folder / name).is_file()}
    return uploads, notes


def _check_folder(folder: Path) -> None:
    refuse(adapter_problems(str(folder)))
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(folder / ADAPTER_WEIGHTS, "np"):  # a link may lead anywhere
            pass
    except (SafetensorError, OSError) as error:
        raise _unreadable(folder, f"has weights that can't be read: {error}.") from error


def _publish_base(text: str, base: str | None) -> tuple[str, str | None]:
    """adapter_config.json with its base's name on the hub, and that name; None where it has none."""
    values = json.loads(text)
    named = base or hub_name(values.get("base_model_name_or_path"))
    return json.dumps(values | {"base_model_name_or_path": named}, indent=2) + "\n", named


def _publish_settings(text: str, base: str | None) -> str:
    values = yaml.safe_load(text)
    model = values["model"]
    tokenizer = model.get("tokenizer_path")
    model["path"] = base
    model["tokenizer_path"] = tokenizer if tokenizer == "bytes" else hub_name(tokenizer)
    model.pop("cache_folder", None)
    result: str = yaml.safe_dump(values, sort_keys=False)
    return result


def _publish_card(text: str, repo: str, base: str | None) -> str:
    """README.md, in which adapter and base are called by their names on the hub."""
    _, front, body = text.split("---\n", 2) if text.startswith("---\n") else ("", "", text)
    values = yaml.safe_load(front) or {}
    if base is not None:
        values = {"base_model": base} | values | {"base_model": base}
        body = body.replace(LOCAL_BASE, base)
    return f"---\n{yaml.safe_dump(values, sort_keys=False)}---\n{body.replace(THIS_FOLDER, repo)}"


def _find_private(texts: dict[str, str], folder: Path) -> Iterator[Problem]:
    """What no file may hold: paths of this machine, and values of the environment that look like secrets."""
    home = Path(os.path.expanduser("~"))  # noqa: PTH111  # stays ~ for a user without a home
    paths = {str(folder.resolve()), str(Path.cwd()), *([f"{home}/"] if len(home.parts) > 1 else [])}
    secrets = {name: value for name, value in os.environ.items() if SECRET_NAME.search(name)}
    for name in CHECKED:
        text = texts.get(name, "")
        fix = f"Remove it from {folder / name}, and push again."
        for path in sorted(path for path in paths if len(path) > 1 and path in text):
            yield Problem(name, f"names a folder of this machine, {path}.", fix)
        for variable, value in secrets.items():
            if len(value) >= MIN_SECRET and value in text:
                yield Problem(name, f"holds the value of the environment variable {variable}.", fix)


def _unreadable(folder: Path, reason: str) -> ConfigError:
    return ConfigError([Problem(show("adapter", folder), reason, "Copy the adapter again.")])
