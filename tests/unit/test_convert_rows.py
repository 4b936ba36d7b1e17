"""transformers' conversions by rows give the values that transformers' own operations give on whole tensors."""

from __future__ import annotations

import math
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.core_model_loading import (
    Chunk,
    Concatenate,
    ConversionOps,
    Interleave,
    MergeModulelist,
    PermuteForRope,
    Split,
    Transpose,
    WeightConverter,
)

from qlora_fsdp.weights import map_keys as mapping
from qlora_fsdp.weights.composed import ComposedTensor
from qlora_fsdp.weights.map_keys import RowConversions
from qlora_fsdp.weights.safetensors_files import StoredTensor

CONFIG = SimpleNamespace(num_attention_heads=2)
FUSE = [MergeModulelist(dim=0), Concatenate(dim=1)]
GATE, UP, OUT = "experts.*.gate.weight", "experts.*.up.weight", "experts.gate_up"
E3 = {f"m.experts.{n}.{kind}.weight": (4, 6) for n in range(3) for kind in ("gate", "up")}
CASES: dict[str, tuple[list[str], list[str], list[ConversionOps], dict[str, tuple[int, ...]]]] = {
    "experts": ([GATE, UP], [OUT], FUSE, E3),
    "turned experts": (["experts.*.up.weight"], ["experts.up"], [MergeModulelist(0), Transpose(1, 2)],
                       {f"m.experts.{n}.up.weight": (4, 6) for n in range(3)}),
    "turned": (["experts.up"], ["experts.down"], [Transpose(1, 2)], {"m.experts.up": (3, 4, 2)}),
    "turned, four by four": (["experts.up"], ["experts.down"], [Transpose(1, 2)], {"m.experts.up": (3, 4, 4)}),
    "turned if need be": (["experts.up"], ["experts.up"], [Transpose(1, 2, True)], {"m.experts.up": (3, 4, 6)}),
    "as it is": (["experts.down"], ["experts.down"], [Transpose(1, 2, True)], {"m.experts.down": (3, 6, 4)}),
    "two stacks": (["experts.gate", "experts.up"], [OUT], [Concatenate(dim=1)],
                   {"m.experts.gate": (3, 4, 6), "m.experts.up": (3, 5, 6)}),
    "interleaved": (["experts.w13"], [OUT], [Interleave(dim=1)], {"m.experts.w13": (3, 8, 6)}),
    "interleaved and split": (["w13"], ["gate", "up"], [Interleave(dim=0), Chunk(dim=0)], {"m.w13": (8, 6)}),
    "three of one": (["qkv"], ["q", "k", "v"], [Chunk(dim=0), PermuteForRope(permute_layer_names=["q", "k"])],
                     {"m.qkv": (24, 6)}),
    "three of one vector": (["qkv.bias"], ["q.bias", "k.bias", "v.bias"], [Chunk(dim=0)], {"m.qkv.bias": (24,)}),
    "unequal parts": (["att"], ["first", "second"], [Split(dim=0)], {"m.att": (10, 6)}),
    "vectors": (["experts.*.bias"], ["experts.bias"], [MergeModulelist(0)],
                {f"m.experts.{n}.bias": (5,) for n in range(3)}),
    "convolutions": (["q_conv.weight", "k_conv.weight"], ["conv.weight"], [Concatenate(dim=0)],
                     {"m.q_conv.weight": (4, 1, 3), "m.k_conv.weight": (4, 1, 3)}),
}  # fmt: skip
SHAPES = {"m.experts.up": (3, 6, 4), "m.experts.down": (3, 6, 4), "m.first": (7, 6), "m.second": (3, 6)}


class Shapes(nn.Module):
    def get_parameter(self, name: str) -> Tensor:
        return torch.empty(SHAPES[name], device="meta")


def pick(composed: ComposedTensor, values: dict[str, Tensor]) -> Tensor:
    """The tensor that pieces describe."""
    pieces = []
    for piece in composed.pieces:
        rows = values[piece.stored.key].reshape(-1, composed.row_elements)
        rows = rows[piece.first_row : piece.first_row + piece.num_rows]
        pieces.append(rows.T if composed.is_transposed else rows)
    return torch.cat(pieces).reshape(composed.shape)


def make_sources(converter: WeightConverter, shapes: dict[str, tuple[int, ...]]) -> dict[str, list[StoredTensor]]:
    sources: dict[str, list[StoredTensor]] = {}
    for key, shape in shapes.items():
        _, pattern = deepcopy(converter).rename_source_key(key)
        sources.setdefault(pattern, []).append(StoredTensor(key, Path("file"), 0, shape, torch.float32))
    return sources


@pytest.mark.parametrize("case", CASES)
def test_values(case: str):
    patterns, targets, operations, shapes = CASES[case]
    converter = WeightConverter(patterns, targets, operations)
    values = {key: torch.randn(shape) for key, shape in shapes.items()}
    sources, name = make_sources(converter, shapes), f"m.{targets[0]}"
    reference = deepcopy(converter)
    for pattern, group in sources.items():
        for stored in group:
            reference.add_tensor(name, stored.key, pattern, values[stored.key])
    expected = reference.convert(name, model=Shapes(), config=CONFIG)
    parameters = {key: torch.empty(shape, device="meta") for key, shape in SHAPES.items()}
    parameters |= {f"n.{key}": parameter for key, parameter in parameters.items()}
    conversions = RowConversions(parameters, CONFIG)
    found = conversions.convert(converter, name, sources)
    assert found.keys() == expected.keys()
    for key, tensor in expected.items():
        tensor = tensor[0] if isinstance(tensor, list) else tensor
        assert found[key].shape == tuple(tensor.shape) and pick(found[key], values).equal(tensor), key
        assert found[key].num_bytes == tensor.nbytes
    assert math.prod(next(iter(shapes.values()))) and sum(c.num_bytes for c in found.values()) == sum(
        tensor.nbytes for tensor in values.values()
    )
    # A second layer of the same shapes has the rows of its own files.
    again = make_sources(converter, {f"n.{key}": shape for key, shape in shapes.items()})
    other = conversions.convert(converter, f"n.{name}", again)
    other_values = {f"n.{key}": -value for key, value in values.items()}
    assert all(pick(other[f"n.{key}"], other_values).equal(-pick(found[key], values)) for key in found)
    if case == "experts":  # large pieces: a gate and an up for each expert
        assert len(found["m.experts.gate_up"].pieces) == 6


class Negate(ConversionOps):
    def convert(self, input_dict, **kwargs):
        return {key: [-tensor for tensor in tensors] for key, tensors in input_dict.items()}


@pytest.mark.parametrize(
    ("operations", "shape", "message"),
    [
        ([Interleave(dim=1)], (4, 6), "cuts rows apart"),
        ([Chunk(dim=1)], (4, 6), "cuts rows apart"),
        ([Chunk(dim=1)], (4, 8), "cuts rows apart"),
        ([Negate()], (4, 6), "computes with values"),
        ([Negate()], (6,), "computes with values"),
    ],
)
def test_what_can_not_be_done_by_rows(operations: list[ConversionOps], shape: tuple[int, ...], message: str):
    converter = WeightConverter("w", ["u", "v"] if isinstance(operations[0], Chunk) else "w", operations)
    with pytest.raises(ValueError, match=message):
        RowConversions({}, CONFIG).convert(converter, "m.w", make_sources(converter, {"m.w": shape}))


def make_model(family: str = "llama") -> nn.Module:
    config = AutoConfig.for_model(family, hidden_size=64, intermediate_size=64, num_hidden_layers=1, vocab_size=32)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def test_a_tensor_that_fills_parameters_of_other_names(monkeypatch: pytest.MonkeyPatch):
    rules = [WeightConverter("mlp.gate_up", ["mlp.gate_proj", "mlp.up_proj"], [Chunk(dim=0)])]
    monkeypatch.setattr(mapping, "get_model_conversion_mapping", lambda model: rules)
    stored = StoredTensor("model.layers.0.mlp.gate_up.weight", Path("file"), 0, (128, 64), torch.float32)
    found = mapping.map_keys(make_model(), {stored.key: stored})
    assert found.keys() == {f"model.layers.0.mlp.{name}_proj.weight" for name in ("gate", "up")}
    gate, up = (tensor.pieces[0] for tensor in found.values())
    assert (gate.first_row, gate.num_rows, up.first_row, up.num_rows) == (0, 64, 64, 64)
