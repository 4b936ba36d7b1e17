"""Let `scaled_dot_product_attention` on meta allocate what the kernel on a GPU would: torch picks none for meta."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn import functional as F

aten: Any = torch.ops.aten
_PLAIN = F.scaled_dot_product_attention


@contextmanager
def fused_attention(is_cuda: bool) -> Iterator[None]:
    """While it lasts, attention is one kernel that keeps its inputs, its output and a log-sum per query.

    Without a mask that is flash attention, if queries and values are equally wide and in 16 bits; else it is the
    memory-efficient kernel, which adds a mask as a bias. On a CPU flash attention takes masks too. A matrix of all
    queries and keys never exists.
    """
    # A mode of torch would be off while backward computes a layer again.
    with patch.object(F, "scaled_dot_product_attention", partial(_attention, is_cuda)):
        yield


# It has the parameters of torch's scaled_dot_product_attention, for which it stands.
def _attention(
    is_cuda: bool,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    bias = attn_mask
    if bias is not None and bias.dtype == torch.bool:
        bias = torch.empty(bias.shape, dtype=query.dtype, device=bias.device)
    if bias is not None:
        bias = bias.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])
    if not is_cuda and query.shape[-1] != value.shape[-1]:  # no kernel on a CPU: matrix products
        return _PLAIN(query, key, value, bias, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    if not is_cuda:
        found = aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, dropout_p, is_causal, attn_mask=bias, scale=scale
        )
    elif bias is None and query.shape[-1] == value.shape[-1] and query.itemsize == 2:
        found = aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, scale=scale)
    else:
        found = aten._scaled_dot_product_efficient_attention(
            query, key, value, bias, True, dropout_p, is_causal, scale=scale
        )
    output: Tensor = found[0]
    return output
