"""Read prompts into slots. A call whose shape comes again is recorded as a CUDA graph.

Python needs 60 to 100 ms to start the kernels of a call of an 8B model, and a GPU reads 128 tokens in 10. So calls of
few tokens are padded to one of a few shapes. The first call of a shape is launched kernel by kernel, which compiles
what it needs. The second is recorded, and it and the others are replayed. With many tokens the GPU computes for as long
as Python takes, and nothing is padded or recorded.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qlora_fsdp.common.sizes import next_power_of_two, round_up
from qlora_fsdp.decoding.recording import record
from qlora_fsdp.layers.attention.slots import Step, running

RECORDED_TOKENS = 2048  # of a recorded call, at most, padding included
LENGTH_STEP = 64  # a recorded call reads a multiple of this many tokens of each prompt
MAX_GRAPHS = 8  # the memory of their tensors is shared, but not that of their kernels' arguments


class _Recorded(NamedTuple):
    """A call that was recorded, and the tensors that it reads: the slots [rows], and the tokens [rows, length]."""

    graph: torch.cuda.CUDAGraph
    slots: Tensor
    tokens: Tensor


class Prompts:
    """Reads prompts into the slots of a model.

    Args:
        call: the model, on tokens and their positions, both [rows, length].
        length: tokens of a slot.
        device: the model's device.
        pool: the graphs' memory; None: nothing is recorded.
    """

    def __init__(
        self, call: Callable[[Tensor, Tensor], Any], length: int, device: torch.device, pool: Any | None
    ) -> None:
        self.call, self.length, self.device, self.pool = call, length, device, pool
        self.is_padded = pool is not None  # also where recording has failed: other ranks go on to read padded prompts
        self.graphs: dict[tuple[int, int], _Recorded] = {}
        self.num_calls: Counter[tuple[int, int]] = Counter()

    def read(self, slots: Sequence[int], prompts: Sequence[list[int]], pad_token_id: int) -> None:
        """Read prompts into slots, a slot for each; the pad token fills up shorter ones at their end."""
        shape = len(prompts), max(map(len, prompts))
        recorded = None
        if self.is_padded and (rounded := self._rounded(*shape)) is not None:
            shape = rounded
            recorded = self.graphs.get(shape) or self._record(shape)
            self.num_calls[shape] += 1
        # A row that is one too many is the last prompt once more, which writes the same into the same slot.
        extra = shape[0] - len(prompts)
        rows = torch.tensor([*slots, *[slots[-1]] * extra])
        tokens = torch.tensor(
            [(prompt + [pad_token_id] * shape[1])[: shape[1]] for prompt in (*prompts, *[prompts[-1]] * extra)]
        )
        if recorded is None:
            self._read(rows.to(self.device), tokens.to(self.device))
        else:
            recorded.slots.copy_(rows)
            recorded.tokens.copy_(tokens)
            recorded.graph.replay()

    def close(self) -> None:
        """Destroy the graphs."""
        for recorded in self.graphs.values():
            recorded.graph.reset()
        self.graphs.clear()

    def _rounded(self, num_rows: int, length: int) -> tuple[int, int] | None:
        """The shape that a call is padded to; None if it is not to be recorded."""
        rows, length = next_power_of_two(num_rows), round_up(length, LENGTH_STEP)
        return (rows, length) if rows * length <= RECORDED_TOKENS and length <= self.length else None

    def _record(self, shape: tuple[int, int]) -> _Recorded | None:
        """Record a shape that comes for the second time. If that fails, nothing is recorded from now on."""
        if self.pool is None or self.num_calls[shape] != 1 or len(self.graphs) >= MAX_GRAPHS:
            return None
        slots = torch.zeros(shape[0], dtype=torch.int64, device=self.device)
        tokens = torch.zeros(shape, dtype=torch.int64, device=self.device)
        graph = record(lambda: self._read(slots, tokens), self.pool, "{} prompts of {} tokens".format(*shape))
        if graph is None:
            self.pool = None
            return None
        self.graphs[shape] = _Recorded(graph, slots, tokens)
        return self.graphs[shape]

    def _read(self, slots: Tensor, tokens: Tensor) -> None:
        positions = torch.arange(tokens.shape[1], device=self.device).expand_as(tokens)
        with running(Step(slots=slots)):
            self.call(tokens, positions)
