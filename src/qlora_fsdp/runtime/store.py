"""Where the processes of a run meet: a key-value store at MASTER_ADDR and MASTER_PORT."""

from __future__ import annotations

import os
import socket
import time
from datetime import timedelta
from typing import cast

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # documented there, not exported
from torch.distributed.distributed_c10d import Store
from torch.distributed.rendezvous import rendezvous

from qlora_fsdp.common.errors import DeviceError
from qlora_fsdp.config.world import World

NAME_SECONDS = 60.0  # within which a host's name must be known


def rank_0_holds_store() -> bool:
    """Whether rank 0 serves the store, as torch's rendezvous asks; under torchrun a process of its own does."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"


def open_store(world: World, timeout: timedelta) -> Store:
    """The store at MASTER_ADDR and MASTER_PORT.

    torch serves it at every address of the host. Where rank 0 serves it and all ranks are on this node, it is served at
    MASTER_ADDR alone if that leads to no other host.

    Raises:
        DeviceError: the variables do not say where, or name a host that is not known.
        TimeoutError: nothing serves a store there.
    """
    start = "Unset RANK to run one process, or start the processes with accelerate launch or torchrun, which set all."
    missing = [name for name in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
    if missing:
        raise DeviceError(f"RANK={world.rank} is set without {' and '.join(missing)}. {start}")
    if not os.environ["MASTER_PORT"].isdecimal():
        raise DeviceError(f"MASTER_PORT={os.environ['MASTER_PORT']} is not a number. {start}")
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    is_local = world.num_ranks == world.local_num_ranks and address in ("localhost", "127.0.0.1")
    is_server = world.rank == 0 and rank_0_holds_store()
    wait_until_known(address, min(NAME_SECONDS, timeout.total_seconds()))
    if not is_server:
        _wait_until_open(address, port, time.monotonic() + timeout.total_seconds())
    if not (is_local and rank_0_holds_store() and port != 0):
        return cast(Store, next(rendezvous("env://", timeout=timeout))[0])
    descriptor = socket.create_server(("127.0.0.1", port)).detach() if is_server else None
    return TCPStore("127.0.0.1", port, world.num_ranks, is_server, timeout, master_listen_fd=descriptor)


def wait_until_known(address: str, seconds: float) -> None:
    """Wait until a host of that name is known: a node may start its job before it can ask for names.

    Raises:
        DeviceError: no such host is.
    """
    deadline = time.monotonic() + seconds
    while True:
        try:
            socket.getaddrinfo(address, None)
            return
        except socket.gaierror as error:
            if time.monotonic() >= deadline:
                raise DeviceError(
                    f"MASTER_ADDR={address}: no host of that name is known here, not even after {seconds:.0f} s "
                    f"({error.strerror}). Set it to the name or address of the host of rank 0 "
                    "(--main_process_ip of accelerate launch)."
                ) from error
        time.sleep(0.5)


def _wait_until_open(address: str, port: int, deadline: float) -> None:
    """Wait until the store is served. torch's client tries again only after half a second or more, and fails at length.

    Raises:
        TimeoutError: it is not.
    """
    reason = ""
    while (seconds := deadline - time.monotonic()) > 0:
        try:
            with socket.create_connection((address, port), timeout=seconds):
                return
        except OSError as error:
            reason = f": {error}"
        time.sleep(0.01)
    raise TimeoutError(f"nothing can be reached there{reason}.")
