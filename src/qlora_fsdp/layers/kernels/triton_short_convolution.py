"""Triton kernels of a short causal convolution along tokens, each channel by itself (layers/recurrent/convolution.py).

Forward reads a tile of tokens once for each tap. Backward makes the sums before the activation again.
"""

# Triton reads the kernels' source: annotations must stay objects, so there is no `from __future__ import annotations`.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator"

import torch
from torch import Tensor

from qlora_fsdp.layers.kernels.launch import kernel, tl, triton

TOKENS = 32  # of a tile
CHANNELS = 128


@triton.jit
def _convolve(x, weight, bias, rows, tokens, channels, row, num_tokens, width, stride_t, TAPS: tl.constexpr, HAS_BIAS):
    """Sums over the taps, [tokens, channels], float32. `row` is the row of each of the tokens."""
    is_channel = channels < width
    total = tl.zeros([tokens.shape[0], channels.shape[0]], tl.float32)
    if HAS_BIAS:
        total += tl.load(bias + channels, mask=is_channel, other=0.0).to(tl.float32)[None, :]
    for tap in tl.static_range(TAPS):
        source = tokens - (TAPS - 1 - tap)
        is_source = (source >= 0) & (source < num_tokens)
        is_seen = is_source & (tl.load(rows + source, mask=is_source, other=-1) == row)
        factor = tl.load(weight + channels * TAPS + tap, mask=is_channel, other=0.0).to(tl.float32)
        places = source.to(tl.int64)[:, None] * stride_t + channels[None, :]
        tile = tl.load(x + places, mask=is_seen[:, None] & is_channel[None, :], other=0.0)
        total += tile.to(tl.float32) * factor[None, :]
    return total


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
):
    batch = tl.program_id(2).to(tl.int64)
    tokens = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    channels = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    is_token = tokens < num_tokens
    x += batch * stride_b
    rows += batch * num_tokens
    y += batch * num_tokens * width
    row = tl.load(rows + tokens, mask=is_token, other=-2)
    total = _convolve(x, weight, bias, rows, tokens, channels, row, num_tokens, width, stride_t, TAPS, HAS_BIAS)
    if HAS_SILU:
        total *= tl.sigmoid(total)
    places = tokens.to(tl.int64)[:, None] * width + channels[None, :]
    is_there = is_token[:, None] & (channels < width)[None, :]
    tl.store(y + places, total.to(y.dtype.element_ty), mask=is_there)


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
):
    batch = tl.program_id(2).to(tl.int64)
    tokens = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    channels = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    is_token = tokens < num_tokens
    is_channel = channels < width
    x += batch * stride_b
    rows += batch * num_tokens
    grad_y += batch * num_tokens * width
    grad_x += batch * num_tokens * width
    row = tl.load(rows + tokens, mask=is_token, other=-2)
    grad = tl.zeros([TOKENS, CHANNELS], tl.float32)
    for tap in tl.static_range(TAPS):
        target = tokens + (TAPS - 1 - tap)
        is_target = target < num_tokens
        is_seen = is_target & (tl.load(rows + target, mask=is_target, other=-1) == row)
        places = target.to(tl.int64)[:, None] * width + channels[None, :]
        part = tl.load(grad_y + places, mask=is_seen[:, None] & is_channel[None, :], other=0.0).to(tl.float32)
        if HAS_SILU:
            total = _convolve(x, weight, bias, rows, target, channels, row, num_tokens, width, stride_t, TAPS, HAS_BIAS)
            sigmoid = tl.sigmoid(total)
            part *= sigmoid * (1.0 + total * (1.0 - sigmoid))
        factor = tl.load(weight + channels * TAPS + tap, mask=is_channel, other=0.0).to(tl.float32)
        grad += part * factor[None, :]
    places = tokens.to(tl.int64)[:, None] * width + channels[None, :]
    tl.store(grad_x + places, grad.to(grad_x.dtype.element_ty), mask=is_token[:, None] & is_channel[None, :])


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
        "num_warps": 4,
    }
