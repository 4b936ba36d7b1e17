"""Compute a sharded model by the rows that each rank has, to write text: results travel, and weights do not.

Training gathers the weights of a layer, and multiplies thousands of tokens with them. A step of generation has a token
for each text, and gathering 36 GiB for it takes a second. So while text is written, each rank multiplies with the rows
of weights that it has. That gives some of a layer's outputs, of all tokens, and the ranks put them together: kilobytes.
A rank reads its own part of the codes alone, so n ranks write a text up to n times as fast as one.

This is tensor parallelism (arXiv:1909.08053) with every weight split by its outputs. Megatron splits every second one
by its inputs, and so needs half as many exchanges. But it has to know which layers follow one another, and where heads
lie in their outputs. Here no model's code is known: a layer gets all of its inputs and returns all of its outputs.

Each rank has:

- of linear layers, quantized (layers/decode_linear.py) or not, and of the embeddings: its rows, as FSDP splits them;
- of a layer's experts: whole ones, so that no expert's rows are on two ranks;
- of all other parameters, which are small: a copy of the whole;
- hidden states and the cache of keys and values: all. Ranks compute what lies between the products alike.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeGuard

import torch
import torch.distributed as dist
from peft.tuners.lora.layer import LoraLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.utils._pytree import tree_map_only

from qlora_fsdp.common.replaced import replaced
from qlora_fsdp.layers.decode_linear import DecodeLayers
from qlora_fsdp.layers.experts.adapter import ExpertAdapter
from qlora_fsdp.layers.experts.decode import DecodeExperts, why_not_coded
from qlora_fsdp.layers.experts.forward import ExpertLora, expert_weight_names, experts_forward
from qlora_fsdp.layers.experts.grouped_products import QuantizedExpertWeight
from qlora_fsdp.layers.quantized.linear import fill_parts, own_parts
from qlora_fsdp.model.swap_layers import computes_linear
from qlora_fsdp.model.tasks.task_model import TaskModel
from qlora_fsdp.runtime.fsdp_state import free_gathered, without_hooks
from qlora_fsdp.runtime.processes import Processes
from qlora_fsdp.runtime.rows import (
    gather_columns,
    gather_whole,
    local_rows,
    local_tensor,
    replica_of,
    rows_of_rank,
    shard_group,
)

SPARE_BYTES = 2**29  # that are to be free besides copies, for gathers and results


def why_not_by_rows(model: TaskModel, device: torch.device) -> str | None:
    """Why a sharded model can't be computed so; None if it can, or if each rank has the whole model.

    Args:
        model: with its weights.
        device: where it computes.
    """
    if not isinstance(model, FSDPModule):
        return None
    example = _sharded_param(model)
    num_ranks = dist.get_world_size(shard_group(example))
    if local_tensor(example).device.type != device.type:
        return "its shards are in host memory"
    for module in model.modules():
        if isinstance(module, LoraLayer) and any(name in module.lora_variant for name in module.active_adapters):
            return "its adapters need whole weights"  # DoRA
        if expert_weight_names(module) and num_experts(module) % num_ranks:
            return f"{num_experts(module)} experts can't be shared by {num_ranks} ranks"
    return None


def texts_of_rank(model: TaskModel, processes: Processes) -> tuple[int, int]:
    """Which of the texts this rank writes, every n-th from which on: ranks that share the model write the same ones."""
    if not isinstance(model, FSDPModule):
        return processes.rank, processes.num_ranks
    return replica_of(_sharded_param(model))


def has_room(model: TaskModel, device: torch.device) -> bool:
    """Whether each rank has room for its copies of adapters and of what else is small. Collective."""
    if device.type != "cuda":
        return True
    copied = sum(2 * param.numel() for param in model.parameters() if param.requires_grad)
    torch.cuda.empty_cache()
    has_it = torch.tensor(float(torch.cuda.mem_get_info(device)[0] > 2 * copied + SPARE_BYTES), device=device)
    dist.all_reduce(has_it, op=dist.ReduceOp.MIN)
    return bool(has_it)


class ByRows:
    """A sharded model that writes text. All ranks that share its parameters make the same calls. Collective.

    Args:
        model: with FSDP units and weights; `why_not_by_rows` has nothing against it.

    Attributes:
        layers: its quantized layers.
    """

    def __init__(self, model: TaskModel) -> None:
        group = shard_group(_sharded_param(model))
        assert group is not None
        self.model = model
        self.group = group
        self.layers = DecodeLayers(model.base)
        self.forwards: dict[nn.Module, Callable[..., Tensor]] = {}
        self.experts: list[OwnExperts] = []
        self.params: list[tuple[nn.Module, str, Any]] = []  # what a module has in place of its parameter of that name
        self.copies: list[tuple[DTensor, Tensor]] = []  # parameters, and copies of the whole of them
        self._find(model)

    def _find(self, model: TaskModel) -> None:
        """Find what takes the place of what is sharded and no quantized layer."""
        done = {part for module in self.layers.forwards for part in module.modules()}
        adapters = _adapter_modules(model)
        tables = {module for module in model.embeddings.modules() if isinstance(module, nn.Embedding)}
        tables |= set(model.per_layer_tables)
        for module in model.base.modules():
            if module in done:
                continue
            sharded = {
                name: param for name, param in module.named_parameters(recurse=False) if isinstance(param, DTensor)
            }
            if isinstance(module, ExpertLora) or expert_weight_names(module):
                experts = module.get_base_layer() if isinstance(module, ExpertLora) else module
                found = module.adapters() if isinstance(module, ExpertLora) else {}
                self.experts.append(OwnExperts(experts, found, self.group))
                self.forwards[module] = self.experts[-1]
                done |= set(module.modules())
            elif module in tables and sharded and all(map(_is_everywhere, sharded.values())):
                self.forwards[module] = _OwnEmbedding(module, next(iter(sharded.values())), self.group)
                self.params += [(module, name, _frozen(local_tensor(param))) for name, param in sharded.items()]
            elif _is_linear(module) and "weight" in sharded and module not in adapters:
                self.forwards[module] = _OwnLinear(module, self.group)
                self.params += [(module, name, _GatheredWhenRead(param)) for name, param in sharded.items()]
            else:
                for name, param in sharded.items():
                    whole = local_tensor(param).new_empty(param.shape)
                    self.copies.append((param, whole))
                    self.params.append((module, name, _frozen(whole)))

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """While it lasts, the model computes so, with what is trained as it was when it began."""
        free_gathered(self.model)
        for experts in self.experts:
            experts.refresh()
        for param, whole in self.copies:  # where a CUDA graph may read it
            whole.copy_(gather_whole(param, whole.device))
        forwards = [(module, "forward", forward) for module, forward in self.forwards.items()]
        params = [(module._parameters, name, value) for module, name, value in self.params]
        with without_hooks(self.model), replaced(forwards), self.layers.in_use(), replaced(params):
            yield

    def broadcast(self, tensor: Tensor) -> None:
        """Overwrite a tensor with that of the group's first rank."""
        dist.broadcast(tensor, group=self.group, group_src=0)

    def least(self, number: int, device: torch.device) -> int:
        """The least of the group's numbers."""
        least = torch.tensor(number, device=device)
        dist.all_reduce(least, op=dist.ReduceOp.MIN, group=self.group)
        return int(least)


def _frozen(values: Tensor) -> nn.Parameter:
    return nn.Parameter(values, requires_grad=False)


class _GatheredWhenRead:
    """A layer's parameter for code that computes with it past the layer's forward, as routers of LongCat Flash do.

    A copy of each would be large, and few are read. All ranks run the same code, so all take part in gathering it.
    """

    def __init__(self, param: DTensor) -> None:
        self._param = param

    def __getattr__(self, name: str) -> Any:
        is_known = name in ("dtype", "device", "shape", "ndim")
        return getattr(self._param if is_known else self._whole(), name)

    def _whole(self) -> Tensor:
        return gather_whole(self._param, local_tensor(self._param).device)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map_only(cls, cls._whole, (args, kwargs or {}))
        return function(*args, **kwargs)


class _OwnEmbedding:
    """Embeddings of which this rank has some rows. Tokens of others get zeros here, and the ranks' results are summed.

    Args:
        module: its own forward looks up the rows, in parameters that have this rank's alone; it may scale them.
        table: a sharded parameter of the module, with a row for each token.
        group: the ranks that share the rows.
    """

    def __init__(self, module: nn.Module, table: DTensor, group: dist.ProcessGroup) -> None:
        self.module = module
        self.forward = module.forward
        self.group = group
        self.first, self.last = local_rows(table)

    def __call__(self, input: Tensor) -> Tensor:
        """ids_BL -> x_BLD."""
        is_own = (input >= self.first) & (input < self.last)
        with replaced([(self.module, "padding_idx", None)]):  # which is a row of the whole table
            x_BLD: Tensor = self.forward((input - self.first).where(is_own, 0))
        x_BLD = x_BLD.where(is_own.unsqueeze(-1), 0)
        dist.all_reduce(x_BLD, group=self.group)
        return x_BLD


class _OwnLinear:
    """A linear layer that is not quantized, of whose weight this rank has some rows.

    A layer that is trained in full has float32 weights, and computes in the dtype of its input all the same.
    """

    def __init__(self, layer: nn.Linear, group: dist.ProcessGroup) -> None:
        self.weight = local_tensor(layer.weight)
        self.width = layer.out_features
        self.group = group
        self.bias = None if layer.bias is None else local_tensor(layer.bias)

    def __call__(self, x: Tensor) -> Tensor:
        """[..., I] -> [..., O]."""
        bias = None if self.bias is None else self.bias.to(x.dtype)
        own = F.linear(x.flatten(0, -2), self.weight.to(x.dtype), bias)
        (y_NO,) = gather_columns([own], [self.width], self.group)
        return y_NO.view(*x.shape[:-1], self.width)


def _sharded_param(model: TaskModel) -> nn.Parameter:
    """A parameter of a model with FSDP units, of which nothing is gathered afterwards."""
    free_gathered(model)
    return next(param for param in model.parameters() if isinstance(param, DTensor))


def _is_linear(module: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether a module computes x W^T + b. FSDP gives the head, a unit, a class of its own."""
    return isinstance(module, nn.Linear) and computes_linear(module)


def _adapter_modules(model: nn.Module) -> set[nn.Module]:
    """The modules of all adapters, whose layers are read and not called."""
    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    children = [child for layer in layers for name, child in layer.named_children() if name != "base_layer"]
    return {module for child in children for module in child.modules()}


def _is_everywhere(param: nn.Parameter) -> bool:
    """Whether each rank has some of a parameter's rows."""
    num_ranks = dist.get_world_size(shard_group(param))
    return rows_of_rank(param.shape[0], num_ranks - 1, num_ranks)[0] < param.shape[0]


class OwnExperts:
    """The forward of a module of fused experts, or of its adapters, whose weights are sharded. Collective.

    Args:
        experts: transformers' module. Its number of experts is a multiple of the number of ranks.
        adapters: by the name of the weight that each adapts.
        group: the ranks that share the weights.
    """

    def __init__(self, experts: nn.Module, adapters: dict[str, ExpertAdapter], group: dist.ProcessGroup) -> None:
        self.group = group
        self.adapters = adapters
        self.num_all = num_experts(experts)
        self.num = self.num_all // dist.get_world_size(group)
        self.first = dist.get_rank(group) * self.num
        # A module of its own class, whose methods are asked for its activation, with other weights.
        self.own: Any = copy.copy(experts)
        self.own._parameters = dict(experts._parameters)
        self.own._modules = dict(experts._modules)
        for name, param in experts.named_parameters(recurse=False):
            self.own._parameters[name] = nn.Parameter(local_tensor(param), requires_grad=False)
        for name, weight in experts.named_children():
            if isinstance(weight, QuantizedExpertWeight):
                self.own._modules[name] = self._own_weight(weight)
        self.own_adapters = {name: self._own_adapter(adapter) for name, adapter in adapters.items()}
        self.decode: DecodeExperts | None = None
        if why_not_coded(self.own) is None:
            self.decode = DecodeExperts(self.own, self.own_adapters)

    def _own_weight(self, weight: QuantizedExpertWeight) -> QuantizedExpertWeight:
        format, parts = own_parts(weight)
        shape = (self.num, *weight.shape[1:])
        own = QuantizedExpertWeight(shape, format, weight.compute_dtype, is_turned=weight.is_turned)
        fill_parts(own, parts)
        return own

    def _own_adapter(self, adapter: ExpertAdapter) -> ExpertAdapter:
        """An adapter of the own experts. Its B is made by `refresh`."""
        a = local_tensor(adapter.lora_a.weight)
        num_outputs, width = adapter.lora_b.weight.shape
        lora_a = nn.Linear(a.shape[1], len(a), device="meta")
        lora_b = nn.Linear(width, num_outputs, device="meta")
        lora_a.weight = nn.Parameter(a, requires_grad=False)
        shape = num_outputs, width // self.num_all * self.num
        lora_b.weight = nn.Parameter(a.new_empty(shape), requires_grad=False)
        return adapter._replace(lora_a=lora_a, lora_b=lora_b)

    def refresh(self) -> None:
        """Take the adapters as they are now. Collective."""
        for name, adapter in self.adapters.items():
            own = self.own_adapters[name].lora_b.weight
            whole = gather_whole(adapter.lora_b.weight, own.device)  # of each rank of the adapter, expert by expert
            some = whole.unflatten(1, (-1, self.num_all))[:, :, self.first : self.first + self.num]
            own.data.copy_(some.flatten(1))
        if self.decode is not None:
            self.decode.refresh()

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """x_TH, each token's experts [T, K] and their weights [T, K] -> y_TH, of all ranks' experts."""
        index = top_k_index - self.first
        is_own = (index >= 0) & (index < self.num)
        # What other ranks have goes to any expert of this one, and adds nothing.
        index = index.where(is_own, top_k_index % self.num)
        weights = top_k_weights.where(is_own, 0)
        if self.decode is not None:
            y_TH = self.decode(hidden_states, index, weights)
        else:
            y_TH = experts_forward(self.own, hidden_states, index, weights, self.own_adapters)
        dist.all_reduce(y_TH, group=self.group)
        return y_TH


def num_experts(experts: nn.Module) -> int:
    """How many experts a module of fused experts has."""
    weight: Tensor | QuantizedExpertWeight = getattr(experts, expert_weight_names(experts)[0])
    return weight.shape[0]
