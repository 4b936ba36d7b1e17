"""Forward and backward of a micro-batch as one CUDA graph, which the host launches with a single call.

A short step waits for Python: the host needs 0.2 s to queue the kernels of an 8B model, and a GPU computes 1,024 tokens
in 0.07 s. A CUDA graph is recorded once and replayed with the same tensors at the same places, so Python is gone from
the step. What this asks of a micro-batch:

- Its tensors are copied into those that the graph was recorded with. Packed sequences have one length, but many rows or
  few. So the starts of rows are copied into a tensor of fixed size, whose rest stands for rows of no tokens. Numbers
  and lengths of rows are rounded up, so that a few graphs are enough for all micro-batches (`Key`). Answers that are
  compared are padded to the number of rows, and the loss leaves the padding out.
- Gradients have their places before the first micro-batch, and every backward adds to them.
- The divisor of the loss is a tensor, as it differs from step to step.
- The forward must not ask the device anything. A model that does, or that gets no memory for its graph, is computed
  kernel by kernel as before, and the log says why.

The first steps run kernel by kernel, which compiles and warms up what they need, and shows how much memory they take
and whether they ask the device. Then the ranks agree whether to record. All graphs share the memory of the first.

Under FSDP the gathers and the sums of gradients are part of the graph. Every micro-batch then sums its gradients over
ranks, not only the last one of a step: what is kept between two backwards would have to be at the same place in both.
A rank records when a micro-batch has a new key, and the others may replay: the same collectives run in the same order.
Before each micro-batch the hosts tell one another whether anybody records, and if so whether that failed. Then all
ranks launch from this micro-batch on: NCCL wants a collective to be replayed on all of its ranks or launched on all.

Evaluations of models that are not under FSDP are recorded in the same way, once training has its graphs. A graph of
forward only takes no memory of its own beside them.
"""

from __future__ import annotations

import logging
import math
import time
import warnings
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from qlora_fsdp.config.schema import Config
from qlora_fsdp.data.batch import Batch
from qlora_fsdp.memory.capture import SPARE_BYTES, Found, why_not_captured
from qlora_fsdp.memory.plan import GIB
from qlora_fsdp.model.activations import has_dropout
from qlora_fsdp.model.causal_lm import CausalLM
from qlora_fsdp.model.preference import PreferenceLM
from qlora_fsdp.model.shard import set_gradient_sync
from qlora_fsdp.runtime.processes import Processes
from qlora_fsdp.runtime.rows import local_tensor
from qlora_fsdp.training.batch_key import Key, with_room
from qlora_fsdp.training.memory_use import PhasePeaks
from qlora_fsdp.training.passes import EagerPasses, Passes
from qlora_fsdp.training.prepare import Prepared
from qlora_fsdp.training.recording import NotRecorded, Recorded, find, free_graphs, record

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
    """

    def __init__(
        self, eager: EagerPasses, params: Sequence[nn.Parameter], processes: Processes, peaks: PhasePeaks, limit: float
    ) -> None:
        self.eager, self.params, self.processes, self.peaks, self.limit = eager, params, processes, peaks, limit
        self.device = processes.device
        self.graphs: dict[Key, Recorded] = {}
        self.held_out: dict[Key, Recorded] = {}  # of forward alone
        self.num_evaluated: Counter[Key] = Counter()  # micro-batches that were launched kernel by kernel
        self.records_evaluations = True
        self.is_sharded = isinstance(eager.model, FSDPModule)  # then graphs have collectives in them
        self.pool = torch.cuda.graph_pool_handle()
        self.scale = torch.ones((), device=self.device)
        self.grads: list[Tensor] = []  # of all parameters, where graphs write them
        self.local_grads: list[Tensor] = []  # this rank's rows of them
        self.num_steps = 0
        self.reason: str | None = None  # why no more graphs are recorded

    @property
    def are_replayed(self) -> bool:
        """Whether there are graphs."""
        return bool(self.graphs)

    def begin_step(self, num_targets: int) -> None:
        """Give the gradients their places, which hold zeros, and set what losses are divided by."""
        self.eager.begin_step(num_targets)
        # A GPU divides by a number of Python's by multiplying with its reciprocal in float32: so does the graph.
        self.scale.fill_(float(np.float32(1.0) / np.float32(num_targets)))
        self.num_steps += 1
        if self.num_steps == WARM_UP + 1:
            self._agree()
        if self.num_steps <= WARM_UP or (self.reason is not None and not self.graphs):
            return
        if not self.grads:
            self.grads = [torch.zeros_like(param) for param in self.params]
            self.local_grads = [local_tensor(grad) for grad in self.grads]
            self._place_gradients()

    def run(self, batch: Batch, is_last: bool) -> Tensor:
        """Queue forward and backward, and return the loss."""
        key = Key.of(batch)
        if self.num_steps < WARM_UP:
            return self.eager.run(batch, is_last)
        if self.num_steps == WARM_UP:
            return self._run_watched(batch, is_last)
        if self.reason is None and self._anybody(key not in self.graphs):
            self._record(key, batch)
        graph = find(self.graphs, key)
        if graph is not None:
            return graph.run(batch)
        return self.eager.run(batch, is_last or bool(self.graphs))

    def end_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Set the gradients of graphs to zero, in place; drop others.

        This is done now because the GPU still computes. At the beginning of the next step it would wait for the host.
        """
        if self.graphs:
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
        """Queue forward, and return the loss. A key is recorded when it comes for the third time."""
        key = Key.of(batch)
        graph = find(self.held_out, key) if self.graphs else None
        if graph is None and self.num_evaluated[key] >= WARM_UP and self._can_record_evaluations():
            graph = self._record_evaluation(key, batch)
        if graph is not None:
            return graph.run(batch)
        self.num_evaluated[key] += 1
        return self.eager.evaluate(batch)

    def close(self) -> None:
        """Destroy all graphs, also those that the traceback of an error still refers to.

        A rank can't leave NCCL's communicator while there is a graph with its collectives: the call waits forever.
        """
        with suppress(RuntimeError):  # after an error of CUDA's, which is what the run ends with
            for recorded in (*self.graphs.values(), *self.held_out.values()):
                recorded.graph.reset()
        self.graphs.clear()
        self.held_out.clear()

    def _can_record_evaluations(self) -> bool:
        # Models with labels do more on the host than queue kernels. Under FSDP a launched evaluation leaves the root
        # gathered, but a graph has to gather it anew each time.
        return self.records_evaluations and bool(self.graphs) and type(self.eager.model) in (CausalLM, PreferenceLM)

    def _record_evaluation(self, key: Key, batch: Batch) -> Recorded | None:
        """Record the forward of a key. If it can't be, none is recorded from now on."""
        started, model = time.perf_counter(), self.eager.model
        torch.cuda.synchronize(self.device)
        try:
            self.held_out[key] = record(model, with_room(batch, key, self.device), model, self.pool)
        except NotRecorded as error:
            self.records_evaluations = False
            log.warning(f"Evaluation: {NOT_RECORDED}: {error}")
            return None
        seconds = time.perf_counter() - started
        log.info(f"Evaluation: recorded as a CUDA graph for {key.size} x {key.length} tokens, in {seconds:.1f} s")
        return self.held_out[key]

    def _anybody(self, fact: bool) -> bool:
        """Whether a fact is true of any rank; without FSDP, of this rank."""
        return self.processes.sum([fact])[0] > 0 if self.is_sharded else fact

    def _first_reason(self, reason: str | None) -> str | None:
        """Why the first rank that couldn't record anything could not; under FSDP, else why this rank couldn't."""
        return self.processes.first_error(reason) if self.is_sharded else reason

    def _agree(self) -> None:
        """Find out whether graphs can be recorded. If a rank can't, none does, so that all sum gradients alike."""
        missing = self._missing_bytes()
        if self.reason is None and self.peaks.num_retries:
            self.reason = "memory is short"
        if self.reason is None and missing > 0:
            self.reason = f"it would hold {missing / GIB:.1f} GiB too much beside what else a step needs"
        self.reason = self.processes.first_error(self.reason)
        if self.reason is not None:
            log.info(f"Step: {NOT_RECORDED}: {self.reason}")

    def _run_watched(self, batch: Batch, is_last: bool) -> Tensor:
        """Run a micro-batch kernel by kernel, and note whether the host waits for the device in it."""
        mode = torch.cuda.get_sync_debug_mode()
        with warnings.catch_warnings(record=True) as caught:
            warnings.filterwarnings("always", message=f".*{SYNCHRONIZES}.*")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                loss = self.eager.run(batch, is_last)
            finally:
                torch.cuda.set_sync_debug_mode(mode)
        found = [warning for warning in caught if SYNCHRONIZES in str(warning.message)]
        if found and self.reason is None:
            self.reason = f"the host waits for the device in {found[0].filename}, line {found[0].lineno}"
        return loss

    def _record(self, key: Key, batch: Batch) -> None:
        """Record the graph of a key, unless this rank has it. If it can't be, give up the graphs that there are.

        Under FSDP all ranks call it together, and give up together. Nothing is computed before they have agreed, so no
        rank waits for a gather in which another takes no part.
        """
        started, is_new = time.perf_counter(), key not in self.graphs
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved(self.device)
        reason = self._first_reason(self._try_to_record(key, batch) if is_new else None)
        if reason is not None:
            self.reason = reason
            for graphs in (self.graphs, self.held_out):
                graphs.clear()  # kernels that are launched need the memory
            free_graphs()
            log.warning(f"Step: no CUDA graph could be recorded, its kernels are launched one by one: {reason}")
        elif is_new:
            grown = (torch.cuda.memory_reserved(self.device) - before) / GIB
            rows = f", up to {key.num_rows} rows of {key.longest}" if key.num_rows else ""
            log.info(
                f"Step: recorded as a CUDA graph for {key.size} x {key.length} tokens{rows}, in "
                f"{time.perf_counter() - started:.1f} s; it holds {grown:.1f} GiB"
            )

    def _try_to_record(self, key: Key, batch: Batch) -> str | None:
        """Record the graph of a key; or return why it can't be."""
        set_gradient_sync(self.eager.model, enabled=True)
        self.peaks.enter("forward")

        def compute(static: Batch) -> Tensor:
            loss: Tensor = self.eager.model(static) * self.scale
            self.peaks.enter("backward")
            loss.backward()
            return loss.detach()

        try:
            static = with_room(batch, key, self.device)
            self.graphs[key] = record(compute, static, self.eager.model, self.pool)
        except NotRecorded as error:
            return str(error)
        return None

    def _missing_bytes(self) -> float:
        """Bytes that are missing for a graph, and for what else runs beside it; at most 0 if there is room."""
        peaks, now = self.peaks.allocated, torch.cuda.memory_allocated(self.device)
        graph = max(peaks.get(phase, 0) for phase in ("forward", "backward")) - now
        beside = max(peaks.get("evaluation", 0) - now, SPARE_BYTES)
        free = torch.cuda.mem_get_info(self.device)[0] + torch.cuda.memory_reserved(self.device)
        return graph + beside - (min(self.limit, free) - now)


def make_passes(prepared: Prepared, config: Config, trainable: Sequence[nn.Parameter], processes: Processes) -> Passes:
    """Choose how forward and backward run: as CUDA graphs if that is asked for and possible, else kernel by kernel."""
    eager = EagerPasses(prepared.model, processes.device, prepared.peaks, config.training.deterministic)
    plan = prepared.run_plan.plan
    if processes.device.type != "cuda":
        return eager
    found = Found(has_dropout(prepared.model), isinstance(prepared.model, FSDPModule))
    reason = why_not_captured(config, prepared.run_plan.policies, found)
    if reason is not None:
        log.info(f"Step: {NOT_RECORDED}: {reason}")
        return eager
    outside = 0 if plan is None else plan.library_bytes
    limit = math.inf if config.memory.target_gib is None else prepared.machine.target - outside
    return CapturedPasses(eager, trainable, processes, prepared.peaks, limit)
