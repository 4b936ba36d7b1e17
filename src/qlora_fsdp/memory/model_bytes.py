"""Bytes of a model's parameters on one rank: what it holds all the time, and what FSDP gathers while layers run.

FSDP2 splits the model into units (sharding/shard.py): each transformer layer, the embeddings, the head, and the root,
to which everything else belongs. Between uses a rank holds one shard of each unit. To use a unit, FSDP2 gathers all its
shards into one flat buffer, copies that out into whole parameters, and frees the buffer.

The embeddings and the head are called the ends of the model here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from itertools import zip_longest

from qlora_fsdp.common.sizes import MIN_8BIT_ELEMENTS, NUM_AHEAD, PIECE_BYTES
from qlora_fsdp.config.schema import EmbeddingStorage, Optimizer
from qlora_fsdp.memory.traced import ParameterSize
from qlora_fsdp.memory.workload import Workload

BytesByPart = dict[str, int]  # the keys are those of memory/show.PARTS
BLOCK_8BIT = 256  # elements of its 8-bit state that share one fp32 scale

FLOAT32_BYTES = 4


@dataclass(frozen=True)
class ParameterBytes:
    """Bytes by kind of parameter, of a layer or of a whole model, whole or of one shard.

    Attributes:
        codes: quantized weights of linear layers.
        scales: the scales of these codes, with the second level of double quantization.
        full_precision: norms, biases, and linear layers that are not quantized.
        embeddings: input embeddings and output head, where they are frozen.
        adapters: everything that is trained, which is in fp32.
    """

    codes: int = 0
    scales: int = 0
    full_precision: int = 0
    embeddings: int = 0
    adapters: int = 0

    @property
    def total(self) -> int:
        return sum(getattr(self, f.name) for f in fields(self))


def sum_bytes(tensors: Iterable[ParameterSize], num_shards: int = 1) -> ParameterBytes:
    """The tensors' bytes in one of `num_shards` shards."""
    totals: dict[str, int] = {}
    for tensor in tensors:
        totals[tensor.part] = totals.get(tensor.part, 0) + tensor.shard_bytes(num_shards)
    return ParameterBytes(**totals)


def optimizer_bytes(tensors: Iterable[ParameterSize], optimizer: Optimizer, num_shards: int) -> int:
    """Bytes that the optimizer keeps of one shard of the trained tensors. Pages count as if they were on the GPU."""
    trained = [tensor for tensor in tensors if tensor.part == "adapters"]
    if optimizer is Optimizer.adafactor:
        return sum(_row_and_column_bytes(tensor, num_shards) for tensor in trained)
    return sum(_moment_bytes(tensor, optimizer, num_shards) for tensor in trained)


def _moment_bytes(tensor: ParameterSize, optimizer: Optimizer, num_shards: int) -> int:
    num_elements = tensor.shard_bytes(num_shards) // FLOAT32_BYTES
    whole = tensor.shard_bytes(1) // FLOAT32_BYTES
    num_moments, bits = optimizer.moments
    if bits == 32 or whole < MIN_8BIT_ELEMENTS:
        return num_elements * num_moments * FLOAT32_BYTES
    num_blocks = -(num_elements // -BLOCK_8BIT)
    return num_moments * (num_elements + num_blocks * FLOAT32_BYTES)


def _row_and_column_bytes(tensor: ParameterSize, num_shards: int) -> int:
    """Of a matrix a mean for each of a shard's rows and for each column; a vector's elements are such rows."""
    num_rows = -(tensor.num_rows // -num_shards)
    is_vector = tensor.row_bytes == FLOAT32_BYTES
    return num_rows * FLOAT32_BYTES + (0 if is_vector else tensor.row_bytes)


class ModelBytes:
    """Bytes of the model's FSDP units, whole and split.

    Attributes:
        layers: the tensors of each transformer layer.
        layer_adapters: bytes of what is trained of each transformer layer, whole.
        ends: the tensors of `embeddings`, `head`, `per_layer_tables` and `root`.
        whole_ends: their bytes, by kind.
        tensors: all of these.
        shard: a rank's part of all tensors, by kind.
        gathered_layer: its bytes that FSDP gathers; 0 if FSDP takes no part.
        code_buffers: bytes of whole codes, beyond the shard, which are never freed (sharding/peer_weights.py).
        held_head: bytes of a whole head, beyond the shard, that every rank has all the time (sharding/peer_weights.py).
        all_trained: bytes of all trained parameters, whole.
        optimizer: bytes of a rank's optimizer state.
        is_offloaded: whether parameters, gradients and optimizer state are in host memory.
        held_to_quantize: most bytes of a rank's rows of one weight that are held until they are quantized.
    """

    def __init__(self, work: Workload) -> None:
        self.work = work
        self.parts = work.parts
        self.layers = [kind.tensors for kind in work.layers]
        self.ends = self.parts.ends
        self.whole_ends = {name: sum_bytes(tensors) for name, tensors in self.ends.items()}
        self.tensors = [tensor for unit in (*self.layers, *self.ends.values()) for tensor in unit]
        self.shard = sum_bytes(self.tensors, work.num_shards)
        kinds = [sum_bytes(kind.tensors) for kind in self.parts.kinds]
        codes = [work.read_codes(kind.tensors) for kind in self.parts.kinds]
        self.layer_adapters = [kinds[kind].adapters for kind in self.parts.layers]
        self.gathered_layer = 0
        if work.uses_fsdp:
            self.gathered_layer = max(kinds[kind].total - sum(codes[kind]) for kind in self.parts.layers)
        self.code_buffers = self._code_buffers([codes[kind] for kind in self.parts.layers])
        self.held_head = 0
        if work.reads_end("head"):
            self.held_head = self._beyond_shard(self.whole_ends["head"].total)
        self.all_trained = sum_bytes(self.tensors).adapters
        self.optimizer = optimizer_bytes(self.tensors, work.config.optim.name, work.num_shards)
        self.is_offloaded = work.config.fsdp.cpu_offload
        held_whole = [weight.shard_bytes(work.num_shards) for weight in self.parts.held_whole]
        self.held_to_quantize = max(held_whole, default=0)

    def _code_buffers(self, layers: Sequence[Sequence[int]]) -> int:
        """Bytes of all sets of buffers, given the bytes of each layer's codes. A set has room for all its layers.

        Layers that stay gathered have no set: all of their codes lie around the shard.
        """
        if not self.work.reshards:
            return self._beyond_shard(sum(map(sum, layers)))
        num_sets = min(1 + NUM_AHEAD, len(layers))
        sets = [zip_longest(*layers[index::num_sets], fillvalue=0) for index in range(num_sets)]
        return sum(max(of_place) for of_set in sets for of_place in of_set)

    def _beyond_shard(self, num_bytes: int) -> int:
        """Bytes that other ranks hold, of tensors of which each rank holds equally many."""
        return num_bytes - num_bytes // self.work.num_shards

    # What a rank holds all the time.

    def resident(self, with_training: bool) -> BytesByPart:
        """Bytes that are on the GPU all the time: of parameters and, `with_training`, of what training adds."""
        shard = ParameterBytes() if self.is_offloaded else self.shard
        parts = {
            "codes": shard.codes,
            "scales": shard.scales,
            "full_precision": shard.full_precision,
            "embeddings": shard.embeddings,
            "adapters": shard.adapters,
            "gathered": self.code_buffers + self.held_head,
        }
        if with_training:
            # With several micro-batches per step, gradients are whole on every rank until the last one reduces them.
            accumulates = self.work.num_micro_batches > 1
            parts["gradients"] = self.all_trained if accumulates else 0
            parts["optimizer"] = 0 if self.is_offloaded else self.optimizer
        return parts

    @property
    def step_gradients(self) -> int:
        """Gradients during the optimizer's step. Several ranks without FSDP also copy theirs into one buffer to sum."""
        if self.is_offloaded:
            return 0
        is_copied = not self.work.uses_fsdp and self.work.num_ranks > 1
        return self.shard.adapters * (2 if is_copied else 1)

    @cached_property
    def layer_gradient(self) -> int:
        """Bytes of a layer's gradients that a rank keeps once they are reduced."""
        sharded = [sum_bytes(layer, self.work.num_shards).adapters for layer in self.layers]
        return 0 if self.is_offloaded else sum(sharded) // len(sharded)

    def sharded_gradient(self, name: str) -> int:
        """Bytes of the gradients of embeddings, head or root that a rank keeps once they are reduced."""
        return 0 if self.is_offloaded else sum_bytes(self.ends[name], self.work.num_shards).adapters

    # What is gathered.

    def unit(self, name: str) -> int:
        """Bytes of embeddings, head or root when they are gathered."""
        return self.whole_ends[name].total if self.work.uses_fsdp else 0

    def flat(self, unit_bytes: int) -> int:
        """The flat buffer that a unit of this size is gathered into. A single shard needs none."""
        return unit_bytes if self.work.num_shards > 1 else 0

    @cached_property
    def kept(self) -> int:
        """Bytes that stay gathered from their first use to the end of backward."""
        ends = sum(self.unit(name) for name in ("embeddings", "head") if self.stays(name))
        layers = 0 if self.work.reshards else len(self.layers) * self.gathered_layer
        return self.unit("root") + ends + layers

    @cached_property
    def running_layer(self) -> int:
        """`kept`, and the layer that runs if it is not counted there."""
        return self.kept + (self.gathered_layer if self.work.reshards else 0)

    def ahead_in_forward(self, num_after: int) -> int:
        """Flat buffers that exist while a layer runs forward which is followed by `num_after` others."""
        if not self.work.reshards:  # `kept` counts the layers to come, whose flat buffers are as large
            return self.deferred_flat
        num_told = 0 if self.is_offloaded else NUM_AHEAD  # with offload, FSDP2's own gather is later
        has_head = num_after < num_told and not self.is_gathered_by_model("head")
        next_layers = min(num_told, num_after) * self.flat(self.gathered_layer)
        return self.deferred_flat + next_layers + (self.flat(self.unit("head")) if has_head else 0)

    def ahead_in_backward(self, num_before: int) -> int:
        """Flat buffers that exist while a unit runs backward before which there are `num_before` layers."""
        num_flat = min(NUM_AHEAD, num_before)
        return num_flat * self.flat(self.gathered_layer) if self.work.reshards else 0

    @property
    def deferred_flat(self) -> int:
        """A layer's own flat buffer, if it outlives the copy.

        With offload FSDP2 gathers on streams of its own, and frees the buffer only with the next gather.
        """
        return self.flat(self.gathered_layer) if self.is_offloaded else 0

    def gathered_end(self, name: str) -> int:
        """Embeddings or head while forward uses them, beyond `kept`. A frozen end is gathered into a single buffer.

        Of embeddings that are read, the rows of two ranks exist beside those that have been found.
        """
        if self.work.reads_end(name):
            row_bytes = sum(tensor.row_bytes for tensor in self.ends[name])
            return 2 * self.work.num_tokens * row_bytes if name == "embeddings" else 0
        if not self.is_gathered_by_model(name):
            return self.flat(self.unit(name)) + (0 if self.stays(name) else self.unit(name))
        if name == "head" and self.work.config.quant.embeddings is EmbeddingStorage.int8:
            return 2 * PIECE_BYTES  # it is gathered in pieces; what these are dequantized to counts as loss
        shards = self.work.num_shards
        copied = self.unit(name) // shards if self.is_offloaded else 0  # the rank's own part, from the host
        return copied + (self.unit(name) if shards > 1 else 0)

    def freed_flat(self, name: str) -> int:
        """The flat buffer of embeddings or head, if it is freed before they are used."""
        return 0 if self.is_gathered_by_model(name) or self.is_offloaded else self.flat(self.unit(name))

    # Properties of the ends.

    def is_frozen(self, name: str) -> bool:
        return all(tensor.part == "embeddings" for tensor in self.ends[name])

    def stays(self, name: str) -> bool:
        """Whether an end stays gathered from forward to backward."""
        return not self.work.reshards and not self.is_frozen(name)

    def is_gathered_by_model(self, name: str) -> bool:
        """Whether the model gathers an end by itself (model/tasks/causal_lm.py), without FSDP."""
        return name in self.parts.gathered_by_model

    def trained(self, name: str) -> int:
        """Bytes of the trained parameters of embeddings, head or root, whole."""
        return self.whole_ends[name].adapters
