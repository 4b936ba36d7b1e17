"""Print how many bytes of shared memory the gate's kernels take of a GPU, which need not be here.

A program of its own, because the process of the tests has Triton interpret kernels, and such a process can't compile.
Arguments: compute capability, as 89; rank; number of stages.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from qlora_fsdp.layers.kernels import triton_gate
from tests.helpers.compile_kernel import shared_bytes

FLOATS = ("grad_h", "grad_factors", "h_down", "scaling_gate", "scaling_up")
SIZES = ("num_rows", "width", "rows_a_split", "columns_a_split", "rank_gate", "rank_up", "rank_down")
KERNELS = [
    (triton_gate._gate_forward_kernel, triton_gate.FORWARD),
    (triton_gate._gate_backward_down_kernel, triton_gate.DOWN),
    (triton_gate._gate_backward_along_kernel, triton_gate.ALONG),
]


def bytes_of_gate(function: Any, tiles: triton_gate.GateTiles, capability: int, rank: int, num_stages: int) -> int:
    """Compile one kernel for bfloat16."""
    options = triton_gate.tile_options(tiles, "silu")
    constants = {**options, "RANK": max(16, rank), "RANK_DOWN": max(16, rank), "IS_WHOLE": True}
    names = function.arg_names
    kinds = dict.fromkeys(names, "*bf16")
    kinds |= {name: "fp32" if name.startswith("scaling") else "*fp32" for name in FLOATS if name in names}
    kinds |= {name: "i32" for name in SIZES if name in names}
    return shared_bytes(function, kinds, constants, (), capability, tiles.num_warps, num_stages)


if __name__ == "__main__":
    capability, rank, num_stages = map(int, sys.argv[1:])
    kernels = [pair for pair in KERNELS if rank <= 16 or pair[0] is not KERNELS[1][0]]
    print(json.dumps([bytes_of_gate(k.function, tiles, capability, rank, num_stages) for k, tiles in kernels]))
