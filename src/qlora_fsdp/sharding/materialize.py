"""Give an assembled model its weights: shard it, fill the base's shards, fill the adapters, and prove the outcome.

Training and the commands that use an adapter load their models here. What differs between them is an argument.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import peft
import torch
from torch.distributed.fsdp import FSDPModule
from tqdm import tqdm

from qlora_fsdp.config.specs import ShardSpec
from qlora_fsdp.model.assemble import AssembledModel
from qlora_fsdp.runtime.processes import Processes
from qlora_fsdp.sharding.peer_weights import make_peer_weights
from qlora_fsdp.sharding.prove import Proof, prove_shards
from qlora_fsdp.sharding.shard import place_model, shard_model
from qlora_fsdp.weights.fill import fill_shards
from qlora_fsdp.weights.observe import NO_OBSERVERS, Observers


@dataclass(frozen=True)
class LoadReport:
    """How loading went.

    Attributes:
        units: the FSDP units, the root last; empty if FSDP is not used.
        num_bytes_read: roughly the bytes of the model files that one rank reads: all bytes over the number of shards.
        load_seconds: time to fill the shards and the adapters.
        proof: how many tensors and bytes the proof compared.
        proof_seconds: time that the proof took.
    """

    units: list[FSDPModule]
    num_bytes_read: int
    load_seconds: float
    proof: Proof
    proof_seconds: float


def materialize(
    assembled: AssembledModel,
    spec: ShardSpec,
    seed: int,
    processes: Processes,
    fill_adapters: Callable[[peft.PeftModel], None],
    *,
    shows_progress: bool = False,
    before_proof: Callable[[], None] = lambda: None,
    observers: Observers = NO_OBSERVERS,
) -> LoadReport:
    """Shard the model, fill it from its files, and prove that FSDP gathers what was loaded. Collective.

    Args:
        assembled: its model is changed in place: parameters on meta become this rank's shards, with values.
        spec: how the model is split.
        seed: of weights that are random.
        processes: all ranks take part.
        fill_adapters: called with PEFT's model once the base's shards are filled; it fills the adapters' shards, with
            initial values or with those of a saved adapter.
        shows_progress: show a progress bar on rank 0 if there is a terminal.
        before_proof: called between loading and the proof, so that memory can be measured for each apart.
        observers: told of weights that are quantized, by the layers that get them.

    Raises:
        ProofError: FSDP gathers other bytes than were loaded.
    """
    model = assembled.model
    meta = assembled.meta
    device = processes.device
    units = shard_model(model, spec, processes)
    started = time.perf_counter()
    peers = None
    if units:
        peers = make_peer_weights(model, spec, processes)
    shard_device = torch.device("cpu") if spec.cpu_offload else device
    place_model(model, shard_device, device, {} if peers is None else peers.shards)
    total = sum(assignment.num_bytes(assembled.dtype) for assignment in meta.assignments) // spec.num_shards
    is_shown = shows_progress and processes.is_main and sys.stderr.isatty()
    with tqdm(total=total, unit="B", unit_scale=True, desc="Loading", disable=not is_shown, leave=False) as bar:
        fill_shards(meta.assignments, device, assembled.dtype, meta.std, seed, bar.update, observers)
    fill_adapters(model.model)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    if peers is not None:
        processes.wait(patiently=True)  # another rank may still read files
        peers.connect()
    load_seconds = time.perf_counter() - started
    before_proof()
    read = () if peers is None else peers.ends.readers()
    proof = prove_shards(model, units, processes, int(os.environ.get("WORLD_SIZE", 1)), read)
    proof_seconds = time.perf_counter() - started - load_seconds
    return LoadReport(units, total, load_seconds, proof, proof_seconds)
