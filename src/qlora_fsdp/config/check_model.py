"""Checks of the settings of the model, of its quantization and of the adapters. Part of `check_settings`."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterator
from typing import Any

from qlora_fsdp.common.errors import Problem
from qlora_fsdp.common.hub import path_exists
from qlora_fsdp.common.text import is_number
from qlora_fsdp.config.schema import Config, DataFormat, Dtype, EmbeddingStorage, MatmulKind, Weights
from qlora_fsdp.config.settings import example_of, problem_about, problem_with, show, value_of

NO_FLOAT16 = "needs loss scaling, which is not here: small gradients would become 0."
# The types of scaled rotary embeddings, with the numbers that transformers takes for each besides those of all.
ROPE_TYPES = {
    "yarn": ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"),
    "linear": (),
    "llama3": ("low_freq_factor", "high_freq_factor"),
}
_ROPE_COMMON = ("factor", "rope_theta", "original_max_position_embeddings")
# The lower and the higher of two of them, with their values where they are not set.
_ROPE_ORDER = {"yarn": ("beta_slow", 1, "beta_fast", 32), "llama3": ("low_freq_factor", 1, "high_freq_factor", 4)}
MAX_ROPE_FACTOR = 1024
_INIT_LORA_WEIGHTS = ("gaussian", "orthogonal")  # besides true, those of PEFT's that leave the base weights alone


def check_model(config: Config) -> Iterator[Problem]:
    """Yields what is wrong with `model`, `tokenizer`, `quant`, `lora` and `compute`."""
    for find_problems in (_model, _rope_scaling, _tokens, _compute, _quant, _embeddings, _lora):
        yield from find_problems(config)


def is_local_path(text: str) -> bool:
    """Whether the text means a path and not a hub name: it exists, or is written as a path (/, ./, ../ or ~ first)."""
    return text.startswith(("/", "./", "../", "~")) or text in (".", "..") or path_exists(text)


def int8_embeddings_problem(is_tied: bool, kind: str) -> Problem:
    """Returns why `quant.embeddings=int8` can't be used with a model, once the model's shape is known."""
    reason = f"can't store embeddings of the class {kind}."
    if is_tied:
        reason = "can't be used with this model, whose head shares its weight with the embeddings."
    return problem_about("quant.embeddings", EmbeddingStorage.int8, reason, "Set quant.embeddings=none.")


def _model(config: Config) -> Iterator[Problem]:
    model = config.model
    preset = "Set model to a preset, such as llama3.1-8b-instruct or qwen3-8b (docs/models.md lists all)"
    if model.path is None and model.weights is Weights.checkpoint:
        fix = f"{preset}, or model.path to a folder or a hub name."
        yield problem_with(config, "model.path", "names no model.", fix)
    if model.weights is Weights.random and not model.config and model.path is None:
        fix = f"{preset}, model.config, or model.path to a folder with a config.json or a hub name."
        yield problem_with(config, "model.weights", "has no config to make up weights from.", fix)
    if model.name == "custom" and model.weights is Weights.checkpoint and model.config and model.path is not None:
        reason = "has no effect on model.weights=checkpoint: the config.json of model.path counts."
        fix = "Leave it out (model.config={}), change a copy of that file, or set model.weights=random for a dry run."
        yield problem_with(config, "model.config", reason, fix)
    is_dry_run = config.data.format is DataFormat.random
    is_there = model.path is not None and path_exists(model.path)
    if model.name == "tiny" and is_there and model.weights is Weights.random and not is_dry_run:
        reason = "is not read: model=tiny makes its weights up."
        yield problem_with(config, "model.path", reason, "Leave model=tiny out, or set model.weights=checkpoint too.")
    if model.path is not None:
        yield from _missing(config, "model.path", "Set model.path to a folder with config.json and safetensors files.")
    if model.tokenizer_path not in (None, "bytes"):
        yield from _missing(config, "model.tokenizer_path", "Set model.tokenizer_path to a folder with a tokenizer.")


def _rope_scaling(config: Config) -> Iterator[Problem]:
    wanted, example = config.model.rope_scaling, f"Set {example_of('model.rope_scaling')}."
    if not wanted:
        return
    kind = wanted.get("rope_type")
    if kind not in ROPE_TYPES:
        reason = f"has no rope_type of {', '.join(ROPE_TYPES)}."
        yield problem_with(config, "model.rope_scaling", reason, example)
    factor = wanted.get("factor")
    if not is_number(factor) or not 1 < factor <= MAX_ROPE_FACTOR:
        reason = f"needs a factor above 1, up to {MAX_ROPE_FACTOR}: how many times as many positions."
        yield problem_with(config, "model.rope_scaling", reason, example)
    if kind in ROPE_TYPES:
        for reason in _rope_mistakes(kind, wanted):
            yield problem_with(
                config, "model.rope_scaling", reason, "Leave it out, or set it as docs/long-rows.md says."
            )


def _rope_mistakes(kind: str, wanted: dict[str, Any]) -> Iterator[str]:
    """What is wrong with the values of `model.rope_scaling` besides its type and its factor."""
    numbers = (*_ROPE_COMMON, *ROPE_TYPES[kind])
    found = [key for key in wanted if key not in ("rope_type", "factor")]
    for key in found:
        if kind == "yarn" and key == "truncate":
            if not isinstance(wanted[key], bool):
                yield f"has truncate={wanted[key]}, which is neither true nor false."
        elif key not in numbers:
            yield f"has {key}, which {kind} does not take: {', '.join(numbers)}."
        elif not (is_number(wanted[key]) and 0 < wanted[key] < math.inf):
            yield f"has {key}={wanted[key]}, which is no number above 0."
    if kind in _ROPE_ORDER:
        low, low_default, high, high_default = _ROPE_ORDER[kind]
        ends = wanted.get(low, low_default), wanted.get(high, high_default)
        if all(map(is_number, ends)) and ends[0] >= ends[1]:
            yield f"needs a {low} below {high}."


def _missing(config: Config, key: str, fix: str) -> Iterator[Problem]:
    path = value_of(config, key)
    if re.match(r"https?://", path):
        name = "/".join(path.split("/")[3:5])
        yield problem_with(config, key, "is an address.", f"Set {key}={name}, the name on the hub, or a folder.")
    elif is_local_path(path) and not path_exists(path):
        yield problem_with(config, key, "does not exist.", fix)


def _tokens(config: Config) -> Iterator[Problem]:
    wanted = [*config.tokenizer.add_tokens, *config.tokenizer.add_special_tokens]
    for key in ("add_tokens", "add_special_tokens"):
        if any(not token.strip() for token in getattr(config.tokenizer, key)):
            fix = 'Set tokens of at least one letter, e.g. ["<call>","</call>"].'
            yield problem_with(config, f"tokenizer.{key}", "has a token that is empty.", fix)
    twice = sorted({token for token in wanted if wanted.count(token) > 1})
    if twice:
        reason = f"names a token twice, or one that tokenizer.add_special_tokens names too: {', '.join(twice)}."
        yield problem_with(config, "tokenizer.add_tokens", reason, "Name each once.")


def _compute(config: Config) -> Iterator[Problem]:
    if config.compute.matmul is not MatmulKind.fp8:
        return
    if not config.quant.load_in_4bit:
        reason = "works on 4-bit weights alone, and quant.load_in_4bit is false."
        yield problem_with(config, "compute.matmul", reason, "Set quant=nf4, or compute=dequantized.")
    if config.training.precision in (Dtype.float32, Dtype.float16):
        reason = f"gives bfloat16, and training.precision is {config.training.precision.value}."
        yield problem_with(config, "compute.matmul", reason, "Set training.precision=auto, or compute=dequantized.")


def _quant(config: Config) -> Iterator[Problem]:
    quant, precision = config.quant, config.training.precision
    if quant.load_in_4bit and quant.load_in_8bit:
        fix = "Choose with quant=nf4, quant=fp4 or quant=int8, which set both."
        yield problem_with(config, "quant.load_in_8bit", "contradicts quant.load_in_4bit=true.", fix)
    if not quant.load_in_4bit:
        return
    compute = quant.bnb_4bit_compute_dtype
    if compute is Dtype.float16:
        yield problem_with(config, "quant.bnb_4bit_compute_dtype", NO_FLOAT16, "Set quant.bnb_4bit_compute_dtype=auto.")
    elif Dtype.auto not in (compute, precision) and compute is not precision:
        reason = f"contradicts {show('training.precision', precision)}: products and activations have one dtype."
        fix = "Set only training.precision, which quant.bnb_4bit_compute_dtype=auto follows."
        yield problem_with(config, "quant.bnb_4bit_compute_dtype", reason, fix)


def _embeddings(config: Config) -> Iterator[Problem]:
    if config.quant.embeddings is not EmbeddingStorage.int8:
        return
    trained = {"embed_tokens", "lm_head"} & {name.rpartition(".")[2] for name in config.lora.modules_to_save or []}
    cause = f"lora.modules_to_save has {', '.join(sorted(trained))}" if trained else None
    if config.tokenizer.add_tokens or config.tokenizer.add_special_tokens:
        cause = "tokenizer adds tokens, whose rows are trained"
    if cause is not None:
        reason = f"keeps codes, which can't be trained, and {cause}."
        yield problem_with(config, "quant.embeddings", reason, "Set quant.embeddings=none.")


def _unknown_init(config: Config) -> Problem:
    """The problem with an initialisation of adapters that is not here: a slip, or one of PEFT's that is refused."""
    init = config.lora.init_lora_weights
    fix = "Set lora.init_lora_weights=true, gaussian or orthogonal."
    reason = "starts from whole base weights, of which a rank has only a part."
    if not isinstance(init, str):
        reason = "is not an initialisation that leaves the base model as it is."
    elif meant := difflib.get_close_matches(init.lower(), _INIT_LORA_WEIGHTS, n=1, cutoff=0.75):
        reason = "is no initialisation of PEFT's."
        fix = f"Did you mean {meant[0]}?"
    elif config.quant.load_in_4bit or config.quant.load_in_8bit:
        reason = (
            "starts from the base weights, which are packed codes here: it would take the packed bytes for numbers."
        )
    return problem_with(config, "lora.init_lora_weights", reason, fix)


def _lora(config: Config) -> Iterator[Problem]:
    lora = config.lora
    init = lora.init_lora_weights
    if isinstance(init, str):
        init = init.lower()
    if init is not True and init not in _INIT_LORA_WEIGHTS:
        yield _unknown_init(config)
    odd = [rank for rank in (lora.r, *lora.rank_pattern.values()) if rank % 2]
    if init == "orthogonal" and odd:
        reason = f"needs even ranks, and one is {odd[0]}."
        fix = "Set even numbers in lora.r and lora.rank_pattern, or lora.init_lora_weights=true."
        yield problem_with(config, "lora.init_lora_weights", reason, fix)
    targets = lora.target_modules
    is_names = isinstance(targets, list) and bool(targets) and all(isinstance(name, str) for name in targets)
    if not is_names and not (isinstance(targets, str) and targets):
        fix = "Set lora.target_modules=all-linear, or a list such as [q_proj,v_proj]."
        yield problem_with(config, "lora.target_modules", "is neither a list of names nor a regular expression.", fix)
    patterns = {"lora.target_modules": [targets] if isinstance(targets, str) else []}
    patterns |= {"lora.rank_pattern": list(lora.rank_pattern), "lora.alpha_pattern": list(lora.alpha_pattern)}
    patterns["quant.llm_int8_skip_modules"] = config.quant.llm_int8_skip_modules or []
    for key, expressions in patterns.items():
        for expression in expressions:
            try:
                re.compile(expression)
            except re.error as error:
                reason = f"has {expression}, which is no regular expression: {error}."
                yield problem_with(config, key, reason, "Set names, or an expression such as .*[.]q_proj.")
    for key in ("lora.rank_pattern", "lora.alpha_pattern"):
        if any(not value > 0 for value in value_of(config, key).values()):
            fix = f"Give each name in {key} a value above 0."
            yield problem_with(config, key, "has a value that is not positive.", fix)
