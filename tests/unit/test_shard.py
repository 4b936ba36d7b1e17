"""Where FSDP takes no part: a rank that has all of every parameter."""

from __future__ import annotations

import torch
from torch import nn

from qlora_fsdp.config.schema import FsdpConfig, ShardingStrategy
from qlora_fsdp.config.specs import ShardSpec
from qlora_fsdp.sharding.shard import place_model


def test_fsdp_is_used_where_something_is_split_or_in_host_memory():
    whole = FsdpConfig(sharding_strategy=ShardingStrategy.NO_SHARD)
    assert not ShardSpec.of(FsdpConfig(), 1, 1).uses_fsdp
    assert not ShardSpec.of(whole, 2, 2).uses_fsdp
    assert not ShardSpec.whole().uses_fsdp
    assert ShardSpec.of(FsdpConfig(), 2, 2).uses_fsdp
    assert ShardSpec.of(FsdpConfig(cpu_offload=True), 1, 1).uses_fsdp


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
