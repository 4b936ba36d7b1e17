"""What the plan knows of a model: its parameters, and what a trace of it on meta found (tracing/trace.py).

A trace is made of one set of modules and for one shape of a micro-batch. The plan asks for it through `TracedModel`,
which answers for any: so it can try other settings without importing torch itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from qlora_fsdp.config.specs import BatchSpec, ModuleSpec
from qlora_fsdp.memory.policy import Policy


@dataclass(frozen=True)
class Operations:
    """The work that a pass gives a GPU.

    Attributes:
        products: floating-point operations of matrix products, large enough that the factors' bytes do not matter.
        fp8: the same of products in fp8.
        attention: floating-point operations of attention.
        moved: bytes that everything else reads and writes: norms, gates, dequantization, and products of low rank.
    """

    products: float = 0.0
    fp8: float = 0.0
    attention: float = 0.0
    moved: float = 0.0

    def __add__(self, other: Operations) -> Operations:
        return Operations(
            self.products + other.products,
            self.fp8 + other.fp8,
            self.attention + other.attention,
            self.moved + other.moved,
        )

    def __mul__(self, number: int) -> Operations:
        return Operations(self.products * number, self.fp8 * number, self.attention * number, self.moved * number)


@dataclass(frozen=True)
class LayerUse:
    """Memory of a transformer layer for a micro-batch under one activation policy: GPU bytes, but for `host`.

    Attributes:
        saved: what it keeps from forward to backward, its input included.
        host: the tensors that it keeps in pinned host memory: its input, and attention's results.
        keeps_input: whether `saved` has its input. The first layer's may not: it needs no gradient.
        forward: most that forward takes beyond `saved`, its output included.
        backward: most that backward takes beyond `saved`, the gradients of its parameters included.
        in_forward: what forward asks of the GPU.
        in_backward: what backward does, with what is computed again.
    """

    saved: int
    host: tuple[int, ...]
    keeps_input: bool
    forward: int
    backward: int
    in_forward: Operations
    in_backward: Operations


@dataclass(frozen=True)
class EndsUse:
    """Bytes of everything around the transformer layers for a micro-batch: embeddings, masks, head and loss.

    Attributes:
        hidden: the hidden states between two layers.
        shared: what all layers use, from the first forward to the last backward: positions, rotary tables, masks.
        lookup: most that is taken before the first layer.
        loss: most that norm, head and loss take in forward beyond `shared` and the last hidden states.
        loss_backward: most that their backward takes beyond `shared`, the gradients of parameters included.
        lookup_backward: the same of the backward of the embeddings.
        operations: what embeddings, head and loss ask of the GPU, forward and backward.
    """

    hidden: int
    shared: int
    lookup: int
    loss: int
    loss_backward: int
    lookup_backward: int
    operations: Operations


@dataclass(frozen=True)
class ParameterSize:
    """A parameter.

    Attributes:
        part: what the plan counts it as: `codes` and `scales` of quantized linear layers, `embeddings` for input
            embeddings and output head where they are frozen, `adapters` for everything that is trained (in fp32),
            `full_precision` for the rest.
        num_rows: size of dim 0, which ranks split.
        row_bytes: bytes of one index of it.
    """

    part: str
    num_rows: int
    row_bytes: int

    def shard_bytes(self, num_shards: int) -> int:
        """Bytes of one shard of `num_shards`: FSDP2 pads the last one to the size of the others."""
        return -(self.num_rows // -num_shards) * self.row_bytes


@dataclass(frozen=True)
class LayerKind:
    """Transformer layers that are alike.

    Attributes:
        tensors: the parameters of one of them.
        largest_weight: bytes of the largest of them in the dtype of products.
        ahead: most bytes that a weight takes which is dequantized before it is used.
        dequantized: bytes of all its weights that are dequantized for products, but not of experts.
        num_quantized: weights that are quantized: of linear layers, and of all experts together.
    """

    tensors: tuple[ParameterSize, ...]
    largest_weight: int
    ahead: int
    dequantized: int
    num_quantized: int


@dataclass(frozen=True)
class ModelParts:
    """A model's parameters, and how it is cut into FSDP units (sharding/shard.py).

    Attributes:
        kinds: the kinds of its transformer layers.
        layers: the kind of each layer, in order.
        ends: the parameters outside the layers, of each unit: `embeddings`, `head` and `root`; and those of the
            `per_layer_tables`, which are units each (sharding/shard.py).
        gathered_by_model: those of `embeddings` and `head` that the model gathers itself (model/tasks/causal_lm.py).
        num_parameters: parameters of the base model, as its authors count them.
        num_quantized: weights that are quantized.
        cached_bytes: what a cache keeps of one token: keys and values of all layers.
        has_experts: whether some of its weights are those of all experts of a layer.
        held_whole: weights in the compute dtype, one of each shape. A rank holds its rows of one at a time while it
            loads, until they are quantized (`Format.has_global_scale`).
    """

    kinds: tuple[LayerKind, ...]
    layers: tuple[int, ...]
    ends: Mapping[str, tuple[ParameterSize, ...]]
    gathered_by_model: frozenset[str]
    num_parameters: int
    num_quantized: int
    cached_bytes: int = 0
    has_experts: bool = False
    held_whole: tuple[ParameterSize, ...] = ()


class TracedModel(Protocol):
    """A model that can be planned with any modules and for any micro-batch."""

    def parts(self, modules: ModuleSpec) -> ModelParts:
        """The parameters of these modules."""

    def notes(self, modules: ModuleSpec) -> tuple[str, ...]:
        """What a run with these modules would log about the model, such as unquantized experts."""

    def layer_use(
        self,
        modules: ModuleSpec,
        batch: BatchSpec,
        kind: int,
        policy: Policy,
        is_first: bool = False,
        tile_tokens: int | None = None,
    ) -> LayerUse:
        """Memory of one layer of a kind.

        Args:
            modules: what the model is made of.
            batch: the micro-batch.
            kind: the index of the layer's kind in `ModelParts.kinds`.
            policy: what becomes of its activations.
            is_first: whether no layer before it is trained.
            tile_tokens: tokens that MLPs, experts and norms compute at a time; None for all.
        """

    def ends_use(self, modules: ModuleSpec, batch: BatchSpec, head_in_pieces: bool = False) -> EndsUse:
        """Memory of everything around the layers; `head_in_pieces` as `HeadLoss.in_pieces`."""

    def why_not_sliced(self, batch: BatchSpec) -> str | None:
        """Why ranks can't share the sequences of such a micro-batch; None if they can."""
