"""A Triton kernel that converts several small tensors to another dtype. Imported on GPUs only.

A layer has fourteen adapter matrices, and forward and backward convert each. Each is so small that starting a kernel
takes most of its time. torch's own multi-tensor kernels (`torch._foreach_copy_`) are for large tensors: one of their
programs has 65,536 elements, which is all of a matrix of rank 16.
"""

# Triton reads the kernels' source: annotations must stay objects, so there is no `from __future__ import annotations`.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator"

from collections.abc import Sequence

from torch import Tensor

from qlora_fsdp.layers.kernels.launch import kernel, tl, triton

MAX_TENSORS = 6  # of a launch: A and B of three layers that share an input
BLOCK = 1024  # elements that a program converts


@triton.jit
def _convert(block, source, target, size, factor, BLOCK: tl.constexpr):
    places = block * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(source + places, mask=places < size)
    tl.store(target + places, (values * factor).to(target.dtype.element_ty), mask=places < size)


@kernel
@triton.jit
def _convert_kernel(
    source_0, source_1, source_2, source_3, source_4, source_5,
    target_0, target_1, target_2, target_3, target_4, target_5,
    size_0, size_1, size_2, size_3, size_4, size_5,
    factor_0, factor_1, factor_2, factor_3, factor_4, factor_5,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One program converts a block of one tensor."""
    block = tl.program_id(0)
    end_0 = tl.cdiv(size_0, BLOCK)
    end_1 = end_0 + tl.cdiv(size_1, BLOCK)
    end_2 = end_1 + tl.cdiv(size_2, BLOCK)
    end_3 = end_2 + tl.cdiv(size_3, BLOCK)
    end_4 = end_3 + tl.cdiv(size_4, BLOCK)
    if block < end_0:
        _convert(block, source_0, target_0, size_0, factor_0, BLOCK)
    elif block < end_1:
        _convert(block - end_0, source_1, target_1, size_1, factor_1, BLOCK)
    elif block < end_2:
        _convert(block - end_1, source_2, target_2, size_2, factor_2, BLOCK)
    elif block < end_3:
        _convert(block - end_2, source_3, target_3, size_3, factor_3, BLOCK)
    elif block < end_4:
        _convert(block - end_3, source_4, target_4, size_4, factor_4, BLOCK)
    else:
        _convert(block - end_4, source_5, target_5, size_5, factor_5, BLOCK)


def convert(sources: Sequence[Tensor], targets: Sequence[Tensor], factors: Sequence[float]) -> None:
    """Write each source times its factor into its target, of the same shape; all are contiguous."""
    for start in range(0, len(sources), MAX_TENSORS):
        some = slice(start, start + MAX_TENSORS)
        sizes = [source.numel() for source in sources[some]]
        missing = MAX_TENSORS - len(sizes)
        _convert_kernel[(sum(triton.cdiv(size, BLOCK) for size in sizes),)](
            *sources[some],
            *[sources[start]] * missing,  # of tensors that have no program
            *targets[some],
            *[targets[start]] * missing,
            *sizes,
            *[0] * missing,
            *factors[some],
            *[1.0] * missing,
            BLOCK=BLOCK,
        )
