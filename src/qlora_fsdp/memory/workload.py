"""What a plan is made for: a model, the settings of a run, and how its work is spread over ranks.

Plan and generation share the numbers of slots that generated texts have. Whether a run records its micro-batches as a
CUDA graph (training/capture/captured.py) is told as far as the settings show it: a graph keeps its memory while
evaluations and the optimizer run, and Python takes no time.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from typing_extensions import Unpack

from qlora_fsdp.common.errors import AdapterError, ConfigError
from qlora_fsdp.common.plain_values import STAYS
from qlora_fsdp.common.sizes import next_power_of_two, round_up
from qlora_fsdp.config.adapter.adapter_config import read_shapes
from qlora_fsdp.config.schema import Config, EmbeddingStorage, Kernel
from qlora_fsdp.config.settings import problem_about
from qlora_fsdp.config.specs import BatchSpec, ModuleSpec, ShardSpec
from qlora_fsdp.memory.policy import Policy
from qlora_fsdp.memory.traced import EndsUse, LayerKind, LayerUse, ModelParts, ParameterSize, TracedModel

LayerKey = tuple[int, Policy, bool]  # kind, policy, whether no layer before it is trained
MAX_SLOTS = 64  # texts that run at the same time while a model is trained, for which a plan leaves memory
# Texts that run at the same time on a GPU where nothing is said of it, if there is memory for them. 256 texts of an 8B
# model are written half as fast again as 64.
GPU_SLOTS = 256
CACHE_SHARE = 0.6  # of the free memory is for slots; the rest is for reading prompts
LENGTH_STEP = 128  # a slot has a multiple of this many tokens

# Beside a graph, this much stays free for the optimizer's step.
SPARE_BYTES = 256 * 2**20


@dataclass(frozen=True)
class Workload:
    """One rank's share of a run.

    Attributes:
        model: the model, which can be asked what it takes under any settings. Each rank has its own.
        config: the settings, of which the plan tries others where they are open, and to suggest a change.
        num_ranks: all processes of the run, each with a GPU of its own.
        local_num_ranks: those of one host.
        micro_batch_size: sequences per rank and forward pass.
        is_cuda: whether the rank has a GPU. If not, the plan is about host memory.
        can_read_peers: whether the GPUs of a host can read one another's memory.
        teacher_model: a teacher that is a model of its own, without adapters; None without one.
    """

    model: TracedModel = field(metadata=STAYS)
    config: Config
    num_ranks: int
    local_num_ranks: int
    micro_batch_size: int
    is_cuda: bool = True
    can_read_peers: bool = True
    teacher_model: TracedModel | None = field(default=None, metadata=STAYS)

    @cached_property
    def teacher(self) -> Workload | None:
        """The same micro-batches for a teacher that is a model of its own; None without one."""
        return None if self.teacher_model is None else replace(self, model=self.teacher_model, teacher_model=None)

    def with_values(self, values: Mapping[str, Any]) -> Workload:
        """The same run under other settings, by their keys."""
        size = values.get("training.micro_batch_size", self.micro_batch_size)
        return replace(self, config=self.config.with_values(values), micro_batch_size=size)

    @cached_property
    def modules(self) -> ModuleSpec:
        """What the model is made of."""
        return ModuleSpec.of(self.config)

    @cached_property
    def batch(self) -> BatchSpec:
        """A micro-batch of one rank."""
        return BatchSpec.of(self.config, self.micro_batch_size)

    @cached_property
    def shards(self) -> ShardSpec:
        """How parameters are spread over the ranks."""
        return ShardSpec.of(self.config.fsdp, self.num_ranks, self.local_num_ranks)

    @cached_property
    def parts(self) -> ModelParts:
        """The model's parameters under these settings."""
        return self.model.parts(self.modules)

    @cached_property
    def vocab_size(self) -> int:
        """Rows of the largest table of embeddings and head."""
        tables = [tensor for tensors in self.parts.ends.values() for tensor in tensors if tensor.part == "embeddings"]
        return max((tensor.num_rows for tensor in tables), default=0)

    @property
    def slot_length(self) -> int:
        """Tokens of a slot in which an answer is written after its prompt."""
        return round_up(self.config.training.max_length, LENGTH_STEP)

    @property
    def slot_bytes(self) -> int:
        """Bytes of such a slot: its keys and values, and what its next token takes while it is drawn."""
        rollout = self.config.rollout
        leaves_out = rollout.top_k > 0 or rollout.top_p < 1 or rollout.min_p > 0
        return self.slot_length * self.parts.cached_bytes + sampling_bytes(self.vocab_size, leaves_out)

    @property
    def num_layers(self) -> int:
        """Transformer layers."""
        return len(self.parts.layers)

    @cached_property
    def layers(self) -> list[LayerKind]:
        """The kind of each transformer layer, in order."""
        parts = self.parts
        return [parts.kinds[kind] for kind in parts.layers]

    @cached_property
    def ends(self) -> EndsUse:
        """Memory that a micro-batch needs around the layers."""
        return self.model.ends_use(self.modules, self.batch, self.config.memory.head_in_pieces is True)

    def layer_uses(self, policies: Sequence[Policy]) -> list[LayerUse]:
        """Memory that a micro-batch needs in each layer, if the layers have these policies."""
        return [self._use(*key) for key in self.keys(policies)]

    def layer_use(self, index: int, policy: Policy) -> LayerUse:
        """Memory that a micro-batch needs in one layer."""
        return self._use(self.parts.layers[index], policy, index <= self._first_trained)

    def keys(self, policies: Sequence[Policy]) -> list[LayerKey]:
        """For each layer, all that its memory depends on."""
        kinds = enumerate(zip(self.parts.layers, policies, strict=True))
        return [(kind, policy, index <= self._first_trained) for index, (kind, policy) in kinds]

    @cached_property
    def _first_trained(self) -> int:
        """The first layer with adapters. Up to it, no gradient is computed of a layer's input."""
        trained = [any(tensor.part == "adapters" for tensor in kind.tensors) for kind in self.layers]
        return trained.index(True) if True in trained else len(trained)

    def _use(self, *key: Unpack[LayerKey]) -> LayerUse:
        if key not in self._uses:
            tile_tokens = self.config.memory.num_tile_tokens
            self._uses[key] = self.model.layer_use(self.modules, self.batch, *key, tile_tokens)
        return self._uses[key]

    @cached_property
    def _uses(self) -> dict[LayerKey, LayerUse]:
        return {}

    @property
    def num_shards(self) -> int:
        """Ranks among which every parameter is split."""
        return self.shards.num_shards

    @property
    def num_groups(self) -> int:
        """Groups of ranks that have sequences of their own."""
        return self.config.distributed.num_groups(self.num_ranks)

    @property
    def uses_fsdp(self) -> bool:
        """Whether FSDP takes part (sharding/shard.py). If not, nothing is gathered."""
        return self.shards.uses_fsdp

    @property
    def holds_dequantized(self) -> bool:
        """Whether dequantized weights that are kept stay until the run ends, and not only until backward."""
        return self.config.memory.keep_dequantized == "run" and not self.uses_fsdp

    @property
    def reads_peers(self) -> bool:
        """Whether layers' codes are read from the other GPUs and not gathered by FSDP (sharding/peer_weights.py)."""
        return self.is_cuda and self.can_read_peers and self.shards.may_read_peers

    def read_codes(self, tensors: Iterable[ParameterSize]) -> list[int]:
        """Bytes of each whole tensor of codes that is read so, the largest first: those that split into equal parts."""
        read = [t for t in tensors if self.reads_peers and t.part == "codes" and t.num_rows % self.num_shards == 0]
        return sorted((tensor.num_rows * tensor.row_bytes for tensor in read), reverse=True)

    def reads_end(self, name: str) -> bool:
        """Whether `embeddings` or `head` are read from the other GPUs (`sharding/peer_weights.py: ends_to_read`)."""
        if not self.reads_peers or name not in self.parts.gathered_by_model:
            return False
        if name == "head" and (self.reshards or self.config.quant.embeddings is EmbeddingStorage.int8):
            return False
        return all(tensor.num_rows % self.num_shards == 0 for tensor in self.parts.ends[name])

    @property
    def reshards(self) -> bool:
        """Whether layers are freed after their forward."""
        return self.config.fsdp.reshards

    @property
    def num_tokens(self) -> int:
        """Most tokens of a micro-batch on one rank."""
        return self.micro_batch_size * self.batch.slice_length

    @property
    def num_micro_batches(self) -> int:
        """Forward passes per rank and optimizer step."""
        if self.config.training.global_batch_size is None:
            return 1
        return math.ceil(self.sequences_a_step / (self.num_groups * self.micro_batch_size))

    @property
    def sequences_a_step(self) -> int:
        """Sequences of a step on all ranks, where their number is set; if the model writes them, at most as many."""
        prompts = self.config.training.global_batch_size
        assert prompts is not None
        return prompts * (self.config.rollout.num_generations if self.config.task.writes_answers else 1)


def sampling_bytes(vocab_size: int, leaves_out: bool) -> int:
    """Bytes that the next token of a text takes while it is drawn, on a GPU.

    The logits in 16 bits; and where tokens are left out (top_k, top_p, min_p) in float32: a copy of them, the same
    without those, both sorted with their places (int64), probabilities and random numbers.
    """
    return vocab_size * (2 + (4 + 4 + 4 + 8 + 4 + 4 if leaves_out else 0))


def generation_bytes(work: Workload) -> int:
    """Bytes that `tracking.num_generations` needs on a GPU while texts are completed; 0 if there are none.

    A model in shards has slots only where memory is left over: it can also compute every token from those before it
    (training/generations.py).
    """
    tracking = work.config.tracking
    if tracking.num_generations == 0 or work.uses_fsdp:
        return 0
    num_slots = min(MAX_SLOTS, next_power_of_two(-(tracking.num_generations // -work.num_ranks)))
    length = round_up(work.config.training.max_length + tracking.generation_tokens, LENGTH_STEP)
    return num_slots * length * work.parts.cached_bytes


def other_adapter_bytes(work: Workload) -> int:
    """Bytes of the adapters that reward answers or teach: float32 and whole on each rank; 0 of folders not here."""
    config = work.config
    folders = [*config.reward.models, *([config.distill.teacher_adapter] if config.distill.teacher_adapter else [])]
    num_bytes = 0
    for folder in folders if config.task.writes_answers else []:
        with suppress(AdapterError):
            shapes = read_shapes(Path(folder).expanduser(), "adapter")
            num_bytes += sum(4 * math.prod(shape) for shape in shapes.values())
    return num_bytes


def is_captured(work: Workload, policies: Sequence[Policy]) -> bool:
    """Whether a run that is planned will record its micro-batches."""
    has_dropout = work.config.lora.lora_dropout > 0
    reason = why_not_captured(work.modules, work.config.fsdp.cpu_offload, policies, has_dropout)
    return work.is_cuda and reason is None


def check_graph(
    modules: ModuleSpec, cpu_offload: bool, policies: Sequence[Policy], has_dropout: bool, is_cuda: bool
) -> None:
    """Check that a run records its steps if compute.cuda_graph=true asks for it; as `why_not_captured`.

    Raises:
        ConfigError: it asks, and they can't be recorded.
    """
    reason: str | None = "there is no GPU"
    if is_cuda:
        reason = why_not_captured(modules, cpu_offload, policies, has_dropout)
    if modules.compute.cuda_graph is True and reason is not None:
        problem = problem_about("compute.cuda_graph", True, f"can't be had: {reason}.", "Set compute.cuda_graph=auto.")
        raise ConfigError([problem])


def why_not_captured(
    modules: ModuleSpec, cpu_offload: bool, policies: Sequence[Policy], has_dropout: bool
) -> str | None:
    """Why micro-batches are not recorded; None if they are, unless the model itself prevents it.

    Args:
        modules: what the model is made of.
        cpu_offload: whether parameters are in host memory.
        policies: the activation policy of each layer.
        has_dropout: whether the model draws random numbers.
    """
    if modules.compute.cuda_graph is False:
        return "compute.cuda_graph=false"
    if modules.num_slices > 1:
        return "the exchange of heads between ranks was not tried in it (distributed.context_parallel)"
    if modules.task.writes_answers:
        return "answers that the model writes itself were not tried in it"
    if cpu_offload or any(policy.offloads for policy in policies):
        return "what comes from host memory can't be part of it"
    if modules.kernels.cross_entropy is Kernel.liger:
        return "kernels.cross_entropy=liger asks the device"
    if modules.task.computes_reference and modules.lora.start is not None:
        return "the reference, which is the adapter of lora.start, changes places with the one that is trained"
    if has_dropout and any(policy.recomputes for policy in policies):
        return "random numbers can't be drawn again in backward"
    return None
