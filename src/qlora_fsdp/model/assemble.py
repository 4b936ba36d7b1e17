"""Give a built model its adapters and the loss of its task, in training and in use."""

from __future__ import annotations

from dataclasses import replace

from qlora_fsdp.config.schema import LoraConfig, TaskConfig, TaskName
from qlora_fsdp.data.tokenizer import AddedTokens
from qlora_fsdp.model.adapters import apply_adapters
from qlora_fsdp.model.build import BuiltModel
from qlora_fsdp.model.causal_lm import CausalLM
from qlora_fsdp.model.classifier import Classifier
from qlora_fsdp.model.task_model import TaskModel


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
