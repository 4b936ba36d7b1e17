"""Print how many bytes of shared memory the kernel of transposed products takes of a GPU, which need not be here.

A program of its own, as compile_products.py. Arguments: compute capability, as 89; rows of an expert.
"""

from __future__ import annotations

import json
import sys

import torch

from qlora_fsdp.layers.kernels import triton_transposed_products as transposed
from qlora_fsdp.layers.kernels.triton_products import lookup
from qlora_fsdp.layers.quantized.format import Format
from qlora_fsdp.layers.quantized.stored_weight import code_values
from tests.helpers.compile_kernel import shared_bytes


def bytes_of_products(capability: int, rows: int) -> int:
    """Compile the kernel for biases and adapters, in bfloat16."""
    tile = transposed.transposed_tile(2880, rows * 32, 32, True)
    assert tile is not None
    constants = {
        "BLOCKSIZE": 64,
        "LOOKUP": lookup(code_values(Format("nf4")), torch.bfloat16),
        "BIAS": True,
        "RANK": 16,
        "OUTPUTS": 64,
        "INPUTS": transposed.INPUTS,
        "ROWS": tile.rows,
    }
    function = transposed._transposed_kernel.function
    kinds = dict.fromkeys(function.arg_names, "i32")
    kinds |= dict.fromkeys(("x", "bias", "b", "out", "h"), "*bf16")
    kinds |= dict.fromkeys(("scales", "book"), "*fp32")
    kinds |= {"codes": "*u8", "ends": "*i32", "factor": "fp32"}
    return shared_bytes(function, kinds, constants, (), capability, tile.num_warps, tile.num_stages)


if __name__ == "__main__":
    print(json.dumps(bytes_of_products(*map(int, sys.argv[1:]))))
