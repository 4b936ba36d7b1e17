"""Forward and backward of a micro-batch as one CUDA graph, which the host launches with a single call.

A short step waits for Python: the host needs 0.2 s to queue the kernels of an 8B model, and a GPU computes 1,024 tokens
in 0.07 s. A CUDA graph is recorded once and replayed with the same tensors at the same places, so Python is gone from
the step. What this asks of a micro-batch:

- Its tensors are copied into those that the graph was recorded with. Packed sequences have one length, but many rows or
  few. So the starts of rows are copied into a tensor of fixed size, whose rest stands for rows of no tokens. Numbers
  and lengths of rows are rounded up, so that a few graphs are enough for all micro-batches (`Key`). Answers that are
  compared are padded to the number of rows, labels to a round number, and the loss leaves the padding out. Sequences of
  one row each have a few lengths (`round_length` in common/sizes.py).
- Gradients have their places before the first micro-batch, and every backward adds to them.
- The divisor of the loss is a tensor, as it differs from step to step.
- The forward must not ask the device anything. A model that does, or that gets no memory for its graph, is computed
  kernel by kernel as before, and the log says why.

The first steps run kernel by kernel, which compiles and warms up what they need, and shows how much memory they take
and whether they ask the device. Then the ranks agree whether to record. All graphs share the memory of the first.

Under FSDP the gathers and the sums of gradients are part of the graph. Every micro-batch then sums its gradients over
ranks, not only the last one of a step: what is kept between two backwards would have to be at the same place in both.
A rank records when a micro-batch has a new key, and the others may replay: the same collectives run in the same order.
Ranks that can't record are a matter of all (`graphs.py`).

Evaluations are recorded in the same way, once training has its graphs. A graph of forward only takes no memory of its
own beside them.
"""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext, suppress
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from qlora_fsdp.data.batch import Batch
from qlora_fsdp.layers.quantized.weight_reader import WeightReader
from qlora_fsdp.memory.plan import GIB
from qlora_fsdp.memory.workload import SPARE_BYTES, why_not_captured
from qlora_fsdp.model.activations import has_dropout
from qlora_fsdp.runtime.cuda_graphs import record_graph
from qlora_fsdp.runtime.fsdp_state import free_gathered
from qlora_fsdp.runtime.processes import Processes
from qlora_fsdp.runtime.rows import local_tensor
from qlora_fsdp.sharding.shard import set_gradient_sync
from qlora_fsdp.training.capture.graphs import Graphs, Recorded
from qlora_fsdp.training.capture.passes import EagerPasses, Key, Passes, with_room
from qlora_fsdp.training.memory_use import PhasePeaks
from qlora_fsdp.training.prepare import Prepared

WARM_UP = 2  # steps that run kernel by kernel; in these, the host also checks the gradients
SYNCHRONIZES = "called a synchronizing CUDA operation"  # torch's warning, under its sync debug mode
NOT_RECORDED = "not recorded as a CUDA graph, its kernels are launched one by one"
log = logging.getLogger("qlora_fsdp")


class CapturedPasses:
    """Replays micro-batches as CUDA graphs, and runs those that have none kernel by kernel.

    Args:
        eager: runs a micro-batch without a graph.
        params: the trainable parameters.
        processes: all ranks take part.
        peaks: what the phases of a micro-batch have taken.
        limit: bytes that torch's allocator may hold.
        reader: dequantizes weights beside products in graphs; None if there is no room for two at a time.
        is_required: whether a run that can't record its steps ends with an error.
    """

    def __init__(
        self,
        eager: EagerPasses,
        params: Sequence[nn.Parameter],
        processes: Processes,
        peaks: PhasePeaks,
        limit: float,
        reader: WeightReader | None = None,
        is_required: bool = False,
    ) -> None:
        self.reader = reader
        self.eager = eager
        self.params = params
        self.processes = processes
        self.peaks = peaks
        self.limit = limit
        self.device = processes.device
        is_sharded = isinstance(eager.model, FSDPModule)
        self.steps = Graphs("Step", partial(self._record, self._train), processes, is_sharded, is_required)
        self.evaluations = Graphs("Evaluation", partial(self._record, self._evaluate), processes, is_sharded)
        self.num_evaluated = 0  # micro-batches that were launched kernel by kernel
        self.pool = torch.cuda.graph_pool_handle()
        self.scale = torch.ones((), device=self.device)
        self.grads: list[Tensor] = []  # of all parameters, where graphs write them
        self.local_grads: list[Tensor] = []  # this rank's rows of them
        self.num_steps = 0

    @property
    def are_replayed(self) -> bool:
        """Whether there are graphs."""
        return bool(self.steps.by_key)

    def announced(self, micro_batches: Iterator[Batch]) -> Iterator[Batch]:
        """The same micro-batches. Under FSDP each comes when the next one is there too."""
        return self.steps.announced(micro_batches) if self.steps.is_sharded else micro_batches

    def begin_step(self, num_targets: int) -> None:
        """Give the gradients their places, which hold zeros, and set what losses are divided by."""
        self.eager.begin_step(num_targets)
        # A GPU divides by a number of Python's by multiplying with its reciprocal in float32: so does the graph.
        self.scale.fill_(float(np.float32(1.0) / np.float32(num_targets)))
        self.num_steps += 1
        if self.num_steps == WARM_UP + 1:
            self._agree()
        if self.num_steps <= WARM_UP or self.steps.reason is not None:
            return
        if not self.grads:
            self.grads = [torch.zeros_like(param) for param in self.params]
            self.local_grads = [local_tensor(grad) for grad in self.grads]
            self._place_gradients()

    def run(self, batch: Batch, is_last: bool) -> Tensor:
        """Queue forward and backward, and return the loss."""
        if self.num_steps == WARM_UP:
            return self._run_watched(batch, is_last)
        graph = self.steps.of(batch) if self.num_steps > WARM_UP else None
        if graph is not None:
            return graph.run(batch)
        self.evaluations.clear()  # kernels that are launched need the memory
        if self.reader is not None:
            self.reader.release()
        return self.eager.run(batch, is_last)

    def end_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Set the gradients of graphs to zero, in place; drop others.

        This is done now because the GPU still computes. At the beginning of the next step it would wait for the host.
        """
        if self.are_replayed:
            torch._foreach_zero_(self.local_grads)
            self._place_gradients()
        else:
            self.grads, self.local_grads = [], []
            self.eager.end_step(optimizer)

    def _place_gradients(self) -> None:
        for param, grad in zip(self.params, self.grads, strict=True):
            if param.grad is not grad:  # it is a sum over ranks that hold whole copies
                param.grad = grad

    def evaluate(self, batch: Batch) -> Tensor:
        """Queue forward, and return the loss. Graphs are recorded once some micro-batches were launched."""
        graph = self._of_evaluation(batch)
        if graph is not None:
            return graph.run(batch)
        self.num_evaluated += 1
        return self.eager.evaluate(batch)

    def _of_evaluation(self, batch: Batch) -> Recorded | None:
        """The graph of held-out rows; None if they have to be launched. Under FSDP ranks get graphs or none together.

        A pass that is launched leaves FSDP's root gathered. A graph gathers it anew, because weights change between
        evaluations. So the root is freed before the first graph, on all ranks: those that record none now may have to
        launch later, and would not take part in the gather.
        """
        is_possible = self.evaluations.reason is None and not self.eager.model.reads_outputs
        if not self.are_replayed or self.num_evaluated < WARM_UP or not is_possible:
            return None
        if not self.evaluations.by_key:
            free_gathered(self.eager.model)
        return self.evaluations.of(batch)

    def close(self) -> None:
        """Destroy all graphs, also those that the traceback of an error still refers to.

        A rank can't leave NCCL's communicator while there is a graph with its collectives: the call waits forever.
        """
        with suppress(RuntimeError):  # after an error of CUDA's, which is what the run ends with
            for recorded in (*self.steps.by_key.values(), *self.evaluations.by_key.values()):
                recorded.graph.reset()
        self.steps.by_key.clear()
        self.evaluations.by_key.clear()
        if self.reader is not None:
            self.reader.release()

    def _agree(self) -> None:
        """Find out whether graphs can be recorded. If a rank can't, none does, so that all sum gradients alike."""
        missing, reason = self._missing_bytes(), self.steps.reason
        if self.reader is not None:
            self.reader.keep_within(-missing)
            self.reader = self.reader if self.reader.ahead_bytes <= -missing else None
        if reason is None and self.peaks.num_retries:
            reason = "memory is short"
        if reason is None and missing > 0:
            reason = f"it would hold {missing / GIB:.1f} GiB too much beside what else a step needs"
        self.steps.reason = self.processes.first_error(reason)
        if self.steps.reason is not None:
            self.steps.refuse_if_required()
            log.info(f"Step: {NOT_RECORDED}: {self.steps.reason}")
        elif self.reader is not None and self.reader.holds:
            self._hold(self.reader)

    def _hold(self, reader: WeightReader) -> None:
        """Dequantize the weights that stay until the run ends."""
        reader.hold()
        num_bytes = sum(weight.nbytes for weight in reader.held.values())
        stay = f"{len(reader.held)} dequantized weights stay until the run ends, {num_bytes / GIB:.1f} GiB"
        log.info(f"Step: {stay if reader.held else 'there is no memory left for dequantized weights to stay in'}")

    def _run_watched(self, batch: Batch, is_last: bool) -> Tensor:
        """Run a micro-batch kernel by kernel, and note whether the host waits for the device in it."""
        mode = torch.cuda.get_sync_debug_mode()
        with warnings.catch_warnings(record=True) as caught:
            warnings.filterwarnings("always", message=f".*{SYNCHRONIZES}.*")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                with nullcontext() if self.reader is None else self.reader.noting():
                    loss = self.eager.run(batch, is_last)
            finally:
                torch.cuda.set_sync_debug_mode(mode)
        found = [warning for warning in caught if SYNCHRONIZES in str(warning.message)]
        if found and self.steps.reason is None:
            self.steps.reason = f"the host waits for the device in {found[0].filename}, line {found[0].lineno}"
        return loss

    def _record(self, compute: Callable[[Batch], Tensor], key: Key, batch: Batch) -> Recorded:
        roomy = with_room(batch, key, self.device)
        graph, loss, num_bytes = record_graph(partial(compute, roomy), self.pool, self.eager.model)
        return Recorded(roomy, graph, loss, num_bytes)

    def _train(self, batch: Batch) -> Tensor:
        """What the graph of a step's micro-batch holds."""
        set_gradient_sync(self.eager.model, enabled=True)
        with nullcontext() if self.reader is None else self.reader.reading():
            self.peaks.enter("forward")
            loss: Tensor = self.eager.model(batch) * self.scale
            self.peaks.enter("backward")
            loss.backward()
        return loss.detach()

    def _evaluate(self, batch: Batch) -> Tensor:
        """What the graph of held-out rows holds."""
        with nullcontext() if self.reader is None else self.reader.reading(keeps=False):
            loss: Tensor = self.eager.model(batch)
        free_gathered(self.eager.model)
        return loss

    def _missing_bytes(self) -> float:
        """Bytes that are missing for a graph, and for what else runs beside it; at most 0 if there is room."""
        peaks, now = self.peaks.allocated, torch.cuda.memory_allocated(self.device)
        graph = max(peaks.get(phase, 0) for phase in ("forward", "backward")) - now
        beside = max(peaks.get("evaluation", 0) - now, SPARE_BYTES)
        free = torch.cuda.mem_get_info(self.device)[0] + torch.cuda.memory_reserved(self.device)
        return graph + beside - (min(self.limit, free) - now)


def make_passes(prepared: Prepared, trainable: Sequence[nn.Parameter], processes: Processes) -> Passes:
    """Choose how forward and backward run: as CUDA graphs if that is asked for and possible, else kernel by kernel."""
    spec = prepared.spec
    eager = EagerPasses(prepared.model, processes.device, prepared.peaks, spec.steps.deterministic)
    plan = prepared.run_plan.plan
    if processes.device.type != "cuda":
        return eager
    reason = why_not_captured(
        spec.modules, spec.shards.cpu_offload, prepared.run_plan.policies, has_dropout(prepared.model)
    )
    if reason is not None:
        log.info(f"Step: {NOT_RECORDED}: {reason}")
        return eager
    outside = 0 if plan is None else plan.library_bytes
    limit = prepared.machine.target - outside if spec.has_memory_target else math.inf
    layers = prepared.model.layers
    keeping = [] if plan is None else layers[len(layers) - plan.num_kept_dequantized :]
    has_room = plan is None or plan.dequantizes_ahead
    holds = plan is not None and plan.work.holds_dequantized
    reader = WeightReader(prepared.model, processes.device, keeping, holds) if has_room else None
    is_required = spec.modules.compute.cuda_graph is True
    return CapturedPasses(eager, trainable, processes, prepared.peaks, limit, reader, is_required)
