"""What the model writes during training: at every evaluation it completes the beginnings of a few held-out rows."""

from __future__ import annotations

from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedTokenizerBase

from qlora_fsdp.config.schema import TrackingConfig
from qlora_fsdp.data.sequences import Sequences
from qlora_fsdp.model.shard import bypassing_root
from qlora_fsdp.model.task_model import TaskModel
from qlora_fsdp.runtime.processes import Processes


class Generations:
    """Completes the same prompts at every evaluation, with the likeliest token each time (greedy decoding).

    The prompt of a row ends where its first target begins; it is a question, say, or the first turns of a conversation.
    Where the whole row is a target, the prompt is its first half. The ranks share the prompts. There is no cache of
    keys and values: every new token takes a forward pass over all tokens before it, with training's own attention. That
    is fast enough for a few short completions.

    Args:
        config: how many rows, and how many new tokens for each.
        data: the held-out rows; None: there is nothing to complete.
        tokenizer: of the model.
        processes: all ranks take part.
    """

    def __init__(
        self, config: TrackingConfig, data: Sequences | None, tokenizer: PreTrainedTokenizerBase, processes: Processes
    ) -> None:
        self.tokenizer, self.processes = tokenizer, processes
        self.rows: list[tuple[list[int], list[int]]] = []  # the prompt's tokens, and those after it in the data
        for sequence in range(len(data) if data is not None and config.num_generations else 0):
            assert data is not None
            for tokens, is_target in data.rows_of(sequence):
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
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )

    def complete(self, model: TaskModel) -> list[dict[str, Any]]:
        """Prompt, completion and reference of each row, as text. Every rank calls this.

        Args:
            model: must have done a forward pass as a whole before, in which FSDP prepares itself.
        """
        if not self.rows:
            return []
        was_training, base = model.training, model.base
        model.eval()
        mine: dict[int, str] = {}
        rank, num_ranks = self.processes.rank, self.processes.num_ranks
        with bypassing_root(model, trains=True):
            for start in range(0, len(self.rows), num_ranks):
                # A rank that has no prompt left completes the last one too, because all ranks take part in gathers.
                number = min(start + rank, len(self.rows) - 1)
                prompt = torch.tensor([self.rows[number][0]], device=self.processes.device)
                output = base.generate(  # type: ignore[operator]
                    prompt,
                    attention_mask=torch.ones_like(prompt),
                    generation_config=self.settings,
                    synced_gpus=num_ranks > 1,
                )
                mine[number] = self._text(output[0, prompt.shape[1] :].tolist())
        model.train(was_training)
        texts: dict[int, str] = {}
        for part in self.processes.gather(mine):
            texts |= part
        return [
            {"prompt": self._text(prompt), "completion": texts[number], "reference": self._text(reference)}
            for number, (prompt, reference) in enumerate(self.rows)
        ]

    def _text(self, tokens: list[int]) -> str:
        return str(self.tokenizer.decode(tokens, skip_special_tokens=True))
