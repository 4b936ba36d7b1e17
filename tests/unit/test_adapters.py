"""Which adapters are made, which settings are refused by name, and that names are matched as PEFT matches them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import peft
import pytest
import torch
from peft.tuners.tuners_utils import check_target_module_exists
from peft.utils.other import TrainableTokensWrapper, get_pattern_key
from safetensors.torch import load_file, save_file
from tests.helpers.checkpoints import OTHER_FAMILIES, SHAPE, VOCAB, quantize_checkpoint
from tests.helpers.families import make_config
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from qlora_fsdp.common.errors import AdapterError
from qlora_fsdp.common.module_names import fits_pattern, is_target
from qlora_fsdp.config.schema import EmbeddingStorage, LoraConfig, ModelConfig, QuantConfig
from qlora_fsdp.data.tokenizer import AddedTokens
from qlora_fsdp.layers.lora import LoraEmbedding
from qlora_fsdp.layers.quantized.linear import QuantizedLinear
from qlora_fsdp.layers.token_rows import ADAPTER
from qlora_fsdp.model.adapters import model_card
from qlora_fsdp.model.adapters.apply import apply_adapters, check_no_experts_are_trained_whole, trainable_names
from qlora_fsdp.model.adapters.initialize import initialize_adapters
from qlora_fsdp.model.adapters.other_adapter import OtherAdapter
from qlora_fsdp.model.adapters.read_adapter import SavedAdapter, adapter_parameters
from qlora_fsdp.model.adapters.write_adapter import describe_lost_keys
from qlora_fsdp.model.build import BuildSettings, build_model
from qlora_fsdp.model.find import ModelFiles, find_model
from qlora_fsdp.sharding.shard import place_model

DTYPE = torch.bfloat16


def adapt(folder: Path, config: LoraConfig, dtype: torch.dtype = DTYPE, load_in_4bit: bool = True) -> nn.Module:
    files = find_model(ModelConfig(path=str(folder)), True, lambda error: error)
    built = build_model(
        files, BuildSettings(QuantConfig(load_in_4bit=load_in_4bit), dtype, "eager", keep=config.modules_to_save or [])
    )
    return apply_adapters(built.model, config)


def test_what_is_trained_is_in_float32_and_all_else_is_frozen(checkpoint: Callable[..., Path]):
    model = adapt(checkpoint("llama"), LoraConfig(target_modules=["q_proj"], modules_to_save=["mlp", "lm_head"]))
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert set(trained) == set(trainable_names(model))
    assert {parameter.dtype for parameter in trained.values()} == {torch.float32}
    kinds = [sum(part in name for name in trained) for part in ("lora_A", "lora_B", ".mlp.modules_to_save", "lm_head")]
    assert kinds == [2, 2, 6, 1] and len(trained) == 11
    assert all(isinstance(m, QuantizedLinear) for name, m in model.named_modules() if name.endswith("v_proj"))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (LoraConfig(target_modules=["q_proi"]), r"lora.target_modules: q_proi fits no module .* Close: q_proj"),
        (LoraConfig(rank_pattern={"q_proi": 4}), r"lora.rank_pattern: q_proi fits no module"),
        (LoraConfig(alpha_pattern={"q_proj": 4.0, "k": 4.0}), r"lora.alpha_pattern: k fits no module"),
        (LoraConfig(modules_to_save=["score"]), r"lora.modules_to_save: score fits no module"),
        (LoraConfig(target_modules=["input_layernorm"]), r"lora.target_modules=.* fits a layer that is not linear"),
        (
            LoraConfig(target_modules=["embed_tokens"], use_dora=True),
            r"embed_tokens can't have DoRA's magnitudes",
        ),
        (
            LoraConfig(target_modules=r".*\.qq_proj"),
            r"lora.target_modules=.* is a regular expression that fits no module",
        ),
    ],
)
def test_names_that_can_not_be_adapted(checkpoint: Callable[..., Path], config: LoraConfig, message: str):
    with pytest.raises(AdapterError, match=message):
        adapt(checkpoint("llama"), config)


def test_a_router_that_gives_more_than_a_product_gets_no_adapter():
    """Llama 4's is an nn.Linear of a class of its own, which returns scores and logits."""

    def llama4() -> PreTrainedModel:
        config = AutoConfig.for_model("llama4_text", **SHAPE | OTHER_FAMILIES["llama4_text"])
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config)

    names = trainable_names(apply_adapters(llama4(), LoraConfig()))
    assert {name.split(".lora_")[0].rpartition(".")[2] for name in names} == {
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
        "gate_proj",
        "up_proj",
        "down_proj",
    }
    with pytest.raises(AdapterError, match=r"feed_forward.router is a router \(Llama4Router\)"):
        apply_adapters(llama4(), LoraConfig(target_modules=["router", "q_proj"]))


def test_a_card_names_routers_that_stock_bitsandbytes_would_quantize():
    """HunYuan's are linear layers, which here are found beside the experts."""
    meta = build_model(ModelFiles(None, make_config("hunyuan_v1_moe")), BuildSettings(QuantConfig(), DTYPE, "eager"))
    usage = model_card._quantized_usage(apply_adapters(meta.model, LoraConfig()), "import x\n\ny", '"base"')
    assert "such as routers, are not quantized here either: wg." in usage
    assert '"wg"]' in usage.partition("llm_int8_skip_modules=")[2]


def test_a_head_that_shares_the_embeddings_weight_is_never_quantized(checkpoint: Callable[..., Path]):
    files = find_model(ModelConfig(path=str(checkpoint("qwen2"))), True, lambda error: error)
    model = build_model(files, BuildSettings(QuantConfig(llm_int8_skip_modules=["v_proj"]), DTYPE, "eager")).model
    assert type(model.lm_head) is nn.Linear and model.lm_head.weight is model.model.embed_tokens.weight
    assert type(model.model.layers[0].self_attn.k_proj) is QuantizedLinear


def test_a_tied_head_is_trained_without_a_word_about_an_option_of_pefts(
    checkpoint: Callable[..., Path], recwarn: pytest.WarningsRecorder
):
    adapt(checkpoint("qwen2"), LoraConfig(modules_to_save=["lm_head"]))
    assert [str(warning.message) for warning in recwarn if "ensure_weight_tying" in str(warning.message)] == []


def test_dora_needs_rows_with_a_direction(checkpoint: Callable[..., Path]):
    """Stock trains on NaN: a padding token's row in a tied head is zero, and so is its norm."""
    model = adapt(checkpoint("qwen2"), LoraConfig(target_modules=["lm_head"], use_dora=True))
    place_model(model, torch.device("cpu"), torch.device("cpu"))
    weight = model.get_base_model().lm_head.base_layer.weight.data.fill_(1.0)
    initialize_adapters(model, True, seed=0)
    weight[258] = 0.0
    with pytest.raises(AdapterError, match=r"lora.use_dora=true: lm_head has rows that are all zero.*Add lm_head to"):
        initialize_adapters(model, True, seed=0)


def test_codes_are_not_trained(checkpoint: Callable[..., Path], tmp_path: Path):
    folder = quantize_checkpoint(checkpoint("llama", torch.float32), tmp_path / "quantized", load_in_4bit=True)
    with pytest.raises(AdapterError, match=r"lora.modules_to_save: model.layers.0.mlp is quantized in the checkpoint"):
        adapt(folder, LoraConfig(modules_to_save=["mlp"], target_modules=["q_proj"]))
    with pytest.raises(AdapterError, match=r"lora.modules_to_save: model.layers.0.mlp.experts has the experts"):
        adapt(checkpoint("qwen3_moe"), LoraConfig(modules_to_save=["experts"], target_modules=["q_proj"]))


def test_experts_are_not_trained_whole_but_an_adapter_that_has_them_is_used(checkpoint: Callable[..., Path]):
    lora = LoraConfig(modules_to_save=["experts"], target_modules=["q_proj"])
    model = adapt(checkpoint("qwen3_moe"), lora, load_in_4bit=False)
    with pytest.raises(AdapterError, match=r"lora.modules_to_save: model.layers.0.mlp.experts has the experts"):
        check_no_experts_are_trained_whole(model)


@pytest.mark.parametrize(
    ("family", "quant", "lora", "message"),
    [
        (
            "llama",
            QuantConfig(llm_int8_skip_modules=["none"]),
            LoraConfig(),
            "lm_head is quantized, and can't .* or, if the model's files have it quantized, set model.path to",
        ),
        ("bert", QuantConfig(), LoraConfig(), "decoder has a bias, which PEFT's trainable tokens leave out"),
        (
            "llama",
            QuantConfig(),
            LoraConfig(target_modules=["lm_head"]),
            "lm_head is in lora.target_modules",
        ),
        (
            "llama",
            QuantConfig(),
            LoraConfig(target_modules=".*(q_proj|lm_head)"),
            "lm_head is in lora.target_modules",
        ),
        (
            "qwen2",
            QuantConfig(),
            LoraConfig(modules_to_save=["lm_head"]),
            "embed_tokens shares its weight with the head, which lora.modules_to_save trains as a whole, and can't",
        ),
    ],
)
def test_tables_that_can_not_have_new_tokens(checkpoint, family: str, quant: QuantConfig, lora: LoraConfig, message):
    files = find_model(ModelConfig(path=str(checkpoint(family))), True, lambda error: error)
    built = build_model(files, BuildSettings(quant, DTYPE, "eager"))
    skips = built.notes == ["quant.llm_int8_skip_modules: none fits no linear layer, so that none is left out"]
    assert skips == (quant.llm_int8_skip_modules is not None)
    tokens = AddedTokens(frozenset({VOCAB}), frozenset({VOCAB}), VOCAB + 1)
    with pytest.raises(AdapterError, match=f"tokenizer.add_tokens: .*{message}"):
        apply_adapters(built.model, lora, tokens=tokens)


def test_new_tokens_that_are_all_behind_the_tables(checkpoint):
    files = find_model(ModelConfig(path=str(checkpoint("llama"))), True, lambda error: error)
    built = build_model(files, BuildSettings(QuantConfig(), DTYPE, "eager"))
    tokens = AddedTokens(frozenset({VOCAB}), frozenset({VOCAB}), VOCAB + 1)
    layer = apply_adapters(built.model, LoraConfig(), tokens=tokens).base_model.model.lm_head.token_adapter
    assert layer.replaced.dtype == torch.int64 and len(layer.replaced) == 0 and len(layer.slots) == VOCAB + 1


def test_the_weight_of_embeddings_with_new_tokens_is_their_table(checkpoint):
    """Llama 4 asks it for its device in each forward, and Gemma 4 for the padding token's row."""
    files = find_model(ModelConfig(path=str(checkpoint("llama"))), True, lambda error: error)
    built = build_model(files, BuildSettings(QuantConfig(), DTYPE, "eager"))
    table = built.model.get_input_embeddings().weight
    tokens = AddedTokens(frozenset({3, VOCAB}), vocab_size=VOCAB + 1)
    embeddings = apply_adapters(built.model, LoraConfig(), tokens=tokens).get_base_model().get_input_embeddings()
    assert isinstance(embeddings, TrainableTokensWrapper) and embeddings.weight is table


def test_the_padding_tokens_column_gets_the_gradient_that_peft_gives_it():
    """None, though the token may be read: of many models it ends the texts too."""
    torch.manual_seed(0)
    table = nn.Embedding(10, 6, padding_idx=2)
    settings = peft.LoraConfig(r=3, lora_alpha=5)
    stock = peft.tuners.lora.Embedding(table, ADAPTER, settings, r=3, lora_alpha=5)
    ours = LoraEmbedding(table, ADAPTER, settings, r=3, lora_alpha=5)
    nn.init.normal_(stock.lora_embedding_A[ADAPTER])
    ours.load_state_dict(stock.state_dict())
    weight = torch.randn(2, 4, 6)
    for layer in (stock, ours):
        (layer(torch.tensor([[1, 2, 3, 2], [9, 1, 2, 0]])) * weight).sum().backward()
    for name in ("lora_embedding_A", "lora_embedding_B"):
        expected = getattr(stock, name)[ADAPTER].grad
        torch.testing.assert_close(getattr(ours, name)[ADAPTER].grad, expected)
    gradient = ours.lora_embedding_A[ADAPTER].grad
    assert gradient[:, 2].abs().max() == 0 and gradient[:, 1].abs().max() > 0


@pytest.mark.parametrize("storage", EmbeddingStorage)
def test_a_table_keeps_its_padding_token(checkpoint: Callable[..., Path], storage: EmbeddingStorage):
    files = find_model(ModelConfig(path=str(checkpoint("llama"))), True, lambda error: error)
    built = build_model(files, BuildSettings(QuantConfig(embeddings=storage), DTYPE, "eager"))
    assert built.model.get_input_embeddings().padding_idx == SHAPE["pad_token_id"]


def test_an_adapter_of_embeddings_takes_no_places_for_single_passes(checkpoint: Callable[..., Path], tmp_path: Path):
    own = peft.LoraConfig(target_modules=["q_proj", "embed_tokens"], task_type="CAUSAL_LM")
    stock = AutoModelForCausalLM.from_pretrained(checkpoint("llama", torch.float32))
    peft.get_peft_model(stock, own).save_pretrained(tmp_path)
    model = adapt(checkpoint("llama"), LoraConfig(target_modules=["q_proj", "embed_tokens"]))
    saved = SavedAdapter(tmp_path, "distill.teacher_adapter")
    with pytest.raises(AdapterError, match=r"adapts embeddings, which can't be switched here. Set distill.teacher_ad"):
        OtherAdapter(saved, model, torch.device("cpu"))


@pytest.mark.parametrize(
    ("ending", "shape"), [("A", (4, 65)), ("A", (3, 64)), ("A", (0, 64)), ("B", (63, 4)), ("B", (64,)), ("B", None)]
)
def test_matrices_that_do_not_fit_have_no_places_for_single_passes(
    checkpoint: Callable[..., Path], tmp_path: Path, ending: str, shape: tuple[int, ...] | None
):
    stock = AutoModelForCausalLM.from_pretrained(checkpoint("llama", torch.float32))
    peft.get_peft_model(stock, peft.LoraConfig(r=4, target_modules=["q_proj"])).save_pretrained(tmp_path)
    file = tmp_path / "adapter_model.safetensors"
    tensors = load_file(file)
    key = next(name for name in sorted(tensors) if name.endswith(f"lora_{ending}.weight"))
    del tensors[key]
    if shape is not None:
        tensors[key] = torch.zeros(shape)
    save_file(tensors, file)
    model = adapt(checkpoint("llama"), LoraConfig(target_modules=["q_proj"]))
    saved = SavedAdapter(tmp_path, "distill.teacher_adapter")
    with pytest.raises(AdapterError, match=r"does not fit the model\. Set distill\.teacher_adapter to an"):
        OtherAdapter(saved, model, torch.device("cpu"))


def test_gpt2_is_told_which_of_its_layers_are_linear():
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model("gpt2"))
    with pytest.raises(AdapterError, match=r"c_attn is no linear layer \(Conv1D\). .*; here are lm_head.$"):
        apply_adapters(model, LoraConfig())


@pytest.mark.parametrize(("family", "lost"), [("laguna", "mlp.shared_experts.down_proj"), ("qwen3_moe", None)])
def test_adapters_that_peft_would_not_find_again_are_told(family: str, lost: str | None):
    """PEFT loads Laguna's by a rule for the files' `shared_expert`, which fits `shared_experts` too."""
    with torch.device("meta"):
        base, other = (AutoModelForCausalLM.from_config(make_config(family)) for _ in range(2))
    model = apply_adapters(base, LoraConfig(r=4))
    stock = peft.get_peft_model(other, peft.LoraConfig(**model.peft_config[ADAPTER].to_dict()), low_cpu_mem_usage=True)
    keys = {key: torch.zeros(param.shape) for key, param in adapter_parameters(model).items()}
    missing = peft.set_peft_model_state_dict(stock, keys, low_cpu_mem_usage=True).missing_keys
    assert any(f"{lost}.lora_A" in key for key in missing) == (lost is not None)
    assert [f"layers.*.{lost}" in note for note in describe_lost_keys(model)] == [True] * (lost is not None)


NAMES = [
    "model.embed_tokens",
    "model.layers.0.self_attn.q_proj",
    "model.layers.1.self_attn.o_proj",
    "model.layers.1.mlp.gate_proj",
    "model.layers.11.mlp.gate_up_proj",
    "model.layers.11.mlp.down_proj",
    "lm_head",
]
TARGETS = ["q_proj", "proj", "mlp.gate_proj", "model.layers.1.self_attn.o_proj", "lm_head"]


@pytest.mark.parametrize("targets", [TARGETS, TARGETS[:1], [], r".*\.1\.mlp\..*", "gate_proj", r".*(q|up)_proj"])
def test_targets_are_those_of_peft(targets: list[str] | str):
    config = peft.LoraConfig()
    config.target_modules = targets  # as PEFT's own set would be: its constructor takes lists alone
    assert [is_target(name, targets) for name in NAMES] == [
        bool(check_target_module_exists(config, name)) for name in NAMES
    ]


@pytest.mark.parametrize("pattern", ["q_proj", "proj", r"layers\.1\..*", "down_proj|o_proj", "model", r"mlp\.gate"])
def test_patterns_are_those_of_peft(pattern: str):
    assert [fits_pattern(name, pattern) for name in NAMES] == [
        get_pattern_key([pattern], name) == pattern for name in NAMES
    ]
