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

from qlora_fsdp.layers.gated import SCALES, SIZE, facts, is_equal
from qlora_fsdp.layers.liger import stock_classes
from qlora_fsdp.layers.norm import LastNorm, NormKind, is_rms_norm, norm_and_residual
from qlora_fsdp.runtime.hardware import is_shortage

_FORMS = ((0.0, True), (0.0, False), (1.0, False))  # offset, and whether it rounds before it multiplies
_proven: dict[Any, NormKind | None] = {}


def find_kind(norm: nn.Module) -> NormKind | None:
    """What a norm computes; None if it is no RMSNorm, or one that the kernel does not compute.

    Of Liger's norms, which compute on GPUs alone, the classes are asked in whose places they stand.
    """
    if not is_rms_norm(norm) or list(norm._parameters) != ["weight"] or norm._modules:
        return None
    eps = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
    if not isinstance(eps, float):
        return None
    key = facts(norm)
    if key not in _proven:
        classes = stock_classes(type(norm)) or [type(norm)]
        kinds = {_prove_kind(kind, norm, eps) for kind in classes}
        _proven[key] = kinds.pop() if len(kinds) == 1 else None
    return _proven[key]


def _prove_kind(kind: Any, norm: nn.Module, eps: float) -> NormKind | None:
    """The form that the forward of a class of norms has, with the attributes of a norm."""
    with torch.random.fork_rng(devices=[]), torch.device("cpu"), torch.no_grad():
        torch.manual_seed(0)
        x = (torch.randn(len(SCALES), 3, SIZE) * torch.tensor(SCALES).view(-1, 1, 1)).bfloat16()
        weight = torch.randn(SIZE).bfloat16()
        probe = kind.__new__(kind)
        named = {"eps": eps, "variance_epsilon": eps}  # Liger's have another name for it than some that they stand for
        probe.__dict__.update(vars(norm), **named, _parameters={"weight": nn.Parameter(weight)})
        try:
            found = kind.forward(probe, x)
        except Exception as error:  # it has other attributes
            if is_shortage(error):
                raise
            return None
        wide = x.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        for offset, rounds_first in _FORMS:
            rounded = normed.bfloat16() * weight if rounds_first else (normed * (weight.float() + offset)).bfloat16()
            if isinstance(found, Tensor) and torch.equal(found, rounded):
                return NormKind(eps, offset, rounds_first)
    return None


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
    roles = find_roles(layer)
    if roles is not None:
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
    norms: list[str] = []
    others: list[str] = []
    for name, child in layer.named_children():
        if is_rms_norm(child):
            if find_kind(child) is None:
                return None
            norms.append(name)
        elif next(child.parameters(), None) is not None:
            others.append(name)
    if len(norms) != 2 or len(others) != 2:
        return None
    for (norm, second_norm), (attention, mlp) in product(permutations(norms), permutations(others)):
        roles = Roles(norm, attention, second_norm, mlp)
        if _has_roles(layer, roles):
            return roles
    return None


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
        norm = _StandIn()
        attention = _Attention()
        second_norm = _StandIn()
        mlp = _StandIn()
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
