"""GPU hosts that lack a library: simulated, since only the decisions are looked at."""

from __future__ import annotations

import pytest
import torch
from bitsandbytes import cextension
from tests.helpers.patched import liger_kernels
from tests.helpers.quick_config import load_config
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    Glm4Config,
    GptOssConfig,
    LlamaConfig,
    Olmo2Config,
)
from transformers.models.llama import modeling_llama

from qlora_fsdp.common.errors import ConfigError, DeviceError
from qlora_fsdp.config.schema import Config, KernelsConfig
from qlora_fsdp.config.specs import ModuleSpec
from qlora_fsdp.layers import liger
from qlora_fsdp.layers.attention import choose as attention
from qlora_fsdp.layers.attention import flash_attention_4 as flash_4
from qlora_fsdp.runtime import fallbacks
from qlora_fsdp.tracing import liger_shapes
from qlora_fsdp.tracing.model_tracer import planned_liger_kernels

GPU = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def has_bfloat16(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(fallbacks, "has_bfloat16", lambda device: True)


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch):
    """`without(module)`: as if it were not installed."""

    def hide(*names: str) -> None:
        find = fallbacks.find_spec
        hidden = lambda name: None if name in names else find(name)  # noqa: E731
        monkeypatch.setattr(fallbacks, "find_spec", hidden)
        monkeypatch.setattr(attention, "find_spec", hidden)

    return hide


def settings(*more: str):
    return load_config(["model=tiny", "data=random", *more])


def replace_missing(config: Config, device: torch.device):
    return fallbacks.replace_missing(ModuleSpec.of(config), config.training.precision, device)


def test_a_cpu_and_a_whole_gpu_host_lack_nothing(without):
    config = settings()
    assert replace_missing(config, GPU) == (config.kernels, [])
    without("triton", "liger_kernel")
    assert replace_missing(config, torch.device("cpu")) == (config.kernels, [])
    assert config.kernels.fuse_layers


def test_without_triton_a_run_goes_on_and_says_so(without):
    without("triton", "liger_kernel")
    config = settings()
    kernels, (triton,) = replace_missing(config, GPU)
    assert "Triton is not installed" in triton and not kernels.fuse_layers


def test_without_liger_a_run_goes_on_and_says_so(without):
    without("liger_kernel")
    config = settings()
    kernels, (liger,) = replace_missing(config, GPU)
    assert "pip install qlora-fsdp[gpu]" in liger and kernels.fuse_layers


def test_without_bfloat16_a_run_goes_on_and_says_so(monkeypatch):
    monkeypatch.setattr(fallbacks, "has_bfloat16", lambda device: False)
    _, (note,) = replace_missing(settings(), GPU)
    assert "this GPU has no bfloat16" in note
    assert replace_missing(settings("training.precision=float16"), GPU)[1] == []


def test_fp8_without_triton_is_refused(without):
    without("triton")
    with pytest.raises(ConfigError, match=r"compute\.matmul=fp8 needs Triton"):
        replace_missing(settings("compute=fp8"), GPU)


def test_bitsandbytes_without_a_library_for_this_cuda_is_refused_unless_nothing_is_quantized(monkeypatch):
    monkeypatch.setattr(cextension, "lib", cextension.ErrorHandlerMockBNBNativeLibrary("libcudart.so.99: not found"))
    for quant in ("quant=nf4", "quant=int8"):
        with pytest.raises(DeviceError, match=r"can't use this GPU(.|\n)*quant=none(.|\n)*libcudart\.so\.99"):
            replace_missing(settings(quant), GPU)
    assert replace_missing(settings("quant=none"), GPU)[1] == []


def test_without_varlen_attention_auto_takes_another_and_varlen_is_refused(without, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(flash_4, "find_spec", lambda name: None)
    flash_4.why_not.cache_clear()
    text = load_config(["model=llama3-8b", "data=random"]).model.config
    from transformers import AutoConfig

    config = AutoConfig.for_model(**text)
    name, note = attention.choose_attention("auto", config, GPU, torch.bfloat16)
    assert name == attention.VARLEN and "flash-attn-4 is not installed" in note
    without("torch.nn.attention.varlen")
    name, note = attention.choose_attention("auto", config, GPU, torch.bfloat16)
    assert name == "sdpa" and "varlen attention can't be used: this torch has none" in note
    with pytest.raises(ConfigError, match="this torch has none"):
        attention.choose_attention("varlen", config, GPU, torch.bfloat16)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (7, 5))
    name, note = attention.choose_attention("auto", config, GPU, torch.float16)
    assert name == "sdpa" and "compute capability 8.0" in note
    assert attention.choose_attention("auto", config, torch.device("cpu"), torch.float32) == ("sdpa", None)


def test_liger_needs_triton(monkeypatch):
    monkeypatch.setattr(liger, "find_spec", lambda name: None if name == "triton" else object())
    config = settings("kernels.liger=true").kernels
    with pytest.raises(ConfigError, match=r"kernels\.liger=true can't be used: Triton is not installed"):
        liger.use_fused_kernels(config, LlamaConfig(), GPU)
    assert liger.use_fused_kernels(settings().kernels, LlamaConfig(), GPU) == []


def test_the_plan_knows_which_kernels_of_liger_a_run_uses():
    """On a host without the package too: so every family is compared that the installed one has a function for."""
    monkey_patch = pytest.importorskip("liger_kernel.transformers.monkey_patch")
    named = {*monkey_patch.MODEL_TYPE_TO_APPLY_LIGER_FN, *liger_shapes.LIGER_KERNELS}
    configs = [kind() for name, kind in CONFIG_MAPPING.items() if name in named and kind in MODEL_FOR_CAUSAL_LM_MAPPING]
    decoders = [config for config in configs if config.get_text_config() is config]
    assert len(decoders) >= len(liger_shapes.LIGER_KERNELS)
    for config in decoders:
        with liger_kernels(config) as chosen:
            assert planned_liger_kernels(KernelsConfig(), config) == chosen, config.model_type


def test_liger_does_not_know_this_transformers(monkeypatch):
    """Its functions import and patch what an older or a newer version has: nothing half patched stays."""
    monkey_patch = pytest.importorskip("liger_kernel.transformers.monkey_patch")

    def fail(rms_norm: bool = True, fused_linear_cross_entropy: bool = True) -> None:
        modeling_llama.LlamaRMSNorm = object
        raise ImportError("cannot import name 'LigerOutput'")

    stock_norm = modeling_llama.LlamaRMSNorm
    monkeypatch.setitem(monkey_patch.MODEL_TYPE_TO_APPLY_LIGER_FN, "llama", fail)
    assert liger.use_fused_kernels(settings().kernels, LlamaConfig(), GPU) == []
    assert modeling_llama.LlamaRMSNorm is stock_norm
    with pytest.raises(ConfigError, match=r"kernels\.liger=true can't be used: .* llama .* name 'LigerOutput'"):
        liger.use_fused_kernels(settings("kernels.liger=true").kernels, LlamaConfig(), GPU)


@pytest.mark.parametrize("config", [Glm4Config(), Olmo2Config(), GptOssConfig()], ids=lambda config: config.model_type)
def test_liger_is_asked_for_what_it_has(config):
    with liger_kernels(config) as chosen:
        assert "rms_norm" in chosen
