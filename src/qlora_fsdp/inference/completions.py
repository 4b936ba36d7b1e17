"""Complete prompts with a loaded model: in slots with CUDA graphs (decoding/), or by transformers' `generate`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from transformers import GenerationConfig

from qlora_fsdp.decoding.completer import PROMPT_TOKENS, SHARED_PROMPT_TOKENS, Completer
from qlora_fsdp.decoding.sampling import Sampling, end_tokens, why_not
from qlora_fsdp.decoding.trial import why_not_in_slots
from qlora_fsdp.inference.generation_file import blaming_file, generation_config
from qlora_fsdp.inference.prompts import pad_left
from qlora_fsdp.memory.generation import MAX_SLOTS
from qlora_fsdp.model.assemble import AssembledModel
from qlora_fsdp.runtime.processes import Processes
from qlora_fsdp.runtime.run_command import log
from qlora_fsdp.sharding.by_rows import ByRows, why_not_by_rows
from qlora_fsdp.sharding.shard import bypassing_root


def make_completer(
    trained: AssembledModel,
    generation: GenerationConfig,
    processes: Processes,
    max_slots: int | None = None,
) -> Completer | None:
    """Make what completes prompts; None if transformers has to, and the log says why. Collective.

    Args:
        trained: what `load_trained` returned for a model that generates.
        generation: how tokens are chosen.
        processes: this rank's device is used. All ranks get the same answer.
        max_slots: texts that run at the same time, at most; None for as many as are fast.
    """
    is_sharded = isinstance(trained.model, FSDPModule)
    reason = why_not_by_rows(trained.model, processes.device) or why_not(generation)
    reason = reason or why_not_in_slots(trained.model.base.config, trained.spec.trust_remote_code)
    if reason is not None:
        log.info(f"Generation: by transformers, a token at a time ({reason})")
        return None
    tokenizer = trained.tokenizer
    assert isinstance(tokenizer.pad_token_id, int)
    return Completer(
        trained.model.base,
        processes.device,
        Sampling.of(generation),
        end_tokens(generation),
        tokenizer.pad_token_id,
        max_slots or MAX_SLOTS,
        prompt_tokens=SHARED_PROMPT_TOKENS if is_sharded else PROMPT_TOKENS,
        by_rows=ByRows(trained.model) if is_sharded else None,
    )


def sampling_config(trained: AssembledModel, temperature: float, top_p: float, max_new_tokens: int) -> GenerationConfig:
    """The generation config of the model's files, with what a command sets."""
    samples = temperature > 0
    config = generation_config(trained)
    config.update(do_sample=samples, max_new_tokens=max_new_tokens, use_cache=True)
    if samples:
        config.update(temperature=temperature, top_p=top_p, top_k=0)
    else:  # generation_config.json may set these, but they are for sampling
        config.update(temperature=None, top_p=None, top_k=None)
    return config


def complete_by_transformers(
    prompts: list[list[int]],
    num_all: int,
    trained: AssembledModel,
    generation: GenerationConfig,
    processes: Processes,
    batch_size: int,
    seed: int,
) -> list[list[int]]:
    """The new tokens of this rank's prompts, by transformers' `generate`. Collective.

    Args:
        prompts: token ids of each prompt.
        num_all: number of prompts of all ranks. With a sharded model, all ranks take part in the same number of passes.
        trained: what `load_trained` returned for a model that generates.
        generation: how tokens are chosen.
        processes: all ranks take part.
        batch_size: prompts at a time.
        seed: seed of sampling.
    """
    tokenizer = trained.tokenizer
    assert isinstance(tokenizer.pad_token_id, int)
    found: list[list[int]] = []
    for number in range(-(-num_all // (processes.num_ranks * batch_size))):
        batch = prompts[number * batch_size : (number + 1) * batch_size]
        torch.manual_seed(seed * 1_000_003 + number * processes.num_ranks + processes.rank)
        input_ids, mask = pad_left(batch or [[tokenizer.pad_token_id]], tokenizer.pad_token_id)
        output = run_transformers(trained, input_ids, mask, generation, processes)
        found += [row[input_ids.shape[1] :] for row in output[: len(batch)].tolist()]
    return found


def run_transformers(
    trained: AssembledModel,
    input_ids: Tensor,
    attention_mask: Tensor,
    generation: GenerationConfig,
    processes: Processes,
    **options: Any,
) -> Tensor:
    """transformers' `generate`: prompt and completion, int64 [num_rows, length], on the CPU."""
    base: Any = trained.model.base
    with bypassing_root(trained.model) as is_sharded, blaming_file(trained, generation):
        output: Tensor = base.generate(
            input_ids.to(processes.device),
            attention_mask=attention_mask.to(processes.device),
            generation_config=generation,
            synced_gpus=is_sharded,
            tokenizer=trained.tokenizer,  # in which it looks for a generation config's stop_strings
            **options,
        )
    return output.cpu()
