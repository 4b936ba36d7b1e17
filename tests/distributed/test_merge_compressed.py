"""Merges in compressed-tensors' formats: the package's bytes, and transformers' logits are those of the values stored.

A test is skipped where the package is missing: pip install 'qlora-fsdp[compressed-tensors]'.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from qlora_fsdp import merge
from qlora_fsdp.config.schema import CompressedFormat, QuantConfig
from qlora_fsdp.inference import merge_formats, merge_weights
from qlora_fsdp.inference.rounding import draw_uniform
from qlora_fsdp.layers.quantized.compressed import FP4_BOOK
from tests.helpers.checkpoints import SHAPE, make_checkpoint
from tests.helpers.compressed import through_package
from tests.helpers.full_disk import fill_after_two_files

pytestmark = pytest.mark.distributed
INPUT_IDS = torch.arange(60).view(2, 30) * 7 % 256
FORMATS = {
    "int4": ["quantize=int4"],
    "int4 in groups of 64": ["quantize=int4", "group_size=64"],
    "fp8": ["quantize=fp8"],
    "nvfp4": ["quantize=nvfp4"],
    "mxfp4": ["quantize=mxfp4"],
}
GROUPS = {"int4": 32, "int4 in groups of 64": 64, "fp8": None, "nvfp4": 16, "mxfp4": 32}
GATE_UP = ("gate_proj", "up_proj")
FP4 = torch.tensor(FP4_BOOK)


@pytest.fixture
def package() -> None:
    pytest.importorskip("compressed_tensors", reason="the package compressed-tensors is not installed")


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("bases")
    return {family: make_checkpoint(family, folder / family) for family in ("llama", "qwen3_moe")}


@pytest.fixture(scope="module")
def adapters(bases: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("adapters")
    return {family: make_adapter(base, folder / family, family) for family, base in bases.items()}


def make_adapter(base: Path, folder: Path, family: str, scale: float = 1e-2) -> Path:
    """Stock PEFT's adapter with random matrices; of a mixture for attention and experts."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    if family == "llama":
        config = peft.LoraConfig(target_modules="all-linear", init_lora_weights=False)
    else:
        experts = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
        config = peft.LoraConfig(target_modules=["q_proj"], target_parameters=experts, init_lora_weights=False)
    adapted = peft.get_peft_model(model, config)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            parameter.data.mul_(scale)
    adapted.save_pretrained(folder)
    return folder


def merged_by_peft(base: Path, adapter: Path) -> dict[str, Tensor]:
    """All weights in float32, by the names of the files: experts have a matrix each there."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    weights = peft.PeftModel.from_pretrained(model, adapter).merge_and_unload().state_dict()
    found = {}
    for name, value in weights.items():
        if ".experts." not in name:
            found[name] = value
            continue
        parent = name.rpartition(".")[0]
        parts = ("gate_proj", "up_proj") if "gate_up" in name else ("down_proj",)
        for expert, matrix in enumerate(value):
            for part, rows in zip(parts, matrix.chunk(len(parts)), strict=True):
                found[f"{parent}.{expert}.{part}.weight"] = rows
    return found


def run_merge(base: Path, adapter: Path, out: Path, *more: str) -> None:
    named = [f"adapter={adapter}", f"model.path={base}", "model.tokenizer_path=bytes", f"out={out}"]
    assert merge.main([*named, "report=false", *more]) == 0


def tensors_of(folder: Path) -> dict[str, Tensor]:
    return {key: value for file in folder.glob("*.safetensors") for key, value in load_file(file).items()}


def package_codes(weight: Tensor, name: str, whole: Tensor | None, dtype: torch.dtype) -> dict[str, Tensor]:
    """What the package makes of a whole layer, with the scales that it computes of the weight and nvfp4's of all."""
    from compressed_tensors.compressors.base import compress_module
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config
    from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme
    from compressed_tensors.quantization.utils import calculate_qparams

    presets = {"fp8": "FP8_DYNAMIC", "nvfp4": "NVFP4A16", "mxfp4": "MXFP4A16"}
    scheme = preset_name_to_scheme(presets.get(name, "W4A16"), ["Linear"])
    assert scheme.weights is not None
    group = GROUPS[name] or weight.shape[1]
    if name.startswith("int4"):
        scheme.weights.group_size = group
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    layer.weight.data = weight.clone()
    apply_quantization_config(nn.Sequential(layer), QuantizationConfig(config_groups={"all": scheme}))
    groups = weight.unflatten(1, (-1, group))
    scales, zeros = calculate_qparams(groups.amin(-1), groups.amax(-1), scheme.weights, global_scale=whole)
    if name.startswith("int4") or name == "fp8":
        scales = scales.to(dtype)
    layer.weight_scale = nn.Parameter(scales, requires_grad=False)
    layer.weight_zero_point = nn.Parameter(zeros, requires_grad=False)
    if whole is not None:
        layer.weight_global_scale = nn.Parameter(whole, requires_grad=False)
    compress_module(layer)
    return {key: value for key, value in layer.state_dict().items() if "zero_point" not in key}


def largest_beside(weights: Mapping[str, Tensor], key: str) -> Tensor:
    """The largest magnitude of a weight and of those with which nvfp4's scale is shared: a module's of this width."""
    parent, own = key.removesuffix(".weight").rsplit(".", 1)
    beside = next((each for each in (("q_proj", "k_proj", "v_proj"), GATE_UP) if own in each), (own,))
    return torch.stack([weights[f"{parent}.{each}.weight"].abs().amax() for each in beside]).amax()


def is_coded(key: str) -> bool:
    return key.endswith("_proj.weight")


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize(("family", "name"), [("llama", each) for each in FORMATS] + [("qwen3_moe", "int4")])
def test_codes_are_the_packages_of_the_whole_weight(bases, adapters, tmp_path: Path, monkeypatch, family, name):
    """Whatever pieces they are made of: here three rows at a time."""
    monkeypatch.setattr(merge_weights, "VALUES_A_TIME", 3 * SHAPE["hidden_size"])
    run_merge(bases[family], adapters[family], tmp_path / "out", *FORMATS[name])
    found = tensors_of(tmp_path / "out")
    weights = merged_by_peft(bases[family], adapters[family])
    num_compared = 0
    for key, weight in weights.items():
        if not is_coded(key):
            assert found[key].dtype is torch.bfloat16
            continue
        whole = found.get(f"{key}_global_scale")
        if name == "nvfp4":  # PEFT's sums may differ in the last bit
            torch.testing.assert_close(whole, (448 * 6 / largest_beside(weights, key)).view(1), rtol=1e-6, atol=0)
        for part, expected in package_codes(weight, name, whole, torch.bfloat16).items():
            stored = found[f"{key.removesuffix('weight')}{part}"]
            assert stored.dtype == expected.dtype, (key, part)
            assert torch.equal(stored.view(torch.uint8), expected.view(torch.uint8)), (key, part)
        num_compared += 1
    assert num_compared == {"llama": 14, "qwen3_moe": 2 * (4 + 4 * 3)}[family]


def values_stored(found: Mapping[str, Tensor], key: str, name: str) -> Tensor:
    """What the codes of a weight stand for, by the format's definition: float32."""
    parts = {part: found[f"{key.removesuffix('weight')}{part}"] for part in parts_of(name)}
    scales = parts["weight_scale"].float()
    if name == "fp8":
        return parts["weight"].float() * scales
    packed = parts["weight_packed"]
    if name.startswith("int4"):  # eight in an int32, the first in the lowest bits, counted from -8
        values = torch.stack([packed >> shift & 15 for shift in range(0, 32, 4)], -1).flatten(1).float() - 8
    else:
        values = FP4[torch.stack([packed & 15, packed >> 4], -1).flatten(1).int()]
    if name == "mxfp4":
        scales = torch.exp2(parts["weight_scale"].float() - 127)
    if name == "nvfp4":
        scales = scales / parts["weight_global_scale"]
    group = GROUPS[name]
    return values.view(len(values), -1, group).mul(scales.unsqueeze(-1)).flatten(1)


def parts_of(name: str) -> list[str]:
    if name == "fp8":
        return ["weight", "weight_scale"]
    return ["weight_packed", "weight_scale", *(["weight_global_scale"] if name == "nvfp4" else [])]


def round_inputs(layer: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor]:
    """A token's inputs in fp8, as a server rounds them."""
    (x,) = inputs
    scales = x.abs().amax(-1, keepdim=True) / 448
    return ((x / scales).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scales,)


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize(
    ("family", "name"),
    [("llama", each) for each in FORMATS] + [("qwen3_moe", each) for each in ("int4", "fp8")],
)
def test_transformers_computes_with_the_values_stored(bases, adapters, tmp_path: Path, capsys, family: str, name: str):
    out = tmp_path / "out"
    run_merge(bases[family], adapters[family], out, *FORMATS[name])
    said = capsys.readouterr().err
    assert "parameters stay as the base has them, such as" in said and "at random" not in said
    found = tensors_of(out)
    dtype = torch.bfloat16 if name in ("nvfp4", "mxfp4") else torch.float32
    loaded = AutoModelForCausalLM.from_pretrained(out, dtype=dtype, attn_implementation="eager")
    for key in [key for key in merged_by_peft(bases[family], adapters[family]) if is_coded(key)]:
        values = values_stored(found, key, name)
        for part in parts_of(name):
            del found[f"{key.removesuffix('weight')}{part}"]
        found.pop(f"{key.removesuffix('weight')}weight_shape", None)
        found[key] = values.to(dtype)
    plain = tmp_path / "plain"
    shutil.copytree(
        bases[family], plain, ignore=lambda folder, names: [name for name in names if "safetensors" in name]
    )
    save_file(found, plain / "model.safetensors", {"format": "pt"})
    expected = AutoModelForCausalLM.from_pretrained(plain, dtype=dtype, attn_implementation="eager")
    if name == "fp8":
        for layer_name, layer in expected.named_modules():
            if isinstance(layer, nn.Linear) and layer_name != "lm_head":
                layer.register_forward_pre_hook(round_inputs)
    with torch.no_grad():
        theirs, ours = (model.eval()(input_ids=INPUT_IDS).logits for model in (loaded, expected))
    tolerance = 2e-2 if dtype is torch.bfloat16 else 1e-4
    if family == "qwen3_moe" and name.startswith("int4"):
        tolerance = 1e-2  # transformers rounds what it decompresses of experts to the scales' dtype
    torch.testing.assert_close(theirs, ours, rtol=0, atol=tolerance * float(ours.abs().max()))
    config = json.loads((out / "config.json").read_text())["quantization_config"]
    assert config["quant_method"] == "compressed-tensors" and "lm_head" in config["ignore"]
    if family == "qwen3_moe":
        assert "model.layers.0.mlp.gate" in config["ignore"]  # a linear layer in vLLM alone


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize(
    ("name", "factor"), [("int4", 1.0), ("fp8", 1.0), ("nvfp4", 1.0), ("nvfp4", 1.02), ("mxfp4", 1.0)]
)
def test_a_base_on_the_grid_keeps_what_an_adapter_adds(
    bases, tmp_path: Path, monkeypatch, capsys, name: str, factor: float
):
    """A base that somebody dequantized: to the nearest, the small adapter would be gone.

    The base's scale of the whole weight is another by the factor, as of who joined other layers or none.
    """
    find_largest = merge_weights.WeightMerger._find_largest
    no_adapter = make_adapter(bases["llama"], tmp_path / "nothing", "llama", scale=0.0)
    with monkeypatch.context() as patched:
        patched.setattr(
            merge_weights.WeightMerger, "_find_largest", lambda self, joined: find_largest(self, joined) * factor
        )
        run_merge(bases["llama"], no_adapter, tmp_path / "codes", *FORMATS[name])
    found = tensors_of(tmp_path / "codes")
    keys = [key for key in merged_by_peft(bases["llama"], no_adapter) if is_coded(key)]
    base = shutil.copytree(bases["llama"], tmp_path / "base")
    before = {key: values_stored(found, key, name).to(torch.bfloat16) for key in keys}
    for file in base.glob("*.safetensors"):
        tensors = load_file(file)
        save_file({key: before.get(key, value) for key, value in tensors.items()}, file, {"format": "pt"})
    adapter = make_adapter(base, tmp_path / "adapter", "llama", scale=2e-3)
    capsys.readouterr()
    run_merge(base, adapter, tmp_path / "out", *FORMATS[name])
    assert f"lie on the grid of {name.split()[0]}" in capsys.readouterr().err
    after = tensors_of(tmp_path / "out")
    weights = merged_by_peft(base, adapter)
    products = total = 0.0
    for key in keys:
        change = (weights[key] - before[key].float()).double()
        products += float(((values_stored(after, key, name) - before[key].float()) * change).sum())
        total += float(change.square().sum())
    print(products / total)
    assert 0.7 < products / total < 1.3


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize("more", [[], ["quantize=nvfp4"]], ids=["16 bits", "nvfp4"])
def test_a_base_that_was_trained_in_nvfp4_is_merged_into_what_was_trained_on(bases, tmp_path: Path, capsys, more):
    quant = QuantConfig(load_in_4bit=False, compressed_tensors=CompressedFormat.nvfp4)
    weights = {key: value for key, value in tensors_of(bases["llama"]).items() if is_coded(key)}
    trained_on = {key: through_package(weight.bfloat16(), quant) for key, weight in weights.items()}
    twin = shutil.copytree(bases["llama"], tmp_path / "twin")
    for file in twin.glob("*.safetensors"):
        tensors = load_file(file)
        save_file({key: trained_on.get(key, value) for key, value in tensors.items()}, file, {"format": "pt"})
    adapter = make_adapter(twin, tmp_path / "adapter", "llama", scale=2e-3)
    trained = ["base=dequantized", "quant=nvfp4", "training.precision=bfloat16"]
    run_merge(bases["llama"], adapter, tmp_path / "out", *trained, *more)
    found = tensors_of(tmp_path / "out")
    expected = merged_by_peft(twin, adapter)
    products = total = 0.0
    for key, before in trained_on.items():
        change = (expected[key] - before.float()).double()
        after = values_stored(found, key, "nvfp4") if more else found[key].float()
        products += float(((after - before.float()) * change).sum())
        total += float(change.square().sum())
    assert 0.7 < products / total < 1.3
    if more:
        assert "lie on the grid of nvfp4" in capsys.readouterr().err


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize("name", ["int4", "fp8", "nvfp4", "mxfp4"])
def test_rounded_at_random_values_are_right_on_average(name: str):
    format = merge_formats.CompressedTensorsFormat(name)
    row = torch.linspace(-0.7, 1, 64).view(1, 64)
    largest = row.abs().amax()
    rounded = []
    for number in range(2000):
        grid = merge_formats.Grid(row, draw_uniform(str(number), 0, 64).view_as(row))
        parts = format.encode(row, torch.float32, largest, grid)
        rounded.append(format.decode(parts))
    inner = (
        row.abs()
        < row.view(1, -1, format.group_size or 64).abs().amax(-1).repeat_interleave(format.group_size or 64, 1) * 0.75
    )  # larger ones may be beyond the last point
    mean = torch.stack(rounded).mean(0)
    torch.testing.assert_close(mean[inner], row[inner], rtol=0, atol=0.015)


@pytest.mark.usefixtures("package")
def test_a_merge_that_was_cut_off_goes_on(bases, adapters, tmp_path: Path, monkeypatch, capsys):
    named = [f"adapter={adapters['llama']}", f"model.path={bases['llama']}", "model.tokenizer_path=bytes"]
    arguments = [*named, f"out={tmp_path / 'out'}", "report=false", "quantize=int4"]
    with monkeypatch.context() as patched:
        fill_after_two_files(patched)
        assert merge.main(arguments) == 2
    assert len(list((tmp_path / "out").glob("*.safetensors"))) == 2
    assert merge.main([*arguments, "group_size=64"]) == 2
    assert "holds another merge" in capsys.readouterr().err
    assert merge.main(arguments) == 0
    run_merge(bases["llama"], adapters["llama"], tmp_path / "at once", "quantize=int4")
    found, expected = tensors_of(tmp_path / "out"), tensors_of(tmp_path / "at once")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key]) for key in found)


def refused(capsys, base: Path, adapter: Path, out: Path, *more: str) -> str:
    named = [f"adapter={adapter}", f"model.path={base}", "model.tokenizer_path=bytes", f"out={out}"]
    assert merge.main([*named, *more]) == 2
    assert not out.exists()
    return str(capsys.readouterr().err)


def test_what_can_not_be_written_is_refused_before_it_is_begun(bases, adapters, tmp_path: Path, monkeypatch, capsys):
    own = (capsys, bases["llama"], adapters["llama"], tmp_path / "out")
    monkeypatch.setattr(merge_formats, "PACKAGE_NAME", "no-such-package")
    said = refused(*own, "quantize=fp8", "group_size=32")
    assert "quantize=fp8 needs the package no-such-package, which is not installed" in said
    assert "group_size=32 is for quantize=int4" in said
    assert "quantize=int3 is none of nf4, fp4, int4, fp8, nvfp4, mxfp4" in refused(*own, "quantize=int3")
    monkeypatch.setattr(merge_formats, "find_package_problem", lambda: None)
    assert "group_size=16 is none of 32, 64, 128" in refused(*own, "quantize=int4", "group_size=16")
    said = refused(*own, "quantize=int4", "group_size=128")
    assert "group_size=128 does not divide the rows of 12 layers" in said and "Set group_size=64" in said
    free = shutil.disk_usage(tmp_path)._replace(free=2**16)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: free)
    assert "has room for 0.1 MiB, and the result takes 0.1 MiB" in refused(*own, "quantize=int4")


def test_an_old_package_is_refused_by_name(bases, adapters, tmp_path: Path, monkeypatch, capsys):
    monkeypatch.setattr(merge_formats, "PACKAGE_NAME", "torch")
    monkeypatch.setattr(merge_formats, "PACKAGE_VERSION", "1000.1")
    said = refused(capsys, bases["llama"], adapters["llama"], tmp_path / "out", "quantize=fp8")
    assert f"needs the package torch in version 1000.1 or a later one; {version('torch')} is installed" in said


def test_experts_that_transformers_would_not_load_are_refused(bases, adapters, tmp_path: Path, monkeypatch, capsys):
    monkeypatch.setattr(merge_formats, "find_package_problem", lambda: None)
    said = refused(capsys, bases["qwen3_moe"], adapters["qwen3_moe"], tmp_path / "out", "quantize=nvfp4")
    assert "quantize=nvfp4 can't be used: transformers loads experts" in said


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize("largest_code", [7, 8])
def test_integer_grids_of_other_conventions_are_kept(largest_code: int):
    """Such as llama.cpp's Q4_0, of which models trained for it are published in 16 bits: eight steps to the largest."""
    torch.manual_seed(0)
    codes = torch.randint(-7, 8, (16, 8, 32)).float()
    codes[..., 0] = -largest_code
    steps = torch.rand(16, 8, 1) + 0.5
    base = (codes * steps).to(torch.bfloat16).float().flatten(1)
    format = merge_formats.CompressedTensorsFormat("int4")
    base[:8, 1::32] = -base[:8, ::32] * 7 / largest_code  # a point above, in half of the rows
    assert format.holds(base, torch.bfloat16, None)
    assert not format.holds(torch.randn(16, 256), torch.bfloat16, None)
    parts = format.encode(base, torch.bfloat16, None, merge_formats.Grid(base, torch.full_like(base, 0.5)))
    torch.testing.assert_close(format.decode(parts), base, rtol=1e-2, atol=0)
    parts = format.encode(base, torch.bfloat16, None, merge_formats.Grid(base, None))
    torch.testing.assert_close(format.decode(parts), base, rtol=1e-2, atol=0)


@pytest.mark.usefixtures("package")
def test_a_sum_beyond_the_last_integer_is_not_cut_off():
    """The codes are -8 to 7: a sum of eight steps above zero would lose one of them, and takes the package's scale."""
    base = torch.arange(32.0).remainder(16).sub(8).view(1, 32)
    total = base.clone()
    total[0, -1] = 8
    format = merge_formats.CompressedTensorsFormat("int4")
    parts = format.encode(total, torch.bfloat16, None, merge_formats.Grid(base, torch.full_like(base, 0.5)))
    assert float(format.decode(parts)[0, -1]) > 7.4
