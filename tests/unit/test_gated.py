"""Gated MLPs are recognised by what they compute: in transformers' classes, and in some that look like one."""

from __future__ import annotations

from collections.abc import Callable

import peft
import pytest
import torch
from tests.helpers.families import make_config
from tests.helpers.patched import liger_kernels
from tests.helpers.quick_config import load_config
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM
from transformers.models.gemma3n.modeling_gemma3n import Gemma3nTextMLP

from qlora_fsdp.config.schema import ComputeConfig, KernelsConfig
from qlora_fsdp.config.specs import TaskSpec
from qlora_fsdp.data.tokenizer import NO_TOKENS
from qlora_fsdp.layers import gated
from qlora_fsdp.layers.gated import find_gated
from qlora_fsdp.layers.lora import LoraLinear
from qlora_fsdp.layers.mlp import GatedMlp
from qlora_fsdp.layers.quantized.format import Format
from qlora_fsdp.layers.quantized.linear import QuantizedLinear
from qlora_fsdp.layers.rewire import Rewired, rewire
from qlora_fsdp.model.assemble import adapt_model
from qlora_fsdp.model.build import BuildSettings, build_model
from qlora_fsdp.model.find import ModelFiles
from qlora_fsdp.tracing.liger_shapes import LIGER_KERNELS

NAMES = ("gate_proj", "up_proj", "down_proj")
FOUND = {  # by family: the roles of the layers of its MLP
    "llama": (NAMES, "silu"),
    "olmo2": (NAMES, "silu"),
    "cohere": (NAMES, "silu"),
    "gemma2": (NAMES, "gelu_tanh"),
    "deepseek_v3": (NAMES, "silu"),
    "lfm2": (("w1", "w3", "w2"), "silu"),
    "phi3": (("gate_up_proj", "down_proj"), "silu"),
    "glm4": (("gate_up_proj", "down_proj"), "silu"),
    "cpmant": None,
    "bart": None,
    "falcon": None,
    "bert": None,
}


@pytest.mark.parametrize("family", FOUND)
def test_the_mlps_of_families(family: str):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(make_config(family))
    found = {found for module in model.modules() if (found := find_gated(module)) is not None}
    assert found == ({FOUND[family]} if FOUND[family] else set())


class Mlp(nn.Module):
    """An MLP with a forward of the test's."""

    def __init__(self, compute: Callable[[Mlp, Tensor], Tensor], has_bias: bool = False) -> None:
        super().__init__()
        self.compute = compute
        self.a, self.b, self.c = (nn.Linear(64, 64, has_bias) for _ in range(3))
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.compute(self, x)


@pytest.mark.parametrize("has_bias", [True, False])
def test_roles_are_found_and_not_named(has_bias: bool):
    mlp = Mlp(lambda m, x: m.a(m.c(x) * F.silu(m.b(x))), has_bias)
    assert find_gated(mlp) == (("b", "c", "a"), "silu")
    assert find_gated(mlp.to("meta")) == (("b", "c", "a"), "silu")


@pytest.mark.parametrize(
    "compute",
    [
        lambda m, x: m.c(F.gelu(m.a(x)) * m.b(x)),  # not the tanh that the kernels compute
        lambda m, x: m.c(F.silu(m.a(x)).clamp(max=100.0) * m.b(x)),
        lambda m, x: m.c(F.silu(m.a(x)) * (m.b(x) + 1)),
        lambda m, x: m.c(m.dropout(F.silu(m.a(x)) * m.b(x))),
        lambda m, x: 0.5 * m.c(F.silu(m.a(x)) * m.b(x)),
        lambda m, x: m.c(F.silu(m.a(x)) * m.b(x)) + 1e-4 * x,
        lambda m, x: m.c(F.silu(m.a(x)) * m.b(x.roll(1, 1))),
        lambda m, x: (m.c(F.silu(m.a(x)) * m.b(x)), None),
        lambda m, x: m.missing(x),
    ],
)
def test_what_computes_something_else_stays_plain(compute: Callable[[Mlp, Tensor], Tensor]):
    assert find_gated(Mlp(compute)) is None


def test_a_shortage_of_memory_is_no_trait_of_the_module():
    def compute(module: Mlp, x: Tensor) -> Tensor:
        raise MemoryError

    with pytest.raises(MemoryError):
        find_gated(Mlp(compute))


def test_attributes_count_as_much_as_the_class():
    """Gemma 3n's MLP drops most activations in its first layers, by a figure of its config."""
    config = make_config("gemma3n_text")
    config.activation_sparsity_pattern = [0.95, *[0.0] * (config.num_hidden_layers - 1)]
    config.intermediate_size = [64] * config.num_hidden_layers
    mlps = [Gemma3nTextMLP(config, layer_idx) for layer_idx in (0, 1)]
    assert [find_gated(mlp) for mlp in mlps] == [None, (NAMES, "gelu_tanh")]


def test_dropout_counts_only_where_it_drops():
    mlp = Mlp(lambda m, x: m.c(m.dropout(F.silu(m.a(x)) * m.b(x))))
    mlp.dropout.p = 0.0
    assert find_gated(mlp) == (("a", "b", "c"), "silu")


def test_once_for_a_class_and_again_when_quantized_and_adapted(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(gated, "_PROVEN", {})
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(make_config("olmo2"))
    found = [find_gated(layer.mlp) for layer in model.model.layers]
    assert len(gated._PROVEN) == 1 and len(found) > 1 and set(found) == {(NAMES, "silu")}
    for name, layer in list(model.named_modules()):
        if isinstance(layer, nn.Linear) and ".mlp." in name:
            small = QuantizedLinear(layer.in_features, layer.out_features, False, Format("nf4"), torch.float32)
            model.set_submodule(name, small)
    settings = peft.LoraConfig(r=4, target_modules=list(NAMES))
    settings._register_custom_module({nn.Linear: LoraLinear})
    adapted = peft.get_peft_model(model, settings, low_cpu_mem_usage=True)
    assert rewire(adapted, ComputeConfig(), KernelsConfig()).num_groups == len(found)
    assert len(gated._PROVEN) == 1
    mlps = [layer.mlp for layer in adapted.get_base_model().model.layers]
    assert all(isinstance(mlp.forward, GatedMlp) for mlp in mlps)


@pytest.mark.parametrize("family", sorted(LIGER_KERNELS))
def test_a_model_of_ligers_classes_is_what_it_is_without_them(family: str):
    """As a run on a GPU builds, adapts and rewires it where Liger is installed: of the same MLPs, fused alike.

    Liger's kernels do not run here, and neither does a layer: what is proven is how modules are made and recognised.
    """
    config = make_config(family)
    if config.to_dict().get("head_dim", 0) is None:  # by default, with which transformers' own class can't be built
        config.head_dim = 16
    settings = load_config(["quant=int8"])

    def build() -> tuple[set[object], Rewired]:
        built = build_model(ModelFiles(None, config), BuildSettings(settings.quant, torch.bfloat16, "eager"))
        modules = list(built.model.modules())
        found = {found for module in modules if (found := find_gated(module)) is not None}
        model = adapt_model(built, settings.lora, TaskSpec(settings.task, settings.preference), NO_TOKENS)
        return found, rewire(model, ComputeConfig(), KernelsConfig())

    stock = build()
    with liger_kernels(config) as chosen:
        assert set(LIGER_KERNELS[family]) - {"glu"} <= set(chosen)
        assert build() == stock
