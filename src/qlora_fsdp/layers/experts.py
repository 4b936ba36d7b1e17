"""Experts of a mixture-of-experts layer, computed as grouped products over tokens that are sorted by expert.

transformers hands a layer's experts to a function that is chosen by name (`transformers.integrations.moe`); this module
registers ours. Its weights may be quantized (`QuantizedExpertWeight`) or plain parameters.
"""

from __future__ import annotations

from torch import nn

from qlora_fsdp.layers.quantized_experts import QuantizedExpertWeight


def expert_weight_names(module: nn.Module) -> list[str]:
    """Names of the weights of three dimensions that a module of fused experts computes with; none for other modules.

    The attributes are those that transformers' `use_experts_implementation` gives every class of fused experts.
    """
    if not hasattr(module, "has_gate") or getattr(module, "has_post_expert_norm", True):
        return []
    names = ["gate_up_proj" if module.has_gate else "up_proj", "down_proj"]
    found = [getattr(module, name, None) for name in names]
    fits = all(isinstance(w, QuantizedExpertWeight) or (isinstance(w, nn.Parameter) and w.ndim == 3) for w in found)
    return names if fits else []
