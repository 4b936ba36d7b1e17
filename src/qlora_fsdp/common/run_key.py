"""A secret of one run's processes, by which they know one another's messages. Imports no torch.

The store at which ranks meet answers whoever connects to it, also other users of the host. The ranks get the
secret in their environment, which the system shows to nobody but this user. A launcher of one node makes one for its
ranks; a job script makes one for all nodes. Ranks that are started in another way have none.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping

NODE_KEY = "QLORA_FSDP_NODE_KEY"
RUN_KEY = "QLORA_FSDP_RUN_KEY"  # the same on all nodes


def make_key() -> str:
    """Returns a new secret."""
    return secrets.token_hex(16)


def find_key(environ: Mapping[str, str], is_one_node: bool) -> str:
    """Returns the secret that all ranks of a run have; empty where they have none."""
    return environ.get(RUN_KEY) or (environ.get(NODE_KEY, "") if is_one_node else "")
