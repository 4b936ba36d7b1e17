"""The processes of a run: which one this is, its device, and how it meets the others.

`accelerate launch`, `torchrun` and SLURM wrappers describe the processes in environment variables (RANK, WORLD_SIZE,
LOCAL_RANK, ...). A plain `python -m` starts a single process. Runs on GPUs start both NCCL and gloo, because gradients
that are offloaded to the CPU travel over gloo, and so does what ranks tell one another: plain values of a type that the
receiver names (common/plain_values.py), with a signature (packets.py).

They meet at a key-value store at MASTER_ADDR and MASTER_PORT; on one host, in a folder of their own (meeting.py).
"""

from __future__ import annotations

import hashlib
import logging
import os
import resource
import socket
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed import (  # type: ignore[attr-defined]  # documented there, not exported
    FileStore,
    HashStore,
    TCPStore,
)
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from qlora_fsdp.common.errors import DeviceError, RankError
from qlora_fsdp.common.own_folder import enter, leave_folder
from qlora_fsdp.common.plain_values import BadMessage, pack, unpack
from qlora_fsdp.common.run_key import find_folder, find_key
from qlora_fsdp.common.text import first_line, shorten
from qlora_fsdp.config.world import World
from qlora_fsdp.runtime.board import Board, FolderBoard
from qlora_fsdp.runtime.meeting import compare_secrets, count_ranks_here, enter_folder, met_where_others_write
from qlora_fsdp.runtime.packets import Packets, prove_peers

log = logging.getLogger("qlora_fsdp")

PATIENCE = timedelta(days=7)
NCCL_GRACE = timedelta(seconds=60)
ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
NAME_SECONDS = 60.0  # within which a host's name must be known
MET_BY_C10D = (
    "Warning: the launcher of the ranks has met by c10d, torchrun's default on one host, in which whoever reaches its "
    "port can have code run as you. Start `qlora-fsdp train` there, or torchrun with --master-port=29500; on several "
    "hosts, torchrun with --rdzv-backend=static, --master-addr, --master-port and --node-rank. See docs/security.md."
)


@dataclass(frozen=True)
class Processes:
    """This process among all.

    Attributes:
        rank: 0 to num_ranks - 1, over all nodes.
        num_ranks: number of processes in the run.
        local_rank: 0 to local_num_ranks - 1, on this node. It is also the index of this process's GPU.
        local_num_ranks: number of processes on this node.
        device: where this process computes.
        store: the key-value store where the processes met. It works even when collectives do not.
        patient_group: for waits that may legitimately take hours, such as for downloads.
        group: for all other waits; None stands for the default group. It times out before NCCL does.
        timeout_seconds: a rank that does not answer for so long is given up (`distributed.timeout_seconds`).
        rank_0_holds_store: whether rank 0's process serves the store; otherwise a process of the launcher does.
        key: the run's secret (common/run_key.py); empty where the launcher gave none.
        folder: where the ranks of this attempt leave messages, if all are on one host and have such a folder; None: in
            the store.
    """

    rank: int
    num_ranks: int
    local_rank: int
    local_num_ranks: int
    device: torch.device
    store: Store
    patient_group: dist.ProcessGroup | None = None
    group: dist.ProcessGroup | None = None
    timeout_seconds: float = 600
    rank_0_holds_store: bool = False
    key: str = field(default="", repr=False)
    folder: Path | None = None
    _num_calls: Counter[str] = field(default_factory=Counter, repr=False, compare=False)

    @property
    def is_main(self) -> bool:
        """Whether this process prints and writes."""
        return self.rank == 0

    @property
    def is_local_main(self) -> bool:
        """Whether this process does the work that each node needs once."""
        return self.local_rank == 0

    def for_thread(self) -> Processes:
        """These processes for another thread, with a group of its own: two threads' collectives must not share one.

        Every wait of the result is patient, and none touches a GPU.
        """
        group = dist.new_group(backend="gloo", timeout=PATIENCE)
        prove_peers(group, self.key)
        return replace(self, group=group, patient_group=group)

    def open_board(self, name: str) -> Board:
        """A new place for messages that need no collective, with a connection of its own. Every rank opens the same."""
        if self.folder is not None:
            return FolderBoard(self.folder.parent, f"{self.folder.name}-{name}")
        return PrefixStore(name, self.store.clone())  # type: ignore[attr-defined]  # not in the stubs

    def wait(self, patiently: bool = False) -> None:
        """A barrier over all processes that touches no GPU; if patient, without distributed.timeout_seconds."""
        dist.all_reduce(torch.zeros(1), group=self.patient_group if patiently else self.group)

    def share(self, value: Any, kind: Any, patiently: bool = False) -> Any:
        """Rank 0's value, on every rank; if patient, without distributed.timeout_seconds.

        Args:
            value: what rank 0 tells; what other ranks pass is not looked at.
            kind: the type of the value, as an annotation has it, of plain data (common/plain_values.py): `str | None`.
            patiently: whether to wait for as long as it takes.
        """
        message = pack(value, kind) if self.is_main else b""
        if self.num_ranks == 1:
            return value
        received = self._packets(patiently).broadcast(message, 0)
        return value if self.is_main else self._unpack(received, kind, 0)

    def gather(self, value: Any, kind: Any, patiently: bool = False) -> list[Any]:
        """Every rank's value, by rank, on every rank; the arguments are those of `share`."""
        message = pack(value, kind)
        if self.num_ranks == 1:
            return [value]
        received = enumerate(self._packets(patiently).gather(message))
        return [value if rank == self.rank else self._unpack(told, kind, rank) for rank, told in received]

    def scatter(self, values: list[Any] | None, kind: Any, source: int) -> Any:
        """This rank's one of the values that rank `source` has for all ranks, by rank; None elsewhere.

        Args:
            values: one for each rank, on rank `source`.
            kind: the type of each of them, as for `share`.
            source: the rank that has them.
        """
        messages = None if values is None else [pack(value, kind) for value in values]
        if values is not None and self.num_ranks == 1:
            return values[0]
        received = self._packets().scatter(messages, source)
        return self._unpack(received, kind, source) if values is None else values[self.rank]

    def _packets(self, patiently: bool = False) -> Packets:
        """What the next message of all ranks is sent by."""
        group = self.patient_group if patiently else self.group
        name = "" if group is None else group.group_name
        self._num_calls[name] += 1
        return Packets(group, self.key, self._num_calls[name])

    def _unpack(self, message: bytes, kind: Any, source: int) -> Any:
        try:
            return unpack(message, kind)
        except BadMessage as error:
            raise RankError(
                f"Rank {source} told something else than {kind} ({shorten(str(error), 200)}). Install the same version "
                "of qlora-fsdp on all hosts."
            ) from error

    def swap(self, tensor: torch.Tensor, num_sent: list[int], num_received: list[int]) -> torch.Tensor:
        """Sends a part of a tensor on the CPU to each rank, and returns what the ranks have sent here, by rank.

        Args:
            tensor: one-dimensional, the parts one after another.
            num_sent: elements for each rank.
            num_received: elements from each rank.
        """
        received = tensor.new_empty(sum(num_received))
        dist.all_to_all_single(received, tensor, num_received, num_sent, group=self.group)
        return received

    def first_error(self, error: str | None) -> str | None:
        """The error of the lowest rank that has one, on every rank. It waits for all ranks, however long they take."""
        return next((found for found in self.gather(error, str | None, patiently=True) if found is not None), None)

    def sum(self, values: list[float]) -> list[float]:
        """Sums over all ranks, in float64."""
        return self.start_sum(values)()

    def start_sum(self, values: list[float]) -> Callable[[], list[float]]:
        """Starts a sum over all ranks, in float64. What is returned waits for the sums.

        Ranks may do anything else together meanwhile, as long as all of them start everything in the same order.
        """
        tensor = torch.tensor(values, dtype=torch.float64)
        work = dist.all_reduce(tensor, group=self.group, async_op=True)

        def wait() -> list[float]:
            if work is not None:
                work.wait()
            return tensor.tolist()

        return wait

    def max(self, values: list[float], patiently: bool = False) -> list[float]:
        """Maxima over all ranks, in float64; if patient, without distributed.timeout_seconds."""
        tensor = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self.patient_group if patiently else self.group)
        return tensor.tolist()


def start_processes(timeout_seconds: int, use_cpu: bool | None = None) -> Processes:
    """Join the process group and choose this process's device.

    Args:
        timeout_seconds: a collective that takes longer ends the run, because a rank is gone or stuck.
        use_cpu: whether to compute on the CPU even if there are GPUs. None: as the variable ACCELERATE_USE_CPU says,
            which `accelerate launch --cpu` sets.

    Raises:
        DeviceError: fewer GPUs than processes on this node, or an environment that contradicts itself.
        RankError: the processes did not meet.
    """
    world = World.from_environment(os.environ)
    rank, num_ranks = world.rank, world.num_ranks
    _let_files_be_open()
    timeout = timedelta(seconds=timeout_seconds)
    # What a launcher keeps outlives a restart of the ranks (--max_restarts), so each attempt has names of its own.
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    attempt = f"attempt-{restarts}"
    store: Store
    first_store: Store | None = None  # rank 0 may serve it, and does so until all have met
    try:
        if num_ranks > 1 and "LOCAL_WORLD_SIZE" not in os.environ:
            first_store = open_store(world, timeout)
            hosts = PrefixStore(f"hosts-{attempt}", first_store)
            world = replace(world, local_num_ranks=count_ranks_here(hosts, rank, num_ranks))
        device = _choose_device(world, use_cpu)
        cuda = device.type == "cuda"
        is_one_node = num_ranks == world.local_num_ranks
        key, folder = find_key(os.environ, is_one_node), find_folder(os.environ, is_one_node)
        if folder is not None:
            enter(folder)
        if "RANK" in os.environ and folder is None:
            if first_store is None:
                first_store = open_store(world, timeout)
            if rank == 0 and restarts == "0" and met_where_others_write(first_store):
                log.warning(MET_BY_C10D)
            agreed = PrefixStore(f"first-{attempt}", first_store)
            if is_one_node:
                own = enter_folder(agreed, rank)
                key, folder = own.key, own.path
            else:
                compare_secrets(agreed, rank, num_ranks, key)
        if "RANK" not in os.environ:
            folder, store = None, HashStore()
        elif folder is not None:
            folder = folder / attempt
            store = FileStore(str(folder), -1)  # it goes with the folder, when the last rank or the launcher ends
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # nor can other hosts connect to the ranks
            store.set_timeout(timeout)
        else:
            # With a secret nobody can tell the names beforehand; the store tells who asks which are there by now.
            assert first_store is not None
            prefix = hashlib.sha256(key.encode()).hexdigest()[:32] if key else ""
            store = PrefixStore(prefix + attempt, first_store)
        backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
        # NCCL's watchdog aborts a process without saying which rank is missing. So it gets a longer timeout than gloo
        # and the heartbeats, which do say so.
        longest = timeout + NCCL_GRACE if cuda else timeout
        dist.init_process_group(backend, store=store, rank=rank, world_size=num_ranks, timeout=longest)
        group = dist.new_group(backend="gloo", timeout=timeout) if cuda else None
        patient_group = dist.new_group(backend="gloo", timeout=PATIENCE)
        for each in (None, group, patient_group):
            prove_peers(each, key)
    except (dist.DistError, RuntimeError, OSError) as error:
        raise RankError(
            f"Rank {rank}: the {num_ranks} processes did not meet at MASTER_ADDR={os.environ.get('MASTER_ADDR')}, "
            f"MASTER_PORT={os.environ.get('MASTER_PORT')} within distributed.timeout_seconds={timeout_seconds}: "
            f"{first_line(error)} Check that all were started, and that these are the same "
            "everywhere."
        ) from error
    return Processes(
        rank,
        num_ranks,
        world.local_rank,
        world.local_num_ranks,
        device,
        store,
        patient_group,
        group,
        timeout_seconds,
        rank_0_holds_store=folder is None and rank_0_holds_store(),
        key=key,
        folder=folder,
    )


def _choose_device(world: World, use_cpu: bool | None) -> torch.device:
    """This process's GPU, which torch then uses by default; or the CPU, if there is no GPU or none is wanted."""
    if use_cpu is None:
        use_cpu = os.environ.get("ACCELERATE_USE_CPU", "false").lower() in ("true", "1")
    if use_cpu or not torch.cuda.is_available():
        return torch.device("cpu")
    num_gpus = torch.cuda.device_count()
    if world.local_num_ranks > num_gpus:
        raise DeviceError(
            f"--num_processes: {world.local_num_ranks} processes were started on a node with {num_gpus} GPUs. "
            f"Start at most {num_gpus} a node, or make more visible through CUDA_VISIBLE_DEVICES."
        )
    torch.cuda.set_device(world.local_rank)
    _let_segments_grow()
    _register_nothing_in_graphs()
    return torch.device("cuda", world.local_rank)


def _let_files_be_open() -> None:
    """Allow as many open files as the system does: each group connects a rank with every other one.

    The usual limit, 1,024, would be reached with some hundred ranks.
    """
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _let_segments_grow() -> None:
    """Turn on expandable segments, unless the user has configured torch's allocator.

    With these the allocator maps pages into large address ranges and gives free pages back, so that little memory is
    reserved without being used, whatever sizes of tensors come and go. The allocator's environment variables can't be
    used for this: they are read when bitsandbytes starts CUDA, which it does when it is imported.
    """
    if not any(name in os.environ for name in ALLOCATOR_VARIABLES):
        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")


def _register_nothing_in_graphs() -> None:
    """Have collectives in CUDA graphs go through NCCL's own buffers, unless the user has decided otherwise.

    By default NCCL registers the tensors of a recorded collective, so that other GPUs write into them. It takes each
    for one piece of memory, which a tensor in expandable segments need not be (torch issue 158029). Then ranks with
    micro-batches of unlike lengths waited for one another forever (benchmarks/measurements.md).
    """
    os.environ.setdefault("NCCL_GRAPH_REGISTER", "0")


def stop_processes() -> None:
    """Leave the process group, if this process has joined it."""
    if dist.is_initialized():
        dist.destroy_process_group()
    leave_folder()


def rank_0_holds_store() -> bool:
    """Whether rank 0 serves the store, as torch's rendezvous asks; under torchrun a process of its own does."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"


def open_store(world: World, timeout: timedelta) -> Store:
    """The store at MASTER_ADDR and MASTER_PORT.

    torch serves it at every address of the host, `serve_store` at MASTER_ADDR alone where it can.

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
    # Without LOCAL_WORLD_SIZE the ranks may be on several hosts, which they tell one another at this store.
    is_one_node = world.num_ranks == world.local_num_ranks and "LOCAL_WORLD_SIZE" in os.environ
    is_server = world.rank == 0 and rank_0_holds_store()
    wait_until_known(address, min(NAME_SECONDS, timeout.total_seconds()))
    if not is_server:
        _wait_until_open(address, port, time.monotonic() + timeout.total_seconds())
    if not rank_0_holds_store() or port == 0:
        return cast(Store, next(rendezvous("env://", timeout=timeout))[0])
    return serve_store(address, port, world.num_ranks, is_server, timeout, is_one_node)


def serve_store(
    address: str, port: int, num_clients: int, is_server: bool, timeout: timedelta, is_one_node: bool
) -> Store:
    """A store that one of those who meet serves, at this address alone if the others can reach it there.

    Args:
        address: the server's host.
        port: where it listens.
        num_clients: how many meet, the server among them.
        is_server: whether this process serves it.
        timeout: for all to come, and for later waits.
        is_one_node: whether all are on this host.
    """
    listener = _listen(address, port, is_one_node) if is_server else None
    descriptor = None if listener is None else listener.detach()
    return TCPStore(address, port, num_clients, is_server, timeout, master_listen_fd=descriptor)


def _listen(address: str, port: int, is_one_node: bool) -> socket.socket | None:
    """A socket that listens at one address alone; None: the ranks of other hosts could not reach it there.

    A host may know its own name as an address of loopback, and others reach it by one of a gateway, which it has not.
    Where a name has several addresses, such as one of IPv6 too, others may have a way to one of them alone.
    """
    known = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)
    hosts = {str(found[0]).partition("%")[0] for *_, found in known}
    if not is_one_node and (len(hosts) > 1 or any(ip_address(host).is_loopback for host in hosts)):
        return None
    for family, _, _, _, found in known:
        with suppress(OSError):
            return socket.create_server((str(found[0]), port), family=family)
    return None


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


def join_context_group(processes: Processes, num_slices: int) -> dist.ProcessGroup:
    """The group of this rank: ranks 0 to num_slices - 1 are the first, and so on. Collective.

    Neighbours share a host, and with it the fastest links. The group has a communicator of its own: on FSDP's, heads
    would wait for the layer that is being gathered ahead.

    Args:
        processes: all ranks take part.
        num_slices: ranks of a group; it divides all ranks.
    """
    timeout = timedelta(seconds=processes.timeout_seconds)
    if processes.device.type == "cuda":
        timeout += NCCL_GRACE  # gloo and the heartbeats find out first who is missing
    group: dist.ProcessGroup = dist.new_subgroups(num_slices, timeout=timeout)[0]
    prove_peers(group, processes.key)
    return group
