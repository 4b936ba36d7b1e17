"""What a trace on meta finds, against autograd's own account of what real layers save; and what policies keep."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.helpers.checkpoints import FAMILIES, OTHER_FAMILIES, SHAPE
from tests.helpers.patched import liger_kernels
from tests.helpers.plans import traced
from tests.helpers.quick_config import load_config
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM

from qlora_fsdp.config.schema import Config, KernelsConfig, LoraConfig, TrainingConfig
from qlora_fsdp.config.specs import BatchSpec, ModuleSpec
from qlora_fsdp.data.batch import Batch
from qlora_fsdp.data.tokenizer import NO_TOKENS
from qlora_fsdp.layers.experts.forward import expert_weight_names
from qlora_fsdp.layers.experts.grouped_products import QuantizedExpertWeight
from qlora_fsdp.layers.kernels.launch import as_on_a_gpu, bytes_moved
from qlora_fsdp.layers.lora import LoraLinear
from qlora_fsdp.layers.mlp import MAX_RANK
from qlora_fsdp.layers.quantized.format import Format
from qlora_fsdp.layers.quantized.linear import QuantizedLinear
from qlora_fsdp.layers.rewire import rewire
from qlora_fsdp.memory.policy import Policy
from qlora_fsdp.memory.traced import Operations
from qlora_fsdp.memory.workload import Workload
from qlora_fsdp.model import activations
from qlora_fsdp.model.activations import set_activation_policy
from qlora_fsdp.model.adapters.apply import apply_adapters
from qlora_fsdp.model.build import BuildSettings, build_model
from qlora_fsdp.model.find import ModelFiles, make_config
from qlora_fsdp.model.tasks.causal_lm import CausalLM
from qlora_fsdp.model.tasks.task_model import TaskModel
from qlora_fsdp.model.trials.miniature import miniature
from qlora_fsdp.tracing.live_bytes import LiveBytes
from qlora_fsdp.tracing.model_tracer import Computing, ModelTracer, UntraceableModel, batch_on_meta, trace_config
from qlora_fsdp.tracing.trace import Trace, fused_attention

TOKENS = 32
# Families of which the project knows nothing. The last three have experts.
OTHERS: dict[str, dict[str, Any]] = {
    "olmo2": {},
    "glm4": {"head_dim": 16},
    "granite": {},
    "gpt_neox": {"num_key_value_heads": None},
    "cohere": {},
    "falcon": {"new_decoder_architecture": True},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "head_dim": 16},
    "deepseek_v3": {
        **{"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "n_group": 1, "topk_group": 1},
        **{"q_lora_rank": 64, "kv_lora_rank": 64, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16},
        **{"first_k_dense_replace": 1, "num_key_value_heads": 4},
    },
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16},
}


def on_meta(family: str, config: Config, **more: Any) -> TaskModel:
    """A small model with adapters on meta, rewired as for training."""
    values = {**SHAPE, **(FAMILIES | OTHERS)[family], **more}
    hf_config = AutoConfig.for_model(family, **values, initializer_range=0.1)
    settings = BuildSettings(config.quant, torch.float32, "sdpa", keep=config.lora.modules_to_save or [])
    if family in ("gemma2", "gpt_oss"):
        settings = BuildSettings(config.quant, torch.float32, "eager", keep=config.lora.modules_to_save or [])
    built = build_model(ModelFiles(None, hf_config), settings)
    model = CausalLM(apply_adapters(built.model, config.lora))
    rewire(model, config.compute, config.kernels)
    return model.train()


def make_model(family: str, config: Config, **more: Any) -> TaskModel:
    """The same with random weights on the CPU, unsharded."""
    torch.manual_seed(0)
    model = on_meta(family, config, **more)
    source = AutoModelForCausalLM.from_config(model.base.config)  # for buffers that `to_empty` leaves undefined
    model.to_empty(device="cpu")
    for name, buffer in source.named_buffers():
        model.base.get_buffer(name).copy_(buffer)
    for param in model.parameters():
        if param.is_floating_point() and param.dtype == torch.float32:
            param.data.normal_(0.0, 0.1)
        else:
            param.data.zero_()
    return model


def batch() -> Batch:
    """Two rows in one sequence."""
    ids = torch.arange(TOKENS).unsqueeze(0)
    positions = torch.cat([torch.arange(TOKENS // 2)] * 2).unsqueeze(0)
    return Batch(ids, ids, positions, torch.tensor([0, TOKENS // 2, TOKENS], dtype=torch.int32), TOKENS // 2)


def saved_by_layer(model: TaskModel, index: int) -> int:
    """Bytes of the storages that autograd keeps for a layer of a real model; not those of its arguments and parameters.

    What functions keep by themselves is added, as autograd's hooks do not see it: low-rank products, and the order of
    experts' rows (int32, each row's pair and each pair's row, and each expert's end).
    """
    layer, found, outside = model.layers[index], dict[int, Tensor](), set[int]()
    forward = layer.forward

    def pack(tensor: Tensor) -> Tensor:
        found[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    def watched(*args: Any, **kwargs: Any) -> Any:
        named = [*kwargs.values(), *args[1:]]
        tensors = [t for value in named for t in (value if isinstance(value, (tuple, list)) else [value])]
        outside.update(t.untyped_storage().data_ptr() for t in tensors if isinstance(t, Tensor))
        with saved_tensors_hooks(pack, lambda tensor: tensor):
            return forward(*args, **kwargs)

    layer.forward = watched  # type: ignore[method-assign]
    model(batch())
    outside |= {param.untyped_storage().data_ptr() for param in model.parameters()}
    seen = sum(t.untyped_storage().nbytes() for key, t in found.items() if key not in outside)
    in_fused = sum(
        lora.r["default"]
        for module in layer.modules()
        if type(module.__dict__.get("forward")).__name__ == "GatedMlp"
        for lora in list(module.__dict__["forward"].layers)[:-1]
    )
    ranks = sum(m.r["default"] for m in layer.modules() if isinstance(m, LoraLinear) and is_function(m))
    experts = [module for module in layer.modules() if expert_weight_names(module)]
    num_rows = TOKENS * getattr(model.base.config, "num_experts_per_tok", 0)
    orders = sum(4 * (2 * num_rows + getattr(m, expert_weight_names(m)[0]).shape[0]) for m in experts)
    return seen + TOKENS * 4 * (ranks - in_fused) + orders


def is_function(layer: LoraLinear) -> bool:
    """Whether a layer is computed by the functions of layers/lora.py."""
    return type(layer.base_layer).__name__ == "QuantizedLinear"


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3_text"])
def test_a_recomputed_layer_keeps_its_input_alone(family: str):
    model = make_model(family, Config())
    own = {param.untyped_storage().data_ptr() for param in model.parameters()}

    def kept(policy: Policy) -> int:
        set_activation_policy(model.layers, [policy] * len(model.layers))
        seen: dict[int, Tensor] = {}
        with saved_tensors_hooks(lambda t: seen.setdefault(t.untyped_storage().data_ptr(), t), lambda t: t):
            model(batch())
        return sum(t.untyped_storage().nbytes() for key, t in seen.items() if key not in own)

    assert kept(Policy.full) < 0.2 * kept(Policy.none)


def lora_for(family: str) -> LoraConfig:
    """On linear layers; of experts, which are single tensors, and their router on none."""
    names = r".*(attn|attention|mlp)\.\w*(proj|dense|dense_h_to_4h|dense_4h_to_h|query_key_value)"
    if "num_experts_per_tok" in OTHERS.get(family, {}):
        names = names.replace("|mlp", "")
    return LoraConfig(r=8, target_modules=names if family in OTHERS else "all-linear")


@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "bert"] + list(OTHERS))
@pytest.mark.parametrize("policy", [Policy.none, Policy.selective])
def test_trace_is_what_autograd_saves(family: str, policy: Policy) -> None:
    """Of the second layer: the first one's input needs no gradient."""
    config = Config(lora=lora_for(family))
    model, meta = make_model(family, config), on_meta(family, config)
    set_activation_policy(model.layers, [policy] * len(model.layers))
    traced = Trace(meta, batch(), is_cuda=False, liger_kernels=()).layer(1, policy)
    # Falcon keeps numbers as tensors. No kernel of a CPU takes queries and values of different sizes, as DeepSeek's.
    error = 1024 if family == "deepseek_v3" else 64 if family == "falcon" else 0
    assert traced.saved == pytest.approx(saved_by_layer(model, 1), abs=error)


@pytest.mark.parametrize("rank", [MAX_RANK, MAX_RANK + 1])
@pytest.mark.parametrize("fuse", [True, False])
def test_trace_knows_which_layers_are_fused(rank: int, fuse: bool) -> None:
    config = Config(lora=LoraConfig(r=rank), kernels=KernelsConfig(fuse_layers=fuse))
    model, meta = make_model("llama", config), on_meta("llama", config)
    traced = Trace(meta, batch(), is_cuda=False, liger_kernels=()).layer(1, Policy.none)
    assert traced.saved == saved_by_layer(model, 1)


@pytest.mark.parametrize("saved", [["down_proj"], ["q_proj", "gate_proj"]])
def test_trace_counts_layers_that_are_trained_as_a_whole(saved: list[str]) -> None:
    config = Config(lora=LoraConfig(r=8, modules_to_save=saved))
    model, meta = make_model("llama", config), on_meta("llama", config)
    traced = Trace(meta, batch(), is_cuda=False, liger_kernels=()).layer(1, Policy.none)
    assert traced.saved == saved_by_layer(model, 1)


def test_trace_peaks_are_those_of_a_real_layer() -> None:
    """Of all storages that are alive while the same layer runs on a CPU."""
    config = Config(lora=LoraConfig(r=8))
    model, meta = make_model("llama", config), on_meta("llama", config)
    trace = Trace(meta, batch(), is_cuda=False, liger_kernels=())
    for policy in (Policy.none, Policy.full, Policy.attention):
        set_activation_policy(model.layers, [policy] * 2)
        call, layer = trace.calls[meta.layers[1]], model.layers[1]
        args = {name: real(value) for name, value in call.kwargs.items()}
        given = [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
        with LiveBytes([*layer.parameters(), *given]) as live:
            x = torch.zeros(call.shape).requires_grad_()
            y = layer(x, **args)
            forward, kept = live.peak, live.now - y.nbytes
            live.start_phase()
            y.sum().backward()
        use = trace.layer(1, policy)
        assert use.saved == kept
        assert use.forward == pytest.approx(forward - kept, rel=0.02)
        assert use.backward == pytest.approx(live.peak - kept, rel=0.02)


def real(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return tuple(real(each) for each in value)
    return torch.zeros(value.shape, dtype=value.dtype) if isinstance(value, Tensor) else value


def test_bytes_are_linear_in_tokens_where_nothing_is_quadratic() -> None:
    config = load_config(["model=llama3-8b", "training.max_length=1024"])
    model = trace_config(make_config(config.model.config, "llama3-8b"), config)
    one, two = (model.layer_use(ModuleSpec.of(config), BatchSpec.of(config, size), 0, Policy.none) for size in (1, 2))
    assert two.saved == pytest.approx(2 * one.saved, rel=1e-3)
    assert two.in_forward.products == 2 * one.in_forward.products


def test_code_that_asks_for_values_is_refused_by_name() -> None:
    config = load_config(["model=tiny"])
    computing = Computing(torch.float32, "sdpa", (), "torch", is_cuda=False)
    model = ModelTracer(ModelFiles(None, make_config(config.model.config, "tiny")), computing, NO_TOKENS)
    parts = model.parts(ModuleSpec.of(config))
    assert len(parts.kinds) == 1 and len(parts.layers) == config.model.config["num_hidden_layers"]
    layer = model._built(ModuleSpec.of(config)).model.layers[0]
    layer.forward = lambda x, **_: x[torch.nonzero(x)]  # type: ignore[method-assign]
    with pytest.raises(UntraceableModel, match=r"The model's code does what can't be planned .*experiment=dry_run"):
        model.ends_use(ModuleSpec.of(config), BatchSpec.of(config, 1))


def test_a_model_whose_rows_are_padded_is_traced_with_one_row_a_sequence() -> None:
    """Without mamba_ssm, which this host may lack, transformers' code refuses the markers of packed rows."""
    config = Config(training=TrainingConfig(packing=False, max_length=64))
    values = {**SHAPE, **OTHER_FAMILIES["granitemoehybrid"], "model_type": "granitemoehybrid"}
    tracer = trace_config(make_config(values, "granite"), config)
    assert tracer.ends_use(ModuleSpec.of(config), BatchSpec.of(config, 1)).hidden == 64 * 64 * 2
    assert [len(batch_on_meta(BatchSpec.of(config, size)).sequence_starts) for size in (1, 3)] == [2, 4]
    assert len(batch_on_meta(BatchSpec.of(Config(), 3)).sequence_starts) == 7


def test_padded_rows_are_planned_as_long_as_a_table_of_positions() -> None:
    """BERT has 512 positions. By default rows may have 2,048 tokens, and the run had no plan."""
    config = Config(training=TrainingConfig(packing=False, max_length=2048))
    values = {**SHAPE, "max_position_embeddings": 128, "model_type": "opt", "ffn_dim": 128, "word_embed_proj_dim": 64}
    tracer = trace_config(AutoConfig.for_model(**values), config)
    assert tracer.ends_use(ModuleSpec.of(config), BatchSpec.of(config, 2)).hidden == 2 * 128 * 64 * 2


@pytest.mark.parametrize("family", ["llama", "gemma2", "glm4", "olmo2", "qwen3_moe"])
def test_a_trace_of_patched_classes_launches_nothing(family: str) -> None:
    """A GPU's run patches transformers before it plans: Triton must not get the addresses of meta tensors."""
    config = load_config(["model=tiny"])
    values = {**SHAPE, **(FAMILIES | OTHERS)[family]}
    hf_config = AutoConfig.for_model(family, **values)

    def uses(chosen: list[str]) -> list[object]:
        attention = "eager" if family == "gemma2" else "sdpa"
        computing = Computing(torch.bfloat16, attention, chosen, "torch", is_cuda=False)
        tracer = ModelTracer(ModelFiles(None, hf_config), computing, NO_TOKENS)
        modules, batch = ModuleSpec.of(config), BatchSpec.of(config, 1)
        return [tracer.layer_use(modules, batch, 0, Policy.none), tracer.ends_use(modules, batch)]

    with liger_kernels(hf_config) as chosen:
        patched = uses(chosen)
    assert "rms_norm" in chosen
    assert patched == uses(chosen)


def gradients(model: TaskModel, policies: list[Policy]) -> list[Tensor]:
    """Of the adapters, after one loss; the second of two, whose host buffers are those of the first."""
    set_activation_policy(model.layers, policies)
    for _ in range(2):
        model.zero_grad()
        model(batch()).backward()
    return [param.grad for param in model.parameters() if param.grad is not None]


def test_policies_change_no_bit(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(activations, "MIN_BYTES", 0)
    model = make_model("llama", Config())
    kept = gradients(model, [Policy.none, Policy.none])
    for policies in (
        [Policy.selective] * 2,
        [Policy.attention] * 2,
        [Policy.full, Policy.attention],
        [Policy.full, Policy.none],
        [Policy.offload, Policy.full],
        [Policy.offload, Policy.offload],
        [Policy.offload_attention] * 2,
        [Policy.offload, Policy.offload_attention],
        [Policy.offload_attention, Policy.attention],
    ):
        assert all(torch.equal(a, b) for a, b in zip(gradients(model, policies), kept, strict=True)), policies


def test_host_buffers_are_as_many_as_the_tensors_and_no_larger_than_the_largest_needs(monkeypatch: pytest.MonkeyPatch):
    """Whatever lengths the batches have, in whatever order; and made once if the plan says how long they get."""
    monkeypatch.setattr(activations, "MIN_BYTES", 0)
    monkeypatch.setattr(activations, "offload_buffer_bytes", lambda num_bytes: num_bytes)
    for planned in (0, 2048 * 4 * 4):
        inputs, addresses = activations.InputOffload((planned, 0)), set[int]()
        for length in (500, 700, 1100, 1200, 90, 2000, 1300, 2048):
            tensors = [torch.randn(length, 4) for _ in range(3)]
            packed = []
            for tensor in tensors:
                inputs.end = None  # another layer
                packed.append(inputs.pack(tensor))
            for tensor, one in reversed(list(zip(tensors, packed, strict=True))):
                assert torch.equal(inputs.unpack(one), tensor)
            addresses |= {buffer.data_ptr() for buffer in inputs.inputs.free}
        assert [buffer.nbytes for buffer in inputs.inputs.free] == [2048 * 4 * 4] * 3
        assert not planned or len(addresses) == 3


def test_offloaded_layers_keep_nothing(monkeypatch: pytest.MonkeyPatch):
    """Inputs go to a few host buffers, used again, and nothing of a layer stays where it computes."""
    monkeypatch.setattr(activations, "MIN_BYTES", 0)
    made: list[int] = []
    take = activations._Buffers.take

    def count(self: activations._Buffers, tensor: Tensor) -> Tensor:
        made.append(len(self.free))
        return take(self, tensor)

    monkeypatch.setattr(activations._Buffers, "take", count)
    model = make_model("llama", Config())
    traced = Trace(on_meta("llama", Config()), batch(), is_cuda=False, liger_kernels=()).layer(1, Policy.offload)
    gradients(model, [Policy.offload, Policy.offload])
    assert traced.saved == TOKENS * (3 + 1 + 1) * 16 * 4, "h of q, k and v, of o, and of down"
    assert len(made) >= 4 and made[0] == 0 and made[-1] > 0, "two layers, twice; the second time into free buffers"


UPPER = Config(lora=LoraConfig(r=8, target_modules=r".*layers\.1\..*_proj"))  # the first layer has no adapters


@pytest.mark.parametrize("policy", list(Policy))
def test_layers_before_the_first_that_is_trained_keep_nothing(policy: Policy) -> None:
    model = make_model("llama", UPPER)
    set_activation_policy(model.layers, [policy] * len(model.layers))
    trace = Trace(on_meta("llama", UPPER), batch(), is_cuda=False, liger_kernels=())
    frozen, trained = trace.layer(0, policy, is_first=True), trace.layer(1, policy, is_first=True)
    assert (frozen.saved, frozen.host, frozen.keeps_input) == (0, (), False)
    assert frozen.in_backward == Operations() and frozen.in_forward.moved > 0
    if policy in (Policy.none, Policy.selective):
        assert (saved_by_layer(model, 0), saved_by_layer(model, 1)) == (0, trained.saved)


def test_a_plan_counts_up_to_the_first_layer_that_is_trained() -> None:
    shape = {**SHAPE, **FAMILIES["llama"], "num_hidden_layers": 4, "model_type": "llama"}
    keys = Workload(trace_config(make_config(shape, "llama"), UPPER), UPPER, 1, 1, 1).keys([Policy.none] * 4)
    assert [is_first for *_, is_first in keys] == [True, True, False, False]


def test_buffers_of_layers_without_a_backward_are_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activations, "MIN_BYTES", 0)
    inputs, model = activations.InputOffload(), make_model("llama", UPPER)
    set_activation_policy(model.layers, [Policy.offload] * len(model.layers), inputs)
    for _ in range(2):
        model(batch()).backward()
        assert (len(inputs.inputs.free), inputs.last) == (1, None)


def test_what_a_gpu_is_asked_for_is_counted() -> None:
    """Large products by their operations, groups with a tile more each; products of low rank and all else by bytes."""
    wide, narrow = (torch.empty(4096, size, dtype=torch.bfloat16, device="meta") for size in (1024, 16))
    experts, ends = wide.view(8, 512, 1024), torch.empty(8, dtype=torch.int32, device="meta")

    def asked(function: Any, *args: Any) -> Operations:
        with as_on_a_gpu(), LiveBytes([]) as live, bytes_moved(live.move):
            function(*args)
        return live.operations

    assert asked(torch.mm, wide, wide.t()) == Operations(products=2 * 4096 * 1024 * 4096)
    assert asked(torch.mm, wide.t(), narrow) == Operations(moved=wide.nbytes + narrow.nbytes + 2 * 1024 * 16)
    grouped = asked(lambda x: F.grouped_mm(x, experts, offs=ends), wide[:, :512])
    assert grouped == Operations(products=2 * (4096 + 8 * 128) * 512 * 1024)
    assert asked(lambda: torch.empty_like(wide).view(-1).t()) == Operations()
    assert asked(wide.add, wide) == asked(wide.clone) + Operations(moved=wide.nbytes)
    assert asked(wide.expand(3, 4096, 1024).clone) == Operations(moved=4 * wide.nbytes)
    assert asked(wide.index_select, 0, ends) == Operations(moved=2 * 8 * 2 * 1024)
    query = wide.view(1, 4096, 8, 128).transpose(1, 2)
    with fused_attention(is_cuda=True):
        found = asked(lambda q: F.scaled_dot_product_attention(q, q, q, is_causal=True), query)
    assert found == Operations(attention=2 * 8 * 4096 * 4096 * 128)


@pytest.mark.parametrize("double_quant", [True, False])
def test_what_kernels_move_is_counted(double_quant: bool) -> None:
    """A weight of experts is read as stored and written in 16 bits, whether whole or in parts."""
    weight = QuantizedExpertWeight((4, 256, 512), Format("nf4", double_quant, dequantizer="triton"), torch.bfloat16)
    with LiveBytes([]) as live, bytes_moved(live.move):
        assert weight.weight.nbytes == 2 * 4 * 256 * 512
        whole = live.operations
        live.start_phase()
        for first in range(0, 256, 128):
            weight.fill(torch.empty(4, 128, 512, dtype=torch.bfloat16, device="meta"), first)
    stored = sum(part.nbytes for part in weight.parts())
    assert whole == Operations(moved=2 * 4 * 256 * 512 + stored)
    assert live.operations.moved == pytest.approx(whole.moved, rel=0.03)


@pytest.mark.parametrize("dequantizer", ["bitsandbytes", "triton"])
def test_the_setting_says_whose_kernel_dequantizes_and_what_it_needs_is_traced(dequantizer: str):
    """bitsandbytes makes the scales first, float32, while the weight is made; the Triton kernel makes both at once."""
    config = load_config([f"kernels.dequantize={dequantizer}"])
    layers = [layer for layer in on_meta("llama", config).modules() if isinstance(layer, QuantizedLinear)]
    assert len(layers) == 14 and {layer.format.dequantizer for layer in layers} == {dequantizer}
    layer = layers[0]
    with LiveBytes(layer.parameters()) as live:
        weight = layer.weight
    num_scales = weight.numel() // layer.blocksize if dequantizer == "bitsandbytes" else 0
    assert live.peak == weight.nbytes + 4 * num_scales and live.now == weight.nbytes


def test_experts_take_the_same_setting():
    layers = on_meta("gpt_oss", load_config(["kernels.dequantize=triton"])).modules()
    experts = [layer for layer in layers if isinstance(layer, QuantizedExpertWeight)]
    assert experts and {layer.format.dequantizer for layer in experts} == {"triton"}


@pytest.mark.parametrize("family", ["gemma3n_text", "gemma4_text"])
def test_layers_are_traced_again_and_again_though_adapters_made_their_arguments(family: str):
    model = miniature(CONFIG_MAPPING[family]().get_text_config(), max_length=64)
    config = load_config(["model=tiny", "data=random", "quant=int8", "training.max_length=64"])
    tracer = trace_config(model, config)
    modules, batch = ModuleSpec.of(config), BatchSpec.of(config, 1)
    kept, recomputed = (tracer.layer_use(modules, batch, 0, policy).saved for policy in (Policy.none, Policy.full))
    assert kept > recomputed > 0


def test_a_routers_loss_is_that_of_every_layer():
    """Its logits are kept from forward to backward, though a trace runs one layer of each kind."""
    tokens, num_experts, uses = 4096, 128, []
    for more in (["training.router_aux_loss_coef=0"], ["training.router_aux_loss_coef=0.001"]):
        config = load_config(["model=qwen3-30b-a3b", "data=random", "training.max_length=4096", *more])
        uses.append(traced(config).ends_use(ModuleSpec.of(config), BatchSpec.of(config, 1)))
    without, added = uses
    assert added.shared - without.shared == 48 * tokens * num_experts * 2  # logits in bfloat16
    assert added.loss_backward > without.loss_backward  # their gradients, beside those of the hidden states
