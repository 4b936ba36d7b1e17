"""FlashAttention-4 (github.com/Dao-AILab/flash-attention, `flash_attn.cute`) on Hopper and Blackwell GPUs.

These kernels are faster than torch's, most of all over packed rows: `pip install flash-attn-4`. The package is a beta,
and compiles its kernels on the machine that runs them. A run that does not need them must neither fail nor compute
something else because of them. So `why_not` first compares them with torch on a little data, at the model's head sizes.

Shapes: [B, L, H, D], B sequences of L tokens, H heads of size D; T tokens in all.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

NOT_INSTALLED = "the package flash-attn-4 is not installed"
CAPABILITIES = (9, 10, 11)  # major compute capabilities that it has forward and backward kernels for
COMPILED = "~/.cache/qlora_fsdp/flash_attention_4"  # its own default is a folder in /tmp that anyone could create
TOLERANCE = 2e-2  # largest error over the result's norm; in bfloat16, 4e-3 is usual

ROWS = (300, 212)  # tokens of the rows in the trial: more than one tile, for which other kernels are compiled

# Packed rows go to these kernels if they have at least this many tokens on average. Shorter rows go to torch's varlen
# kernel, because here every tile searches all rows for its own. On one H200, with 16,384 tokens and 32 and 8 heads of
# 128, forward and backward take 1.8 ms here and 1.5 in torch for rows of 64 tokens, 1.4 and 1.5 for rows of 100, and
# 1.3 and 2.1 for rows of 512 (docs/benchmarks.md).
MIN_MEAN_ROW = 100


def attention(q_BLHD: Tensor, k_BLHD: Tensor, v_BLHD: Tensor, scale: float | None) -> Tensor:
    """Causal attention within each sequence. If k and v have fewer heads, several heads of q share one.

    Args:
        q_BLHD: queries, bf16 or fp16.
        k_BLHD: keys.
        v_BLHD: values.
        scale: factor of the logits; None for 1 / sqrt(D).
    """
    return _result(_functions()[0](q_BLHD, k_BLHD, v_BLHD, causal=True, softmax_scale=scale))


def packed_attention(
    q_THD: Tensor, k_THD: Tensor, v_THD: Tensor, starts: Tensor, longest: int, scale: float | None
) -> Tensor:
    """Causal attention within each row of a packed batch.

    Args:
        q_THD: queries of all rows, one row after another.
        k_THD: keys.
        v_THD: values.
        starts: int32 [rows + 1], where rows start, and last T.
        longest: tokens of the longest row.
        scale: factor of the logits; None for 1 / sqrt(D).
    """
    rows = {"cu_seqlens_q": starts, "cu_seqlens_k": starts, "max_seqlen_q": longest, "max_seqlen_k": longest}
    return _result(_functions()[1](q_THD, k_THD, v_THD, causal=True, softmax_scale=scale, **rows))


@cache
def why_not(num_heads: int, num_key_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> str | None:
    """Why these kernels can't be used for such heads here; None if they compute what torch computes."""
    if torch.cuda.get_device_capability(device)[0] not in CAPABILITIES:
        return "it has kernels for Hopper and Blackwell GPUs only"
    try:
        if find_spec("flash_attn") is None or find_spec("flash_attn.cute") is None:
            return NOT_INSTALLED
        error = _largest_error(num_heads, num_key_heads, head_dim, dtype, device)
    except Exception as failure:  # whatever fails in the package or its compiler, torch's kernels work
        return f"flash-attn-4 does not run here ({type(failure).__name__}: {' '.join(str(failure).split())[:200]})"
    return None if error < TOLERANCE else f"flash-attn-4's results differ from torch's by {error:.1%} here"


def _result(returned: Any) -> Tensor:
    """The attention's output alone: some versions of the package return the log-sums of the logits with it."""
    found: Tensor = returned[0] if isinstance(returned, tuple) else returned
    return found


@cache
def _functions() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The package's functions for whole sequences and for packed rows. It keeps compiled kernels for later runs."""
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", str(Path(COMPILED).expanduser()))
    warnings.filterwarnings("ignore", message="Argument aux_data")  # is of no use to a caller
    from flash_attn.cute import flash_attn_func, flash_attn_varlen_func

    return flash_attn_func, flash_attn_varlen_func


def _largest_error(
    num_heads: int, num_key_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
) -> float:
    """The largest error of output and gradients for two rows, apart and packed: distance from torch's over its norm."""
    generator = torch.Generator(device).manual_seed(0)
    heads = (num_heads, num_key_heads, num_key_heads, num_heads)
    shapes = [(sum(ROWS), number, head_dim) for number in heads]
    *inputs, weight = (torch.randn(shape, dtype=dtype, device=device, generator=generator) for shape in shapes)
    q, k, v = (tensor.requires_grad_() for tensor in inputs)
    starts = torch.tensor([0, ROWS[0], sum(ROWS)], dtype=torch.int32, device=device)

    def exact(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (tensor.transpose(1, 2).float() for tensor in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)

    def rows(function: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Tensor:
        parts = zip(q[None].split(ROWS, 1), k[None].split(ROWS, 1), v[None].split(ROWS, 1), strict=True)
        return torch.cat([function(*part) for part in parts], 1)[0]

    def outcome(output: Tensor) -> list[Tensor]:
        return [output.detach(), *torch.autograd.grad((output * weight).sum(), (q, k, v))]

    wanted = outcome(rows(exact))
    whole = rows(lambda q, k, v: attention(q, k, v, None))
    found = [outcome(whole), outcome(packed_attention(q, k, v, starts, max(ROWS), None))]
    errors = [(a - b).norm() / b.norm() for tensors in found for a, b in zip(tensors, wanted, strict=True)]
    return float(torch.stack(errors).max())
