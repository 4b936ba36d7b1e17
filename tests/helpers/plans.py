"""Models to plan for, traced once for all tests of a process."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from qlora_fsdp.config.schema import Config
from qlora_fsdp.data.tokenizer import NO_TOKENS
from qlora_fsdp.layers.attention.choose import traced_attention
from qlora_fsdp.model.find import ModelFiles, make_config
from qlora_fsdp.tracing.model_tracer import Computing, ModelTracer

FUSED_KERNELS = frozenset({"rms_norm", "rotary", "glu", "cross_entropy"})


def traced(
    config: Config,
    fused: frozenset[str] = FUSED_KERNELS,
    dtype: torch.dtype = torch.bfloat16,
    is_trained: bool = True,
) -> ModelTracer:
    """The tracer of the settings' model on GPUs, with Liger's kernels for all that `fused` names."""
    loss = config.kernels.cross_entropy.value if "cross_entropy" in fused else "torch"
    return _traced(repr(dict(config.model.config)), fused, "triton" if loss == "auto" else loss, dtype, is_trained)


@cache
def _traced(values: str, fused: frozenset[str], loss: Any, dtype: torch.dtype, is_trained: bool) -> ModelTracer:
    model_config = make_config(eval(values), "the model")
    attention = traced_attention("auto", model_config, dtype, is_causal=True)
    computing = Computing(dtype, attention, fused - {"cross_entropy"}, loss, is_cuda=True, is_trained=is_trained)
    return ModelTracer(ModelFiles(None, model_config), computing, NO_TOKENS)
