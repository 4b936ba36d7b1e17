"""Attention in plain torch that is told where packed rows start, and gets no mask, as GPU kernels like varlen are.

The trial of packing (row_trial.py) runs on a CPU, where those kernels can't, and uses this attention instead. It
supports exactly what the kernel that it stands for supports. So a model that needs more fails the trial, and is not
packed. Our varlen kernel computes attention sinks but does not cap logits (layers/attention/varlen.py);
FlashAttention 2 caps logits but has no sinks.

Ranks that share sequences on a CPU also train with it, because transformers' mask would cover a slice only.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface

BY_STARTS = "qlora_fsdp_by_starts"  # what varlen computes
BY_STARTS_CAPPED = "qlora_fsdp_by_starts_capped"  # what FlashAttention 2 computes
BY_SEQUENCES = "qlora_fsdp_by_sequences"  # what varlen computes where every sequence is one row
BY_SLICES = "qlora_fsdp_by_slices"  # what varlen computes for ranks that share sequences (layers/attention/sliced.py)


def register_stand_ins() -> None:
    """Put these functions into transformers' registry of attention."""
    AttentionInterface.register(BY_STARTS, attend_by_starts)
    AttentionInterface.register(BY_SEQUENCES, attend_by_sequences)
    AttentionInterface.register(BY_SLICES, attend_by_slices)
    AttentionInterface.register(BY_STARTS_CAPPED, partial(attend_by_starts, caps=True))


# transformers calls every attention function with these parameters.
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
    s_aux: Tensor | None = None,
    softcap: float | None = None,
    caps: bool = False,
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
        s_aux: [H], logits of the heads' sinks; None if they have none.
        softcap: what logits are capped at; None for no cap.
        caps: stand for FlashAttention 2, which caps logits and leaves sinks out; else for varlen.
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
    if caps and softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    tokens = torch.arange(batch * length, device=query.device)
    row = torch.bucketize(tokens, cu_seq_lens_q[1:].long(), right=True).view(batch, 1, length)
    ago = tokens[:length, None] - tokens[:length]
    window = length if sliding_window is None else sliding_window
    sees = (row[..., :, None] == row[..., None, :]) & (ago >= 0) & (ago < window)
    logits = logits.masked_fill(~sees, float("-inf"))
    if s_aux is not None and not caps:
        logits = torch.cat([logits, s_aux.view(1, -1, 1, 1).expand(batch, -1, length, 1)], dim=-1)
    shares = F.softmax(logits, dim=-1)[..., :length]
    return (shares @ value).transpose(1, 2).contiguous(), None


def attend_by_sequences(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """Causal attention within sequences, which have one row each, for layers that hand no starts down.

    Shapes: those of `attend_by_starts`.

    Raises:
        ValueError: the model makes a mask nevertheless.
    """
    if attention_mask is not None:
        raise ValueError(f"{type(module).__name__} is given a mask")
    batch, _, length, _ = query.shape
    starts = torch.arange(batch + 1, device=query.device) * length
    return attend_by_starts(module, query, key, value, None, **{**kwargs, "cu_seq_lens_q": starts})


def attend_by_slices(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """Attention for slices of sequences. All slices are here, side by side, as if each were on its own rank.

    Shapes: those of `attend_by_starts`, with slices in the place of sequences, in their order. The starts of rows count
    the tokens of all slices. In the model nothing else knows which slices belong together.
    """
    num_slices = len(query)
    query, key, value = (x.transpose(1, 2).flatten(0, 1)[None].transpose(1, 2) for x in (query, key, value))
    out, _ = attend_by_starts(module, query, key, value, attention_mask, **kwargs)
    return out.view(num_slices, -1, *out.shape[2:]), None
