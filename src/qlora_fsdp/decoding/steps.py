"""One step of all slots: every row gets its next token, launched as one CUDA graph.

Python needs 50 to 100 ms to start the kernels of an 8B model, and a GPU computes one token of it in 5. A recorded graph
is started with a single call, and reads and writes the same tensors each time: tokens and positions are tensors on the
device that a step changes itself, so the next step can be launched before anybody has looked at the last one.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from qlora_fsdp.decoding.prompts import Prompts
from qlora_fsdp.decoding.recording import record
from qlora_fsdp.decoding.sampling import Sampling
from qlora_fsdp.decoding.slots import SlotCache
from qlora_fsdp.layers.attention.slots import Step, running
from qlora_fsdp.sharding.by_rows import ByRows

WARM_UP = 2  # steps that are launched kernel by kernel, which compiles what they need


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

    Attributes:
        tokens: int64 [num_slots], the last token of each text, which is not in the cache yet.
        positions: int64 [num_slots], its place in the text.
        seen: bool [num_slots, vocabulary], the tokens of each text; None without a penalty for repetition.
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
    ) -> None:
        self.call, self.by_rows = partial(_call, base, cache), by_rows
        self.sampling, self.num_slots, self.length, self.cache = sampling, num_slots, length, cache
        self.device = device
        self.captures = captures and device.type == "cuda"
        self.pool = torch.cuda.graph_pool_handle() if self.captures else None
        self.prompts = Prompts(self.call, length, device, self.pool)
        cache.allocate(num_slots, length, device)
        self.tokens = torch.zeros(num_slots, dtype=torch.int64, device=device)
        self.positions = torch.zeros(num_slots, dtype=torch.int64, device=device)
        self.seen: Tensor | None = None
        if sampling.repetition_penalty != 1.0:
            self.seen = torch.zeros(num_slots, num_logits, dtype=torch.bool, device=device)
        self.graph: torch.cuda.CUDAGraph | None = None
        self.num_run = 0

    def admit(self, slots: list[int], prompts: list[list[int]], pad_token_id: int) -> None:
        """Read prompts into slots. Their last tokens are left for the next step, which goes on from them.

        Args:
            slots: a slot for each prompt, whose text has ended.
            prompts: tokens, at least one each, of roughly the same number.
            pad_token_id: fills up shorter prompts at their end, where no other token sees it.
        """
        rows = torch.tensor(slots, dtype=torch.int64).to(self.device)
        if max(map(len, prompts)) > 1:
            self.prompts.read(slots, [prompt[:-1] for prompt in prompts], pad_token_id)
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
        chosen = self.sampling.choose(self.logits(), self.seen)
        if self.by_rows is not None:
            self.by_rows.share(chosen)
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


def _call(base: Any, cache: SlotCache, input_ids: Tensor, position_ids: Tensor) -> Tensor:
    """Logits of the last token [rows, 1, vocabulary]."""
    output = base(
        input_ids=input_ids, position_ids=position_ids, past_key_values=cache, use_cache=True, logits_to_keep=1
    )
    return output.logits  # type: ignore[no-any-return]
