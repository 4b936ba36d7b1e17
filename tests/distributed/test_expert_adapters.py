"""Adapters of experts in use, compared with stock PEFT: evaluated, merged, and written with one for each expert."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import bitsandbytes as bnb
import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from qlora_fsdp import evaluate, generate, merge, train
from tests.helpers.ranks import run_ranks
from tests.helpers.reference import stock_loss
from tests.helpers.runs import printed_by, settings, write_rows

pytestmark = pytest.mark.distributed
INPUT_IDS = torch.arange(60).view(2, 30) * 7 % 256
# As PEFT's users write it. PEFT takes `gate_proj` and the like of Qwen3-MoE for experts, whose rank it then doubles.
STOCK: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"target_modules": ["q_proj", "gate_proj", "up_proj", "down_proj"]},
    "mixtral": {"target_modules": ["q_proj", "w1", "w2", "w3"], "use_rslora": True},
    "gpt_oss": {
        "target_modules": ["q_proj"],
        "target_parameters": ["experts.gate_up_proj", "experts.down_proj"],
        "rank_pattern": {r".*\.gate_up_proj": 8},
        "alpha_pattern": {"down_proj": 3},
    },
    "llama4_text": {"target_modules": ["q_proj"], "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]},
    "deepseek_v3": {
        "target_modules": ["o_proj"],
        "target_parameters": ["gate_proj.weight", "down_proj", r"experts.gate_up_proj", "0.mlp.down_proj.weight"],
        "rank_pattern": {r"mlp\.gate_proj\.weight": 6},
    },
}
UNFUSED = ["qwen3_moe", "mixtral", "deepseek_v3"]  # whose files have a tensor for each expert


def load(folder: Path) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def with_adapter(base: Path, adapter: Path) -> peft.PeftModel:
    return peft.PeftModel.from_pretrained(load(base), adapter).eval()


def logits(model: torch.nn.Module) -> Tensor:
    with torch.no_grad():
        return model(input_ids=INPUT_IDS).logits


def read(folder: Path) -> dict[str, Tensor]:
    return {key: value for file in folder.glob("*.safetensors") for key, value in load_file(file).items()}


@pytest.fixture(scope="module")
def bases(checkpoint: Callable[..., Path]) -> dict[str, Path]:
    return {family: checkpoint(family, torch.float32) for family in STOCK}


@pytest.fixture(scope="module")
def few_rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rows(tmp_path_factory.mktemp("rows") / "rows.jsonl", 6)


@pytest.fixture(scope="module")
def stock(bases: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Adapters that PEFT has made and saved."""
    folder = tmp_path_factory.mktemp("stock")
    for family, chosen in STOCK.items():
        torch.manual_seed(0)
        model = peft.get_peft_model(load(bases[family]), peft.LoraConfig(r=4, task_type="CAUSAL_LM", **chosen))
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data.normal_(std=0.1)
        model.save_pretrained(folder / family)
    return {family: folder / family for family in STOCK}


@pytest.fixture(scope="module")
def own(bases: dict[str, Path], few_rows: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    """Adapters that this project has trained on nf4."""
    folder, found = tmp_path_factory.mktemp("own"), {}
    for family in ("qwen3_moe", "deepseek_v3"):
        few = ["training.max_steps=3", "training.learning_rate=1e-2", f"run.folder={folder / family}"]
        assert train.main(settings(bases[family], few_rows, *few, packing=False)) == 0
        found[family] = folder / family / "adapter"
    yield found


def base_settings(base: Path) -> list[str]:
    return [f"model.path={base}", "model.tokenizer_path=bytes"]


def export(base: Path, adapter: Path, out: Path, *more: str) -> int:
    return merge.main([f"adapter={adapter}", *base_settings(base), f"out={out}", "write=adapter", *more])


@pytest.mark.parametrize(("family", "num_ranks"), [*((family, 1) for family in STOCK), ("qwen3_moe", 2)])
def test_adapters_of_stock_peft_compute_what_they_compute_there(
    bases, stock, few_rows: Path, family: str, num_ranks: int
):
    data = [f"data.path={few_rows}", f"data.cache_folder={few_rows.parent}", "training.max_length=64"]
    arguments = [f"adapter={stock[family]}", "quant=none", *base_settings(bases[family]), *data, "training=padded"]
    found, *_ = run_ranks(num_ranks, printed_by, evaluate.main, arguments)
    expected, _ = stock_loss(with_adapter(bases[family], stock[family]), few_rows)
    base, _ = stock_loss(load(bases[family]), few_rows)
    assert json.loads(found)["loss"] == pytest.approx(expected, abs=1e-5) and abs(base - expected) > 1e-2


@pytest.mark.parametrize("family", STOCK)
def test_ranks_that_share_experts_write_what_stock_peft_writes(bases, stock, tmp_path: Path, family: str):
    arguments = [f"adapter={stock[family]}", "quant=none", *base_settings(bases[family]), "training.precision=float32"]
    found, *_ = run_ranks(2, printed_by, generate.main, [*arguments, "raw=true", "prompt=the cat", "max_new_tokens=12"])
    ids = torch.tensor([[256, *b"the cat"]])
    model = with_adapter(bases[family], stock[family])
    output = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False)
    expected = bytes(token for token in output[0, ids.shape[1] :].tolist() if token < 256)
    assert found == expected.decode(errors="replace") + "\n"


def test_a_completion_of_an_adapter_of_ones_own(own, capsys: pytest.CaptureFixture[str]):
    assert generate.main([f"adapter={own['deepseek_v3']}", "prompt=rain", "max_new_tokens=2"]) == 0
    assert "deepseek_v3" in capsys.readouterr().err


@pytest.mark.parametrize("family", STOCK)
def test_merged_weights_are_those_of_stock_peft_under_the_names_of_the_base(bases, stock, tmp_path: Path, family: str):
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    assert merge.main([f"adapter={stock[family]}", *base_settings(bases[family]), f"out={ours}"]) == 0
    with_adapter(bases[family], stock[family]).merge_and_unload().save_pretrained(theirs)
    found, expected, base = read(ours), read(theirs), read(bases[family])
    assert found.keys() == expected.keys() == base.keys()
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, rtol=1e-5, atol=1e-6, msg=key)
    is_changed = {key for key in base if not torch.equal(base[key], found[key])}
    assert len([key for key in is_changed if ".experts." in key]) == len(
        [key for key in base if ".experts." in key and not key.endswith("_bias")]
    )
    assert {file.name for file in ours.glob("*.safetensors")} == {f.name for f in bases[family].glob("*.safetensors")}


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_merged_onto_the_quantized_base_it_computes_what_was_trained(own, few_rows: Path, tmp_path, capsys, family):
    losses = {}
    report = [f"report_data={few_rows}", "report_rows=3", f"data.cache_folder={few_rows.parent}"]
    for base in ("full", "dequantized"):
        assert merge.main([f"adapter={own[family]}", f"out={tmp_path / base}", f"base={base}", *report]) == 0
        losses[base] = json.loads(capsys.readouterr().out.splitlines()[-1])["models"]
    exact = losses["dequantized"]
    assert exact["merged"]["loss"] == pytest.approx(exact["trained"]["loss"], abs=1e-5)
    assert exact["merged"]["kl_mean"] == pytest.approx(0, abs=1e-6)
    assert losses["full"]["merged"]["kl_mean"] > 1e-4  # what quantization takes away


def test_a_quantized_result_has_experts_in_full_precision(stock, bases, tmp_path: Path):
    """bitsandbytes' class for linear layers is all that transformers knows."""
    arguments = [f"adapter={stock['qwen3_moe']}", *base_settings(bases["qwen3_moe"])]
    for folder, more in (("full", []), ("nf4", ["quantize=nf4"])):
        assert merge.main([*arguments, f"out={tmp_path / folder}", *more]) == 0
    quantized = AutoModelForCausalLM.from_pretrained(tmp_path / "nf4", dtype=torch.float32, device_map={"": "cpu"})
    assert isinstance(quantized.model.layers[0].self_attn.q_proj, bnb.nn.Linear4bit)
    experts = load(tmp_path / "full").model.layers[0].mlp.experts
    assert torch.equal(quantized.model.layers[0].mlp.experts.gate_up_proj, experts.gate_up_proj)
    assert torch.isfinite(logits(quantized)).all()


def add_by_name(base: Path, adapter: Path, out: Path) -> Path:
    """The base's files with the adapter's products added, of which each names its layer."""
    weights, tensors = read(base), read(adapter)
    config = json.loads((adapter / "adapter_config.json").read_text())
    assert not config["use_rslora"] and not config["rank_pattern"] and not config["alpha_pattern"]
    scaling = config["lora_alpha"] / config["r"]
    layers = {key.removesuffix(".lora_A.weight") for key in tensors if key.endswith(".lora_A.weight")}
    assert len(tensors) == 2 * len(layers)
    for layer in layers:
        product = tensors[f"{layer}.lora_B.weight"] @ tensors[f"{layer}.lora_A.weight"]
        weights[f"{layer.removeprefix('base_model.model.')}.weight"] += scaling * product
    out.mkdir()
    save_file(weights, out / "model.safetensors", {"format": "pt"})
    (out / "config.json").write_text((base / "config.json").read_text())
    return out


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_the_model_card_loads_the_adapter_onto_its_base_in_full_precision_and_quantized(bases, own, family: str):
    _, onto_full, onto_quantized = (own[family] / "README.md").read_text().split("```python\n")
    tensors, reference = read(own[family]), with_adapter(bases[family], own[family])
    for code in (onto_full, onto_quantized):
        scope: dict[str, Any] = {}
        code = code.partition("```")[0].replace("path/to/this/folder", str(own[family]))
        exec(code.replace("path/to/the/base/model", str(bases[family])), scope)
        model = scope["model"].eval()
        loaded = {name.replace(".default", ""): p for name, p in model.named_parameters() if "lora_" in name}
        assert loaded.keys() == tensors.keys()
        assert all(torch.equal(loaded[key].float(), tensors[key]) for key in tensors)
        layers = {name: m for name, m in model.named_modules() if isinstance(m, bnb.nn.Linear4bit)}
        assert bool(layers) == ("BitsAndBytesConfig" in code)
        for name, layer in layers.items():
            values = bnb.functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state)
            reference.get_submodule(name).weight.data.copy_(values)
        torch.testing.assert_close(logits(model).float(), logits(reference), rtol=0, atol=1e-4)
    assert "# bitsandbytes quantizes linear layers only. Experts are none: they were nf4 in training" in onto_quantized


@pytest.mark.parametrize("family", UNFUSED)
def test_an_adapter_for_each_expert(bases, stock, tmp_path: Path, capsys, family: str):
    out = tmp_path / "out"
    assert export(bases[family], stock[family], out) == 0
    expected = logits(with_adapter(bases[family], stock[family]))
    assert (expected - logits(load(bases[family]))).abs().max() > 1e-2
    experts = {key.removesuffix(".weight") for key in read(bases[family]) if ".experts." in key}
    wanted = {f"base_model.model.{name}.lora_{letter}.weight" for name in experts for letter in "AB"}
    assert wanted == {key for key in read(out) if ".experts." in key}
    torch.testing.assert_close(
        logits(load(add_by_name(bases[family], out, tmp_path / "added"))), expected, rtol=0, atol=2e-5
    )
    arguments = [f"adapter={out}", *base_settings(bases[family]), "prompt=a"]
    assert generate.main(arguments) == 2
    shown = " ".join(capsys.readouterr().err.split())
    assert "the experts of a layer have one here. Set adapter to the adapter that it was written from" in shown
    if family != "deepseek_v3":  # whose dense layers PEFT would take for experts
        torch.testing.assert_close(logits(with_adapter(bases[family], out)), expected, rtol=0, atol=2e-5)


def test_layers_of_other_ranks_and_alphas_are_written_with_one_scaling(bases, tmp_path: Path):
    torch.manual_seed(0)
    patterns = {"rank_pattern": {"q_proj": 8}, "alpha_pattern": {"v_proj": 3}}
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "k_proj", "v_proj"], task_type="CAUSAL_LM", **patterns)
    model = peft.get_peft_model(load(bases["mixtral"]), config)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data.normal_(std=0.3)
    model.save_pretrained(tmp_path / "adapter")
    assert export(bases["mixtral"], tmp_path / "adapter", tmp_path / "out") == 0
    added = add_by_name(bases["mixtral"], tmp_path / "out", tmp_path / "added")
    torch.testing.assert_close(logits(load(added)), logits(model), rtol=0, atol=2e-5)


def test_what_can_not_be_written_with_an_adapter_for_each_expert(bases, stock, own, tmp_path: Path, capsys):
    def said(family: str, adapter: Path, *more: str) -> str:
        assert export(bases[family], adapter, tmp_path / "out", *more) == 2
        assert not (tmp_path / "out").exists()
        return " ".join(capsys.readouterr().err.split())

    message = said("gpt_oss", stock["gpt_oss"])
    assert "experts.down_proj in one tensor for all experts, and vLLM reads" in message
    assert "one scaling for all layers, and the adapter has several. Set write=model." in message
    alike = peft.LoraConfig(task_type="CAUSAL_LM", target_parameters=["gate_up_proj", "down_proj"])
    peft.get_peft_model(load(bases["gpt_oss"]), alike).save_pretrained(tmp_path / "alike")
    assert f"Give it adapter={tmp_path / 'alike'} as it is." in said("gpt_oss", tmp_path / "alike")
    message = said("gpt_oss", stock["gpt_oss"], "quantize=nf4", "base=dequantized", "report_data=/rows")
    for name in ("quantize=nf4", "base=dequantized", "report_data=/rows"):
        assert f"{name} is about a merged model, and write=adapter makes none. Leave" in message
    for name, chosen in (("attention", {"target_modules": ["q_proj"]}), ("down", {"target_parameters": ["down_proj"]})):
        model = peft.get_peft_model(load(bases["mixtral"]), peft.LoraConfig(task_type="CAUSAL_LM", **chosen))
        model.save_pretrained(tmp_path / name)
    assert "no adapters of experts and one scaling for all layers, so vLLM and SGLang read it as it is" in said(
        "mixtral", tmp_path / "attention"
    )
    assert "has no adapter of model.layers.0.mlp.experts.gate_up_proj" in said("mixtral", tmp_path / "down")


NOT_READ = {
    "is a DoRA adapter": {"use_dora": True},
    "holds whole layers (modules_to_save)": {"modules_to_save": ["lm_head"]},
    "has rows for tokens (trainable_token_indices)": {"trainable_token_indices": [3, 5]},
}


@pytest.mark.parametrize("kind", NOT_READ)
@pytest.mark.parametrize("patterns", [{}, {"rank_pattern": {"q_proj": 8}}])
def test_kinds_that_vllm_does_not_read_are_not_written(bases, tmp_path: Path, capsys, kind: str, patterns):
    config = peft.LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM", **NOT_READ[kind], **patterns)
    peft.get_peft_model(load(bases["mixtral"]), config).save_pretrained(tmp_path / "adapter")
    assert export(bases["mixtral"], tmp_path / "adapter", tmp_path / "out") == 2
    message = " ".join(capsys.readouterr().err.split())
    assert f"{kind}, which vLLM does not read beside a base. Set write=model" in message


def test_the_model_card_says_which_adapters_vllm_serves(bases, own, few_rows: Path, tmp_path: Path):
    cases = {
        "attention alone": ("qwen3_moe", ["lora.target_modules=[q_proj]"]),
        "experts in one tensor": ("gpt_oss", []),
        "with several ranks": ("gpt_oss", ["lora.rank_pattern={q_proj:2}"]),
    }
    cards = {"an adapter for each expert": (own["qwen3_moe"] / "README.md").read_text()}
    for case, (family, more) in cases.items():
        few = ["training.max_steps=1", f"run.folder={tmp_path / case}", *more]
        assert train.main(settings(bases[family], few_rows, *few, packing=False)) == 0
        cards[case] = (tmp_path / case / "adapter" / "README.md").read_text()
    assert "merge write=adapter writes them for vLLM" in cards["an adapter for each expert"]
    assert "its layers differ in rank or alpha. Make one model of both" in cards["with several ranks"]
    assert all("--enable-lora" in cards[case] for case in ("attention alone", "experts in one tensor"))


@pytest.mark.parametrize("value", ["down_proj", ["down_proj", 7], {"down_proj": 1}, [["a"]]])
def test_target_parameters_that_peft_does_not_write(bases, stock, tmp_path: Path, capsys, value: Any):
    for file in stock["qwen3_moe"].iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "adapter_config.json").read_text()) | {"target_parameters": value}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    assert generate.main([f"adapter={tmp_path}", *base_settings(bases["qwen3_moe"]), "prompt=a"]) == 2
    printed = capsys.readouterr().err
    assert "target_parameters" in printed and "adapter_config.json" in printed and "Copy it again." in printed
    assert "Traceback" not in printed


def test_an_adapter_of_another_mixture_is_refused_in_a_few_lines(bases, own, capsys: pytest.CaptureFixture[str]):
    assert generate.main([f"adapter={own['deepseek_v3']}", *base_settings(bases["mixtral"]), "prompt=a"]) == 2
    printed = capsys.readouterr().err
    assert "does not fit the model" in printed and "Set model.path to the model that it was trained on" in printed
    assert len(printed.splitlines()) < 20
