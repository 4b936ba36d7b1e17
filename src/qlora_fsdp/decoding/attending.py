"""Switch a model to attention over slots while it generates text, and back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from transformers import PretrainedConfig

from qlora_fsdp.layers.attention.slots import SLOTS, register


@contextmanager
def attending(base: nn.Module) -> Iterator[None]:
    """While it lasts, the model's attention is that of slots."""
    register()
    configs = {id(c): c for m in base.modules() if isinstance(c := getattr(m, "config", None), PretrainedConfig)}
    before = {key: config._attn_implementation for key, config in configs.items()}
    for config in configs.values():
        config._attn_implementation = SLOTS
    try:
        yield
    finally:
        for key, config in configs.items():
            config._attn_implementation = before[key]
