"""Experts' weights, streamed by rows out of the files of each family, are byte for byte what bitsandbytes makes of what
stock transformers loads from the same files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.core_model_loading import Transpose, WeightConverter

from qlora_fsdp.common.sizes import PIECE_BYTES
from qlora_fsdp.runtime.processes import start_processes, stop_processes
from qlora_fsdp.weights import map_keys
from qlora_fsdp.weights.composed import ComposedTensor
from qlora_fsdp.weights.quantized_cache import use_cache
from qlora_fsdp.weights.safetensors_files import SINGLE_NAME
from tests.helpers.experts import (
    EXPERTS,
    FORMATS,
    build,
    count_wrong,
    load,
    make_experts,
    num_quantized,
    stock_parts,
)
from tests.helpers.ranks import Meeting, run_ranks

pytestmark = pytest.mark.distributed
TURNED = "qwen3_moe turned"
QUANTIZED = {*EXPERTS, TURNED}
ALL_FORMATS_AT = 3  # ranks; at other numbers, on which the rows of a rank depend alone, two formats of each family
COMPOSED = {"qwen3_moe", "mixtral", "deepseek_v3", "olmoe", "qwen2_moe", TURNED}  # a tensor for each expert, or turned


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("experts")
    folders = {family: make_experts(family, base / family) for family in EXPERTS}
    folders[TURNED] = make_experts("qwen3_moe", base / "turned", save_original_format=False)
    for file in folders[TURNED].glob("*.safetensors"):
        tensors = load_file(file)
        turned = {key: t.mT.contiguous() if t.ndim == 3 else t for key, t in tensors.items()}
        save_file(turned, file, {"format": "pt"})
    return folders


def turning_rules(model: object) -> list[WeightConverter]:
    """Rules as those of families whose files have the experts' matrices transposed."""
    names = ("experts.gate_up_proj", "experts.down_proj")
    return [WeightConverter(name, name, [Transpose(1, 2)]) for name in names]


def formats_at(num_ranks: int, number: int) -> list[str]:
    """The formats in which the family of this number is read on so many ranks."""
    names = list(FORMATS)
    return names if num_ranks == ALL_FORMATS_AT else [names[(number + n) % len(names)] for n in (0, 2)]


def count_wrong_bytes(folders: dict[str, Path]) -> dict[str, dict[str, int]]:
    """By family and format, bytes that differ on this rank."""
    Meeting.new_port()
    processes, rules, wrong = start_processes(60), map_keys.get_model_conversion_mapping, {}
    try:
        for number, (family, folder) in enumerate(folders.items()):
            map_keys.get_model_conversion_mapping = turning_rules if family == TURNED else rules
            original = folders["qwen3_moe"] if family == TURNED else folder
            stock = AutoModelForCausalLM.from_pretrained(original, dtype=torch.bfloat16)
            for format in formats_at(processes.num_ranks, number):
                meta = build(folder, FORMATS[format])
                assert bool(num_quantized(meta)) == (family in QUANTIZED and format != "none")
                assert any(isinstance(a.stored, ComposedTensor) for a in meta.assignments) == (family in COMPOSED)
                expected = stock_parts(meta, stock, meta.format)
                # Tensors whole, and in pieces that end in the middle of an expert.
                piece_bytes = PIECE_BYTES if processes.num_ranks == 1 else 5000
                found = load(meta, meta.assignments, processes, piece_bytes)
                wrong[f"{family} {format}"] = count_wrong(found, expected)
        return wrong
    finally:
        map_keys.get_model_conversion_mapping = rules
        stop_processes()


SLOW = [pytest.param(num_ranks, marks=pytest.mark.slow) for num_ranks in (1, 4)]


@pytest.mark.parametrize("num_ranks", [3, *SLOW])
def test_no_byte_differs_from_bitsandbytes(folders, num_ranks: int):
    for rank, cases in enumerate(run_ranks(num_ranks, count_wrong_bytes, folders)):
        assert len(cases) == len(folders) * len(formats_at(num_ranks, 0))
        assert {case.partition(" ")[2].removeprefix("turned ") for case in cases} == set(FORMATS)
        for case, counts in cases.items():
            assert {name: n for name, n in counts.items() if n} == {}, f"rank {rank}, {case}"


def count_wrong_from_cache(folder: Path, cache: Path) -> dict[str, dict[str, int]]:
    """By format, bytes that differ where the weights come from the cache."""
    Meeting.new_port()
    processes, wrong = start_processes(60), {}
    stock = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    try:
        for format, quant in FORMATS.items():
            if format == "none":
                continue
            for again in (False, True):
                meta = build(folder, quant)
                cached = use_cache(meta.assignments, "base", str(cache), torch.bfloat16, processes, writes=not again)
                assert sum(bool(a.stored_parts) for a in cached) == sum(a.is_quantized for a in cached) > 4
                expected = stock_parts(meta, stock, meta.format)
                wrong[f"{format}, again: {again}"] = count_wrong(load(meta, cached, processes), expected)
        return wrong
    finally:
        stop_processes()


def test_through_the_cache(folders, tmp_path: Path):
    for cases in run_ranks(3, count_wrong_from_cache, folders["mixtral"], tmp_path / "cache"):
        for case, counts in cases.items():
            assert {name: n for name, n in counts.items() if n} == {}, case


@pytest.fixture(scope="module")
def prequantized(folders, tmp_path_factory: pytest.TempPathFactory) -> Callable[[bool], Path]:
    """Files whose experts bitsandbytes has quantized, as a model saves them after `replace_parameter_4bit`."""

    def make(double_quant: bool) -> Path:
        from bitsandbytes.nn.parametrize import replace_parameter_4bit

        folder = tmp_path_factory.mktemp("stored")
        model = AutoModelForCausalLM.from_pretrained(folders["qwen2_moe"], dtype=torch.bfloat16)
        for layer in model.model.layers:
            for name in ("gate_up_proj", "down_proj"):
                replace_parameter_4bit(layer.mlp.experts, name, double_quant, "nf4", 64)
        model.config.quantization_config = {"quant_method": "bitsandbytes", "load_in_4bit": True}
        model.config.to_json_file(folder / "config.json", use_diff=False)
        save_file({key: t.contiguous() for key, t in model.state_dict().items()}, folder / SINGLE_NAME)
        return folder

    return make


def load_stored(folder: Path) -> dict[str, int]:
    """Bytes that differ from those of the file, and from stock transformers' values."""
    Meeting.new_port()
    processes = start_processes(60)
    try:
        meta = build(folder, FORMATS["int8"])
        assert num_quantized(meta) == 4 and "already quantized" in meta.notes[0]
        stored = load_file(folder / SINGLE_NAME)
        found = load(meta, meta.assignments, processes)
        wrong = {}
        for name in (f"model.layers.{n}.mlp.experts.{kind}_proj" for n in (0, 1) for kind in ("gate_up", "down")):
            parts = {"codes": stored[name], "scales": stored[f"{name}.absmax"]}
            if f"{name}.nested_absmax" in stored:
                state = json.loads(bytes(stored[f"{name}.quant_state.bitsandbytes__nf4"].tolist()))
                offset = torch.tensor([state["nested_offset"]])
                parts["nested_scales"] = torch.cat([stored[f"{name}.nested_absmax"], offset])
            for part, expected in parts.items():
                mine = found[f"{name}.{part}"]
                width = expected.nbytes // len(mine)
                wrong[f"{name}.{part}"] = int((mine[:, :width].flatten() != expected.view(-1).view(torch.uint8)).sum())
        return wrong
    finally:
        stop_processes()


@pytest.mark.parametrize("double_quant", [False, True])
def test_codes_of_bitsandbytes_are_taken_as_they_are(prequantized, double_quant: bool):
    for wrong in run_ranks(3, load_stored, prequantized(double_quant)):
        assert len(wrong) == (12 if double_quant else 8) and not any(wrong.values()), wrong
