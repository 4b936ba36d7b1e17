"""Names of models and data sets, on the Hugging Face hub or paths of this machine; and a hub model's config.json.

Imports no torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from qlora_fsdp.common.errors import CheckpointError
from qlora_fsdp.common.replaced import replaced
from qlora_fsdp.common.text import name_error

SECONDS = 5.0  # to answer; HF_HUB_ETAG_TIMEOUT does not make it longer
SMALL_FILES = ("*.json", "tokenizer*", "*.model", "*.jinja", "*.txt", "*.tiktoken")  # all of a model but its weights
OTHER_FORMATS = ("original/*", "consolidated*")  # the same weights in their authors' own format
LOCAL_BASE = "path/to/the/base/model"  # how a model card calls a base that has no name on the hub

_NAME = re.compile(r"(?!\.)[\w.-]{1,96}/(?!\.)[\w.-]{1,96}", re.ASCII)
_REPO = re.compile(r"(?:(?!\.)[\w.-]{1,96}/)?(?!\.)[\w.-]{1,96}", re.ASCII)
_SNAPSHOT = re.compile(r"/(?:models|datasets)--([\w.-]+?)--([\w.-]+)/snapshots/[0-9a-f]+/?$", re.ASCII)


def hub_name(path: str | None) -> str | None:
    """Returns the hub name that a path stands for; None for a folder or file of this machine.

    A folder in the hub's cache has the name of what was downloaded.
    """
    if path is None:
        return None
    if found := _SNAPSHOT.search(path):
        return f"{found[1]}/{found[2]}"
    return path if _NAME.fullmatch(path) and not path_exists(path) else None


def path_exists(path: str) -> bool:
    """Whether a text names a file or folder of this machine. A text too long for one does not."""
    try:
        return Path(path).expanduser().exists()
    except (OSError, RuntimeError, ValueError):
        return False


def loadable_name(path: str) -> str:
    """Returns a name under which a model loads from any current folder: a folder of this machine by its whole path."""
    folder = Path(path).expanduser()
    return str(folder.resolve()) if path_exists(path) and folder.is_dir() else path


def is_repo_name(name: str) -> bool:
    """Whether a repository of the hub may have this name: ORG/NAME, or NAME for one of the user's own."""
    return _REPO.fullmatch(name) is not None and not name.endswith((".git", ".", "-")) and "--" not in name


@contextmanager
def without_hub() -> Iterator[None]:
    """While it lasts, nothing is asked of the hub: files of a model may name others there, such as a vision tower's.

    Raises:
        ValueError: something would be.
    """
    from huggingface_hub import constants
    from huggingface_hub.errors import OfflineModeIsEnabled

    try:
        with replaced([(vars(constants), "HF_HUB_OFFLINE", True)]):
            yield
    except OfflineModeIsEnabled as error:
        raise ValueError("it names another model, which would be looked for on the hub") from error


def fetch_config_json(name: str, revision: str | None) -> Path:
    """Downloads a hub model's config.json into the hub's cache, or finds it there if the hub can't be reached.

    HF_ENDPOINT, HF_HUB_OFFLINE, HF_HOME and the token of `hf auth login` are respected.

    Raises:
        CheckpointError: the name is no name of a model, the model is gated, or there is neither a network nor a copy.
    """
    from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url
    from huggingface_hub.errors import EntryNotFoundError, GatedRepoError, HFValidationError, RepositoryNotFoundError

    try:
        # Asked first, because hf_hub_download asks again and again for a minute where nobody answers.
        get_hf_file_metadata(hf_hub_url(name, "config.json", revision=revision), timeout=SECONDS)
        return Path(hf_hub_download(name, "config.json", revision=revision, etag_timeout=SECONDS))
    except Exception as error:  # of the hub, or of the libraries that it reaches it with
        failure = error
    with suppress(Exception):  # there is no copy here either, and `failure` says more
        return Path(hf_hub_download(name, "config.json", revision=revision, local_files_only=True))
    match failure:
        case GatedRepoError():
            reason = "is gated, and you have no access."
            fix = f"Accept its terms on https://huggingface.co/{name}, and log in with `hf auth login`."
        case RepositoryNotFoundError() | HFValidationError():
            reason = "is no folder here, and no model on the hub that you can see."
            fix = "Correct the name, or log in with `hf auth login` if the model is private."
        case EntryNotFoundError():
            reason = "has no config.json on the hub."
            fix = "Set model.path to a model in transformers' format."
        case _:
            reason = f"is no folder here, and its config.json can't be had ({name_error(failure)})."
            fix = (
                f"Where there is a network, `hf download {name} config.json --local-dir FOLDER` gets it; then set "
                "model.path=FOLDER. Or set model to a preset, which needs no download (docs/models.md)."
            )
    raise CheckpointError(f"model.path={name} {reason} {fix}") from failure


def fetch_small_files(name: str, revision: str | None) -> None:
    """Downloads a model's tokenizer and settings into the hub's cache, as far as they can be had."""
    from huggingface_hub import snapshot_download

    with suppress(Exception):  # who reads them asks for them again, and says what is wrong
        snapshot_download(name, revision=revision, allow_patterns=[*SMALL_FILES], ignore_patterns=[*OTHER_FORMATS])


def find_unreachable(name: str, revision: str | None) -> Exception | None:
    """Why the hub can't be reached, asked once and for SECONDS at most; None if it answers, whatever that is.

    Its libraries ask again and again for one to two minutes where nobody answers. So ask this first, and let them look
    into the hub's cache alone if it can't be reached.
    """
    from huggingface_hub import get_hf_file_metadata, hf_hub_url
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        get_hf_file_metadata(hf_hub_url(name, "config.json", revision=revision), timeout=SECONDS)
    except (HfHubHTTPError, HFValidationError):
        return None
    except Exception as error:  # of the libraries that the hub is reached with
        return error
    return None


def find_cached_model(name: str) -> Path | None:
    """Finds the folder in which the hub's cache has a model's weights. None if it has none; the hub is not asked."""
    from huggingface_hub import snapshot_download

    with suppress(Exception):  # it is not there, or the name is none
        folder = Path(snapshot_download(name, local_files_only=True))
        if any(folder.glob("*.safetensors")):
            return folder
    return None
