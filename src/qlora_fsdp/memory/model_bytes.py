"""Bytes of the parts of a model: what a rank holds of them all the time, and what FSDP's units are when gathered."""

from __future__ import annotations

from functools import cached_property

from qlora_fsdp.common.sizes import PIECE_BYTES
from qlora_fsdp.config.schema import EmbeddingStorage, TaskName
from qlora_fsdp.memory.parameter_bytes import (
    ParameterBytes,
    end_tensors,
    layer_tensors,
    num_new_tokens,
    optimizer_bytes,
    sum_bytes,
)
from qlora_fsdp.memory.workload import Workload

Parts = dict[str, int]  # bytes by part


class ModelBytes:
    """Bytes of the model's FSDP units, and of what a rank holds all the time.

    Attributes:
        work: what the plan is for.
        layers: tensors of each decoder layer.
        ends: tensors of the embeddings, the head and the root.
        tensors: all of these.
        shard: a rank's part, by kind of tensor.
        layer: the largest layer, whole, by kind of tensor.
        gathered_layer: its bytes where FSDP gathers layers, else 0.
        all_trained: bytes of all trained parameters, whole.
        optimizer: bytes of a rank's optimizer state.
        is_offloaded: parameters, gradients and optimizer state are in host memory.
    """

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

    def flat(self, unit_bytes: int) -> int:
        """The buffer that a unit is gathered into, before it is copied out; one shard needs none."""
        return unit_bytes if self.work.num_shards > 1 else 0

    @property
    def running_layer(self) -> int:
        """`kept`, and the layer that runs where it is not kept."""
        return self.kept + (self.gathered_layer if self.work.reshards else 0)

    def ahead_in_forward(self, num_after: int) -> int:
        """Flat buffers while a layer runs forward that `num_after` others follow."""
        if not self.work.reshards:  # `kept` counts the layers to come, whose flat buffers are as large
            return self.deferred_flat
        num_ahead = self.work.config.fsdp.forward_prefetch
        num_told = num_ahead if num_ahead > 1 or not self.is_offloaded else 0  # shard.py's; FSDP2's comes in its turn
        has_head = num_after < num_told and not self.gathers_itself("head")
        next_layers = min(num_told, num_after) * self.flat(self.gathered_layer)
        return self.deferred_flat + next_layers + (self.flat(self.unit("head")) if has_head else 0)

    def ahead_in_backward(self, num_before: int) -> int:
        """Flat buffers while a unit runs backward before which there are `num_before` layers."""
        num_flat = min(self.work.config.fsdp.backward_prefetch, num_before)
        return num_flat * self.flat(self.gathered_layer) if self.work.reshards else 0

    @property
    def deferred_flat(self) -> int:
        """A layer's own flat buffer, which FSDP2 frees with the next gather where streams of its own gather."""
        return self.flat(self.gathered_layer) if self.is_offloaded else 0

    def gathered_end(self, name: str) -> int:
        """Embeddings or head while forward uses them, beyond `kept`; frozen, they are gathered into one buffer."""
        if not self.gathers_itself(name):
            return self.flat(self.unit(name)) + (0 if self.stays(name) else self.unit(name))
        if name == "head" and self.work.config.quant.embeddings is EmbeddingStorage.int8:  # dequantized, in pieces
            return self.work.shape.vocab_size * self.work.shape.hidden_size * self.work.compute_bytes + 2 * PIECE_BYTES
        shards = self.work.num_shards
        copied = self.unit(name) // shards if self.is_offloaded else 0  # the rank's own part, from the host
        return copied + (self.unit(name) if shards > 1 else 0)

    def freed_flat(self, name: str) -> int:
        """The flat buffer of embeddings or head, where it is freed before they are used."""
        return 0 if self.gathers_itself(name) or self.is_offloaded else self.flat(self.unit(name))

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
