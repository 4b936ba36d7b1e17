"""The answers of a step, written by the very weights that are trained, in slots (decoding/).

Each random number follows from (seed, step, prompt, number of the answer) and the place in the text. So answers do not
depend on how many ranks write them, on slots, or on what is written at the same time, and a run that goes on from a
checkpoint writes the same ones.

Ranks divide the answers of a step evenly, those to one prompt side by side, so that most prompts are read once. Ranks
that share a model write the same ones together (sharding/by_rows.py), and every rank learns what all have written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedTokenizerBase

from qlora_fsdp.common.errors import ConfigError, Problem
from qlora_fsdp.config.schema import RolloutConfig
from qlora_fsdp.config.settings import show
from qlora_fsdp.data.chats.stops import end_ids_of, end_texts_of
from qlora_fsdp.data.questions import Question
from qlora_fsdp.data.tokenizer import ContainedTokenizer
from qlora_fsdp.decoding.completer import Completer, Request
from qlora_fsdp.decoding.sampling import Sampling
from qlora_fsdp.decoding.stop_strings import StopStrings
from qlora_fsdp.decoding.trial import why_not_in_slots
from qlora_fsdp.model.tasks.task_model import TaskModel
from qlora_fsdp.runtime.processes import Processes
from qlora_fsdp.sharding.by_rows import ByRows, texts_of_rank, why_not_by_rows

HELD_OUT = 2**32 - 1  # stands for the step of held-out prompts


@dataclass(frozen=True)
class Completion:
    """An answer as it was written.

    Attributes:
        tokens: token ids, with the end token if there is one; at least one.
        log_probs: of each, as it was drawn, with the temperature and among all tokens.
    """

    tokens: list[int]
    log_probs: list[float]


@dataclass(frozen=True)
class _Written:
    """What a rank has written, as it tells the others.

    Attributes:
        numbers: which of all answers, [n].
        lengths: tokens of each, [n].
        tokens: one answer after another, [sum of lengths].
        log_probs: the same.
    """

    numbers: NDArray[np.int64]
    lengths: NDArray[np.int64]
    tokens: NDArray[np.int32]
    log_probs: NDArray[np.float32]


class Rollouts:
    """Writes the answers to prompts. All ranks call it together.

    Args:
        model: sharded and loaded; its adapter is taken as it is whenever answers are written.
        settings: how many, how long, and how tokens are drawn.
        tokenizer: the model's.
        seed: of the random numbers.
        processes: all ranks take part.
        trust_remote_code: run model code that comes with the model's files.

    Raises:
        ConfigError: this model can't write in slots.
    """

    def __init__(
        self,
        model: TaskModel,
        settings: RolloutConfig,
        tokenizer: PreTrainedTokenizerBase,
        seed: int,
        processes: Processes,
        trust_remote_code: bool,
    ) -> None:
        self.model = model
        self.settings = settings
        self.tokenizer = tokenizer
        self.seed = seed
        self.processes = processes
        self.contained = ContainedTokenizer(tokenizer)
        self.ends = end_ids_of(tokenizer)
        self.stops = StopStrings(tokenizer, list(end_texts_of(tokenizer)))
        reason = why_not_by_rows(model, processes.device)
        reason = reason or why_not_in_slots(model.base.config, trust_remote_code)
        if reason is not None:
            fix = "Train another model with it, or set task=preference."
            raise ConfigError([Problem("task.name=grpo", f"can't write answers with this model: {reason}.", fix)])
        self.first, self.num_shares = texts_of_rank(model, processes)

    def write(
        self, questions: Sequence[Question], num_generations: int, step: int, first_prompt: int = 0
    ) -> list[Completion]:
        """Answers to each prompt, those to one side by side; the same on every rank.

        Args:
            questions: the prompts.
            num_generations: answers to each.
            step: of the prompts, of which random numbers are made; `HELD_OUT` for those that are held out.
            first_prompt: the number of the first prompt in its step, of which they are made too.

        Raises:
            torch.OutOfMemoryError: there is no memory for the cache of a single text.
        """
        num_all = len(questions) * num_generations
        mine = range(self.first * num_all // self.num_shares, (self.first + 1) * num_all // self.num_shares)
        requests = []
        for number in mine:
            prompt, answer = divmod(number, num_generations)
            key = _key(self.seed, step, first_prompt + prompt, answer)
            requests.append(Request(questions[prompt].tokens, self.settings.max_completion_length, key=key))
        self._complete(requests)
        written = _Written(
            numbers=np.array(mine, dtype=np.int64),
            lengths=np.array([len(request.completion) for request in requests], dtype=np.int64),
            tokens=np.array([token for request in requests for token in request.completion], dtype=np.int32),
            log_probs=np.array([value for request in requests for value in request.log_probs], dtype=np.float32),
        )
        found: dict[int, Completion] = {}
        for part in self.processes.gather(written, _Written):
            ends = np.cumsum(part.lengths)
            for number, end, length in zip(part.numbers.tolist(), ends.tolist(), part.lengths.tolist(), strict=True):
                span = slice(end - length, end)
                found[number] = Completion(part.tokens[span].tolist(), part.log_probs[span].tolist())
        return [found[number] for number in range(num_all)]

    def is_cut(self, completion: Completion) -> bool:
        """Whether an answer has no end within its room."""
        tokens = completion.tokens
        if len(tokens) < self.settings.max_completion_length:
            return False
        return tokens[-1] not in self.ends and not self.stops(tokens)

    def answer(self, completion: Completion) -> str:
        """The text of an answer, without what ends it."""
        return self.stops.cut(self.text(completion.tokens))

    def text(self, tokens: list[int]) -> str:
        """The text of tokens, without special ones."""
        return self.contained.decode(tokens, skip_special_tokens=True)

    def _complete(self, requests: list[Request]) -> None:
        """Write this rank's answers, in memory that is given back before training goes on."""
        if not requests:
            return
        settings = self.settings
        sampling = Sampling(settings.temperature, settings.top_k or None, settings.top_p, min_p=settings.min_p)
        with self.model.without_dropout():
            completer = Completer(
                self.model.base,
                self.processes.device,
                sampling,
                self.ends,
                self.tokenizer.pad_token_id or 0,
                settings.max_slots,
                by_rows=ByRows(self.model) if isinstance(self.model, FSDPModule) else None,
                stops=self.stops,
                is_keyed=True,
            )
            try:
                completer.complete(requests)
            finally:
                completer.release()


def describe_shares(num_answers: int, num_shares: int, settings: RolloutConfig) -> str:
    """How ranks divide the answers of a step, as a line of the log."""
    text = f"{num_answers} answers a step ({show('rollout.num_generations', settings.num_generations)})"
    if num_shares == 1:
        return text
    least, rest = divmod(num_answers, num_shares)
    shares = f"{least} or {least + 1}" if rest else f"{least}"
    return f"{text}, of which each of {num_shares} writes {shares}"


def _key(seed: int, step: int, prompt: int, answer: int) -> int:
    """A number for a text, from 0 to 2**63 - 1, of which its random numbers are made."""
    state = np.random.SeedSequence([seed, step, prompt, answer]).generate_state(1, np.uint64)
    return int(state[0]) >> 1
