"""Signed bytes between the ranks of a run, over gloo.

gloo takes whoever connects to one of its ports for the rank that was to connect there, also another user of the host.
So ranks prove to one another that they have the run's secret (common/run_key.py) when a group is new, each pair by
itself, and every message has a signature, which is looked at before the message is. A signature is of one message: of
its group, its number there and its sender too, so that none can be sent again in place of another one.

Ranks that have no secret, as torchrun's, prove nothing by it; docs/security.md says what that means.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from qlora_fsdp.common.errors import RankError

NONCE_BYTES = DIGEST_BYTES = 32
MAX_BYTES = 2**33  # of a message, more than any has


@dataclass(frozen=True)
class Packets:
    """What a rank sends to all others over one group of theirs, and gets from them. Each call is collective.

    Attributes:
        group: all ranks of the run; None for torch's default group.
        key: the run's secret; empty where the ranks have none.
        number: of the call, in this group: the same on all ranks.
    """

    group: dist.ProcessGroup | None
    key: str
    number: int

    def broadcast(self, message: bytes, source: int) -> bytes:
        """The message of rank `source`, on every rank."""
        sealed = self._seal(message, source)
        size = torch.tensor([len(sealed)])
        dist.broadcast(size, source, self.group)
        packet = _padded(sealed if dist.get_rank() == source else b"", _checked_size(size, source))
        dist.broadcast(packet, source, self.group)
        return self._open(packet, source)

    def gather(self, message: bytes) -> list[bytes]:
        """The messages of all ranks, by rank, on every rank."""
        sealed = self._seal(message, dist.get_rank())
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
        dist.all_gather(sizes, torch.tensor([len(sealed)]), self.group)
        lengths = [_checked_size(size, rank) for rank, size in enumerate(sizes)]
        packets = [torch.empty(max(lengths), dtype=torch.uint8) for _ in lengths]
        dist.all_gather(packets, _padded(sealed, max(lengths)), self.group)
        cut = [packet[:length] for packet, length in zip(packets, lengths, strict=True)]
        return [self._open(packet, rank) for rank, packet in enumerate(cut)]

    def scatter(self, messages: Sequence[bytes] | None, source: int) -> bytes:
        """This rank's one of the messages that rank `source` has for all ranks, by rank; None elsewhere."""
        sizes = packets = None
        if messages is not None:
            sealed = [self._seal(message, source) for message in messages]
            longest = max(len(each) for each in sealed)
            sizes = [torch.tensor([len(each), longest]) for each in sealed]
            packets = [_padded(each, longest) for each in sealed]
        size = torch.zeros(2, dtype=torch.int64)
        dist.scatter(size, sizes, source, self.group)
        packet = torch.empty(_checked_size(size[1:], source), dtype=torch.uint8)
        dist.scatter(packet, packets, source, self.group)
        return self._open(packet[: _checked_size(size[:1], source)], source)

    def _seal(self, message: bytes, source: int) -> bytes:
        return self._sign(message, source) + message

    def _open(self, packet: Tensor, source: int) -> bytes:
        """The message in a packet of rank `source`.

        Raises:
            RankError: it has not the signature of a rank of this run.
        """
        sealed = packet.numpy().tobytes()
        signature, message = sealed[:DIGEST_BYTES], sealed[DIGEST_BYTES:]
        if source != dist.get_rank() and not hmac.compare_digest(signature, self._sign(message, source)):
            raise stranger(source)
        return message

    def _sign(self, message: bytes, source: int) -> bytes:
        group = self.group or dist.group.WORLD
        assert group is not None
        about = f"message {self.number} of rank {source} in {group.group_name}: "
        return hmac.digest(self.key.encode(), about.encode() + message, "sha256")


def prove_peers(group: dist.ProcessGroup | None, key: str) -> None:
    """Have each rank of a new group prove to each other one that it has the run's secret. Collective.

    Each pair does so over its own connection, as each of these might lead to somebody else.

    Args:
        group: ranks that can exchange tensors on the CPU; None for torch's default group.
        key: the run's secret; without one, nothing can be proved.

    Raises:
        RankError: a rank has not got it.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    if not key or size == 1:
        return
    mine = secrets.token_bytes(NONCE_BYTES)
    theirs = _swap([mine] * size, group)
    proofs = _swap([_prove(key, rank, peer, theirs[peer], mine) for peer in range(size)], group)
    for peer, proof in enumerate(proofs):
        if not hmac.compare_digest(proof, _prove(key, peer, rank, mine, theirs[peer])):
            raise stranger(dist.get_global_rank(group, peer) if group is not None else peer)


def stranger(rank: int) -> RankError:
    """The error of a process in the place of a rank that it is not."""
    return RankError(
        f"What came from rank {rank} is not signed with this run's secret: another process takes part in its place, or "
        "the ranks have secrets that differ (QLORA_FSDP_RUN_KEY, which has to be the same on all hosts). Nothing of it "
        "was used. See docs/security.md on other users of the host."
    )


def _prove(key: str, prover: int, other: int, challenge: bytes, own: bytes) -> bytes:
    """The proof of rank `prover` for rank `other`, which has sent the challenge; `own` is what the prover has sent."""
    return hmac.digest(key.encode(), f"rank {prover} to {other}: ".encode() + challenge + own, "sha256")


def _swap(messages: Sequence[bytes], group: dist.ProcessGroup | None) -> list[bytes]:
    """Sends each rank of a group a message, all of one length, and returns what the ranks have sent here."""
    sent = torch.frombuffer(bytearray(b"".join(messages)), dtype=torch.uint8)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    return [part.numpy().tobytes() for part in received.chunk(len(messages))]


def _padded(message: bytes, size: int) -> Tensor:
    packet = torch.zeros(size, dtype=torch.uint8)
    if message:
        packet[: len(message)] = torch.frombuffer(bytearray(message), dtype=torch.uint8)
    return packet


def _checked_size(size: Tensor, source: int) -> int:
    number = int(size.item())
    if not DIGEST_BYTES <= number <= MAX_BYTES:
        raise stranger(source)
    return number
