"""When each GPU has the whole model, and when it has a part."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.helpers.quick_config import load_config
from torch import nn

from qlora_fsdp.inference import trained

GIB = 2**30


@pytest.mark.parametrize(
    ("device", "free_gib", "settings", "is_whole"),
    [
        ("cuda", [100, 100], [], True),
        ("cuda", [100, 15], [], False),  # the smallest GPU decides
        ("cuda", [100, 100], ["fsdp=offload"], False),
        ("cpu", [100, 100], [], False),
    ],
)
def test_whole_copies(
    device: str, free_gib: list[int], settings: list[str], is_whole: bool, monkeypatch: pytest.MonkeyPatch
):
    """A model of 10 GiB."""
    model = nn.Linear(5 * GIB, 1, bias=False, device="meta", dtype=torch.bfloat16)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free_gib[0] * GIB, 140 * GIB))

    def maximum(values: list[float]) -> list[float]:
        return [max(values[0], -free_gib[1] * GIB)]

    processes: Any = SimpleNamespace(device=torch.device(device), max=maximum)
    assembled: Any = SimpleNamespace(model=model)
    assert trained.fits_whole(assembled, load_config(settings).fsdp.cpu_offload, processes) is is_whole
