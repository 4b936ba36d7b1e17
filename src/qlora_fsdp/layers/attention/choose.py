"""Attention over packed rows: the choice of a kernel, and the kernels that keep rows apart without a mask.

Kernels are chosen by name in transformers' registry. Two of them are told where rows start: `flash_attention_4`
(flash_attention_4.py), and `varlen`, which is torch's own variable-length flash attention, with sinks for models that
have them (varlen.py). Layers whose heads are too wide for both take a kernel of their own (wide.py). All others get a
block-diagonal mask, which transformers derives from the position ids.
"""

from __future__ import annotations

from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import MODEL_MAPPING, AttentionInterface, PretrainedConfig

from qlora_fsdp.common.errors import ConfigError, Problem
from qlora_fsdp.common.model_figures import HeadSizes, head_sizes
from qlora_fsdp.layers.attention import flash_attention_4 as flash_4
from qlora_fsdp.layers.attention import varlen, wide

VARLEN = "qlora_fsdp_varlen"
FLASH_4 = "qlora_fsdp_varlen_4"  # transformers takes a name with "flash" in it for one of its own packages
MAX_HEAD_DIM = 256  # of flash kernels


def choose_attention(
    wanted: str,
    config: PretrainedConfig,
    device: torch.device,
    dtype: torch.dtype,
    is_causal: bool = True,
    why_not_by_starts: str | None = None,
    deterministic: bool = False,
) -> tuple[str, str | None]:
    """Choose the attention implementation to build the model with.

    Args:
        wanted: `model.attn_implementation`; `auto` takes the fastest that computes what this model defines.
        config: the model's config.
        device: where the model runs.
        dtype: the dtype of queries, keys and values.
        is_causal: whether tokens see only what comes before them, and so never the padding at the end.
        why_not_by_starts: why kernels that are told where rows start would not compute what this model defines; None if
            they would (model/trials/packing.py).
        deterministic: `training.deterministic`: gradients are added in one order.

    Returns:
        A name in transformers' registry, and a note for the user if a faster implementation is missing, or None.

    Raises:
        ConfigError: `varlen` or `flash_attention_4` was asked for and can't run this model here.
    """
    text = config.get_text_config()
    no_kernel = _why_none_for_rows(text, device, dtype) if is_causal else "padding is masked, which it can't do"
    no_kernel = no_kernel or why_not_by_starts
    no_varlen = no_flash_4 = no_kernel  # why each of the two can't be used; None if it can
    if no_kernel is None and find_spec("torch.nn.attention.varlen") is None:
        no_varlen = "this torch has none"
    if no_kernel is None and deterministic:
        no_flash_4 = "flash-attn-4 adds gradients in any order (training.deterministic=true)"
    elif no_kernel is None and wanted in ("auto", "flash_attention_4"):
        no_flash_4 = _why_not_flash_4(text, dtype, device)
    for setting, reason in (("varlen", no_varlen), ("flash_attention_4", no_flash_4)):
        if wanted == setting and reason is not None:
            fix = "Set model.attn_implementation=auto."
            raise ConfigError([Problem(f"model.attn_implementation={setting}", f"can't be used: {reason}.", fix)])
    if no_flash_4 is None and wanted in ("auto", "flash_attention_4"):
        AttentionInterface.register(FLASH_4, flash_attention_4)
        return FLASH_4, None
    if wanted == "varlen" or (wanted == "auto" and no_varlen is None):
        AttentionInterface.register(VARLEN, varlen_attention)
        return VARLEN, _note(no_flash_4, device) if wanted == "auto" else None
    if wanted == "auto":
        is_slower = is_causal and device.type == "cuda"
        note = f"varlen attention can't be used: {no_varlen}; attention with a mask is used (slower)"
        return _with_mask(config), note if is_slower else None
    return wanted, None


def traced_attention(
    wanted: str, config: PretrainedConfig, dtype: torch.dtype, is_causal: bool, why_not_by_starts: str | None = None
) -> str:
    """The implementation of which a plan for GPUs makes meta tensors: `eager`, `sdpa` or varlen.

    FlashAttention keeps what torch's varlen attention keeps. Where neither can compute the model, another one does.

    Args:
        wanted: `model.attn_implementation`, or the name that `choose_attention` has returned.
        config: the model's config.
        dtype: the dtype of queries, keys and values.
        is_causal: whether tokens see only what comes before them.
        why_not_by_starts: see `choose_attention`.
    """
    text = config.get_text_config()
    needs_mask = not is_causal or why_not_by_starts is not None or _why_not_this_model(text, dtype) is not None
    if wanted in ("eager", "sdpa"):
        return wanted
    if not needs_mask:
        AttentionInterface.register(VARLEN, varlen_attention)
        return VARLEN
    return _with_mask(config)


def _with_mask(config: PretrainedConfig) -> str:
    """`sdpa`, or `eager` where sdpa can't compute this model, or transformers' classes of it refuse sdpa."""
    text = config.get_text_config()
    # The mapping has one class or several; a config that it lacks has remote code, and refuses nothing.
    found: list[Any] = [MODEL_MAPPING.get(type(each), ()) for each in (config, text)]
    classes = [each for some in found for each in (some if isinstance(some, tuple) else (some,))]
    caps = getattr(text, "attn_logit_softcapping", None)
    return "eager" if caps or not all(each._supports_sdpa for each in classes) else "sdpa"


def _why_none_for_rows(config: PretrainedConfig, device: torch.device, dtype: torch.dtype) -> str | None:
    """Why neither kernel that is told where rows start can compute this model's attention; None if they can."""
    if device.type != "cuda":
        return "it needs a GPU"
    if dtype in (torch.bfloat16, torch.float16) and torch.cuda.get_device_capability(device) < (8, 0):
        return "it needs a GPU of compute capability 8.0 or newer"
    return _why_not_this_model(config, dtype)


def _why_not_this_model(config: PretrainedConfig, dtype: torch.dtype) -> str | None:
    """Why the two kernels can't compute this model on any recent GPU; None if they can."""
    if dtype not in (torch.bfloat16, torch.float16):
        return f"it computes in bfloat16 or float16, not {dtype}"
    heads = _attention_heads(config)
    if not heads:
        return "its config names no attention heads"
    uneven = next((layer.key_size for layer in heads if layer.key_size % 8), None)
    if uneven is not None:
        return f"its head size {uneven} is not a multiple of 8"
    return why_not_by_starts(config)


def _why_not_flash_4(config: PretrainedConfig, dtype: torch.dtype, device: torch.device) -> str | None:
    """Why FlashAttention-4 can't compute all layers whose heads are not too wide for it; None if it can."""
    for layer in dict.fromkeys(layer for layer in _attention_heads(config) if not _is_wide(layer)):
        reason = flash_4.why_not(layer.num_heads, layer.num_key_heads, layer.key_size, dtype, device)
        if reason is not None:
            return reason
    return None


def _attention_heads(config: PretrainedConfig) -> list[HeadSizes]:
    """The heads of each layer that has any."""
    return [layer for layer in head_sizes(config) if layer.num_heads]


def _is_wide(layer: HeadSizes) -> bool:
    return max(layer.key_size, layer.value_size) > MAX_HEAD_DIM


def describe_wide_heads(attention: str, config: PretrainedConfig) -> list[str]:
    """A note for the user on layers that another kernel computes than the rest; none if there are no such layers.

    Args:
        attention: the chosen implementation: a name in transformers' registry.
        config: the model's config.
    """
    heads = _attention_heads(config.get_text_config())
    wide_heads = [layer for layer in heads if _is_wide(layer)]
    if attention not in (VARLEN, FLASH_4) or not wide_heads:
        return []
    sizes = " and ".join(str(size) for size in sorted({layer.key_size for layer in wide_heads}))
    return [
        f"attention of {len(wide_heads)} of {len(heads)} layers has heads of {sizes}, too wide for flash kernels "
        f"(up to {MAX_HEAD_DIM}): matrix products over chunks of queries compute it"
    ]


def why_not_by_starts(config: PretrainedConfig) -> str | None:
    """Why attention that is told where rows start can't compute this model on any device; None if it can."""
    if getattr(config, "attn_logit_softcapping", None):
        return "it can't cap attention logits, as this model does"
    if getattr(config, "attention_dropout", None):
        return "it can't drop attention weights, as this model does (attention_dropout)"
    return None


def _note(no_flash_4: str | None, device: torch.device) -> str | None:
    """On a GPU that FlashAttention-4 has kernels for: how to get it, or why it is not used."""
    if torch.cuda.get_device_capability(device)[0] not in flash_4.CAPABILITIES:
        return None
    fix = ": pip install qlora-fsdp[flash]" if no_flash_4 == flash_4.NOT_INSTALLED else ""
    return f"{no_flash_4}: torch's attention computes in its place (slower over long rows){fix}"


# transformers calls every attention function with these parameters.
def varlen_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int | None = None,
    s_aux: Tensor | None = None,
    uses_flash_4: bool = False,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Causal attention in which rows of a packed batch do not see one another.

    Args:
        module: the attention layer that calls.
        query: [B, H, L, D].
        key: [B, H_kv, L, D]; H is a multiple of H_kv.
        value: like `key`, or narrower or wider, as in latent attention (DeepSeek V3: 128 beside 192).
        attention_mask: None; `cu_seq_lens_q` tells rows apart.
        dropout: must be 0.
        scaling: factor of the logits; None for 1 / sqrt(D).
        sliding_window: how many tokens a query sees, itself included; None for all before it.
        cu_seq_lens_q: int32 [rows + 1], where rows start in the flattened B * L tokens; None if a sequence is one row.
        max_length_q: tokens of the longest row.
        s_aux: [H], logits of the heads' sinks; None if they have none.
        uses_flash_4: use FlashAttention-4's kernels where they are faster. Sliding windows, sinks and values of another
            width were not tried with them.
        **kwargs: what transformers passes to other kernels; not used.

    Returns:
        [B, L, H, width of the values], and None for the attention weights.
    """
    assert attention_mask is None and not dropout
    batch, _, length, _ = query.shape
    if cu_seq_lens_q is not None and len(cu_seq_lens_q) == batch + 1:
        cu_seq_lens_q = None  # each sequence is one row: as a long row is that ranks share
    window = sliding_window if sliding_window is not None and sliding_window < length else None
    if max(query.shape[-1], value.shape[-1]) > MAX_HEAD_DIM:
        if s_aux is not None:
            raise _wide_sinks(query.shape[-1])
        return wide.attend(query, key, value, cu_seq_lens_q, window, scaling), None
    is_plain = window is None and s_aux is None
    num_rows = 0 if cu_seq_lens_q is None else len(cu_seq_lens_q) - 1
    uses_flash_4 = uses_flash_4 and is_plain and query.shape[-1] == value.shape[-1]
    uses_flash_4 = uses_flash_4 and batch * length >= flash_4.MIN_MEAN_ROW * num_rows
    if cu_seq_lens_q is None and uses_flash_4:
        q, k, v = (t.transpose(1, 2) for t in (query, key, value))
        return flash_4.attention(q, k, v, scaling), None
    if cu_seq_lens_q is None and is_plain:
        # The kernel's output lies in memory as the queries do. Where partial rotary embeddings are joined, queries lie
        # head by head: then the model would copy the output, and both would be kept for backward.
        query = query.transpose(1, 2).contiguous().transpose(1, 2)
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=True)
        return out.transpose(1, 2), None
    if cu_seq_lens_q is None:
        cu_seq_lens_q = torch.arange(batch + 1, dtype=torch.int32, device=query.device) * length
        max_length_q = length
    assert max_length_q is not None
    q, k, v = (t.transpose(1, 2).flatten(0, 1) for t in (query, key, value))
    if uses_flash_4:
        out = flash_4.packed_attention(q, k, v, cu_seq_lens_q, max_length_q, scaling)
    else:
        out = varlen.attend(q, k, v, varlen.PackedRows(cu_seq_lens_q, max_length_q, window), scaling, s_aux)
    return out.view(batch, length, *out.shape[1:]), None


def _wide_sinks(size: int) -> ConfigError:
    reason = f"computes no sinks of heads as wide as {size}."
    return ConfigError([Problem("model.attn_implementation", reason, "Set model.attn_implementation=eager.")])


flash_attention_4 = partial(varlen_attention, uses_flash_4=True)
