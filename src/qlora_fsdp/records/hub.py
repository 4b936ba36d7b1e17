"""Uploads an adapter to the Hugging Face hub. Imports no torch, and the hub's client only where it is called."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from qlora_fsdp.common.errors import HubError, UserError
from qlora_fsdp.common.text import printable
from qlora_fsdp.config.schema import HubConfig
from qlora_fsdp.records.hub_files import read_uploads

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
        if owner not in roles or roles[owner] in READ_ONLY:
            allowed = ", ".join(printable(name) for name, role in sorted(roles.items()) if role not in READ_ONLY)
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
