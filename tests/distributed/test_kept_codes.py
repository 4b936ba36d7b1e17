"""Checkpoints in int4, fp8, MXFP4 and nvfp4: a model is trained on their own codes, and not on rounded ones.

Most are made by the package compressed-tensors, and the reference reads them by stock transformers. A test is skipped
where the package is missing.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from qlora_fsdp import merge
from qlora_fsdp.common.errors import CheckpointError
from qlora_fsdp.common.sizes import PIECE_BYTES
from qlora_fsdp.config.schema import CompressedFormat, QuantConfig
from qlora_fsdp.runtime.processes import start_processes, stop_processes
from qlora_fsdp.weights.composed import Assignment, as_composed
from tests.helpers.checkpoints import make_checkpoint
from tests.helpers.compressed import NVFP4_PARTS, nvfp4_values, package_parts, through_package
from tests.helpers.experts import as_bytes, build, load, make_experts
from tests.helpers.ranks import Meeting, run_ranks
from tests.helpers.reference import stock_losses
from tests.helpers.runs import settings, train_all
from tests.helpers.scaled_checkpoints import load_dequantized, make_compressed, make_mxfp4

pytest.importorskip("compressed_tensors", reason="the package compressed-tensors is not installed")
pytestmark = pytest.mark.distributed
# By the name of a checkpoint: what it is made of, its format and group size.
CASES = {
    "int4": ("llama", "int4", 32),
    "int4 in groups of 64": ("llama", "int4", 64),
    "fp8": ("llama", "fp8", 0),
    "mxfp4": ("llama", "mxfp4", 32),
    "nvfp4": ("llama", "nvfp4", 16),
    "experts in int4": ("qwen3_moe", "int4", 32),
    "experts in fp8": ("qwen3_moe", "fp8", 0),
    "experts in mxfp4": ("qwen3_moe", "mxfp4", 32),
    "experts in nvfp4": ("qwen3_moe", "nvfp4", 16),
}


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("sources")
    return {"llama": make_checkpoint("llama", base / "llama"), "qwen3_moe": make_experts("qwen3_moe", base / "moe")}


@pytest.fixture(scope="module")
def folders(sources: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("kept")
    return {
        case: make_compressed(sources[source], base / case.replace(" ", "-"), name, group_size)
        for case, (source, name, group_size) in CASES.items()
    }


def parts_of_files(weight: Tensor, assignment: Assignment) -> dict[str, Tensor]:
    """The package's parts of a weight [rows, columns], each of whose tensors in the files it has quantized apart."""
    assert assignment.stored is not None
    sizes = [piece.num_rows for piece in as_composed(assignment.stored).pieces]
    found = [package_parts(rows, assignment.layer.format) for rows in weight.split(sizes)]
    return {name: torch.cat([parts[name] for parts in found]) for name in found[0]}


def count_wrong_parts(folders: dict[str, Path], sources: dict[str, Path]) -> dict[str, tuple[int, int]]:
    """By checkpoint: how many weights are kept in codes, and in how many codes or scales differ from the package's."""
    Meeting.new_port()
    processes = start_processes(60)
    counts: dict[str, tuple[int, int]] = {}
    try:
        for case, folder in folders.items():
            full = dict(AutoModelForCausalLM.from_pretrained(sources[CASES[case][0]]).named_parameters())
            meta = build(folder, QuantConfig())
            kept = [assignment for assignment in meta.assignments if assignment.keeps_codes]
            found = load(meta, meta.assignments, processes, PIECE_BYTES if processes.num_ranks == 1 else 3000)
            num_wrong = 0
            for assignment in kept:
                weight = full[assignment.name].detach().flatten(0, -2)
                for part, expected in parts_of_files(weight, assignment).items():
                    num_rows = assignment.layer.out_features
                    wanted = as_bytes(expected).view(num_rows, -1)
                    own = found[f"{assignment.name}.{part}"].view(num_rows, -1)
                    num_wrong += not own[:, : wanted.shape[1]].equal(wanted)  # a row may be filled up
            counts[case] = (len(kept), num_wrong)
        return counts
    finally:
        stop_processes()


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_codes_and_scales_are_those_of_the_files(folders, sources, num_ranks: int):
    for counts in run_ranks(num_ranks, count_wrong_parts, folders, sources):
        assert {case: num_kept for case, (num_kept, _) in counts.items()} == {
            case: 14 if source == "llama" else 12 for case, (source, *_) in CASES.items()
        }
        assert not any(num_wrong for _, num_wrong in counts.values()), counts


@pytest.fixture(scope="module")
def exact(sources: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    """Checkpoints with scales in float32, and what stock libraries dequantize of them in that dtype."""
    base = tmp_path_factory.mktemp("exact")
    pairs: dict[str, tuple[Path, Path]] = {}
    for name in ("int4", "fp8", "mxfp4", "nvfp4"):
        folder = make_compressed(sources["llama"], base / name, name, scale_dtype=torch.float32)
        twin = load_dequantized(folder, torch.float32)
        if name == "nvfp4":  # which transformers rounds to bfloat16
            put_values(twin, folder)
        twin.save_pretrained(base / f"{name}-twin")
        pairs[name] = (folder, base / f"{name}-twin")
    return pairs


def put_values(model: PreTrainedModel, folder: Path) -> None:
    """Put what the package makes of a checkpoint in nvfp4 into a model, in float32."""
    stored = {key: tensor for file in folder.glob("*.safetensors") for key, tensor in load_file(file).items()}
    for name, weight in model.named_parameters():
        parts = {part: stored.get(f"{name.removesuffix('weight')}{part}") for part in NVFP4_PARTS}
        if parts["weight_packed"] is not None:
            weight.data = nvfp4_values(parts)


def test_losses_are_those_of_stock_libraries(exact, rows: Path, tmp_path: Path):
    float32 = ["training.precision=float32"]
    runs = {
        name: settings(folder, rows, *float32, f"run.folder={tmp_path / name}") for name, (folder, _) in exact.items()
    }
    for trained in run_ranks(2, train_all, runs):
        for name, (_, twin) in exact.items():
            expected = stock_losses(settings(twin, rows, *float32, "quant=none"))
            assert trained[name].losses == pytest.approx(expected, abs=1e-5)
            log = (tmp_path / name / "train.log").read_text()
            assert f"the checkpoint is already quantized ({name}): its bytes are taken as they are" in log


@pytest.fixture(scope="module")
def gpt_oss(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """gpt-oss as it is published: experts in MXFP4, all else in 16 bits."""
    base = tmp_path_factory.mktemp("gpt")
    return make_mxfp4(make_experts("gpt_oss", base / "full"), base / "mxfp4")


def count_wrong_experts(folder: Path) -> tuple[int, int]:
    """How many weights are kept in codes, and in how many codes or scales differ from those of the files."""
    Meeting.new_port()
    processes = start_processes(60)
    try:
        stored = {key: tensor for file in folder.glob("*.safetensors") for key, tensor in load_file(file).items()}
        meta = build(folder, QuantConfig(load_in_4bit=False, compressed_tensors=CompressedFormat.mxfp4))
        kept = [assignment for assignment in meta.assignments if assignment.keeps_codes]
        found = load(meta, meta.assignments, processes, PIECE_BYTES if processes.num_ranks == 1 else 3000)
        num_wrong = 0
        for assignment in kept:
            num_rows = assignment.layer.out_features
            blocks = stored[f"{assignment.name}_blocks"].view(num_rows, -1)
            powers = torch.exp2(stored[f"{assignment.name}_scales"].float() - 127).bfloat16()
            wanted = {"codes": (blocks >> 4) | (blocks << 4), "scales": powers}
            for part, expected in wanted.items():
                own = found[f"{assignment.name}.{part}"].view(num_rows, -1)
                in_bytes = as_bytes(expected).view(num_rows, -1)
                num_wrong += not own[:, : in_bytes.shape[1]].equal(in_bytes)
        return len(kept), num_wrong
    finally:
        stop_processes()


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_experts_of_gpt_oss_have_the_codes_of_its_files(gpt_oss: Path, num_ranks: int):
    assert run_ranks(num_ranks, count_wrong_experts, gpt_oss) == [(4, 0)] * num_ranks


def test_gpt_oss_is_trained_on_its_own_codes(gpt_oss: Path, rows: Path, tmp_path: Path):
    twin = tmp_path / "twin"
    full = AutoModelForCausalLM.from_pretrained(gpt_oss.parent / "full", dtype=torch.float32)
    full.load_state_dict(load_dequantized(gpt_oss, torch.float32).state_dict())
    full.save_pretrained(twin)
    float32 = [
        "training.precision=float32",
        "training.packing=false",
        "quant.llm_int8_skip_modules=[q_proj,k_proj,v_proj,o_proj,lm_head]",
    ]
    run = settings(gpt_oss, rows, *float32, "quant=mxfp4", f"run.folder={tmp_path / 'run'}")
    expected = stock_losses(settings(twin, rows, *float32, "quant=none"))
    for trained in run_ranks(2, train_all, {"run": run}):
        assert trained["run"].losses == pytest.approx(expected, abs=1e-5)
    log = (tmp_path / "run" / "train.log").read_text()
    assert "the checkpoint is in mxfp4: the codes of 4 weights are taken as they are" in log


@pytest.mark.parametrize("is_in_codes", [True, False])
def test_transposes_in_mxfp4_are_merged_into_what_was_trained_on(gpt_oss: Path, tmp_path: Path, is_in_codes: bool):
    """gpt-oss's own codes, and those of its weights in 16 bits."""
    torch.manual_seed(0)
    folder = gpt_oss if is_in_codes else gpt_oss.parent / "full"
    stock = load_dequantized(folder, torch.float32).float() if is_in_codes else load_plain(folder)
    quant = QuantConfig(load_in_4bit=False, compressed_tensors=CompressedFormat.mxfp4)
    for name, weight in stock.named_parameters():
        if not is_in_codes and "experts" in name and weight.ndim == 3:
            weight.data = through_package(weight.data.bfloat16().mT, quant).float().mT.contiguous()
    experts = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    adapted = peft.get_peft_model(stock, peft.LoraConfig(target_parameters=experts, init_lora_weights=False))
    adapted.save_pretrained(tmp_path / "adapter")
    expected = adapted.merge_and_unload().state_dict()
    arguments = [f"adapter={tmp_path / 'adapter'}", f"model.path={folder}", f"out={tmp_path / 'out'}"]
    arguments += ["model.tokenizer_path=bytes", "report=false", "base=dequantized", "training.precision=bfloat16"]
    arguments += ["quant=mxfp4", "quant.llm_int8_skip_modules=[q_proj,k_proj,v_proj,o_proj,lm_head]"]
    assert merge.main(arguments) == 0
    found = load_plain(tmp_path / "out").state_dict()
    assert found.keys() == expected.keys()
    for key, tensor in expected.items():
        assert (found[key] - tensor).abs().max() <= 2**-7 * tensor.abs().max(), key


@pytest.mark.parametrize("quantize", [None, "int4"])
def test_experts_are_merged_as_by_peft(sources, quantize: str | None, tmp_path: Path):
    """In 16 bits, and to codes again: rounded up or down, which moves a weight by less than a step."""
    folder = make_compressed(sources["qwen3_moe"], tmp_path / "base", "int4", scale_dtype=torch.float32)
    experts = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    config = peft.LoraConfig(target_modules=["q_proj"], target_parameters=experts, init_lora_weights=False)
    torch.manual_seed(0)
    model = load_dequantized(folder, torch.float32).float()
    adapted = peft.get_peft_model(model, config)
    adapted.save_pretrained(tmp_path / "adapter")
    expected = adapted.merge_and_unload().state_dict()
    arguments = [f"adapter={tmp_path / 'adapter'}", f"model.path={folder}", "model.tokenizer_path=bytes"]
    arguments += [f"out={tmp_path / 'out'}", "report=false", "training.precision=bfloat16"]
    assert merge.main([*arguments, *([] if quantize is None else [f"quantize={quantize}"])]) == 0
    loaded = load_dequantized(tmp_path / "out", torch.float32) if quantize else load_plain(tmp_path / "out")
    found = loaded.state_dict()
    assert found.keys() == expected.keys()
    for key, tensor in expected.items():
        allowed = 2**-6
        if quantize is not None and "_proj" in key:
            allowed = 2 / 15
        error = (found[key].float() - tensor).abs().max()
        assert error <= allowed * tensor.abs().max(), key


def load_plain(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


@pytest.mark.parametrize("name", ["int4", "fp8", "mxfp4", "nvfp4"])
def test_an_adapter_is_merged_into_the_values_of_the_codes(exact, name: str, tmp_path: Path):
    folder, twin = exact[name]
    torch.manual_seed(0)
    config = peft.LoraConfig(target_modules="all-linear", init_lora_weights=False)
    adapted = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(twin, dtype=torch.float32), config)
    adapted.save_pretrained(tmp_path / "adapter")
    expected = adapted.merge_and_unload().state_dict()
    arguments = [f"adapter={tmp_path / 'adapter'}", f"model.path={folder}", "model.tokenizer_path=bytes"]
    assert merge.main([*arguments, f"out={tmp_path / 'out'}", "report=false"]) == 0
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).state_dict()
    assert merged.keys() == expected.keys()
    for key, tensor in expected.items():  # rounded to 16 bits, up or down
        torch.testing.assert_close(merged[key], tensor, rtol=2**-7, atol=1e-6)


def changed(folder: Path, out: Path, tensors: dict[str, Tensor], weights: dict[str, object] | None = None) -> Path:
    """A copy with more or other tensors, and other words about how weights are quantized."""
    shutil.copytree(folder, out)
    index = json.loads((out / "model.safetensors.index.json").read_text())
    for key, tensor in tensors.items():
        file = out / index["weight_map"].setdefault(key, "more.safetensors")
        save_file({**(load_file(file) if file.exists() else {}), key: tensor}, file, {"format": "pt"})
    (out / "model.safetensors.index.json").write_text(json.dumps(index))
    config = json.loads((out / "config.json").read_text())
    config["quantization_config"]["config_groups"]["group_0"]["weights"] |= weights or {}
    (out / "config.json").write_text(json.dumps(config))
    return out


LAYER = "model.layers.0.mlp.up_proj"


@pytest.mark.parametrize(
    ("tensors", "weights", "message"),
    [
        ({f"{LAYER}.weight_zero_point": torch.zeros(8, 4, dtype=torch.int32)}, {}, "it is asymmetric (it has zero"),
        ({f"{LAYER}.weight_g_idx": torch.zeros(64, dtype=torch.int32)}, {}, "columns are in another order (actorder)"),
        ({f"{LAYER}.weight_scale": torch.ones(3, 2)}, {}, "(float32 [3, 2]) does not fit"),
        ({f"{LAYER}.weight_global_scale": torch.ones(1)}, {}, "its scales have a scale, as those of nvfp4 alone have"),
        ({}, {"num_bits": 8}, "weights of 8 bits of type int, symmetric"),
        ({}, {"symmetric": False}, "weights of 4 bits of type int, asymmetric"),
        ({}, {"type": "float"}, "does not fit"),
        ({}, {"type": "float", "symmetric": False}, "weights of 4 bits of type float, asymmetric"),
    ],
)
def test_what_is_stored_otherwise_is_refused(folders, tmp_path: Path, tensors, weights, message: str):
    folder = changed(folders["int4"], tmp_path / "changed", tensors, weights)
    with pytest.raises(CheckpointError) as caught:
        build(folder, QuantConfig())
    assert message in str(caught.value)
    assert "Set model.path" in str(caught.value) or "set model.path" in str(caught.value)


@pytest.mark.parametrize(
    ("part", "tensor"),
    [
        ("weight_global_scale", torch.ones(2)),
        ("weight_global_scale", torch.ones(1, dtype=torch.bfloat16)),
        ("weight_scale", torch.ones(3, 2)),
    ],
)
def test_parts_of_nvfp4_that_do_not_fit_are_refused(folders, tmp_path: Path, part: str, tensor: Tensor):
    folder = changed(folders["nvfp4"], tmp_path / "changed", {f"{LAYER}.{part}": tensor})
    with pytest.raises(CheckpointError, match=f"{LAYER}.weight_scale .* does not fit {LAYER}.weight_packed"):
        build(folder, QuantConfig())


def test_rounded_inputs_that_a_checkpoint_asks_for_are_told(folders, tmp_path: Path):
    folder = changed(folders["nvfp4"], tmp_path / "changed", {f"{LAYER}.input_global_scale": torch.ones(1)})
    assert not any("inputs" in note for note in build(folder, QuantConfig()).notes)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["config_groups"]["group_0"]["input_activations"] = {"num_bits": 4, "type": "float"}
    (folder / "config.json").write_text(json.dumps(config))
    (said,) = [note for note in build(folder, QuantConfig()).notes if "inputs" in note]
    assert "asks servers to round the inputs of its layers to 4 bits, which is not done here" in said


@pytest.mark.parametrize("case", ["int4", "fp8", "mxfp4", "nvfp4"])
def test_values_that_are_not_finite_are_told(folders, tmp_path: Path, case: str):
    """Scales of int4 and nvfp4, codes of fp8, and exponents of mxfp4."""
    name = f"{LAYER}.weight" if case == "fp8" else f"{LAYER}.weight_scale"
    (whole,) = [found[name] for file in folders[case].glob("*.safetensors") if name in (found := load_file(file))]
    bad = whole.float()
    bad[3, 0] = 255 if case == "mxfp4" else float("nan")
    folder = changed(folders[case], tmp_path / "changed", {name: bad.to(whole.dtype)})
    (said,) = run_ranks(1, refuse_loading, folder)
    assert f"{LAYER}.weight" in said and "NaN or infinite value" in said


def refuse_loading(folder: Path) -> str:
    Meeting.new_port()
    processes = start_processes(60)
    try:
        meta = build(folder, QuantConfig())
        with pytest.raises(CheckpointError) as caught:
            load(meta, meta.assignments, processes)
        return str(caught.value)
    finally:
        stop_processes()
