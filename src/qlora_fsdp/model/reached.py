"""Which linear layers a loss reaches, so that an adapter on them would learn something.

An adapter changes what its layer's forward returns. So it learns only if that forward is called, and if the output gets
a gradient. In some models one of the two fails: an indexer that chooses tokens for sparse attention gets no gradient;
attention to an encoder is never called in a run on text; and Jamba multiplies with the weight of `dt_proj` itself,
without calling the layer. No config says so. But a small model of the same class shows it when it computes a loss
(trials/row_trial.py).

The small model has fewer layers, so a layer is identified by its name without numbers, `layers.*.mlp.up_proj`. A name
counts as reached if any layer of that name is, because one of many experts may get none of the trial's few tokens.

In Zamba 2 it is numbers that tell: `is_for_another_place`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

from qlora_fsdp.model.parts import find_decoder

_NUMBER = re.compile(r"\.\d+(?=\.|$)")
_FOR_A_PLACE = re.compile(r"\blayers\.(\d+)\.shared_transformer\..*_adapter_list\.(\d+)\.")


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
