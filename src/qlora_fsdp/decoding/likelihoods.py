"""Log-likelihoods of many short texts, a few large calls of the model in place of many small ones.

Texts are sorted by length and padded at their ends, where no other token sees it, so that a call has thousands of
tokens and little padding. The head computes logits of the tokens that are asked for alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qlora_fsdp.decoding.attending import attending
from qlora_fsdp.layers.decode_linear import DecodeLayers
from qlora_fsdp.layers.slot_attention import Step, running
from qlora_fsdp.model.causal_lm import CausalLM

CALL_TOKENS = 16_384  # tokens of one call, padding included
HEAD_TOKENS = 1024  # tokens whose logits exist at the same time


class Text(NamedTuple):
    """A text whose last tokens are asked for.

    Attributes:
        tokens: what the model reads, all but the last of the text.
        targets: the text's last tokens; the first of them follows `tokens[-len(targets)]`.
    """

    tokens: tuple[int, ...]
    targets: tuple[int, ...]


class Likelihood(NamedTuple):
    """Of a text's targets: the sum of their log-probabilities, and whether each is the likeliest token."""

    log_probability: float
    is_greedy: bool


class Scorer:
    """Computes log-likelihoods on one device.

    Args:
        model: with weights, not sharded, in evaluation mode, of a kind that `why_not_in_slots` has nothing against.
        device: where it is.
        max_rows: texts of one call, at most.
    """

    def __init__(self, model: CausalLM, device: torch.device, max_rows: int | None = None) -> None:
        self.model, self.device, self.max_rows = model, device, max_rows
        self.layers = DecodeLayers(model)

    @torch.no_grad()
    def score(self, texts: Sequence[Text], on_done: Callable[[int], Any] = lambda number: None) -> list[Likelihood]:
        """The likelihoods of all texts, in their order.

        Args:
            texts: those that differ in targets alone are read once.
            on_done: called with the number of texts that are done since the last time.
        """
        found: dict[int, Likelihood] = {}
        order = sorted(range(len(texts)), key=lambda index: (-len(texts[index].tokens), texts[index].tokens))
        before: tuple[list[int], Tensor, Tensor] | None = None

        def fetch() -> None:
            if before is not None:
                call, sums, are_greedy = before
                found.update(zip(call, map(Likelihood, sums.tolist(), are_greedy.tolist()), strict=True))
                on_done(len(call))

        with self.layers.in_use(), attending(self.model.base):
            for call in self._split(order, texts):
                queued = (call, *self._call([texts[index] for index in call]))
                fetch()  # while the device computes what was queued
                before = queued
            fetch()
        return [found[index] for index in range(len(texts))]

    def _split(self, order: Sequence[int], texts: Sequence[Text]) -> Iterator[list[int]]:
        """Calls of texts of about the same length, the longest first."""
        call: list[int] = []
        rows: set[tuple[int, ...]] = set()
        for index in order:
            more = rows | {texts[index].tokens}
            is_full = len(more) * len(texts[call[0]].tokens) > CALL_TOKENS if call else False
            if is_full or (self.max_rows is not None and len(more) > self.max_rows):
                yield call
                call, more = [], {texts[index].tokens}
            call.append(index)
            rows = more
        if call:
            yield call

    def _call(self, texts: Sequence[Text]) -> tuple[Tensor, Tensor]:
        """Sums of log-probabilities, float32 [texts]; whether all targets are the likeliest tokens, bool [texts]."""
        rows = {tokens: row for row, tokens in enumerate(dict.fromkeys(text.tokens for text in texts))}
        longest = max(map(len, rows))
        padded = torch.tensor([[*tokens, *[0] * (longest - len(tokens))] for tokens in rows]).to(self.device)
        # Of each target: its text, its row, where the token before it lies, and the token.
        places = [
            (number, rows[text.tokens], len(text.tokens) - len(text.targets) + n, target)
            for number, text in enumerate(texts)
            for n, target in enumerate(text.targets)
        ]
        numbers, in_rows, in_columns, targets = torch.tensor(places).to(self.device).unbind(1)
        base: Any = self.model.base
        with running(Step()):
            if self.model.splits_head:
                outputs = base.get_decoder()(input_ids=padded, use_cache=False).last_hidden_state
            else:
                outputs = base(input_ids=padded, use_cache=False).logits
        chosen = outputs[in_rows, in_columns]
        log_probabilities, are_missed = [], []
        for part, target in zip(chosen.split(HEAD_TOKENS), targets.split(HEAD_TOKENS), strict=True):
            logits = self._logits(part).float()
            log_probabilities.append(logits.log_softmax(-1).gather(1, target[:, None])[:, 0])
            are_missed.append((logits.argmax(-1) != target).float())
        zeros = torch.zeros(len(texts), device=self.device)
        sums = zeros.index_add(0, numbers, torch.cat(log_probabilities))
        return sums, zeros.index_add(0, numbers, torch.cat(are_missed)) == 0

    def _logits(self, hidden: Tensor) -> Tensor:
        if not self.model.splits_head:
            return hidden
        base: Any = self.model.base
        logits = base.get_output_embeddings()(hidden[None])[0]
        cap = getattr(base.config, "final_logit_softcapping", None)
        return logits if cap is None else cap * torch.tanh(logits / cap)  # type: ignore[no-any-return]
