"""Complete prompts with a loaded model: in slots with CUDA graphs (decoding/), or by transformers' `generate`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from transformers import GenerationConfig, PretrainedConfig

from qlora_fsdp.common.contained import LimitError, call
from qlora_fsdp.common.errors import CheckpointError
from qlora_fsdp.common.foreign_files import read_json_object
from qlora_fsdp.common.model_figures import MAX_CONFIG_BYTES
from qlora_fsdp.common.text import name_error, shorten
from qlora_fsdp.data.chats.stops import end_ids_of, end_texts_of
from qlora_fsdp.decoding.completer import PROMPT_TOKENS, SHARED_PROMPT_TOKENS, Completer
from qlora_fsdp.decoding.sampling import Sampling, end_tokens, why_not_sampled
from qlora_fsdp.decoding.stop_strings import StopsOfGenerate, StopStrings, stop_strings
from qlora_fsdp.decoding.trial import MAX_LENGTH, TOLERANCE, why_not_in_slots
from qlora_fsdp.inference.prompts import pad_left
from qlora_fsdp.layers.liger import stock_models
from qlora_fsdp.model.assemble import AssembledModel
from qlora_fsdp.model.trials.row_trial import RowTrial
from qlora_fsdp.runtime.hardware import is_shortage
from qlora_fsdp.runtime.processes import Processes
from qlora_fsdp.runtime.run_command import log
from qlora_fsdp.sharding.by_rows import ByRows, why_not_by_rows
from qlora_fsdp.sharding.shard import bypassing_root

GENERATION_FILE = "generation_config.json"
MOST_ROWS = 2**8  # for each prompt, each with a number for every token of a vocabulary; who has beams has some ten
LIMIT = 2**63  # of numbers; torch has none above
STOCK_BATCH_SIZE = 8  # prompts at a time where transformers completes them, whose cache grows
PAD = 0
NUM_NEW = 2


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < LIMIT


def _is_count(value: Any) -> bool:
    """Whether it can be a number of rows for each prompt, which are computed at the same time."""
    return _is_number(value) and abs(value) <= MOST_ROWS


def _are_ids(value: Any) -> bool:
    ids = value if isinstance(value, list) else [value]
    return all(type(each) is int and abs(each) < LIMIT for each in ids)


def _are_texts(value: Any) -> bool:
    texts = value if isinstance(value, list) else [value]
    return all(isinstance(each, str) for each in texts)


# What the values of a generation_config.json have to be, of those of which transformers does not say it clearly.
_FITS: Mapping[str, Callable[[Any], bool]] = {
    **dict.fromkeys(("temperature", "top_k", "top_p", "typical_p", "guidance_scale", "max_time"), _is_number),
    **dict.fromkeys(("max_length", "max_new_tokens", "min_length", "min_new_tokens"), _is_number),
    "no_repeat_ngram_size": _is_number,
    **dict.fromkeys(("num_beams", "num_beam_groups", "num_return_sequences", "prompt_lookup_num_tokens"), _is_count),
    **dict.fromkeys(("eos_token_id", "pad_token_id", "forced_eos_token_id", "suppress_tokens"), _are_ids),
    "min_p": lambda value: _is_number(value) and 0 <= value <= 1,
    "stop_strings": _are_texts,
    "repetition_penalty": lambda value: _is_number(value) and value > 0,
}


def generation_config(trained: AssembledModel) -> GenerationConfig:
    """The generation_config.json of the model files, with the tokenizer's padding.

    Generation stops at the ids that the file names, and where answers end in training (`data.chats.stops`): at the
    tokenizer's end token, and at the token or the text with which its chat template ends answers.

    Raises:
        CheckpointError: the file can't be read, or a value in it can't be used.
    """
    file = None if trained.files.folder is None else trained.files.folder / GENERATION_FILE
    config = GenerationConfig() if file is None or not file.is_file() else _read_generation(file)
    stops = dict.fromkeys([*end_tokens(config), *end_ids_of(trained.tokenizer)])
    config.eos_token_id = list(stops) or None
    texts = dict.fromkeys([*stop_strings(config), *end_texts_of(trained.tokenizer)])
    config.stop_strings = list(texts) or None
    config.pad_token_id = trained.tokenizer.pad_token_id
    return config


@contextmanager
def blaming_file(trained: AssembledModel, config: GenerationConfig) -> Iterator[None]:
    """Around transformers' `generate`, which looks at most settings of a generation_config.json only by then.

    Raises:
        CheckpointError: it can't generate with a setting that is not known here.
    """
    try:
        yield
    except (TypeError, ValueError) as error:
        reason = why_not_sampled(config)
        if reason is None:
            raise
        file = f"{trained.files.folder}/{GENERATION_FILE}"
        raise CheckpointError(
            f"transformers can't generate with {file}: {str(error).strip()} ({reason}). Correct it there, or remove it."
        ) from error


def _load_generation(folder: str) -> GenerationConfig:
    return GenerationConfig.from_pretrained(folder)


def _try_generation(folder: str) -> None:
    _load_generation(folder)


def _read_generation(file: Path) -> GenerationConfig:
    try:
        values = read_json_object(file, MAX_CONFIG_BYTES)
        bad = next((key for key, fits in _FITS.items() if values.get(key) is not None and not fits(values[key])), None)
        if bad is not None:
            value = shorten(json.dumps(values[bad]))
            raise CheckpointError(f"{file} sets {bad} to {value}, which can't be used. Correct it there, or remove it.")
        call(_try_generation, str(file.parent))
        return _load_generation(str(file.parent))
    except CheckpointError:
        raise
    except LimitError as error:
        raise CheckpointError(f"{file} can't be used: its loading {error}. Correct it, or copy it again.") from None
    except Exception as error:  # the file may hold anything
        raise CheckpointError(f"{file} can't be used: {error}. Correct it, or copy it again.") from error


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
    reason = why_not_by_rows(trained.model, processes.device) or why_not_sampled(generation)
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
        max_slots,
        prompt_tokens=SHARED_PROMPT_TOKENS if is_sharded else PROMPT_TOKENS,
        by_rows=ByRows(trained.model) if is_sharded else None,
        stops=StopStrings(tokenizer, stop_strings(generation)),
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
    # Its own criterion for the config's stop_strings reads the whole vocabulary by the tokenizer's decoder.
    stops = StopStrings(trained.tokenizer, stop_strings(generation))
    others = options.pop("stopping_criteria", None) or []
    criteria = [*others, StopsOfGenerate(stops, input_ids.shape[1])] if stops.texts else others
    own = copy(generation)
    own.stop_strings = None
    with bypassing_root(trained.model) as is_sharded, blaming_file(trained, generation):
        output: Tensor = base.generate(
            input_ids.to(processes.device),
            attention_mask=attention_mask.to(processes.device),
            generation_config=own,
            synced_gpus=is_sharded,
            stopping_criteria=criteria,
            **options,
        )
    return output.cpu()


def stock_batch_size(config: PretrainedConfig, trust_remote_code: bool, wanted: int | None) -> int:
    """How many prompts transformers completes at a time: `wanted` or as many as are fast, and one if padding is seen.

    Args:
        config: the model's.
        trust_remote_code: run model code that comes with the files.
        wanted: None for as many as are fast.
    """
    size = wanted or STOCK_BATCH_SIZE
    if size == 1:
        return size
    reason = why_not_padded(config.get_text_config(), trust_remote_code)
    if reason is not None:
        log.info(f"Prompts are completed one at a time: {reason}")
        return 1
    return size


def why_not_padded(config: PretrainedConfig, trust_remote_code: bool) -> str | None:
    """Why such a model's logits are others beside a longer prompt; None if they are not, or if that can't be tried."""
    trial = RowTrial(config, MAX_LENGTH, trust_remote_code=trust_remote_code)
    if trial.error is not None:
        return None
    try:
        with stock_models(), torch.no_grad():
            difference = _difference(trial)
    except Exception as error:  # classes are transformers', or come with a model
        if is_shortage(error):
            raise
        return f"padded prompts can't be computed ({name_error(error)})"
    if not difference <= TOLERANCE:
        return f"beside a longer prompt its logits would differ by {difference:.1g} of the largest"
    return None


def _difference(trial: RowTrial) -> float:
    """The largest difference of a logit of the next two tokens, as a part of the largest logit."""
    model, rows = trial.model.eval(), [row.tolist() for row in trial.rows]
    beside = _complete(model, rows)
    largest = 0.0
    scale = 0.0
    for index, row in enumerate(rows):
        alone = _complete(model, [row])
        for step, (found, expected) in enumerate(zip(beside.logits, alone.logits, strict=True)):
            largest = max(largest, float((found[index] - expected[0]).abs().max()))
            scale = max(scale, float(expected.abs().max()))
            if beside.sequences[index, step - NUM_NEW] != alone.sequences[0, step - NUM_NEW]:
                break  # the next logits are those of other texts
    return largest / scale


def _complete(model: Any, rows: list[list[int]]) -> Any:
    input_ids, mask = pad_left(rows, PAD)
    options = {"do_sample": False, "min_new_tokens": NUM_NEW, "max_new_tokens": NUM_NEW, "pad_token_id": PAD}
    return model.generate(input_ids, attention_mask=mask, output_logits=True, return_dict_in_generate=True, **options)
