"""Pre-norm transformer layers whose norms and residuals are computed together.

Which layers are such is proven: their own forward is run with small stand-ins in the place of norms, attention and MLP,
as for gated MLPs (gated.py).
"""

from __future__ import annotations

import copy
from functools import cache
from itertools import permutations, product
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from qlora_fsdp.layers.gated import SCALES, SIZE, is_equal
from qlora_fsdp.layers.norm import LastNorm, NormKind, is_rms_norm, norm_and_residual
from qlora_fsdp.layers.norm_kinds import find_kind
from qlora_fsdp.runtime.hardware import is_shortage


class Roles(NamedTuple):
    """The names of the children of a layer that computes x + attention(norm(x)), then x + mlp(second_norm(x))."""

    norm: str
    attention: str
    second_norm: str
    mlp: str


class PreNorm(nn.Module):
    """The forward of a pre-norm transformer layer in which each norm is one function with the residual beside it.

    A residual stream x goes two ways, through a norm and past it, so it gets two gradients. Autograd would add them in
    a pass of its own over memory, twice per layer, and would also compute a gradient for the norm's weight, which is
    frozen here. The backward of `NormAndResidual` does the addition while it writes the gradient of the norm.

    It is mixed into transformers' own class of the layer.
    """

    roles: Roles
    kinds: tuple[NormKind, NormKind]
    last_norm: LastNorm | None = None

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """x_BLD -> y_BLD; the other arguments are the attention's, by their names."""
        if args:
            return super().forward(hidden_states, *args, **kwargs)  # type: ignore[no-any-return]
        norm, attention, second_norm, mlp = cast(list[nn.Module], [self._modules[name] for name in self.roles])
        x, residual = norm_and_residual(self.kinds[0], norm, hidden_states, self.last_norm)
        x, _ = attention(hidden_states=x, **kwargs)
        x, residual = norm_and_residual(self.kinds[1], second_norm, residual + x, self.last_norm)
        return residual + mlp(x)  # type: ignore[no-any-return]


def join_norms(layer: nn.Module) -> None:
    """Give a transformer layer the forward of `PreNorm`, if its own computes just that.

    This takes a class, not a `forward` of the instance: to recompute a layer, transformers calls its class's forward.
    """
    if (roles := find_roles(layer)) is not None:
        kinds = tuple(find_kind(cast(nn.Module, layer._modules[name])) for name in (roles.norm, roles.second_norm))
        layer.__class__ = _with_joined_norms(cast(Any, type(layer)), roles, kinds)


@cache
def _with_joined_norms(layer: Any, roles: Roles, kinds: tuple[NormKind, NormKind]) -> type[nn.Module]:
    own = {"__module__": layer.__module__, "roles": roles, "kinds": kinds}
    return type(layer.__name__, (PreNorm, layer), own)


def find_roles(layer: nn.Module) -> Roles | None:
    """Recognise a pre-norm layer; None if it computes anything else, or has norms that the kernel does not compute.

    Args:
        layer: as transformers made it, on any device; what is in it may be quantized and adapted.
    """
    if layer._parameters or layer._buffers:
        return None
    children = {name: child for name, child in layer._modules.items() if child is not None}
    norms = [name for name, child in children.items() if is_rms_norm(child)]
    others = [name for name, child in children.items() if name not in norms and any(True for _ in child.parameters())]
    if len(norms) != 2 or len(others) != 2 or None in [find_kind(children[name]) for name in norms]:
        return None
    every = (Roles(n, a, s, m) for (n, s), (a, m) in product(permutations(norms), permutations(others)))
    return next((roles for roles in every if _has_roles(layer, roles)), None)


class _StandIn(nn.Module):
    """Stands for a norm or an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.randn(SIZE, SIZE)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


class _Attention(nn.Module):
    """Stands for an attention, which is called by names and returns its weights too. It remembers what it was given."""

    kwargs: dict[str, Any]

    def __init__(self) -> None:
        super().__init__()
        self.product = _StandIn()

    def forward(self, *, hidden_states: Tensor, **kwargs: Any) -> tuple[Tensor, None]:
        self.kwargs = kwargs
        return self.product(hidden_states), None


class _Probe(NamedTuple):
    x: Tensor
    expected: Tensor
    attention: _Attention
    stand_ins: tuple[nn.Module, ...]


@cache
def _make_probe() -> _Probe:
    """An input, what a pre-norm layer makes of it, and what stands for its parts, in the order of `Roles`."""
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.manual_seed(0)
        x = torch.randn(len(SCALES), 3, SIZE) * torch.tensor(SCALES).view(-1, 1, 1)
        norm, attention, second_norm, mlp = _StandIn(), _Attention(), _StandIn(), _StandIn()
    between = x + attention(hidden_states=norm(x))[0]
    return _Probe(x, between + mlp(second_norm(between)), attention, (norm, attention, second_norm, mlp))


def _has_roles(layer: nn.Module, roles: Roles) -> bool:
    """Whether the layer's own forward gives what `PreNorm` gives, and hands all arguments on to the attention."""
    x, expected, attention, stand_ins = _make_probe()
    small = dict(zip(roles, stand_ins, strict=True))
    probe = copy.copy(layer)
    probe._modules = {name: small.get(name) or copy.deepcopy(child) for name, child in layer._modules.items()}
    probe.train()  # where anything is dropped, it shows
    kwargs: dict[str, Any] = {"attention_mask": x, "position_ids": x, "past_key_values": None, "use_cache": False}
    kwargs |= {"position_embeddings": (x, x), "of_an_attention": x}
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            found = type(layer).forward(probe, x, **kwargs)
    except Exception as error:  # it wants other arguments, or more of its children than they are here
        if is_shortage(error):
            raise
        return False
    arrived = attention.kwargs
    arrives = arrived.keys() == kwargs.keys() and all(arrived[name] is value for name, value in kwargs.items())
    return arrives and isinstance(found, Tensor) and is_equal(found, expected)
