"""Experts: their products against stock PEFT, what gets an adapter, and the routers' loss."""

from __future__ import annotations

import copy
import importlib
from typing import Any

import bitsandbytes.functional as bnb
import peft
import pytest
import torch
from peft.tuners.lora.layer import ParamWrapper
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    GptOssConfig,
    GraniteMoeConfig,
    InklingTextConfig,
    Llama4TextConfig,
    MixtralConfig,
    NemotronHConfig,
    PretrainedConfig,
    Qwen3MoeConfig,
)
from transformers.models.llama4.modeling_llama4 import Llama4TextMoe

from qlora_fsdp.common.errors import AdapterError, ConfigError
from qlora_fsdp.common.sizes import IGNORE_INDEX
from qlora_fsdp.config.schema import LoraConfig
from qlora_fsdp.data.batch import lay_out
from qlora_fsdp.layers.experts import adapter, grouped_products
from qlora_fsdp.layers.experts import forward as experts
from qlora_fsdp.layers.experts.adapter import ExpertAdapter, ExpertMatrix
from qlora_fsdp.layers.experts.forward import count_loads, expert_weight_names, experts_forward
from qlora_fsdp.layers.experts.grouped_products import QuantizedExpertWeight
from qlora_fsdp.layers.experts.llama4 import compute_chosen_experts
from qlora_fsdp.layers.experts.row_order import Activation, ActivationBackward, Gate, activate, find_gate, sort_rows
from qlora_fsdp.layers.quantized.format import Format
from qlora_fsdp.layers.token_rows import ADAPTER
from qlora_fsdp.model.adapters.apply import apply_adapters, describe_idle_patterns
from qlora_fsdp.model.experts import expert_weights, find_routers
from qlora_fsdp.model.tasks.causal_lm import CausalLM, RouterLoss, describe_router_loss

NUM_EXPERTS, HIDDEN, INNER, TOKENS, TOP_K = 6, 64, 32, 13, 2
SMALL: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": HIDDEN,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_experts_per_tok": 2,
}
CONFIGS: dict[str, PretrainedConfig] = {
    "qwen3_moe": Qwen3MoeConfig(
        **SMALL, moe_intermediate_size=INNER, num_experts=NUM_EXPERTS, intermediate_size=64, head_dim=16
    ),
    "mixtral": MixtralConfig(**SMALL, intermediate_size=INNER, num_local_experts=NUM_EXPERTS),
    "gpt_oss": GptOssConfig(**SMALL, intermediate_size=INNER, num_local_experts=NUM_EXPERTS, head_dim=16),
    "nemotron_h": NemotronHConfig(hidden_size=HIDDEN, moe_intermediate_size=INNER, n_routed_experts=NUM_EXPERTS),
}
MODELS: dict[str, PretrainedConfig] = {
    **{name: CONFIGS[name] for name in ("qwen3_moe", "mixtral", "gpt_oss")},
    "granitemoe": GraniteMoeConfig(**SMALL, intermediate_size=INNER, num_local_experts=NUM_EXPERTS),
    "deepseek_v3": DeepseekV3Config(
        **SMALL,
        intermediate_size=64,
        moe_intermediate_size=INNER,
        n_routed_experts=8,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=16,
    ),
}
# Its shared experts are parameters of the same names, without adapters; its router scores them too.
INKLING = InklingTextConfig(
    **SMALL,
    intermediate_size=64,
    moe_intermediate_size=INNER,
    n_routed_experts=NUM_EXPERTS,
    layer_types=["hybrid_sliding", "hybrid"],
    mlp_layer_types=["sparse", "sparse"],
    head_dim=16,
    swa_head_dim=16,
)


def stock_experts(family: str) -> tuple[ParamWrapper, nn.Module, dict[str, ExpertAdapter]]:
    """transformers' experts under PEFT's wrappers, the experts alone, and the wrappers' adapters as ours take them."""
    modeling = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    name = next(name for name in vars(modeling) if name.endswith("Experts"))
    module = getattr(modeling, name)(CONFIGS[family])
    module.config._experts_implementation = "eager"
    for param in module.parameters():
        nn.init.normal_(param, std=0.2)
    holder = nn.Module()
    holder.experts = module
    settings = peft.LoraConfig(r=4, lora_alpha=8, target_parameters=expert_weight_names(module), target_modules=[])
    wrapper = layer = peft.inject_adapter_in_model(settings, holder).experts
    adapters = {}
    while isinstance(layer, ParamWrapper):
        lora_a, lora_b = layer.lora_A["default"], layer.lora_B["default"]
        nn.init.normal_(lora_b.weight, std=0.3)
        adapters[layer.parameter_name] = ExpertAdapter(lora_a, lora_b, layer.scaling["default"])
        layer = layer.base_layer
    return wrapper, layer, adapters


@pytest.mark.parametrize("slice_bytes", [2**30, 5000])
@pytest.mark.parametrize("family", CONFIGS)
def test_outputs_and_gradients_equal_peft(family: str, slice_bytes: int, monkeypatch: pytest.MonkeyPatch):
    torch.manual_seed(0)
    wrapper, module, adapters = stock_experts(family)
    x, w = torch.randn(TOKENS, HIDDEN, requires_grad=True), torch.rand(TOKENS, TOP_K, requires_grad=True)
    index = torch.stack([torch.randperm(NUM_EXPERTS - 1)[:TOP_K] for _ in range(TOKENS)])  # one expert gets no token
    inputs = [x, w, *(p for part in adapters.values() for p in (part.lora_a.weight, part.lora_b.weight))]
    expected = wrapper(x, index, w)
    grad = torch.randn_like(expected)
    expected_grads = torch.autograd.grad(expected, inputs, grad)
    monkeypatch.setattr(grouped_products, "MAX_SLICE_BYTES", slice_bytes)
    monkeypatch.setattr(grouped_products, "COLUMNS_MULTIPLE", 24)  # the last slice has fewer columns
    y = experts_forward(module, x, index, w, adapters)
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5)
    for found, wanted in zip(torch.autograd.grad(y, inputs, grad), expected_grads, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5 * float(wanted.abs().max()))


@pytest.mark.parametrize("top_k", [1, 2])
def test_llama4_computes_what_transformers_computes_for_all_experts(top_k: int):
    torch.manual_seed(0)
    sizes = {"hidden_size": HIDDEN, "intermediate_size": INNER, "num_local_experts": NUM_EXPERTS}
    stock = Llama4TextMoe(Llama4TextConfig(**sizes, num_experts_per_tok=top_k))
    for param in stock.parameters():
        nn.init.normal_(param, std=0.2)
    own = copy.deepcopy(stock)
    compute_chosen_experts(own)
    assert expert_weight_names(own.experts) == ["gate_up_proj", "down_proj"]
    found, expected = [], []
    x = torch.randn(2, TOKENS, HIDDEN)
    for block, values in ((own, found), (stock, expected)):
        leaf = x.clone().requires_grad_()
        y, logits = block(leaf)
        y.square().sum().backward()
        values += [y, logits, leaf.grad, block.router.weight.grad, block.shared_expert.up_proj.weight.grad]
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5 * float(theirs.abs().max()))


@pytest.mark.parametrize("family", CONFIGS)
def test_recomputation_leaves_out_the_last_product(family: str, monkeypatch: pytest.MonkeyPatch):
    """`down` is multiplied once in forward and once for the gradient, which is the same to the bit."""
    torch.manual_seed(0)
    _, module, adapters = stock_experts(family)
    x, w = torch.randn(TOKENS, HIDDEN, requires_grad=True), torch.rand(TOKENS, TOP_K, requires_grad=True)
    index = torch.randint(0, NUM_EXPERTS, (TOKENS, TOP_K))
    inputs = [x, w, *(p for part in adapters.values() for p in (part.lora_a.weight, part.lora_b.weight))]
    multiplied: list[Any] = []

    def counted(factor: Tensor, weight: Any, *args: Any) -> Tensor:
        multiplied.append(weight)
        return grouped_products.product(factor, weight, *args)

    monkeypatch.setattr(experts, "product", counted)
    kept = experts_forward(module, x, index, w, adapters)
    expected = torch.autograd.grad(kept.square().sum(), inputs)
    multiplied.clear()
    y = checkpoint(experts_forward, module, x, index, w, adapters, use_reentrant=False)
    found = torch.autograd.grad(y.square().sum(), inputs)
    up, down = (getattr(module, name) for name in expert_weight_names(module))
    assert [weight is down for weight in multiplied] == [False, True, True, False, False]
    assert all(weight is up or weight is down for weight in multiplied)
    assert torch.equal(y, kept) and all(map(torch.equal, found, expected))


def test_without_adapters_nothing_but_inputs_gets_a_gradient():
    torch.manual_seed(0)
    _, module, _ = stock_experts("gpt_oss")
    x, w, index = torch.randn(TOKENS, HIDDEN, requires_grad=True), torch.rand(TOKENS, 1), torch.zeros(TOKENS, 1).long()
    experts_forward(module, x, index, w).sum().backward()
    assert x.grad is not None and all(param.grad is None for param in module.parameters())


@pytest.mark.parametrize(
    ("quant_type", "double_quant"), [("nf4", False), ("nf4", True), ("fp4", True), ("int8", False)]
)
def test_quantized_bytes_and_values_equal_bitsandbytes(quant_type: Any, double_quant: bool):
    torch.manual_seed(0)
    shape, format = (5, 24, 128), Format(quant_type, double_quant)
    weight = torch.randn(shape)
    made = QuantizedExpertWeight(shape, format, torch.float32, "cpu")
    codes, absmax = format.quantize_rows(weight.flatten(0, 1))
    parts = [codes, *(format.quantize_scales(absmax) if double_quant else [absmax])]
    for name, part in zip(made.part_names, parts, strict=True):
        assert getattr(made, name).shape == part.shape
        setattr(made, name, nn.Parameter(part, requires_grad=False))
    if quant_type == "int8":
        int8, scales, _ = torch.ops.bitsandbytes.int8_vectorwise_quant.default(weight.flatten(0, 1).half())
        assert torch.equal(made.codes.view(torch.int8), int8) and torch.equal(made.scales, scales)
    else:
        stock, state = bnb.quantize_4bit(weight, compress_statistics=double_quant, quant_type=quant_type)
        assert torch.equal(made.codes.view(torch.uint8).flatten(), stock.flatten())
        assert torch.equal(made.weight, bnb.dequantize_4bit(stock, state))
    strided = torch.zeros(5, 9, 72)
    made.fill(strided[:, :7, :64], 3, 64)
    assert torch.equal(strided[:, :7, :64], made.weight[:, 3:10, 64:])
    assert not strided[:, 7:].any() and not strided[:, :, 64:].any()
    whole = torch.zeros(5, 24, 128)
    made.fill(whole)
    assert torch.equal(whole, made.weight)


def test_short_steps_hold_little_of_the_weights_at_a_time():
    """Qwen3-30B-A3B's gate_up_proj: all of it takes 774 MiB with its adapters, and a product at most 512 MiB."""
    num_experts, width, num_outputs = 128, 2048 + 16, 1536

    def slices(num_tokens: int) -> list[int]:
        rows = torch.empty(8 * num_tokens, width, dtype=torch.bfloat16, device="meta")
        size = grouped_products.slice_width(rows, num_experts, num_outputs)
        return [min(size, num_outputs - first) for first in range(0, num_outputs, size)]

    assert slices(512) == slices(2048) == [768] * 2 and 768 * num_experts * width * 2 <= 2**29
    assert slices(4096) == [1536]


def model_of(family: str) -> Any:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config((MODELS | {"inkling": INKLING})[family])


@pytest.mark.parametrize("family", MODELS)
def test_every_linear_layer_and_expert_is_adapted_and_no_router(family: str):
    model = model_of(family)
    routers, head = find_routers(model), model.get_output_embeddings()
    assert routers
    linears = {
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and module is not head and name not in routers
    }
    weights = {place.name for place in expert_weights(model)}
    wrapped = apply_adapters(model, LoraConfig(r=4))
    keys = {name for name, param in wrapped.named_parameters() if param.requires_grad}
    adapted = {key.removeprefix("base_model.model.").partition(".lora_")[0] for key in keys}
    wrappers = {name for name in adapted if name.endswith(("experts", ".base_layer"))}
    assert adapted - wrappers == linears
    assert {name.removesuffix(".base_layer") for name in wrappers} == {name.rpartition(".")[0] for name in weights}
    assert len(keys) == 2 * (len(linears) + len(weights))


@pytest.mark.parametrize("family", [*MODELS, "inkling"])
def test_stock_peft_makes_the_same_adapters_of_the_saved_settings(family: str):
    ours = apply_adapters(model_of(family), LoraConfig(r=4, rank_pattern={"o_proj": 2}))
    saved = ours.peft_config[ADAPTER].to_dict()
    stock = peft.get_peft_model(model_of(family), peft.LoraConfig(**saved))
    shapes = [
        {name: param.shape for name, param in model.named_parameters() if "lora_" in name} for model in (ours, stock)
    ]
    assert shapes[0] == shapes[1]


def test_patterns_without_effect_are_named_and_no_others(recwarn: pytest.WarningsRecorder):
    model = model_of("qwen3_moe")
    ranks = {"experts.gate_up_proj": 2, "mlp.gate": 2, "q_proj": 3}
    config = LoraConfig(r=4, rank_pattern=ranks, alpha_pattern={"experts.down_proj": 8.0, "mlp.experts": 8.0})
    apply_adapters(model, config)
    assert describe_idle_patterns(model, config) == [
        "lora.rank_pattern: mlp.gate fits no layer or weight with an adapter, and has no effect",
        "lora.alpha_pattern: mlp.experts fits no layer or weight with an adapter, and has no effect",
    ]
    assert not [warning for warning in recwarn if "were ignored" in str(warning.message)]


def test_experts_can_be_left_out():
    wrapped = apply_adapters(model_of("qwen3_moe"), LoraConfig(r=4, experts=False))
    assert {
        name.split(".lora_")[0].rpartition(".")[2] for name, _ in wrapped.named_parameters() if "lora_" in name
    } == {
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
    }


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"target_modules": ["gate"]}, "model.layers.0.mlp.gate is a router"),
        ({"target_modules": ["gate_proj"]}, "gate_proj without up_proj"),
        ({"target_modules": ["q_proj", "mlp"]}, "model.layers.0.mlp is no linear layer"),
        ({"lora_dropout": 0.1}, "lora.lora_dropout=0.1: PEFT has none"),
        ({"use_dora": True}, "lora.use_dora=true: PEFT has none"),
        ({"init_lora_weights": "orthogonal"}, "one for each expert"),
    ],
)
def test_what_experts_can_not_have_is_refused(settings: dict[str, Any], words: str):
    with pytest.raises(AdapterError, match=words):
        apply_adapters(model_of("qwen3_moe"), LoraConfig(r=4, **settings))


@pytest.mark.parametrize("targets", [["gate_proj", "up_proj"], ["gate_up_proj"], ["mlp.experts.gate_up_proj"]])
def test_former_names_of_experts_mean_their_weight(targets: list[str]):
    wrapped = apply_adapters(model_of("qwen3_moe"), LoraConfig(r=4, target_modules=targets))
    assert wrapped.peft_config[ADAPTER].target_parameters == ["gate_up_proj"]


def test_loads_are_counted_while_training():
    torch.manual_seed(0)
    _, module, _ = stock_experts("qwen3_moe")
    (load,) = count_loads(module)
    index = torch.tensor([[0, 1], [0, 2], [0, 5]])
    for _ in range(2):
        experts_forward(module, torch.randn(3, HIDDEN), index, torch.rand(3, 2))
    module.eval()
    experts_forward(module, torch.randn(3, HIDDEN), index, torch.rand(3, 2))
    assert load.counts is not None and load.counts.tolist() == [6, 2, 2, 0, 0, 2]


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "gpt_oss"])
def test_router_loss_equals_transformers(family: str):
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(MODELS[family], dtype=torch.float32).eval()
    model.router_aux_loss_coef = 0.3
    batch = collate_two()
    outputs = model(batch.input_ids, labels=batch.input_ids, output_router_logits=True)
    without: Tensor = model(batch.input_ids, labels=batch.input_ids).loss
    found = RouterLoss(model, 0.3).of(outputs.router_logits, batch)
    torch.testing.assert_close(found, outputs.loss - without, rtol=1e-4, atol=1e-5)


def test_held_out_rows_have_no_router_loss():
    """Their loss is that of `evaluate`, so that runs of different coefficients can be compared by it."""
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_config(MODELS["qwen3_moe"], dtype=torch.float32)
    stock: Any = copy.deepcopy(base).eval()
    stock.router_aux_loss_coef = 0.3
    adapter = peft.LoraConfig(target_modules=["q_proj"])
    model, batch = CausalLM(peft.get_peft_model(base, adapter, adapter_name=ADAPTER)), collate_two()
    model.router_loss = RouterLoss(model.base, 0.3)
    num_targets = int((batch.targets != IGNORE_INDEX).sum())
    for is_training in (False, True):
        labels, inputs = batch.input_ids, {"output_router_logits": is_training}
        expected = stock(batch.input_ids, labels=labels, **inputs).loss
        found = model.train(is_training)(batch) / num_targets
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_a_micro_batch_without_rows_adds_nothing():
    """A rank has one where the last step of a run is short. Its mean over no tokens was NaN, and the step was lost."""
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_config(MODELS["qwen3_moe"], dtype=torch.float32)
    adapter = peft.LoraConfig(target_modules=["q_proj"])
    model = CausalLM(peft.get_peft_model(base, adapter, adapter_name=ADAPTER)).train()
    model.router_loss = RouterLoss(model.base, 0.3)
    loss = model(lay_out([[], []], 8, 0))
    loss.backward()
    assert loss == 0
    assert all(not param.grad.any() for param in model.parameters() if param.grad is not None)


def collate_two() -> Any:
    rows = [[(torch.arange(8).numpy() + start, torch.ones(8, dtype=torch.bool).numpy())] for start in (5, 40)]
    return lay_out(rows, 8, 0)


def test_a_model_without_router_loss_is_refused_and_one_with_is_told():
    model = model_of("deepseek_v3")
    with pytest.raises(ConfigError, match="has no load-balancing loss"):
        RouterLoss(model, 0.1)
    assert describe_router_loss(model, 0.0) == []
    assert "router_aux_loss_coef=0" in describe_router_loss(model_of("mixtral"), 0.0)[0]
    assert describe_router_loss(model_of("mixtral"), 0.01) == []


GATES = {
    "qwen3_moe": Gate("silu"),
    "mixtral": Gate("silu"),
    "gpt_oss": Gate("silu", is_interleaved=True, alpha=1.702, limit=7.0, offset=1.0),
}


@pytest.mark.parametrize("family", GATES)
def test_gates_are_found_by_what_they_compute(family: str):
    _, module, _ = stock_experts(family)
    assert find_gate(module) == GATES[family]
    module._apply_gate = lambda y: y.chunk(2, -1)[0] - y.chunk(2, -1)[1]
    assert find_gate(module) is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton's interpreter is for hosts without a GPU")
class TestKernelsInterpreted:
    @pytest.fixture
    def kernels(self) -> Any:
        pytest.importorskip("triton")
        return importlib.import_module("qlora_fsdp.layers.kernels.triton_experts")

    def test_rows(self, kernels: Any):
        torch.manual_seed(0)
        x, rows = torch.randn(TOKENS, 40), sort_rows(torch.randint(0, NUM_EXPERTS, (TOKENS, TOP_K)), NUM_EXPERTS)
        strided = torch.zeros(TOKENS * TOP_K, 48)
        kernels.gather(x, rows.token, strided[:, :40])
        assert torch.equal(strided[:, :40], x[rows.order.long() // TOP_K]) and not strided[:, 40:].any()
        torch.testing.assert_close(kernels.combine(strided[:, :40], rows.position), TOP_K * x)

    @pytest.mark.parametrize("shape", [(1, 1), (7, 3), (90, 4)])
    def test_order_of_few_rows(self, kernels: Any, shape: tuple[int, int]):
        """All pairs are compared with all: several programs rank, and the last experts have no rows."""
        torch.manual_seed(0)
        index = torch.randint(0, 33, shape)
        expected = sort_rows(index, 40)
        order, position, ends = kernels.rank_rows(index, 40)
        assert torch.equal(order, expected.order)
        assert torch.equal(position, expected.position)
        assert torch.equal(ends, expected.ends)

    @pytest.mark.parametrize("block", [16, 2048])
    @pytest.mark.parametrize("gate", [*GATES.values(), Gate("gelu_tanh")])
    def test_activation(self, kernels: Any, gate: Gate, block: int, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr(kernels, "MAX_BLOCK", block)
        torch.manual_seed(0)
        y, w, grad = 4 * torch.randn(9, 2 * 40), torch.rand(9), torch.randn(9, 40)
        activation = Activation(gate, True, gate)
        expected, found = torch.zeros(9, 40), torch.zeros(9, 48)
        activate(y, w, activation, expected)
        kernels.activate(y, w, gate, found[:, :40])
        torch.testing.assert_close(found[:, :40], expected)
        backward, expected_grad, found_grad = ActivationBackward(y, w, grad, activation), *torch.zeros(2, 9, 88)
        backward(expected_grad[:, :80])
        act, grad_w = kernels.activate_backward(y, w, grad, gate, found_grad[:, :80])
        torch.testing.assert_close(found_grad, expected_grad, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(act, backward.activated_SI)
        torch.testing.assert_close(grad_w, backward.grad_w_S, rtol=1e-5, atol=1e-4)

    @pytest.mark.parametrize("rank", [4, 20])
    @pytest.mark.parametrize("is_by_rank", [False, True])
    def test_matrices_of_adapters(self, kernels: Any, is_by_rank: bool, rank: int, monkeypatch: pytest.MonkeyPatch):
        """Into tensors of their own, beside and below a weight; gradients back into PEFT's layouts.

        In float16: the interpreter cuts a bfloat16 off, and does not round it.
        """
        torch.manual_seed(0)
        num_experts, width = 34, 70
        linear = nn.Linear(rank * num_experts, width) if is_by_rank else nn.Linear(width, rank * num_experts)
        matrix = ExpertMatrix(linear, num_experts, is_by_rank, 0.3)
        grad_ERX = torch.randn(num_experts, rank, width).half()
        monkeypatch.setattr(F, "grouped_mm", lambda *_, **__: grad_ERX)
        results = []
        for uses_kernels in (False, True):
            monkeypatch.setattr(adapter, "uses_kernels", lambda _: uses_kernels)  # noqa: B023
            beside = torch.zeros(num_experts, 9 + width, 5 + matrix.rank).half()
            matrix.fill(beside[:, 9:, 5:].transpose(1, 2))
            below = torch.zeros(num_experts, 5 + matrix.rank, 32).half()
            matrix.fill(below[:, 5:], first=width - 32)
            rows = sort_rows(torch.zeros(1, 1).long(), num_experts)
            results.append((matrix.to(torch.float16), beside, below, matrix.gradient(*torch.zeros(2, 1, 1), rows)))
        for plain, by_kernel in zip(*results, strict=True):
            assert torch.equal(plain, by_kernel) and plain.any()
        assert not results[0][0][:, rank:].any()
