"""What the model writes during training: at every evaluation it completes the beginnings of a few held-out rows."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from transformers import GenerationConfig, PreTrainedTokenizerBase

from qlora_fsdp.common.text import first_line
from qlora_fsdp.config.schema import TrackingConfig
from qlora_fsdp.data.chats.stops import end_ids_of, end_texts_of
from qlora_fsdp.data.sequences import Sequences
from qlora_fsdp.data.tokenizer import ContainedTokenizer
from qlora_fsdp.decoding.completer import Completer, NoRoom, Request
from qlora_fsdp.decoding.sampling import Sampling, end_tokens
from qlora_fsdp.decoding.stop_strings import StopsOfGenerate, StopStrings
from qlora_fsdp.decoding.trial import why_not_in_slots
from qlora_fsdp.memory.workload import MAX_SLOTS
from qlora_fsdp.model.positions import num_learned_positions
from qlora_fsdp.model.tasks.task_model import TaskModel
from qlora_fsdp.runtime.processes import Processes
from qlora_fsdp.sharding.by_rows import ByRows, has_room, texts_of_rank, why_not_by_rows
from qlora_fsdp.sharding.shard import bypassing_root

log = logging.getLogger("qlora_fsdp")


class Generations:
    """Completes the same prompts at every evaluation, with the likeliest token each time (greedy decoding).

    The prompt of a row ends where its first target begins; it is a question, say, or the first turns of a conversation.
    Where the whole row is a target, the prompt is its first half. Of a pair of answers, the chosen one stands beside
    the completion. The ranks share the prompts.

    Texts are completed in slots (decoding/), whose memory is given back before training goes on. Ranks that share the
    model complete the same ones together (sharding/by_rows.py). A model that can't be run so has no cache of keys and
    values: every new token takes a forward pass over all tokens before it, with training's own attention.

    Args:
        config: how many rows, and how many new tokens for each.
        data: the held-out rows; None: there is nothing to complete.
        tokenizer: the model's tokenizer.
        processes: all ranks take part.
        trust_remote_code: run model code that comes with the model's files.
    """

    def __init__(
        self,
        config: TrackingConfig,
        data: Sequences | None,
        tokenizer: PreTrainedTokenizerBase,
        processes: Processes,
        trust_remote_code: bool,
    ) -> None:
        self.contained = ContainedTokenizer(tokenizer)
        self.processes = processes
        self.trust_remote_code = trust_remote_code
        self.uses_slots: bool | None = None  # decided when the model is there
        self.rows: list[tuple[list[int], list[int]]] = []  # the prompt's tokens, and those after it in the data
        for sequence in range(len(data) if data is not None and config.num_generations else 0):
            assert data is not None
            for tokens, is_target in data.rows_of(sequence)[:: max(1, data.num_answers)]:  # a pair has one prompt
                first = int(is_target.argmax())
                end = first if first > 1 else max(1, len(tokens) // 2)
                self.rows.append((tokens[:end].tolist(), tokens[end:].tolist()))
            if len(self.rows) >= config.num_generations:
                break
        del self.rows[config.num_generations :]
        self.settings = GenerationConfig(
            do_sample=False,
            max_new_tokens=config.generation_tokens,
            use_cache=False,
            eos_token_id=list(end_ids_of(tokenizer)) or None,
            pad_token_id=tokenizer.pad_token_id,
        )
        self.stops = StopStrings(tokenizer, end_texts_of(tokenizer))

    def complete(self, model: TaskModel) -> list[dict[str, Any]]:
        """Prompt, completion and reference of each row, as text. Every rank calls this.

        Args:
            model: must have done a forward pass as a whole before, in which FSDP prepares itself.
        """
        if not self.rows:
            return []
        with model.without_dropout():
            mine = self._complete_in_slots(model) if self._can_use_slots(model) else None
            if self.uses_slots:
                why_not = self.processes.first_error(mine if isinstance(mine, str) else None)
                if why_not is not None:
                    log.warning(f"Generations: a pass through the model for every token: {why_not}")
                if why_not is not None and isinstance(model, FSDPModule):
                    mine = None  # all ranks, or none, take part in passes
            if not isinstance(mine, dict):
                mine = self._complete_by_passes(model)
        texts: dict[int, str] = {}
        for part in self.processes.gather(mine, dict[int, str]):
            texts |= part
        return [
            {"prompt": self._text(prompt), "completion": texts[number], "reference": self._text(reference)}
            for number, (prompt, reference) in enumerate(self.rows)
        ]

    def _can_use_slots(self, model: TaskModel) -> bool:
        """Whether texts are completed in slots. The first call finds out, and logs why not."""
        if self.uses_slots is None:
            reason = why_not_by_rows(model, self.processes.device)
            reason = reason or why_not_in_slots(model.base.config, self.trust_remote_code)
            self.uses_slots = reason is None
            if reason is not None:
                log.info(f"Generations: a pass through the model for every token ({reason})")
        return self.uses_slots

    def _complete_in_slots(self, model: TaskModel) -> dict[int, str] | str:
        """The completions of a share of the prompts, by their numbers; or why there is no memory for a cache.

        Each rank has every n-th prompt, for n ranks; ranks that share the model have the same ones.
        """
        by_rows = None
        if isinstance(model, FSDPModule):
            if not has_room(model, self.processes.device):
                return "a GPU has no memory to spare"
            by_rows = ByRows(model)
        first, step = texts_of_rank(model, self.processes)
        numbers = range(first, len(self.rows), step)
        if not numbers:
            return {}
        requests = [Request(prompt, self._room(model, prompt)) for prompt in (self.rows[n][0] for n in numbers)]
        completer = Completer(
            model.base,
            self.processes.device,
            Sampling(),
            end_tokens(self.settings),
            self.settings.pad_token_id or 0,
            min(MAX_SLOTS, len(numbers)),
            prompt_tokens=max(len(request.prompt) for request in requests),  # what training reads in one row
            by_rows=by_rows,
            stops=self.stops,
        )
        try:
            completer.complete(requests)
        except torch.OutOfMemoryError as error:
            if by_rows is not None and not isinstance(error, NoRoom):
                raise  # other ranks wait for this one
            return first_line(error)
        finally:
            completer.release()
        return {number: self._text(request.completion) for number, request in zip(numbers, requests, strict=True)}

    def _complete_by_passes(self, model: TaskModel) -> dict[int, str]:
        """Complete prompts by transformers, one per rank at a time. Collective if the model is sharded."""
        rank = self.processes.rank
        num_ranks = self.processes.num_ranks
        base = model.base
        has_stops = bool(self.stops.texts)
        mine: dict[int, str] = {}
        with bypassing_root(model, trains=True) as is_sharded:
            for start in range(0, len(self.rows), num_ranks):
                # A rank that has no prompt left completes the last one too, because all ranks take part in gathers.
                number = min(start + rank, len(self.rows) - 1)
                tokens = self.rows[number][0]
                prompt = torch.tensor([tokens], device=self.processes.device)
                output = base.generate(  # type: ignore[operator]
                    prompt,
                    attention_mask=torch.ones_like(prompt),
                    generation_config=self.settings,
                    max_new_tokens=self._room(model, tokens),
                    synced_gpus=is_sharded,
                    stopping_criteria=[StopsOfGenerate(self.stops, len(tokens))] if has_stops else None,
                )
                mine[number] = self._text(output[0, prompt.shape[1] :].tolist())
        return mine

    def _room(self, model: TaskModel, prompt: list[int]) -> int:
        """New tokens for a prompt, at most: a table of positions may end. The last token takes no position."""
        wanted, table = self.settings.max_new_tokens or 1, num_learned_positions(model)
        return wanted if table is None else max(1, min(wanted, table - len(prompt)))

    def _text(self, tokens: list[int]) -> str:
        return self.contained.decode(tokens, skip_special_tokens=True)
