"""Where FSDP takes no part: a rank that has all of every parameter."""

from __future__ import annotations

import torch
from torch import nn

from qlora_fsdp.config.schema import FsdpConfig, ShardingStrategy
from qlora_fsdp.sharding.shard import place_model


def test_fsdp_is_used_where_something_is_split_or_in_host_memory():
    assert not FsdpConfig().uses_fsdp(num_shards=1)
    assert not FsdpConfig(sharding_strategy=ShardingStrategy.NO_SHARD).uses_fsdp(num_shards=1)
    assert FsdpConfig().uses_fsdp(num_shards=2)
    assert FsdpConfig(cpu_offload=True).uses_fsdp(num_shards=1)


def test_tied_parameters_stay_one_when_they_get_memory():
    with torch.device("meta"):
        model = nn.ModuleDict({"embeddings": nn.Embedding(8, 4), "head": nn.Linear(4, 8, bias=False)})
    model["head"].weight = model["embeddings"].weight
    model["embeddings"].register_buffer("kept", torch.arange(3.0))
    model["head"].weight.requires_grad_(False)
    place_model(model, torch.device("cpu"), torch.device("cpu"))
    assert model["head"].weight is model["embeddings"].weight
    assert model["head"].weight.device.type == "cpu" and not model["head"].weight.requires_grad
    assert model["embeddings"].kept.tolist() == [0.0, 1.0, 2.0]
