"""Runs a model's forward and backward on meta, and reads off what its layers and its ends keep, allocate and compute.

Every module is the one that trains, with the functions it trains with. Meta tensors have shapes and no memory, so a
micro-batch of any size takes milliseconds. First the whole model runs, but its layers are skipped: that shows what
embeddings, masks, head and loss take, and the arguments that each kind of layer is called with. Then one layer of each
kind runs forward and backward by itself, under each activation policy that is asked for.

Stand-ins for the rest of a training step, so that one layer can be traced alone: inputs, a loss, fused attention.
"""

from __future__ import annotations

import copy
import gc
import weakref
from collections import UserDict
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only
from transformers import PretrainedConfig

from qlora_fsdp.common.replaced import replaced
from qlora_fsdp.data.batch import Batch
from qlora_fsdp.layers.kernels.launch import as_on_a_gpu, bytes_moved
from qlora_fsdp.layers.liger import stock_models
from qlora_fsdp.layers.rewire import use_tiles
from qlora_fsdp.memory.policy import Policy
from qlora_fsdp.memory.traced import EndsUse, LayerUse, Operations
from qlora_fsdp.model.activations import InputOffload, set_activation_policy
from qlora_fsdp.model.experts import has_experts
from qlora_fsdp.model.tasks.task_model import TaskModel
from qlora_fsdp.tracing.liger_shapes import shapes_of_functions
from qlora_fsdp.tracing.live_bytes import LiveBytes

aten: Any = torch.ops.aten
_PLAIN = F.scaled_dot_product_attention


class Trace:
    """A micro-batch of a model on meta.

    Args:
        model: on meta, not sharded, in training mode. It is left as it was.
        batch: the micro-batch.
        is_cuda: whether layers allocate and compute what they would on a GPU.
        liger_kernels: the settings of `kernels` for which Liger's are used.

    Attributes:
        ends: what everything but the layers takes.
    """

    def __init__(self, model: TaskModel, batch: Batch, is_cuda: bool, liger_kernels: Collection[str]) -> None:
        self.model = model
        self.is_cuda = is_cuda
        self.liger_kernels = liger_kernels
        self.calls: dict[nn.Module, _Call] = {}  # how each layer is called
        self.input_needs_gradient = False
        with self._running(), LiveBytes([*model.parameters(), *model.buffers()]) as live, bytes_moved(live.move):
            self.ends = self._run_ends(live, batch.to("meta"))

    def layer(self, index: int, policy: Policy, is_first: bool = False, num_tile_tokens: int | None = None) -> LayerUse:
        """Trace the memory of `model.layers[index]` under a policy.

        Args:
            index: index of a layer that stands for others of its kind.
            policy: what it keeps of its activations.
            is_first: whether no layer before it is trained. If embeddings are frozen too, its input needs no
                gradient, and its first norm keeps nothing. Without adapters of its own it keeps nothing at all.
            num_tile_tokens: tokens of a tile, in modules that compute in tiles; None: all tokens at once.
        """
        original = self.model.layers[index]
        call = self.calls[original]
        needs_gradient = not is_first or self.input_needs_gradient
        offloaded = _Offloaded(call)
        with self._running():
            layer = copy.deepcopy(original, shared_configs(original))
            use_tiles([layer], num_tile_tokens)
            set_activation_policy([layer], [policy], offloaded)
            known = [*layer.parameters(), *layer.buffers(), *call.tensors()]
            with LiveBytes(known) as live, bytes_moved(live.move):
                use = _run_layer(live, layer, call, needs_gradient)
        if not use.keeps_input:
            return use
        return replace(use, saved=use.saved - sum(offloaded.sizes), host=tuple(offloaded.sizes))

    @contextmanager
    def _running(self) -> Iterator[None]:
        with (
            stock_models(),  # whose kernels liger_shapes.py stands for
            buffers_on_meta(self.model),
            shapes_of_functions(self.model, self.liger_kernels),
            as_on_a_gpu(self.is_cuda),
            fused_attention(self.is_cuda),
            without_garbage_collection(),
        ):
            yield

    def _run_ends(self, live: LiveBytes, batch: Batch) -> EndsUse:
        """A forward and a backward in which layers are skipped. It fills `calls` on the way.

        The model's code may hold the first layer's input longer than that layer runs. The plan counts this tensor with
        the layer. So its bytes (`held`) are subtracted from what is measured, until the code lets go of it.
        """
        outputs: dict[nn.Module, Any] = {}
        anchor = _anchor()
        first_input: Callable[[], Any] = _nothing
        lookup = 0
        hidden = 0
        held = 0
        shared = 0
        loss = 0
        in_backward: list[tuple[int, Operations]] = []  # peak and operations before each layer's backward

        def pass_gradient() -> None:
            """Backward has come to a layer."""
            in_backward.append((live.peak, live.operations))
            live.start_phase()

        def let_go(_: Any) -> None:
            """The model's code no longer holds the first layer's input."""
            nonlocal held, loss
            loss = max(loss, live.peak - held)
            held = 0
            live.peak = 0

        def skip(layer: nn.Module, forward: Any, *args: Any, **kwargs: Any) -> Any:
            """Stand for a layer's forward: note what is alive before it, and return a tensor like its output."""
            nonlocal first_input, lookup, hidden, held, shared
            call = _Call.of(args, kwargs)
            x = call.hidden
            assert x is not None
            is_first = hidden == 0
            if is_first:
                first_input = weakref.ref(x.untyped_storage(), let_go)
                lookup = live.peak
                hidden = x.nbytes
                self.input_needs_gradient = x.requires_grad
            if layer not in outputs:
                with live.paused(), torch.no_grad():
                    outputs[layer] = forward(*args, **kwargs)
                self.calls[layer] = call.detached()
            y = Pass.apply(anchor, x, pass_gradient)  # type: ignore[no-untyped-call]
            held = hidden if first_input() is not None and not is_first else 0
            shared = live.now - held - 2 * hidden  # without this layer's input and output
            live.start_phase()
            return _with_first_tensor(outputs[layer], y)

        live.start_phase()
        with (
            replaced_forwards(self.model.layers, skip),
            gradients_freed(self.model.parameters()),
            _routers_of_all_layers(self.model) as router_bytes,
        ):
            total = self.model(batch)
            loss = max(loss, live.peak - held)
            operations = live.operations
            live.start_phase()
            total.backward()
        backward_peak, backward_operations = in_backward[0]
        shared += sum(router_bytes)
        return EndsUse(
            hidden=hidden,
            shared=shared,
            lookup=lookup,
            loss=max(0, loss - shared - hidden),
            loss_backward=max(0, backward_peak - shared),
            lookup_backward=max(0, live.peak - shared),
            operations=operations + backward_operations,
        )


@contextmanager
def _routers_of_all_layers(model: TaskModel) -> Iterator[list[int]]:
    """While it lasts, a router's loss gets logits of every layer with experts, though layers are skipped.

    Yields:
        A list that the loss fills with the bytes of each layer's logits, which are kept from forward to backward.
    """
    num_bytes: list[int] = []
    router_loss = getattr(model, "router_loss", None)
    if router_loss is None:
        yield num_bytes
        return
    with_experts = {layer for layer in model.layers if has_experts(layer)}  # layers that are alike may be one module
    lists = [module for module in model.base.modules() if isinstance(module, nn.ModuleList)]
    num_layers = sum(layer in with_experts for modules in lists for layer in modules)

    def of_all_layers(found: tuple[Tensor, ...], batch: Batch) -> Tensor:
        logits = tuple(torch.empty_like(found[0], requires_grad=True) for _ in range(num_layers))
        num_bytes.extend(tensor.nbytes for tensor in logits)
        loss: Tensor = stock(logits, batch)
        return loss

    stock = router_loss.of
    with replaced([(router_loss, "of", of_all_layers)]):
        yield num_bytes


@dataclass(frozen=True)
class _Call:
    """The arguments that a transformer layer is called with. Its input is kept apart from the others.

    Attributes:
        hidden: the input; None if only its shape and dtype are remembered.
        is_named: whether the input is passed as `hidden_states=`.
        args: the positional arguments after the input.
        kwargs: the named arguments, without the input.
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

    def detached(self) -> _Call:
        """The call with arguments cut off from their autograd graph, to run the layer by itself any number of times.

        Adapters may have had a part in making an argument, as in what Gemma 3n gives each layer beside its input.
        """
        args, kwargs = tree_map(_cut_off, (self.args, self.kwargs))
        return replace(self, hidden=None, args=args, kwargs=kwargs)

    def tensors(self) -> list[Tensor]:
        leaves = tree_leaves((self.args, self.kwargs))
        shared = [leaf for one in leaves if isinstance(one, UserDict) for leaf in tree_leaves(one.data)]
        return [leaf for leaf in [*leaves, *shared] if isinstance(leaf, Tensor)]

    def run(self, layer: nn.Module, x: Tensor) -> Any:
        if self.is_named:
            return layer(*self.args, hidden_states=x, **self.kwargs)
        return layer(x, *self.args, **self.kwargs)


class _Offloaded(InputOffload):
    """Notes the bytes of what would wait in host memory, which stays on meta; not of a layer's other arguments."""

    def __init__(self, call: _Call) -> None:
        super().__init__()
        self.others = {tensor.untyped_storage()._cdata for tensor in call.tensors()}
        self.sizes: list[int] = []

    def pack(self, tensor: Tensor, is_result: bool = False) -> Tensor:
        if tensor.untyped_storage()._cdata not in self.others:
            self.sizes.append(tensor.nbytes)
        return tensor


def _run_layer(live: LiveBytes, layer: nn.Module, call: _Call, needs_gradient: bool) -> LayerUse:
    """Forward and backward of a layer by itself."""
    with live.paused():
        anchor = _anchor()
        # What a layer puts into a table for later ones, such as shared keys and values, stays alive as the table does.
        call = call.detached()
    live.start_phase()
    x = torch.empty(call.shape, dtype=call.dtype, device="meta")
    if needs_gradient:
        x = GradientSource.apply(anchor, x)  # type: ignore[no-untyped-call]
    kept_input = weakref.ref(x.untyped_storage())
    y = _first_tensor(call.run(layer, x))
    del x
    saved = live.now - y.untyped_storage().nbytes()
    forward_peak = live.peak
    in_forward = live.operations
    keeps_input = kept_input() is not None
    live.start_phase()
    if y.requires_grad:  # else nothing is trained up to this layer, and it has no backward
        loss = LossSink.apply(y)  # type: ignore[no-untyped-call]
        del y
        loss.backward()
    return LayerUse(
        saved=saved,
        host=(),
        keeps_input=keeps_input,
        forward=forward_peak - saved,
        backward=live.peak - saved,
        in_forward=in_forward,
        in_backward=live.operations,
    )


def _nothing() -> None:
    return None


def _cut_off(argument: Any) -> Any:
    """An argument without the autograd graph that made it; a table that layers share (`KVSharingDict`) as a new one."""
    if isinstance(argument, UserDict):
        return type(argument)(tree_map_only(Tensor, _as_leaf, argument.data))
    return _as_leaf(argument) if isinstance(argument, Tensor) else argument


def _as_leaf(tensor: Tensor) -> Tensor:
    """A tensor in the same memory, without the autograd graph that made it."""
    return tensor.detach().requires_grad_(tensor.requires_grad)


def _anchor() -> Tensor:
    """A tensor that needs a gradient, so that outputs of the stand-ins take part in backward."""
    return torch.empty((), device="meta", requires_grad=True)


def _first_tensor(output: Any) -> Tensor:
    return next(leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor))


def _with_first_tensor(output: Any, tensor: Tensor) -> Any:
    """A layer's output with another tensor for the hidden states: the output itself, or the first of a tuple."""
    return (tensor, *output[1:]) if isinstance(output, tuple) else tensor


class GradientSource(torch.autograd.Function):
    """The same tensor, which needs a gradient now. The gradient is dropped."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, ...]:
        return None, None


class LossSink(torch.autograd.Function):
    """A loss of a tensor, which does not keep the tensor for backward."""

    @staticmethod
    def forward(ctx: Any, y: Tensor) -> Tensor:
        ctx.shape = y.shape
        ctx.dtype = y.dtype
        return y.new_empty(())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return torch.empty(ctx.shape, dtype=ctx.dtype, device="meta")


class Pass(torch.autograd.Function):
    """A layer that computes nothing: a new tensor like its input, and a new gradient."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, x: Tensor, in_backward: Callable[[], None]) -> Tensor:
        ctx.in_backward = in_backward
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        ctx.in_backward()
        return None, torch.empty_like(grads[0]) if ctx.needs_input_grad[1] else None, None


@contextmanager
def replaced_forwards(layers: Iterable[nn.Module], function: Callable[..., Any]) -> Iterator[None]:
    """While it lasts, calling a layer calls `function(layer, forward, *args, **kwargs)`."""
    different = dict.fromkeys(layers)  # layers that are alike may be one module
    with replaced((layer, "forward", partial(function, layer, layer.forward)) for layer in different):
        yield


@contextmanager
def gradients_freed(params: Iterable[nn.Parameter]) -> Iterator[None]:
    """While it lasts, a parameter's gradient is freed once it is complete: the plan counts gradients separately."""

    def free(param: Tensor) -> None:
        param.grad = None

    hooks = [param.register_post_accumulate_grad_hook(free) for param in params if param.requires_grad]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """While it lasts, tensors in reference cycles stay alive. Otherwise it would be chance when they are freed."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@contextmanager
def buffers_on_meta(model: nn.Module) -> Iterator[None]:
    """While it lasts, tensors of the model that are real, such as rotary frequencies, are on meta."""
    changes: list[tuple[dict[str, Any], str, Tensor]] = []
    for module in model.modules():
        for table in (module._buffers, vars(module)):
            for name, value in table.items():
                if isinstance(value, Tensor) and not value.is_meta:
                    changes.append((table, name, value.to("meta")))
    with replaced(changes):
        yield


def shared_configs(layer: nn.Module) -> dict[int, Any]:
    """A `deepcopy` memo that shares the model's config, which every module refers to."""
    found = (value for module in layer.modules() for value in vars(module).values())
    return {id(value): value for value in found if isinstance(value, PretrainedConfig)}


@contextmanager
def fused_attention(is_cuda: bool) -> Iterator[None]:
    """While it lasts, attention is one kernel that keeps its inputs, its output and a log-sum per query.

    Without a mask that is flash attention, if queries and values are equally wide and in 16 bits; else it is the
    memory-efficient kernel, which adds a mask as a bias. On a CPU flash attention takes masks too. A matrix of all
    queries and keys never exists.
    """
    # A mode of torch would be off while backward computes a layer again.
    with replaced([(F, "scaled_dot_product_attention", partial(_attention, is_cuda))]):
        yield


# It has the parameters of torch's scaled_dot_product_attention, for which it stands.
def _attention(
    is_cuda: bool,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    bias = attn_mask
    if bias is not None and bias.dtype == torch.bool:
        bias = torch.empty(bias.shape, dtype=query.dtype, device=bias.device)
    if bias is not None:
        bias = bias.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])
    if not is_cuda and query.shape[-1] != value.shape[-1]:  # no kernel on a CPU: matrix products
        return _PLAIN(query, key, value, bias, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    if not is_cuda:
        found = aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, dropout_p, is_causal, attn_mask=bias, scale=scale
        )
    elif bias is None and query.shape[-1] == value.shape[-1] and query.itemsize == 2:
        found = aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, scale=scale)
    else:
        found = aten._scaled_dot_product_efficient_attention(
            query, key, value, bias, True, dropout_p, is_causal, scale=scale
        )
    output: Tensor = found[0]
    return output
