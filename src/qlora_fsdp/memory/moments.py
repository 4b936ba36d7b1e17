"""The moments of forward and backward: what each needs on a GPU beyond the resident parts. Part of plan.py.

What is gathered at which moment follows FSDP2 (torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py, torch 2.11 to
2.13). It gathers a unit into a flat buffer and copies the parameters out of it (memory/model_bytes.py). How long the
flat buffer lives depends on where the shards are:

- Shards on the GPU are gathered asynchronously (sharding/shard.py). A unit's flat buffer is freed after the copy. By
  then the flat buffer of the next unit exists, because that unit is gathered ahead.
- Shards in host memory are gathered on streams of FSDP2's own. In forward a flat buffer lives on until the next unit
  has been gathered. A single shard needs no flat buffer: it is copied to the GPU.
- Codes of layers that are read from the other GPUs (sharding/peer_codes.py) have buffers, which count as resident.
- Frozen embeddings and a frozen head are gathered by the model (model/tasks/causal_lm.py), not by FSDP, into one buffer
  each. Where GPUs can read them from the others (sharding/peer_ends.py), embeddings are not gathered, and a head is
  resident.
- Without FSDP nothing is gathered, and gradients stay where backward makes them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate

from qlora_fsdp.common.sizes import NUM_AHEAD
from qlora_fsdp.memory.model_bytes import BytesByPart, ModelBytes
from qlora_fsdp.memory.traced import LayerUse
from qlora_fsdp.memory.workload import Workload

WORKSPACE = 64 * 2**20  # both workspaces of cuBLAS, in torch's own pool: of forward's thread and of backward's


class DequantizedWeights:
    """The dequantized weights that are there at a time (layers/quantized/weight_reader.py).

    Args:
        work: the run that is planned.
        num_kept: layers, the last ones, whose weights are kept; None if no weight is even dequantized ahead.

    Attributes:
        held: bytes of those that stay until the run ends, and are there at every time.
        kept: bytes by layer of those that stay from forward to backward.
        ahead: the most bytes by layer of a weight that is there before it is used.
    """

    def __init__(self, work: Workload, num_kept: int | None = None) -> None:
        self.held = 0
        self.kept: list[int] = []
        self.ahead: list[int] = []
        self._is_held: list[bool] = []
        first_kept = len(work.layers) - (num_kept or 0)
        for index, layer in enumerate(work.layers):
            is_kept = index >= first_kept
            is_held = is_kept and work.holds_dequantized
            if is_held:
                self.held += layer.dequantized
            self.kept.append(layer.dequantized if is_kept and not is_held else 0)
            self.ahead.append(layer.ahead if num_kept is not None and not is_held else 0)
            self._is_held.append(is_held)
        self.is_freed = work.uses_fsdp and work.reshards  # each layer, after its forward

    def kept_before(self, index: int) -> int:
        """Bytes that are kept of the layers before one."""
        return sum(self.kept[:index])

    def at(self, index: int, own: int) -> int:
        """Bytes while a layer runs, forward or backward, whose products use `own` bytes at a time."""
        own = 0 if self._is_held[index] else max(own, self.kept[index])
        return self.kept_before(index) + own + self.ahead[index]

    def at_turn(self) -> int:
        """Bytes between forward and backward. The weight that comes first then is there, unless its layer was freed."""
        is_there = not self.kept[-1] and not self.is_freed
        return sum(self.kept) + (self.ahead[-1] if is_there else 0)


def forward_moments(
    work: Workload, model: ModelBytes, uses: Sequence[LayerUse], weights: DequantizedWeights
) -> Iterator[BytesByPart]:
    """What each moment of forward needs beyond the resident parts.

    `ModelBytes` says what is gathered: `kept` stays from forward to backward; `running_layer` is that and the layer
    that runs; `gathered_end` is what embeddings or head take while they are used; `flat` is the buffer that a unit is
    gathered into; and `deferred_flat` is such a buffer that outlives its copy.

    Activations grow from layer to layer, so the peak is in one of the last layers. The very last has the most
    activations, and those before it have more layers gathered ahead. So all of these are counted.

    Args:
        work: the run that is planned.
        model: the bytes of its parameters.
        uses: what each layer takes.
        weights: the weights that are dequantized at each moment.
    """
    ends = work.ends
    # The model's own code holds the first layer's input until forward ends, whether that layer keeps it or not.
    held = 0 if uses[0].keeps_input and not uses[0].host else ends.hidden
    leaving = max(sum(use.host) for use in uses)  # a layer's input and attention's results, on their way to the host
    always = ends.shared + held + leaving
    # The embeddings are looked up.
    yield {
        "gathered": model.unit("root") + model.flat(model.unit("root")) + model.gathered_end("embeddings"),
        "activations": ends.lookup,
        "workspace": WORKSPACE,
    }
    # The last layer is copied out of its flat buffer.
    yield {
        "gathered": model.running_layer + model.flat(model.gathered_layer),
        "activations": always + sum(use.saved for use in uses[:-1]) + ends.hidden,
        "dequantized": weights.kept_before(len(uses) - 1),
        "workspace": WORKSPACE,
    }
    # One of the last layers runs.
    for num_after in range(min(1 + NUM_AHEAD, len(uses))):
        index = len(uses) - 1 - num_after
        # A layer's peak in the trace includes a dequantized weight, which the plan shows as a part of its own.
        dequantized = min(work.layers[index].largest_weight, uses[index].forward)
        yield {
            "activations": always + sum(use.saved for use in uses[: index + 1]) + uses[index].forward - dequantized,
            "gathered": model.running_layer + model.ahead_in_forward(num_after),
            "dequantized": weights.at(index, dequantized),
            "workspace": WORKSPACE,
        }
    # The head is gathered.
    at_head: BytesByPart = {
        "activations": always + sum(use.saved for use in uses) + ends.hidden,
        "gathered": model.kept + model.gathered_end("head") + model.deferred_flat,
        "dequantized": weights.at_turn(),
        "workspace": WORKSPACE,
    }
    yield at_head
    # The loss is computed.
    yield {
        **at_head,
        "gathered": at_head["gathered"] - model.freed_flat("head"),
        "loss": ends.loss,
    }


def backward_moments(
    work: Workload, model: ModelBytes, uses: Sequence[LayerUse], gradients_stay: bool, weights: DequantizedWeights
) -> Iterator[BytesByPart]:
    """What each moment of backward needs beyond the resident parts.

    Backward makes whole gradients. FSDP copies a unit's gradients to send them, and the copy lives until the next
    unit's are ready. Then the rank keeps only its shard of them.

    Args:
        work: the run that is planned.
        model: the bytes of its parameters.
        uses: what each layer takes.
        gradients_stay: whether the resident parts count gradients already. They do where gradients live longer than a
            backward: those of several micro-batches are summed whole, and those of a CUDA graph keep their place.
        weights: the weights that are dequantized at each moment.
    """
    num_copies = 1 if work.uses_fsdp else 0
    ends = work.ends
    kept = sum(use.saved for use in uses)  # activations that backward has not used yet
    # The loss runs backward, and with it a trained head.
    made = model.trained("head")
    yield {
        "activations": ends.shared + max(size for use in uses for size in (0, *use.host[-1:])) + kept,
        "gathered": model.kept
        + (0 if model.is_frozen("head") or model.stays("head") else model.unit("head"))
        + model.ahead_in_backward(len(uses)),
        "loss": ends.loss_backward,
        "dequantized": weights.at_turn(),
        "workspace": WORKSPACE,
    }
    reduced = model.sharded_gradient("head")  # gradients that this rank keeps so far
    leaving = made * num_copies  # the copy of the head's gradients that is being sent
    # While a layer runs backward, an offloaded input of a layer before it comes back already (model/input_offload.py).
    returning = [0, *accumulate((sum(use.host[:1]) for use in uses), max)]
    # Each layer runs backward, the last one first.
    for index in reversed(range(len(uses))):
        own = model.layer_adapters[index]  # its whole gradients, which the peak in the trace includes
        beyond = max(0, uses[index].backward - own)
        dequantized = min(work.layers[index].largest_weight, beyond)
        yield {
            "activations": ends.shared + sum(uses[index].host) + returning[index] + kept + beyond - dequantized,
            "gradients": leaving + (1 + num_copies) * own + (0 if gradients_stay else reduced),
            "gathered": model.running_layer + model.ahead_in_backward(index),
            "dequantized": weights.at(index, dequantized),
            "workspace": WORKSPACE,
        }
        kept -= uses[index].saved
        reduced += model.layer_gradient
        leaving = 0
    # The trained parameters of the embeddings and the root get their gradients.
    tables = model.trained("embeddings") + model.trained("root")
    embedding_bytes = 0 if model.is_frozen("embeddings") or model.stays("embeddings") else model.unit("embeddings")
    yield {
        "activations": ends.shared + max(ends.hidden, ends.lookup_backward - tables),
        "gradients": (1 + num_copies) * tables + (0 if gradients_stay else reduced),
        "gathered": model.kept + embedding_bytes,
        "workspace": WORKSPACE,
    }
