"""FlashAttention-4 is used where it computes what torch computes. Its kernels are stood in for by plain torch."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import LlamaConfig

from qlora_fsdp.common.errors import ConfigError
from qlora_fsdp.layers.attention import choose as attention
from qlora_fsdp.layers.attention import flash_attention_4 as flash_4
from qlora_fsdp.layers.attention import varlen

CPU = torch.device("cpu")


def whole(q: Tensor, k: Tensor, v: Tensor, causal: bool, softmax_scale: float | None) -> tuple[Tensor, None]:
    heads_first = (tensor.transpose(1, 2).float() for tensor in (q, k, v))
    out = F.scaled_dot_product_attention(*heads_first, is_causal=causal, scale=softmax_scale, enable_gqa=True)
    return out.transpose(1, 2).to(q.dtype), None


def packed(q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, **options) -> Tensor:
    assert torch.equal(cu_seqlens_q, cu_seqlens_k)
    lengths = cu_seqlens_q.diff().tolist()
    assert options.pop("max_seqlen_q") == options.pop("max_seqlen_k") == max(lengths)
    parts = zip(*(tensor.split(lengths) for tensor in (q, k, v)), strict=True)
    return torch.cat([whole(*(tensor[None] for tensor in part), **options)[0][0] for part in parts])


def forgets_where_rows_start(q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, **options) -> Tensor:
    return whole(q[None], k[None], v[None], options["causal"], options["softmax_scale"])[0][0]


def does_not_compile(*args, **options) -> Tensor:
    raise RuntimeError("ptxas: Unsupported .target 'sm_90a'")


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch):
    """`hopper(*functions)`: a Hopper GPU with a flash-attn-4 that has these."""

    def install(*functions) -> None:
        flash_4.why_not.cache_clear()
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
        monkeypatch.setattr(flash_4, "find_spec", lambda name: SimpleNamespace())
        monkeypatch.setattr(flash_4, "_functions", lambda: functions)

    yield install
    flash_4.why_not.cache_clear()


@pytest.mark.parametrize(
    ("functions", "reason"),
    [
        ((whole, packed), None),
        ((whole, forgets_where_rows_start), "results differ from torch's by"),
        ((does_not_compile, packed), "does not run here .RuntimeError: ptxas"),
    ],
)
def test_it_is_tried_before_it_is_used(hopper, functions, reason: str | None):
    hopper(*functions)
    found = flash_4.why_not(4, 2, 16, torch.bfloat16, CPU)
    assert found is None if reason is None else found is not None and re.search(reason, found)


def test_auto_takes_it_where_it_works_and_says_why_not_elsewhere(hopper, monkeypatch):
    config = LlamaConfig(hidden_size=64, num_attention_heads=4, num_key_value_heads=2)
    gpu = torch.device("cuda", 0)
    monkeypatch.setattr(flash_4, "_largest_error", lambda *args: 0.004)
    hopper(whole, packed)
    for wanted in ("auto", "flash_attention_4"):
        assert attention.choose_attention(wanted, config, gpu, torch.bfloat16) == (attention.FLASH_4, None)
    assert attention.choose_attention("varlen", config, gpu, torch.bfloat16) == (attention.VARLEN, None)
    flash_4.why_not.cache_clear()
    monkeypatch.setattr(flash_4, "_largest_error", lambda *args: 0.5)
    name, note = attention.choose_attention("auto", config, gpu, torch.bfloat16)
    assert name == attention.VARLEN and "differ from torch's by 50.0%" in note
    with pytest.raises(ConfigError, match=r"flash_attention_4 can't be used: .*differ(.|\n)*attn_implementation=auto"):
        attention.choose_attention("flash_attention_4", config, gpu, torch.bfloat16)
    with pytest.raises(ConfigError, match="it needs a GPU"):
        attention.choose_attention("flash_attention_4", config, CPU, torch.bfloat16)


def test_a_model_that_drops_attention_weights_gets_a_kernel_that_can(hopper):
    config = LlamaConfig(hidden_size=64, num_attention_heads=4, num_key_value_heads=2, attention_dropout=0.1)
    hopper(whole, packed)
    name, note = attention.choose_attention("auto", config, torch.device("cuda", 0), torch.bfloat16)
    assert name == "sdpa" and "it can't drop attention weights" in note
    with pytest.raises(ConfigError, match="varlen can't be used: it can't drop attention weights"):
        attention.choose_attention("varlen", config, torch.device("cuda", 0), torch.bfloat16)


@pytest.mark.parametrize("lengths", [None, [5, 7, 12]])
@pytest.mark.parametrize("is_short", [False, True])
def test_it_gets_tokens_before_heads_and_where_rows_start(hopper, monkeypatch, lengths: list[int] | None, is_short):
    """Short rows go to torch's varlen kernel, with the same arguments."""
    monkeypatch.setattr(flash_4, "MIN_MEAN_ROW", 9 if is_short else 8)
    attend = lambda q, k, v, rows, scale, sinks: packed(  # noqa: E731
        *(q, k, v, rows.starts, rows.starts),
        **{"max_seqlen_q": rows.longest, "max_seqlen_k": rows.longest, "causal": True, "softmax_scale": scale},
    )
    monkeypatch.setattr(varlen, "attend", attend)
    hopper(whole, does_not_compile if is_short else packed)
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, heads, 12, 8) for heads in (4, 2, 2))
    row = torch.arange(2).repeat_interleave(12)
    rows = {}
    if lengths is not None:
        row = torch.arange(3).repeat_interleave(torch.tensor(lengths))
        starts = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)
        rows = {"cu_seq_lens_q": starts, "max_length_q": max(lengths)}
    out, _ = attention.flash_attention_4(torch.nn.Module(), q, k, v, None, scaling=0.3, **rows)
    row = row.view(2, 12)
    mask = (row[:, :, None] == row[:, None, :]) & torch.ones(12, 12, dtype=torch.bool).tril()
    wanted = F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None], scale=0.3, enable_gqa=True)
    torch.testing.assert_close(out, wanted.transpose(1, 2))


def test_sequences_of_one_row_each_take_the_kernel_of_whole_rows(monkeypatch):
    """Also if the starts of these rows are told, as they are where ranks share a long row."""
    monkeypatch.setattr(varlen, "attend", lambda *args: pytest.fail("this kernel is slower over long rows"))
    query, key, value = (torch.randn(2, heads, 8, 16) for heads in (4, 2, 2))
    starts = torch.tensor([0, 8, 16], dtype=torch.int32)
    module = torch.nn.Module()
    told, _ = attention.varlen_attention(module, query, key, value, None, cu_seq_lens_q=starts, max_length_q=8)
    alone, _ = attention.varlen_attention(module, query, key, value, None)
    assert torch.equal(told, alone)
    expected = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    assert torch.equal(told, expected.transpose(1, 2))


def test_queries_lie_token_by_token_so_that_the_output_does(monkeypatch):
    """cuDNN's output lies as its queries do. Here they lie head by head, as `torch.cat` leaves them in GLM 4."""
    given, attend = [], F.scaled_dot_product_attention

    def remember(query, *args, **kwargs):
        given.append(query)
        return attend(query, *args, **kwargs)

    monkeypatch.setattr(F, "scaled_dot_product_attention", remember)
    query, key, value = (torch.randn(2, heads, 8, 16) for heads in (4, 2, 2))
    attention.varlen_attention(torch.nn.Module(), query, key, value, None)
    assert torch.equal(given[0], query) and given[0].transpose(1, 2).is_contiguous()
