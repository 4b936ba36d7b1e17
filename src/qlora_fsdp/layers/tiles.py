"""Compute in tiles of the sequence what sees one token at a time, so that its memory does not grow with the length.

A gated MLP makes tensors that are several times as wide as the hidden states: with 400,000 tokens of an 8B model the
products of gate and up take 21 GiB, and their gradients as much again. But no token sees another one there. So forward
computes a few thousand tokens at a time and keeps only the module's input. Backward computes each tile once more, and
its gradients. That is the idea of ALST's TiledMLP (arXiv:2506.13996).

Two functions of autograd do it, and their order saves a pass. `torch.utils.checkpoint` stops recomputing a transformer
layer at the last tensor that the layer saved. The first function saves the input and computes nothing. The second saves
nothing: its backward asks the first one's node for the input. So recomputing a layer stops before its MLP, which the
tiles then compute: once, as it would be without tiles.

Shapes: N tokens, of all leading dimensions of the input.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from qlora_fsdp.layers.kernels.launch import standing_for
from qlora_fsdp.layers.norm import LastNorm, Recompute

Compute = Callable[..., Tensor]


class Tiles(NamedTuple):
    """How a computation is cut into tiles.

    Attributes:
        num_tokens: tokens of a tile; the last one may have fewer.
        forward: computes a tile: it gets some rows of each tensor.
        again: the same for backward, which needs the result's graph and not its values.
        params: gives the trained parameters that `forward` uses. It is asked again in backward, because FSDP may have
            freed and gathered them in between.
    """

    num_tokens: int
    forward: Compute
    again: Compute
    params: Callable[[], list[Tensor]]


class TiledModule:
    """The forward of a module that computes each token by itself: in tiles, if there are more tokens than fit in one.

    Args:
        module: its present `forward` computes a tile, x [n, I] -> y [n, O], with the module's parameters. If that
            forward has a method `again`, backward calls it instead. `again` need not compute the result's values.
        num_tokens: tokens of a tile.
    """

    def __init__(self, module: nn.Module, num_tokens: int) -> None:
        forward: Any = module.forward
        self.forward = forward
        self.module = module
        self.tiles = Tiles(num_tokens, forward, getattr(forward, "again", forward), self._params)

    def __call__(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """x [..., I] -> y [..., O]."""
        if args or kwargs or x.numel() <= self.tiles.num_tokens * x.shape[-1]:
            return self.forward(x, *args, **kwargs)  # type: ignore[no-any-return]
        y = in_tiles(self.tiles, x, last_norm=getattr(self.forward, "last_norm", None))
        return y.view(*x.shape[:-1], y.shape[-1])

    def _params(self) -> list[Tensor]:
        return [param for param in self.module.parameters() if param.requires_grad]


def in_tiles(tiles: Tiles, x: Tensor, *others: Tensor, last_norm: LastNorm | None = None) -> Tensor:
    """Compute `tiles.forward(x, *others)` tile by tile, with the same gradients: a new tensor [N, O].

    Args:
        tiles: how it is computed.
        x: [..., I].
        others: [N, ...], what else belongs to each token, such as its experts.
        last_norm: where to ask whether x is a norm's output, whose input can be kept in its place.
    """
    params = tiles.params() if torch.is_grad_enabled() else []
    needs_grads = [x.requires_grad, *(other.requires_grad for other in others)]
    if not torch.is_grad_enabled() or not (params or any(needs_grads)):
        return _joined(tiles, [x.reshape(-1, x.shape[-1]), *others])
    kept, recompute = (None, None) if last_norm is None else last_norm.source_of(x)
    # Among its inputs something must need a gradient, or there would be no node to ask.
    anchor = None if x.requires_grad else next(t for t in (*params, *others) if t.requires_grad)
    marked = _Keep.apply(x, kept, anchor, *others)  # type: ignore[no-untyped-call]
    call = _Call(tiles, recompute, marked.grad_fn, needs_grads)
    return _Compute.apply(call, marked, *others, *params)  # type: ignore[no-any-return,no-untyped-call]


class _Call(NamedTuple):
    """The arguments that backward needs.

    Attributes:
        tiles: how it is computed.
        recompute: computes x from what was kept for it; None if x itself was kept.
        keeper: the node of `_Keep`, whose `saved_tensors` are what was kept.
        needs_grads: whether x and the other tensors need a gradient.
    """

    tiles: Tiles
    recompute: Recompute | None
    keeper: Any
    needs_grads: list[bool]


class _Keep(torch.autograd.Function):
    """x as it is. It saves what `_Compute` needs in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, kept: Tensor | None, anchor: Tensor | None, *others: Tensor) -> Tensor:
        ctx.save_for_backward(x if kept is None else kept, *others)
        ctx.set_materialize_grads(False)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return (*grads, *(None for _ in ctx.needs_input_grad[1:]))


class _Compute(torch.autograd.Function):
    """Every tile, one after another."""

    @staticmethod
    def forward(ctx: Any, call: _Call, x: Tensor, *others: Tensor) -> Tensor:
        ctx.call = call
        num_others = len(call.needs_grads) - 1
        return _joined(call.tiles, [x.reshape(-1, x.shape[-1]), *others[:num_others]])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        call: _Call = ctx.call
        tiles = call.tiles
        ctx.call = None  # `ctx` lives until all layers have run backward
        kept, *others = call.keeper.saved_tensors  # asked once: each time, a layer would be computed again
        shape = kept.shape
        (grad_NO,) = grads
        params = tiles.params()
        rows = [kept.reshape(-1, shape[-1]), *others]
        totals: list[Tensor | None] = []
        for tensor, needed in zip(rows, call.needs_grads, strict=True):
            totals.append(torch.empty_like(tensor) if needed else None)
        sums: list[Tensor | None] = [None] * len(params)
        for tile in _each_tile(tiles, grad_NO):
            found = _tile_gradients(call, [tensor[tile] for tensor in rows], params, grad_NO[tile])
            for total in totals:
                if total is not None:
                    total[tile] = cast(Tensor, found.pop(0))
            sums = [_added(total, grad) for total, grad in zip(sums, found, strict=True)]
            del found  # or it would live while the next tile is computed
        grad_x = None if totals[0] is None else totals[0].view(shape)
        return (None, grad_x, *totals[1:], *sums)


def _joined(tiles: Tiles, tensors: Sequence[Tensor]) -> Tensor:
    """The results of all tiles, in one tensor."""
    joined = None
    for tile in _each_tile(tiles, tensors[0]):
        y = tiles.forward(*(tensor[tile] for tensor in tensors))
        joined = y.new_empty(len(tensors[0]), y.shape[-1]) if joined is None else joined
        joined[tile] = y
        del y
    assert joined is not None
    return joined


def _each_tile(tiles: Tiles, rows: Tensor) -> Iterator[slice]:
    """Where each tile lies. Of rows on meta, which are traced for the plan, the second stands for those like it."""
    all_tiles = [slice(start, start + tiles.num_tokens) for start in range(0, len(rows), tiles.num_tokens)]
    if not rows.is_meta or len(all_tiles) < 4:
        yield from all_tiles
        return
    yield all_tiles[0]
    with standing_for(len(all_tiles) - 2):
        yield all_tiles[1]
    yield all_tiles[-1]


def _tile_gradients(
    call: _Call, tensors: Sequence[Tensor], params: Sequence[Tensor], grad: Tensor
) -> list[Tensor | None]:
    """The gradients of those of a tile's tensors that need one, and of the parameters, which a tile may not use."""
    first = tensors[0] if call.recompute is None else call.recompute(tensors[0])
    inputs = [
        tensor.detach().requires_grad_(needed)
        for tensor, needed in zip([first, *tensors[1:]], call.needs_grads, strict=True)
    ]
    with torch.enable_grad():
        y = call.tiles.again(*inputs)
    wanted = [tensor for tensor in inputs if tensor.requires_grad]
    return list(torch.autograd.grad(y, [*wanted, *params], grad, allow_unused=True))


def _added(total: Tensor | None, grad: Tensor | None) -> Tensor | None:
    """The sum of gradients so far: in place, for it is no one else's."""
    if total is None:
        return grad
    return total if grad is None else total.add_(grad)
