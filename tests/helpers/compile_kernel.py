"""Compile a kernel for a GPU that need not be here, and tell how many bytes of shared memory it takes.

For programs of their own, because the process of the tests has Triton interpret kernels, and such a process can't
compile.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from triton import compile as compile_kernel
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


def shared_bytes(
    function: Any,
    kinds: Mapping[str, str],
    constants: Mapping[str, Any],
    unaligned: Collection[str],
    capability: int,
    num_warps: int,
    num_stages: int,
) -> int:
    """Compile the kernel and return its bytes of shared memory.

    Args:
        function: Triton's, without this project's launcher around it.
        kinds: of its arguments but the constants, as Triton names them: `*bf16`, `i32`.
        constants: its arguments that are compiled in. Those that it has not are left out.
        unaligned: arguments that are no multiple of 16 as a rule. Floats and constants need not be named.
        capability: of the GPU, as 89.
        num_warps: of a program.
        num_stages: tiles in shared memory at a time.
    """
    names = function.arg_names
    signature = {name: "constexpr" if name in constants else kinds[name] for name in names}
    aligned = {
        (at,): [["tt.divisibility", 16]]
        for at, name in enumerate(names)
        if signature[name] not in ("constexpr", "fp32") and name not in unaligned
    }
    values = {(names.index(name),): value for name, value in constants.items() if name in names}
    source = ASTSource(fn=function, signature=signature, constexprs=values, attrs=aligned)
    options = {"num_warps": num_warps, "num_stages": num_stages}
    made = compile_kernel(source, target=GPUTarget("cuda", capability, 32), options=options)
    return int(made.metadata.shared)
