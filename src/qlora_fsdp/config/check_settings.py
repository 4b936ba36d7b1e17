"""Does the configuration make sense, whatever it runs on? Reads the files it names; imports no torch.

Each check yields the problems it finds, so that a user sees all of them at once.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from qlora_fsdp.common.errors import Problem
from qlora_fsdp.config.check_data import check_data, is_missing
from qlora_fsdp.config.check_long_runs import check_checkpoint, check_launch
from qlora_fsdp.config.check_task import check_task
from qlora_fsdp.config.command_line import conf_folder, group_options
from qlora_fsdp.config.schema import (
    Activations,
    AttnImplementation,
    Config,
    DataFormat,
    Dtype,
    EmbeddingStorage,
    MatmulKind,
    Optimizer,
    QuantStorage,
    ShardingStrategy,
    TaskName,
    WandbMode,
    Weights,
)
from qlora_fsdp.config.settings import all_settings, problem_with, show, value_of

# Lower bound, whether it is allowed itself, and upper bound, which never is.
_BOUNDS: dict[str, tuple[float, bool, float]] = {
    "lora.r": (1, True, math.inf),
    "lora.lora_alpha": (0, False, math.inf),
    "lora.lora_dropout": (0, True, 1),
    "fsdp.hybrid_shard_size": (1, True, math.inf),
    "fsdp.forward_prefetch": (0, True, math.inf),
    "fsdp.backward_prefetch": (1, True, math.inf),  # FSDP2 gathers one ahead by itself
    "memory.target_gib": (0, False, math.inf),
    "data.eval_fraction": (0, True, 1),
    "data.max_rows": (1, True, math.inf),
    "data.buffer_rows": (1, True, math.inf),
    "data.num_proc": (1, True, math.inf),
    "optim.weight_decay": (0, True, math.inf),
    "optim.eps": (0, False, math.inf),
    "optim.max_grad_norm": (0, True, math.inf),
    "optim.warmup_ratio": (0, True, 1),
    "optim.warmup_steps": (0, True, math.inf),
    "training.max_length": (2, True, math.inf),
    "training.max_steps": (1, True, math.inf),
    "training.num_epochs": (0, False, math.inf),
    "training.micro_batch_size": (1, True, math.inf),
    "training.global_batch_size": (1, True, math.inf),
    "training.learning_rate": (0, False, math.inf),
    "training.seed": (0, True, 2**31),
    "training.eval_every_steps": (1, True, math.inf),
    "training.grad_norm_spike": (1, False, math.inf),
    "checkpoint.every_steps": (1, True, math.inf),
    "checkpoint.every_minutes": (0, False, math.inf),
    "checkpoint.keep_last": (1, True, math.inf),
    "checkpoint.keep_best": (0, True, math.inf),
    "tracking.num_generations": (0, True, math.inf),
    "tracking.generation_tokens": (1, True, math.inf),
    "distributed.timeout_seconds": (1, True, math.inf),
    "launch.num_processes": (1, True, math.inf),
    "launch.parallel": (1, True, math.inf),
    "slurm.nodes": (1, True, math.inf),
    "slurm.gpus_per_node": (1, True, math.inf),
    "slurm.cpus_per_task": (1, True, math.inf),
    "slurm.signal_seconds": (1, True, 65536),
}

_CHAT_TEMPLATES = Path(__file__).parents[1] / "data" / "templates"

# PEFT's initialisations that leave the base weight as it is.
_INIT_LORA_WEIGHTS = ("gaussian", "orthogonal")  # besides true
_NO_FLOAT16 = "needs loss scaling, which is not here: small gradients would become 0."


def check_settings(config: Config) -> list[Problem]:
    """Returns what is wrong with the configuration whatever it runs on."""
    own = (_numbers, _model, _compute, _quant, _embeddings, _lora, _fsdp, _data, _optim, _training, _packages)
    checks = (*own, check_data, check_checkpoint, check_launch, check_task)
    return [problem for find_problems in checks for problem in find_problems(config)]


def is_local_path(text: str) -> bool:
    """Whether a path-or-hub-name means a path: it exists, or is written as one (/..., ./..., ../..., ~...)."""
    return text.startswith(("/", "./", "../", "~")) or text in (".", "..") or Path(text).exists()


def _numbers(config: Config) -> Iterator[Problem]:
    for key, (low, low_allowed, high) in _BOUNDS.items():
        value = value_of(config, key)
        if not isinstance(value, (int, float)) or (low < value < high or (low_allowed and value == low)):
            continue
        needed = f"at least {low:g}" if low_allowed else f"greater than {low:g}"
        needed += f" and less than {high:g}" if math.isfinite(high) else ""
        fix = f"Set {show(key, all_settings()[key].default)}, the default, or another number in this range."
        yield problem_with(config, key, f"must be finite and {needed}.", fix)


def _model(config: Config) -> Iterator[Problem]:
    model = config.model
    names = [name for name in group_options("model", [conf_folder()]) if name != "custom"]
    if model.path is None and model.weights is Weights.checkpoint:
        fix = f"Set model to one of {', '.join(names)}, or model.path to a folder or a hub name."
        yield problem_with(config, "model.path", "names no model.", fix)
    if model.weights is Weights.random and not model.config and (model.path is None or not is_local_path(model.path)):
        fix = f"Set model to one of {', '.join(names)}, model.config, or model.path to a folder with a config.json."
        yield problem_with(config, "model.weights", "has no config to make up weights from.", fix)
    is_dry_run = config.data.format is DataFormat.random
    is_there = model.path is not None and Path(model.path).expanduser().exists()
    if model.name == "tiny" and is_there and model.weights is Weights.random and not is_dry_run:
        reason = "is not read: model=tiny makes its weights up."
        yield problem_with(config, "model.path", reason, "Leave model=tiny out, or set model.weights=checkpoint too.")
    if model.path is not None:
        yield from _missing(config, "model.path", "Set model.path to a folder with config.json and safetensors files.")
    if model.tokenizer_path not in (None, "bytes"):
        yield from _missing(config, "model.tokenizer_path", "Set model.tokenizer_path to a folder with a tokenizer.")


def _missing(config: Config, key: str, fix: str) -> Iterator[Problem]:
    path = value_of(config, key)
    if is_local_path(path) and not Path(path).expanduser().exists():
        yield problem_with(config, key, "does not exist.", fix)


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
    compute, storage = quant.bnb_4bit_compute_dtype, quant.bnb_4bit_quant_storage
    if compute is Dtype.float16:
        yield problem_with(
            config, "quant.bnb_4bit_compute_dtype", _NO_FLOAT16, "Set quant.bnb_4bit_compute_dtype=auto."
        )
    elif Dtype.auto not in (compute, precision) and compute is not precision:
        reason = f"contradicts {show('training.precision', precision)}: products and activations have one dtype."
        fix = "Set only training.precision, which quant.bnb_4bit_compute_dtype=auto follows."
        yield problem_with(config, "quant.bnb_4bit_compute_dtype", reason, fix)
    elif storage is QuantStorage.float16:
        reason = (
            "does not fit the compute dtype: codes are stored as bytes or in a dtype that is computed in, as PEFT and "
        )
        reason += "transformers ask, and that is bfloat16 or float32 here."
        fix = "Set quant.bnb_4bit_quant_storage=auto."
        yield problem_with(config, "quant.bnb_4bit_quant_storage", reason, fix)


def int8_embeddings_problem(is_tied: bool, kind: str = "Embedding") -> Problem:
    """Why `quant.embeddings=int8` can't be used with a model, whose shape must be known for that."""
    reason = f"can't store embeddings of the class {kind}."
    if is_tied:
        reason = "can't be used with this model, whose head shares its weight with the embeddings."
    return Problem("quant.embeddings=int8", reason, "Set quant.embeddings=none.")


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


def _lora(config: Config) -> Iterator[Problem]:
    lora = config.lora
    init = lora.init_lora_weights.lower() if isinstance(lora.init_lora_weights, str) else lora.init_lora_weights
    if init is not True and init not in _INIT_LORA_WEIGHTS:
        quantized = config.quant.load_in_4bit or config.quant.load_in_8bit
        reason = (
            "starts from the base weights, which are packed codes here: it would take the packed bytes for numbers."
            if quantized
            else "starts from whole base weights, of which a rank has only a part."
        )
        if not isinstance(init, str):
            reason = "is not an initialisation that leaves the base model as it is."
        fix = "Set lora.init_lora_weights=true, gaussian or orthogonal."
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
            yield problem_with(
                config, key, "has a value that is not positive.", f"Give each name in {key} a value above 0."
            )


def _fsdp(config: Config) -> Iterator[Problem]:
    fsdp, memory = config.fsdp, config.memory
    if fsdp.cpu_offload and fsdp.sharding_strategy is ShardingStrategy.NO_SHARD:
        reason = "needs shards to offload, and fsdp.sharding_strategy=NO_SHARD makes none."
        yield problem_with(config, "fsdp.cpu_offload", reason, "Set fsdp=offload, or fsdp.cpu_offload=false.")
    if fsdp.cpu_offload and config.optim.name is Optimizer.adamw_8bit:
        reason = "keeps its state on the GPU, and with fsdp.cpu_offload=true the parameters are on the CPU."
        yield problem_with(config, "optim.name", reason, "Set optim=adamw, or fsdp.cpu_offload=false.")
    if fsdp.reshard_after_forward and not fsdp.reshards:
        reason = f"contradicts {show('fsdp.sharding_strategy', fsdp.sharding_strategy)}, with which no layer is freed."
        yield problem_with(
            config, "fsdp.reshard_after_forward", reason, "Set fsdp=full_shard, or fsdp.reshard_after_forward=null."
        )
    if fsdp.hybrid_shard_size is not None and fsdp.sharding_strategy is not ShardingStrategy.HYBRID_SHARD:
        reason = f"has no effect with {show('fsdp.sharding_strategy', fsdp.sharding_strategy)}."
        yield problem_with(
            config, "fsdp.hybrid_shard_size", reason, "Set fsdp=hybrid_shard, or fsdp.hybrid_shard_size=null."
        )
    if memory.activations is Activations.every_k and memory.every_k < 2:
        reason = "must be at least 2: 1 is every layer."
        yield problem_with(config, "memory.every_k", reason, "Set memory.every_k=2, or memory.activations=full.")
    if memory.activations is not Activations.every_k and memory.every_k != all_settings()["memory.every_k"].default:
        reason = f"has no effect with {show('memory.activations', memory.activations)}."
        yield problem_with(config, "memory.every_k", reason, "Set memory.activations=every_k too.")


def _data(config: Config) -> Iterator[Problem]:
    data = config.data
    is_random = data.format is DataFormat.random
    if data.path is None and not data.mix and not is_random:
        fix = "Set data.path to a file, a folder or a hub name, or data=random for a dry run."
        yield problem_with(config, "data.path", "names no data.", fix)
    for key in ("data.path", "data.eval_path"):
        path = value_of(config, key)
        if path is not None and is_missing(path):
            yield problem_with(
                config, key, f"does not exist, seen from {Path.cwd()}.", f"Set {key} to a file or folder that does."
            )
    template, shipped = data.chat_template, sorted(path.stem for path in _CHAT_TEMPLATES.glob("*.jinja"))
    if template is not None and template not in shipped and not _is_file(template):
        reason = f"is neither a file nor one of {', '.join(shipped)}."
        yield problem_with(
            config,
            "data.chat_template",
            reason,
            "Set data.chat_template to one of these, or null for the tokenizer's own.",
        )
    if config.training.eval_every_steps is not None and data.eval_path is None and data.eval_fraction == 0:
        fix = "Set data.eval_path, or data.eval_fraction=0.05."
        yield problem_with(config, "training.eval_every_steps", "has no data to evaluate on.", fix)
    if config.tracking.num_generations > 0 and data.eval_path is None and data.eval_fraction == 0:
        fix = "Set data.eval_path, or data.eval_fraction=0.05."
        yield problem_with(config, "tracking.num_generations", "has no held-out rows to complete.", fix)
    if config.tracking.num_generations > 0 and config.task.name is not TaskName.causal_lm:
        reason = f"needs a model that writes, and task.name is {config.task.name.value}."
        yield problem_with(config, "tracking.num_generations", reason, "Set it to 0.")


def _is_file(path: str) -> bool:
    try:
        return Path(path).expanduser().is_file()
    except OSError:  # too long for a name: the text of a template in the place of its file
        return False


def _optim(config: Config) -> Iterator[Problem]:
    optim, max_steps = config.optim, config.training.max_steps
    if len(optim.betas) != 2 or not all(0 <= beta < 1 for beta in optim.betas):
        yield problem_with(
            config, "optim.betas", "must be two numbers from 0 to below 1.", "Set optim.betas=[0.9,0.999], the default."
        )
    if optim.warmup_steps is not None and max_steps is not None and optim.warmup_steps >= max_steps:
        reason = f"leaves no step after the warmup: training.max_steps={max_steps}."
        yield problem_with(config, "optim.warmup_steps", reason, "Set it below training.max_steps.")


def _training(config: Config) -> Iterator[Problem]:
    training = config.training
    size = training.micro_batch_size
    if size != "auto" and (isinstance(size, bool) or not isinstance(size, int)):
        reason, fix = "must be a whole number or auto.", "Set training.micro_batch_size=1, the default."
        yield problem_with(config, "training.micro_batch_size", reason, fix)
    elif size == "auto" and training.global_batch_size is None:
        reason = "needs a global batch to divide, and training.global_batch_size=null follows from the micro-batch."
        yield problem_with(config, "training.micro_batch_size", reason, "Set training.global_batch_size=16.")
    if training.precision is Dtype.float16:
        yield problem_with(
            config,
            "training.precision",
            _NO_FLOAT16,
            "Set training.precision=auto.",
        )
    if config.data.format is DataFormat.random and training.max_steps is None and config.data.max_rows is None:
        reason = "sets no end, and random data (data.format=random) has none."
        yield problem_with(config, "training.max_steps", reason, "Set training.max_steps=10.")


def wandb_mode(config: Config) -> WandbMode:
    """`tracking.wandb`; for `auto`, online where W&B has a key to log in with, else disabled."""
    import netrc

    if config.tracking.wandb is not WandbMode.auto:
        return config.tracking.wandb
    try:
        has_key = "WANDB_API_KEY" in os.environ or netrc.netrc().authenticators("api.wandb.ai") is not None
    except (OSError, netrc.NetrcParseError):
        has_key = False
    return WandbMode.online if has_key else WandbMode.disabled


def _packages(config: Config) -> Iterator[Problem]:
    if wandb_mode(config) is not WandbMode.disabled and find_spec("wandb") is None:
        reason = "needs the package wandb, which is not installed."
        yield problem_with(config, "tracking.wandb", reason, "Run pip install wandb, or set tracking=none.")
    if config.tracking.tensorboard and find_spec("tensorboard") is None:
        reason = "needs the package tensorboard, which is not installed."
        yield problem_with(config, "tracking.tensorboard", reason, "Run pip install tensorboard, or set tracking=none.")
    if (
        config.model.attn_implementation is AttnImplementation.flash_attention_2
        and find_spec("flash_attn_2_cuda") is None
    ):
        reason = "needs the package flash-attn, which is not installed."
        yield problem_with(
            config, "model.attn_implementation", reason, "Run pip install flash-attn, or set it to auto."
        )
