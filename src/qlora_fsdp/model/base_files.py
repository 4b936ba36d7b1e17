"""Fingerprints of the files that a model is filled from, by which a run knows its base again."""

from __future__ import annotations

from collections.abc import Sequence

from qlora_fsdp.model.assemble import AssembledModel
from qlora_fsdp.runtime.processes import Processes
from qlora_fsdp.weights.assignment import Assignment
from qlora_fsdp.weights.safetensors_files import fingerprint


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
        result = fingerprint(stored.values()) if stored else None
    shared: str | None = processes.share(result)
    return shared
