"""NEFTune's noise: each row has the magnitude of its own length, packed or padded."""

from __future__ import annotations

import peft
import torch
from tests.helpers.checkpoints import SHAPE
from transformers import LlamaConfig, LlamaForCausalLM

from qlora_fsdp.config.schema import TaskConfig
from qlora_fsdp.data.batch import Batch
from qlora_fsdp.model.tasks.causal_lm import CausalLM, EmbeddingNoise, row_lengths


def batch() -> Batch:
    """A sequence with rows of 3 and 4 tokens and one of padding, and a sequence with a row of 2."""
    position_ids = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 5, 6, 7]])
    tokens = torch.zeros_like(position_ids)
    starts = torch.tensor([0, 3, 8, 16], dtype=torch.int32)
    return Batch(tokens, tokens, position_ids, starts, 8, num_tokens=torch.tensor([7, 2]))


def test_rows_are_as_long_as_their_tokens():
    assert row_lengths(batch()).tolist() == [[3, 3, 3, 4, 4, 4, 4, 4], [2] * 8]


def test_noise_is_uniform_and_at_most_the_papers():
    torch.manual_seed(0)
    noise = EmbeddingNoise(5.0)
    noise.prepare(batch(), is_training=True)
    embedded = torch.zeros(2, 8, 512)
    added = noise.add(embedded)
    for row, (index, columns) in {3: (0, slice(0, 3)), 4: (0, slice(3, 7)), 2: (1, slice(0, 2))}.items():
        largest = 5.0 / (row * 512) ** 0.5
        found = added[index, columns].abs()
        assert 0.99 * largest < found.max() <= largest and 0.45 < (found / largest).mean() < 0.55
    noise.prepare(batch(), is_training=False)
    assert torch.equal(noise.add(embedded), embedded)


def test_a_model_that_writes_gets_no_noise_of_an_earlier_batch():
    """A recorded evaluation is replayed without Python: what the last training batch has noted is there still."""
    base = LlamaForCausalLM(LlamaConfig(**SHAPE))
    wrapped = peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["q_proj"]))
    model = CausalLM(wrapped, transform=None, task=TaskConfig(neftune_noise_alpha=5.0))
    assert model.noise is not None
    ids = batch().input_ids[:1, :1]
    clean = model.base(input_ids=ids).logits
    model.noise.prepare(batch(), is_training=True)
    model.eval()
    assert torch.equal(model.base(input_ids=ids).logits, clean)
