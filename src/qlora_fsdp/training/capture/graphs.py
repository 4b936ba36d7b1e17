"""The CUDA graphs of one kind of pass, by the sizes of their micro-batches. Ranks replay them together or not at all.

Under FSDP the graphs hold collectives, and NCCL wants a collective to be replayed on all of its ranks or launched on
all. A rank has its own micro-batches, so it may have to record a new graph while the others replay old ones. That needs
nothing of the others if it succeeds, because nothing is computed while a graph is recorded, and the same collectives
run in the same order afterwards. If it fails, the others have to know before they replay. So the hosts ask one another
before each micro-batch whether anybody has to record. If so, all of them wait for it, and where it fails, all give up
their graphs. It follows for every micro-batch that either each rank has a graph for its own, or none has any:

- Nobody has to record: every rank has the graph of its micro-batch, and replays.
- Somebody has to, and all could: now every rank has its graph, and replays.
- Somebody could not: no rank has a graph from now on, and all launch.

The question depends on the sizes of micro-batches only. So in training it is asked one micro-batch ahead (`announced`),
and the answer has come when it is needed. Two micro-batches may be on their way at that time. If both have the same new
sizes, only the first of them is called new: the graph that is recorded for it serves the second. Evaluations ask when
they need the answer: their hosts meet before each micro-batch anyway, to hear whether the run is to stop.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from qlora_fsdp.common.errors import TrainingError
from qlora_fsdp.common.text import first_line
from qlora_fsdp.data.batch import Batch
from qlora_fsdp.memory.plan import GIB
from qlora_fsdp.runtime.cuda_graphs import NotRecorded, free_graphs
from qlora_fsdp.runtime.processes import Processes
from qlora_fsdp.training.capture.passes import Key, fill

NUM_TOLD = 4  # graphs of a kind; padded sequences may have some fifty lengths
log = logging.getLogger("qlora_fsdp")


@dataclass(frozen=True)
class Recorded:
    """A recorded micro-batch.

    Attributes:
        batch: the tensors on the device that the graph reads.
        graph: what is replayed.
        loss: the tensor that the graph writes.
        num_bytes: memory that torch has taken for it.
    """

    batch: Batch
    graph: torch.cuda.CUDAGraph
    loss: Tensor
    num_bytes: int

    def run(self, batch: Batch) -> Tensor:
        """Replay the graph with a micro-batch, and return its loss."""
        fill(self.batch, batch)
        self.graph.replay()
        return self.loss.clone()


class Graphs:
    """The graphs of one kind of pass.

    Args:
        name: what the log calls the pass.
        record: records the graph of a micro-batch with these sizes. It raises NotRecorded, or torch.OutOfMemoryError
            if there is no room for what the graph reads.
        processes: all ranks take part if there are collectives in the graphs.
        is_sharded: whether there are, because FSDP shards the model. Else each rank decides for itself.
        is_required: whether the run ends with an error where none can be recorded.

    Attributes:
        by_key: the graphs.
        reason: why none are recorded any more. Under FSDP it is the same on every rank.
    """

    def __init__(
        self,
        name: str,
        record: Callable[[Key, Batch], Recorded],
        processes: Processes,
        is_sharded: bool,
        is_required: bool = False,
    ) -> None:
        self.name = name
        self.record = record
        self.processes = processes
        self.is_sharded = is_sharded
        self.is_required = is_required
        self.by_key: dict[Key, Recorded] = {}
        self.reason: str | None = None
        self._announced: set[Key] = set()
        self._answers: dict[int, Callable[[], bool]] = {}  # by the id of the micro-batch

    def announced(self, micro_batches: Iterator[Batch]) -> Iterator[Batch]:
        """Yield micro-batches of a sharded model, each when the hosts have begun to ask about the one behind it.

        Questions begin with the first graph, which all ranks record together. The data ahead can be read: the loop has
        seen to that on all ranks (`PassQueue`), and not on single ones in the middle of a step.
        """
        before: Batch | None = None
        for batch in micro_batches:
            if self.by_key:
                key = Key.of(batch)
                self._answers[id(batch)] = self._ask(key not in self.by_key and key not in self._announced)
                self._announced.add(key)
            if before is not None:
                yield before
            before = batch
        if before is not None:
            yield before

    def of(self, batch: Batch) -> Recorded | None:
        """The graph of a micro-batch, which is recorded if there is none; None if it has to be launched.

        Under FSDP all ranks call it together, and all get a graph or none does.
        """
        if self.reason is not None:
            return None
        key = Key.of(batch)
        is_new_anywhere = self._answers.pop(id(batch), None) or self._ask(key not in self.by_key)
        if is_new_anywhere():
            self._record(key, batch)
        return self.by_key.get(key)

    def refuse_if_required(self) -> None:
        """Raise a TrainingError if the run is to end because nothing can be recorded."""
        if self.is_required:
            raise TrainingError(
                f"compute.cuda_graph=true, and steps can't be recorded as CUDA graphs here: {self.reason}. "
                "Set compute.cuda_graph=auto to train without."
            )

    def clear(self) -> None:
        """Give up the graphs, and their memory."""
        if self.by_key:
            self.by_key.clear()
            free_graphs()

    def _ask(self, is_new: bool) -> Callable[[], bool]:
        """Begin to ask whether a micro-batch is new to any rank. What is returned waits for the answer."""
        if not self.is_sharded:
            return lambda: is_new
        wait = self.processes.start_sum([is_new])
        return lambda: wait()[0] > 0

    def _record(self, key: Key, batch: Batch) -> None:
        """Record the graph of a key, unless this rank has it. If a rank can't, give up all graphs."""
        started = time.perf_counter()
        is_new = key not in self.by_key
        reason = None
        if is_new:
            try:
                self.by_key[key] = self.record(key, batch)
            except (NotRecorded, torch.OutOfMemoryError) as error:
                reason = first_line(error)
        self.reason = self.processes.first_error(reason) if self.is_sharded else reason
        if self.reason is not None:
            self.clear()
            self.refuse_if_required()
            log.warning(
                f"{self.name}: no CUDA graph could be recorded, its kernels are launched one by one: {self.reason}"
            )
        elif is_new and len(self.by_key) <= NUM_TOLD:
            rows = f", up to {key.num_rows} rows of {key.longest}" if key.num_rows else ""
            more = "; more may follow, without a line of their own" if len(self.by_key) == NUM_TOLD else ""
            log.info(
                f"{self.name}: recorded as a CUDA graph for {key.size} x {key.length} tokens{rows}, in "
                f"{time.perf_counter() - started:.1f} s; it holds {self.by_key[key].num_bytes / GIB:.1f} GiB{more}"
            )
