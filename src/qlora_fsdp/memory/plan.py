"""The memory plan: predicted GPU bytes by part in each phase of a run, and host memory.

What is allocated when follows FSDP2 (torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py, 2.11 to 2.13): a group
is gathered into one flat buffer, which is copied out into its parameters, and goes then; but the next layer's is there
already (shard.py). Where parameters come from the host, in forward it lives until the next group has been gathered.
One shard in host memory is copied, and has no flat buffer. Frozen embeddings and a frozen head are gathered into one
buffer (causal_lm.py). Without FSDP nothing is gathered, and gradients stay where backward makes them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from qlora_fsdp.common.sizes import NUM_BUFFERS, PIECE_BYTES, SLAB_BYTES
from qlora_fsdp.config.schema import Weights
from qlora_fsdp.memory import activation_bytes
from qlora_fsdp.memory.activation_bytes import OFFLOAD_SLOTS, Policy
from qlora_fsdp.memory.loss_bytes import has_chunks, is_trained, loss_backward_bytes, loss_bytes
from qlora_fsdp.memory.model_bytes import ModelBytes, Parts
from qlora_fsdp.memory.parameter_bytes import Tensor
from qlora_fsdp.memory.workload import Workload

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

    def allocator(self, phase: str) -> int:
        """What torch's allocator holds beyond the tensors at the peak of a phase."""
        parts = self.phases[phase]
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

    def needed_in(self, phase: str) -> int:
        """GPU memory that a phase needs in all."""
        return self.tensors(phase) + self.allocator(phase) + self.libraries

    @property
    def needed(self) -> int:
        """GPU memory that the run needs in all."""
        return max(self.needed_in(phase) for phase in PHASES)


def make_plan(work: Workload, policies: Sequence[Policy]) -> MemoryPlan:
    """Predict the memory of a run whose layers have these activation policies."""
    return planner(work)(policies)


def planner(work: Workload) -> Callable[[Sequence[Policy]], MemoryPlan]:
    """`make_plan` of one run, for one set of policies after another: its parameters are counted once."""
    return partial(_plan, work, ModelBytes(work))


def _plan(work: Workload, model: ModelBytes, policies: Sequence[Policy]) -> MemoryPlan:
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


def _forward_moments(work: Workload, model: ModelBytes, policies: Sequence[Policy]) -> Iterator[Parts]:
    """Parts beyond the resident ones when embeddings are looked up, in and before the last layers, and in the loss."""
    saved, slots = _saved(work, policies), _offload_slots(work, policies)
    hidden = work.num_tokens * work.shape.hidden_size * work.compute_bytes
    dequantized = activation_bytes.dequantized_bytes(work)
    yield {
        "gathered": model.unit("root") + model.flat(model.unit("root")) + model.gathered_end("embeddings"),
        "activations": hidden,
        "workspace": WORKSPACE,
    }
    yield {
        "gathered": model.running_layer + model.flat(model.gathered_layer),
        "activations": sum(saved[:-1]) + slots + hidden,
        "workspace": WORKSPACE,
    }
    for num_after in range(min(work.config.fsdp.forward_prefetch + 1, len(policies))):
        index = len(policies) - 1 - num_after
        forward = activation_bytes.forward_bytes(work, policies[index]) - dequantized
        yield {
            "activations": sum(saved[: index + 1]) + slots + forward,
            "gathered": model.running_layer + model.ahead_in_forward(num_after),
            "dequantized": dequantized,
            "workspace": WORKSPACE,
        }
    opened: Parts = {
        "activations": sum(saved) + slots + hidden,
        "gathered": model.kept + model.gathered_end("head") + model.deferred_flat,
        "workspace": WORKSPACE,
    }
    yield opened
    yield {
        **opened,
        "gathered": opened["gathered"] - model.freed_flat("head"),
        "dequantized": model.cast("head"),
        "loss": loss_bytes(work),
    }


def _backward_moments(work: Workload, model: ModelBytes, policies: Sequence[Policy]) -> Iterator[Parts]:
    """Parts beyond the resident ones in the backward of a trained head, of each layer, the last first, and at the end.

    Gradients are whole while they are made, and FSDP has a copy on its way to the other ranks until the next unit's is
    ready.
    """
    num_copies = 1 if work.uses_fsdp else 0
    saved = _saved(work, policies)
    extra = {policy: activation_bytes.backward_bytes(work, policy) for policy in set(policies)}
    dequantized, slots = activation_bytes.dequantized_bytes(work), _offload_slots(work, policies)
    kept, reduced, leaving = sum(saved), 0, 0
    accumulates = work.num_micro_batches > 1  # then what is whole until the last is resident
    if is_trained(work):
        opened = 0 if model.stays("head") else model.unit("head")
        made = model.trained("head")
        yield {
            "activations": kept + slots,
            "gradients": made if has_chunks(work) and not accumulates else 0,  # of the chunks before
            "gathered": model.kept + opened + model.ahead_in_backward(len(policies)),
            "dequantized": 2 * model.cast("head"),  # and its gradient
            "loss": loss_backward_bytes(work, made),
            "workspace": WORKSPACE,
        }
        reduced, leaving = model.sharded_gradient("head"), made * num_copies
    for index in reversed(range(len(policies))):
        yield {
            "activations": kept + slots + extra[policies[index]] - dequantized,
            "gradients": leaving + (1 + num_copies) * model.layer.adapters + (0 if accumulates else reduced),
            "gathered": model.running_layer + model.ahead_in_backward(index),
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
    sizes = {policy: activation_bytes.saved_bytes(work, policy) for policy in set(policies)}
    return [sizes[policy] for policy in policies]


def _offload_slots(work: Workload, policies: Sequence[Policy]) -> int:
    num_offloaded = sum(policy is Policy.offload for policy in policies)
    return min(OFFLOAD_SLOTS, num_offloaded) * work.num_tokens * work.shape.hidden_size * work.compute_bytes


def _host(work: Workload, model: ModelBytes, policies: Sequence[Policy]) -> tuple[Parts, int]:
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
    offloaded = activation_bytes.host_bytes(work, policies)
    if offloaded:
        one = activation_bytes.host_bytes(work, [Policy.offload])
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
