"""Print how many bytes of shared memory the kernel of attention over slots takes of a GPU, which need not be here.

A program of its own, as compile_products.py. Arguments: compute capability, as 89; size of a head.
"""

from __future__ import annotations

import json
import sys

from triton import compile as compile_kernel
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from qlora_fsdp.layers.kernels import triton_slots


def shared_bytes(capability: int, size: int) -> int:
    """Compile the kernel for texts that are shared by several programs, with a window, a cap and sinks, in bfloat16."""
    tile = triton_slots.slot_tile(size, size)
    constants = {
        "GROUPS": 16,
        "KEY_SIZE": size,
        "VALUE_SIZE": size,
        "KEYS": tile.keys,
        "PARTS": 4,
        "HAS_WINDOW": True,
        "HAS_CAP": True,
        "HAS_SINKS": True,
    }
    function = triton_slots._attend_kernel.function
    kinds = {}
    for name in function.arg_names:
        if name in constants:
            kinds[name] = "constexpr"
        elif name in ("query", "keys", "values", "sinks"):
            kinds[name] = "*bf16"
        elif name in ("out", "tops", "sums"):
            kinds[name] = "*fp32"
        elif name == "positions":
            kinds[name] = "*i64"
        else:
            kinds[name] = "fp32" if name in ("scale", "softcap") else "i32"
    names = function.arg_names
    aligned = {
        (at,): [["tt.divisibility", 16]]
        for at, name in enumerate(names)
        if kinds[name] not in ("constexpr", "fp32") and name not in ("num_heads", "groups", "window")
    }
    values = {(names.index(name),): value for name, value in constants.items()}
    source = ASTSource(fn=function, signature=kinds, constexprs=values, attrs=aligned)
    options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
    made = compile_kernel(source, target=GPUTarget("cuda", capability, 32), options=options)
    return int(made.metadata.shared)


if __name__ == "__main__":
    print(json.dumps(shared_bytes(*map(int, sys.argv[1:]))))
