"""What happens between an expert's two products: an activation, in most models a gated one.

transformers' experts have a method for it. A Triton kernel computes the gates that most models use. A module gets the
kernel only if its own method gives the same numbers in a trial, so this module needs no list of models.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional as F

NUM_PROBES = 64  # values of gate and up that a kernel's function is tried with, some of them beyond usual limits
LARGEST_PROBE = 20.0


class Gate(NamedTuple):
    """act(min(gate, limit)) (clamp(up, -limit, limit) + offset).

    Attributes:
        kind: act; "silu" is x sigmoid(alpha x).
        is_interleaved: whether gate and up take turns in a row of `up`'s outputs, and do not lie side by side.
        alpha: of "silu".
        limit: the largest value of both; infinite for none.
        offset: what is added to up.
    """

    kind: Literal["silu", "gelu_tanh"]
    is_interleaved: bool = False
    alpha: float = 1.0
    limit: float = math.inf
    offset: float = 0.0

    def __call__(self, y_SU: Tensor) -> Tensor:
        """[S, 2 I] -> [S, I], in plain torch."""
        gate, up = (y_SU[:, ::2], y_SU[:, 1::2]) if self.is_interleaved else y_SU.chunk(2, 1)
        gate = gate.clamp(max=self.limit)
        up = up.clamp(-self.limit, self.limit)
        act = gate * torch.sigmoid(self.alpha * gate) if self.kind == "silu" else F.gelu(gate, approximate="tanh")
        return act * (up + self.offset)


class Activation(NamedTuple):
    """The activation of a module of fused experts.

    Attributes:
        function: y_SU -> [S, I]; the gate is part of it.
        has_gate: whether U is 2 I.
        gate: the same as `function`, as a kernel computes it; None if no kernel does.
    """

    function: Callable[[Tensor], Tensor]
    has_gate: bool
    gate: Gate | None

    @classmethod
    def of(cls, module: Any) -> Activation:
        """The activation of a module of transformers' experts."""
        if not module.has_gate:
            return cls(module.act_fn, False, None)
        if module not in _GATES:
            _GATES[module] = find_gate(module)
        return cls(module._apply_gate, True, _GATES[module])

    def width(self, num_outputs: int) -> int:
        """I, from U."""
        return num_outputs // 2 if self.has_gate else num_outputs


_GATES: WeakKeyDictionary[nn.Module, Gate | None] = WeakKeyDictionary()


def find_gate(module: Any) -> Gate | None:
    """The gate that computes what a module's own method does, tried with some numbers; None if there is none.

    Limits and factors are looked for under the names that transformers' models give them: `limit`, `swiglu_limit` and
    `alpha`.
    """
    limits = {float(value) for name in ("limit", "swiglu_limit") if (value := getattr(module, name, None))}
    alphas = {float(value) for value in (getattr(module, "alpha", None), 1.0) if value}
    axis = torch.linspace(-LARGEST_PROBE, LARGEST_PROBE, NUM_PROBES)
    probe = torch.cat([axis, axis.flip(0) * 0.7 + 1.0]).unsqueeze(0)  # no two pairs of gate and up alike
    try:
        expected = module._apply_gate(probe)
    except (RuntimeError, TypeError, AttributeError):  # it computes with something that is not on the CPU
        return None
    kinds: tuple[Literal["silu", "gelu_tanh"], ...] = ("silu", "gelu_tanh")
    for kind, is_interleaved, alpha, limit, offset in itertools.product(
        kinds, (False, True), sorted(alphas), sorted({math.inf, *limits}), (0.0, 1.0)
    ):
        gate = Gate(kind, is_interleaved, alpha, limit, offset)
        found = gate(probe)
        if expected.shape == found.shape and torch.allclose(found, expected, rtol=1e-5, atol=1e-5):
            return gate
    return None
