"""What a merge's report says of its figures: divergences of impossible tokens, and what to do where little is kept."""

from __future__ import annotations

import math

import pytest
import torch

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
