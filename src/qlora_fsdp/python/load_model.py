"""`load(adapter)`: a trained model in this process, as PEFT's, and what it says of prompts and rows."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any

import peft
import torch.distributed as dist
from transformers import PreTrainedTokenizerBase

from qlora_fsdp.common.errors import LaunchError, Problem, refuse
from qlora_fsdp.common.startup import is_rank
from qlora_fsdp.config.checks.check_settings import Needs, check_settings
from qlora_fsdp.config.reading.commands import BaseAndAdapterSettings, load_command
from qlora_fsdp.config.schema import Config, DistributedConfig
from qlora_fsdp.config.settings import show
from qlora_fsdp.generate import GenerateSettings, check_generation, check_lengths, complete, tokenize_prompts
from qlora_fsdp.inference.trained import load_trained, num_positions
from qlora_fsdp.predict.predictor import BATCH_SIZE, Predictor
from qlora_fsdp.runtime.processes import Processes, start_processes

if TYPE_CHECKING:
    from qlora_fsdp.model.assemble import AssembledModel


@dataclass(frozen=True)
class LoadedModel:
    """A quantized base with its adapter, on one GPU or the CPU, in evaluation mode.

    Attributes:
        model: PEFT's model. Its `forward` and `generate` are those of transformers' class inside.
        tokenizer: the one that it was trained with.
    """

    model: peft.PeftModel
    tokenizer: PreTrainedTokenizerBase
    _trained: AssembledModel = field(repr=False)
    _config: Config = field(repr=False)
    _adapter: str | None = field(repr=False)
    _processes: Processes = field(repr=False)

    def complete(
        self,
        prompts: Sequence[str | list[dict[str, Any]]],
        max_new_tokens: int = 128,
        temperature: float = 0.0,
        top_p: float = 1.0,
        seed: int = 0,
        raw: bool = False,
    ) -> list[str]:
        """What the model writes to each prompt, as `qlora-fsdp generate` has it.

        Args:
            prompts: texts, each written as in training, or conversations, each a list of messages.
            max_new_tokens: of each text, at most.
            temperature: 0 takes the likeliest token each time.
            top_p: sample among the likeliest tokens that make up this much probability.
            seed: of sampling.
            raw: go on from texts as they are.

        Raises:
            ConfigError: the model writes no text, a number makes no sense, or one text stands in place of a list.
            DataError: a prompt is empty, or too long for the model.
        """
        if isinstance(prompts, str):
            refuse([Problem("prompts", "is one text, and not a list of them.", "Give [text].")])
        settings = GenerateSettings(
            adapter=self._adapter,
            prompt="",
            raw=raw,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_p=top_p,
            seed=seed,
        )
        check_generation(settings, self._config.task, [])
        rows = [{"prompt": prompt} for prompt in prompts]
        tokens = tokenize_prompts(rows, self._trained, settings, self._config.data.system_prompt)
        check_lengths(tokens, settings, num_positions(self._trained))
        texts = complete(tokens, self._trained, settings, self._processes)
        return [texts[number] for number in range(len(prompts))]

    def predict(self, rows: Sequence[dict[str, Any]], batch_size: int = BATCH_SIZE) -> list[dict[str, Any]]:
        """What a classifier, a regression or a reward model says of each row, as `qlora-fsdp predict` has it.

        Args:
            rows: rows as for training, whose labels are not needed.
            batch_size: texts that are computed at a time.

        Raises:
            ConfigError: the model writes text.
            DataError: a row can't be read.
        """
        if self._config.task.is_causal:
            reason = "writes text, and has no head that predicts."
            refuse([Problem(show("task.name", self._config.task.name), reason, "Call complete() with its prompts.")])
        config = self._config
        predictor = Predictor(self._trained, config.task, config.data.columns, config.training.max_length)
        encoded = [predictor.encode(row, f"row {number}") for number, row in enumerate(rows, start=1)]
        return predictor.predict(encoded, batch_size, self._processes)


def load(
    adapter: str | os.PathLike[str] | None, settings: Mapping[str, Any] | None = None, other_base: bool = False
) -> LoadedModel:
    """Loads an adapter onto its base, quantized as it was trained, on the first GPU or the CPU.

    Args:
        adapter: the folder that training wrote, or of any LoRA adapter of PEFT's; None for a base alone.
        settings: other settings than the adapter's folder has, by their dotted keys: `{"model.path": "/models/8b"}`.
        other_base: allow a base with other weights than the adapter was trained on.

    Raises:
        UserError: the adapter, its base or a setting can't be used.
        LaunchError: this process is a rank, or has a process group of its own.
    """
    is_of_others = dist.is_initialized() and not _alone.cache_info().currsize
    if is_rank(os.environ) or is_of_others:
        raise LaunchError("load() is for a process of its own, and this one is a rank, or has a process group.")
    typed = [f"{key}={_as_typed(value)}" for key, value in (settings or {}).items()]
    if adapter is not None:
        typed.append(f"adapter={os.fspath(adapter)}")
    typed.append(f"other_base={_as_typed(other_base)}")
    needs = Needs(optional=("data.path", "reward.functions"))
    own, config = load_command(typed, BaseAndAdapterSettings, "", needs=needs)
    refuse(check_settings(config, needs))
    processes = _alone()
    trained = load_trained(config, own, processes, generates=config.task.is_causal)
    return LoadedModel(trained.model.model, trained.tokenizer, trained, config, own.adapter, processes)


@cache
def _alone() -> Processes:
    """This process as the only one, for all calls of `load`."""
    return start_processes(DistributedConfig().timeout_seconds)


def _as_typed(value: Any) -> str:
    """A value as the command line has it."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return str(value)
