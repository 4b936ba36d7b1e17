"""Checks of the settings of the model, of its quantization and of the adapters. Part of `check_settings`."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from typing import Any

from qlora_fsdp.common.errors import Problem
from qlora_fsdp.common.hub import path_exists
from qlora_fsdp.common.sizes import GROUP_SIZES
from qlora_fsdp.common.text import is_number
from qlora_fsdp.config.schema import (
    AttnImplementation,
    CompressedFormat,
    ComputeConfig,
    Dtype,
    EmbeddingStorage,
    LoraConfig,
    MatmulKind,
    ModelConfig,
    QuantConfig,
    TokenizerConfig,
    Weights,
)
from qlora_fsdp.config.settings import example_of, problem_about, problem_with, show
from qlora_fsdp.config.specs import TaskSpec

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
_INIT_LORA_WEIGHTS = ("gaussian", "orthogonal", "loftq")  # besides true, those of PEFT's that leave the base alone


def is_local_path(text: str) -> bool:
    """Whether the text means a path and not a hub name: it exists, or is written as a path (/, ./, ../ or ~ first)."""
    return text.startswith(("/", "./", "../", "~")) or text in (".", "..") or path_exists(text)


def int8_embeddings_problem(is_tied: bool, kind: str) -> Problem:
    """Returns why `quant.embeddings=int8` can't be used with a model, once the model's shape is known."""
    reason = f"can't store embeddings of the class {kind}."
    if is_tied:
        reason = "can't be used with this model, whose head shares its weight with the embeddings."
    return problem_about("quant.embeddings", EmbeddingStorage.int8, reason, "Set quant.embeddings=none.")


def check_model(model: ModelConfig, is_dry_run: bool) -> Iterator[Problem]:
    """Yields why the settings name no model, or more than one.

    Args:
        model: the section `model`.
        is_dry_run: whether the rows are random tokens.
    """
    preset = "Set model to a preset, such as llama3.1-8b-instruct or qwen3-8b (docs/models.md lists all)"
    is_random = model.weights is Weights.random
    if model.path is None and not is_random:
        fix = f"{preset}, or model.path to a folder or a hub name."
        yield problem_with(model, "model.path", "names no model.", fix)
    if model.path is None and is_random and not model.config:
        fix = f"{preset}, model.config, or model.path to a folder with a config.json or a hub name."
        yield problem_with(model, "model.weights", "has no config to make up weights from.", fix)
    names_checkpoint = model.name == "custom" and model.path is not None and not is_random
    if names_checkpoint and model.config:
        reason = "has no effect on model.weights=checkpoint: the config.json of model.path counts."
        fix = "Leave it out (model.config={}), change a copy of that file, or set model.weights=random for a dry run."
        yield problem_with(model, "model.config", reason, fix)
    is_there = model.path is not None and path_exists(model.path)
    if model.name == "tiny" and is_there and is_random and not is_dry_run:
        reason = "is not read: model=tiny makes its weights up."
        fix = "Leave model=tiny out, or set model.weights=checkpoint too."
        yield problem_with(model, "model.path", reason, fix)
    if model.path is not None:
        fix = "Set model.path to a folder with config.json and safetensors files."
        yield from check_path("model.path", model.path, fix)
    if model.tokenizer_path is not None and model.tokenizer_path != "bytes":
        fix = "Set model.tokenizer_path to a folder with a tokenizer."
        yield from check_path("model.tokenizer_path", model.tokenizer_path, fix)


def check_packages(model: ModelConfig) -> Iterator[Problem]:
    """Yields settings that need a package which this machine lacks. A plan for other machines does not ask."""
    wants_flash = model.attn_implementation is AttnImplementation.flash_attention_2
    if wants_flash and find_spec("flash_attn_2_cuda") is None:
        reason = "needs the package flash-attn, which is not installed."
        fix = "Run pip install flash-attn, or set it to auto."
        yield problem_with(model, "model.attn_implementation", reason, fix)


def check_path(key: str, path: str, fix: str) -> Iterator[Problem]:
    """Yields why a setting's value is neither a folder that is there nor a name on the hub."""
    if re.match(r"https?://", path):
        name = "/".join(path.split("/")[3:5])
        fix = f"Set {key}={name}, the name on the hub, or a folder."
        yield problem_about(key, path, "is an address.", fix)
    elif is_local_path(path) and not path_exists(path):
        yield problem_about(key, path, "does not exist.", fix)


def check_rope_scaling(model: ModelConfig) -> Iterator[Problem]:
    """Yields what is wrong with `model.rope_scaling`."""
    wanted = model.rope_scaling
    if not wanted:
        return
    example = f"Set {example_of('model.rope_scaling')}."
    kind = wanted.get("rope_type")
    if kind not in ROPE_TYPES:
        reason = f"has no rope_type of {', '.join(ROPE_TYPES)}."
        yield problem_with(model, "model.rope_scaling", reason, example)
    factor = wanted.get("factor")
    if not is_number(factor) or not 1 < factor <= MAX_ROPE_FACTOR:
        reason = f"needs a factor above 1, up to {MAX_ROPE_FACTOR}: how many times as many positions."
        yield problem_with(model, "model.rope_scaling", reason, example)
    if kind in ROPE_TYPES:
        fix = "Leave it out, or set it as docs/long-rows.md says."
        for reason in (*_find_odd_numbers(kind, wanted), *_find_wrong_order(kind, wanted)):
            yield problem_with(model, "model.rope_scaling", reason, fix)


def _find_odd_numbers(kind: str, wanted: Mapping[str, Any]) -> Iterator[str]:
    """What is wrong with single values of `model.rope_scaling` besides its type and its factor."""
    numbers = (*_ROPE_COMMON, *ROPE_TYPES[kind])
    for key, value in wanted.items():
        if key in ("rope_type", "factor"):
            continue
        if kind == "yarn" and key == "truncate":
            if not isinstance(value, bool):
                yield f"has truncate={value}, which is neither true nor false."
        elif key not in numbers:
            yield f"has {key}, which {kind} does not take: {', '.join(numbers)}."
        elif not is_number(value) or not 0 < value < math.inf:
            yield f"has {key}={value}, which is no number above 0."


def _find_wrong_order(kind: str, wanted: Mapping[str, Any]) -> Iterator[str]:
    """Two numbers of `model.rope_scaling` that stand the wrong way round."""
    if kind not in _ROPE_ORDER:
        return
    low_name, low_default, high_name, high_default = _ROPE_ORDER[kind]
    low = wanted.get(low_name, low_default)
    high = wanted.get(high_name, high_default)
    if is_number(low) and is_number(high) and low >= high:
        yield f"needs a {low_name} below {high_name}."


def check_tokens(tokenizer: TokenizerConfig) -> Iterator[Problem]:
    """Yields what is wrong with the tokens that are added."""
    tokens = {
        "tokenizer.add_tokens": tokenizer.add_tokens,
        "tokenizer.add_special_tokens": tokenizer.add_special_tokens,
    }
    for key, added in tokens.items():
        if any(not token.strip() for token in added):
            fix = 'Set tokens of at least one letter, e.g. ["<call>","</call>"].'
            yield problem_about(key, added, "has a token that is empty.", fix)
    both = [*tokenizer.add_tokens, *tokenizer.add_special_tokens]
    twice = sorted({token for token in both if both.count(token) > 1})
    if twice:
        reason = f"names a token twice, or one that tokenizer.add_special_tokens names too: {', '.join(twice)}."
        yield problem_with(tokenizer, "tokenizer.add_tokens", reason, "Name each once.")


def check_compute(compute: ComputeConfig, quant: QuantConfig, precision: Dtype) -> Iterator[Problem]:
    """Yields why matrix products can't be computed in fp8."""
    if compute.matmul is not MatmulKind.fp8:
        return
    if not quant.load_in_4bit:
        reason = "works on nf4 and fp4 weights alone, and quant.load_in_4bit is false."
        yield problem_with(compute, "compute.matmul", reason, "Set quant=nf4, or compute=dequantized.")
    if precision in (Dtype.float32, Dtype.float16):
        reason = f"gives bfloat16, and training.precision is {precision.value}."
        yield problem_with(compute, "compute.matmul", reason, "Set training.precision=auto, or compute=dequantized.")


def check_quant(quant: QuantConfig, precision: Dtype) -> Iterator[Problem]:
    """Yields what in `quant` contradicts something else."""
    if quant.load_in_4bit and quant.load_in_8bit:
        fix = "Choose with quant=nf4, quant=fp4 or quant=int8, which set both."
        yield problem_with(quant, "quant.load_in_8bit", "contradicts quant.load_in_4bit=true.", fix)
    if quant.compressed_tensors is not CompressedFormat.none and (quant.load_in_4bit or quant.load_in_8bit):
        other = "quant.load_in_4bit" if quant.load_in_4bit else "quant.load_in_8bit"
        fix = f"Choose with quant={quant.compressed_tensors.value}, which sets all three."
        yield problem_with(quant, "quant.compressed_tensors", f"contradicts {other}=true.", fix)
    if quant.group_size not in GROUP_SIZES:
        reason = f"is none of {', '.join(map(str, GROUP_SIZES))}, for which servers have kernels."
        yield problem_with(quant, "quant.group_size", reason, "Set one of them.")
    if not quant.load_in_4bit:
        return
    key = "quant.bnb_4bit_compute_dtype"
    compute = quant.bnb_4bit_compute_dtype
    are_both_set = Dtype.auto not in (compute, precision)
    if compute is Dtype.float16:
        yield problem_with(quant, key, NO_FLOAT16, f"Set {key}=auto.")
    elif are_both_set and compute is not precision:
        reason = f"contradicts {show('training.precision', precision)}: products and activations have one dtype."
        yield problem_with(quant, key, reason, f"Set only training.precision, which {key}=auto follows.")


def check_embeddings(quant: QuantConfig, lora: LoraConfig, tokenizer: TokenizerConfig) -> Iterator[Problem]:
    """Yields why embeddings can't be stored as codes."""
    if quant.embeddings is not EmbeddingStorage.int8:
        return
    saved = {name.rpartition(".")[2] for name in lora.modules_to_save or []}
    trained = sorted(saved & {"embed_tokens", "lm_head"})
    cause = None
    if trained:
        cause = f"lora.modules_to_save has {', '.join(trained)}"
    if tokenizer.add_tokens or tokenizer.add_special_tokens:
        cause = "tokenizer adds tokens, whose rows are trained"
    if cause is not None:
        reason = f"keeps codes, which can't be trained, and {cause}."
        yield problem_with(quant, "quant.embeddings", reason, "Set quant.embeddings=none.")


def check_lora(lora: LoraConfig, quant: QuantConfig) -> Iterator[Problem]:
    """Yields what is wrong with `lora`, and with names of layers."""
    yield from _check_init(lora, quant)
    targets = lora.target_modules
    is_text = isinstance(targets, str) and targets != ""
    is_list = isinstance(targets, list) and len(targets) > 0
    is_names = is_list and all(isinstance(name, str) for name in targets)
    if not is_names and not is_text:
        fix = "Set lora.target_modules=all-linear, or a list such as [q_proj,v_proj]."
        reason = "is neither a list of names nor a regular expression."
        yield problem_with(lora, "lora.target_modules", reason, fix)
    if is_text:
        yield from _check_expressions("lora.target_modules", targets, [targets])
    yield from _check_expressions("lora.rank_pattern", lora.rank_pattern, lora.rank_pattern)
    yield from _check_expressions("lora.alpha_pattern", lora.alpha_pattern, lora.alpha_pattern)
    skipped = quant.llm_int8_skip_modules or []
    yield from _check_expressions("quant.llm_int8_skip_modules", skipped, skipped)
    yield from _check_positive("lora.rank_pattern", lora.rank_pattern)
    yield from _check_positive("lora.alpha_pattern", lora.alpha_pattern)


def _check_init(lora: LoraConfig, quant: QuantConfig) -> Iterator[Problem]:
    """Refuses an initialisation of adapters that is not here: a slip, or one of PEFT's that needs whole weights."""
    key = "lora.init_lora_weights"
    init = lora.init_lora_weights
    name = init.lower() if isinstance(init, str) else ""
    if init is not True and name not in _INIT_LORA_WEIGHTS:
        meant = difflib.get_close_matches(name, _INIT_LORA_WEIGHTS, n=1, cutoff=0.75)
        fix = "Set lora.init_lora_weights=true, gaussian, orthogonal or loftq."
        if not name:
            reason = "is not an initialisation that leaves the base model as it is."
        elif meant:
            reason = "is no initialisation of PEFT's."
            fix = f"Did you mean {meant[0]}?"
        elif quant.base_format is not None:
            reason = "starts from the base weights, which are packed codes here: it would take the packed bytes for"
            reason += " numbers."
        else:
            reason = "starts from whole base weights, of which a rank has only a part."
        yield problem_with(lora, key, reason, fix)
    odd = [rank for rank in (lora.r, *lora.rank_pattern.values()) if rank % 2]
    if name == "orthogonal" and odd:
        reason = f"needs even ranks, and one is {odd[0]}."
        fix = "Set even numbers in lora.r and lora.rank_pattern, or lora.init_lora_weights=true."
        yield problem_with(lora, key, reason, fix)


def check_rounding_start(lora: LoraConfig, quant: QuantConfig, model: ModelConfig, task: TaskSpec) -> Iterator[Problem]:
    """Yields why adapters can't start from the error of quantization, as far as settings say it."""
    if not lora.corrects_rounding:
        return
    key = "lora.init_lora_weights"
    plain = f"Set {key}=true"
    if quant.base_format is None:
        reason = "starts from what quantization rounds away, and nothing is quantized."
        yield problem_with(lora, key, reason, f"{plain}, or quant=nf4.")
    if lora.use_dora:
        reason = "is not for DoRA, whose magnitudes would be those of the corrected weights."
        yield problem_with(lora, key, reason, f"{plain}, or lora.use_dora=false.")
    has_cache = model.cache_quantized and quant.compressed_tensors is CompressedFormat.none  # others are never cached
    if has_cache:
        reason = "needs the full weights, and model.cache_quantized=true reads quantized ones."
        yield problem_with(lora, key, reason, f"{plain}, or model.cache_quantized=false.")
    if task.has_reference:
        reason = "changes the model before the first step, and the reference is the base without it."
        fix = f"{plain}, or lora.start to an adapter that has been trained so: it is the reference then."
        yield problem_with(lora, key, reason, fix)


def _check_expressions(key: str, value: Any, expressions: Any) -> Iterator[Problem]:
    for expression in expressions:
        try:
            re.compile(expression)
        except re.error as error:
            reason = f"has {expression}, which is no regular expression: {error}."
            yield problem_about(key, value, reason, "Set names, or an expression such as .*[.]q_proj.")


def _check_positive(key: str, pattern: Mapping[str, float]) -> Iterator[Problem]:
    if not all(value > 0 for value in pattern.values()):
        fix = f"Give each name in {key} a value above 0."
        yield problem_about(key, pattern, "has a value that is not positive.", fix)
