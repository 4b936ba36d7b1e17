"""What a plan is made for: a model's shape, the settings of a run, and how its work is spread over ranks."""

from __future__ import annotations

import math
from dataclasses import dataclass

from qlora_fsdp.config.schema import Config
from qlora_fsdp.memory.shape import ModelShape

FUSED_KERNELS = frozenset({"rms_norm", "rotary", "glu", "cross_entropy"})


@dataclass(frozen=True)
class Workload:
    """One rank's share of a run.

    Attributes:
        num_ranks: all processes of the run, each with a GPU of its own.
        local_num_ranks: those of one host.
        micro_batch_size: sequences per rank and forward pass.
        compute_bytes: bytes of one element of an activation: 2 in bfloat16, 4 in float32.
        fused: the settings of `kernels` for which Liger's kernels are used.
        is_cuda: whether the rank has a GPU. If not, the plan is about host memory.
    """

    shape: ModelShape
    config: Config
    num_ranks: int
    local_num_ranks: int
    micro_batch_size: int
    compute_bytes: int = 2
    fused: frozenset[str] = FUSED_KERNELS
    is_cuda: bool = True

    @property
    def num_shards(self) -> int:
        """Ranks among which every parameter is split."""
        return self.config.fsdp.num_shards(self.num_ranks, self.local_num_ranks)

    @property
    def uses_fsdp(self) -> bool:
        """Whether FSDP takes part (model/shard.py). If not, nothing is gathered."""
        return self.config.fsdp.uses_fsdp(self.num_shards)

    @property
    def reshards(self) -> bool:
        """Whether layers are freed after their forward."""
        return self.config.fsdp.reshards

    @property
    def num_tokens(self) -> int:
        """Most tokens of a micro-batch on one rank."""
        return self.micro_batch_size * self.config.training.max_length

    @property
    def num_micro_batches(self) -> int:
        """Forward passes per rank and optimizer step."""
        total = self.config.training.global_batch_size
        return 1 if total is None else math.ceil(total / (self.num_ranks * self.micro_batch_size))
