"""The processes and the device on which a run is launched, and how they share a step's sequences. Imports no torch.

A batch size that somebody has chosen is kept or refused, because it is part of what a run learns. The default was
chosen by nobody, and fits any number of ranks: it is rounded, and the log says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from typing import Literal

from qlora_fsdp.common.errors import DeviceError
from qlora_fsdp.config.schema import DEFAULT_GLOBAL_BATCH, Config, DistributedConfig, TrainingConfig

AUTO = "auto"  # a value of training.micro_batch_size


@dataclass(frozen=True)
class World:
    """The processes and the device on which a run is launched.

    The local numbers are those of this node, and ranks are counted from 0. `has_bf16` and `has_fp8` are about the
    device: whether it computes in bfloat16, and multiplies matrices in fp8. `torch_version` is major and minor number.
    """

    num_ranks: int = 1
    rank: int = 0
    local_num_ranks: int = 1
    local_rank: int = 0
    device_type: Literal["cuda", "cpu"] = "cpu"
    has_bf16: bool = True
    has_fp8: bool = False
    torch_version: tuple[int, int] = (2, 13)

    @staticmethod
    def from_environment(environ: Mapping[str, str]) -> World:
        """Reads what accelerate or torchrun has put into the environment. Without any of it, there is one process.

        The fields about the device keep their defaults, because only torch knows them.

        Raises:
            DeviceError: a variable is no number, or the variables contradict one another.
        """
        num_ranks = _number(environ, "WORLD_SIZE", 1)
        rank = _number(environ, "RANK", 0)
        local_num_ranks = _number(environ, "LOCAL_WORLD_SIZE", num_ranks)
        local_rank = _number(environ, "LOCAL_RANK", rank)
        if "WORLD_SIZE" in environ and "RANK" not in environ and num_ranks > 1:
            raise DeviceError(
                f"WORLD_SIZE={num_ranks} is set but RANK is not. Unset WORLD_SIZE to run one process, or start the "
                "processes with accelerate launch or torchrun, which set both."
            )
        if environ.get("GROUP_WORLD_SIZE") == "1" and num_ranks != local_num_ranks:
            raise DeviceError(
                f"WORLD_SIZE={num_ranks} does not fit LOCAL_WORLD_SIZE={local_num_ranks}, as GROUP_WORLD_SIZE=1 says "
                "that all ranks are on this host. Another process may have written to the store of the launcher; start "
                "it again."
            )
        for name, value, limit_name, limit in (
            ("RANK", rank, "WORLD_SIZE", num_ranks),
            ("LOCAL_RANK", local_rank, "LOCAL_WORLD_SIZE", local_num_ranks),
            ("LOCAL_WORLD_SIZE", local_num_ranks - 1, "WORLD_SIZE", num_ranks),
        ):
            if value >= limit:
                raise DeviceError(
                    f"{name}={environ.get(name)} does not fit {limit_name}={limit}. Start the processes with "
                    "accelerate launch or torchrun, which set both."
                )
        major, minor = version("torch").split(".")[:2]
        return World(num_ranks, rank, local_num_ranks, local_rank, torch_version=(int(major), int(minor)))


def _number(environ: Mapping[str, str], name: str, default: int) -> int:
    text = environ.get(name, str(default))
    if not text.isdecimal():
        raise DeviceError(
            f"{name}={text} is not a number. Start the processes with accelerate launch or torchrun, which set it."
        )
    return int(text)


def sequences_at_once(training: TrainingConfig, distributed: DistributedConfig, num_ranks: int) -> int:
    """Sequences of one forward pass on all ranks. A global batch is a multiple of them; `auto` divides what is left."""
    size = training.micro_batch_size
    micro_batch_size = size if isinstance(size, int) else 1
    return micro_batch_size * distributed.num_groups(num_ranks)


def nearest_batch(total: int, unit: int) -> int:
    """The multiple of `unit` that is nearest to `total`, and not 0."""
    return unit * max(1, round(total / unit))


def round_default(config: Config, num_ranks: int) -> tuple[Config, str | None]:
    """The settings with a default global batch that these ranks can share, and a note if it was rounded."""
    total = config.training.global_batch_size
    unit = sequences_at_once(config.training, config.distributed, num_ranks)
    if config.task.writes_answers:  # a batch counts prompts, whose answers are divided among the ranks
        return config, None
    if total != DEFAULT_GLOBAL_BATCH or unit < 1 or total % unit == 0:
        return config, None
    rounded = nearest_batch(total, unit)
    note = f"training.global_batch_size={rounded}, the multiple of {unit} that is nearest to {total}, the default"
    return config.with_values({"training.global_batch_size": rounded}), note


def describe_slices(sequence_length: int, num_slices: int) -> str:
    """How ranks share sequences, to follow the length of a sequence; empty if they do not."""
    if num_slices == 1:
        return ""
    slice_length = -(sequence_length // -num_slices)
    missing = num_slices * slice_length - sequence_length
    padded = f", with {missing} of padding that distributed.context_parallel={num_slices} needs" if missing else ""
    return f", each in {num_slices} slices of {slice_length} on as many ranks{padded}"
