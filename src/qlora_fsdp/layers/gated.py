"""Prove that a module is a gated MLP, down(act(gate(x)) * up(x)), by running it once at a small size.

Names tell little: two families call the same MLP by different names, and MLPs of the same names clamp, scale or drop
something. So the module's own forward is run with small linear layers of random weights in the place of its own, in
float32 on the CPU, and compared with the formula for each role that its layers may have. It takes about a millisecond,
once for each class and its attributes, and needs no weights: a model on meta gets the same verdict. What does not prove
itself is computed as it is.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import permutations
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qlora_fsdp.layers.kernels import Activation
from qlora_fsdp.layers.liger import plain_activations
from qlora_fsdp.runtime.hardware import is_shortage

SIZE = 16  # of hidden states, and the inner size: equal, so that any layer may have any role
SCALES = (0.1, 1.0, 10.0, 1e4)  # of the inputs: a limit on values shows only beyond it
TOLERANCE = 1e-6  # of a token's largest output
_ACTIVATIONS: dict[Activation, Any] = {"silu": F.silu, "gelu_tanh": partial(F.gelu, approximate="tanh")}
_SIMPLE = (int, float, str, bool, type(None))


class Gated(NamedTuple):
    """A module that is a gated MLP.

    Attributes:
        names: names of its linear layers: gate, up and down; or down and one that gives gate and up side by side, which
            comes first.
        activation: the function that is applied to gate.
    """

    names: tuple[str, ...]
    activation: Activation


_PROVEN: dict[Any, Gated | None] = {}


def find_gated(module: nn.Module) -> Gated | None:
    """Recognise a gated MLP; None if the module is none, or if its activation is not known here.

    Args:
        module: as transformers or Liger made it, on any device; its linear layers may be quantized and adapted.
    """
    linears = {name: base for name, child in module._modules.items() if (base := _linear(child)) is not None}
    others = {name: child for name, child in module._modules.items() if child is not None and name not in linears}
    has_more = any(p is not None for p in module._parameters.values()) or any(
        True for child in others.values() for _ in child.parameters()
    )
    if len(linears) not in (2, 3) or has_more:
        return None
    key = (
        *facts(module),
        *((name, base.bias is not None) for name, base in linears.items()),
        *((name, *facts(part)) for child in others.values() for name, part in child.named_modules()),
    )
    if key not in _PROVEN:
        _PROVEN[key] = _prove(module, linears)
    return _PROVEN[key]


def _linear(child: nn.Module | None) -> nn.Linear | None:
    """A linear layer, out of PEFT's if it is adapted."""
    base = child._modules.get("base_layer", child) if child is not None else None
    return base if isinstance(base, nn.Linear) else None


def facts(module: nn.Module) -> tuple[Any, ...]:
    """Everything but weights and children that a module's result may depend on: its class and its attributes."""
    attributes = {key: value for key, value in vars(module).items() if key != "forward"}
    return type(module), *((k, v) for k, v in attributes.items() if isinstance(v, _SIMPLE) or callable(v))


def _prove(module: nn.Module, linears: Mapping[str, nn.Linear]) -> Gated | None:
    """The roles of the linear layers under which the formula gives what the module's own forward gives."""
    with torch.random.fork_rng(devices=[]), torch.device("cpu"), torch.no_grad():
        torch.manual_seed(0)
        x = torch.randn(len(SCALES), 3, SIZE) * torch.tensor(SCALES).view(-1, 1, 1)
        for names in permutations(linears):
            if len(names) == 2 and linears[names[0]].out_features != 2 * linears[names[1]].in_features:
                continue
            widths = [SIZE] * 3 if len(names) == 3 else [2 * SIZE, SIZE]
            small = {
                name: nn.Linear(SIZE, width, linears[name].bias is not None)
                for name, width in zip(names, widths, strict=True)
            }
            others = {name: child for name, child in module._modules.items() if name not in linears}
            probe = copy.copy(module)
            probe._modules = {**copy.deepcopy(others), **small}
            found = _run(probe, x)
            for activation, function in _ACTIVATIONS.items():
                if found is not None and is_equal(found, _compute([*small.values()], function, x)):
                    return Gated(names, activation)
    return None


def _run(module: nn.Module, x: Tensor) -> Tensor | None:
    """Run the forward of a module's class, without hooks or replacements; None if it can't be called so.

    Liger's classes call kernels for GPUs, which are computed by plain torch here.
    """
    try:
        with plain_activations():
            found = type(module).forward(module, x)
    except Exception as error:  # it wants other arguments, or layers of its own sizes
        if is_shortage(error):
            raise
        return None
    return found if isinstance(found, Tensor) else None


def _compute(layers: Sequence[nn.Linear], activation: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    *wide, down = layers
    gate, up = (layer(x) for layer in wide) if len(wide) == 2 else wide[0](x).chunk(2, -1)
    return cast(Tensor, down(activation(gate) * up))


def is_equal(found: Tensor, expected: Tensor) -> bool:
    """Whether two results of a probe are the same but for roundings; they are [..., SIZE]."""
    if found.shape != expected.shape or not found.isfinite().all():
        return False
    return bool(((found - expected).abs().amax(-1) <= TOLERANCE * expected.abs().amax(-1)).all())
