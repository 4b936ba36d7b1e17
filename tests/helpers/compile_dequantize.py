"""Print how many bytes of shared memory the kernels that dequantize take of a GPU, which need not be here.

A program of its own, as compile_products.py. Argument: compute capability, as 89.
"""

from __future__ import annotations

import json
import sys

from qlora_fsdp.layers.kernels import triton_dequantize
from tests.helpers.compile_kernel import shared_bytes

# Of a part of a weight, numbers may be anything.
UNALIGNED = ("num_rows", "num_blocks", "num_groups", "first_row", "first_block", "row_blocks", "group_rows")


def bytes_of_dequantize(capability: int, quantization: str) -> int:
    """Compile the kernel for bfloat16; scales of int4 are in bfloat16 too."""
    if quantization == "fp8":
        function = triton_dequantize._dequantize_fp8_kernel.function
        constants = {"ROWS": 4, "COLUMNS": 1024}
    else:
        function = triton_dequantize._dequantize_kernel.function
        blocksize = 16 if quantization == "nvfp4" else 32
        constants = {"BLOCKSIZE": blocksize, "FACTOR": "", "ROWS": 4, "BLOCKS": 1024 // blocksize}
        constants |= {"NESTED": quantization == "nested", "GLOBAL": quantization == "nvfp4"}
    scales = {"int4": "*bf16", "nested": "*u8", "nvfp4": "*u8", "fp8": "*fp32"}[quantization]
    kinds = dict.fromkeys(function.arg_names, "i32")
    kinds |= dict.fromkeys(("nested", "global_scales", "book", "scale_book", "factors"), "*fp32")
    kinds |= {"codes": "*u8", "out": "*bf16", "scales": scales}
    return shared_bytes(function, kinds, constants, UNALIGNED, capability, 4, 3)


if __name__ == "__main__":
    print(json.dumps([bytes_of_dequantize(int(sys.argv[1]), kind) for kind in ("int4", "nested", "nvfp4", "fp8")]))
