"""Print how many bytes of shared memory the kernel of products takes of a GPU, which need not be here.

A program of its own, because the process of the tests has Triton interpret kernels, and such a process can't compile.
Arguments: compute capability, as 89; quantization: nf4, nested (double quantization) or int8; rows.
"""

from __future__ import annotations

import json
import sys

import torch

from qlora_fsdp.layers.kernels import triton_products
from qlora_fsdp.layers.quantized.format import Format
from qlora_fsdp.layers.quantized.stored_weight import code_values
from tests.helpers.compile_kernel import shared_bytes

SIZES = ("num_rows", "width", "code_stride", "scale_stride", "split", "rank_all")
THREE = ("num_outputs", "num_groups", "rank")
UNALIGNED = ("num_rows", "scale_stride", "num_groups_0", "num_groups_1", "num_groups_2", "split")


def bytes_of_products(capability: int, quantization: str, rows: int) -> int:
    """Compile the kernel for three weights with biases and adapters, in bfloat16, with the tile for these rows."""
    is_4bit = quantization != "int8"
    tile = triton_products.best_tile(6144, 4096, rows, 64, is_4bit, 132)
    assert tile is not None
    is_nested = quantization == "nested"
    words = is_nested and tile.step == 4
    constants = {
        "BLOCKSIZE": 64,
        "KIND": {"nf4": "float"}.get(quantization, quantization),
        "WORDS": words,
        "LOOKUP": triton_products.lookup(code_values(Format("nf4")), torch.bfloat16) if is_4bit else "",
        "BIAS": True,
        "RANK": 16,
        "WEIGHTS": 3,
        "GROUPED": False,
        "SUB": 64,
        "STEP": tile.step,
        "SCALED": tile.scales_weight,
        "IS_SPLIT": True,
        "OUTPUTS": tile.outputs,
        "ROWS": tile.rows,
    }
    function = triton_products._products_kernel.function
    scales = "*fp32"
    if is_nested:
        scales = "*i32" if words else "*u8"
    kinds = {}
    for name in function.arg_names:
        stem = name.rstrip("_012")
        if name in SIZES or stem in THREE:
            kinds[name] = "i32"
        elif stem in ("x", "bias", "b", "out", "h"):
            kinds[name] = "*bf16"
        elif stem == "codes":
            kinds[name] = "*u8" if is_4bit else "*i8"
        elif stem == "scales":
            kinds[name] = scales
        elif name in ("ends", "counts"):
            kinds[name] = "*i32"
        elif name == "factor":
            kinds[name] = "fp32"
        else:
            kinds[name] = "*fp32"
    return shared_bytes(function, kinds, constants, UNALIGNED, capability, tile.num_warps, tile.num_stages)


if __name__ == "__main__":
    capability, quantization, rows = sys.argv[1:]
    print(json.dumps(bytes_of_products(int(capability), quantization, int(rows))))
