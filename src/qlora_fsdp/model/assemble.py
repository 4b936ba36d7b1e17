"""Give a built model its adapters and the loss of its task, in training and in use."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from qlora_fsdp.config.schema import LoraConfig, TaskConfig, TaskName
from qlora_fsdp.data.tokenizer import AddedTokens
from qlora_fsdp.model.adapters import apply_adapters
from qlora_fsdp.model.build import BuiltModel
from qlora_fsdp.model.causal_lm import CausalLM
from qlora_fsdp.model.classifier import Classifier
from qlora_fsdp.model.task_model import TaskModel
from qlora_fsdp.runtime.processes import Processes
from qlora_fsdp.weights.fill import Assignment
from qlora_fsdp.weights.safetensors_files import fingerprint


def adapt_model(
    built: BuiltModel, lora: LoraConfig, task: TaskConfig, tokens: AddedTokens, liger_loss: bool = False
) -> TaskModel:
    """The model, changed in place, in the wrapper of its task; a classifier's new head is trained in full.

    Args:
        built: on meta.
        lora: what is adapted.
        task: what is learned.
        tokens: that the tokenizer got, whose rows are trained.
        liger_loss: as of `CausalLM`.
    """
    if task.name is TaskName.causal_lm:
        return CausalLM(apply_adapters(built.model, lora, tokens=tokens), liger_loss)
    lora = replace(lora, modules_to_save=[*(lora.modules_to_save or []), *built.head])
    return Classifier(apply_adapters(built.model, lora, task.name, tokens), task)


def describe_base(assignments: Sequence[Assignment], processes: Processes) -> str | None:
    """Fingerprint of the files that fill the model, which rank 0 reads; None where all weights are random."""
    result = None
    if processes.is_main:
        stored = [tensor for a in assignments for tensor in (a.stored, *a.stored_parts.values()) if tensor is not None]
        result = fingerprint(stored) if stored else None
    shared: str | None = processes.share(result)
    return shared
