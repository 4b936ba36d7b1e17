"""The number of sequences of an optimizer step, on a number of ranks, and how ranks share them. Imports no torch.

A batch size that somebody has chosen is kept or refused, because it is part of what a run learns. The default was
chosen by nobody, and fits any number of ranks: it is rounded, and the log says so.
"""

from __future__ import annotations

from qlora_fsdp.config.schema import DEFAULT_GLOBAL_BATCH, Config, DistributedConfig, TrainingConfig

AUTO = "auto"  # a value of training.micro_batch_size


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
