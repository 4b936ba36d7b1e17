"""Reads the file of accelerate's that launch.config_file names, and checks it for what starts other ranks than it says.

accelerate starts one process, without a word, where `distributed_type` is NO or MULTI_CPU, and asks for packages that
would not help where it is another engine's.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from qlora_fsdp.common.errors import Problem
from qlora_fsdp.common.text import first_line
from qlora_fsdp.config.schema import Config
from qlora_fsdp.config.settings import problem_with

_ENGINES = {"DEEPSPEED": "DeepSpeed", "MEGATRON_LM": "Megatron-LM"}
_ONE_PROCESS = ("NO", "MULTI_CPU")
_COUNTED = ("gpu", "cpu", "auto")  # torchrun counts them
_FIX = "Set it to a file that `accelerate config --config_file FILE` wrote, or to null."


def read_accelerate_file(file: Path) -> dict[str, Any]:
    """Returns the lines of a file of accelerate's.

    Raises:
        ValueError: it can't be read, or has none; the message says so.
    """
    try:
        values = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ValueError(f"can't be read: {first_line(error).rstrip('.')}.") from error
    if not isinstance(values, dict):
        raise ValueError("holds no lines such as `num_processes: 2`.")
    return values


def check_accelerate_file(config: Config) -> Iterator[Problem]:
    """Yields what is wrong with the file."""
    if config.launch.config_file is None:
        return
    file = Path(config.launch.config_file).expanduser()
    if not file.is_file():
        yield _problem(config, f"is no file, seen from {Path.cwd()}.", _FIX)
        return
    try:
        values = read_accelerate_file(file)
    except ValueError as error:
        yield _problem(config, str(error), _FIX)
        return
    yield from _check_values(config, values)


def _check_values(config: Config, values: dict[str, Any]) -> Iterator[Problem]:
    kind = str(values.get("distributed_type") or "NO").upper()  # YAML reads NO as false
    number = config.launch.num_processes or values.get("num_processes")
    if number is not None and number not in _COUNTED and (not isinstance(number, int) or number < 1):
        yield _problem(config, f"has num_processes: {number}, which is no number of ranks.", "Set it to 1 or more.")
    elif kind in _ENGINES:
        fix = "Set distributed_type: FSDP in it; sharding and offload are in fsdp=."
        yield _problem(config, f"asks for {_ENGINES[kind]}, which this launcher does not do.", fix)
    elif kind in _ONE_PROCESS and isinstance(number, int) and number > 1:
        reason = f"has distributed_type: {kind}, with which accelerate starts one process, not {number}."
        yield _problem(config, reason, "Set distributed_type: MULTI_GPU in it, on a CPU too.")
    if values.get("mixed_precision") == "fp8":
        reason = "has mixed_precision: fp8, for which accelerate wants packages that are not used here."
        yield _problem(config, reason, "Set compute=fp8, and mixed_precision: bf16 in it.")


def _problem(config: Config, reason: str, fix: str) -> Problem:
    return problem_with(config, "launch.config_file", reason, fix)
