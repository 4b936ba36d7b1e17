"""Kernels run on GPUs with less shared memory than those that their tiles were chosen on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from qlora_fsdp.layers.kernels.launch import OutOfResources, kernel

ROOT = Path(__file__).parents[2]
GEFORCE = 99 * 1024  # bytes of shared memory for a block on capabilities 8.6, 8.9 and 12.0 (CUDA programming guide)


class Function:
    """Stands for a Triton function on a GPU where a number of stages fits."""

    def __init__(self, fits: int) -> None:
        self.fits, self.tried = fits, list[int]()

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*args: Any, num_stages: int, **options: Any) -> None:
            self.tried.append(num_stages)
            if num_stages > self.fits:
                raise OutOfResources(120_000 * num_stages, GEFORCE, "shared memory")

        return launch


def test_fewer_stages_where_shared_memory_is_less():
    function = Function(fits=1)
    launched, x = kernel(function), torch.zeros(1)
    launched[(1,)](x, RANK=16, num_stages=3)
    assert function.tried == [3, 2, 1]
    launched[(1,)](x, RANK=16, num_stages=3)  # what fits is remembered
    assert function.tried[3:] == [1]
    launched[(1,)](x, RANK=64, num_stages=2)  # for those tiles alone
    assert function.tried[4:] == [2, 1]


def test_what_never_fits_is_an_error():
    with pytest.raises(OutOfResources):
        kernel(Function(fits=0))[(1,)](torch.zeros(1), num_stages=2)


@pytest.fixture(scope="module")
def compile_for_a_gpu(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Any]]:
    """`compile_for_a_gpu(program, *args)`: what a helper prints, which compiles kernels in a process of its own."""
    pytest.importorskip("triton")
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    errors = tmp_path_factory.mktemp("compile") / "errors.txt"
    command = [sys.executable, "-m", "tests.helpers.compile_programs"]
    pipe = subprocess.PIPE
    with (
        errors.open("w") as log,
        subprocess.Popen(command, cwd=ROOT, env=env, stdin=pipe, stdout=pipe, stderr=log, text=True) as process,
    ):
        assert process.stdin is not None and process.stdout is not None
        asked, answers = process.stdin, process.stdout

        def ask(program: str, *args: str) -> Any:
            asked.write(json.dumps([program, *args]) + "\n")
            asked.flush()
            answer = answers.readline()
            assert answer, errors.read_text()
            return json.loads(answer)

        yield ask


@pytest.mark.parametrize(("rank", "num_stages"), [(16, 2), (64, 1)])
def test_the_gates_tiles_fit_a_geforce(compile_for_a_gpu: Callable[..., Any], rank: int, num_stages: int):
    """Llama's MLP on an RTX 4090: with as many stages as an H100 its tiles take 100 KiB and 184 KiB."""
    assert max(compile_for_a_gpu("compile_gate", "89", str(rank), str(num_stages))) <= GEFORCE


@pytest.mark.parametrize(
    ("capability", "quantization", "rows"), [(80, "nested", 64), (89, "int8", 128), (90, "nf4", 8)]
)
def test_the_tiles_of_products_with_codes_fit_a_geforce(
    compile_for_a_gpu: Callable[..., Any], capability: int, quantization: str, rows: int
):
    """Also on an A100 and an H100. Those of 64 rows and of int8 take the most: 80 KiB."""
    num_bytes = compile_for_a_gpu("compile_products", str(capability), quantization, str(rows))
    assert 0 < num_bytes <= GEFORCE


@pytest.mark.parametrize(("capability", "rows"), [(80, 8), (89, 32), (90, 16)])
def test_the_tiles_of_transposed_experts_fit_a_geforce(
    compile_for_a_gpu: Callable[..., Any], capability: int, rows: int
):
    assert 0 < compile_for_a_gpu("compile_transposed", str(capability), str(rows)) <= GEFORCE


@pytest.mark.parametrize(("capability", "size"), [(80, 128), (89, 256), (90, 64), (89, 512)])
def test_the_tiles_of_attention_over_slots_fit_a_geforce(
    compile_for_a_gpu: Callable[..., Any], capability: int, size: int
):
    """Two programs at a time, so that one reads while the other computes."""
    assert 0 < 2 * compile_for_a_gpu("compile_slots", str(capability), str(size)) <= 100 * 1024


@pytest.mark.parametrize("capability", [80, 89, 90])
def test_the_kernels_that_dequantize_compile_for_gpus_with_and_without_8_bit_floats(
    compile_for_a_gpu: Callable[..., Any], capability: int
):
    assert max(compile_for_a_gpu("compile_dequantize", str(capability))) <= GEFORCE
