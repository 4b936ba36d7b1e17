"""What FSDP2 keeps between passes: free what is gathered, bring it to rest after a failed pass, or do without it.

FSDP2 keeps what it is doing in its own objects: which units are gathered, which gathers and sums are under way, in what
order units ran. A pass that ends by itself leaves them at rest. One that raises leaves them in the middle of a layer,
and the next pass would go on from there. torch 2.13 has `FSDPModule.reset_iter_state` for that; older versions do not,
and it keeps the gradients that autograd has given to gathered parameters, to which the next backward would add.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from qlora_fsdp.runtime.peers import copy_stream

STREAMS = ("all_gather_copy_in_stream", "all_gather_stream", "reduce_scatter_stream", "all_reduce_stream")


def free_gathered(model: nn.Module) -> None:
    """Free what is still gathered after passes without a backward.

    Normally backward frees the root and the layers that stay gathered after forward. Without a backward they stay
    gathered until this call. While a unit is gathered, its modules hold other Parameters than the optimizer does, in
    memory that FSDP may free at any time.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


@contextmanager
def without_hooks(model: nn.Module) -> Iterator[None]:
    """While it lasts, FSDP does nothing when its units run, and their parameters stay in shards.

    Args:
        model: nothing of it is gathered.
    """
    before: list[tuple[Any, Any]] = []
    for unit in model.modules():
        if isinstance(unit, FSDPModule):
            state: Any = unit._get_fsdp_state()
            for hooks in (unit._forward_pre_hooks, unit._forward_hooks):
                before.append((hooks, list(hooks.items())))
                for handle in (state._pre_forward_hook_handle, state._post_forward_hook_handle):
                    hooks.pop(handle.id, None)
    try:
        yield
    finally:
        for hooks, items in before:
            hooks.clear()
            hooks.update(items)


def rest(model: nn.Module) -> None:
    """Bring FSDP back to rest. Not collective: each rank does so for itself.

    Every unit is in shards afterwards, nothing is under way, and gathered parameters have no gradients. Gradients of
    shards stay as they are; what was not summed into them yet is lost.

    Where the pass was being recorded as a CUDA graph, this is to be called while the recording goes on. A recording can
    end only once its streams have joined the one that it began on.

    Args:
        model: sharded or not; not used by FSDP, nothing happens.

    Raises:
        RuntimeError: CUDA refuses that streams join, because the recording itself has failed. FSDP is at rest anyway.
    """
    states: list[Any] = [unit._get_fsdp_state() for unit in model.modules() if isinstance(unit, FSDPModule)]
    groups = [state._fsdp_param_group for state in states if state._fsdp_param_group is not None]
    try:
        _wait(states, groups)
    finally:
        for state in states:
            _forget(state)
        for group in groups:
            _free(group)


def _wait(states: Sequence[Any], groups: Sequence[Any]) -> None:
    """Have the current stream wait for all gathers and sums that are under way."""
    for group in groups:
        result = group._all_gather_result
        if result is not None and isinstance(result.all_gather_work, dist.Work):
            result.all_gather_work.wait()
    if not groups or groups[0].device.type != "cuda":
        return
    current, is_recording = torch.cuda.current_stream(), torch.cuda.is_current_stream_capturing()
    streams = {getattr(state._comm_ctx, name, current) for state in states for name in STREAMS}
    for stream in {*streams, copy_stream(groups[0].device)} - {current}:
        with torch.cuda.stream(stream):
            takes_part = torch.cuda.is_current_stream_capturing() == is_recording
        if takes_part:
            current.wait_stream(stream)


def _forget(state: Any) -> None:
    """Forget where in a pass a unit is, and what all units share about the pass. The names are those of torch >= 2.11.

    `post_backward_final_callback_queued` belongs to a backward of autograd's that has ended without its callbacks.
    """
    state._training_state = type(state._training_state).IDLE
    state._modules_to_run_forward.clear()
    state._state_ctx.iter_forward_root = None
    state._state_ctx.post_backward_final_callback_queued = False
    for name in ("all_gather_state", "reduce_scatter_state"):
        if hasattr(state._comm_ctx, name):
            setattr(state._comm_ctx, name, None)
    for name in ("post_forward_order", "reduce_scatter_states", "_last_post_reduce_events"):
        getattr(state._comm_ctx, name, []).clear()


def _free(group: Any) -> None:
    """Free the gathered parameters of a unit and their gradients, and forget its gathers and sums."""
    group._training_state = type(group._training_state).IDLE
    group._all_gather_result = None
    group._post_reduce_event = None
    group._reshard_after_forward_event = None
    group._partial_reduce_output = group._all_reduce_state = None
    group._post_forward_indices.clear()
    for param in group.fsdp_params:
        param.to_sharded()  # also where the group has not noted yet that it is gathered
        param.unsharded_accumulated_grad = param.grad_offload_event = None
        if hasattr(param, "_unsharded_param"):
            param._unsharded_param.grad = None
    group._to_sharded()
