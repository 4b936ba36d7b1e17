"""Find a classifier's new head and a multimodal model's text decoder, which get special treatment."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from qlora_fsdp.config.schema import TaskConfig, TaskName
from qlora_fsdp.data.labels import num_outputs
from qlora_fsdp.weights.composed import Stored

POOLER = ".pooler"


def describe_task(config: PretrainedConfig, task: TaskConfig, pad_token_id: int | None) -> None:
    """Write a classifier's labels into the model's config, from which transformers makes the head.

    Args:
        config: changed in place.
        task: the classifier's labels, and what kind of problem they are.
        pad_token_id: the padding token. Models that classify by the last token find it in front of the padding.
    """
    config.num_labels = num_outputs(task)
    if task.labels:
        config.id2label = dict(enumerate(task.labels))
        config.label2id = {name: index for index, name in enumerate(task.labels)}
    if task.name is TaskName.sequence_classification:
        config.problem_type = task.problem_type.value
    if pad_token_id is not None:
        config.pad_token_id = pad_token_id


def is_outside_backbone(name: str, model: PreTrainedModel) -> bool:
    """Whether a parameter belongs to a head or to what pools for it.

    These may differ between the task that the model files are for and this one.
    """
    return not name.startswith(f"{model.base_model_prefix}.") or f"{POOLER}." in f".{name}"


def find_new(model: PreTrainedModel, keys: Mapping[str, Stored]) -> set[str]:
    """Parameters of the head that the model files do not have, or have for other labels.

    Args:
        model: a classifier, on meta.
        keys: the stored tensors by the model's names; empty for a model with random weights.
    """
    return {
        name
        for name, param in model.named_parameters()
        if is_outside_backbone(name, model) and (name not in keys or keys[name].shape != tuple(param.shape))
    }


def find_head(model: PreTrainedModel, new: set[str]) -> list[str]:
    """Names of the modules that are trained in full: all modules outside the backbone, and poolers that are new."""
    head = [
        name
        for name, child in model.named_children()
        if name != model.base_model_prefix and any(True for _ in child.parameters())
    ]
    new_poolers = {name[: name.index(POOLER) + len(POOLER)] for name in new if POOLER in name}
    return [*head, *sorted(pooler for pooler in new_poolers if pooler.startswith(f"{model.base_model_prefix}."))]


def find_decoder(model: PreTrainedModel) -> tuple[str, nn.Module] | None:
    """Name and module of the text decoder inside a multimodal model; None for a model of text alone.

    A multimodal model has towers for images or sound beside its decoder. Only the decoder is trained.
    """
    decoder = model.get_decoder()
    if decoder is getattr(model, model.base_model_prefix, None):
        return None
    name = next(name for name, module in model.named_modules() if module is decoder)
    return (name, decoder) if "." in name else None
