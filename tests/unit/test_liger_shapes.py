"""What a plan takes for Liger's kernels: the layers that Liger computes, and no others."""

from __future__ import annotations

import torch
from torch import nn
from transformers.models.gemma4.modeling_gemma4 import Gemma4RMSNorm

from qlora_fsdp.tracing.liger_shapes import put_in_shapes


def test_norms_without_a_weight_are_planned_as_transformers_computes_them() -> None:
    """Liger's norm of Gemma 4 computes these by torch, in float32, which backward keeps: 7 GiB of Gemma 4 26B-A4B."""
    model = nn.ModuleList([Gemma4RMSNorm(64, with_scale=False), Gemma4RMSNorm(64)])
    put_in_shapes(model, ["rms_norm"])
    kept: list[list[torch.dtype]] = []
    for norm in model:
        dtypes: list[torch.dtype] = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda x, found=dtypes: found.append(x.dtype) if x.numel() == 8 * 64 else None, lambda x: x
        ):
            norm(torch.randn(8, 64, dtype=torch.bfloat16, requires_grad=True))
        kept.append(dtypes)
    without_weight, with_weight = kept
    assert without_weight and set(without_weight) == {torch.float32}
    assert with_weight == [torch.bfloat16]
