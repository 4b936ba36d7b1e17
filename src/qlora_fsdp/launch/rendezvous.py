"""Where torch's launchers of a run meet: in files on one host, else at a store at one address.

By itself torch's launcher serves a store at all addresses of its host, to whoever connects. Its other ways to meet run
what others have written to such a store. This one is registered with torch under a name of its own, as torch documents
(torch.distributed.elastic.rendezvous). Accelerate is told that name.
"""

from __future__ import annotations

from argparse import Namespace
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch.distributed import (  # type: ignore[attr-defined]  # documented there, not exported
    FileStore,
    PrefixStore,
    Store,
)
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)

from qlora_fsdp.common.errors import LaunchError
from qlora_fsdp.runtime.processes import serve_store, wait_until_known

BACKEND = "qlora_fsdp"
STATIC = "static"  # accelerate's default: the addresses that it is told, which are this module's too
TIMEOUT_SECONDS = 900  # torch's own, where it says none


class LauncherArguments(Namespace):
    """The arguments of accelerate's launcher, which sets `standalone` where it finds the port of the ranks taken."""

    @property
    def standalone(self) -> bool:
        """Whether torch is to meet by a store of its own choice. It is not.

        Raises:
            LaunchError: accelerate sets it.
        """
        return False

    @standalone.setter
    def standalone(self, wanted: bool) -> None:
        if wanted:
            raise LaunchError(
                "accelerate found the port of the ranks taken, and would have them meet in a way that runs what others "
                "write to their store. Start the command again: it takes another port, or the main_process_port of "
                "launch.config_file."
            )


class Rendezvous(RendezvousHandler):
    """The meeting of the launchers of all hosts, of which each is known beforehand.

    Args:
        arguments: accelerate's, with what its file says.
        parameters: torch's.
        folder: of this user alone.
    """

    def __init__(self, arguments: Namespace, parameters: RendezvousParameters, folder: Path) -> None:
        self.num_hosts = parameters.max_nodes
        self.run_id = parameters.run_id
        self.timeout = timedelta(seconds=parameters.get_as_int("timeout") or TIMEOUT_SECONDS)
        self.folder = folder
        self.rank = 0
        self.address = "127.0.0.1"
        self.port = int(arguments.main_process_port)
        if self.num_hosts > 1:
            self.rank = int(arguments.machine_rank)
            self.address = str(arguments.main_process_ip)
        self._store: Store | None = None

    def get_backend(self) -> str:
        """Its name."""
        return BACKEND

    @property
    def use_agent_store(self) -> bool:
        """Whether the ranks of several hosts meet where their launchers did."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """The store where the launchers have met, this one's number, and where the ranks are to look."""
        if self._store is None:
            self._store = self._open_store()
        where = RendezvousStoreInfo(self.address, self.port)
        return RendezvousInfo(PrefixStore(self.run_id, self._store), self.rank, self.num_hosts, where)

    def _open_store(self) -> Store:
        if self.num_hosts == 1:
            return FileStore(str(self.folder / "launcher"), -1)
        wait_until_known(self.address, self.timeout.total_seconds())
        return serve_store(self.address, self.port, self.num_hosts, self.rank == 0, self.timeout, is_one_node=False)

    def is_closed(self) -> bool:
        """Whether nobody can join any more; the hosts are known beforehand."""
        return False

    def set_closed(self) -> None:
        """Does nothing."""

    def num_nodes_waiting(self) -> int:
        """How many hosts wait to join: none."""
        return 0

    def get_run_id(self) -> str:
        """The launcher's name of the run."""
        return self.run_id

    def shutdown(self) -> bool:
        """Does nothing: the store ends with the launcher."""
        return True


def meet_apart(arguments: Any, folder: Path) -> None:
    """Have torch's launcher meet by `Rendezvous`.

    Args:
        arguments: accelerate's, which have no values of its file yet.
        folder: of this user alone.

    Raises:
        LaunchError: they ask for another way.
    """
    if arguments.rdzv_backend not in (STATIC, BACKEND):
        raise LaunchError(
            f"--rdzv_backend={arguments.rdzv_backend} would have the launchers meet by what runs what others write to "
            "its store. Leave it out."
        )

    def create(parameters: RendezvousParameters) -> RendezvousHandler:
        return Rendezvous(arguments, parameters, folder)

    rendezvous_handler_registry.register(BACKEND, create)
    arguments.rdzv_backend = BACKEND
