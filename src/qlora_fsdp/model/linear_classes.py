"""Which classes of linear layers compute just what nn.Linear computes, so that they may be quantized and adapted.

Some models have a class of their own for their linear layers (Falcon's multiplies by the transposed weight, to round as
its authors did). Others derive from nn.Linear and compute something else, such as a router that gives the chosen
experts. No list says which is which. A small layer is given that class, and its output is compared with nn.Linear's.
"""

from __future__ import annotations

from functools import cache
from typing import Any, cast

import torch
from torch import nn
from torch.nn import functional as F

from qlora_fsdp.layers import QuantizedLinear
from qlora_fsdp.runtime.hardware import is_shortage

IN_FEATURES, OUT_FEATURES, NUM_TOKENS = 32, 48, 7
TOLERANCE = 1e-6  # of the largest output; sums of 32 products in another order differ by less


def computes_linear(layer: nn.Linear) -> bool:
    """Whether a layer computes x W^T + b, and no more, by the forward of its class."""
    if type(layer) is nn.Linear or isinstance(layer, QuantizedLinear):
        return True
    is_plain = set(layer._parameters) == {"weight", "bias"} and not (layer._buffers or layer._modules)
    return is_plain and _is_linear_class(cast(Any, type(layer)), layer.bias is not None)


@cache
def _is_linear_class(kind: Any, has_bias: bool) -> bool:
    with torch.random.fork_rng(devices=[]), torch.device("cpu"), torch.no_grad():
        torch.manual_seed(0)
        layer, x = nn.Linear(IN_FEATURES, OUT_FEATURES, has_bias), torch.randn(NUM_TOKENS, 1, IN_FEATURES)
        expected = F.linear(x, layer.weight, layer.bias)
        layer.__class__ = kind
        try:
            found = layer(x)
        except Exception as error:  # it needs what its own constructor would have made
            if is_shortage(error):
                raise
            return False
        if not isinstance(found, torch.Tensor) or found.shape != expected.shape:
            return False
        return bool((found - expected).abs().max() <= TOLERANCE * expected.abs().max())
