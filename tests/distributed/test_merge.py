"""Merged models, loaded by stock transformers, give the logits of base and adapter; a cut-off merge is gone on with."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import bitsandbytes as bnb
import numpy as np
import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from qlora_fsdp import merge
from qlora_fsdp.common import files
from qlora_fsdp.common.errors import DataError, RunFolderError
from qlora_fsdp.config.reading.commands import read_report_digest
from qlora_fsdp.config.schema import QuantConfig
from qlora_fsdp.data.report_rows import ReportRows, read_report_rows
from qlora_fsdp.inference import gguf_files, merge_files, merge_formats, merge_report
from qlora_fsdp.inference.rounding import round_to_16_bits
from qlora_fsdp.weights.safetensors_files import read_headers
from tests.helpers.checkpoints import SHAPE, VOCAB, make_checkpoint, write_checkpoint
from tests.helpers.full_disk import fill_after_two_files
from tests.helpers.lines import write_lines
from tests.helpers.quick_config import load_config
from tests.helpers.ranks import run_ranks
from tests.helpers.reference import load_stock
from tests.helpers.runs import settings, train_all

pytestmark = pytest.mark.distributed
INPUT_IDS = torch.arange(60).view(2, 30) * 7 % 256
NEW = f"tokenizer.add_tokens={json.dumps(['cat', *(f'<{number}>' for number in range(7))])}"
ONE_FILE = "qwen2 in one file"
CASES = {
    "llama": ("llama", []),
    "tied, ranks that differ": ("qwen2", ["lora.rank_pattern={q_proj:3}", "lora.use_rslora=true", "quant=int8"]),
    "dora": ("llama", ["lora.use_dora=true"]),
    "ends in int8": ("llama", ["quant.embeddings=int8"]),
    "not quantized": ("llama", ["quant=none"]),
    "head trained": ("llama", ["lora.modules_to_save=[lm_head]"]),
    "tied head trained": ("qwen2", ["lora.modules_to_save=[lm_head]"]),
    "tied embeddings trained": ("qwen2", ["lora.modules_to_save=[embed_tokens]"]),
    "tied head trained, both tables in the one file": (ONE_FILE, ["lora.modules_to_save=[lm_head]"]),
    "tied, new tokens, both tables in the one file": (ONE_FILE, [NEW]),
    "new tokens": ("llama", [NEW]),
    "tied, new tokens": ("gemma2", [NEW]),
    "new tokens, tables trained": ("llama", [NEW, "lora.modules_to_save=[embed_tokens,lm_head]"]),
}


@pytest.fixture(scope="module")
def bases(checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = make_checkpoint("qwen2", tmp_path_factory.mktemp("bases") / "one", torch.float32, max_shard_size="1GB")
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return {ONE_FILE: folder} | {family: checkpoint(family, torch.float32) for family in ("llama", "qwen2", "gemma2")}


@pytest.fixture(scope="module")
def adapters(bases: dict[str, Path], rows: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("trained")
    cases = {}
    for index, (case, (family, more)) in enumerate(CASES.items()):
        few = ["training.max_steps=3", "training.learning_rate=1e-2", f"run.folder={folder / str(index)}"]
        cases[case] = settings(bases[family], rows, *few, *more)
    run_ranks(2, train_all, cases)
    return {case: folder / str(index) / "adapter" for index, case in enumerate(CASES)}


def logits(model: torch.nn.Module) -> Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=INPUT_IDS).logits


def load_merged(folder: Path) -> Tensor:
    return logits(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager"))


@pytest.mark.parametrize("base", ["full", "dequantized"])
@pytest.mark.parametrize("case", CASES)
def test_merged_logits_are_those_of_base_and_adapter(adapters, bases, tmp_path: Path, case: str, base: str):
    family, more = CASES[case]
    folder = bases[family]
    if base == "dequantized" and "quant=none" in more:
        pytest.skip("there is nothing to dequantize")
    out = tmp_path / "merged"
    assert merge.main([f"adapter={adapters[case]}", f"out={out}", f"base={base}"]) == 0
    quant = load_config(
        [f"model.path={folder}", *more, *(["quant=none", "quant.embeddings=none"] if base == "full" else [])]
    ).quant
    stock = load_stock(folder, quant)
    stock.resize_token_embeddings(max(VOCAB, len(AutoTokenizer.from_pretrained(adapters[case]))))
    stock = peft.PeftModel.from_pretrained(stock, adapters[case])
    torch.testing.assert_close(load_merged(out), logits(stock), rtol=0, atol=2e-5)
    keys = [key for file in out.glob("*.safetensors") for key in load_file(file)]
    assert len(keys) == len(set(keys))  # programs that read all files find each weight once


@pytest.mark.parametrize(
    ("family", "chosen"),
    [
        ("llama", {"target_modules": ["q_proj", "lm_head"]}),
        ("qwen2", {"target_modules": ["q_proj", "lm_head"]}),
        ("qwen2", {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True}),
        ("llama", {"trainable_token_indices": {"lm_head": [9, 3, 5], "embed_tokens": [3, 5, 9]}}),
        ("qwen2", {"trainable_token_indices": [9, 3, 5], "target_modules": ["q_proj", "lm_head"]}),
    ],
)
def test_adapters_of_peft_have_tables_of_the_base_beside_them(bases, tmp_path: Path, family, chosen):
    """Beside an adapter of the head PEFT saves the base's head, and of a tied table that is trained the other one.

    Rows of tokens are in the order in which their maker named these.
    """
    torch.manual_seed(0)
    config = peft.LoraConfig(**{"target_modules": ["q_proj"], "task_type": "CAUSAL_LM"} | chosen)
    model = peft.get_peft_model(load_stock(bases[family], QuantConfig(load_in_4bit=False)), config)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data.normal_(std=0.3)
    model.save_pretrained(tmp_path / "adapter")
    base = [f"model.path={bases[family]}", "model.tokenizer_path=bytes"]
    assert merge.main([f"adapter={tmp_path / 'adapter'}", f"out={tmp_path / 'merged'}", *base]) == 0
    torch.testing.assert_close(load_merged(tmp_path / "merged"), logits(model), rtol=0, atol=2e-5)


def test_a_base_that_can_not_be_quantized_is_merged_onto_its_own_weights(tmp_path: Path):
    """The default quantization would refuse layers of this width, and nothing is quantized."""
    shape = {"hidden_size": 96, "intermediate_size": 96, "num_attention_heads": 2, "num_key_value_heads": 2}
    base = write_checkpoint(AutoConfig.for_model("llama", **SHAPE | shape), tmp_path / "base", torch.float32)
    config = peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    model = peft.get_peft_model(load_stock(base, QuantConfig(load_in_4bit=False)), config)
    model.save_pretrained(tmp_path / "adapter")
    named = [f"model.path={base}", "model.tokenizer_path=bytes"]
    assert merge.main([f"adapter={tmp_path / 'adapter'}", f"out={tmp_path / 'merged'}", *named]) == 0
    torch.testing.assert_close(load_merged(tmp_path / "merged"), logits(model), rtol=0, atol=2e-5)


def test_the_report_compares_what_was_trained_with_what_was_merged(adapters, rows: Path, tmp_path, capsys):
    reports = {}
    for base in ("full", "dequantized"):
        arguments = [f"adapter={adapters['new tokens']}", f"out={tmp_path / base}", f"base={base}"]
        report = [f"report_data={rows}", "report_rows=3", f"data.cache_folder={tmp_path}", "training.max_length=64"]
        assert merge.main([*arguments, *report]) == 0
        reports[base] = json.loads(capsys.readouterr().out)
        assert json.loads((tmp_path / base / "merge_report.json").read_text()) == reports[base]
    exact = reports["dequantized"]["models"]
    assert exact["merged"]["kl_mean"] == pytest.approx(0, abs=1e-6)
    assert exact["merged"]["loss"] == pytest.approx(exact["trained"]["loss"], abs=1e-5)
    assert reports["full"]["models"]["merged"]["kl_mean"] > 1e-4  # what quantization takes away


def stock_losses(model: torch.nn.Module, rows: ReportRows) -> float:
    found = []
    for tokens, is_target in rows.rows:
        ids = torch.from_numpy(tokens.astype("int64"))[None]
        labels = ids.masked_fill(~torch.from_numpy(is_target)[None], -100)
        with torch.no_grad():
            logits = model(input_ids=ids).logits
        found.append(torch.nn.functional.cross_entropy(logits[0, :-1], labels[0, 1:], reduction="none")[is_target[1:]])
    return float(torch.cat(found).mean())


def test_every_merge_reports_on_rows_that_its_run_has_kept(adapters, bases, tmp_path: Path, capsys):
    """The losses are those of stock transformers, bitsandbytes and PEFT on these rows."""
    adapter = adapters["llama"]
    digest = read_report_digest(str(adapter))
    assert digest is not None
    kept = read_report_rows(adapter.parent / "report_rows.safetensors", digest, VOCAB)
    assert not kept.are_held_out and 1 < len(kept.rows) <= 32
    assert merge.main([f"adapter={adapter}", f"out={tmp_path / 'merged'}"]) == 0
    captured = capsys.readouterr()
    report = json.loads(captured.out)
    assert report["rows"] == "rows that the run was trained on" and report["num_rows"] == len(kept.rows)
    stock = load_stock(bases["llama"], load_config([f"model.path={bases['llama']}"]).quant)
    expected = {"base": stock_losses(stock, kept)}
    expected["trained"] = stock_losses(peft.PeftModel.from_pretrained(stock, adapter).train(), kept)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    expected["merged"] = stock_losses(merged, kept)
    for name, loss in expected.items():
        assert report["models"][name]["loss"] == pytest.approx(loss, abs=1e-5), name
    gain = expected["base"] - expected["trained"]
    share = (expected["base"] - expected["merged"]) / gain
    assert report["models"]["merged"]["kept"] == pytest.approx(share, abs=1e-3)
    card = (tmp_path / "merged" / "README.md").read_text()
    assert f"{expected['merged']:.4f}" in card and "base without the adapter" in card
    assert "of the gain" in captured.err

    assert merge.main([f"adapter={adapter}", f"out={tmp_path / 'merged'}", "report=false"]) == 0
    assert (tmp_path / "merged" / "README.md").read_text() == card
    assert merge.main([f"adapter={adapter}", f"out={tmp_path / 'again'}", "report=false"]) == 0
    assert not (tmp_path / "again" / "merge_report.json").exists()
    assert "report=false" in (tmp_path / "again" / "README.md").read_text()


def test_rows_of_another_run_are_not_taken(adapters, tmp_path: Path, capsys):
    run = shutil.copytree(adapters["llama"].parent, tmp_path / "run")
    shutil.copy(adapters["dora"].parent / "report_rows.safetensors", run / "report_rows.safetensors")
    with (run / "report_rows.safetensors").open("ab") as file:
        file.write(b" ")
    assert merge.main([f"adapter={run / 'adapter'}", f"out={tmp_path / 'merged'}"]) == 0
    captured = capsys.readouterr()
    assert "no report of what the result keeps" in captured.err and "report_data=FILE" in captured.err
    assert captured.out == ""


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (DataError("The rows are gone."), "The rows are gone."),
        (torch.OutOfMemoryError("CUDA out of memory. Tried"), "is out of memory"),
    ],
)
def test_a_merge_is_done_whatever_its_report(adapters, tmp_path: Path, capsys, monkeypatch, error, reason: str):
    def fail(*about: object) -> None:
        raise error

    monkeypatch.setattr(merge_report, "make_report", fail)
    assert merge.main([f"adapter={adapters['llama']}", f"out={tmp_path / 'merged'}"]) == 0
    assert reason in capsys.readouterr().err
    assert "Not measured: the comparison failed" in (tmp_path / "merged" / "README.md").read_text()
    assert not (tmp_path / "merged" / "merge_report.json").exists()


def test_a_merge_that_loses_what_was_learned_says_so(adapters, tmp_path: Path, capsys, monkeypatch):
    """Rounded to the nearest, as merges were once, codes swallow the adapter."""
    adapter = shutil.copytree(adapters["llama"].parent, tmp_path / "run") / "adapter"
    monkeypatch.setattr(merge_formats, "round_at_random", lambda values, *about: values)
    monkeypatch.setattr(merge_report, "ENOUGH", 2.0)
    assert merge.main([f"adapter={adapter}", f"out={tmp_path / 'nf4'}", "base=dequantized", "quantize=nf4"]) == 0
    said = capsys.readouterr().err
    assert "of what the adapter gains over its base. Try base=full" in said


def test_code_of_the_model_itself_comes_along(adapters, bases, tmp_path: Path):
    """Without it the merged config.json, whose auto_map names it, could not be loaded."""
    base = shutil.copytree(bases["llama"], tmp_path / "base")
    (base / "modeling_my.py").write_text("# no code")
    arguments = [f"adapter={adapters['llama']}", f"out={tmp_path / 'merged'}", f"model.path={base}"]
    assert merge.main(arguments) == 0
    assert (tmp_path / "merged" / "modeling_my.py").read_text() == "# no code"


def test_chat_templates_with_names_come_along(adapters, bases, tmp_path: Path):
    """They are the adapter's, if it has a tokenizer: data.chat_template takes the place of all that the base has."""
    base, adapter = shutil.copytree(bases["llama"], tmp_path / "base"), tmp_path / "adapter"
    shutil.copytree(adapters["llama"], adapter)
    found = {}
    for owner, template in (("base", "{{ 1 }}"), ("adapter", "{{ 2 }}")):
        (tmp_path / owner / "additional_chat_templates").mkdir()
        (tmp_path / owner / "additional_chat_templates" / f"of_{owner}.jinja").write_text(template)
        assert merge.main([f"adapter={adapter}", f"out={tmp_path / f'with {owner}'}", f"model.path={base}"]) == 0
        found[owner] = AutoTokenizer.from_pretrained(tmp_path / f"with {owner}").chat_template
    assert isinstance(found["base"], str) and found["adapter"]["of_adapter"] == "{{ 2 }}" and len(found["adapter"]) == 2


@pytest.mark.parametrize(
    ("of_base", "expected"),
    [
        ({"eos_token_id": 7, "temperature": 0.5}, {"eos_token_id": [7, 257, 258], "temperature": 0.5}),
        ({"eos_token_id": [258, 257]}, {"eos_token_id": [258, 257]}),
        (None, {"eos_token_id": [257, 258]}),
    ],
)
def test_a_server_stops_where_answers_ended_in_training(adapters, bases, tmp_path: Path, of_base, expected):
    """Here at <pad>, with which the adapter's template ends them, beside the tokenizer's end token."""
    base, adapter = shutil.copytree(bases["llama"], tmp_path / "base"), tmp_path / "adapter"
    shutil.copytree(adapters["llama"], adapter)
    (adapter / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.role + m.content + '<pad>' }}{% endfor %}"
    )
    (base / "generation_config.json").unlink(missing_ok=True)
    if of_base is not None:
        (base / "generation_config.json").write_text(json.dumps(of_base))
    assert merge.main([f"adapter={adapter}", f"out={tmp_path / 'merged'}", f"model.path={base}"]) == 0
    assert json.loads((tmp_path / "merged" / "generation_config.json").read_text()) == expected


@pytest.mark.parametrize("case", ["llama", "not quantized", "tied head trained, both tables in the one file"])
def test_quantized_results_load_as_bitsandbytes_makes_them(adapters, tmp_path: Path, case: str):
    full, out = tmp_path / "full", tmp_path / "nf4"
    for folder, more in ((full, []), (out, ["quantize=nf4"])):
        assert merge.main([f"adapter={adapters[case]}", f"out={folder}", *more]) == 0
    quantized = AutoModelForCausalLM.from_pretrained(
        out, dtype=torch.float32, attn_implementation="eager", device_map={"": "cpu"}
    )
    expected = load_stock(full, load_config([f"model.path={full}"]).quant)
    assert isinstance(quantized.model.layers[1].mlp.up_proj, bnb.nn.Linear4bit)
    torch.testing.assert_close(logits(quantized), logits(expected), rtol=0, atol=1e-5)


def test_what_an_adapter_adds_to_codes_is_kept_on_average(adapters, tmp_path: Path, capsys):
    """Rounded to the nearest, changes that are small beside the format's steps would vanish."""
    found = {}
    for name, more in {"base": [], "16 bits": [], "nf4": ["quantize=nf4"]}.items():
        adapter = shutil.copytree(adapters["llama"], tmp_path / f"adapter {name}")
        tensors = load_file(adapter / "adapter_model.safetensors")
        factor = 0.0 if name == "base" else 0.05
        scaled = {key: value * factor if "lora_B" in key else value for key, value in tensors.items()}
        save_file(scaled, adapter / "adapter_model.safetensors", {"format": "pt"})
        out = tmp_path / name
        assert merge.main([f"adapter={adapter}", f"out={out}", "base=dequantized", *more]) == 0
        model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32, device_map={"": "cpu"})
        layer = model.model.layers[1].mlp.up_proj
        is_quantized = isinstance(layer, bnb.nn.Linear4bit)
        weight = layer.weight
        values = bnb.functional.dequantize_4bit(weight.data, weight.quant_state) if is_quantized else weight
        found[name] = values.detach().double()
    assert "at random" in capsys.readouterr().err and is_quantized
    change = found["16 bits"] - found["base"]
    kept = float(((found["nf4"] - found["base"]) * change).sum() / change.square().sum())
    to_nearest = bnb.functional.quantize_4bit(found["16 bits"].float(), quant_type="nf4", compress_statistics=True)
    nearest = bnb.functional.dequantize_4bit(*to_nearest).double()
    lost = float(((nearest - found["base"]) * change).sum() / change.square().sum())
    print(kept, lost, float(change.abs().max()))
    assert 0.7 < kept < 1.3 and lost < 0.3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bits_keep_small_changes_on_average(dtype: torch.dtype):
    """Steps of both signs, in pieces or at once; to the nearest, all of them would be lost."""
    torch.manual_seed(0)
    base = torch.randn(256, 100).to(dtype).float()
    values = base * (1 + 2e-4 * torch.randn(256, 1).sign())
    assert torch.equal(values.to(dtype).float(), base) or dtype is torch.float16
    found = round_to_16_bits(values, dtype, "w", 0)
    assert found.dtype is dtype
    change = (values - base).double()
    kept = float(((found.double() - base) * change).sum() / change.square().sum())
    assert 0.9 < kept < 1.1
    parts = [round_to_16_bits(values[row : row + 3], dtype, "w", row * 100) for row in range(0, 256, 3)]
    assert torch.equal(torch.cat(parts), found)
    assert torch.equal(round_to_16_bits(base, dtype, "w", 0).float(), base)


def test_sums_are_quantized_before_they_lose_bits(tmp_path: Path, capsys):
    """Codes of base and adapter in 32 bits, where the base is in 16: rounded to 16 bits before, some are others."""
    base = make_checkpoint("llama", tmp_path / "base", torch.bfloat16)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    config = peft.LoraConfig(target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM")
    given = model.model.layers[1].mlp.up_proj.weight.data.clone()
    model = peft.get_peft_model(model, config)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.mul_(1e-2)
    model.save_pretrained(tmp_path / "adapter")
    named = [f"adapter={tmp_path / 'adapter'}", f"model.path={base}", "model.tokenizer_path=bytes", "report=false"]
    assert merge.main([*named, f"out={tmp_path / 'nf4'}", "quantize=nf4"]) == 0
    assert merge.main([*named, f"out={tmp_path / '16'}"]) == 0
    assert "rounded to 16 bits at random" in capsys.readouterr().err
    whole = model.merge_and_unload().model.layers[1].mlp.up_proj.weight.data
    codes, _ = bnb.functional.quantize_4bit(whole, quant_type="nf4", compress_statistics=True)
    stored = {key: value for file in (tmp_path / "nf4").glob("*.safetensors") for key, value in load_file(file).items()}
    assert torch.equal(stored["model.layers.1.mlp.up_proj.weight"], codes)
    early, _ = bnb.functional.quantize_4bit(whole.bfloat16(), quant_type="nf4", compress_statistics=True)
    assert not torch.equal(early, codes)
    short = {key: value for file in (tmp_path / "16").glob("*.safetensors") for key, value in load_file(file).items()}
    merged = short["model.layers.1.mlp.up_proj.weight"]
    assert merged.dtype is torch.bfloat16
    change = (whole - given).double()
    kept = float(((merged.double() - given) * change).sum() / change.square().sum())
    assert 0.7 < kept < 1.3


@pytest.mark.parametrize(
    ("family", "adapted", "why"),
    [("llama4_text", "q_proj", "a layer for each expert"), ("falcon", "query_key_value", "of FalconForCausalLM")],
)
def test_what_transformers_would_not_load_quantized_is_not_written(tmp_path: Path, capsys, family, adapted, why):
    base = make_checkpoint(family, tmp_path / "base", torch.float32)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    peft.get_peft_model(model, peft.LoraConfig(target_modules=[adapted])).save_pretrained(tmp_path / "adapter")
    own = [f"adapter={tmp_path / 'adapter'}", f"model.path={base}", "model.tokenizer_path=bytes"]
    assert merge.main([*own, f"out={tmp_path / 'nf4'}", "quantize=nf4"]) == 2
    error = capsys.readouterr().err
    assert why in error and "Leave quantize out" in error and not (tmp_path / "nf4").exists()


def test_layers_too_narrow_for_blocks_stay_as_they_are(tmp_path: Path):
    """Gemma 3n, trained in int8, was refused: it has matrices of four columns."""
    base = make_checkpoint("gemma3n_text", tmp_path / "base", torch.float32)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"])).save_pretrained(tmp_path / "adapter")
    own = [f"adapter={tmp_path / 'adapter'}", f"model.path={base}", "model.tokenizer_path=bytes", "quant=int8"]
    full, out = tmp_path / "full", tmp_path / "nf4"
    for folder, more in ((full, []), (out, ["quantize=nf4"])):
        assert merge.main([*own, f"out={folder}", *more]) == 0
    quantized = AutoModelForCausalLM.from_pretrained(
        out, dtype=torch.float32, attn_implementation="eager", device_map={"": "cpu"}
    )
    kept = "[lm_head,correction_coefs,prediction_coefs]"
    skip = f"quant.llm_int8_skip_modules={kept}"
    expected = load_stock(full, load_config([f"model.path={full}", skip]).quant)
    assert isinstance(quantized.model.layers[1].mlp.up_proj, bnb.nn.Linear4bit)
    assert type(quantized.model.layers[1].altup.correction_coefs) is torch.nn.Linear
    torch.testing.assert_close(logits(quantized), logits(expected), rtol=0, atol=1e-5)


def test_a_merge_that_was_cut_off_goes_on_and_another_is_refused(adapters, tmp_path, monkeypatch, capsys):
    out = tmp_path / "merged"
    save = merge_files._save
    saved = fill_after_two_files(monkeypatch)
    arguments = [f"adapter={adapters['llama']}", f"out={out}"]
    assert merge.main(arguments) == 2
    assert "can't be written: No space left on device. Free space there" in capsys.readouterr().err
    monkeypatch.setattr(
        merge_files, "_save", lambda tensors, target: (saved.append(target.name), save(tensors, target))
    )
    assert merge.main(arguments) == 0
    assert len(saved) == len(set(saved)) == len(list(out.glob("*.safetensors"))) > 3  # none was written twice
    assert read_headers(out).keys() and load_merged(out).isfinite().all()
    assert merge.main([*arguments, "base=dequantized"]) == 2
    assert "holds another merge. Set out to a new folder" in capsys.readouterr().err

    louder = tmp_path / "louder"
    shutil.copytree(adapters["llama"], louder)
    config = json.loads((louder / "adapter_config.json").read_text())
    (louder / "adapter_config.json").write_text(json.dumps(config | {"lora_alpha": 2 * config["lora_alpha"]}))
    assert merge.main([f"adapter={louder}", f"out={out}"]) == 2
    assert "holds another merge. Set out to a new folder" in capsys.readouterr().err


def test_a_full_disk_is_named(adapters, tmp_path: Path, monkeypatch, capsys):
    """safetensors has an error of its own for it."""
    save = merge_files.save_file
    monkeypatch.setattr(merge_files, "save_file", lambda tensors, file, about: save(tensors, "/dev/full/x", about))
    assert merge.main([f"adapter={adapters['llama']}", f"out={tmp_path / 'merged'}"]) == 2
    assert "merged can't be written: Error while serializing: I/O error" in capsys.readouterr().err


def test_a_merge_whose_disk_was_full_at_once_can_be_started_again(adapters, tmp_path: Path, monkeypatch, capsys):
    """No half of its record is left, which the next start would read."""
    arguments = [f"adapter={adapters['llama']}", f"out={tmp_path / 'merged'}"]

    def write_half(path: Path) -> None:
        path.write_text('{"base":')
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr(files, "create", write_half)
        assert merge.main(arguments) == 2
    assert "merged can't be written: No space left on device" in capsys.readouterr().err
    assert merge.main(arguments) == 0


def test_an_adapter_of_another_base_is_refused(adapters, tmp_path: Path, capsys):
    demo = Path(__file__).parents[2] / "demo" / "base"
    arguments = [f"adapter={adapters['llama']}", f"out={tmp_path / 'merged'}", f"model.path={demo}"]
    assert merge.main(arguments) == 2
    assert "does not fit the model" in capsys.readouterr().err and not (tmp_path / "merged").exists()


def test_pairs_of_answers_are_refused_before_the_merge(tmp_path: Path, capsys):
    """Each row was to blame, and the advice was task=preference, which changes nothing here."""
    pairs = write_lines(tmp_path / "pairs.jsonl", [{"prompt": "a", "chosen": "b", "rejected": "c"}])
    assert merge.main(["model=tiny", f"report_data={pairs}"]) == 2
    message = capsys.readouterr().err
    assert f"report_data={pairs} has pairs of answers" in message and "task=" not in message
    assert merge.main(["model=tiny", f"report_data={pairs}", "data.columns={completion: chosen}"]) == 2
    assert "pairs" not in capsys.readouterr().err.replace(str(pairs), "")


def test_bad_input_is_named_at_once(capsys):
    assert merge.main(["model=tiny", "base=half", "quantize=int8", "report_data=/no"]) == 2
    message = capsys.readouterr().err
    for part in ("adapter is not set", "out is not set", "base=half is neither", "quantize=int8 is", "report_data=/no"):
        assert part in message
    assert "model.weights=random has no files to merge into" in message
    assert merge.main(["model=tiny", f"out={__file__}"]) == 2
    assert f"out={__file__} is a file. Set out to a new folder." in capsys.readouterr().err


def test_gguf_is_refused_before_the_merge_where_it_can_not_be_written(adapters, tmp_path: Path, capsys):
    own = [f"adapter={adapters['llama']}", f"out={tmp_path / 'merged'}"]
    assert merge.main([*own, "gguf=q8_0,q3", "quantize=nf4", f"llama_cpp={tmp_path}"]) == 2
    message = capsys.readouterr().err
    for part in (
        "gguf=q8_0,q3 has q3, which is not written",
        f"needs llama.cpp's convert_hf_to_gguf.py, which is not in llama_cpp={tmp_path}",
        "quantize=nf4 is for safetensors",
    ):
        assert part in message
    assert merge.main([*own, f"llama_cpp={tmp_path}"]) == 2
    assert "has no effect without gguf=" in capsys.readouterr().err
    assert not (tmp_path / "merged").exists()


def test_a_disk_without_room_for_gguf_is_refused_before_the_merge(adapters, tmp_path: Path, monkeypatch, capsys):
    monkeypatch.setattr(gguf_files, "gguf_problems", lambda *_: [])  # whatever is installed
    monkeypatch.setattr(gguf_files, "free_bytes", lambda folder: 2**18)
    assert merge.main([f"adapter={adapters['llama']}", f"out={tmp_path / 'merged'}", "gguf=f16,q4_0"]) == 2
    message = capsys.readouterr().err
    assert "merged has room for 0.2 MiB, and the merged model and its GGUF files (f16, q4_0) take " in message
    assert not (tmp_path / "merged").exists()


def test_a_base_in_codes_needs_the_room_of_its_weights(adapters, tmp_path: Path, monkeypatch, capsys):
    """Its files have two weights to a byte, and the result has 16 bits for each."""
    own = [f"adapter={adapters['llama']}", "report=false"]
    assert merge.main([*own, f"out={tmp_path / 'nf4'}", "quantize=nf4"]) == 0
    monkeypatch.setattr(gguf_files, "gguf_problems", lambda *_: [])  # whatever is installed
    monkeypatch.setattr(gguf_files, "free_bytes", lambda folder: 0)
    needed = []
    for more in ([], [f"model.path={tmp_path / 'nf4'}", "other_base=true", "base=dequantized"]):
        capsys.readouterr()
        assert merge.main([*own, f"out={tmp_path / 'merged'}", "gguf=f32", *more]) == 2
        needed += re.findall(r"GGUF files \(f32\) take (\S+ \S+)\.", capsys.readouterr().err)
    assert len(needed) == 2 and needed[0] == needed[1]


@pytest.mark.parametrize("said", ["[Errno 28] No space left on device", "4096 requested and 12 written"])
def test_a_disk_that_is_full_while_gguf_is_written_is_told_so(tmp_path: Path, said: str):
    (tmp_path / "convert_hf_to_gguf.py").write_text(f"raise OSError({said!r})")
    told = r"out=.* can't be written: No space left on device\. Free space"
    with pytest.raises(RunFolderError, match=told), merge_files.merging_to(tmp_path):
        gguf_files.write_gguf_model(tmp_path, ["q8_0"], str(tmp_path), trusts_code=False)


def test_what_a_killed_conversion_has_left_is_removed(tmp_path: Path):
    code = "import sys; open(sys.argv[sys.argv.index('--outfile') + 1], 'w').write('whole')"
    (tmp_path / "convert_hf_to_gguf.py").write_text(code)
    merged = tmp_path / "merged"
    merged.mkdir()
    with pytest.raises(AssertionError), files.replacing(merged / "model-Q8_0.gguf"):
        (left,) = merged.iterdir()
        shutil.copytree(left, tmp_path / left.name)  # as it would be after SIGKILL
        raise AssertionError
    shutil.move(tmp_path / left.name, merged)
    (file,) = gguf_files.write_gguf_model(merged, ["q8_0"], str(tmp_path), trusts_code=False)
    assert file.read_text() == "whole" and list(merged.iterdir()) == [file]


def test_a_gguf_file_is_packed_a_few_rows_at_a_time(monkeypatch):
    gguf = pytest.importorskip("gguf", reason="the package gguf is not installed")
    types = gguf.GGMLQuantizationType
    values = np.random.default_rng(0).normal(size=(2, 7, 64)).astype("float16")
    monkeypatch.setattr(gguf_files, "VALUES_A_TIME", 3 * 64)
    packed = gguf_files._repack(values, types.F16, types.Q4_0)
    assert np.array_equal(packed, gguf.quants.quantize(values.astype("float32"), types.Q4_0).reshape(14, -1))
