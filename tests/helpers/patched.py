"""transformers' classes with Liger's kernels for GPUs in them, as a run on a GPU leaves them in its process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from transformers import PretrainedConfig

from qlora_fsdp.config.schema import KernelsConfig
from qlora_fsdp.layers import liger


@contextmanager
def liger_kernels(model: PretrainedConfig) -> Iterator[list[str]]:
    """Patch a model's classes, as for a GPU; gives the settings whose kernels are Liger's. Afterwards all is stock."""
    pytest.importorskip("liger_kernel")
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(liger, "_stock", {})
        chosen = liger.use_fused_kernels(KernelsConfig(), model, torch.device("cuda"))
        try:
            yield chosen
        finally:
            for (owner, name), value in liger._stock.items():
                setattr(owner, name, value)
