"""Triton kernels of a short causal convolution along tokens, each channel by itself (layers/recurrent/replace.py).

A program goes from token to token, with the last ones in registers, so that each value is read once.
"""

# Triton reads the kernels' source: annotations must stay objects, so there is no `from __future__ import annotations`.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator"

import torch
from torch import Tensor

from qlora_fsdp.layers.kernels.launch import kernel, tl, triton

MAX_TAPS = 4
TOKENS = 64  # of a program; at its beginning it reads the three before them, or in backward behind them, once more
CHANNELS = 512
UNROLLED = 4  # tokens that are loaded together


@triton.jit
def _load_token(x, rows, token, num_tokens, stride_t, channels, is_channel):
    """The channels of a token, float32, and the row that it belongs to; 0 and -1 before the first, behind the last."""
    tokens = tl.zeros(channels.shape, tl.int32) + token  # the same for all channels
    is_there = is_channel & (tokens >= 0) & (tokens < num_tokens)
    values = tl.load(x + tokens.to(tl.int64) * stride_t + channels, mask=is_there, other=0.0).to(tl.float32)
    return values, tl.load(rows + tokens, mask=is_there, other=-1)


@triton.jit
def _store_token(x, values, token, num_tokens, width, channels, is_channel):
    """The reverse, for tokens that follow one another."""
    tokens = tl.zeros(channels.shape, tl.int32) + token
    is_there = is_channel & (tokens >= 0) & (tokens < num_tokens)
    tl.store(x + tokens.to(tl.int64) * width + channels, values.to(x.dtype.element_ty), mask=is_there)


@triton.jit
def _load_tap(weight, channels, is_channel, BACK: tl.constexpr, TAPS: tl.constexpr):
    """What the value of BACK tokens ago is multiplied by."""
    taps = tl.zeros(channels.shape, tl.float32)
    if BACK < TAPS:
        taps += tl.load(weight + channels * TAPS + (TAPS - 1 - BACK), mask=is_channel, other=0.0).to(tl.float32)
    return taps


@triton.jit
def _where_same(one, other, value):
    return tl.where(one == other, value, 0.0)


@kernel
@triton.jit
def _forward_kernel(
    x,
    weight,
    bias,
    rows,
    y,
    num_tokens,
    width,
    stride_b,
    stride_t,
    TAPS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SILU: tl.constexpr,
    TOKENS: tl.constexpr,
    CHANNELS: tl.constexpr,
    UNROLLED: tl.constexpr,
):
    batch = tl.program_id(2).to(tl.int64)
    first = tl.program_id(0) * TOKENS
    channels = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    is_channel = channels < width
    x += batch * stride_b
    rows += batch * num_tokens
    y += batch * num_tokens * width
    w0 = _load_tap(weight, channels, is_channel, 0, TAPS)
    w1 = _load_tap(weight, channels, is_channel, 1, TAPS)
    w2 = _load_tap(weight, channels, is_channel, 2, TAPS)
    w3 = _load_tap(weight, channels, is_channel, 3, TAPS)
    constant = tl.zeros([CHANNELS], tl.float32)
    if HAS_BIAS:
        constant += tl.load(bias + channels, mask=is_channel, other=0.0).to(tl.float32)
    x3, row3 = _load_token(x, rows, first - 3, num_tokens, stride_t, channels, is_channel)
    x2, row2 = _load_token(x, rows, first - 2, num_tokens, stride_t, channels, is_channel)
    x1, row1 = _load_token(x, rows, first - 1, num_tokens, stride_t, channels, is_channel)
    for start in range(0, TOKENS, UNROLLED):
        for step in tl.static_range(UNROLLED):
            token = first + start + step
            x0, row0 = _load_token(x, rows, token, num_tokens, stride_t, channels, is_channel)
            total = constant + w0 * x0
            total += w1 * _where_same(row1, row0, x1)
            total += w2 * _where_same(row2, row0, x2)
            total += w3 * _where_same(row3, row0, x3)
            if HAS_SILU:
                total *= tl.sigmoid(total)
            _store_token(y, total, token, num_tokens, width, channels, is_channel)
            x3, row3 = x2, row2
            x2, row2 = x1, row1
            x1, row1 = x0, row0


@kernel
@triton.jit
def _backward_kernel(
    x,
    weight,
    bias,
    rows,
    grad_y,
    grad_x,
    num_tokens,
    width,
    stride_b,
    stride_t,
    TAPS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SILU: tl.constexpr,
    TOKENS: tl.constexpr,
    CHANNELS: tl.constexpr,
    UNROLLED: tl.constexpr,
):
    # Forward in time as well: at a token the gradient before the activation is made, and with it that of the value
    # three tokens ago is complete.
    batch = tl.program_id(2).to(tl.int64)
    first = tl.program_id(0) * TOKENS
    channels = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    is_channel = channels < width
    x += batch * stride_b
    rows += batch * num_tokens
    grad_y += batch * num_tokens * width
    grad_x += batch * num_tokens * width
    w0 = _load_tap(weight, channels, is_channel, 0, TAPS)
    w1 = _load_tap(weight, channels, is_channel, 1, TAPS)
    w2 = _load_tap(weight, channels, is_channel, 2, TAPS)
    w3 = _load_tap(weight, channels, is_channel, 3, TAPS)
    constant = tl.zeros([CHANNELS], tl.float32)
    if HAS_BIAS:
        constant += tl.load(bias + channels, mask=is_channel, other=0.0).to(tl.float32)
    x3, row3 = _load_token(x, rows, first - 3, num_tokens, stride_t, channels, is_channel)
    x2, row2 = _load_token(x, rows, first - 2, num_tokens, stride_t, channels, is_channel)
    x1, row1 = _load_token(x, rows, first - 1, num_tokens, stride_t, channels, is_channel)
    of1 = tl.zeros([CHANNELS], tl.float32)
    of2 = tl.zeros([CHANNELS], tl.float32)
    of3 = tl.zeros([CHANNELS], tl.float32)
    for start in range(0, TOKENS + UNROLLED, UNROLLED):  # with the tokens behind, which the last ones act upon
        for step in tl.static_range(UNROLLED):
            token = first + start + step
            x0, row0 = _load_token(x, rows, token, num_tokens, stride_t, channels, is_channel)
            grad, _row = _load_token(grad_y, rows, token, num_tokens, width, channels, is_channel)
            if HAS_SILU:
                total = constant + w0 * x0
                total += w1 * _where_same(row1, row0, x1)
                total += w2 * _where_same(row2, row0, x2)
                total += w3 * _where_same(row3, row0, x3)
                sigmoid = tl.sigmoid(total)
                grad *= sigmoid * (1.0 + total * (1.0 - sigmoid))
            done = of3 + w3 * _where_same(row3, row0, grad)
            if start + step >= 3:
                end = tl.minimum(first + TOKENS, num_tokens)
                _store_token(grad_x, done, token - 3, end, width, channels, is_channel)
            of3 = of2 + w2 * _where_same(row2, row0, grad)
            of2 = of1 + w1 * _where_same(row1, row0, grad)
            of1 = w0 * grad
            x3, row3 = x2, row2
            x2, row2 = x1, row1
            x1, row1 = x0, row0


def forward(x_BTC: Tensor, weight: Tensor, bias: Tensor | None, rows: Tensor, has_silu: bool) -> Tensor:
    """The convolution [B, T, C], contiguous, of x with adjacent channels; `weight` is [C, taps], contiguous."""
    y = torch.empty(x_BTC.shape, dtype=x_BTC.dtype, device=x_BTC.device)
    given = weight if bias is None else bias
    _forward_kernel[_grid(x_BTC)](x_BTC, weight, given, rows, y, *_sizes(x_BTC), **_options(weight, bias, has_silu))
    return y


def backward(
    x_BTC: Tensor, weight: Tensor, bias: Tensor | None, rows: Tensor, grad_y: Tensor, has_silu: bool
) -> Tensor:
    """The gradient of x [B, T, C], contiguous, from that of the result, contiguous."""
    grad_x = torch.empty(x_BTC.shape, dtype=x_BTC.dtype, device=x_BTC.device)
    given = weight if bias is None else bias
    options = _options(weight, bias, has_silu)
    _backward_kernel[_grid(x_BTC)](x_BTC, weight, given, rows, grad_y, grad_x, *_sizes(x_BTC), **options)
    return grad_x


def _grid(x_BTC: Tensor) -> tuple[int, int, int]:
    return triton.cdiv(x_BTC.shape[1], TOKENS), triton.cdiv(x_BTC.shape[2], CHANNELS), x_BTC.shape[0]


def _sizes(x_BTC: Tensor) -> tuple[int, int, int, int]:
    return x_BTC.shape[1], x_BTC.shape[2], x_BTC.stride(0), x_BTC.stride(1)


def _options(weight: Tensor, bias: Tensor | None, has_silu: bool) -> dict[str, object]:
    return {
        "TAPS": weight.shape[1],
        "HAS_BIAS": bias is not None,
        "HAS_SILU": has_silu,
        "TOKENS": TOKENS,
        "CHANNELS": CHANNELS,
        "UNROLLED": UNROLLED,
        "num_warps": 4,
    }
