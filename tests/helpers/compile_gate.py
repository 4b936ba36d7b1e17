"""Print how many bytes of shared memory the gate's kernels take of a GPU, which need not be here.

A program of its own, because the process of the tests has Triton interpret kernels, and such a process can't compile.
Arguments: compute capability, as 89; rank; number of stages.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from triton import compile as compile_kernel
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from qlora_fsdp.layers.kernels import triton_gate, triton_gate_backward

FLOATS = ("grad_h", "grad_factors", "h_down", "scaling_gate", "scaling_up")
SIZES = ("num_rows", "width", "rows_a_split", "columns_a_split", "rank_gate", "rank_up", "rank_down")
KERNELS = [
    (triton_gate._gate_forward_kernel, triton_gate.FORWARD),
    (triton_gate_backward._gate_backward_down_kernel, triton_gate_backward.DOWN),
    (triton_gate_backward._gate_backward_along_kernel, triton_gate_backward.ALONG),
]


def shared_bytes(function: Any, tiles: triton_gate.GateTiles, capability: int, rank: int, num_stages: int) -> int:
    """Compile one kernel for bfloat16."""
    options = triton_gate.tile_options(tiles, "silu")
    constants = {**options, "RANK": max(16, rank), "RANK_DOWN": max(16, rank), "IS_WHOLE": True}
    names = function.arg_names
    kinds = {name: "constexpr" if name in constants else "*bf16" for name in names}
    kinds |= {name: "fp32" if name.startswith("scaling") else "*fp32" for name in FLOATS if name in names}
    kinds |= {name: "i32" for name in SIZES if name in names}
    aligned = {
        (at,): [["tt.divisibility", 16]] for at, name in enumerate(names) if kinds[name] not in ("constexpr", "fp32")
    }
    values = {(names.index(name),): value for name, value in constants.items() if name in names}
    source = ASTSource(fn=function, signature=kinds, constexprs=values, attrs=aligned)
    settings = {"num_warps": tiles.num_warps, "num_stages": num_stages}
    made = compile_kernel(source, target=GPUTarget("cuda", capability, 32), options=settings)
    return int(made.metadata.shared)


if __name__ == "__main__":
    capability, rank, num_stages = map(int, sys.argv[1:])
    kernels = [pair for pair in KERNELS if rank <= 16 or pair[0] is not KERNELS[1][0]]
    print(json.dumps([shared_bytes(k.function, tiles, capability, rank, num_stages) for k, tiles in kernels]))
