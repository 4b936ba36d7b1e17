"""Uploads an adapter to the Hugging Face hub: its own files, without secrets or paths of this machine.

Imports no torch, and the hub's client only where it is called.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import yaml

from qlora_fsdp.common.errors import ConfigError, HubError, Problem, UserError, refuse
from qlora_fsdp.common.foreign_files import named_templates
from qlora_fsdp.common.hub import LOCAL_BASE, hub_name
from qlora_fsdp.common.text import printable
from qlora_fsdp.config.adapter.adapter_config import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    SETTINGS_FILE,
    TOKENIZER_MODELS,
    TOKENIZER_TEXTS,
    adapter_problems,
)
from qlora_fsdp.config.schema import HubConfig
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
    front = ""
    body = text
    if text.startswith("---\n"):
        _, front, body = text.split("---\n", 2)
    values = yaml.safe_load(front) or {}
    if base is not None:
        values = {"base_model": base} | values | {"base_model": base}
        body = body.replace(LOCAL_BASE, base)
    return f"---\n{yaml.safe_dump(values, sort_keys=False)}---\n{body.replace(THIS_FOLDER, repo)}"


def _find_private(texts: dict[str, str], folder: Path) -> Iterator[Problem]:
    """What no file may hold: paths of this machine, and values of the environment that look like secrets."""
    paths = {str(folder.resolve()), str(Path.cwd())}
    home = Path(os.path.expanduser("~"))  # noqa: PTH111  # stays ~ for a user without a home
    if len(home.parts) > 1:
        paths.add(f"{home}/")
    paths.discard("/")
    secrets = {
        variable: value
        for variable, value in os.environ.items()
        if SECRET_NAME.search(variable) and len(value) >= MIN_SECRET
    }
    for name in CHECKED:
        text = texts.get(name, "")
        fix = f"Remove it from {folder / name}, and push again."
        for path in sorted(paths):
            if path in text:
                yield Problem(name, f"names a folder of this machine, {path}.", fix)
        for variable, value in secrets.items():
            if value in text:
                yield Problem(name, f"holds the value of the environment variable {variable}.", fix)


def _unreadable(folder: Path, reason: str) -> ConfigError:
    return ConfigError([Problem(show("adapter", folder), reason, "Copy the adapter again.")])


log = logging.getLogger("qlora_fsdp")

LOG_IN = "Run `hf auth login`, or set HF_TOKEN, with a token that may write (https://huggingface.co/settings/tokens)."
MESSAGE = "LoRA adapter, trained with qlora-fsdp"
MAX_REASON = 300  # characters of what the client says
READ_ONLY = ("read", "viewer")


def prepare_repo(repo: str, private: bool) -> str:
    """Makes a repository if it is not there and the user may write to it. Returns its whole name.

    Raises:
        HubError: there is no token, it may not write there, or the hub can't be reached.
    """
    from huggingface_hub import HfApi

    api = HfApi()
    with _explained(repo, api.endpoint):
        user = api.whoami()
        full = repo if "/" in repo else f"{user['name']}/{repo}"
        token = user.get("auth", {}).get("accessToken", {})
        if token.get("role") == "read":
            name = printable(str(token.get("displayName", "")))
            raise HubError(f"The hub's token {name} may only read, and can't write to {full}. {LOG_IN}")
        roles = {org["name"]: org.get("roleInOrg") for org in user.get("orgs", [])} | {user["name"]: "owner"}
        owner = full.partition("/")[0]
        writable = sorted(name for name, role in roles.items() if role not in READ_ONLY)
        if owner not in writable:
            allowed = ", ".join(map(printable, writable))
            reason = "you may only read there" if owner in roles else "you are no member of it"
            raise HubError(f"{full} can't be written to: {reason}. Name a repository of {allowed}.")
        api.create_repo(full, private=private, exist_ok=True)
    return full


def push_adapter(folder: Path, repo: str, private: bool, base: str | None = None) -> str:
    """Uploads an adapter's own files in one commit. Returns the address of the repository.

    Raises:
        ConfigError: the folder holds no adapter, or what may not be published.
        HubError: the hub does not take it.
    """
    from huggingface_hub import CommitOperationAdd, HfApi

    read_uploads(folder, repo, base)  # before anything is made there
    full = prepare_repo(repo, private)
    uploads, notes = read_uploads(folder, full, base)
    for note in notes:
        log.info(f"Note: {note}")
    contents = {name: content if isinstance(content, bytes) else str(content) for name, content in uploads.items()}
    operations = [CommitOperationAdd(name, content) for name, content in contents.items()]
    api = HfApi()
    with _explained(full, api.endpoint):
        api.create_commit(full, operations, commit_message=MESSAGE)
    return f"{api.endpoint}/{full}"


def push_result(config: HubConfig, adapter: Path) -> None:
    """Uploads a finished run's adapter where the settings ask for it. A failure is told, and loses nothing."""
    if not config.push or config.repo is None:
        return
    try:
        url = push_adapter(adapter, config.repo, config.private)
    except UserError as error:
        again = f"qlora-fsdp push adapter={adapter} repo={config.repo} private={str(config.private).lower()}"
        log.warning(f"Warning: the adapter is not on the hub: {error} It is in {adapter}. To try again:\n  {again}")
    else:
        log.info(f"The adapter is at {url}")


@contextmanager
def _explained(repo: str, endpoint: str) -> Iterator[None]:
    """A context in which whatever the hub's client raises is one message."""
    from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError, OfflineModeIsEnabled

    try:
        yield
    except UserError:
        raise
    except LocalTokenNotFoundError as error:
        raise HubError(f"There is no token to write to {repo} on the hub with. {LOG_IN}") from error
    except OfflineModeIsEnabled as error:
        raise HubError(f"HF_HUB_OFFLINE is set, and {repo} is on the hub. Unset it, or push later.") from error
    except HfHubHTTPError as error:
        status = getattr(error.response, "status_code", None)
        reason = _reason_of(error)
        if status == 401:
            raise HubError(f"The hub does not know the token: {reason} {LOG_IN}") from error
        if status == 403:
            raise HubError(f"The hub does not let this token write to {repo}: {reason} {LOG_IN}") from error
        raise HubError(f"The hub did not take {repo}: {reason} Try again later.") from error
    except Exception as error:  # what its HTTP client raises has changed from version to version
        reason = _reason_of(error)
        raise HubError(f"The hub at {endpoint} can't be reached: {reason} Check the network, or push later.") from error


def _reason_of(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()] or [repr(error)]
    text = printable(" ".join(" ".join(lines[:2]).split()))[:MAX_REASON]
    return text if text.endswith(".") else f"{text}."
