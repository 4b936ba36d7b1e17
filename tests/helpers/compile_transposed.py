"""Print how many bytes of shared memory the kernel of transposed products takes of a GPU, which need not be here.

A program of its own, as compile_products.py. Arguments: compute capability, as 89; rows of an expert.
"""

from __future__ import annotations

import json
import sys

import torch
from triton import compile as compile_kernel
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from qlora_fsdp.layers.kernels import triton_transposed_products as transposed
from qlora_fsdp.layers.kernels.triton_products import lookup
from qlora_fsdp.layers.quantized.codes import code_values
from qlora_fsdp.layers.quantized.format import Format


def shared_bytes(capability: int, rows: int) -> int:
    """Compile the kernel for nested scales, biases and adapters, in bfloat16."""
    tile = transposed.transposed_tile(2880, rows * 32, 32, True)
    assert tile is not None
    constants = {
        "BLOCKSIZE": 64,
        "NESTED": True,
        "LOOKUP": lookup(code_values(Format("nf4")), torch.bfloat16),
        "BIAS": True,
        "RANK": 16,
        "OUTPUTS": 64,
        "INPUTS": transposed.INPUTS,
        "ROWS": tile.rows,
    }
    kinds = {"x": "*bf16", "bias": "*bf16", "b": "*bf16", "out": "*bf16", "h": "*bf16", "codes": "*u8", "scales": "*u8"}
    kinds |= {"nested": "*fp32", "book": "*fp32", "scale_book": "*fp32", "ends": "*i32", "factor": "fp32"}
    function = transposed._transposed_kernel.function
    names = function.arg_names
    signature = {name: "constexpr" if name in constants else kinds.get(name, "i32") for name in names}
    aligned = {
        (at,): [["tt.divisibility", 16]]
        for at, name in enumerate(names)
        if signature[name] not in ("constexpr", "fp32") and name not in ("scale_stride", "num_groups")
    }
    values = {(names.index(name),): value for name, value in constants.items()}
    source = ASTSource(fn=function, signature=signature, constexprs=values, attrs=aligned)
    options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
    made = compile_kernel(source, target=GPUTarget("cuda", capability, 32), options=options)
    return int(made.metadata.shared)


if __name__ == "__main__":
    print(json.dumps(shared_bytes(*map(int, sys.argv[1:]))))
