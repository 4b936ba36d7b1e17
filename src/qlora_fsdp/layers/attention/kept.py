"""Attention's result, kept by layers that are computed again in backward, so that attention is not.

`torch.utils.checkpoint` computes a layer again in backward, to have what its functions saved. Of long rows attention
takes most of that time. Its result is only as large as the layer's input, and so are the few other things that a fused
kernel makes for its backward (a log-sum for each query and head). So these are kept, and only what the kernel was
called with is made again: queries, keys and values.

How, whatever the kernel is:

- In forward `_Inputs` stands before the kernel, a function that passes queries, keys and values on, and saves them. As
  all that is saved in a layer, they are not kept: checkpoint computes them again. What the kernel itself saves does not
  go to checkpoint. A view of a query, key or value is noted as such; all else is new, and is kept (`_Saved`).
- When the layer is computed again, the kernel does not run. `_Inputs` saves the same three tensors again, as checkpoint
  expects it, and the result that was kept goes on.
- Backward of the kernel finds what it saved: views of what `_Inputs` has saved, and what was kept.

So everything is computed once, by the same kernels with the same values, and no bit changes.

Models look the kernel up in transformers' registry each time they attend. While a layer runs, all functions there keep
their results (`LayerCall`), whoever registered them and when. Attention that a model's own code computes (`eager` among
it) is computed again with the rest of the layer. Where ranks share sequences, the kernel for whole sequences is kept,
and heads are exchanged again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from transformers import AttentionInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from qlora_fsdp.layers.attention.sliced import SlicedAttention

Attend = Callable[..., tuple[Tensor, Any]]
QueryKeyValue = tuple[Tensor, Tensor, Tensor]
Kernel = Callable[[Tensor, Tensor, Tensor], Tensor]
Keep = Callable[[Kernel, QueryKeyValue], Tensor]
Source = Callable[[], Tensor]


def _as_it_is(x: Tensor) -> Tensor:
    return x


def keep_attention(
    pack: Callable[[Tensor], Any] = _as_it_is, unpack: Callable[[Any], Tensor] = _as_it_is
) -> tuple[LayerCall, LayerCall]:
    """The contexts of a layer's forward and of its recomputation: a `context_fn` of `torch.utils.checkpoint`.

    Args:
        pack: puts a result where it waits for backward. By default it stays where it is.
        unpack: brings back what `pack` has returned.
    """
    results = deque[_Result]()
    return LayerCall(partial(_compute, results, pack, unpack)), LayerCall(partial(_take, results))


class LayerCall:
    """While it lasts, `keep` stands for the kernel of every attention function in transformers' registry.

    Only one thread computes layers at a time: while backward's thread computes one again, forward's waits for it.

    Args:
        keep: gets a kernel and what it is called with, and returns its result.
    """

    def __init__(self, keep: Keep) -> None:
        self.keep = keep
        self.functions: dict[str, Attend] = {}

    def __enter__(self) -> None:
        every = ALL_ATTENTION_FUNCTIONS.items()
        self.functions = {name: function for name, function in every if not isinstance(function, SlicedAttention)}
        for name, function in self.functions.items():
            AttentionInterface.register(name, partial(_attend, self.keep, function))

    def __exit__(self, *_: object) -> None:
        for name, function in self.functions.items():
            AttentionInterface.register(name, function)


class _View(NamedTuple):
    """Where a tensor lies in the memory of another one: `source`, by its number."""

    source: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    def of(self, source: Tensor) -> Tensor:
        return source.as_strided(self.size, self.stride, self.offset + source.storage_offset())


class _Result(NamedTuple):
    """What a kernel has returned.

    Attributes:
        source: gives the tensor that it lies in, each time the same.
        view: where it lies there.
        requires_grad: whether a gradient reaches it.
    """

    source: Source
    view: _View
    requires_grad: bool


def _attend(
    keep: Keep, attend: Attend, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
) -> tuple[Tensor, Any]:
    """Call an attention function by `keep`, as transformers calls it: with the parameters from `module` on.

    Dropout draws random numbers. What is computed after it would draw others if it did not run again.
    """
    if not torch.is_grad_enabled() or kwargs.get("dropout"):
        return attend(module, query, key, value, *args, **kwargs)

    def kernel(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out, _ = attend(module, query, key, value, *args, **kwargs)
        return out

    return keep(kernel, (query, key, value)), None


def _compute(
    results: deque[_Result],
    pack: Callable[[Tensor], Any],
    unpack: Callable[[Any], Tensor],
    kernel: Kernel,
    inputs: QueryKeyValue,
) -> Tensor:
    """Call a kernel in forward, and keep its result.

    Checkpoint holds the results as long as what it needs to compute the layer again. They must not lead to the graph of
    the layer, whose functions hold checkpoint's: such a circle would never be freed.
    """
    inputs = _Inputs.apply(*inputs)  # type: ignore[no-untyped-call]
    saved = _Saved(inputs)
    with saved_tensors_hooks(saved.pack, saved.unpack):
        out = kernel(*inputs)
    view = saved.pack(out)
    saved.sources[view.source] = source = cache(partial(unpack, pack(saved.sources[view.source]())))
    results.append(_Result(source, view, out.requires_grad))
    return out


def _take(results: deque[_Result], kernel: Kernel, inputs: QueryKeyValue) -> Tensor:
    """The same when the layer is computed again: the result that was kept, in the order of attention's calls."""
    _Inputs.apply(*inputs)  # type: ignore[no-untyped-call]
    source, view, requires_grad = results.popleft()
    return view.of(source()).detach().requires_grad_(requires_grad)


class _Inputs(torch.autograd.Function):
    """Queries, keys and values as they are. They are saved for the functions that come after this one."""

    @staticmethod
    def forward(ctx: Any, *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(*inputs)
        ctx.set_materialize_grads(False)
        outputs = tuple(x.view_as(x) for x in inputs)
        ctx.mark_non_differentiable(*(y for y, x in zip(outputs, ctx.needs_input_grad, strict=True) if not x))
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return grads


class _Saved:
    """What a kernel has saved for its backward.

    Args:
        inputs: the outputs of `_Inputs` that the kernel is called with.

    Attributes:
        sources: they give the tensors in whose memory lies what was saved. If a gradient reaches the inputs, the first
            ones give these, once the layer is computed again.
    """

    def __init__(self, inputs: tuple[Tensor, ...]) -> None:
        function: Any = next((x.grad_fn for x in inputs if x.requires_grad), None)  # the `_Inputs` that has saved them
        again = cache(lambda: function.saved_tensors)  # checkpoint gives them once
        numbers = range(len(inputs) if function is not None else 0)
        self.sources: list[Source] = [partial(lambda number: again()[number], number) for number in numbers]
        # By memory and dtype: the number of the source that lies there, and where it begins.
        self.places = {_place(inputs[number]): (number, inputs[number].storage_offset()) for number in numbers}

    def pack(self, x: Tensor) -> _View:
        """Note where a tensor lies, and keep it if that is nowhere yet."""
        place = _place(x)
        if place not in self.places:
            self.places[place] = len(self.sources), 0
            size = x.untyped_storage().nbytes() // x.itemsize  # all of that memory, in its order
            self.sources.append(partial(_as_it_is, x.detach().as_strided((size,), (1,), 0)))
        source, begin = self.places[place]
        return _View(source, x.size(), x.stride(), int(x.storage_offset()) - int(begin))

    def unpack(self, view: _View) -> Tensor:
        """The tensor that was packed. What it lies in is freed with the kernel's graph."""
        return view.of(self.sources[view.source]())


def _place(x: Tensor) -> tuple[int, torch.dtype]:
    """The same for tensors that lie in the same memory and have the same dtype."""
    return x.untyped_storage()._cdata, x.dtype
