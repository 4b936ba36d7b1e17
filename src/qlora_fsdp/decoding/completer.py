"""Complete prompts: texts that end make room for the next prompts while the others go on.

The host never waits for the step that runs. It launches a step, and meanwhile looks at the tokens of the step before:
whether a text has ended, and which prompt takes its slot. So each text runs on for a step or two after its end, and
what these steps gave is dropped.

Prompts are read kernel by kernel, many tokens at a time, which stops the steps for as long. So they wait until a part
of the slots is free.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from qlora_fsdp.common.sizes import next_power_of_two, round_up
from qlora_fsdp.decoding.sampling import Sampling
from qlora_fsdp.decoding.slot_cache import SlotCache, attending
from qlora_fsdp.decoding.steps import Steps
from qlora_fsdp.decoding.stop_strings import StopStrings
from qlora_fsdp.layers.attention.slots import Step, running
from qlora_fsdp.layers.decode_linear import DecodeLayers
from qlora_fsdp.memory.workload import CACHE_SHARE, GPU_SLOTS, LENGTH_STEP, sampling_bytes
from qlora_fsdp.sharding.by_rows import ByRows

PROMPT_TOKENS = 16_384  # tokens of prompts that are read in one call
SHARED_PROMPT_TOKENS = 4096  # the same where ranks send one another the results of all layers
CPU_SLOTS = 64  # texts that run at the same time where nothing is said of it; more of them gain nothing on a CPU


@dataclass
class Request:
    """A prompt, and what has been written after it.

    Attributes:
        prompt: token ids, at least one.
        max_new_tokens: at most this many are written.
        completion: the new tokens, with those that end it.
        key: from 0 to 2**63 - 1, of which its random numbers are made where the completer asks for it. Texts with one
            key and one prompt are the same.
        log_probs: of the new tokens, where the completer keeps them, as `Sampling.log_probs` has them.
    """

    prompt: list[int]
    max_new_tokens: int
    completion: list[int] = field(default_factory=list)
    key: int = 0
    log_probs: list[float] = field(default_factory=list)

    @property
    def num_positions(self) -> int:
        """Tokens of prompt and completion together, at most."""
        return len(self.prompt) + self.max_new_tokens


class NoRoom(torch.OutOfMemoryError):
    """A rank of those that share a model has no memory for the cache of a single text. All of them raise it."""


class _Launched(NamedTuple):
    """A step that was queued.

    Attributes:
        tokens: the tokens of all slots, on their way to the host.
        log_probs: the same of their log-probabilities; None if these are not kept.
        event: after which they are there; None on a CPU.
        running: the request of each slot when it was queued.
    """

    tokens: Tensor
    log_probs: Tensor | None
    event: torch.cuda.Event | None
    running: list[Request | None]


class Completer:
    """Completes prompts on one device, or on several ranks together.

    Args:
        base: transformers' model, with weights, in evaluation mode.
        device: where it is.
        sampling: how tokens are chosen.
        end_token_ids: tokens that end a text.
        pad_token_id: any token.
        max_slots: texts that run at the same time, at most; None for `default_slots`.
        captures: record steps as CUDA graphs, on a GPU.
        prompt_tokens: most tokens of prompts that are read in one call, unless a single prompt has more.
        by_rows: what computes a sharded model; None: it is whole here. Its ranks complete the same requests.
        stops: ends texts at several tokens; None: single tokens alone end them.
        is_keyed: whether random numbers follow from the requests' keys, so that texts depend neither on what is
            completed beside them nor on what came before, and log-probabilities are kept.
    """

    def __init__(
        self,
        base: nn.Module,
        device: torch.device,
        sampling: Sampling,
        end_token_ids: Sequence[int],
        pad_token_id: int,
        max_slots: int | None = None,
        captures: bool = True,
        prompt_tokens: int = PROMPT_TOKENS,
        by_rows: ByRows | None = None,
        stops: StopStrings | None = None,
        is_keyed: bool = False,
    ) -> None:
        self.base = base
        self.device = device
        self.sampling = sampling
        self.ends = frozenset(end_token_ids)
        self.pad_token_id = pad_token_id
        self.max_slots = max_slots or default_slots(device)
        self.captures = captures
        self.prompt_tokens = prompt_tokens
        self.by_rows = by_rows
        self.stops = stops
        self.is_keyed = is_keyed
        self.layers = by_rows or DecodeLayers(base)
        self.steps: Steps | None = None
        self.num_wanted = 0  # slots that there would be if there were memory for all

    @torch.no_grad()
    def complete(
        self,
        requests: Sequence[Request],
        on_token: Callable[[Request, int], None] | None = None,
        is_stopped: Callable[[], bool] = lambda: False,
    ) -> None:
        """Write all completions.

        A slot is as long as the longest text. So where memory has not a slot for each text, the long ones are written
        first, and then the others in more slots of half the length or less.

        Args:
            requests: filled in.
            on_token: called with each new token, soon after it is there.
            is_stopped: asked in every step; where it says so, all texts end as they are.
        """
        if not requests:
            return
        # The longest texts first: those of one length end together, and what is left at the end is short.
        left = sorted(requests, key=lambda request: request.num_positions, reverse=True)
        with self.layers.in_use(), attending(self.base):
            while left:
                steps = self._steps_for(left)
                num_long = len(left)
                if self._is_short_of_slots(steps, len(left)):
                    num_long = sum(_slot_length(request) > steps.length // 2 for request in left)
                self._run(steps, deque(left[:num_long]), on_token, is_stopped)
                left = left[num_long:]
                if left and is_stopped():
                    return

    def release(self) -> None:
        """Give back the memory of slots and graph."""
        if self.steps is not None:
            self.steps.close()
        self.steps = None
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _run(
        self,
        steps: Steps,
        queue: deque[Request],
        on_token: Callable[[Request, int], None] | None,
        is_stopped: Callable[[], bool],
    ) -> None:
        running: list[Request | None] = [None] * steps.num_slots
        launched: deque[_Launched] = deque()
        buffers = [_Buffers.of(steps) for _ in range(3)]
        while (queue or any(running) or launched) and not is_stopped():
            free = [slot for slot, request in enumerate(running) if request is None]
            # Reading prompts stops the steps, so it is done for many of them, or for all that are left.
            enough = min(max(1, steps.num_slots // 4), len(queue))
            if queue and len(free) >= enough:
                self._admit(steps, queue, running, free)
            is_running = any(running)
            if is_running:
                buffer = buffers[steps.num_run % len(buffers)]
                launched.append(_launch(steps, buffer, running))
            if len(launched) > 1 or not is_running:
                self._look(launched.popleft(), running, on_token)

    def _admit(self, steps: Steps, queue: deque[Request], running: list[Request | None], free: list[int]) -> None:
        """Read the next prompts into free slots, in calls of prompts of about the same length."""
        num_admitted = min(len(free), len(queue))
        admitted = [queue.popleft() for _ in range(num_admitted)]
        admitted.sort(key=lambda request: (len(request.prompt), request.prompt))  # texts of one prompt side by side
        slots = free[:num_admitted]
        for slot, request in zip(slots, admitted, strict=True):
            running[slot] = request
        while admitted:
            num = len(admitted)
            while num > 1 and num * len(admitted[num - 1].prompt) > self.prompt_tokens:
                num -= 1
            try:
                prompts = [request.prompt for request in admitted[:num]]
                steps.admit(slots[:num], prompts, self.pad_token_id, [request.key for request in admitted[:num]])
            except torch.OutOfMemoryError:
                if num == 1 or self.by_rows is not None:  # ranks read the same prompts in each call
                    raise
                self.prompt_tokens = num * len(admitted[num - 1].prompt) // 2  # from now on
                continue
            admitted = admitted[num:]
            slots = slots[num:]

    def _look(
        self, step: _Launched, running: list[Request | None], on_token: Callable[[Request, int], None] | None
    ) -> None:
        """Hand out the tokens of a step, and end the texts that end with it."""
        if step.event is not None:
            step.event.synchronize()
        log_probs = None if step.log_probs is None else step.log_probs.tolist()
        going_on: dict[int, Request] = {}
        for slot, (token, request) in enumerate(zip(step.tokens.tolist(), step.running, strict=True)):
            if request is None or running[slot] is not request:
                continue  # it ended before
            if log_probs is not None:
                request.log_probs.append(log_probs[slot])
            request.completion.append(token)
            if token in self.ends or len(request.completion) >= request.max_new_tokens:
                running[slot] = None
            else:
                going_on[slot] = request
            if on_token is not None:
                on_token(request, token)
        if self.stops is None:
            return
        have_ended = self.stops.have_ended([request.completion for request in going_on.values()])
        for slot, has_ended in zip(going_on, have_ended, strict=True):
            if has_ended:
                running[slot] = None

    def _steps_for(self, requests: Sequence[Request]) -> Steps:
        """Slots that are long enough for all texts: those that there are, or new ones."""
        longest = max(request.num_positions for request in requests)
        needed = max(map(_slot_length, requests))
        wanted = next_power_of_two(min(self.max_slots, len(requests)))  # each number of slots is a graph of its own
        before = 0
        if self.steps is not None:
            before = self.steps.length
            is_enough = before >= longest and self.num_wanted >= wanted
            gains_slots = self._is_short_of_slots(self.steps, len(requests)) and needed <= before // 2
            if is_enough and not gains_slots:
                return self.steps
        self.release()
        self.num_wanted = wanted
        cache, num_logits = self._probe()
        length = needed
        if 0 < before < longest:  # A conversation grows: its slots grow by the double, so that few graphs are recorded.
            length = round_up(max(longest, min(2 * before, 2 * longest)), LENGTH_STEP)
        slot_bytes = cache.slot_bytes(length)
        if self.device.type == "cuda":
            slot_bytes += sampling_bytes(num_logits, self.sampling.leaves_out)
        num_slots = min(wanted, self._free_bytes() // max(1, slot_bytes))
        if self.by_rows is not None:
            num_slots = self.by_rows.least(num_slots, self.device)
            if num_slots == 0:
                raise NoRoom(f"a GPU has no memory to spare for the cache of a text of {length} tokens")
        num_slots = max(1, num_slots)
        while self.steps is None:
            try:
                self.steps = Steps(
                    self.base,
                    self.sampling,
                    num_slots,
                    length,
                    cache,
                    num_logits,
                    self.device,
                    self.captures,
                    self.by_rows,
                    self.is_keyed,
                )
            except torch.OutOfMemoryError:
                if num_slots == 1 or self.by_rows is not None:
                    raise
                cache.free()
                num_slots //= 2
        return self.steps

    def _is_short_of_slots(self, steps: Steps, num_requests: int) -> bool:
        """Whether there would be more slots for so many texts if memory had room for them."""
        return steps.num_slots < min(self.max_slots, num_requests)

    def _probe(self) -> tuple[SlotCache, int]:
        """A cache that knows what a token takes, from a call of the model on one token; and the number of logits."""
        base: Any = self.base
        cache = SlotCache(base.config.get_text_config().num_hidden_layers)
        one = torch.zeros((1, 1), dtype=torch.int64, device=self.device)
        with running(Step(slots=one[0])):
            output = base(input_ids=one, position_ids=one, past_key_values=cache, use_cache=True)
        return cache, output.logits.shape[-1]

    def _free_bytes(self) -> int:
        """Bytes that slots may take."""
        if self.device.type != "cuda":
            return 2**62
        free = torch.cuda.mem_get_info(self.device)[0] + torch.cuda.memory_reserved(self.device)
        return int((free - torch.cuda.memory_allocated(self.device)) * CACHE_SHARE)


def default_slots(device: torch.device) -> int:
    """How many texts run at the same time where nothing is said of it, if there is memory for them."""
    return GPU_SLOTS if device.type == "cuda" else CPU_SLOTS


def _slot_length(request: Request) -> int:
    """Tokens of a slot that has room for a text."""
    return round_up(request.num_positions, LENGTH_STEP)


class _Buffers(NamedTuple):
    """Host memory that a step's tokens and log-probabilities are copied to, pinned if there is a GPU."""

    tokens: Tensor
    log_probs: Tensor | None

    @classmethod
    def of(cls, steps: Steps) -> _Buffers:
        """Room for a step of all slots."""
        is_pinned = steps.device.type == "cuda"
        tokens = torch.empty(steps.num_slots, dtype=torch.int64, pin_memory=is_pinned)
        log_probs = None if steps.log_probs is None else torch.empty(steps.num_slots, pin_memory=is_pinned)
        return cls(tokens, log_probs)


def _launch(steps: Steps, buffers: _Buffers, running: list[Request | None]) -> _Launched:
    """Queue a step, and the way of its tokens to the host."""
    buffers.tokens.copy_(steps.run(), non_blocking=True)
    if buffers.log_probs is not None and steps.log_probs is not None:
        buffers.log_probs.copy_(steps.log_probs, non_blocking=True)
    event = None
    if steps.device.type == "cuda":
        event = torch.cuda.Event()
        event.record()
    return _Launched(buffers.tokens, buffers.log_probs, event, list(running))
