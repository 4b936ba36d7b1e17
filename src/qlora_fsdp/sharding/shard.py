"""Shard the model with FSDP2: each rank keeps some rows of every parameter, and gathers the others when they are used.

FSDP gathers by units. A unit is a module whose parameters are gathered together before it runs, and freed afterwards
unless `reshard_after_forward` is off. The units are:

- each transformer layer;
- the embeddings and the output head, each by itself. If they share one weight, it belongs to the root instead;
- the root, the whole model, which has the parameters of no other unit.

Frozen embeddings and a frozen head are sharded like the others, but FSDP does not gather them. The model does so itself
(model/tasks/causal_lm.py), because it needs one buffer for that where FSDP needs two.

The codes of quantized weights in layers are gathered in another way than the rest where GPUs can read one another's
memory (peer_weights.py).

FSDP is not used if every rank holds all parameters (one GPU, or NO_SHARD) on its GPU. It would copy each layer before
using it, and its hooks would cost the host a third of a short step. Ranks that hold whole copies sum their gradients at
the end of a step (`sum_gradients`).

Quantized weights must come out of a gather as the bytes that went in. Three rules ensure that:

1. FSDP casts nothing (`param_dtype=None`). Modules cast what they use.
2. Codes are stored as bfloat16, because FSDP2 shards no integers on older versions of torch. A unit of bfloat16 alone
   would be copied through float32 on a GPU, and codes that look like NaN would change on the way (pytorch#159333,
   bitsandbytes#1945). A unit of several dtypes is copied as plain bytes. So no unit with codes may have one dtype only:
   the float32 scales, which belong to every quantized layer, make sure of that, and `_check_dtypes` checks it.
3. At every start, `prove.py` compares the bytes that are gathered with those that were loaded.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import MappingProxyType
from typing import cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from typing_extensions import assert_never

from qlora_fsdp.common.errors import ConfigError, Problem
from qlora_fsdp.config.schema import ShardingStrategy
from qlora_fsdp.config.specs import ShardSpec
from qlora_fsdp.layers.quantized_layer import QuantizedLayer
from qlora_fsdp.model.tasks.task_model import TaskModel, are_tied
from qlora_fsdp.runtime.fsdp_state import free_gathered
from qlora_fsdp.runtime.packets import prove_peers
from qlora_fsdp.runtime.processes import Processes


def _check_shared(layers: Sequence[nn.Module]) -> None:
    """Refuse layers that have a parameter in common, as Zamba 2's: each is to be a unit with parameters of its own."""
    seen: set[nn.Parameter] = set()
    for layer in layers:
        own = set(layer.parameters())
        if own & seen:
            reason = f"can't be used with {type(layer).__name__}s that share weights, which FSDP2 can't split."
            fix = "Set fsdp.sharding_strategy=NO_SHARD, and fsdp.cpu_offload=false."
            raise ConfigError([Problem("fsdp.sharding_strategy", reason, fix)])
        seen |= own


def shard_model(model: TaskModel, spec: ShardSpec, processes: Processes) -> list[FSDPModule]:
    """Make every parameter a DTensor over the mesh. Collective.

    Args:
        model: on meta, with adapters; changed in place.
        spec: how it is split.
        processes: all ranks take part.

    Returns:
        The FSDP units, the root last; empty if FSDP is not used.

    Raises:
        ConfigError: layers share weights, which FSDP2 can't.
    """
    if not spec.uses_fsdp:
        return []
    cuda = processes.device.type == "cuda"
    offload = CPUOffloadPolicy(pin_memory=cuda) if spec.cpu_offload else OffloadPolicy()
    shard = partial(
        fully_shard,
        mesh=make_mesh(spec, processes),
        mp_policy=MixedPrecisionPolicy(param_dtype=None, reduce_dtype=torch.float32, cast_forward_inputs=False),
        offload_policy=offload,
    )
    layers = model.layers
    _check_shared(layers)
    for module in [*layers, *embedding_and_head_units(model)]:
        shard(module, reshard_after_forward=spec.reshard_after_forward)
    # Gigabytes of which a batch reads some rows, once: gathered with the root they would stay until backward's end.
    for module in model.per_layer_tables:
        shard(module, reshard_after_forward=True)
    # Backward begins in the root, so its parameters stay. The result is the same object, whose class is changed.
    root: FSDPModule = shard(model, reshard_after_forward=False)
    inner = [module for module in model.modules() if isinstance(module, FSDPModule) and module is not root]
    units = [*inner, root]
    for unit in units:
        assert isinstance(unit, nn.Module)  # for mypy: FSDPModule is only a mix-in
        # The loss is already divided by the number of target tokens of all ranks: gradients are summed, not averaged.
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)
        _check_dtypes(unit)
    for module in embedding_and_head_units(model):
        # Backward does not need these two: frozen embeddings compute no gradient, and a frozen head that the model
        # gathers has computed the gradient of its input in forward already (layers/head_loss.py). So FSDP must not
        # gather them for backward.
        is_for_forward = module is model.embeddings or module in model.gathered_by_model
        if is_for_forward and not any(p.requires_grad for p in module.parameters()):
            cast(FSDPModule, module).set_unshard_in_backward(False)
    for module in model.per_layer_tables:
        cast(FSDPModule, module).set_unshard_in_backward(False)
    # The units that can be gathered ahead in forward, in its order. The embeddings are not among them, because no unit
    # runs before them.
    gathered_by_fsdp = [m for m in embedding_and_head_units(model) if m not in model.gathered_by_model]
    prefetch_order = [*layers, *(m for m in gathered_by_fsdp if m is model.head)]
    _set_prefetch([unit for unit in prefetch_order if isinstance(unit, FSDPModule)], root, spec)
    return units


def set_gradient_sync(model: TaskModel, enabled: bool) -> None:
    """Set whether FSDP sums gradients over ranks in the next backward, or keeps them on each rank for a later one.

    Units that the model gathers itself have no gradients. They always stay set to sum: then FSDP skips a unit that has
    nothing to sum. If a unit were set to keep gradients, FSDP would expect it to be gathered.
    """
    if not isinstance(model, FSDPModule) or model.sums_gradients is enabled:
        return  # setting every module again would take milliseconds
    model.sums_gradients = enabled
    model.set_requires_gradient_sync(enabled)
    for unit in model.gathered_by_model:
        if isinstance(unit, FSDPModule):
            unit.set_requires_gradient_sync(True)


@torch.no_grad()
def sum_gradients(model: TaskModel, params: Sequence[nn.Parameter]) -> None:
    """Sum gradients over ranks that hold whole copies of the model, in one all-reduce. Collective.

    To be called after the last backward of a step. Afterwards every parameter has a gradient, even if it had none on
    this rank, because another rank may have computed one.
    """
    if isinstance(model, FSDPModule) or dist.get_world_size() == 1:
        return
    grads = [torch.zeros_like(param) if param.grad is None else param.grad for param in params]
    flat = torch.cat([grad.flatten() for grad in grads])
    dist.all_reduce(flat)
    for param, grad in zip(params, flat.split([param.numel() for param in params]), strict=True):
        param.grad = grad.view_as(param)


@contextmanager
def bypassing_root(model: nn.Module, trains: bool = False) -> Iterator[bool]:
    """A context for calls that begin inside the model and not at its root, such as transformers' `generate`.

    FSDP's hooks expect that a forward pass begins at the root. In this context the root's own parameters are gathered;
    each layer inside gathers its own as always. Nothing gets gradients. After an error the model can't be used again:
    the run ends with it.

    Args:
        model: sharded or not.
        trains: whether the model trains afterwards. `torch.inference_mode` is used only if this is False and the model
            is not sharded, because tensors made in it can't take part in a later backward.

    Yields:
        Whether the model is sharded.
    """
    is_sharded = isinstance(model, FSDPModule)
    if isinstance(model, FSDPModule):
        model.unshard()
    with torch.inference_mode(not is_sharded and not trains), torch.no_grad():
        yield is_sharded
    free_gathered(model)


def make_mesh(spec: ShardSpec, processes: Processes) -> DeviceMesh:
    """A mesh of shape [shards] where all ranks share each parameter, else of shape [replicas, shards]."""
    device, num_shards = processes.device.type, spec.num_shards
    match spec.strategy:
        case ShardingStrategy.auto | ShardingStrategy.FULL_SHARD | ShardingStrategy.SHARD_GRAD_OP:
            return init_device_mesh(device, (num_shards,), mesh_dim_names=("shard",))
        case ShardingStrategy.HYBRID_SHARD | ShardingStrategy.NO_SHARD:
            shape = (processes.num_ranks // num_shards, num_shards)
            mesh = init_device_mesh(device, shape, mesh_dim_names=("replicate", "shard"))
            for group in mesh.get_all_groups():
                prove_peers(group, processes.key)
            return mesh
        case _:
            assert_never(spec.strategy)


def place_model(
    model: nn.Module,
    shard_device: torch.device,
    buffer_device: torch.device,
    placed: Mapping[int, torch.Tensor] = MappingProxyType({}),
) -> None:
    """Allocate uninitialised memory for every shard, and move the buffers, which already hold values.

    Args:
        model: with parameters on meta, sharded or not; changed in place.
        shard_device: where the shards are kept.
        buffer_device: where the layers compute, and where the buffers move.
        placed: parameters that have memory already, by the id of that on meta.
    """
    # Tied parameters must stay one object. `_apply` keeps that for DTensors only.
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, param in module._parameters.items():
            if param is not None and param.is_meta and not isinstance(param, DTensor):
                if id(param) not in made:
                    made[id(param)] = nn.Parameter(torch.empty_like(param, device=shard_device), param.requires_grad)
                module._parameters[name] = made[id(param)]

    def place(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) in placed:
            return placed[id(tensor)]
        return torch.empty_like(tensor, device=shard_device) if tensor.is_meta else tensor.to(buffer_device)

    model._apply(place)


def embedding_and_head_units(model: TaskModel) -> list[nn.Module]:
    """The embeddings and the head, if each is an FSDP unit of its own.

    If the two share a weight, it belongs to the root unit. So does a classifier's head, which is small. Trained rows of
    new tokens belong to the root too: in a unit of the table they would make FSDP gather the frozen table again for
    backward.
    """
    embeddings, head = model.embeddings, model.head
    if head is None:  # a classifier
        return [embeddings]
    if model.transform is None:
        return []
    return [] if are_tied(embeddings, head) else [embeddings, head]


def _set_prefetch(units: Sequence[FSDPModule], root: FSDPModule, spec: ShardSpec) -> None:
    """Have FSDP gather the next units while one runs.

    FSDP2 can do this in two ways. By default it gathers on CUDA streams of its own. That costs memory, because torch's
    allocator keeps separate memory for every stream, and because a layer's flat buffer is freed only when the next
    layer is gathered. With `_set_unshard_async_op` it starts asynchronous gathers from the stream that computes, whose
    memory they use. For layers of a 405B model torch reserved 21.0 GiB in the first way and 17.9 in the second, which
    is used here. Its price is that FSDP2 then gathers nothing ahead in forward unless it is told which units come next.
    In backward it always gathers one unit ahead.

    Shards in host memory are the exception. They are gathered in the default way, because otherwise computing would
    wait for their copies to the GPU.

    Args:
        units: the transformer layers, and the head if FSDP gathers it, in the order in which they run.
        root: the root unit.
        spec: whether shards are in host memory.
    """
    gathers_ahead = not spec.cpu_offload
    root._set_unshard_async_op(gathers_ahead)
    for index, unit in enumerate(units):
        if gathers_ahead:
            unit.set_modules_to_forward_prefetch(list(units[index + 1 : index + 2]))


def modules_of_unit(unit: nn.Module) -> list[nn.Module]:
    """The modules whose parameters a unit gathers itself: units inside it gather their own."""
    inner = (child for child in unit.modules() if isinstance(child, FSDPModule) and child is not unit)
    others = {id(module) for child in inner for module in child.modules()}
    return [module for module in unit.modules() if id(module) not in others]


def _check_dtypes(unit: nn.Module) -> None:
    """Check that a unit with 16-bit codes has parameters of another dtype too, or FSDP2 would copy codes as numbers."""
    own = modules_of_unit(unit)
    storages = {layer.format.storage for layer in own if isinstance(layer, QuantizedLayer)}
    dtypes = {param.dtype for module in own for param in module.parameters(recurse=False)}
    if storages & {torch.bfloat16, torch.float16}:
        assert len(dtypes) > 1, f"{type(unit).__name__} would gather codes as {dtypes}"
