"""What ranks agree on at a store before they meet: a folder of their own on one host, a secret over several.

torchrun and accelerate serve that store at all addresses of the host, to whoever connects, and it lists the names in
it. On one host the ranks leave it at once: they meet in a folder that only this user can enter, of which the store
tells nothing but a part of the name. Over several hosts they stay there, under names that are made from the run's
secret (common/run_key.py). Ranks with unlike secrets would wait for one another there, so these are compared first.
"""

from __future__ import annotations

import hmac
import os
import platform
import re
import tempfile
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from qlora_fsdp.common.errors import RankError
from qlora_fsdp.common.own_folder import PREFIX, OwnFolder, enter, make_folder
from qlora_fsdp.common.run_key import is_own_folder

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")  # hosts may have one name, as clones of an image have
ANSWER_SECONDS = 60.0  # for other ranks to read that they have unlike secrets, before the store may be gone


def count_ranks_here(store: Store, rank: int, num_ranks: int) -> int:
    """Counts the ranks on this host, where no launcher has told it (LOCAL_WORLD_SIZE). Collective.

    Args:
        store: where anybody may write, and thereby have the ranks of one host meet as those of several hosts do.
        rank: this process's.
        num_ranks: of the run.
    """
    host = f"{platform.node()} {BOOT_ID.read_text().strip()}"
    store.set(f"host/{rank}", host)
    told = store.multi_get([f"host/{each}" for each in range(num_ranks)])
    return told.count(host.encode())


def enter_folder(store: Store, rank: int) -> OwnFolder:
    """Makes a folder on rank 0, and finds it on the others. Collective.

    Args:
        store: where anybody may write.
        rank: this process's.

    Raises:
        RankError: what the store tells is no folder of this user's own.
    """
    if rank == 0:
        folder = make_folder()
        store.set("folder", folder.path.name.removeprefix(PREFIX))
        return folder
    told = store.get("folder").decode(errors="replace")
    path = Path(tempfile.gettempdir()) / f"{PREFIX}{told}"
    if not re.fullmatch(r"\w{1,64}", told) or not is_own_folder(path):
        raise RankError(
            f"rank {rank}: where rank 0 should have named the folder in which the ranks of this host meet, there is "
            f"none of this user's in {path.parent}. Another process has written to the store at MASTER_ADDR, or the "
            "ranks are on several hosts: then set LOCAL_WORLD_SIZE to the number on each. See docs/security.md."
        )
    return enter(path)


def met_where_others_write(store: Store) -> bool:
    """Whether torch's launcher has met by one of its ways that run what others have written to a store, as `c10d`.

    It tells no rank how it has met. Where it has met at the store that its ranks are told, as in its other ways and in
    ours, it has written there, below the run's name, which ranks it starts. `c10d` uses a store of its own.

    Args:
        store: at MASTER_ADDR and MASTER_PORT, as the launcher has told.
    """
    run = os.environ.get("TORCHELASTIC_RUN_ID")
    return run is not None and not store.check([f"{run}/torchelastic/assigned_ranks/0"])


def compare_secrets(store: Store, rank: int, num_ranks: int, key: str) -> None:
    """Sees that all ranks have the same secret, or none. Collective.

    Rank 0 compares what each rank makes of its own, and tells the others, signed, which ranks have not got its secret.

    Args:
        store: where anybody may write, and thereby have the run end with this error.
        rank: this process's.
        num_ranks: of the run.
        key: this rank's secret; empty for none.

    Raises:
        RankError: they have not, on all ranks.
    """
    if rank == 0:
        others = range(1, num_ranks)
        known = store.multi_get([f"secret/{other}" for other in others]) if num_ranks > 1 else []
        unlike = [other for other, mark in zip(others, known, strict=True) if not _is(mark, _mark(key, str(other)))]
        verdict = " ".join(map(str, unlike))
        store.set("unlike", f"{_mark(key, f'unlike {verdict}')} {verdict}")
        if unlike:
            with suppress(dist.DistError, RuntimeError):
                store.wait([f"told/{other}" for other in others], timedelta(seconds=ANSWER_SECONDS))
    else:
        store.set(f"secret/{rank}", _mark(key, str(rank)))
        mark, _, verdict = store.get("unlike").decode(errors="replace").partition(" ")
        store.set(f"told/{rank}", "")
        is_of_rank_0 = _is(mark.encode(), _mark(key, f"unlike {verdict}"))
        unlike = [int(other) for other in verdict.split()] if is_of_rank_0 else [rank]
    if unlike:
        which = f"rank {unlike[0]}" if len(unlike) == 1 else f"ranks {', '.join(map(str, unlike[:8]))}"
        raise RankError(
            f"The secret of {which} is not that of rank 0: QLORA_FSDP_RUN_KEY has to be the same on all hosts, or "
            "unset on all. See docs/security.md."
        )


def _mark(key: str, about: str) -> str:
    return hmac.digest(key.encode(), f"meeting: {about}".encode(), "sha256").hex()


def _is(found: bytes, expected: str) -> bool:
    return hmac.compare_digest(found, expected.encode())
