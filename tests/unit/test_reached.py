"""What `lora.target_modules=all-linear` leaves out, against stock PEFT's adapters on stock models."""

from __future__ import annotations

import peft
import pytest
import torch
from tests.helpers.families import make_config
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, PreTrainedModel
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4GroupedLinear
from transformers.models.falcon.modeling_falcon import FalconLinear
from transformers.models.llama4.modeling_llama4 import Llama4Router
from transformers.models.phimoe.modeling_phimoe import PhimoeTopKRouter

from qlora_fsdp.common.errors import AdapterError, CheckpointError
from qlora_fsdp.config.schema import LoraConfig, QuantConfig
from qlora_fsdp.layers.quantized.format import Format
from qlora_fsdp.layers.quantized.linear import QuantizedLinear
from qlora_fsdp.model.adapters.apply import apply_adapters, trainable_names
from qlora_fsdp.model.adapters.targets import describe_left_out, find_left_out
from qlora_fsdp.model.parts import general_name
from qlora_fsdp.model.swap_layers import computes_linear, note_nothing_quantized, swap_chosen_linears
from qlora_fsdp.model.trials.packing import Traits, check_causal
from qlora_fsdp.model.trials.row_trial import RowTrial

UNREACHED = {  # by family, the last parts of the layers' names
    "llama": set(),
    "qwen3_moe": set(),
    "jamba": {"dt_proj"},
    "bart": {"q_proj", "k_proj", "v_proj", "out_proj"},
    "deepseek_v32": {"wq_b", "wk", "weights_proj"},
    "gemma3n_text": {"correction_coefs"},
}


def without_gradient(family: str) -> set[str]:
    """Linear layers whose adapter gets no gradient in stock PEFT, with every linear layer adapted."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(make_config(family), dtype=torch.float32)
    names = [n for n, m in model.named_modules() if isinstance(m, nn.Linear) and m is not model.get_output_embeddings()]
    routers = [name for name in names if name.endswith((".gate", ".router"))]
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=[n for n in names if n not in routers]))
    ids = torch.randint(3, 250, (4, 40))
    adapted(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    return {
        general_name(model, name.removeprefix("base_model.model."))
        for name, module in adapted.named_modules()
        if isinstance(module, peft.tuners.lora.LoraLayer) and module.lora_B["default"].weight.grad is None
    }


def on_meta(family: str) -> PreTrainedModel:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(make_config(family))


@pytest.mark.parametrize("family", UNREACHED)
def test_layers_that_no_gradient_reaches(family: str):
    trial = RowTrial(make_config(family), max_length=64)
    assert trial.error is None
    assert {name.rpartition(".")[2] for name in trial.unreached} == UNREACHED[family]
    if family == "bart":
        assert all(".encoder_attn." in name for name in trial.unreached)
    if family != "qwen3_moe":  # whose former names PEFT takes for experts
        assert without_gradient(family) == trial.unreached


def test_all_linear_leaves_them_out_and_says_so():
    model, unreached = on_meta("jamba"), RowTrial(make_config("jamba"), max_length=64).unreached
    (note,) = describe_left_out(model, find_left_out(model, LoraConfig(), unreached))
    assert note.endswith("leaves out linear layers that no gradient reaches: layers.*.mamba.dt_proj")
    names = trainable_names(apply_adapters(model, LoraConfig(), unreached=unreached))
    assert not any(".dt_proj." in name for name in names)
    assert all(any(f".{part}." in name for name in names) for part in ("in_proj", "x_proj", "out_proj", "q_proj"))


def test_layers_that_are_named_stay():
    unreached = RowTrial(make_config("jamba"), max_length=64).unreached
    lora = LoraConfig(target_modules=["dt_proj", "q_proj"])
    names = trainable_names(apply_adapters(on_meta("jamba"), lora, unreached=unreached))
    assert any(".dt_proj." in name for name in names)


@pytest.mark.parametrize("family", ["mamba", "falcon_h1", "nemotron_h"])
def test_what_peft_refuses_by_itself(family: str):
    model = on_meta(family)
    notes = describe_left_out(model, find_left_out(model, LoraConfig(), ()))
    assert len(notes) == 1 and "leaves out linear layers that PEFT refuses to adapt: " in notes[0]
    names = trainable_names(apply_adapters(model, LoraConfig()))
    assert any(".in_proj." in name for name in names) and not any(".out_proj." in name for name in names)
    with pytest.raises(AdapterError, match="Module 'out_proj' is incompatible with Mamba-based models"):
        apply_adapters(on_meta(family), LoraConfig(target_modules=["in_proj", "out_proj"]))


@pytest.mark.parametrize(("family", "sees"), [("bert", True), ("cpmant", True), ("llama", False), ("gpt2", False)])
def test_a_model_that_sees_what_it_is_to_predict_is_refused(family: str, sees: bool):
    trial = RowTrial(AutoConfig.for_model(family), max_length=64)
    assert trial.error is None and (trial.why_not_causal() is not None) == sees
    traits = Traits(transform=None, why_not_by_starts=None, why_not_causal=trial.why_not_causal())
    if sees:
        with pytest.raises(CheckpointError, match="can't learn to predict the next token: tokens see later ones"):
            check_causal(trial.small, traits)
    else:
        check_causal(trial.small, traits)


@pytest.mark.parametrize("has_bias", [True, False])
def test_classes_of_linear_layers(has_bias: bool):
    def layer_of(kind: type[nn.Linear]) -> nn.Linear:
        layer = nn.Linear(64, 64, has_bias, device="meta")
        layer.__class__ = kind
        return layer

    assert computes_linear(layer_of(nn.Linear)) and computes_linear(layer_of(FalconLinear))
    assert computes_linear(QuantizedLinear(64, 64, has_bias, Format("nf4"), torch.float32))
    for kind in (DeepseekV4GroupedLinear, Llama4Router, PhimoeTopKRouter):
        assert not computes_linear(layer_of(kind))
    assert not computes_linear(nn.utils.parametrizations.weight_norm(nn.Linear(64, 64, has_bias)))


def test_a_class_whose_trial_takes_too_much_memory_is_not_called_another_kind():
    class Large(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise MemoryError

    layer = nn.Linear(64, 64, device="meta")
    layer.__class__ = Large
    with pytest.raises(MemoryError):
        computes_linear(layer)


def test_a_layer_that_computes_something_of_its_own_is_left_out():
    model = on_meta("deepseek_v4")
    left_out = find_left_out(model, LoraConfig(), ())
    assert left_out.other and all(isinstance(model.get_submodule(n), DeepseekV4GroupedLinear) for n in left_out.other)


def test_a_model_of_which_nothing_is_quantized_says_so():
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(LlamaConfig(num_hidden_layers=1, vocab_size=64))
    (note,) = note_nothing_quantized(model, Format("nf4"))
    assert note.startswith("nothing is quantized: LlamaForCausalLM has no layers for nf4")
    model.model.layers[0].mlp.up_proj = QuantizedLinear(64, 64, False, Format("nf4"), torch.float32)
    assert note_nothing_quantized(model, Format("nf4")) == []


def test_falcons_own_linear_layers_are_quantized():
    model = on_meta("falcon")
    assert type(model.transformer.h[0].mlp.dense_h_to_4h) is FalconLinear
    swap_chosen_linears(model, Format("nf4"), QuantConfig(), torch.float32, [])
    assert type(model.transformer.h[0].mlp.dense_h_to_4h) is QuantizedLinear
