"""Cross-entropy of each token, and the gradient of its logits in their place. Imported on GPUs only.

Two passes over a row of logits: the first finds the log-sum, the second writes the gradient. The host asks the device
nothing, so that the loss can be part of a captured CUDA graph. Liger's fused loss (arXiv:2410.10989), whose idea this
is, reads the number of targets on the host.
"""

# Triton reads the kernel's source: annotations must stay objects, so there is no `from __future__ import annotations`.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator"

from torch import Tensor

from qlora_fsdp.common.sizes import IGNORE_INDEX
from qlora_fsdp.layers.kernels.launch import kernel, tl, triton

MAX_BLOCK = 16384


@triton.jit
def _tanh(x):
    return 2.0 * tl.sigmoid(2.0 * x) - 1.0


@kernel
@triton.jit
def _cross_entropy_kernel(
    logits,
    targets,
    losses,
    entropies,
    softcap,
    num_columns,
    row_stride,
    smoothing,
    IGNORE: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    WANTS_GRAD: tl.constexpr,
    WANTS_ENTROPY: tl.constexpr,
    HAS_SMOOTHING: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program computes one row: the token's loss, and with WANTS_GRAD the gradient of its logits.

    The entropy is the log-sum less the mean of the logits, each by its probability.
    """
    row = tl.program_id(0).to(tl.int64)
    logits += row * row_stride
    target = tl.load(targets + row)
    columns = tl.arange(0, BLOCK)
    if target == IGNORE:
        tl.store(losses + row, 0.0)
        if WANTS_ENTROPY:
            tl.store(entropies + row, 0.0)
        if WANTS_GRAD:
            for start in range(0, num_columns, BLOCK):
                tl.store(logits + start + columns, 0.0, mask=start + columns < num_columns)
        return
    largest = float("-inf")
    total = 0.0
    weighted = 0.0
    summed = 0.0
    for start in range(0, num_columns, BLOCK):
        x = tl.load(logits + start + columns, mask=start + columns < num_columns, other=float("-inf")).to(tl.float32)
        if HAS_SOFTCAP:
            x = tl.where(start + columns < num_columns, softcap * _tanh(x / softcap), float("-inf"))
        if HAS_SMOOTHING:
            summed += tl.sum(tl.where(start + columns < num_columns, x, 0.0), 0)
        new = tl.maximum(largest, tl.max(x, 0))
        if WANTS_ENTROPY:
            terms = tl.where(x > float("-inf"), tl.exp(x - new) * x, 0.0)
            weighted = weighted * tl.exp(largest - new) + tl.sum(terms, 0)
        total = total * tl.exp(largest - new) + tl.sum(tl.exp(x - new), 0)
        largest = new
    log_sum = largest + tl.log(total)
    if WANTS_ENTROPY:
        tl.store(entropies + row, log_sum - weighted / total)
    own = tl.load(logits + target).to(tl.float32)
    if HAS_SOFTCAP:
        own = softcap * _tanh(own / softcap)
    if HAS_SMOOTHING:
        own = (1.0 - smoothing) * own + smoothing * summed / num_columns
    tl.store(losses + row, log_sum - own)
    if WANTS_GRAD:
        tl.debug_barrier()  # every thread has read the target's logit before one overwrites it
        for start in range(0, num_columns, BLOCK):
            is_column = start + columns < num_columns
            x = tl.load(logits + start + columns, mask=is_column, other=0.0).to(tl.float32)
            if HAS_SOFTCAP:
                slope = _tanh(x / softcap)
                x = softcap * slope
            if HAS_SMOOTHING:
                rest = smoothing / num_columns
                wanted = tl.where(start + columns == target, 1.0 - smoothing + rest, rest)
            else:
                wanted = tl.where(start + columns == target, 1.0, 0.0)
            grad = tl.exp(x - log_sum) - wanted
            if HAS_SOFTCAP:
                grad *= 1.0 - slope * slope
            tl.store(logits + start + columns, grad.to(logits.dtype.element_ty), mask=is_column)


def cross_entropy(
    logits_NV: Tensor,
    targets_N: Tensor,
    losses_N: Tensor,
    softcap: float | None,
    grad: bool,
    entropies_N: Tensor | None = None,
    smoothing: float = 0.0,
) -> None:
    """Write each token's loss, and in the place of its logits their gradient.

    Args:
        logits_NV: in any floating dtype, contiguous rows; computed with in float32. Overwritten if `grad`.
        targets_N: int64; -100 for tokens without a loss.
        losses_N: float32, written: -log p(target), or 0 without a target.
        softcap: logits become `softcap * tanh(logits / softcap)` first; None leaves them as they are.
        grad: whether the gradient is wanted.
        entropies_N: float32, written: the entropy of what each row predicts, or 0 without a target; None: not wanted.
        smoothing: part of the loss that is the mean over all columns in place of the target's.
    """
    num_rows, num_columns = logits_NV.shape
    assert logits_NV.stride(1) == 1
    block = min(MAX_BLOCK, triton.next_power_of_2(num_columns))
    _cross_entropy_kernel[(num_rows,)](
        logits_NV,
        targets_N,
        losses_N,
        losses_N if entropies_N is None else entropies_N,
        0.0 if softcap is None else softcap,
        num_columns,
        logits_NV.stride(0),
        smoothing,
        IGNORE=IGNORE_INDEX,
        HAS_SOFTCAP=softcap is not None,
        WANTS_GRAD=grad,
        WANTS_ENTROPY=entropies_N is not None,
        HAS_SMOOTHING=smoothing > 0,
        BLOCK=block,
        num_warps=16 if block >= 8192 else 8,
    )
