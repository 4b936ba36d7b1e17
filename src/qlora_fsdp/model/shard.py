"""Shard the model with FSDP2: a transformer layer at a time, embeddings and head apart.

Where a GPU has all of every parameter FSDP takes no part: it would copy each layer for its use, and its hooks cost the
host a third of a short step. Several such ranks sum their gradients at the end of a step.

Nothing is cast by FSDP (`param_dtype=None`): modules cast what they use, and every group that holds codes gathers more
than one dtype, which makes FSDP2 move bytes. A group of bfloat16 alone would be copied through float32 on a GPU, and
codes that look like NaN would change (pytorch#159333, bitsandbytes#1945). `prove.py` checks the outcome on every start.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from qlora_fsdp.config.schema import FsdpConfig, ShardingStrategy
from qlora_fsdp.layers import QuantizedLayer
from qlora_fsdp.model.task_model import TaskModel
from qlora_fsdp.runtime.processes import Processes


def shard_model(
    model: TaskModel, config: FsdpConfig, processes: Processes, reshard_after_forward: bool = True
) -> list[FSDPModule]:
    """Make every parameter a DTensor over the mesh; the FSDP units, the root last. None where FSDP takes no part.

    Args:
        model: on meta, with adapters.
        config: strategy, prefetch and offload.
        processes: all ranks take part.
        reshard_after_forward: free layers after their forward, and gather them again for backward.
    """
    if not config.takes_part(config.num_shards(processes.num_ranks, processes.local_num_ranks)):
        return []
    cuda = processes.device.type == "cuda"
    offload = CPUOffloadPolicy(pin_memory=cuda) if config.cpu_offload else OffloadPolicy()
    shard = partial(
        fully_shard,
        mesh=make_mesh(config, processes),
        mp_policy=MixedPrecisionPolicy(param_dtype=None, reduce_dtype=torch.float32, cast_forward_inputs=False),
        offload_policy=offload,
    )
    layers = model.layers
    for module in [*layers, *_end_units(model)]:
        shard(module, reshard_after_forward=reshard_after_forward)
    root: FSDPModule = shard(model, reshard_after_forward=False)  # the model itself, of another class now
    inner = [module for module in model.modules() if isinstance(module, FSDPModule) and module is not root]
    units = [*inner, root]
    for unit in units:
        assert isinstance(unit, nn.Module)  # FSDPModule alone is a mix-in
        # The loss is divided by the global number of target tokens already: gradients are summed, not averaged.
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)
        _check_dtypes(unit)
    for end in _end_units(model):
        # A frozen embedding is a look-up, and a frozen head has made its gradient in forward: no second gather.
        is_done = end is model.embeddings or end in model.gathers_itself
        if is_done and not any(p.requires_grad for p in end.parameters()):
            cast(FSDPModule, end).set_unshard_in_backward(False)
    in_turn = [*layers, *(end for end in _end_units(model) if end is model.head and end not in model.gathers_itself)]
    _set_prefetch([unit for unit in in_turn if isinstance(unit, FSDPModule)], root, config)
    return units


def reduce_gradients(model: TaskModel, now: bool) -> None:
    """Whether the next backward reduces gradients over ranks, or keeps them for a later one.

    What the model gathers itself has none. FSDP takes that from a unit that reduces; one that keeps must have been
    gathered.
    """
    if not isinstance(model, FSDPModule) or model.reduces_gradients is now:
        return  # telling all modules again takes milliseconds
    model.reduces_gradients = now
    model.set_requires_gradient_sync(now)
    for end in model.gathers_itself:
        if isinstance(end, FSDPModule):
            end.set_requires_gradient_sync(True)


@torch.no_grad()
def sum_gradients(model: TaskModel, params: Sequence[nn.Parameter]) -> None:
    """After the last backward of a step: over ranks that have whole copies of the model, in one all-reduce.

    A parameter without a gradient here may have one elsewhere, so none keeps None.
    """
    if isinstance(model, FSDPModule) or dist.get_world_size() == 1:
        return
    flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in params])
    dist.all_reduce(flat)
    for param, grad in zip(params, flat.split([p.numel() for p in params]), strict=True):
        param.grad = grad.view_as(param)


@contextmanager
def computing_inside(model: nn.Module, trains: bool = False) -> Iterator[bool]:
    """For passes without gradients that do not begin at FSDP's root, as transformers' `generate`.

    What belongs to no layer is gathered meanwhile; each layer gathers itself. Yields whether the model is sharded. A
    model that `trains` later must keep no tensor of torch's inference mode, nor may FSDP see one.
    """
    is_sharded = isinstance(model, FSDPModule)
    if isinstance(model, FSDPModule):
        model.unshard()
    with torch.inference_mode(not is_sharded and not trains), torch.no_grad():
        yield is_sharded
    free_gathered(model)


def free_gathered(model: nn.Module) -> None:
    """After passes without a backward, which is what frees the root, and layers that stay gathered.

    While a unit is gathered its Parameters are others than the optimizer's, in memory that FSDP may free.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def make_mesh(config: FsdpConfig, processes: Processes) -> DeviceMesh:
    """1-D for FULL_SHARD and SHARD_GRAD_OP; (replicas, shards) for HYBRID_SHARD."""
    device, num_shards = processes.device.type, config.num_shards(processes.num_ranks, processes.local_num_ranks)
    if config.sharding_strategy in (ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP):
        return init_device_mesh(device, (num_shards,), mesh_dim_names=("shard",))
    shape = (processes.num_ranks // num_shards, num_shards)
    return init_device_mesh(device, shape, mesh_dim_names=("replicate", "shard"))


def place_model(model: nn.Module, shard_device: torch.device, buffer_device: torch.device) -> None:
    """Allocate every shard, uninitialised, and move buffers (which are real already) to where layers run."""
    made: dict[int, nn.Parameter] = {}  # tied parameters stay one, which `_apply` does only for DTensors
    for module in model.modules():
        for name, param in module._parameters.items():
            if param is not None and param.is_meta and not isinstance(param, DTensor):
                if id(param) not in made:
                    made[id(param)] = nn.Parameter(torch.empty_like(param, device=shard_device), param.requires_grad)
                module._parameters[name] = made[id(param)]

    def place(tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(tensor, device=shard_device) if tensor.is_meta else tensor.to(buffer_device)

    model._apply(place)


def _end_units(model: TaskModel) -> list[nn.Module]:
    """Embeddings and head as units of their own; none where they share a weight, which then is the root's.

    A classifier's head, which is small, is the root's. Rows of new tokens are the root's too: as part of a unit they
    would have it gathered again for backward.
    """
    embeddings, head = model.embeddings, model.head
    if head is None:
        return [embeddings]
    if not model.splits_head:
        return []
    shared = {id(p) for p in embeddings.parameters()} & {id(p) for p in head.parameters()}
    return [] if shared else [embeddings, head]


def _set_prefetch(units: Sequence[FSDPModule], root: FSDPModule, config: FsdpConfig) -> None:
    """Gather the next units, layers and a trained head, while one runs, into memory of the stream that computes.

    By itself FSDP2 gathers on streams of its own, each of which keeps the memory it once had, and frees a layer's flat
    buffer with the next gather only: 3 of 21 GiB more for layers of 405B. So what comes next is told here. Shards from
    host memory do need a stream of their own, or computing would wait for their copies.
    """
    gathers_ahead = not config.cpu_offload
    root._set_unshard_async_op(gathers_ahead)
    for index, unit in enumerate(units):
        if gathers_ahead or config.forward_prefetch > 1:
            unit.set_modules_to_forward_prefetch(list(units[index + 1 : index + 1 + config.forward_prefetch]))
        if config.backward_prefetch > 1:
            before = units[max(0, index - config.backward_prefetch) : index]
            unit.set_modules_to_backward_prefetch(list(reversed(before)))


def _check_dtypes(unit: nn.Module) -> None:
    """A group that gathers 16-bit codes must gather two dtypes, or FSDP2 would copy codes as numbers."""
    inner = {
        id(layer)
        for child in unit.modules()
        if isinstance(child, FSDPModule) and child is not unit
        for layer in child.modules()
    }
    own = [module for module in unit.modules() if id(module) not in inner]
    storages = {layer.format.storage for layer in own if isinstance(layer, QuantizedLayer)}
    dtypes = {param.dtype for module in own for param in module.parameters(recurse=False)}
    if storages & {torch.bfloat16, torch.float16}:
        assert len(dtypes) > 1, f"{type(unit).__name__} would gather codes as {dtypes}"
