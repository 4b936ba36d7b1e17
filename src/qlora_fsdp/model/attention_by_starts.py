"""Attention in plain torch that knows of rows what kernels like varlen know: where they start, and nothing else.

It stands in for these kernels where they can't run, in the trial of packing (row_trial.py). What they leave out of a
model's attention it leaves out too, so that a model which needs more is found out.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface

BY_STARTS = "qlora_fsdp_by_starts"  # what varlen computes
BY_STARTS_AND_MORE = "qlora_fsdp_by_starts_and_more"  # what FlashAttention in transformers computes


def register_stand_ins() -> None:
    """Put both functions into transformers' registry of attention."""
    AttentionInterface.register(BY_STARTS, attend_by_starts)
    AttentionInterface.register(BY_STARTS_AND_MORE, partial(attend_by_starts, does_more=True))


def attend_by_starts(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    cu_seq_lens_q: Tensor | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    does_more: bool = False,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Causal attention within rows.

    Args:
        module: the attention layer that calls.
        query: [B, H, L, D].
        key: [B, H_kv, L, D]; H is a multiple of H_kv.
        value: like `key`.
        attention_mask: not used.
        dropout: not used; the small model has none.
        scaling: factor of the logits; None for 1 / sqrt(D).
        sliding_window: how many tokens a query sees, itself included; None for all before it.
        cu_seq_lens_q: int32 [rows + 1], where rows start in the flattened B * L tokens.
        softcap: what FlashAttention caps logits at, and varlen does not.
        s_aux: [H], a sink for each head, likewise.
        does_more: compute what FlashAttention computes.
        **kwargs: what transformers passes to other kernels; not used.

    Returns:
        [B, L, H, D], and None for the attention weights.

    Raises:
        ValueError: the layer hands no starts down.
    """
    if cu_seq_lens_q is None:
        raise ValueError(f"{type(module).__name__} is not told where rows start")
    batch, num_heads, length, size = query.shape
    key, value = (tensor.repeat_interleave(num_heads // tensor.shape[1], dim=1) for tensor in (key, value))
    logits = query @ key.mT * (size**-0.5 if scaling is None else scaling)
    if does_more and softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    tokens = torch.arange(batch * length, device=query.device)
    row = torch.bucketize(tokens, cu_seq_lens_q[1:].long(), right=True).view(batch, 1, length)
    ago = tokens[:length, None] - tokens[:length]
    window = length if sliding_window is None else sliding_window
    sees = (row[..., :, None] == row[..., None, :]) & (ago >= 0) & (ago < window)
    logits = logits.masked_fill(~sees, float("-inf"))
    if does_more and s_aux is not None:
        logits = torch.cat([logits, s_aux.view(1, -1, 1, 1).expand(batch, -1, length, 1)], dim=-1)
    shares = F.softmax(logits, dim=-1)[..., :length]
    return (shares @ value).transpose(1, 2).contiguous(), None
