"""When the linear layers of a gated MLP, down(act(gate(x)) * up(x)), are computed as one function.

`layers/rewire.py` decides by this rule for the layers of a model, and the memory plan for their names and ranks
(memory/activation_bytes.py), because a fused MLP keeps less for backward.
"""

from __future__ import annotations

from collections.abc import Sequence

MAX_RANK = 64  # with larger adapters, a tile of the kernels (layers/kernels/triton_gate.py) takes too many registers

# The linear layers of such an MLP: gate and up are two layers, or one with both outputs side by side (Phi 3).
GATED = (("gate_proj", "up_proj", "down_proj"), ("gate_up_proj", "down_proj"))


def can_fuse_mlp(ranks: Sequence[int], gates_have_bias: bool) -> bool:
    """Whether quantized layers with these adapter ranks can be computed together; rank 0 is a layer without one."""
    return all(0 < rank <= MAX_RANK for rank in ranks) and not gates_have_bias
