"""The memory plan: predicted GPU bytes by part in each phase of a run, and host memory.

What is allocated when follows FSDP2 (torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py, 2.11 to 2.13): a group
is gathered into one flat buffer, which is copied out into its parameters. In forward the flat buffer lives until the
next group has been gathered; in backward it goes at once, but the next layer's is there already. One shard in
host memory is copied, and has no flat buffer. Frozen embeddings and a frozen head are gathered into one buffer
(causal_lm.py). Without FSDP (shard.py) nothing is gathered, and gradients stay where backward makes them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

from qlora_fsdp.config.schema import EmbeddingStorage, TaskName, Weights
from qlora_fsdp.memory import activations
from qlora_fsdp.memory.activations import OFFLOAD_SLOTS, Policy
from qlora_fsdp.memory.loss import has_chunks, is_trained, loss_backward_bytes, loss_bytes
from qlora_fsdp.memory.parameters import (
    ParameterBytes,
    Tensor,
    end_tensors,
    layer_tensors,
    num_new_tokens,
    optimizer_bytes,
    sum_bytes,
)
from qlora_fsdp.memory.workload import Workload
from qlora_fsdp.sizes import NUM_BUFFERS, PIECE_BYTES, SLAB_BYTES

GIB, MIB = 2**30, 2**20
PHASES = ("load", "forward", "backward", "step")

# Measured on H200s with torch 2.11 (docs/memory.md).
LOAD_STAGING = 80 * MIB  # pieces of weights on their way
WORKSPACE = 64 * MIB  # cuBLAS, in torch's own pool: one for each of forward's and backward's threads
CUDA_CONTEXT = 770 * MIB  # driver, kernels' code; outside torch's pool
NCCL = 830 * MIB
NCCL_ALONE = 530 * MIB  # of FSDP on one rank
# What torch's allocator holds beyond the tensors when it must (expandable segments): of what comes and goes in a step,
# and the last pages of its ranges, one a stream and kind.
FRAGMENTATION, LAST_PAGES = 0.03, 128 * MIB
# The same of what is gathered, where parameters come from the host through several streams (70B: 1.3 GiB of 3.4).
STREAMED = 0.45
# Host memory of a rank: Python and the libraries; what CUDA and its libraries add; NCCL; and the modules of a layer.
HOST_PYTHON, HOST_CUDA, HOST_NCCL, HOST_LAYER = 580 * MIB, 950 * MIB, 360 * MIB, 3 * MIB // 2

Parts = dict[str, int]  # bytes by part


@dataclass(frozen=True)
class MemoryPlan:
    """Predicted bytes of one rank.

    Attributes:
        work: what the plan is for.
        policies: of each layer's activations.
        phases: bytes by part at the peak of each of PHASES.
        host: bytes of host memory by part, of the first rank, which puts the whole `adapter` together.
        pinned: bytes of a rank's host memory that can't be swapped out.
    """

    work: Workload
    policies: tuple[Policy, ...]
    phases: dict[str, Parts]
    host: Parts
    pinned: int

    def tensors(self, phase: str) -> int:
        """Peak of what tensors take in a phase: `torch.cuda.max_memory_allocated`."""
        return sum(self.phases[phase].values())

    @property
    def peak_phase(self) -> str:
        return max(PHASES, key=self.tensors)

    @property
    def allocator(self) -> int:
        """What torch's allocator holds beyond the tensors."""
        parts = self.phases[self.peak_phase]
        transient = sum(parts.get(name, 0) for name in ("gathered", "dequantized", "activations", "loss"))
        streamed = STREAMED * parts.get("gathered", 0) if self.work.config.fsdp.cpu_offload else 0
        return round(FRAGMENTATION * transient + streamed) + (LAST_PAGES if self.work.is_cuda else 0)

    @property
    def libraries(self) -> int:
        """GPU memory outside torch's allocator."""
        if not self.work.is_cuda:
            return 0
        alone = NCCL_ALONE if self.work.uses_fsdp else 0
        return CUDA_CONTEXT + (NCCL if self.work.num_ranks > 1 else alone)

    @property
    def host_needed(self) -> int:
        """Host memory that the ranks of one host need in all."""
        adapter = self.host["adapter"]
        return (sum(self.host.values()) - adapter) * self.work.local_num_ranks + adapter

    @property
    def needed(self) -> int:
        """GPU memory that the run needs in all."""
        return self.tensors(self.peak_phase) + self.allocator + self.libraries


def make_plan(work: Workload, policies: Sequence[Policy]) -> MemoryPlan:
    """Predict the memory of a run whose layers have these activation policies."""
    return planner(work)(policies)


def planner(work: Workload) -> Callable[[Sequence[Policy]], MemoryPlan]:
    """`make_plan` of one run, for one set of policies after another: its parameters are counted once."""
    return partial(_plan, work, _Model(work))


def _plan(work: Workload, model: _Model, policies: Sequence[Policy]) -> MemoryPlan:
    assert len(policies) == work.shape.num_layers
    resident = model.resident(with_training=True)
    phases = {
        "load": model.resident(with_training=False) | {"workspace": LOAD_STAGING},
        "forward": _largest(_join(resident, moment) for moment in _forward_moments(work, model, policies)),
        "backward": _largest(_join(resident, moment) for moment in _backward_moments(work, model, policies)),
        "step": _join(resident, {"gradients": model.step_gradients, "workspace": WORKSPACE}),
    }
    host, pinned = _host(work, model, policies)
    return MemoryPlan(work, tuple(policies), phases, host, pinned)


class _Model:
    """Bytes of the model's FSDP units, and of what a rank holds all the time."""

    def __init__(self, work: Workload) -> None:
        config, shape, item, shards = work.config, work.shape, work.compute_bytes, work.num_shards
        self.work = work
        self.layers = [
            tuple(layer_tensors(shape, index, config.quant, config.lora, item)) for index in range(shape.num_layers)
        ]
        self.ends = end_tensors(shape, config, item)
        self.tensors = [tensor for unit in (*self.layers, *self.ends.values()) for tensor in unit]
        self.shard = sum_bytes(iter(self.tensors), shards)
        self.layer = max((sum_bytes(iter(layer)) for layer in self.layers), key=lambda parts: parts.total)
        self.gathered_layer = self.layer.total if work.uses_fsdp else 0
        self.all_trained = sum_bytes(iter(self.tensors)).adapters
        self.optimizer = optimizer_bytes(iter(self.tensors), config.optim.name, shards)
        self.is_offloaded = config.fsdp.cpu_offload

    def unit(self, name: str) -> int:
        """Bytes of embeddings, head or root, gathered."""
        return sum_bytes(iter(self.ends[name])).total if self.work.uses_fsdp else 0

    @property
    def step_gradients(self) -> int:
        """Gradients in the optimizer's step; several ranks without FSDP put theirs into one buffer to sum them."""
        if self.is_offloaded:
            return 0
        is_copied = not self.work.uses_fsdp and self.work.num_ranks > 1
        return self.shard.adapters * (2 if is_copied else 1)

    def resident(self, with_training: bool) -> Parts:
        """What is on the GPU all the time, during training with what that adds."""
        shard = ParameterBytes() if self.is_offloaded else self.shard
        parts = {
            "codes": shard.codes,
            "scales": shard.scales,
            "full_precision": shard.full_precision,
            "embeddings": shard.embeddings,
            "adapters": shard.adapters,
        }
        if with_training:
            accumulates = self.work.num_micro_batches > 1
            parts["gradients"] = self.all_trained if accumulates else 0  # whole until the last micro-batch reduces them
            parts["optimizer"] = 0 if self.is_offloaded else self.optimizer
        return parts

    def gathered(self, unit_bytes: int, num_flat: int) -> int:
        """A gathered unit, with so many flat buffers of its size."""
        return unit_bytes * (1 + (num_flat if self.work.num_shards > 1 else 0))

    def gathered_end(self, name: str) -> int:
        """Embeddings or head while forward uses them, beyond `kept`; frozen, they are gathered into one buffer."""
        if not self.gathers_itself(name):
            return self.gathered(self.unit(name), 1) - (self.unit(name) if self.stays(name) else 0)
        if name == "head" and self.work.config.quant.embeddings is EmbeddingStorage.int8:  # dequantized, in pieces
            return self.work.shape.vocab_size * self.work.shape.hidden_size * self.work.compute_bytes + 2 * PIECE_BYTES
        shards = self.work.num_shards
        copied = self.unit(name) // shards if self.is_offloaded else 0  # the rank's own part, from the host
        return copied + (self.unit(name) if shards > 1 else 0)

    def is_frozen(self, name: str) -> bool:
        return all(tensor.part == "embeddings" for tensor in self.ends[name])

    def stays(self, name: str) -> bool:
        """Whether an end stays gathered from forward to backward."""
        return not self.work.reshards and not self.is_frozen(name)

    def gathers_itself(self, name: str) -> bool:
        """Whether the model gathers an end (causal_lm.py) and not FSDP."""
        config = self.work.config
        has_rows = name == "embeddings" and num_new_tokens(config) > 0
        return self.is_frozen(name) and config.task.name is TaskName.causal_lm and not has_rows

    def trained(self, name: str) -> int:
        """Bytes of the trained parameters of embeddings, head or root, whole."""
        return sum_bytes(iter(self.ends[name])).adapters

    def cast(self, name: str) -> int:
        """The copy in the compute dtype of an end that is trained in fp32."""
        size = self.work.compute_bytes
        return 0 if size == 4 else self.trained(name) * size // 4

    def sharded_gradient(self, name: str) -> int:
        """Bytes of the gradients of such a unit that a rank keeps."""
        return 0 if self.is_offloaded else sum_bytes(iter(self.ends[name]), self.work.num_shards).adapters

    @cached_property
    def layer_gradient(self) -> int:
        """Bytes of a layer's gradients that a rank keeps."""
        sharded = [sum_bytes(iter(layer), self.work.num_shards).adapters for layer in self.layers]
        return 0 if self.is_offloaded else sum(sharded) // len(sharded)

    @property
    def kept(self) -> int:
        """What stays gathered from its first use to the end of backward."""
        ends = sum(self.unit(name) for name in ("embeddings", "head") if self.stays(name))
        layers = 0 if self.work.reshards else len(self.layers) * self.gathered_layer
        return self.unit("root") + ends + layers


def _forward_moments(work: Workload, model: _Model, policies: Sequence[Policy]) -> Iterator[Parts]:
    """Parts beyond the resident ones when embeddings are looked up, in the last layer, and in the loss."""
    fsdp, layer = work.config.fsdp, model.gathered_layer
    saved = sum(_saved(work, policies)) + _offload_slots(work, policies)
    hidden = work.num_tokens * work.shape.hidden_size * work.compute_bytes
    dequantized = activations.dequantized_bytes(work)
    yield {
        "gathered": model.gathered(model.unit("root"), 1) + model.gathered_end("embeddings"),
        "activations": hidden,
        "workspace": WORKSPACE,
    }
    yield {
        "activations": saved + activations.forward_bytes(work, policies[-1]) - dequantized,
        "gathered": model.kept + model.gathered(layer, max(1, fsdp.forward_prefetch)),
        "dequantized": dequantized,
        "workspace": WORKSPACE,
    }
    yield {
        "activations": saved + hidden,
        # the last layer's flat buffer is still there
        "gathered": model.kept + model.gathered_end("head") + (layer if work.num_shards > 1 else 0),
        "dequantized": model.cast("head"),
        "loss": loss_bytes(work),
        "workspace": WORKSPACE,
    }


def _backward_moments(work: Workload, model: _Model, policies: Sequence[Policy]) -> Iterator[Parts]:
    """Parts beyond the resident ones in the backward of a trained head, of each layer, the last first, and at the end.

    Gradients are whole while they are made, and FSDP has a copy on its way to the other ranks until the next unit's is
    ready.
    """
    num_copies = 1 if work.uses_fsdp else 0
    num_flat = max(1, work.config.fsdp.backward_prefetch)
    saved = _saved(work, policies)
    extra = {policy: activations.backward_bytes(work, policy) for policy in set(policies)}
    dequantized, slots = activations.dequantized_bytes(work), _offload_slots(work, policies)
    gathered = model.kept + model.gathered(model.gathered_layer, num_flat)
    kept, reduced, leaving = sum(saved), 0, 0
    accumulates = work.num_micro_batches > 1  # then what is whole until the last is resident
    if is_trained(work):
        opened = 0 if model.stays("head") else model.unit("head")
        made = model.trained("head")
        yield {
            "activations": kept + slots,
            "gradients": made if has_chunks(work) and not accumulates else 0,  # of the chunks before
            "gathered": model.kept + opened + (model.gathered_layer if work.num_shards > 1 else 0),
            "dequantized": 2 * model.cast("head"),  # and its gradient
            "loss": loss_backward_bytes(work, made),
            "workspace": WORKSPACE,
        }
        reduced, leaving = model.sharded_gradient("head"), made * num_copies
    for index in reversed(range(len(policies))):
        yield {
            "activations": kept + slots + extra[policies[index]] - dequantized,
            "gradients": leaving + (1 + num_copies) * model.layer.adapters + (0 if accumulates else reduced),
            "gathered": gathered,
            "dequantized": dequantized,
            "workspace": WORKSPACE,
        }
        kept -= saved[index]
        reduced += model.layer_gradient
        leaving = 0
    tables = model.trained("embeddings") + model.trained("root")
    hidden = work.num_tokens * work.shape.hidden_size
    opened = 0 if model.is_frozen("embeddings") or model.stays("embeddings") else model.unit("embeddings")
    yield {
        "activations": hidden * (work.compute_bytes + 4 if tables else work.compute_bytes),
        "gradients": (1 + num_copies) * tables + (0 if accumulates else reduced),
        "gathered": model.kept + opened,
        "workspace": WORKSPACE,
    }


def _saved(work: Workload, policies: Sequence[Policy]) -> list[int]:
    """What each layer keeps on the GPU."""
    sizes = {policy: activations.saved_bytes(work, policy) for policy in set(policies)}
    return [sizes[policy] for policy in policies]


def _offload_slots(work: Workload, policies: Sequence[Policy]) -> int:
    num_offloaded = sum(policy is Policy.offload for policy in policies)
    return min(OFFLOAD_SLOTS, num_offloaded) * work.num_tokens * work.shape.hidden_size * work.compute_bytes


def _host(work: Workload, model: _Model, policies: Sequence[Policy]) -> tuple[Parts, int]:
    """Host memory by part, and how much of it is pinned."""
    pinned = 0 if work.config.model.weights is Weights.random else NUM_BUFFERS * PIECE_BYTES
    copied = math.ceil((model.shard.adapters + model.optimizer) / SLAB_BYTES) * SLAB_BYTES
    libraries = HOST_PYTHON + HOST_LAYER * len(policies)
    if work.is_cuda:
        libraries += HOST_CUDA + (HOST_NCCL if work.num_ranks > 1 else 0)
    # A signal has a checkpoint written also where none were asked for.
    parts = {"libraries": libraries, "reading": pinned, "checkpoint": copied, "adapter": model.all_trained}
    pinned += 0 if model.is_offloaded else copied
    if model.is_offloaded:  # each shard is pinned by itself, and torch rounds pinned blocks up to a power of two
        parts["parameters"] = sum(_pinned(tensor, work.num_shards) for tensor in model.tensors)
        parts["training"] = model.shard.adapters + model.optimizer
        pinned += parts["parameters"]
    offloaded = activations.host_bytes(work, policies)
    if offloaded:
        one = activations.host_bytes(work, [Policy.offload])
        parts["activations"] = offloaded // one * _next_power_of_two(one)
        pinned += parts["activations"]
    return parts, pinned


def _pinned(tensor: Tensor, num_shards: int) -> int:
    return _next_power_of_two(tensor.shard_bytes(num_shards))


def _next_power_of_two(number: int) -> int:
    return 1 << max(0, number - 1).bit_length()


def _join(resident: Parts, moment: Parts) -> Parts:
    return {name: resident.get(name, 0) + moment.get(name, 0) for name in {**resident, **moment}}


def _largest(moments: Iterator[Parts]) -> Parts:
    return max(moments, key=lambda parts: sum(parts.values()))
