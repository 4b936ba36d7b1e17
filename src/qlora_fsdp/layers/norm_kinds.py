"""Prove what an RMSNorm computes, by running its class's forward once at a small size, to the bit in bfloat16."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from qlora_fsdp.layers.gated import SCALES, SIZE, facts
from qlora_fsdp.layers.liger import stock_classes
from qlora_fsdp.layers.norm import NormKind, is_rms_norm
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
    if (key := facts(norm)) not in _proven:
        kinds = {_prove(kind, norm, eps) for kind in stock_classes(type(norm)) or [type(norm)]}
        _proven[key] = kinds.pop() if len(kinds) == 1 else None
    return _proven[key]


def _prove(kind: Any, norm: nn.Module, eps: float) -> NormKind | None:
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
