"""Fingerprints of the files that a model is filled from, by which a run knows its base again."""

from __future__ import annotations

from collections.abc import Sequence

from qlora_fsdp.common.errors import AdapterError
from qlora_fsdp.model.assemble import AssembledModel
from qlora_fsdp.runtime.processes import Processes
from qlora_fsdp.weights.assignment import Assignment
from qlora_fsdp.weights.safetensors_files import fingerprint_files


def describe_layers(assembled: AssembledModel, processes: Processes) -> str | None:
    """Fingerprint of the files that fill the transformer layers; None if their weights are random. Collective.

    Embeddings and heads are left out, so that it is the same whatever a model of these layers is trained for.
    """
    inside = {module for layer in assembled.model.layers for module in layer.modules()}
    return describe_base([a for a in assembled.meta.assignments if a.module in inside], processes)


def describe_base(assignments: Sequence[Assignment], processes: Processes) -> str | None:
    """Fingerprint of the files that fill the model; None if all weights are random.

    Rank 0 reads the files, and all ranks get the result. Collective.
    """
    result = None
    if processes.is_main:
        stored = {tensor.key: tensor for a in assignments for tensor in a.stored_tensors}  # one may fill several
        result = fingerprint_files(stored.values()) if stored else None
    shared: str | None = processes.share(result, str | None)
    return shared


def check_base(
    assembled: AssembledModel, fingerprint: str | None, processes: Processes, *, base: str, adapter: str, fix: str
) -> None:
    """Refuse a base with other weights than an adapter was trained on, whatever its folder is called. Collective.

    A model and what was made of it, such as a base and its instruct version, have weights of the same shapes. So an
    adapter that fits is no proof that it belongs there.

    Args:
        assembled: the base with the adapter's layers, before anything else fills them than its files.
        fingerprint: `describe_layers` of the base in training; None if it is unknown, and nothing is compared.
        processes: all ranks take part.
        base: the setting that names the base, with its value.
        adapter: the same of the adapter.
        fix: what to do about it.

    Raises:
        AdapterError: the weights are others.
    """
    if fingerprint is not None and describe_layers(assembled, processes) != fingerprint:
        raise AdapterError(f"{base} holds other weights than those that {adapter} was trained on{fix}")
