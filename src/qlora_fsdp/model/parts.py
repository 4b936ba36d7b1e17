"""Find a classifier's new head and a multimodal model's text decoder, which get special treatment.

Find the linear layers that a loss reaches, so that an adapter on them would learn something.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from transformers import PretrainedConfig, PreTrainedModel

from qlora_fsdp.config.schema import TaskConfig, TaskName
from qlora_fsdp.data.labels import num_outputs
from qlora_fsdp.weights.composed import Stored

POOLER = ".pooler"
_NUMBER = re.compile(r"\.\d+(?=\.|$)")
_FOR_A_PLACE = re.compile(r"\blayers\.(\d+)\.shared_transformer\..*_adapter_list\.(\d+)\.")


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


def general_name(model: PreTrainedModel, name: str) -> str:
    """A module's name within its decoder and without numbers, the same in a small model of the same class.

    Args:
        model: a text model, or a multimodal one, whose decoder the small model is made of.
        name: the full name of one of its modules.
    """
    decoder = find_decoder(model)
    prefix = f"{model.base_model_prefix if decoder is None else decoder[0]}."
    return _NUMBER.sub(".*", name.removeprefix(prefix))


def is_for_another_place(model: PreTrainedModel, name: str) -> bool:
    """Whether a layer of Zamba 2 is never called where it is.

    A block that several layers share has low-rank layers for each of these, and in each layer calls that one's alone.
    The weights are shared; the modules, which would have adapters, are not.
    """
    found, places = _FOR_A_PLACE.search(name), getattr(model.config, "hybrid_layer_ids", None)
    return found is not None and places is not None and places[int(found[2])] != int(found[1])


class ReachedLinears:
    """Learns from forwards and backwards of a model which of its linear layers get a gradient.

    Args:
        model: all of whose parameters require gradients.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.linears = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
        self._reached: set[str] = set()
        self._names: list[str] = []  # of the layers that returned the tensors of the latest forward

    @contextmanager
    def outputs(self) -> Iterator[list[Tensor]]:
        """Collects, while it lasts, what the layers return; the gradients of these tensors are then to be noted."""
        self._names, tensors = [], list[Tensor]()

        def collect(name: str, output: Any) -> None:
            found = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.requires_grad]
            tensors.extend(found)
            self._names += [name] * len(found)

        handles = [
            module.register_forward_hook(lambda module, inputs, output, name=name: collect(name, output))
            for name, module in self.linears.items()
        ]
        try:
            yield tensors
        finally:
            for handle in handles:
                handle.remove()

    def note(self, gradients: Sequence[Tensor | None]) -> None:
        """Take the gradients of the collected tensors, None for those that the loss does not depend on.

        A gradient of zeros counts too: random weights may make one where trained weights make another.
        """
        found = zip(self._names, gradients, strict=True)
        self._reached |= {general_name(self.model, name) for name, gradient in found if gradient is not None}

    def unreached(self) -> frozenset[str]:
        """General names of the layers that got no gradient."""
        return frozenset(general_name(self.model, name) for name in self.linears) - self._reached
