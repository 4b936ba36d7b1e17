"""Rows that are longer than the positions that a model knows."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModel, PreTrainedModel

from qlora_fsdp.common.errors import DataError
from qlora_fsdp.data.counts import DataReport
from qlora_fsdp.data.run_data import PreparedData
from qlora_fsdp.data.sequences import RandomRows, Sequences, SequenceSettings, TrainingData, make_sequences
from qlora_fsdp.model.positions import check_positions, first_position, num_learned_positions

SMALL = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 16,
    "ffn_dim": 16,
    "word_embed_proj_dim": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 40,
    "pad_token_id": 3,
}


def make_model(kind: str) -> PreTrainedModel:
    return AutoModel.from_config(AutoConfig.for_model(kind, **SMALL)).eval()


def make_data(*lengths: int, packing: bool = False) -> PreparedData[TrainingData]:
    parts: list[Sequences] = []
    for length in lengths:
        rows = RandomRows(4, length, 32, seed=0)
        settings = SequenceSettings(max_length=100, pad_token_id=3, packing=packing, seed=0)
        parts.append(make_sequences(rows, np.arange(4), settings))
    report = DataReport((), 4, 4, 4, 4, 1.0, 0, 0)
    return PreparedData(parts[0], parts[1] if len(parts) > 1 else None, report)


@pytest.mark.parametrize("kind", ["bert", "roberta", "distilbert", "gpt2", "opt"])
def test_the_table_ends_where_transformers_fails(kind: str) -> None:
    model = make_model(kind)
    last = num_learned_positions(model)
    assert last is not None
    model(input_ids=torch.ones(1, last, dtype=torch.long))
    with pytest.raises((IndexError, RuntimeError)):
        model(input_ids=torch.ones(1, last + 1, dtype=torch.long))


@pytest.mark.parametrize("kind", ["bert", "roberta", "data2vec-text", "gpt2", "opt", "llama"])
def test_rows_begin_where_transformers_lets_them(kind: str) -> None:
    model, ids = make_model(kind), torch.arange(4, 13)[None]
    positions = torch.arange(9)[None] + first_position(model)
    found = model(input_ids=ids, position_ids=positions).last_hidden_state
    torch.testing.assert_close(found, model(input_ids=ids).last_hidden_state)


def test_rows_beyond_a_table_are_refused() -> None:
    model = make_model("bert")
    assert check_positions(model, model.config, make_data(40)) is None
    for data in (make_data(41), make_data(10, 41)):
        with pytest.raises(DataError, match=r"has 41 tokens.*40 positions\. Set training\.max_length=40"):
            check_positions(model, model.config, data)


def test_padding_beyond_a_table_is_refused() -> None:
    model = AutoModel.from_config(AutoConfig.for_model("bert", **SMALL | {"max_position_embeddings": 42})).eval()
    assert check_positions(model, model.config, make_data(40)) is None
    with pytest.raises(DataError, match=r"has 41 tokens, padding makes it longer than 42.*max_length=42\."):
        check_positions(model, model.config, make_data(41))  # a multiple of 8


def test_rows_beyond_rotary_positions_are_refused() -> None:
    """But for random tokens, which measure speed or memory."""
    model = make_model("llama")
    assert num_learned_positions(model) is None
    assert check_positions(model, model.config, make_data(30, packing=True)) is None  # 90 tokens a sequence
    note = check_positions(model, model.config, make_data(41))  # random tokens: a test of speed or memory
    assert note is not None
    assert "41 tokens, and the model was made for 40 positions" in note

    class FileRows:
        """The same rows, as if they were of a file."""

        def __getattr__(self, name: str) -> object:
            return getattr(rows, name)

    data = make_data(41)
    rows = data.train.rows
    data = replace(data, train=replace(data.train, rows=FileRows()))
    stretch = r"model\.rope_scaling='\{rope_type: yarn, factor: 2\}' to stretch them"
    fix = rf"Set {stretch}, or training\.max_length=40, which cuts"
    with pytest.raises(DataError, match=rf"has 41 tokens, and the model was made for 40 positions\. {fix}"):
        check_positions(model, model.config, data)
