"""What one run's processes have in common, and nobody else: a secret, and on one host a folder. Imports no torch.

The store at which ranks meet over a network answers whoever connects to it, also other users of the host. The ranks get
the secret, by which they know one another, in their environment, which the system shows to nobody but this user. A
launcher of one node makes one for its ranks, and the folder where they meet without a network; a job script makes a
secret for all nodes. Ranks that are started in another way have neither.
"""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Mapping
from pathlib import Path

NODE_KEY = "QLORA_FSDP_NODE_KEY"
NODE_FOLDER = "QLORA_FSDP_NODE_FOLDER"  # of this user alone, for what the ranks of one node leave there
RUN_KEY = "QLORA_FSDP_RUN_KEY"  # the same on all nodes


def make_key() -> str:
    """Returns a new secret."""
    return secrets.token_hex(16)


def find_key(environ: Mapping[str, str], is_one_node: bool) -> str:
    """Returns the secret that all ranks of a run have; empty where they have none."""
    return environ.get(RUN_KEY) or (environ.get(NODE_KEY, "") if is_one_node else "")


def find_folder(environ: Mapping[str, str], is_one_node: bool) -> Path | None:
    """Returns the folder where the ranks of a run meet, if all are on this host and their launcher has made one."""
    folder = environ.get(NODE_FOLDER)
    if folder is None or not is_one_node:
        return None
    found = os.lstat(folder)
    is_ours_alone = stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o077
    return Path(folder) if is_ours_alone else None
