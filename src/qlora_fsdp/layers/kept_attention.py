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

So everything is computed once, by the same kernels with the same values, and no bit changes. torch's own
`create_selective_checkpoint_contexts` keeps results of operators, and knows no kernel that is launched inside a
function of autograd, as FlashAttention-4's are.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from transformers import AttentionInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from qlora_fsdp.layers.sliced_attention import SlicedAttention

Attend = Callable[..., tuple[Tensor, Any]]


def make_keepable(layer: nn.Module) -> None:
    """Let the attention functions of a transformer layer be kept, if it finds them in transformers' registry.

    Attention that the model's own code computes (`eager` among it) is computed again with the rest of the layer. Where
    ranks share sequences, it is the kernel for whole sequences that is kept; heads are exchanged again.
    """
    configs = (getattr(module, "config", None) for module in layer.modules())
    for name in {str(getattr(config, "_attn_implementation", None)) for config in configs}:
        attend = ALL_ATTENTION_FUNCTIONS.get(name)
        if isinstance(attend, SlicedAttention):
            attend.attend = _keepable(attend.attend)
        elif attend is not None:
            AttentionInterface.register(name, _keepable(attend))


def keep_attention() -> tuple[LayerCall, LayerCall]:
    """The contexts of a layer's forward and of its recomputation: a `context_fn` of `torch.utils.checkpoint`."""
    outputs = deque[Tensor]()
    return LayerCall(outputs, is_again=False), LayerCall(outputs, is_again=True)


class LayerCall:
    """A context in which attention functions keep their results, or return them.

    The results are held by checkpoint as long as what it needs to compute the layer again. They must not lead to the
    graph of the layer, whose functions hold checkpoint's: such a circle would never be freed.

    Args:
        outputs: the results of this call of the layer that were not used again yet, in the order of attention's calls.
        is_again: whether the layer is computed again.
    """

    def __init__(self, outputs: deque[Tensor], is_again: bool) -> None:
        self.outputs, self.is_again = outputs, is_again
        self.outer: LayerCall | None = None

    def __enter__(self) -> None:
        self.outer, _running.call = _running.call, self

    def __exit__(self, *_: object) -> None:
        _running.call, self.outer = self.outer, None


class _Running(threading.local):
    """The layer's call that this thread is in. Backward computes layers again in a thread of its own."""

    call: LayerCall | None = None


_running = _Running()


def _keepable(attend: Attend) -> Attend:
    return attend if isinstance(attend, _Keepable) else _Keepable(attend)


class _Keepable:
    """An attention function of transformers' registry around another one."""

    def __init__(self, attend: Attend) -> None:
        self.attend = attend

    def __call__(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Any]:
        """What the function returns. A result that was kept comes without attention weights, which no layer uses.

        Dropout draws random numbers. What is computed after it would draw others if it did not run again.
        """
        call = _running.call
        if call is None or not torch.is_grad_enabled() or kwargs.get("dropout"):
            return self.attend(module, query, key, value, *args, **kwargs)
        query, key, value = _Inputs.apply(query, key, value)  # type: ignore[no-untyped-call]
        if call.is_again:
            return call.outputs.popleft(), None
        saved = _Saved((query, key, value))
        with saved_tensors_hooks(saved.pack, saved.unpack):
            out, weights = self.attend(module, query, key, value, *args, **kwargs)
        call.outputs.append(out.detach().requires_grad_(out.requires_grad))
        return out, weights


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


class _View(NamedTuple):
    """Where a tensor lies in the memory of another one: `source`, by its number."""

    source: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class _Saved:
    """What a kernel has saved for its backward.

    Args:
        inputs: the outputs of `_Inputs` that the kernel is called with.

    Attributes:
        function: the `_Inputs` that has saved them; None if no gradient reaches it.
        sources: tensors in whose memory lies what was saved. The inputs are the first, and are None here.
        num_left: how many views of the inputs backward still needs.
    """

    def __init__(self, inputs: tuple[Tensor, ...]) -> None:
        self.function: Any = next((x.grad_fn for x in inputs if x.requires_grad), None)
        self.sources: list[Tensor | None] = [None] * len(inputs) if self.function is not None else []
        self.inputs: tuple[Tensor, ...] | None = None
        self.num_left = 0
        # By memory and dtype: the number of the source that lies there, and where it begins.
        self.places = {_place(x): (number, x.storage_offset()) for number, x in enumerate(inputs[: len(self.sources)])}

    def pack(self, x: Tensor) -> _View:
        """Note where a tensor lies, and keep it if that is nowhere yet."""
        place = _place(x)
        if place not in self.places:
            self.places[place] = len(self.sources), x.storage_offset()
            self.sources.append(x.detach())
        source, begin = self.places[place]
        self.num_left += self.sources[source] is None
        return _View(source, x.size(), x.stride(), int(x.storage_offset()) - int(begin))

    def unpack(self, view: _View) -> Tensor:
        """The tensor that was packed."""
        source = self.sources[view.source]
        if source is None:
            if self.inputs is None:  # checkpoint gives them once
                assert self.function is not None
                self.inputs = self.function.saved_tensors
            source = self.inputs[view.source]
            self.num_left -= 1
            if self.num_left == 0:
                self.inputs = None
        return source.as_strided(view.size, view.stride, view.offset + source.storage_offset())


def _place(x: Tensor) -> tuple[int, torch.dtype]:
    """The same for tensors that lie in the same memory and have the same dtype."""
    return x.untyped_storage()._cdata, x.dtype
