"""Print how many bytes of shared memory the kernel of attention over slots takes of a GPU, which need not be here.

A program of its own, as compile_products.py. Arguments: compute capability, as 89; size of a head.
"""

from __future__ import annotations

import json
import sys

from qlora_fsdp.layers.kernels import triton_slots
from tests.helpers.compile_kernel import shared_bytes


def bytes_of_slots(capability: int, size: int) -> int:
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
    kinds = dict.fromkeys(function.arg_names, "i32")
    kinds |= dict.fromkeys(("query", "keys", "values", "sinks"), "*bf16")
    kinds |= dict.fromkeys(("out", "tops", "sums"), "*fp32")
    kinds |= {"positions": "*i64", "scale": "fp32", "softcap": "fp32"}
    unaligned = ("num_heads", "groups", "window")
    return shared_bytes(function, kinds, constants, unaligned, capability, tile.num_warps, tile.num_stages)


if __name__ == "__main__":
    print(json.dumps(bytes_of_slots(*map(int, sys.argv[1:]))))
