"""A merge's report: divergences of impossible tokens, what to do where little is kept, and forms without memory."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from qlora_fsdp.data.report_rows import ReportRows
from qlora_fsdp.inference import merge_report
from qlora_fsdp.inference.merge_report import ENOUGH, ModelFigures, _divergences, advise

POOR = ModelFigures(loss=1.0, kept=ENOUGH - 0.1, kl_mean=0.1, kl_max=1.0)


def test_tokens_that_are_impossible_in_both_models_add_nothing():
    old = torch.tensor([[0.0, 0.0, -math.inf, -math.inf]]).log_softmax(-1)
    new = torch.tensor([[0.0, 0.0, -math.inf, 0.0]]).log_softmax(-1)
    assert _divergences([old], [old]).tolist() == [0.0]
    assert _divergences([old], [new]).item() == pytest.approx(math.log(3 / 2))
    assert _divergences([new], [old]).item() == math.inf


@pytest.mark.parametrize("base", ["full", "dequantized"])
@pytest.mark.parametrize(
    ("type_name", "finer"), [("Q4_0", "gguf=q8_0 or gguf=f16"), ("Q8_0", "gguf=f16"), ("F16", "gguf=f32"), ("F32", "")]
)
def test_what_to_do_about_a_gguf_file(base: str, type_name: str, finer: str):
    said = advise(f"model-{type_name}.gguf", POOR, base, None, "nf4")
    assert said is not None and finer in said
    assert "quantize=" not in said
    assert ("base=dequantized" in said) == (base == "full")


@pytest.mark.parametrize("trained_format", [None, "nf4", "int8"])
@pytest.mark.parametrize("format", [None, "nf4", "fp4"])
@pytest.mark.parametrize("base", ["full", "dequantized"])
def test_nothing_is_advised_that_is_set(base: str, format: str | None, trained_format: str | None):
    said = advise("merged", POOR, base, format, trained_format)
    assert said is not None
    fix = said.partition("over its base. ")[2].lower()
    assert fix
    if base == "dequantized":
        assert "set base=dequantized" not in fix
    if format is None:
        assert "leave quantize out" not in fix
    assert advise("merged", ModelFigures(1.0, ENOUGH, 0.0, 0.0), base, format, trained_format) is None


def test_what_corrects_rounding_is_not_sent_to_the_full_base():
    said = advise("merged", POOR, "dequantized", "int4", "int4", corrects_rounding=True)
    assert said is not None and "base=full" not in said and "Leave quantize out" in said


class Tiny(nn.Module):
    """Predicts the next token by the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(8, 8)

    def forward(self, input_ids: torch.Tensor, use_cache: bool) -> SimpleNamespace:
        return SimpleNamespace(logits=self.table(input_ids))

    @contextmanager
    def disable_adapter(self) -> Iterator[None]:
        yield


def test_a_form_that_the_hosts_memory_has_no_room_for_is_not_loaded(monkeypatch: pytest.MonkeyPatch):
    tiny = Tiny()
    trained: Any = SimpleNamespace(model=SimpleNamespace(model=tiny), dtype=torch.float32)
    row = (np.arange(5), np.ones(5, dtype=bool))
    rows = ReportRows([row], are_held_out=False)
    loaded = []

    def load(dtype: torch.dtype, device: torch.device) -> nn.Module:
        loaded.append(dtype)
        return tiny

    monkeypatch.setattr(merge_report, "available_bytes", lambda: 1000)
    forms = {"merged": load, "small.gguf": load, "large.gguf": load}
    needed = {"small.gguf": 1000 - 4 * 8 * 4, "large.gguf": 1000 - 4 * 8 * 4 + 1}
    report = merge_report.make_report(lambda: trained, rows, "rows", forms, torch.device("cpu"), needed)
    assert set(report.written) == {"merged", "small.gguf"} and len(loaded) == 2
    assert set(report.failed) == {"large.gguf"} and "of host memory would be needed" in report.failed["large.gguf"]
