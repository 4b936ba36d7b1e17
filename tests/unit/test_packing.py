"""Packed rows are tried on a small model before a run packs: the verdicts, what they are found with, and what follows.

`python -m tests.packing_table` compares the verdicts of all families.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import peft
import pytest
import torch
from tests.helpers.checkpoints import SHAPE
from tests.helpers.packed import SMALL, packed_rows_stay_apart, real_config
from tests.helpers.patched import liger_kernels
from tests.helpers.quick_config import load_config
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
)
from transformers.models.internvl import modeling_internvl
from transformers.models.lfm2 import modeling_lfm2
from transformers.models.llama import modeling_llama
from transformers.models.qwen3_next import modeling_qwen3_next

from qlora_fsdp.common.errors import ConfigError
from qlora_fsdp.data.batch import lay_out
from qlora_fsdp.layers.attention.choose import VARLEN
from qlora_fsdp.layers.head_loss import LogitTransform
from qlora_fsdp.model.tasks.causal_lm import CausalLM
from qlora_fsdp.model.trials import miniature as small_configs
from qlora_fsdp.model.trials import packing
from qlora_fsdp.model.trials.attention_by_starts import BY_SLICES, BY_STARTS, BY_STARTS_CAPPED
from qlora_fsdp.model.trials.miniature import miniature
from qlora_fsdp.model.trials.packing import Traits
from qlora_fsdp.model.trials.row_trial import RowTrial
from qlora_fsdp.model.trials.slices import check_slices, whole_attention

LONG = 2**20  # tokens of a sequence, so that every window is reached
LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 60, "long_factor": [2.0] * 60}
RUN = ["model=llama3-8b", "data=random", "training.max_steps=1"]


def test_an_earlier_run_of_the_process_left_kernels_for_gpus():
    """A sweep's runs share a process: the second run's trial, on the CPU, must not meet the first one's Triton."""
    config, stock_norm = LlamaConfig(), modeling_llama.LlamaRMSNorm
    with liger_kernels(config) as chosen:
        patched_norm = modeling_llama.LlamaRMSNorm
        assert chosen == ["rms_norm", "rotary", "glu"] and patched_norm is not stock_norm
        trial = RowTrial(config, LONG)
        assert (trial.error, trial.why_not_packed(BY_STARTS), trial.head_transform()) == (None, None, LogitTransform())
        assert modeling_llama.LlamaRMSNorm is patched_norm
    assert modeling_llama.LlamaRMSNorm is stock_norm


# One of each mechanism: plain, windows of two kinds, experts, latent attention, positions from a table, no positions in
# some layers; and masks without rows, positions that are ignored, biases by distance, states, convolutions.
@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("llama", None),
        ("gemma3_text", None),
        ("qwen3_moe", None),
        ("deepseek_v3", None),
        ("gpt2", None),
        ("smollm3", None),
        ("gpt_oss", "packed rows see one another (logits change by "),
        ("bert", "packed rows see one another (logits change by "),
        ("bloom", "packed rows see one another (logits change by "),
        ("jamba", "packed rows see one another (logits change by "),
    ],
)
def test_the_verdict_is_that_of_a_plain_check(family: str, reason: str | None):
    found = RowTrial(real_config(family), LONG).why_not_packed("eager")
    assert found is None if reason is None else str(found).startswith(reason)
    assert packed_rows_stay_apart(family) == (found is None)


@pytest.mark.parametrize("family", ["qwen3_vl", "internvl", "gemma3"])
def test_text_of_a_class_for_images_is_tried_in_that_class(family: str):
    """At its default size, which is a published model's, without its towers."""
    trial = RowTrial(CONFIG_MAPPING[family](), LONG)
    assert (trial.error, trial.why_not_packed("eager"), trial.why_not_packed(BY_STARTS)) == (None, None, None)
    assert not any("vision" in name for name, _ in trial.model.named_parameters())
    assert trial.head_transform() == LogitTransform()


def test_a_class_for_images_that_passes_no_positions_on_is_found_out(monkeypatch: pytest.MonkeyPatch):
    """Its text part alone would keep rows apart."""
    forward = modeling_internvl.InternVLModel.forward

    def without_positions(self: nn.Module, *args: Any, position_ids: Tensor, **kwargs: Any) -> Any:
        return forward(self, *args, **kwargs)

    config = CONFIG_MAPPING["internvl"]()
    assert RowTrial(config.get_text_config(), LONG).why_not_packed("eager") is None
    monkeypatch.setattr(modeling_internvl.InternVLModel, "forward", without_positions)
    reason = RowTrial(config, LONG).why_not_packed("eager")
    assert reason is not None and "packed rows" in reason


@pytest.mark.parametrize("family", ["lfm2", "qwen3_next", "qwen3_5_text"])
def test_convolutions_and_delta_rules_of_ours_keep_rows_apart(family: str):
    """transformers' own, without their kernels, do not."""
    assert RowTrial(real_config(family), LONG).why_not_packed("eager") is None
    assert not packed_rows_stay_apart(family)


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("llama", None),
        ("gemma3_text", None),
        ("gpt_oss", None),
        ("deepseek_v3", None),
        ("gpt2", None),
        ("bloom", "sliced rows see one another (logits change by "),  # attention code of its own
        ("mamba", "sliced rows "),
        ("rwkv", "sliced rows "),
        ("jamba", "sliced rows "),
        ("lfm2", "sliced rows "),
        ("qwen3_next", "sliced rows "),
    ],
)
def test_ranks_share_sequences_only_if_tokens_meet_in_attention(family: str, reason: str | None):
    found = RowTrial(real_config(family), LONG).why_not_packed(BY_SLICES)
    assert found is None if reason is None else str(found).startswith(reason)


def test_a_convolution_over_tokens_is_found_out_in_slices(monkeypatch: pytest.MonkeyPatch):
    """Rows alone and packed pass: it knows where rows start. But it does not see the slice before its own."""

    class Mixing(modeling_llama.LlamaMLP):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x + F.pad(x[:, :-1], (0, 0, 1, 0)) * self.continues[..., None])

    def marked(self, *args: Any, position_ids: Tensor, **kwargs: Any) -> Any:
        Mixing.continues = (position_ids > 0).float()
        return forward(self, *args, position_ids=position_ids, **kwargs)

    forward = modeling_llama.LlamaModel.forward
    monkeypatch.setattr(modeling_llama, "LlamaMLP", Mixing)
    monkeypatch.setattr(modeling_llama.LlamaModel, "forward", marked)
    monkeypatch.setattr(modeling_llama.LlamaForCausalLM, "forward", _with_positions(modeling_llama.LlamaForCausalLM))
    trial = RowTrial(LlamaConfig(), LONG)
    assert (trial.error, trial.why_not_packed(BY_STARTS)) == (None, None)
    assert "sliced rows are not what they are alone" in str(trial.why_not_packed(BY_SLICES))


def _with_positions(cls: type) -> Any:
    """The class's forward, which is told positions also where a row is alone."""
    plain = cls.forward

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None, **kwargs: Any) -> Any:
        positions = torch.arange(input_ids.shape[1])[None] if position_ids is None else position_ids
        return plain(self, input_ids, position_ids=positions, **kwargs)

    return forward


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, None),
        ({"num_attention_heads": 30, "num_key_value_heads": 30}, "does not divide the model's 30 attention heads"),
        (
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
            "can't be used with rope_type dynamic: a slice would take the factors of its own longest position",
        ),
        (
            {
                "max_position_embeddings": 2**17,
                "rope_parameters": LONGROPE | {"original_max_position_embeddings": 2**11},
            },
            "can't be used with rope_type longrope",
        ),
        (
            {
                "max_position_embeddings": 2**17,
                "rope_parameters": LONGROPE | {"original_max_position_embeddings": 4096},
            },
            None,
        ),
    ],
)
def test_what_else_keeps_ranks_from_sharing_sequences(change: dict[str, Any], reason: str | None):
    config = load_config([*RUN, "distributed.context_parallel=4", "training.max_length=4096"])
    model = LlamaConfig(**{"max_position_embeddings": 2048, "hidden_size": 3840} | change)
    with nullcontext() if reason is None else pytest.raises(ConfigError, match=reason):
        check_slices(model, config.distributed.num_slices, config.training.max_length, Traits(True, None))


@pytest.mark.parametrize(
    ("family", "attention", "device", "found"),
    [
        ("llama", VARLEN, "cuda", VARLEN),
        ("llama", "sdpa", "cpu", BY_STARTS),
        ("llama", "sdpa", "cuda", "needs attention that is told where rows start: too old."),
        ("gemma2", "sdpa", "cpu", "it can't cap attention logits, as this model does"),
    ],
)
def test_ranks_that_share_sequences_attend_by_starts(family: str, attention: str, device: str, found: str):
    args = (attention, "too old", AutoConfig.for_model(family), 2, torch.device(device))
    if found in (VARLEN, BY_STARTS):
        assert whole_attention(*args) == found
    else:
        with pytest.raises(ConfigError, match=found):
            whole_attention(*args)


@pytest.mark.parametrize(
    ("family", "by_starts", "capped"),
    [
        ("mistral", None, None),  # windows are handed to the kernels
        ("gpt_oss", None, "packed rows are not what they are alone"),  # sinks, which FlashAttention 2 leaves out
        ("gemma2", "packed rows are not what they are alone", None),  # softcaps, which varlen leaves out
        ("llama4_text", "packed rows are not what they are alone", "packed rows are not what they are alone"),  # chunks
        # A mask of its own, which begins with zeros.
        ("doge", "packed rows are not what they are alone", "packed rows are not what they are alone"),
        (
            "stablelm",
            "packed rows can't be computed (ValueError: StableLmAttention is not told where rows start)",
            "pack",
        ),
    ],
)
def test_kernels_without_a_mask_are_stood_in_for(family: str, by_starts: str | None, capped: str | None):
    config = real_config(family)
    config.attn_logit_softcapping = 2.0 if family == "gemma2" else None  # small enough to tell at the small size
    trial = RowTrial(config, LONG)
    for attention, reason in ((BY_STARTS, by_starts), (BY_STARTS_CAPPED, capped)):
        found = trial.why_not_packed(attention)
        assert found is None if reason is None else str(found).startswith(reason), attention


def test_a_mask_without_rows_is_found(monkeypatch: pytest.MonkeyPatch):
    of_rows = "transformers.masking_utils.packed_sequence_mask_function"
    monkeypatch.setattr(of_rows, lambda rows: lambda batch, head, query, key: query >= 0)
    found = RowTrial(real_config("llama"), LONG).why_not_packed("sdpa")
    assert str(found).startswith("packed rows see one another (logits change by ")


def test_what_only_a_gradient_shows_is_found(monkeypatch: pytest.MonkeyPatch):
    forward = modeling_llama.LlamaMLP.forward

    def leak(self: nn.Module, x: Tensor) -> Tensor:
        mixed = 0.1 * x.mean(1, keepdim=True)
        return forward(self, x + mixed - mixed.detach())

    monkeypatch.setattr(modeling_llama.LlamaMLP, "forward", leak)
    found = RowTrial(real_config("llama"), LONG).why_not_packed("sdpa")
    assert str(found).startswith("packed rows see one another (gradients change by ")


@pytest.mark.parametrize(
    "shortage",
    [
        torch.OutOfMemoryError("CUDA out of memory."),
        MemoryError(),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 64 bytes."),
    ],
)
@pytest.mark.parametrize("is_packed", [False, True])
def test_a_shortage_of_memory_is_no_trait_of_the_model(
    monkeypatch: pytest.MonkeyPatch, shortage: Exception, is_packed: bool
):
    """Rows would be padded for it, in this start and not in the next."""
    forward = modeling_llama.LlamaMLP.forward

    def fail(self: nn.Module, x: Tensor) -> Tensor:
        if (len(x) > 1) == is_packed:
            raise shortage
        return forward(self, x)

    monkeypatch.setattr(modeling_llama.LlamaMLP, "forward", fail)
    with pytest.raises(type(shortage)):
        RowTrial(real_config("llama"), LONG).why_not_packed("sdpa")


@pytest.mark.parametrize("family", sorted({*SMALL, "gemma4_text"} - {"bert", "opt", "bloom"}))
def test_a_small_config_has_a_layer_of_each_kind(monkeypatch: pytest.MonkeyPatch, family: str):
    """Compared with the modules of a model that has all layers, and small sizes likewise."""
    config = real_config(family)
    with torch.device("meta"):
        some = AutoModelForCausalLM.from_config(miniature(config, LONG))
        monkeypatch.setattr(small_configs, "_choose_layers", lambda values, num_layers: None)
        whole = AutoModelForCausalLM.from_config(miniature(config, LONG))
    assert kinds(layers_of(some)) == kinds(layers_of(whole))
    assert 2 <= len(layers_of(some)) <= 10


def layers_of(model: nn.Module) -> nn.ModuleList:
    return next(module for module in model.modules() if isinstance(module, nn.ModuleList))


def kinds(layers: nn.ModuleList) -> set[str]:
    """What the layers are made of, and the plain values that their modules keep."""
    return {str(layer) + str([plain(module) for module in layer.modules()]) for layer in layers}


def plain(module: nn.Module) -> dict[str, Any]:
    numbered = ("layer_idx", "kv_shared_layer_index", "store_full_length_kv", "training")
    return {
        name: value
        for name, value in vars(module).items()
        if name not in numbered and isinstance(value, (bool, int, float, str, type(None)))
    }


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma3_text", "gpt_neox"])
@pytest.mark.parametrize(("hidden", "heads"), [(32, 1), (64, 2), (192, 3), (24, 3)])
def test_models_of_few_heads_are_tried(family: str, hidden: int, heads: int):
    """A model that is smaller than the trial's: its heads can't be shrunk, and need not divide the trial's width."""
    shape = SHAPE | SMALL.get(family, {}) | {"hidden_size": hidden, "num_attention_heads": heads}
    config = AutoConfig.for_model(family, **shape | {"num_key_value_heads": heads, "head_dim": hidden // heads})
    trial = RowTrial(config, LONG)
    assert (trial.error, trial.why_not_packed(BY_STARTS)) == (None, None)


def test_sizes_of_unknown_names_are_refused(monkeypatch: pytest.MonkeyPatch):
    for sizes in ("_SIZES", "_WIDTHS"):
        monkeypatch.setattr(small_configs, sizes, {})
    found = RowTrial(real_config("llama"), LONG).why_not_packed("sdpa")
    assert "a small model of its kind, to try it with, fails (ValueError: it has " in str(found)


def keep_rows_apart(hidden_states: Tensor, weight: Tensor, bias: Any = None, activation: Any = None, **kwargs: Any):
    """What the package causal-conv1d computes with `seq_idx`: a convolution of each row by itself."""
    row = kwargs.get("seq_idx")
    row = torch.zeros_like(hidden_states[:, 0], dtype=torch.int32) if row is None else row
    assert row.dtype == torch.int32 and row.shape == hidden_states[:, 0].shape
    out = torch.zeros_like(hidden_states)
    size = weight.shape[-1]
    for back in range(size):
        shifted, its_row = F.pad(hidden_states, (back, 0)), F.pad(row, (back, 0), value=-1)
        length = hidden_states.shape[-1]
        same = (its_row[:, :length] == row)[:, None]
        out = out + weight[:, size - 1 - back, None] * shifted[..., :length] * same
    out = out if bias is None else out + bias[:, None]
    return out if activation is None else F.silu(out)


def test_convolutions_get_each_tokens_row(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(modeling_lfm2, "causal_conv1d_fn", keep_rows_apart)
    assert RowTrial(real_config("lfm2"), LONG).why_not_packed("sdpa") is None


def test_delta_rules_get_rows_starts(monkeypatch: pytest.MonkeyPatch):
    """As the package fla has it: rows of all sequences in one."""
    one_row = modeling_qwen3_next.torch_chunk_gated_delta_rule

    def by_starts(query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, cu_seqlens=None, **kwargs: Any):
        kwargs.pop("seq_idx", None)
        if cu_seqlens is None:
            return one_row(query, key, value, g=g, beta=beta, **kwargs)
        assert len(query) == 1
        lengths = cu_seqlens.diff().tolist()
        rows = zip(*(tensor.split(lengths, dim=1) for tensor in (query, key, value, g, beta)), strict=True)
        parts = [one_row(q, k, v, g=g_row, beta=b, **kwargs)[0] for q, k, v, g_row, b in rows]
        return torch.cat(parts, dim=1), None

    monkeypatch.setattr(modeling_qwen3_next, "causal_conv1d_fn", keep_rows_apart)
    monkeypatch.setattr(modeling_qwen3_next, "torch_chunk_gated_delta_rule", by_starts)
    assert RowTrial(real_config("qwen3_next"), LONG).why_not_packed("sdpa") is None


@pytest.mark.parametrize(
    ("family", "values", "expected"),
    [
        ("llama", {}, LogitTransform()),
        ("gemma2", {}, LogitTransform(cap=30.0)),
        ("granite", {"logits_scaling": 1.0}, LogitTransform()),
        ("granite", {"logits_scaling": 16.0}, LogitTransform(1 / 16)),
        ("granitemoe", {"logits_scaling": 6.0}, LogitTransform(1 / 6)),
        ("cohere", {}, LogitTransform(0.0625)),
        ("cohere2", {"logit_scale": 0.25}, LogitTransform(0.25)),
    ],
)
def test_what_a_model_does_to_its_heads_output_is_found(family: str, values: dict[str, float], expected):
    config = real_config(family)
    config.update(values)
    assert RowTrial(config, LONG).head_transform() == expected


def scaled_llama(monkeypatch: pytest.MonkeyPatch, scale: Callable[[LlamaConfig], float]) -> LogitTransform | None:
    forward = LlamaForCausalLM.forward

    def scaled(self: LlamaForCausalLM, *args: Any, **kwargs: Any) -> Any:
        output = forward(self, *args, **kwargs)
        output.logits = scale(self.config) * output.logits
        return output

    monkeypatch.setattr(LlamaForCausalLM, "forward", scaled)
    config = real_config("llama")
    config.update({"own_scale": 3.0, "other_number": 5.0})
    return RowTrial(config, LONG).head_transform()


def test_a_head_with_a_bias_is_not_scaled_by_its_input(monkeypatch: pytest.MonkeyPatch):
    class WithBias(LlamaForCausalLM):
        def __init__(self, config: LlamaConfig) -> None:
            super().__init__(config)
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size)

    monkeypatch.setitem(MODEL_FOR_CAUSAL_LM_MAPPING._extra_content, LlamaConfig, WithBias)
    assert RowTrial(real_config("llama"), LONG).head_transform() == LogitTransform()
    assert scaled_llama(monkeypatch, lambda config: 1 / config.own_scale) is None


def test_a_scale_is_taken_only_from_a_number_that_it_follows(monkeypatch: pytest.MonkeyPatch):
    assert scaled_llama(monkeypatch, lambda config: 1 / config.own_scale) == LogitTransform(1 / 3)


@pytest.mark.parametrize(
    "scale",
    [
        lambda config: 5.0,  # equal to a number of the config by chance
        lambda config: 256 / config.hidden_size,  # the small model has another width than the large one
        lambda config: config.own_scale**2,
    ],
)
def test_a_scale_that_the_large_model_may_not_have_is_not_taken(monkeypatch: pytest.MonkeyPatch, scale):
    assert scaled_llama(monkeypatch, scale) is None


def settle(model: str, *more: str, attention: str = "sdpa", **values: Any):
    config = load_config([*RUN, *more])
    config_of_model = AutoConfig.for_model(model, **values)
    reason = None
    if not config.is_padded:
        spec = packing.TrialSpec(config.task, config.training.max_length)
        dtype = packing.planned_dtype(config.training.precision)
        reason = packing.why_not_packed(config_of_model, spec, attention, dtype)
    return packing.decide_packing(config.training.packing, config_of_model, config.task, reason)


def test_auto_packs_what_keeps_rows_apart():
    packs_rows, notes = settle("llama")
    assert packs_rows is True and notes == []
    packs_rows, notes = settle("llama", "training.packing=false")
    assert packs_rows is False and notes == []
    packs_rows, notes = settle("llama", "training.packing=true", attention=VARLEN)
    assert packs_rows is True and notes == []


def test_auto_pads_what_does_not_and_says_why():
    packs_rows, (note,) = settle("jamba", "training.max_length=64")
    assert packs_rows is False
    assert note.startswith("rows of JambaForCausalLM are padded: packed rows see one another (logits change by ")
    with pytest.raises(
        ConfigError, match=r"training.packing=true can't be used with JambaForCausalLM: packed rows see"
    ):
        settle("jamba", "training.max_length=64", "training.packing=true")
    packs_rows, notes = settle("jamba", "training.packing=false")
    assert packs_rows is False and notes == []


def test_auto_attention_is_what_recent_gpus_compute_with_in_the_runs_precision():
    """Sinks have no kernel in float32, and gpt-oss's masks ignore rows: the run pads there, and so does the plan."""
    sizes = {"hidden_size": 64, "head_dim": 16, "num_attention_heads": 4, "num_key_value_heads": 2}
    packs_rows, notes = settle("gpt_oss", attention="auto", **sizes)
    assert packs_rows is True and notes == []
    packs_rows, (note,) = settle("gpt_oss", "training.precision=float32", attention="auto", **sizes)
    assert packs_rows is False and "rows of GptOssForCausalLM are padded" in note


def test_padding_must_not_go_beyond_a_table_of_positions():
    packs_rows, (note,) = settle("gpt2")
    assert packs_rows is False
    assert "padded: it has embeddings of 1,024 positions, and with the padding at its end a row may have" in note
    assert settle("gpt2", "training.max_length=1024")[0] is True


def losses_of(model: CausalLM, rows: Sequence[Sequence[int]], is_target: Sequence[bool]) -> float:
    """The loss of rows that are packed into one sequence of 64 tokens, by which of them are trained on."""
    pairs = [(np.array(row), np.full(len(row), is_on)) for row, is_on in zip(rows, is_target, strict=True)]
    with torch.no_grad():
        return float(model(lay_out([pairs], 64, pad_token_id=0)).item())


@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3_moe", "cohere", "granitemoe"])
def test_the_loss_of_a_packed_row_is_that_of_the_row_alone(family: str):
    torch.manual_seed(0)
    real = real_config(family)
    if family == "granitemoe":
        real.logits_scaling = 6.0
    config = miniature(real, LONG)
    base = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    transform = RowTrial(real, LONG).head_transform()
    assert transform is not None
    wrapped = peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
    model = CausalLM(wrapped, transform=transform)
    first, second, third = [list(range(start, start + 20)) for start in (3, 20, 40)]
    only_second = (False, True, False)
    packed = losses_of(model, (first, second, third), only_second)
    assert losses_of(model, (first[::-1], second, third), only_second) == pytest.approx(packed, abs=1e-5)
    with torch.no_grad():
        alone = model.base(input_ids=torch.tensor([second])).logits[0, :-1]
    expected = F.cross_entropy(alone.double(), torch.tensor(second[1:]), reduction="sum")
    assert packed == pytest.approx(expected.item(), abs=1e-4)


GEMMA4_MOE = {"hidden_size_per_layer_input": 0, "enable_moe_block": True, "num_experts": 128, "top_k_experts": 8}


def test_the_small_gemma_4_with_experts_computes() -> None:
    """Gemma 4 26B-A4B calls the experts of a token `top_k_experts`; where it stayed at 8 of 4 experts, rows padded."""
    small = miniature(AutoConfig.for_model("gemma4_text", **GEMMA4_MOE, moe_intermediate_size=704), LONG)
    assert small.top_k_experts <= small.num_experts
    model = AutoModelForCausalLM.from_config(small)
    assert model(torch.tensor([[1, 2, 3]])).logits.isfinite().all()


def test_every_name_of_a_tokens_experts_is_made_small() -> None:
    """transformers' configs have several names for it, and a release can bring another one."""
    wanted = re.compile(r"(expert|moe).*(top_?k|per_tok)|(top_?k).*(expert|moe)|^moe_k$")
    names: set[str] = set()
    for config_class in CONFIG_MAPPING.values():
        names |= {name for name in getattr(config_class, "__annotations__", {}) if wanted.search(name)}
    assert {"num_experts_per_tok", "top_k_experts", "moe_topk"} <= names
    assert {name for name in names if small_configs._SIZES.get(name, 8) > 4} == set()
