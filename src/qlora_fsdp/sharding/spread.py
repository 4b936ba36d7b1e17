"""Spread a model's layers over ranks, for text from a model that no GPU can hold whole.

A sharded model is gathered for each token that it writes: a rank receives gigabytes to compute one row. Here a rank
keeps some of the layers, next to one another, and only hidden states travel, a few kilobytes per token. All ranks call
the whole model with the same tokens. On each of them the layers of others pass on what they get; the first layer of its
own takes the hidden states that the rank before has sent, and its last one sends them on. So the model's own forward
runs, and the last rank has the logits.

Whether a family does more between its layers than to hand on hidden states is tried, with a small model
(`why_not_spread`).
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from qlora_fsdp.common.text import name_error
from qlora_fsdp.layers.liger import stock_models
from qlora_fsdp.model.tasks.task_model import are_tied, find_layers
from qlora_fsdp.model.trials.row_trial import RowTrial

MAX_LENGTH = 2**40  # so that the small model's windows are shorter than its rows
TOLERANCE = 1e-5  # of the largest logit


class Link(Protocol):
    """What ties a rank to its neighbours: `runtime.chain.Chain`, or a stand-in."""

    rank: int
    num_ranks: int

    @property
    def is_first(self) -> bool: ...
    @property
    def is_last(self) -> bool: ...
    def send(self, tensor: Tensor) -> None: ...
    def receive(self, like: Tensor) -> Tensor: ...


class PassedLayer(nn.Module):
    """In place of a layer that another rank has: it returns the hidden states that it gets.

    Args:
        layer: the layer, some of whose attributes the model's forward may read, such as its type of attention.
    """

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        for name, value in vars(layer).items():
            if isinstance(value, str | int | float) and not name.startswith("_"):
                setattr(self, name, value)

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """The hidden states, [B, L, hidden]."""
        return hidden_states


class NoEmbeddings(nn.Module):
    """In place of embeddings that another rank has: zeros, in place of which hidden states are received later."""

    def __init__(self, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.width, self.dtype = width, dtype

    def forward(self, input_ids: Tensor) -> Tensor:
        """Zeros [B, L, width] for tokens [B, L]."""
        return torch.zeros(*input_ids.shape, self.width, dtype=self.dtype, device=input_ids.device)


class NoHead(nn.Module):
    """In place of a head that another rank has: logits of zero, which nobody uses."""

    def __init__(self, num_logits: int) -> None:
        super().__init__()
        self.num_logits = num_logits

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Zeros [B, L, logits] for hidden states [B, L, hidden]."""
        return hidden_states.new_zeros(*hidden_states.shape[:-1], self.num_logits)


def spread_layers(base: PreTrainedModel, link: Link, dtype: torch.dtype) -> None:
    """Leave a rank its part of a model: the layers of others, and what else it does not need, are taken out.

    Args:
        base: transformers' model, on meta or not; changed in place.
        link: says which part, and carries the hidden states.
        dtype: of the hidden states.
    """
    own = share_layers(base, link.num_ranks)[link.rank]
    layers = find_layers(base)
    names = {id(module): name for name, module in base.named_modules()}
    embeddings, head = base.get_input_embeddings(), cast(nn.Module, base.get_output_embeddings())
    is_tied = are_tied(embeddings, head)  # then all ranks keep the table that the two share: such models are small
    for index, layer in enumerate(layers):
        if index not in own:
            base.set_submodule(names[id(layer)], PassedLayer(layer))
    if not (link.is_first or is_tied):
        width = base.config.get_text_config().hidden_size
        base.set_submodule(names[id(embeddings)], NoEmbeddings(width, dtype))
    if not (link.is_last or is_tied):
        base.set_submodule(names[id(head)], NoHead(_num_logits(head, base)))
    if not link.is_first:
        layers[own.start].register_forward_pre_hook(_take_from(link), with_kwargs=True)
    if not link.is_last:
        layers[own.stop - 1].register_forward_hook(_hand_to(link))


def share_layers(base: PreTrainedModel, num_ranks: int) -> list[range]:
    """Which layers each rank gets, so that the ranks hold about as many bytes. None gets less than one layer."""
    sizes, before, after = _bytes_by_layer(base)
    before = before if after else 0  # a tied table is on all ranks
    total, done, index, shares = before + sum(sizes) + after, before, 0, list[range]()
    for rank in range(num_ranks - 1):
        first, goal = index, total * (rank + 1) / num_ranks
        most = len(sizes) - (num_ranks - 1 - rank)  # one layer at least is left for each rank that follows
        while index < most and (index == first or done + sizes[index] / 2 <= goal):
            done += sizes[index]
            index += 1
        shares.append(range(first, index))
    return [*shares, range(index, len(sizes))]


def bytes_of_fullest(base: PreTrainedModel, num_ranks: int) -> int:
    """Bytes of parameters on the rank that holds the most."""
    sizes, before, after = _bytes_by_layer(base)
    held = [sum(sizes[index] for index in share) for share in share_layers(base, num_ranks)]
    if not after:  # a tied table is on all ranks
        return max(held) + before
    held[0] += before
    held[-1] += after
    return max(held)


def _bytes_by_layer(base: PreTrainedModel) -> tuple[list[int], int, int]:
    """Bytes of each layer's parameters, of the embeddings, and of the head, 0 if it is tied to them."""
    embeddings, head = base.get_input_embeddings(), cast(nn.Module, base.get_output_embeddings())
    after = 0 if are_tied(embeddings, head) else _num_bytes(head)
    return [_num_bytes(layer) for layer in find_layers(base)], _num_bytes(embeddings), after


def _num_bytes(module: nn.Module) -> int:
    return sum(param.numel() * param.itemsize for param in module.parameters())


def _num_logits(head: nn.Module, base: PreTrainedModel) -> int:
    return int(getattr(head, "out_features", base.config.get_text_config().vocab_size))


def _take_from(link: Link) -> Any:
    def receive(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        if args:
            return (link.receive(args[0]), *args[1:]), kwargs
        return args, kwargs | {"hidden_states": link.receive(kwargs["hidden_states"])}

    return receive


def _hand_to(link: Link) -> Any:
    def send(layer: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        link.send(output)

    return send


def why_not_spread(config: PretrainedConfig, trust_remote_code: bool) -> str | None:
    """Why the layers of such a model can't be spread over ranks; None if they can.

    A small model of its class is cut into two parts, one of which hands its hidden states to the other. The logits must
    be those of the whole model.
    """
    trial = RowTrial(config, MAX_LENGTH, trust_remote_code=trust_remote_code)
    if trial.error is not None:
        return trial.error
    whole, tokens = trial.model.eval(), trial.rows[0][None]
    try:
        with stock_models(), torch.no_grad():
            expected = whole(input_ids=tokens).logits
            carried: list[Tensor] = []
            for rank in range(2):
                part = deepcopy(whole)
                spread_layers(part, _Carrier(rank, carried), torch.float32)
                logits = part(input_ids=tokens).logits
    except Exception as error:  # classes are transformers', or come with a model
        return f"its layers can't be computed apart ({name_error(error)})"
    difference = float((logits - expected).abs().max() / expected.abs().max())
    return None if difference <= TOLERANCE else f"its logits would differ by {difference:.1g} of the largest"


class _Carrier:
    """A link of two parts in one process: what the first sends is kept until the second receives it."""

    num_ranks = 2

    def __init__(self, rank: int, carried: list[Tensor]) -> None:
        self.rank, self.carried = rank, carried
        self.is_first, self.is_last = rank == 0, rank == 1

    def send(self, tensor: Tensor) -> None:
        assert isinstance(tensor, Tensor), f"a layer returns {type(tensor).__name__}"
        self.carried.append(tensor)

    def receive(self, like: Tensor) -> Tensor:
        assert self.carried[0].shape == like.shape and self.carried[0].dtype == like.dtype
        return self.carried.pop()
