"""Triton kernels that draw a token for each row of logits, and give its log-probability. Imported on GPUs only.

A vocabulary of 128,000 tokens and 256 texts make 131 MB of float32 numbers. torch copies logits to float32, divides,
sums, draws and compares in a pass over memory each. Here the logits are read once, in the dtype that they have.
"""

# Triton reads the kernels' source: annotations must stay objects, so there is no `from __future__ import annotations`.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator"

import torch
from torch import Tensor

from qlora_fsdp.layers.kernels.launch import kernel, tl, triton

COLUMNS = 4096  # of a program


@triton.jit
def _mix(values):
    """uint64 numbers that have nothing in common with these, as `sampling._mix` makes them."""
    mixed = values + 0x9E3779B97F4A7C15
    mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9
    mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB
    return mixed ^ (mixed >> 31)


@kernel
@triton.jit
def _draw_kernel(
    logits, keys, positions, best, chosen, width, row_stride, inverse_temperature,
    GOLDEN: tl.constexpr, FACTOR_0: tl.constexpr, FACTOR_1: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The largest of logit / temperature - log(exponential number), and its column, of a part of a row."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_column = columns < width
    value = tl.load(logits + row * row_stride + columns, mask=is_column, other=float("-inf")).to(tl.float32)
    mixed = _mix(tl.load(keys + row).to(tl.uint64) ^ _mix(tl.load(positions + row).to(tl.uint64)))
    bits = columns.to(tl.uint32) * GOLDEN + mixed.to(tl.uint32)
    bits ^= bits >> 16
    bits *= FACTOR_0
    bits += (mixed >> 32).to(tl.uint32)
    bits ^= bits >> 15
    bits *= FACTOR_1
    bits ^= bits >> 16
    uniform = ((bits >> 9).to(tl.float32) + 0.5) * 1.1920928955078125e-07
    score = value * inverse_temperature - tl.log(-tl.log(uniform))
    score = tl.where(value != value, float("inf"), score)  # a NaN is drawn, as torch's argmax would take it
    place = row * tl.num_programs(1) + tl.program_id(1)
    top, at = tl.max(score, 0, return_indices=True)
    tl.store(best + place, top)
    tl.store(chosen + place, tl.program_id(1).to(tl.int64) * COLUMNS + at)


@kernel
@triton.jit
def _log_sum_kernel(logits, out, width, row_stride, inverse_temperature, COLUMNS: tl.constexpr):
    """The logarithm of the sum of exponentials of a part of a row, divided by the temperature."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    value = tl.load(logits + row * row_stride + columns, mask=columns < width, other=float("-inf")).to(tl.float32)
    value *= inverse_temperature
    top = tl.max(value, 0)
    shift = tl.where(top == float("-inf"), 0.0, top)
    total = tl.sum(tl.exp(value - shift), 0)
    tl.store(out + row * tl.num_programs(1) + tl.program_id(1), tl.log(total) + shift)


def draw(logits: Tensor, temperature: float, keys: Tensor, positions: Tensor, factors: tuple[int, int, int]) -> Tensor:
    """Tokens int64 [rows], drawn by the softmax of logits / temperature.

    The largest of probabilities that are divided by exponential numbers is a token drawn by them, and so is the largest
    of their logarithms, for which nothing has to be summed up.

    Args:
        logits: [rows, vocabulary], whose last dimension is contiguous.
        temperature: above 0.
        keys: int64 [rows], of which, with the positions, exponential numbers are made (`Draws.exponentials`).
        positions: int64 [rows].
        factors: of the hash, as 32-bit numbers, signed or not.
    """
    num_rows, width = logits.shape
    num_parts = triton.cdiv(width, COLUMNS)
    best = torch.empty(num_rows, num_parts, dtype=torch.float32, device=logits.device)
    chosen = torch.empty(num_rows, num_parts, dtype=torch.int64, device=logits.device)
    golden, factor_0, factor_1 = (factor % 2**32 for factor in factors)
    _draw_kernel[(num_rows, num_parts)](
        logits,
        keys,
        positions,
        best,
        chosen,
        width,
        logits.stride(0),
        1 / temperature,
        GOLDEN=golden,
        FACTOR_0=factor_0,
        FACTOR_1=factor_1,
        COLUMNS=COLUMNS,
        num_warps=8,
    )
    return chosen.gather(1, best.argmax(1, keepdim=True))[:, 0]


def log_probs(logits: Tensor, chosen: Tensor, temperature: float) -> Tensor:
    """Log-probabilities of the chosen tokens under the softmax of logits / temperature, float32 [rows]."""
    num_rows, width = logits.shape
    num_parts = triton.cdiv(width, COLUMNS)
    sums = torch.empty(num_rows, num_parts, dtype=torch.float32, device=logits.device)
    _log_sum_kernel[(num_rows, num_parts)](
        logits, sums, width, logits.stride(0), 1 / temperature, COLUMNS=COLUMNS, num_warps=8
    )
    return logits.gather(1, chosen[:, None])[:, 0].float() / temperature - sums.logsumexp(1)
