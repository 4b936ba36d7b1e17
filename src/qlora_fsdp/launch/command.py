"""The command that starts a job, and the GPUs it may have. Imports no torch."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from qlora_fsdp.common.errors import ConfigError
from qlora_fsdp.common.files import shipped_file
from qlora_fsdp.common.nvidia_smi import query_gpus
from qlora_fsdp.config.checks.check_launch import read_accelerate_file
from qlora_fsdp.config.schema import LaunchConfig
from qlora_fsdp.config.settings import problem_about

Slot = list[str] | None  # names of the GPUs that a job may see; None where there are no GPUs


def launch_command(
    launch: LaunchConfig, slot: Slot, arguments: Sequence[str], module: str = "qlora_fsdp.train"
) -> list[str]:
    """Returns the command that starts the ranks of a job on this host: `accelerate launch`, with endings of our own."""
    own = None if launch.config_file is None else Path(launch.config_file).expanduser()
    options = ["--config_file", str(own or shipped_file("accelerate_configs/one_node.yaml"))]
    if (num_ranks := count_ranks(launch, slot)) is not None:
        options += ["--num_processes", str(num_ranks)]
    if own is None or not _names_machines(own):
        options += ["--main_process_port", "0"]  # any free port, because jobs run side by side
    return [sys.executable, "-m", "qlora_fsdp.launch.run_accelerate", *options, "-m", module, *arguments]


def count_ranks(launch: LaunchConfig, slot: Slot) -> int | None:
    """Returns how many ranks a job has on its GPUs; None if a file of accelerate's says so."""
    if launch.num_processes:
        return launch.num_processes
    if launch.config_file is not None:
        return None
    return len(slot) if slot else 1


def _names_machines(file: Path) -> bool:
    """Whether a file of accelerate's is about several machines, which have to agree on a port."""
    try:
        number = read_accelerate_file(file).get("num_machines")
    except ValueError:
        return False  # the check of settings says what is wrong with it
    return isinstance(number, int) and number > 1


def divide_gpus(launch: LaunchConfig, environ: Mapping[str, str]) -> list[Slot]:
    """Returns the GPUs of each of the jobs that run at the same time. No two jobs share a GPU.

    Raises:
        ConfigError: there are too few.
    """
    visible = _visible_gpus(environ)
    if not visible:
        if launch.devices:
            fix = "Set it to null to run on the CPU, or look at CUDA_VISIBLE_DEVICES."
            reason = "names GPUs, and none is visible."
            raise ConfigError([problem_about("launch.devices", launch.devices, reason, fix)])
        return [None] * launch.parallel
    if launch.devices is not None and not all(0 <= index < len(visible) for index in launch.devices):
        reason = f"is not among the {len(visible)} visible GPUs, which are counted from 0."
        fix = "Name some of these, or set it to null."
        raise ConfigError([problem_about("launch.devices", launch.devices, reason, fix)])
    gpus = visible if launch.devices is None else [visible[index] for index in launch.devices]
    size = max(1, launch.num_processes or len(gpus) // launch.parallel)
    num_needed = size * launch.parallel
    if num_needed > len(gpus):
        if launch.parallel == 1:
            fix = "Set it lower, or make more visible through CUDA_VISIBLE_DEVICES or launch.devices."
            reason = f"is more than {len(gpus)} GPUs."
            raise ConfigError([problem_about("launch.num_processes", launch.num_processes, reason, fix)])
        reason = f"needs {num_needed} GPUs at {size} a job, and there are {len(gpus)}."
        fix = "Set launch.parallel or launch.num_processes lower."
        raise ConfigError([problem_about("launch.parallel", launch.parallel, reason, fix)])
    return [gpus[size * index : size * (index + 1)] for index in range(launch.parallel)]


def _visible_gpus(environ: Mapping[str, str]) -> list[str]:
    """Returns the names of the GPUs that this process may use, as CUDA_VISIBLE_DEVICES takes them."""
    if "CUDA_VISIBLE_DEVICES" in environ:
        names = [name.strip() for name in environ["CUDA_VISIBLE_DEVICES"].split(",")]
        return [name for name in names if name not in ("", "-1")]
    return [index for (index,) in query_gpus("index")]
