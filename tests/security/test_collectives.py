"""Another user of the host among the ranks of a run: nothing of theirs is run, used or waited for.

The attacker has another uid and no secret. They connect to the store where ranks meet over a network, learn the names
that are there, take the place of a rank that has not come yet, and answer the collectives in which values travel, with
a pickle that would leave a mark as the user who trains.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import re
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import psutil
import pytest
import torch
import torch.distributed as dist
from accelerate.commands import launch as accelerate_launch
from accelerate.utils import launch as accelerate_utils_launch
from torch.distributed.elastic.rendezvous import RendezvousHandlerRegistry, RendezvousParameters

import qlora_fsdp
from qlora_fsdp.common.errors import LaunchError, RankError
from qlora_fsdp.common.own_folder import PREFIX
from qlora_fsdp.common.run_key import NODE_FOLDER, RUN_KEY, find_folder, make_key
from qlora_fsdp.launch import rendezvous
from qlora_fsdp.runtime import packets
from qlora_fsdp.runtime import processes as processes_module
from qlora_fsdp.runtime.meeting import compare_secrets
from qlora_fsdp.runtime.processes import Processes, start_processes, stop_processes
from tests.cli.launch import SHORT_STEPS, Launch, child_environment
from tests.helpers.ranks import be_a_host, run_ranks, start_process

SOURCE = Path(qlora_fsdp.__file__).parent
NOBODY = 65534
OVER = "the victim has said what it got to see"  # a name in the store
TINY = ["model=tiny", "model.config.num_hidden_layers=1", "data=random", "training.max_length=32", "lora.r=4"]
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="another user's process is started by root")


class Mark:
    """Leaves a mark where it is unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str, str]]:
        return open, (str(self.file), "w")


def test_nothing_is_unpickled_or_sent_as_an_object() -> None:
    """No module knows how to. In all ranks of tests libraries' collectives of objects fail (tests/helpers/guard)."""
    words = re.compile(
        r"pickle|\bdill\b|marshal|shelve|joblib|_object_list|broadcast_object|gather_object|scatter_object"
    )
    # numpy's way to say that none is read; and torch's record of allocations, which is written and never read
    harmless = re.compile(r"allow_pickle=False|memory-\S+\.pickle")
    found = [
        f"{file.relative_to(SOURCE)}:{number}: {line.strip()}"
        for file in sorted(SOURCE.rglob("*.py"))
        for number, line in enumerate(file.read_text().splitlines(), start=1)
        if words.search(harmless.sub("", line))
    ]
    assert found == []


OBJECTS = """
import torch.distributed as dist
from accelerate.utils import operations
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
for call in (dist.broadcast_object_list, operations.torch.distributed.all_gather_object, dist.recv_object_list):
    try:
        call([None], [None])
    except AssertionError as error:
        print(error)
"""


def test_a_command_that_a_test_starts_would_fail_by_an_object_of_a_peer() -> None:
    done = subprocess.run(
        [sys.executable, "-c", OBJECTS], env=child_environment(), capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == ["an object of a peer would be unpickled"] * 3


def become_nobody() -> None:
    """Become another user."""
    os.setgid(NOBODY)
    os.setuid(NOBODY)


def join_store() -> dist.TCPStore:
    """The store where ranks meet, as whoever connects has it."""
    port = int(os.environ["MASTER_PORT"])
    return dist.TCPStore(os.environ["MASTER_ADDR"], port, 2, is_master=False, timeout=timedelta(seconds=300))


def take_place(rank: int) -> dist.ProcessGroup:
    """Join the groups of two ranks as the one that has not come, by what the store lists. The patient group."""
    seconds = timedelta(seconds=300)
    store = join_store()
    while not (names := [name for name in store.list_keys() if re.match(r"\w*attempt-0/", name)]):
        time.sleep(0.01)
    prefix = names[0].partition("/")[0]
    dist.init_process_group("gloo", store=dist.PrefixStore(prefix, store), rank=rank, world_size=2, timeout=seconds)
    return dist.new_group(backend="gloo", timeout=seconds)


def tell(collective: str, patient: dist.ProcessGroup, key: str, mark: Path) -> None:
    """Take part in a collective with a pickle."""
    forged = pickle.dumps(Mark(mark))
    packet = packets.Packets(patient if collective.endswith("patiently") else None, key, 1)
    match collective.removesuffix(" patiently"):
        case "share":
            packet.broadcast(forged, 0)
        case "gather":
            packet.gather(forged)
        case "scatter":
            packet.scatter([forged] * 2, 1)
        case "meeting" | "meeting of threads":
            group = None if collective == "meeting" else dist.new_group(backend="gloo", timeout=timedelta(seconds=300))
            for _ in range(2):
                packets._swap([forged[:32].ljust(32, b"0")] * 2, group)


def ask(processes: Processes, collective: str) -> None:
    """Take part in it as a rank does."""
    is_patient = collective.endswith("patiently")
    match collective.removesuffix(" patiently"):
        case "share":
            processes.share(None, str, is_patient)
        case "gather":
            processes.gather("hello", str, is_patient)
        case "scatter":
            processes.scatter(None, str, 1)
        case "meeting of threads":
            processes.for_thread()


def play(collective: str, victim: int, key: str, forger: str, mark: Path) -> str:
    """Rank `victim` trains, and the other one is a stranger, with the secret `forger`. What the victim gets to see."""
    rank = int(os.environ["RANK"])
    be_a_host()
    if "MASTER_PORT" not in os.environ:  # as under torchrun, another process serves the store
        os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_PORT": os.environ["MEETING_PORT"]}
    if rank != victim:
        become_nobody()
        with suppress(RuntimeError, RankError):  # the victim has gone, or is a stranger to the stranger
            if collective == "secrets":
                compare_secrets(dist.PrefixStore("first-attempt-0", join_store()), rank, 2, forger)
            else:
                tell(collective, take_place(rank), forger, mark)
        # A process that ends with something unread resets its connections, and the victim may not have read all yet.
        with suppress(RuntimeError):
            join_store().wait([OVER], timedelta(seconds=300))
        return ""
    if key:
        os.environ[RUN_KEY] = key
    # A collective refuses what is not signed, whatever the ranks have proved before. The first proof, by the secrets,
    # is one that a stranger can copy from the rank whose place is taken.
    ways = {"secrets": "compare_secrets", "meeting": "prove_peers"}
    skipped = [way for name, way in ways.items() if name != collective]
    try:
        with ExitStack() as patches:
            for way in skipped:
                patches.enter_context(mock.patch(f"qlora_fsdp.runtime.processes.{way}"))
            processes = start_processes(300, use_cpu=True)
        ask(processes, collective)
    except RankError as error:
        return str(error)
    finally:
        join_store().set(OVER, "")
        stop_processes()
    return "nothing was refused"


# With the victim's rank. These are all ways in which ranks tell one another anything but tensors.
COLLECTIVES = {"secrets": 0, "meeting": 0, "meeting of threads": 0, "share": 1, "gather": 0, "scatter": 0}
COLLECTIVES |= {"share patiently": 1, "gather patiently": 0}


UNSIGNED = ["share", "gather", "scatter"]  # without a secret, nothing is proved where ranks meet


def refusal(collective: str, victim: int) -> str:
    """How the message begins with which the victim ends."""
    if collective == "secrets":
        return f"The secret of rank {1 - victim} is not that of rank 0: QLORA_FSDP_RUN_KEY"
    return f"What came from rank {1 - victim} is not signed with this run's secret"


def test_ranks_tell_one_another_nothing_in_another_way() -> None:
    """Every method of Processes that takes the type of what it gets is among those that are attacked."""
    takes = {name for name, method in vars(Processes).items() if "kind" in getattr(method, "__annotations__", {})}
    assert takes - {"_unpack"} == {name for name in COLLECTIVES if hasattr(Processes, name)}


@needs_root
@pytest.mark.distributed
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_another_user_in_the_place_of_a_rank_is_refused(collective: str, tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    victim, key = COLLECTIVES[collective], make_key()
    said = run_ranks(2, play, collective, victim, key, make_key(), tmp_path / "mark")[victim]
    assert said.startswith(refusal(collective, victim)), said
    assert list(tmp_path.iterdir()) == []


def name_a_folder(named: str) -> str:
    """Rank 1 meets rank 0 on this host, which is a stranger and names a folder. What rank 1 gets to see."""
    os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_PORT": os.environ["MEETING_PORT"]}
    if os.environ["RANK"] == "0":
        become_nobody()
        dist.PrefixStore("first-attempt-0", join_store()).set("folder", named)
        return ""
    try:
        start_processes(300, use_cpu=True)
    except RankError as error:
        return str(error)
    finally:
        stop_processes()
    return "nothing was refused"


@needs_root
@pytest.mark.distributed
@pytest.mark.parametrize("kind", ["of theirs", "open", "link", "../"])
def test_another_user_names_no_folder_where_ranks_meet(kind: str, tmp_path: Path) -> None:
    """Under torchrun and accelerate, whose store anybody may write to. What is there is not touched."""
    with TemporaryDirectory(prefix=PREFIX) as prepared:
        folder = Path(prepared)
        named = folder.name.removeprefix(PREFIX)
        match kind:
            case "of theirs":
                os.chown(folder, NOBODY, NOBODY)
            case "open":
                folder.chmod(0o755)
            case "link":
                folder.rmdir()
                folder.symlink_to(tmp_path)
            case "../":
                tmp_path.chmod(0o700)
                named = os.path.relpath(tmp_path, f"{folder.parent}/{PREFIX}")
        said = run_ranks(2, name_a_folder, named)[1]
        assert said.startswith("rank 1: where rank 0 should have named the folder"), said
        assert list(tmp_path.iterdir()) == []
        if kind == "link":
            folder.unlink()
            folder.mkdir()


@needs_root
@pytest.mark.distributed
@pytest.mark.parametrize("collective", UNSIGNED)
def test_without_a_secret_nothing_is_run_either(collective: str, tmp_path: Path) -> None:
    """As with ranks that torchrun starts: whoever comes is taken for a rank, and still makes no object of theirs."""
    tmp_path.chmod(0o777)
    victim = COLLECTIVES[collective]
    said = run_ranks(2, play, collective, victim, "", "", tmp_path / "mark")[victim]
    assert said.startswith(f"Rank {1 - victim} told something else than "), said
    assert list(tmp_path.iterdir()) == []


def test_a_message_is_of_its_place_alone() -> None:
    """What a rank has signed is not taken for another message of its, of another rank's or in another group."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        group = dist.new_group(backend="gloo")
        first = packets.Packets(None, "key", 1)
        sealed = torch.frombuffer(bytearray(first._seal(b"text", 1)), dtype=torch.uint8)
        assert first._open(sealed, 1) == b"text"
        for number, source, of_group, key in ((2, 1, None, "key"), (1, 2, None, "key"), (1, 1, group, "key")):
            with pytest.raises(RankError, match="not signed"):
                packets.Packets(of_group, key, number)._open(sealed, source)
        for size in (-1, 0, 31, packets.MAX_BYTES + 1, 2**62):
            with pytest.raises(RankError, match="not signed"):
                packets._checked_size(torch.tensor([size]), 1)
    finally:
        dist.destroy_process_group()


def test_a_folder_that_others_may_enter_is_no_place_to_meet(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir(mode=0o700)
    environ = {NODE_FOLDER: str(folder)}
    assert find_folder(environ, is_one_node=True) == folder
    assert find_folder(environ, is_one_node=False) is None
    (tmp_path / "link").symlink_to(folder)
    assert find_folder({NODE_FOLDER: str(tmp_path / "link")}, is_one_node=True) is None
    folder.chmod(0o755)
    assert find_folder(environ, is_one_node=True) is None
    if os.geteuid() == 0:
        folder.chmod(0o700)
        os.chown(folder, NOBODY, NOBODY)
        assert find_folder(environ, is_one_node=True) is None


@pytest.mark.distributed
@pytest.mark.parametrize(("address", "listens"), [("127.0.0.1", True), ("203.0.113.1", False)])
def test_a_store_is_served_at_the_address_that_ranks_are_told(address: str, listens: bool) -> None:
    """None where that is no address of this host, as behind a gateway: torch serves at all addresses then."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    listener = processes_module._listen(address, port, is_one_node=True)
    assert (listener is not None) is listens
    if listener is not None:
        assert listener.getsockname()[0] == address
        listener.close()
    assert processes_module._listen("127.0.0.1", port, is_one_node=False) is None  # others could not reach it


def pester(ports: list[int]) -> None:
    """Connect to whatever listens, as another user, and say something."""
    become_nobody()
    for port in ports:
        for text in (b"\x00" * 8, b"\x01" + b"\x00" * 7, b"GET / HTTP/1.0\r\n\r\n", os.urandom(4096)):
            with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=5) as connection:
                connection.sendall(text)


@needs_root
@pytest.mark.distributed
def test_ranks_of_one_host_meet_where_nobody_else_can_go(tmp_path: Path) -> None:
    """No store is served. The ranks' own ports are this host's alone, and who connects there disturbs nobody."""
    run = Launch(tmp_path, "qlora-fsdp", *TINY, *SHORT_STEPS, "training.max_steps=100000", "launch.num_processes=2")
    try:
        run.wait_for_steps(1)
        rank = run.rank(0)
        environ = rank.environ()
        folder = Path(environ[NODE_FOLDER])
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        family = [psutil.Process(run.process.pid), *psutil.Process(run.process.pid).children(recursive=True)]
        sockets = []
        for process in family:
            with suppress(psutil.NoSuchProcess):  # one that tries a file, or asks for the GPUs
                sockets += process.net_connections("inet")
        listening = [each.laddr for each in sockets if each.status == psutil.CONN_LISTEN]
        assert listening and {address.ip for address in listening} <= {"127.0.0.1", "::1"}
        ports = [address.port for address in listening]
        assert int(environ["MASTER_PORT"]) not in ports
        start_process(pester, ports).join()
        run.wait_for_steps((run.run_folder / "metrics.jsonl").read_text().count("\n") + 10)
        run.process.send_signal(signal.SIGINT)
        assert run.finish() == 130, run.output
    finally:
        run.kill()
    assert not folder.exists()


def rewrite_store(port: int) -> None:
    """Write something else under each name that the store tells, as another user."""
    become_nobody()
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    store = join_store()
    names = store.list_keys()
    assert any("folder" in name for name in names), "the ranks have met by it"
    for name in names:
        store.set(name, "theirs")


@needs_root
@pytest.mark.distributed
def test_ranks_of_accelerate_leave_the_store_where_others_write(tmp_path: Path) -> None:
    """It is accelerate's, at all addresses, and nothing that is written there reaches the ranks once they have met."""
    run = Launch(tmp_path, "accelerate", *TINY, *SHORT_STEPS, "training.max_steps=100000")
    try:
        run.wait_for_steps(1)
        ranks = [run.rank(0), run.rank(1)]
        sockets = [each for rank in ranks for each in rank.net_connections("inet")]
        assert {each.laddr.ip for each in sockets if each.status == psutil.CONN_LISTEN} == {"127.0.0.1"}
        opened = [Path(file.path) for rank in ranks for file in rank.open_files()]
        (folder,) = {file.parent for file in opened if file.name == "key"}
        assert folder.name.startswith(PREFIX) and stat.S_IMODE(folder.stat().st_mode) == 0o700
        attacker = start_process(rewrite_store, int(ranks[0].environ()["MASTER_PORT"]))
        attacker.join()
        assert attacker.exitcode == 0
        run.wait_for_steps((run.run_folder / "metrics.jsonl").read_text().count("\n") + 10)
        ranks[1].send_signal(signal.SIGINT)
        run.finish()
        assert len(run.errors) == 1 and run.errors[0].startswith("Interrupted by SIGINT. Step "), run.output
    finally:
        run.kill()
    assert not folder.exists()


def test_accelerate_may_not_meet_by_pickles(tmp_path: Path) -> None:
    """torch's other rendezvous unpickle the state that they find in a store which anybody may write to."""
    parser = accelerate_launch.launch_command_parser()
    for backend in ("c10d", "etcd-v2"):
        arguments = parser.parse_args(["--rdzv_backend", backend, "script"], namespace=rendezvous.LauncherArguments())
        with pytest.raises(LaunchError, match=f"--rdzv_backend={backend} would have the launchers meet by what runs"):
            rendezvous.meet_apart(arguments, tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        told = ["--num_machines", "1", "--num_processes", "2", "--main_process_port", str(port), "script"]
        arguments = parser.parse_args(told, namespace=rendezvous.LauncherArguments())
        with pytest.raises(LaunchError, match="found the port of the ranks taken"):
            accelerate_utils_launch.prepare_multi_gpu_env(arguments)


def test_launchers_of_one_host_meet_in_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parser = accelerate_launch.launch_command_parser()
    told = ["--num_machines", "1", "--main_process_port", "29417", "script"]
    arguments = parser.parse_args(told, namespace=rendezvous.LauncherArguments())
    monkeypatch.setattr(rendezvous, "rendezvous_handler_registry", RendezvousHandlerRegistry())
    rendezvous.meet_apart(arguments, tmp_path)
    parameters = RendezvousParameters(arguments.rdzv_backend, "", "run", 1, 1)
    met = rendezvous.rendezvous_handler_registry.create_handler(parameters).next_rendezvous()
    met.store.set("key", "value")
    assert [file.name for file in tmp_path.iterdir()] == ["launcher"], "in a file, and at no port"


SPACES = {"ours": "10.201.7.1", "theirs": "10.201.7.2"}
PORT = 29411
CLONE_NEWNET = 0x40000000  # linux/sched.h


@pytest.fixture
def spaces() -> Iterator[dict[str, str]]:
    """Two network namespaces with a wire between them, as two hosts: the names, and the address in each."""
    names = {f"guard-{os.getpid()}-{end}": address for end, address in SPACES.items()}
    first, second = names

    def ip(*words: str) -> None:
        try:
            done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
        except FileNotFoundError:
            pytest.skip("no network namespaces here: the command ip is not installed")
        if done.returncode:
            pytest.skip(f"no network namespaces here: {done.stderr.strip()}")

    try:
        for name in names:
            ip("netns", "add", name)
        ip("link", "add", "wire0", "netns", first, "type", "veth", "peer", "name", "wire1", "netns", second)
        for (name, address), wire in zip(names.items(), ("wire0", "wire1"), strict=True):
            ip("-n", name, "addr", "add", f"{address}/24", "dev", wire)
            ip("-n", name, "link", "set", wire, "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def start_in(space: str, wire: str, argv: list[str], **environ: str) -> subprocess.Popen[str]:
    """A command in a network namespace, as on a host of its own."""
    own = child_environment() | {"GLOO_SOCKET_IFNAME": wire} | environ
    words = ["ip", "netns", "exec", space, sys.executable, *argv]
    return subprocess.Popen(words, env=own, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def start_hosts(spaces: dict[str, str], keys: tuple[str, str], *settings: str) -> list[subprocess.Popen[str]]:
    """`run_accelerate` on two hosts, each with a rank and a secret of its own."""
    address = next(iter(spaces.values()))
    common = ["--num_machines", "2", "--num_processes", "2", "--main_process_ip", address, "--multi_gpu"]
    hosts = []
    for rank, (space, key) in enumerate(zip(spaces, keys, strict=True)):
        told = ["--machine_rank", str(rank), *common, "--main_process_port", str(PORT)]
        argv = ["-m", "qlora_fsdp.launch.run_accelerate", *told, "-m", "qlora_fsdp.train", *TINY, *settings]
        environ = {RUN_KEY: key, "ACCELERATE_USE_CPU": "true"}
        hosts.append(start_in(space, f"wire{rank}", argv, **environ))
    return hosts


def listening_in_space_of(pid: int) -> set[str]:
    """The addresses at which anything listens in the network namespace of a process, as the system writes them.

    Nothing while it is in this process's own: `ip netns exec` begins there.
    """
    if Path(f"/proc/{pid}/ns/net").readlink() == Path("/proc/self/ns/net").readlink():
        return set()
    found = set()
    for family, width in ((socket.AF_INET, 8), (socket.AF_INET6, 32)):
        name = "tcp" if family == socket.AF_INET else "tcp6"
        for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]:
            _, local, _, state, *_ = line.split()
            if state == "0A":  # it listens
                words = [int(local[at : at + 8], 16) for at in range(0, width, 8)]
                packed = b"".join(word.to_bytes(4, sys.byteorder) for word in words)
                found.add(socket.inet_ntop(family, packed))
    return found


def play_apart(spaces: dict[str, str], collective: str, victim: int, *rest: Any) -> str:
    """`play`, each rank in its network namespace, and the store in that of the victim."""
    is_victim = int(os.environ["RANK"]) == victim
    ours, theirs = spaces
    space = Path("/run/netns") / (ours if is_victim else theirs)
    with space.open() as file:
        libc = ctypes.CDLL(None, use_errno=True)
        assert libc.setns(file.fileno(), CLONE_NEWNET) == 0, os.strerror(ctypes.get_errno())
    os.environ |= {"MASTER_ADDR": spaces[ours], "MASTER_PORT": str(PORT), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    os.environ["GLOO_SOCKET_IFNAME"] = "wire0" if is_victim else "wire1"
    served = dist.TCPStore(spaces[ours], PORT, is_master=True, wait_for_workers=False) if is_victim else None
    try:
        return play(collective, victim, *rest)
    finally:
        del served


@needs_root
@pytest.mark.distributed
@pytest.mark.parametrize(
    ("collective", "has_secret"), [*((each, True) for each in COLLECTIVES), *((each, False) for each in UNSIGNED)]
)
def test_another_user_on_another_host_is_refused(
    collective: str, has_secret: bool, spaces: dict[str, str], tmp_path: Path
) -> None:
    """As over several hosts under torchrun: its launcher serves the store, and the attacker comes from another host."""
    tmp_path.chmod(0o777)
    victim = COLLECTIVES[collective]
    key, forger = (make_key(), make_key()) if has_secret else ("", "")
    mark = tmp_path / "mark"
    said = run_ranks(2, play_apart, spaces, collective, victim, key, forger, mark)[victim]
    expected = refusal(collective, victim) if has_secret else f"Rank {1 - victim} told something else than "
    assert said.startswith(expected), said
    assert list(tmp_path.iterdir()) == []


@needs_root
@pytest.mark.distributed
def test_the_store_of_several_launchers_is_served_at_the_main_ones_address(
    spaces: dict[str, str], tmp_path: Path
) -> None:
    """Two hosts train together by `run_accelerate`, and nothing listens at all addresses of a host."""
    address = next(iter(spaces.values()))
    key = make_key()
    hosts = start_hosts(spaces, (key, key), "training.max_steps=2", f"run.folder={tmp_path / 'run'}")
    listening: set[str] = set()
    while hosts[0].poll() is None:
        with suppress(OSError):
            listening |= listening_in_space_of(hosts[0].pid)
        with suppress(subprocess.TimeoutExpired):
            hosts[0].wait(0.2)
    said = [host.communicate(timeout=300)[0] for host in hosts]
    assert [host.returncode for host in hosts] == [0, 0], said
    assert listening == {address}


@needs_root
@pytest.mark.distributed
@pytest.mark.parametrize("other", [make_key(), ""], ids=["another", "none"])
def test_hosts_with_unlike_secrets_end_soon_and_say_so(other: str, spaces: dict[str, str], tmp_path: Path) -> None:
    """They would wait for one another for distributed.timeout_seconds, which is longer than this test waits."""
    waiting = ["distributed.timeout_seconds=7200", "training.max_steps=2"]
    hosts = start_hosts(spaces, (make_key(), other), *waiting, f"run.folder={tmp_path / 'run'}")
    try:
        said = [host.communicate(timeout=300)[0] for host in hosts]
    finally:
        for host in hosts:
            host.kill()
    assert [host.returncode for host in hosts] == [6, 6], said
    for text in said:
        assert text.count("Error: The secret of rank 1 is not that of rank 0: QLORA_FSDP_RUN_KEY has to be") == 1, text
