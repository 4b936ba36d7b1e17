"""Whether a classifier's attention needs a mask of the padding: found on a small model, and checked with stock ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.helpers.checkpoints import SHAPE
from tests.helpers.packed import SMALL, real_config
from tests.helpers.quick_config import load_config
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoModelForTokenClassification, LlamaConfig
from transformers.models.llama import modeling_llama

from qlora_fsdp.layers.attention.choose import traced_attention
from qlora_fsdp.model.trials.packing import TrialSpec, sees_no_padding, try_small, why_mask_is_needed
from qlora_fsdp.model.trials.row_trial import RowTrial

LONG = 2**20
CLASSES: dict[str, Any] = {"rows": AutoModelForSequenceClassification, "words": AutoModelForTokenClassification}


def padding_changes_stock(family: str, auto_class: Any, **values: Any) -> bool:
    """Whether stock transformers with eager attention computes other logits if it is not told of the padding."""
    torch.manual_seed(0)
    own = {"initializer_range": 0.3, "num_labels": 3, "pad_token_id": 1, **values}
    config = AutoConfig.for_model(family, **{**SHAPE, **SMALL.get(family, {}), **own})
    model = auto_class.from_config(config, attn_implementation="eager").eval()
    ids = torch.randint(5, 250, (3, 30))
    for row, length in zip(ids, (30, 11, 4), strict=True):
        row[length:] = 1
    mask = (ids != 1).long()
    with torch.no_grad():
        told, untold = (model(input_ids=ids, attention_mask=given).logits for given in (mask, torch.ones_like(mask)))
    seen = mask.bool() if told.shape[1] == ids.shape[1] else ...
    return not torch.allclose(told[seen], untold[seen], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("labels", CLASSES)
@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "gpt2", "gpt_oss", "deepseek_v3"])
def test_decoders_need_no_mask(family: str, labels: str):
    assert why_mask_is_needed(RowTrial(real_config(family), LONG), CLASSES[labels]) is None
    assert not padding_changes_stock(family, CLASSES[labels])


@pytest.mark.parametrize("labels", CLASSES)
@pytest.mark.parametrize("family", ["roberta", "electra", "bloom"])
def test_what_sees_the_padding_needs_one(family: str, labels: str):
    """Encoders do. Bloom's attention is code of its own, which its mask makes causal."""
    found = why_mask_is_needed(RowTrial(AutoConfig.for_model(family), LONG), CLASSES[labels])
    assert str(found).startswith("tokens see the padding (without a mask, logits change by ")
    assert family == "bloom" or padding_changes_stock(family, CLASSES[labels], max_position_embeddings=64)


def test_a_window_that_sees_later_tokens_is_found_out(monkeypatch: pytest.MonkeyPatch):
    class Mixing(modeling_llama.LlamaMLP):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x + F.pad(x[:, 1:], (0, 0, 0, 1)))

    monkeypatch.setattr(modeling_llama, "LlamaMLP", Mixing)
    found = why_mask_is_needed(RowTrial(LlamaConfig(), LONG), CLASSES["words"])
    assert str(found).startswith("tokens see the padding (without a mask, logits change by ")


def test_a_model_that_makes_a_mask_itself(monkeypatch: pytest.MonkeyPatch):
    def mask(*args: Any, inputs_embeds: Tensor, **kwargs: Any) -> Tensor:
        return torch.zeros(1, 1, inputs_embeds.shape[1], inputs_embeds.shape[1])

    trial = RowTrial(LlamaConfig(), LONG)
    monkeypatch.setattr(modeling_llama, "create_causal_mask", mask)
    found = why_mask_is_needed(trial, CLASSES["rows"])
    assert found is not None and "LlamaAttention is given a mask" in found


@pytest.mark.parametrize(
    "task",
    [
        "task=reward",
        "task=sequence_classification task.labels=[a,b]",
        "task=token_classification task.labels=[a,b]",
    ],
)
def test_the_plan_of_a_run_on_gpus_knows(task: str):
    """Not of one on CPUs, whose attention has a mask: nothing is asked."""
    run = ["model=llama3-8b", "data.path=rows.jsonl", "training.max_steps=1", *task.split()]
    config = load_config(run)
    spec = TrialSpec(config.task, config.training.max_length)
    for model, is_free in ((LlamaConfig(), True), (AutoConfig.for_model("roberta"), False)):
        traits = try_small(model, spec)
        assert sees_no_padding(config.task, traits) is is_free
        found = traced_attention("auto", model, torch.bfloat16, is_free, traits.why_not_by_starts)
        assert found == ("qlora_fsdp_varlen" if is_free else "sdpa")
        assert try_small(model, spec, for_gpu=False).why_not_by_starts is None


def test_memory_that_is_short_is_not_the_models_fault(monkeypatch: pytest.MonkeyPatch):
    def fail(*args: Any, **kwargs: Any) -> nn.Module:
        raise torch.OutOfMemoryError("CUDA out of memory")

    trial = RowTrial(LlamaConfig(), LONG)
    monkeypatch.setattr(RowTrial, "build", fail)
    with pytest.raises(torch.OutOfMemoryError):
        why_mask_is_needed(trial, CLASSES["rows"])
