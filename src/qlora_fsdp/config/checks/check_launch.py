"""What starts processes: the file of accelerate's, SLURM's time limit, and what accelerate was told about the run.

accelerate starts one process, without a word, where `distributed_type` of its file is NO or MULTI_CPU, and asks for
packages that would not help where it is another engine's.

It only starts the processes, and the settings come from Hydra. A user with an accelerate config from another project
may ask there for offload or mixed precision, and would not get it. accelerate writes its own defaults into every
`FSDP_*` variable, so that only a value that asks for more than the default shows what a user wrote.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from qlora_fsdp.common.errors import Problem
from qlora_fsdp.common.text import first_line
from qlora_fsdp.config.bounded_yaml import parse_yaml, read_small_text
from qlora_fsdp.config.schema import (
    SIGNAL_SECONDS,
    Activations,
    Config,
    DistributedConfig,
    Dtype,
    FsdpConfig,
    LaunchConfig,
    MemoryConfig,
    ShardingStrategy,
    SlurmConfig,
    TrainingConfig,
)
from qlora_fsdp.config.settings import problem_with, show
from qlora_fsdp.config.world import sequences_at_once

# Of a file of accelerate's.
_ENGINES = {"DEEPSPEED": "DeepSpeed", "MEGATRON_LM": "Megatron-LM"}
_TPUS = ("XLA", "TPU")
_ONE_PROCESS = ("NO", "MULTI_CPU")
_COUNTED = ("gpu", "cpu", "auto")  # torchrun counts them
_FIX = "Set it to a file that `accelerate config --config_file FILE` wrote, or to null."

_SLURM_TIME = re.compile(r"(\d+-)?\d+(:\d\d){0,2}")

# Of the environment. accelerate takes these names, or their numbers from 1.
_STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
_OTHER_ENGINES = {"ACCELERATE_USE_DEEPSPEED": "DeepSpeed", "ACCELERATE_USE_MEGATRON_LM": "Megatron-LM"}
_OTHER_PARALLELISM = ("PARALLELISM_CONFIG_TP_SIZE", "PARALLELISM_CONFIG_CP_SIZE", "PARALLELISM_CONFIG_SP_SIZE")


def read_accelerate_file(file: Path) -> dict[str, Any]:
    """Returns the lines of a file of accelerate's.

    Raises:
        ValueError: it can't be read, or has none; the message says so.
    """
    try:
        text = read_small_text(file)
        parse_yaml(text)  # what aliases repeat, and how deep it goes, has a limit
        values = yaml.safe_load(text)
    except RecursionError:
        raise ValueError("can't be read: it is nested too deeply.") from None
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ValueError(f"can't be read: {first_line(error).rstrip('.')}.") from error
    if not isinstance(values, dict):
        raise ValueError("holds no lines such as `num_processes: 2`.")
    return values


def check_accelerate_file(launch: LaunchConfig) -> Iterator[Problem]:
    """Yields what is wrong with the file that `launch.config_file` names, and what starts other ranks than it says."""
    key = "launch.config_file"
    if launch.config_file is None:
        return
    file = Path(launch.config_file).expanduser()
    if not file.is_file():
        yield problem_with(launch, key, f"is no file, seen from {Path.cwd()}.", _FIX)
        return
    try:
        values = read_accelerate_file(file)
    except ValueError as error:
        yield problem_with(launch, key, str(error), _FIX)
        return
    kind = str(values.get("distributed_type") or "NO").upper()  # YAML reads NO as false
    number = launch.num_processes or values.get("num_processes")
    if not _is_number_of_ranks(number):
        reason = f"has num_processes: {number}, which is no number of ranks."
        yield problem_with(launch, key, reason, "Set it to 1 or more.")
    elif kind in _TPUS:
        reason = f"has distributed_type: {kind}, which is for TPUs, and runs are on NVIDIA GPUs here."
        yield problem_with(launch, key, reason, "Set distributed_type: MULTI_GPU in it, or leave the file out.")
    elif kind in _ENGINES:
        reason = f"asks for {_ENGINES[kind]}, which this launcher does not do."
        fix = "Set distributed_type: FSDP in it; sharding and offload are in fsdp=."
        yield problem_with(launch, key, reason, fix)
    elif kind in _ONE_PROCESS and isinstance(number, int) and number > 1:
        reason = f"has distributed_type: {kind}, with which accelerate starts one process, not {number}."
        yield problem_with(launch, key, reason, "Set distributed_type: MULTI_GPU in it, on a CPU too.")
    if values.get("mixed_precision") == "fp8":
        reason = "has mixed_precision: fp8, for which accelerate wants packages that are not used here."
        yield problem_with(launch, key, reason, "Set compute=fp8, and mixed_precision: bf16 in it.")


def _is_number_of_ranks(number: Any) -> bool:
    if number is None or number in _COUNTED:
        return True
    return isinstance(number, int) and number >= 1


def check_time_limit(slurm: SlurmConfig) -> Iterator[Problem]:
    """Yields a time limit that SLURM can't read, or in which a run would do nothing but save."""
    if slurm.time is None:
        return
    fix = "Set slurm.time=24:00:00, or 2-00:00:00 for days."
    if not _SLURM_TIME.fullmatch(slurm.time):
        yield problem_with(slurm, "slurm.time", "is no time limit.", fix)
        return
    limit = _seconds(slurm.time)
    is_limited = limit > 0  # to SLURM 0 is no limit
    if is_limited and limit <= SIGNAL_SECONDS:
        reason = f"is {limit} seconds to SLURM, and {SIGNAL_SECONDS} before its end a run saves and queues again: it "
        reason += "would do nothing else."
        yield problem_with(slurm, "slurm.time", reason, fix)


def _seconds(time: str) -> int:
    """A time limit of SLURM's in seconds: `minutes`, `minutes:seconds` or from the left days, hours and so on."""
    days, dash, rest = time.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    has_hours = dash or len(parts) == 3
    if not has_hours:
        parts = [0, *parts]
    hours, minutes, seconds = [*parts, 0, 0][:3]
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds


def check_launch_environment(config: Config, environ: Mapping[str, str]) -> list[Problem]:
    """Returns the contradictions between the configuration and the variables that `accelerate launch` sets."""
    return [
        *_check_fsdp_variables(config.fsdp, config.memory, environ),
        *_check_training_variables(config.training, config.distributed, environ),
        *_check_cublas(config.training, environ),
        *_check_engines(environ),
    ]


def follow_launcher(config: Config, environ: Mapping[str, str]) -> Config:
    """The settings, with the sharding that an accelerate config for FSDP names in the place of auto."""
    strategy = _strategy(environ.get("FSDP_SHARDING_STRATEGY", ""))
    if config.fsdp.sharding_strategy is ShardingStrategy.auto and strategy in ShardingStrategy.__members__:
        return config.with_values({"fsdp.sharding_strategy": ShardingStrategy[strategy]})
    return config


def _check_fsdp_variables(fsdp: FsdpConfig, memory: MemoryConfig, environ: Mapping[str, str]) -> Iterator[Problem]:
    name = "FSDP_OFFLOAD_PARAMS"
    if _is_true(environ, name) and not fsdp.cpu_offload:
        yield _contradiction(environ, name, show("fsdp.cpu_offload", fsdp.cpu_offload), "fsdp=offload")

    name = "FSDP_SHARDING_STRATEGY"
    strategy = _strategy(environ.get(name, "FULL_SHARD"))
    if strategy not in ("FULL_SHARD", fsdp.sharding_strategy.name):
        option = "hybrid_shard" if strategy == "HYBRID_SHARD_ZERO2" else strategy.lower()
        shown = show("fsdp.sharding_strategy", fsdp.sharding_strategy)
        yield _contradiction(environ, name, shown, f"fsdp={option}")

    name = "FSDP_RESHARD_AFTER_FORWARD"
    is_asked_to_keep = environ.get(name, "true").lower() == "false"
    if is_asked_to_keep and fsdp.reshards and strategy == "FULL_SHARD":
        shown = show("fsdp.reshard_after_forward", fsdp.reshard_after_forward)
        yield _contradiction(environ, name, shown, "fsdp.reshard_after_forward=false")

    shown = show("memory.activations", memory.activations)
    name = "FSDP_ACTIVATION_CHECKPOINTING"
    if _is_true(environ, name) and memory.activations is Activations.none:
        yield _contradiction(environ, name, shown, "memory=recompute")
    name = "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD"
    if _is_true(environ, name) and memory.activations is not Activations.offload:
        yield _contradiction(environ, name, shown, "memory=offload")

    if environ.get("FSDP_IGNORED_MODULES"):
        yield _unsupported(environ, "FSDP_IGNORED_MODULES", "modules left out of sharding")


def _check_training_variables(
    training: TrainingConfig, distributed: DistributedConfig, environ: Mapping[str, str]
) -> Iterator[Problem]:
    name = "ACCELERATE_MIXED_PRECISION"
    mixed_precision = environ.get(name, "no").lower()
    is_followed = mixed_precision == "bf16" and training.precision in (Dtype.auto, Dtype.bfloat16)
    if mixed_precision != "no" and not is_followed:
        shown = show("training.precision", training.precision)
        yield _contradiction(environ, name, shown, "training.precision=bfloat16 and mixed_precision: bf16")

    name = "ACCELERATE_GRADIENT_ACCUMULATION_STEPS"
    num_accumulations = environ.get(name, "1")
    if num_accumulations.isdecimal() and int(num_accumulations) > 1:
        num_ranks = int(environ.get("WORLD_SIZE", "1"))
        wanted = int(num_accumulations) * sequences_at_once(training, distributed, num_ranks)
        if training.global_batch_size != wanted:
            shown = show("training.global_batch_size", training.global_batch_size)
            yield _contradiction(environ, name, shown, f"training.global_batch_size={wanted}")

    if environ.get("ACCELERATE_DYNAMO_BACKEND", "NO").upper() != "NO":
        yield _unsupported(environ, "ACCELERATE_DYNAMO_BACKEND", "torch.compile")


def _check_cublas(training: TrainingConfig, environ: Mapping[str, str]) -> Iterator[Problem]:
    name = "CUBLAS_WORKSPACE_CONFIG"
    if training.deterministic and environ.get(name, ":4096:8") not in (":4096:8", ":16:8"):
        reason = "lets cuBLAS add in any order, and training.deterministic=true asks for one."
        yield Problem(f"{name}={environ[name]}", reason, f"Unset {name}, or set it to :4096:8.")


def _check_engines(environ: Mapping[str, str]) -> Iterator[Problem]:
    for name, engine in _OTHER_ENGINES.items():
        if _is_true(environ, name):
            yield _unsupported(environ, name, engine)
    for name in _OTHER_PARALLELISM:
        size = environ.get(name, "1")
        if size.isdecimal() and int(size) > 1:
            yield _unsupported(environ, name, "parallelism other than FSDP's")


def _contradiction(environ: Mapping[str, str], name: str, shown: str, override: str) -> Problem:
    """The problem with a variable that asks for something else than a setting, which is `shown` as it is typed."""
    reason = f"contradicts {shown}, which is what counts: accelerate only starts the processes."
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
