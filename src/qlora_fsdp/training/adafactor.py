"""Adafactor (arXiv:1804.04235): of a matrix's squared gradients it keeps the means of rows and of columns alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from qlora_fsdp.runtime.rows import local_tensor, shard_group

EPSILON = 1e-30  # added to squares
DECAY_RATE = -0.8  # the weight of what was seen before is 1 - step ** DECAY_RATE
CLIP_THRESHOLD = 1.0  # an update's root mean square is at most this many times the learning rate


class LocalAdafactor(torch.optim.Optimizer):
    """transformers' Adafactor with a learning rate of the run's (scale_parameter=False, relative_step=False).

    A rank has some rows of each matrix. Means over a row are its own. Means over columns, and the size of an update,
    which limits it, are sums over the ranks: two all-reduces a step for all matrices together. Vectors, and tensors
    with more than two dimensions, keep a mean of each element.

    Args:
        groups: groups of parameters, sharded, with the learning rate's factor of each.
        lr: the learning rate of the first step.
        weight_decay: decoupled weight decay.

    Attributes:
        found_inf: as in `LocalAdamW`, but here the host reads it, and waits for it.
    """

    found_inf: Tensor | None = None

    def __init__(self, groups: Sequence[dict[str, Any]], lr: float, weight_decay: float) -> None:
        super().__init__(groups, {"lr": lr, "weight_decay": weight_decay})

    def new_state(self, param: Tensor) -> dict[str, Tensor]:
        """The state of a parameter before its first step; means of rows are split over ranks as the rows are."""
        state = {"step": torch.zeros(())}
        if param.ndim != 2:
            state["exp_avg_sq"] = torch.zeros_like(param)
            return state
        state["exp_avg_sq_row"] = _one_per_row(param)
        state["exp_avg_sq_col"] = torch.zeros(param.shape[1], device=param.device)
        return state

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        if self.found_inf is not None and self.found_inf.item():
            return
        trained = [(p, group) for group in self.param_groups for p in group["params"] if p.grad is not None]
        if not trained:
            return
        params = [param for param, _ in trained]
        ranks = shard_group(params[0])
        updates = self._updates(params, ranks)
        squares = _sum_over(ranks, [update.square().sum().view(1) for update in updates])
        for (param, group), update, square in zip(trained, updates, squares, strict=True):
            size = (square / param.numel()).sqrt()
            update.mul_(group["lr"] / (size / CLIP_THRESHOLD).clamp(min=1.0))
            values = local_tensor(param)
            values.mul_(1.0 - group["weight_decay"] * group["lr"])
            values.sub_(update)

    def _updates(self, params: Sequence[Tensor], ranks: dist.ProcessGroup | None) -> list[Tensor]:
        """This rank's rows of each update, before it is limited: the gradient over the root of the mean squares."""
        sums = []
        for param in params:
            if not self.state[param]:
                self.state[param] = self.new_state(param)
            state = self.state[param]
            state["step"] += 1
            new = state["step"].item() ** DECAY_RATE
            squares = local_tensor(cast(Tensor, param.grad)).square() + EPSILON
            if param.ndim != 2:
                local_tensor(state["exp_avg_sq"]).mul_(1.0 - new).add_(squares, alpha=new)
                continue
            rows = local_tensor(state["exp_avg_sq_row"])
            rows.mul_(1.0 - new).add_(squares.mean(1), alpha=new)
            sums += [squares.sum(0), rows.sum().view(1)]
        of_all_ranks = iter(_sum_over(ranks, sums))
        updates = []
        for param in params:
            state = self.state[param]
            grad = local_tensor(cast(Tensor, param.grad))
            if param.ndim != 2:
                updates.append(grad * local_tensor(state["exp_avg_sq"]).rsqrt())
                continue
            new = state["step"].item() ** DECAY_RATE
            columns = state["exp_avg_sq_col"]
            columns.mul_(1.0 - new).add_(next(of_all_ranks) / param.shape[0], alpha=new)
            mean_of_rows = next(of_all_ranks) / param.shape[0]
            by_row = (local_tensor(state["exp_avg_sq_row"]) / mean_of_rows).rsqrt()
            updates.append(grad * by_row.unsqueeze(1) * columns.rsqrt())
        return updates


def _one_per_row(param: Tensor) -> Tensor:
    """Zeros [rows], split over ranks as the rows of a matrix are."""
    local = local_tensor(param).new_zeros(local_tensor(param).shape[0])
    if not isinstance(param, DTensor):
        return local
    shape = torch.Size([param.shape[0]])
    return DTensor.from_local(local, param.device_mesh, param.placements, run_check=False, shape=shape, stride=(1,))


def _sum_over(ranks: dist.ProcessGroup | None, values: Sequence[Tensor]) -> list[Tensor]:
    """Each vector's sum over the ranks that share the rows, by one all-reduce of all."""
    if ranks is None or not values:
        return list(values)
    joined = torch.cat(list(values))
    dist.all_reduce(joined, group=ranks)
    return list(joined.split([len(value) for value in values]))
