"""One step of all slots: every row gets its next token, launched as one CUDA graph.

Python needs 50 to 100 ms to start the kernels of an 8B model, and a GPU computes one token of it in 5. A recorded graph
is started with a single call, and reads and writes the same tensors each time: tokens and positions are tensors on the
device that a step changes itself, so the next step can be launched before anybody has looked at the last one.

Prompts are read into slots in calls of many tokens. With few of them Python is what one waits for there too: it needs
60 to 100 ms to start the kernels of a call of an 8B model, and a GPU reads 128 tokens in 10. So calls of few tokens are
padded to one of a few shapes. The first call of a shape is launched kernel by kernel, which compiles what it needs. The
second is recorded, and it and the others are replayed. With many tokens the GPU computes for as long as Python takes,
and nothing is padded or recorded.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from qlora_fsdp.common.sizes import next_power_of_two, round_up
from qlora_fsdp.decoding.sampling import Draws, Sampling
from qlora_fsdp.decoding.slot_cache import SlotCache
from qlora_fsdp.layers.attention.slots import Step, running
from qlora_fsdp.runtime.cuda_graphs import NotRecorded, record_graph
from qlora_fsdp.sharding.by_rows import ByRows

RECORDED_TOKENS = 2048  # of a recorded call, at most, padding included
LENGTH_STEP = 64  # a recorded call reads a multiple of this many tokens of each prompt
MAX_GRAPHS = 8  # the memory of their tensors is shared, but not that of their kernels' arguments
WARM_UP = 2  # steps that are launched kernel by kernel, which compiles what they need
log = logging.getLogger("qlora_fsdp")


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
        has_states: whether layers carry a state from token to token. Padding would change it, so prompts of one length
            are read in a call of their own.
    """

    def __init__(
        self,
        call: Callable[[Tensor, Tensor], Any],
        length: int,
        device: torch.device,
        pool: Any | None,
        has_states: bool = False,
    ) -> None:
        self.call = call
        self.length = length
        self.device = device
        self.pool = None if has_states else pool
        self.has_states = has_states
        self.is_padded = (
            self.pool is not None
        )  # also where recording has failed: other ranks go on to read padded prompts
        self.graphs: dict[tuple[int, int], _Recorded] = {}
        self.num_calls: Counter[tuple[int, int]] = Counter()

    def read(self, slots: Sequence[int], prompts: Sequence[list[int]], pad_token_id: int) -> None:
        """Read prompts into slots, a slot for each; the pad token fills up shorter ones at their end."""
        if self.has_states:
            self._read_by_length(slots, prompts)
            return
        num_prompts = len(prompts)
        length = max(map(len, prompts))
        recorded = None
        if self.is_padded and self._is_small(num_prompts, length):
            num_prompts = next_power_of_two(num_prompts)
            length = round_up(length, LENGTH_STEP)
            shape = num_prompts, length
            recorded = self.graphs.get(shape) or self._record(shape)
            self.num_calls[shape] += 1
        # What is one too many is the last prompt once more, which writes the same into the same slot.
        extra = num_prompts - len(prompts)
        all_slots = torch.tensor([*slots, *[slots[-1]] * extra])
        all_prompts = [*prompts, *[prompts[-1]] * extra]
        tokens = torch.tensor([prompt + [pad_token_id] * (length - len(prompt)) for prompt in all_prompts])
        if recorded is None:
            self._read(all_slots.to(self.device), tokens.to(self.device))
        else:
            recorded.slots.copy_(all_slots)
            recorded.tokens.copy_(tokens)
            recorded.graph.replay()

    def _read_by_length(self, slots: Sequence[int], prompts: Sequence[list[int]]) -> None:
        """Read prompts in a call for each length; those without tokens are read already."""
        by_length: dict[int, list[int]] = {}
        for number, prompt in enumerate(prompts):
            by_length.setdefault(len(prompt), []).append(number)
        for length, numbers in by_length.items():
            if length:
                rows = torch.tensor([slots[number] for number in numbers])
                tokens = torch.tensor([prompts[number] for number in numbers])
                self._read(rows.to(self.device), tokens.to(self.device))

    def close(self) -> None:
        """Destroy the graphs."""
        for recorded in self.graphs.values():
            recorded.graph.reset()
        self.graphs.clear()

    def _is_small(self, num_prompts: int, length: int) -> bool:
        """Whether a call is padded, so that it can be recorded."""
        length = round_up(length, LENGTH_STEP)
        return next_power_of_two(num_prompts) * length <= RECORDED_TOKENS and length <= self.length

    def _record(self, shape: tuple[int, int]) -> _Recorded | None:
        """Record a shape that comes for the second time. If that fails, nothing is recorded from now on."""
        if self.pool is None or self.num_calls[shape] != 1 or len(self.graphs) >= MAX_GRAPHS:
            return None
        slots = torch.zeros(shape[0], dtype=torch.int64, device=self.device)
        tokens = torch.zeros(shape, dtype=torch.int64, device=self.device)
        what = f"{shape[0]} prompts of {shape[1]} tokens"
        graph = record(lambda: self._read(slots, tokens), self.pool, what)
        if graph is None:
            self.pool = None
            return None
        self.graphs[shape] = _Recorded(graph, slots, tokens)
        return self.graphs[shape]

    def _read(self, slots: Tensor, tokens: Tensor) -> None:
        positions = torch.arange(tokens.shape[1], device=self.device).expand_as(tokens)
        with running(Step(slots=slots)):
            self.call(tokens, positions)


class Steps:
    """The slots of a model, and what makes their next tokens.

    Args:
        base: transformers' model, with weights.
        sampling: how tokens are chosen.
        num_slots: texts that run at the same time.
        length: most tokens of a text, prompt and completion.
        cache: has seen a call of the model, and gets its memory here.
        num_logits: logits that the model gives for each token.
        device: the model's device.
        captures: record a step as a CUDA graph.
        by_rows: what computes a sharded model; None: it is whole here.
        is_keyed: whether random numbers follow from each text's key, and the log-probabilities of tokens are kept.

    Attributes:
        tokens: int64 [num_slots], the last token of each text, which is not in the cache yet.
        positions: int64 [num_slots], its place in the text.
        seen: bool [num_slots, vocabulary], the tokens of each text; None without a penalty for repetition.
        keys: int64 [num_slots], of which each text's random numbers are made; None unless they are.
        log_probs: float32 [num_slots], of `tokens`; None unless they are kept.
    """

    def __init__(
        self,
        base: nn.Module,
        sampling: Sampling,
        num_slots: int,
        length: int,
        cache: SlotCache,
        num_logits: int,
        device: torch.device,
        captures: bool,
        by_rows: ByRows | None = None,
        is_keyed: bool = False,
    ) -> None:
        self.call = partial(_call, base, cache)
        self.by_rows = by_rows
        self.sampling = sampling
        self.num_slots = num_slots
        self.length = length
        self.cache = cache
        self.device = device
        self.captures = captures and device.type == "cuda"
        self.pool = torch.cuda.graph_pool_handle() if self.captures else None
        self.prompts = Prompts(self.call, length, device, self.pool, cache.has_states)
        cache.allocate(num_slots, length, device)
        self.tokens = torch.zeros(num_slots, dtype=torch.int64, device=device)
        self.positions = torch.zeros(num_slots, dtype=torch.int64, device=device)
        self.seen: Tensor | None = None
        if sampling.repetition_penalty != 1.0:
            self.seen = torch.zeros(num_slots, num_logits, dtype=torch.bool, device=device)
        self.keys: Tensor | None = None
        self.log_probs: Tensor | None = None
        if is_keyed:
            self.keys = torch.zeros(num_slots, dtype=torch.int64, device=device)
            self.log_probs = torch.zeros(num_slots, device=device)
        self.graph: torch.cuda.CUDAGraph | None = None
        self.num_run = 0

    def admit(self, slots: list[int], prompts: list[list[int]], pad_token_id: int, keys: Sequence[int] = ()) -> None:
        """Read prompts into slots. Their last tokens are left for the next step, which goes on from them.

        A prompt that is there several times is read once, and its keys and values are copied.

        Args:
            slots: a slot for each prompt, whose text has ended.
            prompts: tokens, at least one each, of roughly the same number.
            pad_token_id: fills up shorter prompts at their end, where no other token sees it.
            keys: a number for each prompt, where random numbers are made of them.
        """
        rows = torch.tensor(slots, dtype=torch.int64).to(self.device)
        self.cache.clear(rows)
        if max(map(len, prompts)) > 1:
            same: dict[tuple[int, ...], list[int]] = {}  # the slots of each prompt
            for slot, prompt in zip(slots, prompts, strict=True):
                same.setdefault(tuple(prompt[:-1]), []).append(slot)
            self.prompts.read([found[0] for found in same.values()], [list(prompt) for prompt in same], pad_token_id)
            for read, found in same.items():
                if len(found) > 1:
                    others = torch.tensor(found[1:], dtype=torch.int64).to(self.device)
                    self.cache.copy(found[0], others, len(read))
        if self.keys is not None:
            self.keys.index_copy_(0, rows, torch.tensor(keys, dtype=torch.int64).to(self.device))
        last = torch.tensor([[prompt[-1], len(prompt) - 1] for prompt in prompts]).to(self.device)
        self.tokens.index_copy_(0, rows, last[:, 0])
        self.positions.index_copy_(0, rows, last[:, 1])
        if self.seen is not None:
            self.seen[rows] = False
            for slot, prompt in zip(slots, prompts, strict=True):
                self.seen[slot, torch.tensor(prompt, device=self.device)] = True

    def run(self) -> Tensor:
        """Queue a step of all slots. Returns `tokens`, which it changes."""
        if self.captures and self.graph is None and self.num_run >= WARM_UP:
            assert self.pool is not None
            self.graph = record(self._advance, self.pool, f"a step of {self.num_slots} texts")
            self.captures = self.graph is not None
        self.num_run += 1
        if self.graph is not None:
            self.graph.replay()
        else:
            self._advance()
        return self.tokens

    def _advance(self) -> None:
        """The next token of each slot, in place."""
        logits = self.logits()
        draws = None if self.keys is None else Draws(self.keys, self.positions)
        chosen = self.sampling.choose(logits, self.seen, draws)
        if self.by_rows is not None:
            self.by_rows.broadcast(chosen)
        if self.log_probs is not None:
            self.log_probs.copy_(self.sampling.log_probs(logits, chosen))
        if self.seen is not None:
            self.seen.scatter_(1, chosen[:, None], True)
        self.tokens.copy_(chosen)
        self.positions.add_(1).clamp_(max=self.length - 1)  # texts that have ended run on until the slot is given away

    def close(self) -> None:
        """Destroy the graphs. A rank can't leave NCCL's communicator while there is a graph with its calls."""
        if self.graph is not None:
            self.graph.reset()
        self.prompts.close()

    def logits(self) -> Tensor:
        """Logits of each text's next token [num_slots, vocabulary]. The last token's keys and values are kept."""
        with running(Step(positions=self.positions)):
            return self.call(self.tokens[:, None], self.positions[:, None])[:, -1]


def record(compute: Callable[[], Any], pool: Any, what: str) -> torch.cuda.CUDAGraph | None:
    """Record a computation. If that fails, the log says why, and the result is None."""
    started = time.perf_counter()
    try:
        recorded = record_graph(compute, pool)
    except NotRecorded as error:
        log.warning(f"Generation: no CUDA graph could be recorded, its kernels are launched one by one: {error}")
        return None
    log.info(f"Generation: {what} recorded as a CUDA graph in {time.perf_counter() - started:.1f} s")
    return recorded.graph


def _call(base: Any, cache: SlotCache, input_ids: Tensor, position_ids: Tensor) -> Tensor:
    """Logits of the last token [rows, 1, vocabulary]."""
    output = base(
        input_ids=input_ids, position_ids=position_ids, past_key_values=cache, use_cache=True, logits_to_keep=1
    )
    return output.logits  # type: ignore[no-any-return]
