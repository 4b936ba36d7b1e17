"""Give an assembled model its weights: shard it, fill every shard, fill the adapters, and prove the outcome.

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

from qlora_fsdp.config.schema import Config
from qlora_fsdp.model.assemble import AssembledModel
from qlora_fsdp.model.prove import Proof, prove_shards
from qlora_fsdp.model.shard import place_model, shard_model
from qlora_fsdp.runtime.processes import Processes
from qlora_fsdp.weights.fill import fill


@dataclass(frozen=True)
class LoadReport:
    """How loading went.

    Attributes:
        units: the FSDP units, the root last; none where FSDP takes no part.
        num_bytes_read: bytes of the model files that this rank read, about.
        load_seconds: time to fill the shards and the adapters.
        proof: what was compared.
        proof_seconds: time to compare it.
    """

    units: list[FSDPModule]
    num_bytes_read: int
    load_seconds: float
    proof: Proof
    proof_seconds: float


def materialize(
    assembled: AssembledModel,
    config: Config,
    processes: Processes,
    fill_adapters: Callable[[peft.PeftModel], None],
    *,
    shards: bool = True,
    reshard_after_forward: bool = True,
    shows_progress: bool = False,
    before_proof: Callable[[], None] = lambda: None,
) -> LoadReport:
    """Shard the model, fill it from its files, and check what FSDP makes of it. Collective.

    Args:
        assembled: its model is changed in place, from meta to real shards.
        config: the settings; of these `fsdp` and `training.seed`.
        processes: all ranks take part.
        fill_adapters: fills the adapters' shards, once the base's are filled.
        shards: whether FSDP may take part, as the settings say; else every rank has the whole model on its device.
        reshard_after_forward: free layers after their forward, and gather them again for backward.
        shows_progress: show a bar on rank 0 where there is a terminal.
        before_proof: called between loading and the proof.

    Raises:
        ProofError: FSDP gathers other bytes than were loaded.
    """
    model, meta, device = assembled.model, assembled.meta, processes.device
    units = shard_model(model, config.fsdp, processes, reshard_after_forward) if shards else []
    started = time.perf_counter()
    place_model(model, torch.device("cpu") if shards and config.fsdp.cpu_offload else device, device)
    num_shards = config.fsdp.num_shards(processes.num_ranks, processes.local_num_ranks)
    total = sum(assignment.num_bytes(assembled.dtype) for assignment in meta.assignments) // num_shards
    is_shown = shows_progress and processes.is_main and sys.stderr.isatty()
    with tqdm(total=total, unit="B", unit_scale=True, desc="Loading", disable=not is_shown, leave=False) as bar:
        fill(meta.assignments, device, assembled.dtype, meta.std, config.training.seed, bar.update)
    fill_adapters(model.model)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    load_seconds = time.perf_counter() - started
    before_proof()
    proof = prove_shards(model, units, processes, int(os.environ.get("WORLD_SIZE", 1)))
    proof_seconds = time.perf_counter() - started - load_seconds
    return LoadReport(units, total, load_seconds, proof, proof_seconds)
