"""Does what accelerate was told about the run contradict the configuration?

accelerate only starts the processes, and the settings come from Hydra. A user with an accelerate config from another
project may ask there for offload or mixed precision, and would not get it. accelerate writes its own defaults into
every `FSDP_*` variable, so that only a value that asks for more than the default shows what a user wrote.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from qlora_fsdp.common.errors import Problem
from qlora_fsdp.config.batch_size import sequences_at_once
from qlora_fsdp.config.schema import Activations, Config, Dtype, ShardingStrategy
from qlora_fsdp.config.settings import show, value_of
from qlora_fsdp.config.written import with_values

# accelerate takes these names, or their numbers from 1.
_STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")

_OTHER_ENGINES = {
    "ACCELERATE_USE_DEEPSPEED": "DeepSpeed",
    "ACCELERATE_USE_MEGATRON_LM": "Megatron-LM",
}

_OTHER_PARALLELISM = ("PARALLELISM_CONFIG_TP_SIZE", "PARALLELISM_CONFIG_CP_SIZE", "PARALLELISM_CONFIG_SP_SIZE")


def check_launch_environment(config: Config, environ: Mapping[str, str]) -> list[Problem]:
    """Returns the contradictions between the configuration and the variables that `accelerate launch` sets."""
    return [*_fsdp(config, environ), *_training(config, environ), *_repeatable(config, environ), *_engines(environ)]


def follow_launcher(config: Config, environ: Mapping[str, str]) -> Config:
    """The settings, with the sharding that an accelerate config for FSDP names in the place of auto."""
    strategy = _strategy(environ.get("FSDP_SHARDING_STRATEGY", ""))
    if config.fsdp.sharding_strategy is ShardingStrategy.auto and strategy in ShardingStrategy.__members__:
        return with_values(config, {"fsdp.sharding_strategy": ShardingStrategy[strategy]})
    return config


def _fsdp(config: Config, environ: Mapping[str, str]) -> Iterator[Problem]:
    fsdp = config.fsdp
    if _is_true(environ, "FSDP_OFFLOAD_PARAMS") and not fsdp.cpu_offload:
        yield _contradiction(config, environ, "FSDP_OFFLOAD_PARAMS", "fsdp.cpu_offload", "fsdp=offload")

    strategy = _strategy(environ.get("FSDP_SHARDING_STRATEGY", "FULL_SHARD"))
    if strategy not in ("FULL_SHARD", fsdp.sharding_strategy.name):
        option = {"HYBRID_SHARD_ZERO2": "hybrid_shard"}.get(strategy, strategy.lower())
        yield _contradiction(config, environ, "FSDP_SHARDING_STRATEGY", "fsdp.sharding_strategy", f"fsdp={option}")

    is_asked_to_keep = environ.get("FSDP_RESHARD_AFTER_FORWARD", "true").lower() == "false"
    if is_asked_to_keep and fsdp.reshards and strategy == "FULL_SHARD":
        name, key = "FSDP_RESHARD_AFTER_FORWARD", "fsdp.reshard_after_forward"
        yield _contradiction(config, environ, name, key, f"{key}=false")

    if _is_true(environ, "FSDP_ACTIVATION_CHECKPOINTING") and config.memory.activations is Activations.none:
        name = "FSDP_ACTIVATION_CHECKPOINTING"
        yield _contradiction(config, environ, name, "memory.activations", "memory=recompute")
    name = "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD"
    if _is_true(environ, name) and config.memory.activations is not Activations.offload:
        yield _contradiction(config, environ, name, "memory.activations", "memory=offload")

    if environ.get("FSDP_IGNORED_MODULES"):
        yield _unsupported(environ, "FSDP_IGNORED_MODULES", "modules left out of sharding")


def _training(config: Config, environ: Mapping[str, str]) -> Iterator[Problem]:
    training = config.training
    mixed_precision = environ.get("ACCELERATE_MIXED_PRECISION", "no").lower()
    allowed = {"no": Dtype, "bf16": (Dtype.auto, Dtype.bfloat16)}.get(mixed_precision, ())
    if training.precision not in allowed:
        name, key = "ACCELERATE_MIXED_PRECISION", "training.precision"
        yield _contradiction(config, environ, name, key, f"{key}=bfloat16 and mixed_precision: bf16")

    num_accumulations = environ.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "1")
    if num_accumulations.isdecimal() and int(num_accumulations) > 1:
        wanted = int(num_accumulations) * sequences_at_once(config, int(environ.get("WORLD_SIZE", "1")))
        if training.global_batch_size != wanted:
            name, key = "ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "training.global_batch_size"
            yield _contradiction(config, environ, name, key, f"{key}={wanted}")

    if environ.get("ACCELERATE_DYNAMO_BACKEND", "NO").upper() != "NO":
        yield _unsupported(environ, "ACCELERATE_DYNAMO_BACKEND", "torch.compile")


def _repeatable(config: Config, environ: Mapping[str, str]) -> Iterator[Problem]:
    name = "CUBLAS_WORKSPACE_CONFIG"
    if config.training.deterministic and environ.get(name, ":4096:8") not in (":4096:8", ":16:8"):
        reason = "lets cuBLAS add in any order, and training.deterministic=true asks for one."
        yield Problem(f"{name}={environ[name]}", reason, f"Unset {name}, or set it to :4096:8.")


def _engines(environ: Mapping[str, str]) -> Iterator[Problem]:
    for name, engine in _OTHER_ENGINES.items():
        if _is_true(environ, name):
            yield _unsupported(environ, name, engine)
    for name in _OTHER_PARALLELISM:
        if environ.get(name, "1").isdecimal() and int(environ.get(name, "1")) > 1:
            yield _unsupported(environ, name, "parallelism other than FSDP's")


def _contradiction(config: Config, environ: Mapping[str, str], name: str, key: str, override: str) -> Problem:
    reason = (
        f"contradicts {show(key, value_of(config, key))}, which is what counts: accelerate only starts the processes."
    )
    return Problem(f"{name}={environ[name]}", reason, f"Set {override}, or take {_source(name)}.")


def _unsupported(environ: Mapping[str, str], name: str, what: str) -> Problem:
    reason = f"asks for {what}, which this launcher does not do."
    return Problem(f"{name}={environ[name]}", reason, f"Take {_source(name)}.")


def _source(name: str) -> str:
    key = name.removeprefix("ACCELERATE_").lower()
    return f"{key} out of the accelerate config, or unset the variable"


def _strategy(value: str) -> str:
    if value.isdecimal() and 1 <= int(value) <= len(_STRATEGIES):
        return _STRATEGIES[int(value) - 1]
    return value.upper()


def _is_true(environ: Mapping[str, str], name: str) -> bool:
    return environ.get(name, "false").lower() in ("1", "true", "yes", "on", "y", "t")
