"""What one run's processes have in common, and nobody else: a secret, and on one host a folder. Imports no torch.

The store at which ranks meet over a network answers whoever connects to it, also other users of the host. The ranks get
the secret, by which they know one another, in their environment, which the system shows to nobody but this user. A
launcher of one node makes one for its ranks, and the folder where they meet without a network; a job script makes a
secret for all nodes. Ranks of one host that are started in another way make both (runtime/meeting.py); those of several
hosts have neither.

Messages of ranks in the store where they met: anybody on the host may write there, so nothing of it is trusted. A
message is JSON with a signature, for which one needs the secret. One that has no valid signature, is longer than any
honest one, or has other fields than it should, counts as not being there.
"""

from __future__ import annotations

import hmac
import json
import os
import secrets
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

NODE_KEY = "QLORA_FSDP_NODE_KEY"
NODE_FOLDER = "QLORA_FSDP_NODE_FOLDER"  # of this user alone, for what the ranks of one node leave there
RUN_KEY = "QLORA_FSDP_RUN_KEY"  # the same on all nodes
Message = TypeVar("Message")
MAX_BYTES = 2**18
MAX_TEXT = 2**15  # characters of one text in it


def make_key() -> str:
    """Returns a new secret."""
    return secrets.token_hex(16)


def find_key(environ: Mapping[str, str], is_one_node: bool) -> str:
    """Returns the secret that all ranks of a run have; empty where they have none."""
    return environ.get(RUN_KEY) or (environ.get(NODE_KEY, "") if is_one_node else "")


def find_folder(environ: Mapping[str, str], is_one_node: bool) -> Path | None:
    """Returns the folder where the ranks of a run meet, if all are on this host and their launcher has made one."""
    folder = environ.get(NODE_FOLDER)
    return Path(folder) if folder is not None and is_one_node and is_own_folder(Path(folder)) else None


def is_own_folder(path: Path) -> bool:
    """Whether a folder is there which this user alone can enter."""
    try:
        found = path.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o077


def seal(message: Any, key: str) -> str:
    """Returns a message as it is written to the store.

    Args:
        message: an instance of a dataclass with fields of type int, bool, str or list[int].
        key: the run's secret.
    """
    values = {name: value[:MAX_TEXT] if isinstance(value, str) else value for name, value in vars(message).items()}
    text = json.dumps(values)
    return f"{_sign(text, key)} {text}"


def unseal(kind: type[Message], stored: bytes, key: str) -> Message | None:
    """Returns the message in what was read from the store; None where that is none of a rank of this run."""
    try:
        signature, _, text = stored.decode().partition(" ")
        if len(stored) > MAX_BYTES or not hmac.compare_digest(signature, _sign(text, key)):
            return None
        values = json.loads(text)
        if any(not _is_of_type(values[field], hint) for field, hint in get_type_hints(kind).items()):
            return None
        return kind(**values)
    except (ValueError, TypeError, KeyError, RecursionError):
        return None


def _sign(text: str, key: str) -> str:
    return hmac.new(key.encode(), text.encode(), "sha256").hexdigest()


def _is_of_type(value: Any, hint: Any) -> bool:
    if hint == list[int]:
        return isinstance(value, list) and all(type(item) is int for item in value)
    return type(value) is hint
