"""Log-likelihoods of many texts in few calls against one text at a time through the stock model."""

from __future__ import annotations

import peft
import pytest
import torch
from tests.unit.test_decoding import CPU, FAMILIES, VOCAB, build
from torch.nn import functional as F

from qlora_fsdp.common.errors import DataError
from qlora_fsdp.decoding import likelihoods
from qlora_fsdp.decoding.likelihoods import Scorer, Text, group_by_question
from qlora_fsdp.layers.head_loss import LogitTransform
from qlora_fsdp.model.tasks.causal_lm import CausalLM


def texts() -> list[Text]:
    """Many lengths; two that differ in their last token alone; a question with answers of several lengths."""
    generator = torch.Generator().manual_seed(4)
    found = []
    for length, num_targets in ((3, 1), (30, 5), (8, 8), (1, 1), (17, 2), (40, 39)):
        drawn = torch.randint(3, VOCAB, (length + 1,), generator=generator).tolist()
        found.append(Text(tuple(drawn[:-1]), tuple(drawn[-num_targets:])))
    found.append(Text(found[1].tokens, (*found[1].targets[:-1], 11)))
    question = torch.randint(3, VOCAB, (12,), generator=generator).tolist()
    for num_targets in (4, 1, 9, 1, 30):  # the last is longer than the question
        answer = torch.randint(3, VOCAB, (num_targets,), generator=generator).tolist()
        found.append(Text((*question, *answer[:-1]), tuple(answer)))
    return found


def test_answers_to_one_question_share_a_row():
    rows = group_by_question(texts())
    assert sorted(number for row in rows for of_answer in row.answers.values() for number in of_answer) == [*range(12)]
    assert [list(row.answers.values()) for row in rows if row.num_texts > 1] == [[[1, 6]], [[7], [8, 10], [9]]]


@pytest.mark.parametrize("call_tokens", [1, 90, 10_000])
@pytest.mark.parametrize("family", ["llama", "windows and caps"])
@pytest.mark.parametrize("by_head", [True, False])
def test_likelihoods_are_those_of_each_text_alone(
    family: str, by_head: bool, call_tokens: int, monkeypatch: pytest.MonkeyPatch
):
    assert family in FAMILIES
    monkeypatch.setattr(likelihoods, "CALL_TOKENS", call_tokens)
    monkeypatch.setattr(likelihoods, "HEAD_TOKENS", 7)
    model = build(family)
    greedy = model.generate(torch.tensor([[11, 12, 13]]), max_new_tokens=6, do_sample=False, eos_token_id=None)[0]
    asked = [*texts(), Text(tuple(greedy[:-1].tolist()), tuple(greedy[3:].tolist()))]
    expected = []
    for text in asked:
        with torch.no_grad():
            logits = model(torch.tensor([text.tokens])).logits[0, -len(text.targets) :]
        target = torch.tensor(text.targets)
        expected.append(
            (-F.cross_entropy(logits, target, reduction="sum").item(), bool((logits.argmax(-1) == target).all()))
        )
    cap = getattr(model.config, "final_logit_softcapping", None)
    transform = LogitTransform(cap=cap) if by_head else None
    wrapped = peft.PeftModel(model, peft.LoraConfig(r=2, target_modules=["q_proj"]))
    done: list[int] = []
    found = Scorer(CausalLM(wrapped, transform=transform), CPU).score(asked, done.append)
    wrapped.unload()
    assert [each.is_greedy for each in found] == [is_greedy for _, is_greedy in expected]
    assert found[-1].is_greedy and not found[0].is_greedy
    assert [each.log_probability for each in found] == pytest.approx([sum for sum, _ in expected], abs=2e-4)
    assert sum(done) == len(asked)


@pytest.mark.parametrize("num_targets", [6, 7])
def test_an_answer_that_leaves_no_question_has_no_likelihood(num_targets: int):
    """Its first token would be predicted by the last one that is read; lm-eval's own class refuses it too."""
    text = Text((1, 2, 3, 4, 5), tuple(range(num_targets)))
    wrapped = peft.PeftModel(build("llama"), peft.LoraConfig(r=2, target_modules=["q_proj"]))
    with pytest.raises(DataError, match=f"has {num_targets} tokens, and 5 are read of it and its question"):
        Scorer(CausalLM(wrapped, transform=None), CPU).score([text])
    wrapped.unload()
