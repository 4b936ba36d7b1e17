"""The memory plan: how many bytes a run will need on each GPU and each host, predicted before anything is allocated.

The plan has four phases. A run loads its weights (`load`); then every optimizer step has a `forward`, a `backward` and
the update of the weights (`step`). Where the model writes answers first, `answers` is a fifth. The memory of a phase
changes from moment to moment: embeddings are looked up, a layer runs, the loss is computed. For each moment the plan
adds up bytes by part. Some parts are there all the time, and are called `resident`: the rank's shard of the
parameters, and the optimizer's state. Others come and go: gathered layers, a dequantized weight, activations,
gradients. The largest moment is the peak of its phase, and the largest phase decides whether a run fits.

Activations wait for backward, and how many do depends on each layer's policy (memory/policy.py): a layer may keep all
of them, or compute some or all of them again. How many bytes that makes is read off the model itself, which is traced
on meta (tracing/trace.py). memory/search.py makes many plans of a run and picks one.

To the tensors' bytes the plan adds two more: what torch's allocator holds beyond the tensors, and what CUDA and NCCL
take outside the allocator.

docs/plan-validation.md compares the plan with what runs on GPUs took.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

from qlora_fsdp.common.sizes import (
    NUM_AHEAD,
    NUM_BUFFERS,
    PIECE_BYTES,
    SLAB_BYTES,
    next_power_of_two,
    num_lengths,
    offload_buffer_bytes,
    round_up,
)
from qlora_fsdp.config.schema import EmbeddingStorage, Weights
from qlora_fsdp.memory.model_bytes import BytesByPart, ModelBytes
from qlora_fsdp.memory.policy import Policy
from qlora_fsdp.memory.traced import LayerUse
from qlora_fsdp.memory.workload import SPARE_BYTES, Workload, generation_bytes, is_captured, other_adapter_bytes

GIB = 2**30
MIB = 2**20
PHASES = ("load", "forward", "backward", "step")

# Measured on H200s with torch 2.11 (docs/plan-validation.md).
LOAD_STAGING = 80 * MIB  # pieces of weights on their way from the host to the shards
# What the eigenvectors of a symmetric matrix of n x n take beside their source: n x n floats, in torch on an H200.
EIGENVECTOR_MATRICES = 7
CUDA_CONTEXT = 770 * MIB  # the driver and the kernels' code, outside torch's pool
NCCL = 830 * MIB  # outside torch's pool, with several ranks
NCCL_ALONE = 530 * MIB  # the same for a single rank that uses FSDP
GRAPH_LAYER = 460 * 2**10  # of each CUDA graph but the first, for a transformer layer: what its kernels are called with
NCCL_SLICES = 400 * MIB  # of a second communicator, for ranks that share sequences; assumed, not measured yet
# What torch's allocator holds beyond the tensors, with expandable segments: 3 % of what is allocated and freed in a
# step, and 128 MiB because it has a range of memory for each stream and size class, whose last page is partly used.
FRAGMENTATION = 0.03
LAST_PAGES = 128 * MIB
# With offloaded parameters, which come through several streams, the allocator also holds this part of the gathered
# bytes. 70B showed 0.38 (1.3 GiB of 3.4); the plan counts somewhat more.
STREAMED = 0.45
# Host memory of a rank
HOST_PYTHON = 580 * MIB  # Python and the libraries
HOST_CUDA = 950 * MIB  # what CUDA and its libraries add
HOST_NCCL = 360 * MIB
HOST_LAYER = 3 * MIB // 2  # the modules of one layer
WORKSPACE = 64 * 2**20  # both workspaces of cuBLAS, in torch's own pool: of forward's thread and of backward's


@dataclass(frozen=True)
class MemoryPlan:
    """Predicted bytes of one rank.

    Attributes:
        work: the run that is planned: model, settings, ranks.
        policies: the activation policy of each layer.
        phases: GPU bytes by part at the peak of each of PHASES, and of `answers` where the model writes some: of a
            single text, the least that a run needs. More are written at a time where there is room.
        host: host bytes by part, of rank 0, which puts the whole `adapter` together. The other ranks do not have it.
        pinned: bytes of a rank's host memory that can't be swapped out.
        beside_graph: bytes that evaluations and the optimizer need beside the memory that a CUDA graph keeps; 0 if
            micro-batches are not recorded as one.
        dequantizes_ahead: whether a graph dequantizes a weight while the one before it is used
            (layers/quantized/weight_reader.py), so that there are two at a time.
        num_kept_dequantized: layers, the last ones, whose dequantized weights a graph keeps from forward to backward,
            or all graphs until the run ends (`Workload.holds_dequantized`).
    """

    work: Workload
    policies: tuple[Policy, ...]
    phases: dict[str, BytesByPart]
    host: BytesByPart
    pinned: int
    beside_graph: int = 0
    dequantizes_ahead: bool = False
    num_kept_dequantized: int = 0

    def tensor_bytes(self, phase: str) -> int:
        """Most bytes that tensors take in a phase: what `torch.cuda.max_memory_allocated` will say."""
        return sum(self.phases[phase].values())

    @property
    def peak_phase(self) -> str:
        return max(self.phases, key=self.tensor_bytes)

    def allocator_bytes(self, phase: str) -> int:
        """Bytes that torch's allocator holds beyond the tensors at the peak of a phase."""
        parts = self.phases[phase]
        transient = sum(parts.get(name, 0) for name in ("gathered", "dequantized", "activations", "loss"))
        streamed = STREAMED * parts.get("gathered", 0) if self.work.config.fsdp.cpu_offload else 0
        beside = self.beside_graph if phase in ("forward", "backward") else 0
        return round(FRAGMENTATION * transient + streamed) + beside + (LAST_PAGES if self.work.is_cuda else 0)

    @property
    def weight_bytes(self) -> int:
        """GPU memory that a rank's weights need alone, while nothing is computed."""
        return self.tensor_bytes("load") + self.library_bytes

    @property
    def library_bytes(self) -> int:
        """GPU bytes that CUDA and NCCL take outside torch's allocator."""
        if not self.work.is_cuda:
            return 0
        alone = NCCL_ALONE if self.work.uses_fsdp else 0
        shared = NCCL_SLICES if self.work.config.distributed.num_slices > 1 else 0
        return CUDA_CONTEXT + (NCCL if self.work.num_ranks > 1 else alone) + shared + self.graph_bytes

    @property
    def graph_bytes(self) -> int:
        """GPU bytes that CUDA takes for graphs, outside torch's allocator, if padded sequences have all lengths."""
        if self.beside_graph == 0 or self.work.batch.packs_rows:
            return 0
        return (num_lengths(self.work.config.training.max_length) - 1) * len(self.policies) * GRAPH_LAYER

    @property
    def host_needed(self) -> int:
        """Host memory that all ranks of one host need together."""
        adapter = self.host["adapter"]
        return (sum(self.host.values()) - adapter) * self.work.local_num_ranks + adapter

    def needed_in(self, phase: str) -> int:
        """GPU memory that a phase needs in all."""
        return self.tensor_bytes(phase) + self.allocator_bytes(phase) + self.library_bytes

    @property
    def needed(self) -> int:
        """GPU memory that the run needs in all."""
        return max(self.needed_in(phase) for phase in self.phases)


def make_plan(work: Workload, policies: Sequence[Policy]) -> MemoryPlan:
    """Predict the memory of a run whose layers have these activation policies."""
    return planner(work)(policies)


def planner(work: Workload) -> Callable[[Sequence[Policy]], MemoryPlan]:
    """Return a function from policies to a plan.

    It counts the parameters only once, so many policies can be tried.
    """
    return partial(_plan, work, ModelBytes(work))


def with_spare_used(plan: MemoryPlan, ahead_within: float, kept_within: float) -> MemoryPlan:
    """The plan of the same run with what a graph can do against dequantization; the same plan if it can't.

    Args:
        plan: a run whose micro-batches may be recorded as a graph.
        ahead_within: bytes that it may need in all with weights that are dequantized ahead.
        kept_within: the same with weights that are kept besides, of as many layers as there is room for.
    """
    if plan.beside_graph == 0 or not any(layer.ahead for layer in plan.work.layers):
        return plan
    model = ModelBytes(plan.work)
    ahead = _plan(plan.work, model, plan.policies, num_kept=0)
    if ahead.needed > ahead_within:
        return plan
    most = plan.work.num_layers if plan.work.config.memory.keep_dequantized else 0
    keeping = [partial(_plan, plan.work, model, plan.policies, num_kept) for num_kept in range(1, most + 1)]
    num_kept = bisect_right(keeping, kept_within, key=lambda make: make().needed)
    return keeping[num_kept - 1]() if num_kept else ahead


def _plan(work: Workload, model: ModelBytes, policies: Sequence[Policy], num_kept: int | None = None) -> MemoryPlan:
    """The plan for these policies, and with a number of layers whose dequantized weights are kept; None for none.

    A number, also 0, says that weights are dequantized ahead.
    """
    has_graph, uses = is_captured(work, policies), work.layer_uses(policies)
    teacher = None if work.teacher is None else TeacherBytes(work, ModelBytes(work.teacher))
    taught_by = {} if teacher is None else {"teacher": teacher.resident}
    resident = model.resident(with_training=True) | {"other_adapters": other_adapter_bytes(work)} | taught_by
    if has_graph:  # a graph writes its gradients to the same memory in every step, so they stay between steps
        resident["gradients"] = max(resident["gradients"], model.shard.adapters)
    largest, held = _passes(work, model, uses, resident, DequantizedWeights(work)), 0
    if num_kept is not None:  # the first steps have no graph; a graph sums gradients over ranks each time
        weights = DequantizedWeights(work, num_kept)
        held = weights.held
        with_graph = resident | {"gradients": model.shard.adapters, "dequantized": held}
        in_graph = _passes(work, model, uses, with_graph, weights)
        largest = {phase: _largest((largest[phase], in_graph[phase])) for phase in largest}
    answers = {}
    if work.config.task.writes_answers:
        answers["answers"] = _answer_bytes(work, model, resident)
    if teacher is not None:
        largest["forward"] = _largest(
            [teacher.beside(largest["forward"]), *(_add(resident, moment) for moment in teacher.moments())]
        )
        largest["backward"] = teacher.beside(largest["backward"])
    loaded = [model] if teacher is None else [model, teacher.model]
    held_to_quantize = max(each.held_to_quantize for each in loaded)
    while_loading = LOAD_STAGING + held_to_quantize + _correction_bytes(work)
    phases = {
        "load": model.resident(with_training=False) | taught_by | {"workspace": while_loading},
        **answers,
        **largest,
        "step": resident | {"gradients": model.step_gradients, "dequantized": held, "workspace": WORKSPACE},
    }
    host, pinned = _host(work, model, uses)
    beside = max(SPARE_BYTES, _evaluation_bytes(work, model)) if has_graph else 0
    return MemoryPlan(work, tuple(policies), phases, host, pinned, beside, num_kept is not None, num_kept or 0)


def _correction_bytes(work: Workload) -> int:
    """Most bytes that adapters' starts take which correct the rounding of a weight (model/adapters/rounding_error.py).

    They are the weight's error, whole, and this rank's rows of it, of the weight and of what it is rounded to, all in
    float32; and eigenvectors, of no more elements than the weight has. Counted for the largest of all weights.
    """
    if not work.modules.lora.corrects_rounding:
        return 0
    whole = 2 * max(kind.largest_weight for kind in work.parts.kinds)  # as many bytes in float32 as twice in bfloat16
    own_rows = 4 * whole // work.num_shards
    return 2 * whole + own_rows + EIGENVECTOR_MATRICES * whole


def _passes(
    work: Workload, model: ModelBytes, uses: Sequence[LayerUse], resident: BytesByPart, weights: DequantizedWeights
) -> dict[str, BytesByPart]:
    """Bytes by part at the peaks of forward and backward."""
    forward = forward_moments(work, model, uses, weights)
    backward = backward_moments(work, model, uses, gradients_stay=resident["gradients"] > 0, weights=weights)
    return {
        "forward": _largest(_add(resident, moment) for moment in forward),
        "backward": _largest(_add(resident, moment) for moment in backward),
    }


class TeacherBytes:
    """Bytes of a teacher that is a model of its own, beside the one that learns.

    Args:
        work: of the one that learns.
        model: the teacher's.

    Attributes:
        resident: that a rank holds all the time.
        hidden: what the teacher's head gets of a micro-batch, beyond what the trace of the model counts for it.
        head: the teacher's head, whole while the loss is computed; 0 where the rank has it whole anyway.
    """

    def __init__(self, work: Workload, model: ModelBytes) -> None:
        assert work.teacher is not None
        self.model = model
        self.work = work.teacher
        self.resident = sum(model.resident(with_training=False).values())
        self.hidden = max(0, self.work.ends.hidden - work.ends.hidden)
        ends = [tensors for name, tensors in model.ends.items() if name != "per_layer_tables"]
        tables = [tensor for tensors in ends for tensor in tensors if tensor.part == "embeddings"]
        table = max(tables, key=lambda tensor: tensor.shard_bytes(1), default=None)
        whole = 0 if table is None else table.shard_bytes(1)
        self.head = whole if self.work.num_shards > 1 else 0
        has_own_head = bool(model.ends["head"])  # or it is the embeddings, and not in int8
        if has_own_head and self.work.config.quant.embeddings is EmbeddingStorage.int8:
            self.head = 2 * whole  # dequantized

    def moments(self) -> Iterator[BytesByPart]:
        """What the pass of the teacher needs beyond the resident parts: while tables are read, and while layers run."""
        model, ends = self.model, self.work.ends
        yield {
            "gathered": model.unit("root") + model.flat(model.unit("root")) + model.gathered_end("embeddings"),
            "activations": ends.lookup,
            "workspace": WORKSPACE,
        }
        layer = max(use.forward for use in self.work.layer_uses([Policy.full] * self.work.num_layers))
        yield {
            "gathered": model.running_layer + model.ahead_in_forward(self.work.num_layers),
            "activations": ends.shared + 2 * ends.hidden + layer,
            "workspace": WORKSPACE,
        }

    def beside(self, moment: BytesByPart) -> BytesByPart:
        """A moment of the model that learns, with what is there of the teacher's pass and for the loss."""
        return _add(moment, {"gathered": self.head, "activations": self.hidden})


def _evaluation_bytes(work: Workload, model: ModelBytes) -> int:
    """What an evaluation takes beyond the resident parts; 0 if nothing is held out.

    That is the larger of its two moments, a layer that runs and the loss, and the slots of generated texts.
    """
    data = work.config.data
    if data.eval_path is None and data.eval_fraction == 0:
        return 0
    layer = model.running_layer + model.ahead_in_forward(len(model.layers))
    layer += max(use.forward for use in work.layer_uses([Policy.full] * work.num_layers))
    return (
        work.ends.shared
        + max(layer, model.kept + model.gathered_end("head") + work.ends.loss)
        + WORKSPACE
        + generation_bytes(work)
    )


def _answer_bytes(work: Workload, model: ModelBytes, resident: BytesByPart) -> BytesByPart:
    """Bytes by part while a single answer is written: its slot, and a layer that reads its prompt."""
    layer = max(use.forward for use in work.layer_uses([Policy.full] * work.num_layers))
    share = min(1.0, work.config.training.max_length / work.num_tokens)
    moment = {"gathered": model.running_layer, "activations": round(share * layer), "slots": work.slot_bytes}
    return _add(resident, moment) | {"workspace": WORKSPACE}


def _host(work: Workload, model: ModelBytes, uses: Sequence[LayerUse]) -> tuple[BytesByPart, int]:
    """Host memory by part, and how much of it is pinned."""
    reading = 0 if work.config.model.weights is Weights.random else NUM_BUFFERS * PIECE_BYTES
    copied = round_up(model.shard.adapters + model.optimizer, SLAB_BYTES)
    libraries = HOST_PYTHON + HOST_LAYER * len(uses)
    if work.is_cuda:
        libraries += HOST_CUDA + (HOST_NCCL if work.num_ranks > 1 else 0)
    # The checkpoint's copy always counts: a signal makes a run write a checkpoint even if no others were asked for.
    parts = {"libraries": libraries, "reading": reading, "checkpoint": copied, "adapter": model.all_trained}
    pinned = reading + (0 if model.is_offloaded else copied)
    if model.is_offloaded:  # each shard is pinned by itself, and torch rounds pinned blocks up to a power of two
        parts["parameters"] = sum(next_power_of_two(tensor.shard_bytes(work.num_shards)) for tensor in model.tensors)
        parts["training"] = model.shard.adapters + model.optimizer
        pinned += parts["parameters"]
    offloaded = [size for use in uses for size in use.host]
    if offloaded:
        parts["activations"] = sum(map(offload_buffer_bytes, offloaded))
        pinned += parts["activations"]
    return parts, pinned


def _add(resident: BytesByPart, moment: BytesByPart) -> BytesByPart:
    return {name: resident.get(name, 0) + moment.get(name, 0) for name in {**resident, **moment}}


def _largest(moments: Iterable[BytesByPart]) -> BytesByPart:
    return max(moments, key=lambda parts: sum(parts.values()))


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
    # Rows of the tables for all layers are looked up.
    yield {
        "gathered": model.unit("root") + model.gathered_end("per_layer_tables"),
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
    # While a layer runs backward, an offloaded input of a layer before it comes back already (model/activations.py).
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
