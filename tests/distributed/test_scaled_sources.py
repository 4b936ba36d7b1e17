"""Checkpoints in FP8 and MXFP4 become, by rows, what bitsandbytes makes of what stock transformers dequantizes."""

from __future__ import annotations

from pathlib import Path

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from qlora_fsdp import merge
from qlora_fsdp.common.sizes import PIECE_BYTES
from qlora_fsdp.runtime.processes import start_processes, stop_processes
from qlora_fsdp.weights.scaled import ScaledTensor
from tests.helpers.checkpoints import make_checkpoint
from tests.helpers.experts import FORMATS, build, count_wrong, load, make_experts, stock_parts
from tests.helpers.ranks import Meeting, run_ranks
from tests.helpers.runs import settings, train_all
from tests.helpers.scaled_checkpoints import load_dequantized, make_fp8, make_mxfp4

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("scaled")
    experts = {family: make_experts(family, base / family) for family in ("qwen3_moe", "deepseek_v3", "gpt_oss")}
    return {
        "experts": make_fp8(experts["qwen3_moe"], base / "experts"),
        "low rank": make_fp8(experts["deepseek_v3"], base / "low-rank", (16, 64)),
        "dense": make_fp8(make_checkpoint("llama", base / "llama"), base / "dense", (64, 32)),
        "powers of two": make_fp8(base / "llama", base / "powers", (32, 32), torch.float8_e8m0fnu),
        "mxfp4": make_mxfp4(experts["gpt_oss"], base / "mxfp4"),
    }


def count_wrong_bytes(folders: dict[str, Path]) -> dict[str, dict[str, int]]:
    """By checkpoint and format, bytes that differ on this rank."""
    Meeting.new_port()
    processes, wrong = start_processes(60), {}
    try:
        for case, folder in folders.items():
            stock = load_dequantized(folder)
            for format in ("nf4 double", "int8", "none"):
                meta = build(folder, FORMATS[format])
                stored = [tensor for a in meta.assignments for tensor in a.stored_tensors]
                assert sum(isinstance(tensor, ScaledTensor) for tensor in stored) >= 4
                # Tensors whole, and in pieces that end in the middle of a block.
                piece_bytes = PIECE_BYTES if processes.num_ranks == 1 else 3000
                found = load(meta, meta.assignments, processes, piece_bytes)
                wrong[f"{case} {format}"] = count_wrong(found, stock_parts(meta, stock, meta.format))
        return wrong
    finally:
        stop_processes()


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_no_byte_differs_from_bitsandbytes(folders, num_ranks: int):
    for rank, cases in enumerate(run_ranks(num_ranks, count_wrong_bytes, folders)):
        assert len(cases) == 3 * len(folders)
        for case, counts in cases.items():
            assert {name: n for name, n in counts.items() if n} == {}, f"rank {rank}, {case}"


def test_training_and_merging_are_those_of_the_dequantized_model(folders, rows: Path, tmp_path: Path):
    twin = AutoModelForCausalLM.from_pretrained(folders["dense"].parent / "llama", dtype=torch.float32)
    twin.load_state_dict(load_dequantized(folders["dense"], torch.float32).state_dict())
    twin.save_pretrained(tmp_path / "twin")
    few = ["training.max_steps=3", "training.learning_rate=1e-2", "training.precision=float32"]
    sources = {"fp8": folders["dense"], "twin": tmp_path / "twin"}
    cases = {
        name: settings(source, rows, *few, f"run.folder={tmp_path / f'run-{name}'}") for name, source in sources.items()
    }
    trained = run_ranks(1, train_all, cases)[0]
    assert trained["fp8"].losses == trained["twin"].losses
    assert "the checkpoint is in fp8, which is dequantized" in (tmp_path / "run-fp8" / "train.log").read_text()
    for base in ("full", "dequantized"):
        merged = {}
        for name in sources:
            out = tmp_path / f"{base}-{name}"
            adapter = f"adapter={tmp_path / f'run-{name}' / 'adapter'}"
            assert merge.main([adapter, f"out={out}", f"base={base}"]) == 0
            merged[name] = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).state_dict()
        assert merged["fp8"].keys() == merged["twin"].keys()
        assert all(merged["fp8"][key].equal(tensor) for key, tensor in merged["twin"].items())


def adapted_by_peft(model: PreTrainedModel, parameters: list[str], folder: Path) -> PreTrainedModel:
    """Saves stock PEFT's adapter of some experts' weights, with random matrices. Returns what PEFT merges."""
    torch.manual_seed(0)
    config = peft.LoraConfig(target_modules=["q_proj"], target_parameters=parameters, init_lora_weights=False)
    adapted = peft.get_peft_model(model, config)
    adapted.save_pretrained(folder)
    return adapted.merge_and_unload()


@pytest.mark.parametrize("case", ["experts", "mxfp4"])
def test_experts_that_are_scaled_are_merged_as_by_peft(folders, case: str, tmp_path: Path):
    """The result has the experts in 16 bits, as the model has them."""
    model = load_dequantized(folders[case], torch.float32).float()  # experts come in 16 bits all the same
    experts = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    merged = adapted_by_peft(model, experts, tmp_path / "adapter").state_dict()
    arguments = [f"adapter={tmp_path / 'adapter'}", f"model.path={folders[case]}", "model.tokenizer_path=bytes"]
    more = ["training.precision=bfloat16", "report=false"]
    assert merge.main([*arguments, f"out={tmp_path / 'out'}", *more]) == 0
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).state_dict()
    assert found.keys() == merged.keys()
    base = load_dequantized(folders[case], torch.float32).state_dict()
    num_changed = 0
    for name, expected in merged.items():
        # Rounded to 16 bits, up or down. The reference has rounded the base's experts before, too.
        torch.testing.assert_close(found[name], expected, rtol=2**-7, atol=2**-8 * float(base[name].abs().max()))
        num_changed += not found[name].equal(base[name].bfloat16().float())
    num_layers = model.config.num_hidden_layers
    assert num_changed == 3 * num_layers, "q_proj and two weights of experts of each layer"
