"""Give every transformer layer its activation policy, and a smaller one where memory is short.

Keep the inputs of recomputed layers in pinned host memory until backward needs them, and attention's results.

A recomputed layer saves little more than its input. The input is copied to the host on a side stream while the layer
runs, and copied back while the layer after it is in backward. Two inputs are therefore on the GPU at a time, whatever
the number of layers. On a CPU the copies are plain copies.

Where attention's result is kept too (layers/attention/kept.py), it is a second tensor of its layer, and takes the same
ways. Backward needs it after the layer's input, which starts the copy.

A copy takes a small part of the time of its layer, which grows with the length as the copy does: 1 GiB, of 131,072
tokens of an 8B model, crosses in 20 ms, and the layer takes 400.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from qlora_fsdp.common.sizes import offload_buffer_bytes
from qlora_fsdp.layers.attention.kept import keep_attention
from qlora_fsdp.layers.rewire import recompute_norms
from qlora_fsdp.memory.policy import Policy, describe_policies, next_smaller

log = logging.getLogger("qlora_fsdp")
MIN_BYTES = 2**20  # tensors smaller than this stay where they are
NUM_THREADS = 8
PART_BYTES = 2**26  # that a thread takes at a time
PORTABLE = 1  # cudaHostRegisterPortable: pinned for every GPU, not for the current one alone


def set_activation_policy(
    layers: Sequence[nn.Module], policies: Sequence[Policy], inputs: InputOffload | None = None
) -> None:
    """Have each layer keep, recompute or offload its activations while it trains.

    A policy changes no bit of a result. Nor does it change a collective, unless ranks share sequences: a layer that is
    computed again exchanges heads again. Else a rank may change its own between two micro-batches.

    Layers are recomputed by torch.utils.checkpoint without reentrance. Their inputs then need not require gradients,
    which frozen embeddings do not give them.

    Args:
        layers: transformers' `GradientCheckpointingLayer`s, in order.
        policies: the policy of each layer.
        inputs: where offloaded inputs and results go; None for a place of these layers' own.
    """
    # Keeping the state of random numbers for every layer takes time, and can't be part of a CUDA graph.
    recompute = partial(checkpoint, use_reentrant=False, preserve_rng_state=any(map(has_dropout, layers)))
    inputs = inputs or InputOffload()
    to_host = partial(keep_attention, partial(inputs.pack, is_result=True), inputs.unpack)
    ways: dict[Policy, Callable[..., Any] | None] = {
        Policy.none: None,
        Policy.selective: None,
        Policy.attention: partial(recompute, context_fn=keep_attention),
        Policy.full: recompute,
        Policy.offload: partial(inputs.run, recompute),
        Policy.offload_attention: partial(inputs.run, partial(recompute, context_fn=to_host)),
    }
    for layer, policy in zip(layers, policies, strict=True):
        if policy is not Policy.none:
            recompute_norms(layer)
        _recompute_by(layer, ways[policy])


def has_dropout(module: nn.Module) -> bool:
    """Whether a module draws random numbers in training: a dropout layer, or a rate that its code passes on."""
    return any(
        (isinstance(each, nn.Dropout) and each.p > 0)
        or any("dropout" in name and isinstance(value, float) and value > 0 for name, value in vars(each).items())
        for each in module.modules()
    )


def _recompute_by(layer: nn.Module, function: Callable[..., Any] | None) -> None:
    """Let transformers' layer call itself through `function`; None to call it directly."""
    layer.gradient_checkpointing = function is not None  # type: ignore[assignment]
    if function is not None:
        layer._gradient_checkpointing_func = function  # type: ignore[assignment]


class MemoryFallback:
    """Gives the layers of this rank smaller activation policies, one step each time it is called."""

    def __init__(
        self, layers: Sequence[nn.Module], policies: Sequence[Policy], inputs: InputOffload | None = None
    ) -> None:
        self.layers = layers
        self.policies = tuple(policies)
        self.inputs = inputs

    def __call__(self) -> None:
        """Take one step. To be called between micro-batches, when the allocator had to search for memory repeatedly."""
        smaller = next_smaller(self.policies)
        if smaller is None:
            return
        self.policies = smaller
        set_activation_policy(self.layers, smaller, self.inputs)
        log.warning(f"Memory: less room than planned: from now on activations {describe_policies(smaller)} (auto)")


@dataclass
class _Saved:
    """A tensor in host memory.

    Attributes:
        host: the values in the tensor's shape; a view into `buffer`.
        buffer: uint8, pinned where there is a GPU; later tensors use it again.
        buffers: those that it was taken from.
        device: where the tensor was.
        next: the tensor that backward needs next: another one of the layer, or the input of the layer before it.
        returned: the tensor on its way back to its device.
        done: marks the end of the last copy from or to host memory.
    """

    host: Tensor
    buffer: Tensor
    buffers: _Buffers
    device: torch.device
    next: _Saved | None
    returned: Tensor | None = None
    done: torch.cuda.Event | None = None


class _Buffers:
    """Host buffers that tensors of about one size take turns in.

    Args:
        most_bytes: most bytes of such a tensor, by the memory plan. Every buffer has this size, so that none is
            replaced for a longer batch, and no more is pinned than the plan says. 0: they are as large as the first
            tensors.
    """

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        self.free: list[Tensor] = []  # buffers that hold nothing

    def take(self, tensor: Tensor) -> Tensor:
        """The smallest free buffer that is large enough, or a new one that replaces a free one that is too small.

        Batches of different lengths share buffers, which are as large as the largest tensor.
        """
        fitting = [buffer for buffer in self.free if buffer.nbytes >= tensor.nbytes]
        if fitting:
            best = min(fitting, key=lambda buffer: buffer.nbytes)
            self.free = [buffer for buffer in self.free if buffer is not best]
            return best
        self.free = self.free[1:]
        self.most_bytes = max(self.most_bytes, tensor.nbytes)
        size = offload_buffer_bytes(self.most_bytes)
        return pinned_buffer(size) if tensor.is_cuda else torch.empty(size, dtype=torch.uint8)


class InputOffload:
    """Moves the inputs of checkpointed layers to host memory and back; shared by all layers of a model.

    Args:
        most_bytes: most bytes of an input, and of attention's result (see `_Buffers`).
    """

    def __init__(self, most_bytes: tuple[int, int] = (0, 0)) -> None:
        self.inputs, self.results = map(_Buffers, most_bytes)
        self.last: _Saved | None = None  # what backward needs first of what this forward saved
        self.end: _Saved | None = None  # what it needs last of the layer that runs; None if nothing is saved of it yet
        self.leaving: tuple[Tensor, torch.cuda.Event] | None = None  # the tensor is kept alive until its copy has ended
        self.stream: torch.cuda.Stream | None = None

    def run(self, checkpoint: Callable[..., Any], function: Callable[..., Any], *args: Any) -> Any:
        """`checkpoint(function, *args)`, with what it saves of `args` in host memory.

        Of a layer with nothing to train in it or before it, what checkpoint saved is of no use: there is no backward.
        """
        before, self.end = self.last, None
        with saved_tensors_hooks(self.pack, self.unpack):
            output = checkpoint(function, *args)
        if not any(leaf.requires_grad for leaf in tree_leaves(output) if isinstance(leaf, Tensor)):
            self._forget(before)
        return output

    def _forget(self, before: _Saved | None) -> None:
        """Take back the buffers of all that was saved after `before`."""
        while self.last is not None and self.last is not before:
            self.last.buffers.free.append(self.last.buffer)
            self.last = self.last.next

    def pack(self, tensor: Tensor, is_result: bool = False) -> Tensor | _Saved:
        """Start the copy of a tensor of the layer that runs, in the order in which backward will need them.

        Returns:
            What `unpack` gets: the tensor itself if it is not worth a copy.
        """
        if tensor.nbytes < MIN_BYTES or not tensor.is_floating_point():
            return tensor
        buffers = self.results if is_result else self.inputs
        buffer = buffers.take(tensor)
        host = buffer[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        saved = _Saved(host, buffer, buffers, tensor.device, self.last if self.end is None else self.end.next)
        if tensor.is_cuda:
            self._let_go()
            stream = self._side_stream(tensor.device)
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                host.copy_(tensor.detach(), non_blocking=True)
                saved.done = stream.record_event()
            self.leaving = tensor.detach(), saved.done
        else:
            host.copy_(tensor.detach())
        if self.end is None:
            self.last = saved
        else:
            self.end.next = saved
        self.end = saved
        return saved

    def unpack(self, saved: Tensor | _Saved) -> Tensor:
        """The tensor, on its device; the copy of the next one starts."""
        if isinstance(saved, Tensor):
            return saved
        self.last = None  # the next forward starts a new chain
        self._let_go()
        self._fetch(saved)
        if saved.next is not None:
            self._fetch(saved.next)
        tensor = saved.returned
        assert tensor is not None
        if saved.done is not None:
            torch.cuda.current_stream().wait_event(saved.done)
        saved.next = saved.returned = None
        saved.buffers.free.append(saved.buffer)  # the next copy into it waits on the same stream for this one
        return tensor

    def _fetch(self, saved: _Saved) -> None:
        """Start the copy back to the device, unless it was started before."""
        if saved.returned is not None:
            return
        saved.returned = torch.empty(saved.host.shape, dtype=saved.host.dtype, device=saved.device)
        if saved.device.type == "cuda":
            stream = self._side_stream(saved.device)
            stream.wait_stream(torch.cuda.current_stream())  # which may still use the new tensor's memory
            with torch.cuda.stream(stream):
                saved.returned.copy_(saved.host, non_blocking=True)
                saved.done = stream.record_event()
        else:
            saved.returned.copy_(saved.host)

    def _let_go(self) -> None:
        """Free the tensor that was copied to host memory last. What runs on the GPU from now on waits for that copy."""
        if self.leaving is not None:
            torch.cuda.current_stream().wait_event(self.leaving[1])
            self.leaving = None

    def _side_stream(self, device: torch.device) -> torch.cuda.Stream:
        if self.stream is None:
            self.stream = torch.cuda.Stream(device)
        return self.stream


def pinned_buffer(num_bytes: int) -> Tensor:
    """Pinned host memory, uint8 [num_bytes], which is let go together with the tensor.

    Raises:
        RuntimeError: the host has too little memory, or may not pin as much.
    """
    buffer = torch.empty(num_bytes, dtype=torch.uint8)
    with ThreadPoolExecutor(NUM_THREADS) as threads:
        list(threads.map(Tensor.zero_, buffer.split(PART_BYTES)))
    runtime = torch.cuda.cudart()
    torch.cuda.check_error(runtime.cudaHostRegister(buffer.data_ptr(), num_bytes, PORTABLE))
    weakref.finalize(buffer, runtime.cudaHostUnregister, buffer.data_ptr()).atexit = False
    return buffer
