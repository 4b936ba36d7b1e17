"""Keys and values of running texts, in slots whose memory stays where it is; and a model's attention over them.

transformers' own static cache has one position for all rows. Here each row has its own, so that a finished text gives
its slot to the next prompt while the others go on. Layers with a sliding window keep all tokens too: a window is a
matter of what queries see (layers/attention/slots.py).

Layers that carry a state from token to token (delta rules, state spaces, short convolutions) keep that state alone. A
slot's state is what its text has made of it so far, and is cleared when the next prompt comes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PretrainedConfig
from transformers.cache_utils import Cache, CacheLayerMixin

from qlora_fsdp.layers.attention.slots import SLOTS, register, running_step


class TokenShape(NamedTuple):
    """Shapes of the key and the value that a layer keeps for one token, [heads, size] each."""

    num_heads: int
    key_size: int
    value_size: int
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Bytes of key and value."""
        return self.num_heads * (self.key_size + self.value_size) * self.dtype.itemsize


class StateKey(NamedTuple):
    """One of a layer's states: `conv`, the latest inputs of a convolution, or `recurrent`; and which of these it is."""

    kind: str
    number: int


class SlotLayer(CacheLayerMixin):
    """The slots of one layer.

    Attributes:
        shape: what it keeps of a token; known after the first call.
        keys: [num_slots, heads, length, size]; none until `allocate`, and then a call keeps nothing.
        values: the same.
        state_shapes: of one text's states; known after the first call, and none in a layer without a state.
        states: [num_slots, *shape] each; none until `allocate`.
    """

    is_compileable = True
    is_sliding = False

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.shape: TokenShape | None = None
        self.state_shapes: dict[StateKey, tuple[torch.Size, torch.dtype]] = {}
        self.states: dict[StateKey, Tensor] = {}

    def allocate(self, num_slots: int, length: int, device: torch.device) -> None:
        """Take the memory of all slots."""
        for key, (shape, dtype) in self.state_shapes.items():
            self.states[key] = torch.zeros(num_slots, *shape, dtype=dtype, device=device)
        if self.shape is None:  # a layer without keys of its own
            return
        sizes = (num_slots, self.shape.num_heads, length)
        # Zeros, because what a query does not see is multiplied by 0 all the same, and 0 times NaN is NaN.
        self.keys = torch.zeros(*sizes, self.shape.key_size, dtype=self.shape.dtype, device=device)
        self.values = torch.zeros(*sizes, self.shape.value_size, dtype=self.shape.dtype, device=device)
        self.is_initialized = True

    def free(self) -> None:
        """Give the memory back."""
        self.keys = self.values = None
        self.states.clear()

    def clear(self, slots: Tensor) -> None:
        """Begin anew: the states of these slots are zero, as of a text without tokens."""
        for state in self.states.values():
            state.index_fill_(0, slots, 0)

    def state(self, key: StateKey) -> Tensor | None:
        """The state of all slots, which a step goes on from and changes in place; None where a prompt is read."""
        return None if running_step().positions is None else self.states[key]

    def keep_state(self, key: StateKey, new: Tensor) -> None:
        """Keep what a prompt has left [rows, *shape], or a step of all slots."""
        step = running_step()
        self.state_shapes.setdefault(key, (new.shape[1:], new.dtype))
        if key not in self.states:
            return
        if step.positions is not None:
            self.states[key].copy_(new)
        else:
            assert step.slots is not None
            self.states[key].index_copy_(0, step.slots, new.to(self.states[key].dtype))

    def copy(self, source: int, targets: Tensor, num_tokens: int) -> None:
        """Give other slots the first tokens of a slot, and the states that these have left."""
        for state in self.states.values():
            state[targets] = state[source].clone()  # torch refuses to write to the memory that it reads
        if self.keys is None or self.values is None:
            return
        for kept in (self.keys, self.values):
            kept[targets, :, :num_tokens] = kept[source, :, :num_tokens].clone()

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Note the shape of a token."""
        self.shape = TokenShape(key_states.shape[1], key_states.shape[3], value_states.shape[3], key_states.dtype)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Keep new keys and values [rows, heads, tokens, size]. Returns those that this call's queries may see."""
        step = running_step()
        if self.shape is None:
            self.lazy_initialization(key_states, value_states)
        if step.positions is None:
            if self.keys is not None and self.values is not None:
                assert step.slots is not None
                num_tokens = key_states.shape[2]
                self.keys[:, :, :num_tokens].index_copy_(0, step.slots, key_states)
                self.values[:, :, :num_tokens].index_copy_(0, step.slots, value_states)
            return key_states, value_states
        assert self.keys is not None and self.values is not None
        for kept, new in ((self.keys, key_states), (self.values, value_states)):
            places = step.places(kept.shape[1], kept.shape[2])
            kept.view(-1, kept.shape[3]).index_copy_(0, places, new.reshape(-1, kept.shape[3]))
        return self.keys, self.values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0  # of masks that are not made

    def get_seq_length(self) -> int:
        return 0  # positions are always given

    def get_max_length(self) -> int:
        return -1


class SlotCache(Cache):
    """The cache that transformers' models get as `past_key_values`."""

    def __init__(self, num_layers: int) -> None:
        self.slot_layers = [SlotLayer() for _ in range(num_layers)]
        super().__init__(layers=[*self.slot_layers])

    @property
    def has_states(self) -> bool:
        """Whether a layer carries a state from token to token; known after the first call of the model."""
        return any(layer.state_shapes for layer in self.slot_layers)

    def slot_bytes(self, length: int) -> int:
        """Bytes of a slot for `length` tokens in all layers; 0 before the first call of the model."""
        of_token = sum(layer.shape.num_bytes for layer in self.slot_layers if layer.shape is not None)
        shapes = [found for layer in self.slot_layers for found in layer.state_shapes.values()]
        return of_token * length + sum(shape.numel() * dtype.itemsize for shape, dtype in shapes)

    def clear(self, slots: Tensor) -> None:
        """Begin anew in these slots, int64 [rows]: layers that carry a state forget the text before."""
        for layer in self.slot_layers:
            layer.clear(slots)

    # What layers that carry a state ask of transformers' cache.

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        return running_step().positions is not None

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self.slot_layers[layer_idx].state(StateKey("conv", state_idx))

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self.slot_layers[layer_idx].state(StateKey("recurrent", state_idx))

    def update_conv_state(
        self,
        conv_states: Tensor,
        layer_idx: int,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Keep the latest inputs of a convolution.

        Args:
            conv_states: [rows, channels, tokens], the new inputs.
            layer_idx: the layer.
            state_idx: which of its states.
            conv_kernel_size: how many inputs are kept; None for as many as are given.
            **kwargs: what transformers passes to other caches; not used.

        Returns:
            The new inputs, in a step behind those that were kept before.
        """
        layer, key = self.slot_layers[layer_idx], StateKey("conv", state_idx)
        before = layer.state(key)
        inputs = conv_states if before is None else torch.cat([before, conv_states], -1)
        num_kept = conv_kernel_size or conv_states.shape[-1]
        num_missing = max(0, num_kept - inputs.shape[-1])
        layer.keep_state(key, F.pad(inputs, (num_missing, 0))[..., -num_kept:])
        return inputs

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> Tensor:
        """Keep the states [rows, ...] that the tokens of this call have left."""
        self.slot_layers[layer_idx].keep_state(StateKey("recurrent", state_idx), recurrent_states)
        return recurrent_states

    def allocate(self, num_slots: int, length: int, device: torch.device) -> None:
        """Take the memory of all slots, for texts of up to `length` tokens. To be called after a first call."""
        for layer in self.slot_layers:
            layer.allocate(num_slots, length, device)

    def copy(self, source: int, targets: Tensor, num_tokens: int) -> None:
        """Give the slots `targets` the first `num_tokens` tokens of the slot `source`, in all layers."""
        for layer in self.slot_layers:
            layer.copy(source, targets, num_tokens)

    def free(self) -> None:
        """Give back the memory that `allocate` could take."""
        for layer in self.slot_layers:
            layer.free()


@contextmanager
def attending(base: nn.Module) -> Iterator[None]:
    """While it lasts, the model's attention is that of slots."""
    register()
    configs: dict[int, PretrainedConfig] = {}
    for module in base.modules():
        config = getattr(module, "config", None)
        if isinstance(config, PretrainedConfig):
            configs[id(config)] = config
    before = {key: config._attn_implementation for key, config in configs.items()}
    for config in configs.values():
        config._attn_implementation = SLOTS
    try:
        yield
    finally:
        for key, config in configs.items():
            config._attn_implementation = before[key]
