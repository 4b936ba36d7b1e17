"""The command that starts a job, and the GPUs it may have. Imports no torch."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import yaml

from qlora_fsdp.common.errors import ConfigError
from qlora_fsdp.config.schema import Config
from qlora_fsdp.config.settings import problem_with

Slot = list[str] | None  # names of the GPUs that a job may see; None where there are no GPUs


def accelerate_config(name: str) -> Path:
    """Returns a file of accelerate_configs/, which is in the package when that was installed from a wheel."""
    package = Path(__file__).parents[1]
    for folder in (package / "accelerate_configs", package.parents[1] / "accelerate_configs"):
        if (folder / name).is_file():
            return folder / name
    raise AssertionError(f"accelerate_configs/{name} is not there: the installation is broken")


def launch_command(config: Config, slot: Slot, arguments: Sequence[str], module: str = "qlora_fsdp.train") -> list[str]:
    """Returns the command that starts the ranks of a job on this host: `accelerate launch`, with endings of our own."""
    launch = config.launch
    own = launch.config_file
    options = ["--config_file", str(Path(own).expanduser() if own else accelerate_config("one_node.yaml"))]
    if launch.num_processes is not None or launch.config_file is None:
        options += ["--num_processes", str(launch.num_processes or len(slot or [""]))]
    if own is None or not _names_machines(Path(own).expanduser()):
        options += ["--main_process_port", "0"]  # any free port, because jobs run side by side
    return [sys.executable, "-m", "qlora_fsdp.launch.run_accelerate", *options, "-m", module, *arguments]


def _names_machines(file: Path) -> bool:
    """Whether a file of accelerate's is about several machines, which have to agree on a port."""
    try:
        values = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return False  # accelerate will say what is wrong with it
    number = values.get("num_machines") if isinstance(values, dict) else None
    return isinstance(number, int) and number > 1


def share_gpus(config: Config, environ: Mapping[str, str]) -> list[Slot]:
    """Returns the GPUs of each of the jobs that run at the same time. No two jobs share a GPU.

    Raises:
        ConfigError: there are too few.
    """
    launch, visible = config.launch, visible_gpus(environ)
    if not visible:
        if launch.devices:
            fix = "Set it to null to run on the CPU, or look at CUDA_VISIBLE_DEVICES."
            raise ConfigError([problem_with(config, "launch.devices", "names GPUs, and none is visible.", fix)])
        return [None] * launch.parallel
    if launch.devices is not None and not all(0 <= index < len(visible) for index in launch.devices):
        reason = f"is not among the {len(visible)} visible GPUs, which are counted from 0."
        raise ConfigError([problem_with(config, "launch.devices", reason, "Name some of these, or set it to null.")])
    gpus = visible if launch.devices is None else [visible[index] for index in launch.devices]
    size = launch.num_processes or len(gpus) // launch.parallel
    if size == 0 or size * launch.parallel > len(gpus):
        if launch.parallel == 1:
            fix = "Set it lower, or make more visible through CUDA_VISIBLE_DEVICES or launch.devices."
            raise ConfigError([problem_with(config, "launch.num_processes", f"is more than {len(gpus)} GPUs.", fix)])
        reason = f"needs {max(1, size) * launch.parallel} GPUs at {max(1, size)} a job, and there are {len(gpus)}."
        fix = "Set launch.parallel or launch.num_processes lower."
        raise ConfigError([problem_with(config, "launch.parallel", reason, fix)])
    return [gpus[size * index : size * (index + 1)] for index in range(launch.parallel)]


def visible_gpus(environ: Mapping[str, str]) -> list[str]:
    """Returns the names of the GPUs that this process may use, as CUDA_VISIBLE_DEVICES takes them."""
    if "CUDA_VISIBLE_DEVICES" in environ:
        return [name.strip() for name in environ["CUDA_VISIBLE_DEVICES"].split(",") if name.strip() not in ("", "-1")]
    if shutil.which("nvidia-smi") is None:
        return []
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False).stdout
    return [str(index) for index, line in enumerate(listed.splitlines()) if line.startswith("GPU ")]
