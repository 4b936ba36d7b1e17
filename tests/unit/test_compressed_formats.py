"""Base formats of compressed-tensors: the package's own codes, scales and values, and what is refused."""

from __future__ import annotations

from functools import partial
from importlib import import_module

import pytest
import torch
from tests.helpers.compressed import package_parts, through_package
from tests.helpers.quantized import quantize_whole
from tests.helpers.quick_config import load_config
from torch import Tensor

from qlora_fsdp.config.checks.check_settings import Needs, check_settings
from qlora_fsdp.config.schema import CompressedFormat, QuantConfig
from qlora_fsdp.layers.quantized import format as format_module
from qlora_fsdp.layers.quantized.format import Format
from qlora_fsdp.model.swap_layers import choose_format, quant_settings
from qlora_fsdp.weights.fill import _random_rows

QUANTS = {
    "int4": QuantConfig(load_in_4bit=False, compressed_tensors=CompressedFormat.int4),
    "int4 in groups of 128": QuantConfig(load_in_4bit=False, compressed_tensors=CompressedFormat.int4, group_size=128),
    "fp8": QuantConfig(load_in_4bit=False, compressed_tensors=CompressedFormat.fp8),
    "mxfp4": QuantConfig(load_in_4bit=False, compressed_tensors=CompressedFormat.mxfp4),
    "nvfp4": QuantConfig(load_in_4bit=False, compressed_tensors=CompressedFormat.nvfp4),
}


def make_rows(dtype: torch.dtype) -> Tensor:
    """Rows [70, 384] of a weight: random ones, a group and a row of zeros, tiny and large ones."""
    torch.manual_seed(0)
    rows = torch.randn(70, 384) * 0.1
    rows[3] = 0.0
    rows[4, :128] = 0.0
    rows[5, 128:256] *= 1e-30
    rows[6] *= 1e4
    return rows.to(dtype)


@pytest.fixture
def package() -> None:
    pytest.importorskip("compressed_tensors", reason="the package compressed-tensors is not installed")


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("quant", QUANTS.values(), ids=list(QUANTS))
def test_codes_scales_and_values_are_the_packages(
    quant: QuantConfig, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(format_module, "VALUES_A_TIME", 5 * 384)  # a few rows at a time
    rows = make_rows(dtype)
    format = choose_format(quant, dtype)
    assert format is not None
    parts = quantize_whole(rows, format)
    for name, (shape, part_dtype) in format.parts(*rows.shape).items():
        assert (tuple(parts[name].shape), parts[name].dtype) == (shape, part_dtype)
    for name, expected in package_parts(rows, format).items():
        stored = expected.contiguous().view(len(rows), -1).view(torch.uint8)
        found = parts[name].view(len(rows), -1).view(torch.uint8)
        assert torch.equal(found[:, : stored.shape[1]], stored), name
    assert torch.equal(format.dequantize(parts, *rows.shape, dtype), through_package(rows, quant))


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize("largest", [0.0, 1e-38, 1e30])
def test_global_scales_of_zeros_and_of_extreme_weights_are_the_packages(largest: float):
    """Rows of three groups, whose scales do not fill an element of float32."""
    torch.manual_seed(0)
    rows = (torch.rand(7, 48) - 0.5) * 2 * largest
    format = choose_format(QUANTS["nvfp4"], torch.float32)
    assert format is not None
    parts = quantize_whole(rows, format)
    for name, expected in package_parts(rows, format).items():
        stored = expected.contiguous().view(len(rows), -1).view(torch.uint8)
        found = parts[name].view(len(rows), -1).view(torch.uint8)
        assert torch.equal(found[:, : stored.shape[1]], stored), name
    assert torch.equal(format.dequantize(parts, *rows.shape, torch.float32), through_package(rows, QUANTS["nvfp4"]))


@pytest.mark.parametrize("quant", QUANTS.values(), ids=list(QUANTS))
def test_parts_of_a_weight_are_those_of_the_whole(quant: QuantConfig, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(format_module, "VALUES_A_TIME", 3 * 384)
    rows = make_rows(torch.bfloat16)
    format = choose_format(quant, torch.bfloat16)
    assert format is not None
    parts = quantize_whole(rows, format)
    whole = format.dequantize(parts, *rows.shape, torch.float32).view(2, 35, 384)
    out = torch.zeros(2, 9, 300)  # of two matrices of 35 rows, 9 rows and 256 columns each
    format.dequantize_part(parts, out[:, :, :256], first_row=5, first_column=128)
    assert torch.equal(out[:, :, :256], whole[:, 5:14, 128:])
    assert not out[:, :, 256:].any()


@pytest.mark.parametrize("quant", QUANTS.values(), ids=list(QUANTS))
def test_kernels_compute_what_torch_computes(quant: QuantConfig):
    """The kernels run in Triton's interpreter, which tests/helpers/shared.py has switched on."""
    pytest.importorskip("triton")
    kernels = import_module("qlora_fsdp.layers.kernels.triton_dequantize")
    rows = make_rows(torch.bfloat16)
    for dtype in (torch.bfloat16, torch.float32):
        format = choose_format(quant, dtype)
        assert format is not None
        parts = quantize_whole(rows, format)
        codes, scales = parts["codes"], parts["scales"]
        whole = format.dequantize(parts, *rows.shape, torch.float32)
        out = torch.zeros(2, 35, 400)
        target = out[:, :, :384]
        if quant.compressed_tensors is CompressedFormat.fp8:
            kernels.dequantize_fp8(codes.view(torch.uint8).view(2, 35, -1), scales.view(2, 35), target)
        else:
            book = format_module.code_book(format.quant_type, codes.device)
            scales = scales.view(format.scale_dtype)
            global_scales = parts.get("global_scales")
            kernels.dequantize(codes, scales, None, (book, book), format.blocksize, target, global_scales=global_scales)
        assert torch.equal(target, whole.view(2, 35, 384))
        assert not out[:, :, 384:].any()


def test_every_fp8_code_is_read_by_the_kernel():
    pytest.importorskip("triton")
    kernels = import_module("qlora_fsdp.layers.kernels.triton_dequantize")
    codes = torch.arange(256, dtype=torch.uint8)
    finite = codes.view(torch.float8_e4m3fn).float().isfinite()
    out = torch.empty(1, 1, 256)
    kernels.dequantize_fp8(codes.view(1, 1, 256), torch.ones(1, 1), out)
    assert torch.equal(out[0, 0][finite], codes.view(torch.float8_e4m3fn).float()[finite])


def test_settings_choose_the_format():
    assert choose_format(load_config(["quant=int4", "quant.group_size=64"]).quant, torch.float32) == Format(
        "int4", blocksize=64, scale_dtype=torch.float32
    )
    config = load_config(["quant=fp8"])
    assert config.quant.base_format == "fp8" and not config.quant.load_in_4bit
    assert load_config([]).quant.base_format == "nf4" and load_config(["quant=none"]).quant.base_format is None
    for quant in QUANTS.values():
        found = quant_settings(choose_format(quant, torch.bfloat16), QuantConfig(group_size=quant.group_size))
        assert found.base_format == quant.base_format


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        (["quant=int4", "quant.group_size=48"], "quant.group_size=48 is none of 32, 64, 128"),
        (
            ["quant=int4", "quant.load_in_4bit=true"],
            "quant.compressed_tensors=int4 contradicts quant.load_in_4bit=true",
        ),
        (["quant=fp8", "quant.group_size=64"], "quant.group_size=64 has no effect"),
        (["quant=nvfp4", "quant.group_size=64"], "quant.group_size=64 has no effect"),
        (["quant=int4", "compute.matmul=fp8"], "compute.matmul=fp8 works on nf4 and fp4 weights alone"),
        (["quant=int4", "lora.init_lora_weights=pissa"], "starts from the base weights, which are packed codes here"),
    ],
)
def test_what_does_not_go_together_is_refused(typed: list[str], said: str):
    config = load_config(["model=tiny", "data=random", "training.max_steps=10", *typed])
    (problem,) = check_settings(config, Needs())
    assert said in str(problem)


def test_a_rank_without_rows_is_given_none_of_a_random_weight():
    """Not an empty piece either, of which nvfp4 could not tell the largest magnitude."""
    rows_of = partial(_random_rows, width=32, std=1.0, seed=0, device=torch.device("cpu"), dtype=torch.float32)
    assert not [*rows_of("weight", 20, 20)]
    ((start, rows),) = rows_of("weight", 12, 20)
    assert start == 12 and rows.shape == (8, 32)
