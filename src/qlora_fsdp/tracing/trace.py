"""Runs a model's forward and backward on meta, and reads off what its layers and its ends keep, allocate and compute.

Every module is the one that trains, with the functions it trains with. Meta tensors have shapes and no memory, so a
micro-batch of any size takes milliseconds. First the whole model runs, but its layers are skipped: that shows what
embeddings, masks, head and loss take, and the arguments that each kind of layer is called with. Then one layer of each
kind runs forward and backward by itself, under each activation policy that is asked for.
"""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from transformers import PretrainedConfig

from qlora_fsdp.data.batch import Batch
from qlora_fsdp.layers.kernels.launch import as_on_a_gpu
from qlora_fsdp.memory.policy import Policy
from qlora_fsdp.memory.traced import EndsUse, Flops, LayerUse
from qlora_fsdp.model.activations import set_activation_policy
from qlora_fsdp.model.task_model import TaskModel
from qlora_fsdp.tracing.fused_attention import fused_attention
from qlora_fsdp.tracing.liger_shapes import shapes_of_functions
from qlora_fsdp.tracing.live_bytes import LiveBytes


class Trace:
    """A micro-batch of a model on meta.

    Args:
        model: on meta, not sharded, in training mode. It is left as it was.
        batch: the micro-batch.
        is_cuda: whether layers do as on a GPU.
        liger_kernels: the settings of `kernels` for which Liger's are used.

    Attributes:
        ends: what everything but the layers takes.
    """

    def __init__(self, model: TaskModel, batch: Batch, is_cuda: bool, liger_kernels: Collection[str]) -> None:
        self.model, self.is_cuda, self.liger_kernels = model, is_cuda, liger_kernels
        self.calls: dict[nn.Module, _Call] = {}  # how each layer is called
        self.input_needs_gradient = False
        with self._running(), LiveBytes([*model.parameters(), *model.buffers()]) as live:
            self.ends = self._run_ends(live, batch.to("meta"))

    def layer(self, index: int, policy: Policy, is_first: bool = False) -> LayerUse:
        """What the layer `model.layers[index]` takes under a policy.

        Args:
            index: of a layer that stands for others of its kind.
            policy: what it keeps of its activations.
            is_first: whether it is the first layer of the model. If embeddings are frozen, its input needs no
                gradient, and its first norm keeps nothing.
        """
        if policy is Policy.offload:  # its input waits on the host; on meta nothing is copied there
            use, size = self.layer(index, Policy.full, is_first), self.ends.hidden
            return replace(use, saved=use.saved - size, host=size)
        original = self.model.layers[index]
        with self._running():
            layer = copy.deepcopy(original, _shared_configs(original))
            set_activation_policy([layer], [policy])
            call, needs_gradient = self.calls[original], not is_first or self.input_needs_gradient
            with LiveBytes([*layer.parameters(), *layer.buffers(), *call.tensors()]) as live:
                return _run_layer(live, layer, call, needs_gradient)

    @contextmanager
    def _running(self) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(_buffers_on_meta(self.model))
            stack.enter_context(shapes_of_functions(self.model, self.liger_kernels))
            stack.enter_context(as_on_a_gpu(self.is_cuda))
            stack.enter_context(fused_attention(self.is_cuda))
            stack.enter_context(_without_garbage_collection())
            yield

    def _run_ends(self, live: LiveBytes, batch: Batch) -> EndsUse:
        """A forward and a backward in which layers are skipped. It fills `calls` on the way."""
        outputs, anchor = dict[nn.Module, Any](), _anchor()
        first_input: Callable[[], Any] = _nothing
        lookup = hidden = held = shared = loss = 0
        in_backward: list[tuple[int, Flops]] = []  # peak and operations before each layer

        def pass_gradient() -> None:
            in_backward.append((live.peak, live.flops))
            live.start_phase()

        def let_go(_: Any) -> None:
            """The model's code no longer holds the first layer's input."""
            nonlocal held, loss
            loss, held, live.peak = max(loss, live.peak - held), 0, 0

        def skip(layer: nn.Module, forward: Any, *args: Any, **kwargs: Any) -> Any:
            nonlocal first_input, lookup, hidden, held, shared
            call = _Call.of(args, kwargs)
            x = call.hidden
            assert x is not None
            is_first = hidden == 0
            if is_first:
                first_input = weakref.ref(x.untyped_storage(), let_go)
                lookup, hidden, self.input_needs_gradient = live.peak, x.nbytes, x.requires_grad
            if layer not in outputs:
                with live.paused(), torch.no_grad():
                    outputs[layer] = forward(*args, **kwargs)
                self.calls[layer] = call.without_hidden()
            y = _Pass.apply(anchor, x, pass_gradient)  # type: ignore[no-untyped-call]
            # The model's code may still hold the first layer's input, which the plan counts with that layer.
            held = hidden if first_input() is not None and not is_first else 0
            shared = live.now - held - 2 * hidden
            live.start_phase()
            return _with_first_tensor(outputs[layer], y)

        live.start_phase()
        with _replaced_forwards(self.model.layers, skip), _gradients_freed(self.model.parameters()):
            total = self.model(batch)
            loss, flops = max(loss, live.peak - held), live.flops
            live.start_phase()
            total.backward()
        backward_peak, backward_flops = in_backward[0]
        return EndsUse(
            hidden=hidden,
            shared=shared,
            lookup=lookup,
            loss=max(0, loss - shared - hidden),
            loss_backward=max(0, backward_peak - shared),
            lookup_backward=max(0, live.peak - shared),
            flops=Flops(flops.plain + backward_flops.plain, flops.fp8 + backward_flops.fp8),
        )


@dataclass(frozen=True)
class _Call:
    """The arguments that a transformer layer is called with; its input apart.

    Attributes:
        hidden: the input; None if only its shape and dtype are remembered.
        is_named: whether it is passed as `hidden_states=`.
        args: the arguments behind it.
        kwargs: the named arguments, without it.
    """

    hidden: Tensor | None
    shape: torch.Size
    dtype: torch.dtype
    is_named: bool
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Call:
        is_named = not args
        x: Tensor = kwargs["hidden_states"] if is_named else args[0]
        kwargs = {name: value for name, value in kwargs.items() if name != "hidden_states"}
        return cls(x, x.shape, x.dtype, is_named, args[1:], kwargs)

    def without_hidden(self) -> _Call:
        return replace(self, hidden=None)

    def tensors(self) -> list[Tensor]:
        return [leaf for leaf in tree_leaves((self.args, self.kwargs)) if isinstance(leaf, Tensor)]

    def run(self, layer: nn.Module, x: Tensor) -> Any:
        if self.is_named:
            return layer(*self.args, hidden_states=x, **self.kwargs)
        return layer(x, *self.args, **self.kwargs)


def _run_layer(live: LiveBytes, layer: nn.Module, call: _Call, needs_gradient: bool) -> LayerUse:
    """Forward and backward of a layer by itself."""
    with live.paused():
        anchor = _anchor()
    live.start_phase()
    x = torch.empty(call.shape, dtype=call.dtype, device="meta")
    if needs_gradient:
        x = _Source.apply(anchor, x)  # type: ignore[no-untyped-call]
    kept_input = weakref.ref(x.untyped_storage())
    y = _first_tensor(call.run(layer, x))
    del x
    saved = live.now - y.untyped_storage().nbytes()
    forward_peak, forward_flops, keeps_input = live.peak, live.flops, kept_input() is not None
    live.start_phase()
    loss = _Sink.apply(y)  # type: ignore[no-untyped-call]
    del y
    loss.backward()
    return LayerUse(
        saved=saved,
        host=0,
        keeps_input=keeps_input,
        forward=forward_peak - saved,
        backward=live.peak - saved,
        forward_flops=forward_flops,
        backward_flops=live.flops,
    )


def _nothing() -> None:
    return None


def _anchor() -> Tensor:
    """What makes the outputs of the functions below take part in backward."""
    return torch.empty((), device="meta", requires_grad=True)


class _Source(torch.autograd.Function):
    """The same tensor, which needs a gradient now; the gradient itself is forgotten."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, ...]:
        return None, None


class _Sink(torch.autograd.Function):
    """A loss of a tensor which does not keep it."""

    @staticmethod
    def forward(ctx: Any, y: Tensor) -> Tensor:
        ctx.shape, ctx.dtype = y.shape, y.dtype
        return y.new_empty(())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return torch.empty(ctx.shape, dtype=ctx.dtype, device="meta")


class _Pass(torch.autograd.Function):
    """A layer that computes nothing: a new tensor like its input, and a new gradient."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, x: Tensor, in_backward: Callable[[], None]) -> Tensor:
        ctx.in_backward = in_backward
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        ctx.in_backward()
        return None, torch.empty_like(grads[0]) if ctx.needs_input_grad[1] else None, None


def _first_tensor(output: Any) -> Tensor:
    return next(leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor))


def _with_first_tensor(output: Any, tensor: Tensor) -> Any:
    """A layer's output with another tensor for the hidden states: the output itself, or the first of a tuple."""
    return (tensor, *output[1:]) if isinstance(output, tuple) else tensor


@contextmanager
def _replaced_forwards(layers: Iterable[nn.Module], function: Callable[..., Any]) -> Iterator[None]:
    """While it lasts, calling a layer calls `function(layer, forward, *args, **kwargs)`."""
    own = {layer: layer.__dict__.get("forward") for layer in layers}
    for layer in own:
        layer.forward = partial(function, layer, layer.forward)
    try:
        yield
    finally:
        for layer, forward in own.items():
            if forward is None:
                del layer.forward
            else:
                layer.forward = forward


@contextmanager
def _gradients_freed(params: Iterable[nn.Parameter]) -> Iterator[None]:
    """While it lasts, the gradient of a parameter goes as soon as it is complete: the plan counts those by itself."""

    def free(param: Tensor) -> None:
        param.grad = None

    hooks = [param.register_post_accumulate_grad_hook(free) for param in params if param.requires_grad]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """While it lasts, tensors in circles of references stay: when they went would otherwise be a matter of chance."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@contextmanager
def _buffers_on_meta(model: nn.Module) -> Iterator[None]:
    """While it lasts, tensors of the model that are real, such as rotary frequencies, are on meta."""
    changed: list[tuple[dict[str, Any], str, Tensor]] = []
    for module in model.modules():
        for table in (module._buffers, vars(module)):
            for name, value in table.items():
                if isinstance(value, Tensor) and not value.is_meta:
                    changed.append((table, name, value))
    for table, name, value in changed:
        table[name] = value.to("meta")
    try:
        yield
    finally:
        for table, name, value in changed:
            table[name] = value


def _shared_configs(layer: nn.Module) -> dict[int, Any]:
    """What `deepcopy` need not copy: the model's config, which every module refers to."""
    found = (value for module in layer.modules() for value in vars(module).values())
    return {id(value): value for value in found if isinstance(value, PretrainedConfig)}
