"""The saved adapter, loaded by stock PEFT on a stock base, gives the logits of the model that was trained."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import bitsandbytes as bnb
import peft
import pytest
import torch
from transformers import AutoTokenizer

from qlora_fsdp import merge
from qlora_fsdp.common.errors import ConfigError
from qlora_fsdp.model.tasks.causal_lm import CausalLM
from qlora_fsdp.runtime.processes import Processes
from tests.helpers.quick_config import load_config
from tests.helpers.ranks import run_ranks
from tests.helpers.reference import load_stock
from tests.helpers.runs import logits_of, settings, train_all

pytestmark = pytest.mark.distributed
INPUT_IDS = torch.arange(80).view(2, 40) * 3 % 256

CASES = {
    "llama": ("llama", []),
    "tied": ("qwen2", []),
    "softcapped": ("gemma2", []),
    "no model class of ours": ("bert", ["training.packing=false"]),
    "dora": ("llama", ["lora.use_dora=true"]),
    "rslora, ranks that differ": ("llama", ["lora.use_rslora=true", "lora.rank_pattern={q_proj:3}"]),
    "loftq": ("llama", ["lora.init_lora_weights=loftq", "lora.use_rslora=true", "lora.rank_pattern={q_proj:3}"]),
    "lm_head trained": ("llama", ["lora.modules_to_save=[lm_head]"]),
    "embed_tokens trained": ("llama", ["lora.modules_to_save=[embed_tokens]"]),
    "tied embed_tokens trained": ("qwen2", ["lora.modules_to_save=[embed_tokens]"]),
    "head adapted, int8": ("llama", ["lora.target_modules=[lm_head,v_proj]", "quant=int8"]),
}


def logits(model: CausalLM, processes: Processes) -> torch.Tensor:
    return logits_of(model, INPUT_IDS.to(processes.device))


@pytest.fixture(scope="module")
def runs(checkpoint: Callable[..., Path], rows: Path, tmp_path_factory: pytest.TempPathFactory):
    """Settings of every case, and logits of our trained model."""
    folder = tmp_path_factory.mktemp("runs")
    cases = {
        name: settings(
            checkpoint(family),
            rows,
            "training.max_steps=4",
            "training.learning_rate=1e-2",
            f"run.folder={folder / str(index)}",
            *more,
        )
        for index, (name, (family, more)) in enumerate(CASES.items())
    }
    trained = run_ranks(2, train_all, cases, logits)
    return {name: (load_config(argv), trained[0][name].inspected) for name, argv in cases.items()}


@pytest.mark.parametrize("name", CASES)
def test_stock_peft_gives_the_same_logits(runs, name: str):
    config, ours = runs[name]
    adapter = Path(config.run.folder) / "adapter"
    base = load_stock(Path(config.model.path), config.quant)
    with torch.no_grad():
        untrained = base(input_ids=INPUT_IDS).logits
        model = peft.PeftModel.from_pretrained(base, adapter).eval()
        stock = model(input_ids=INPUT_IDS).logits
    torch.testing.assert_close(ours, stock, rtol=0, atol=1e-5)
    assert (stock - untrained).abs().max() > 1e-2  # the adapter does something


def test_an_adapter_that_corrects_the_rounding_belongs_to_its_format(runs, tmp_path: Path, capsys):
    config, _ = runs["loftq"]
    adapter = Path(config.run.folder) / "adapter"
    card = (adapter / "README.md").read_text()
    (code,) = card.split("```python\n")[1:]
    assert "quantization_config=quantization" in code
    assert "merge adapter=path/to/this/folder base=dequantized out=" in card
    corrects = "corrects what nf4 rounds away from the base"
    for more, words in (
        ([], ["base=full is not for this adapter", corrects, "Set base=dequantized"]),
        (["write=adapter"], ["write=adapter is not for this adapter", corrects, "leave write out"]),
        (["quant=int8"], ["quant=int8 is not how the base of adapter=", "Set quant=nf4."]),
    ):
        assert merge.main([f"adapter={adapter}", f"out={tmp_path / 'no'}", *more]) == 2
        said = capsys.readouterr().err
        assert said.count("Error: ") == 1 and all(part in said for part in words), said
    with pytest.raises(ConfigError, match=r"quant=none is not how the base of lora.start=.* Set quant=nf4."):
        load_config([f"lora.start={adapter}", "quant=none", "data=random"])
    assert load_config([f"lora.start={adapter}", "data=random"]).lora.use_rslora
    assert merge.main([f"adapter={adapter}", f"out={tmp_path / 'merged'}", "base=dequantized", "report=false"]) == 0


def test_the_folder_is_whole(runs, checkpoint: Callable[..., Path]):
    config, _ = runs["llama"]
    adapter = Path(config.run.folder) / "adapter"
    assert AutoTokenizer.from_pretrained(adapter)("cat").input_ids[-3:] == list(b"cat")
    saved = json.loads((adapter / "adapter_config.json").read_text())
    assert saved["base_model_name_or_path"] == str(checkpoint("llama")) and saved["peft_type"] == "LORA"
    assert not list(adapter.parent.glob(".adapter*"))


# Layers that stay in full precision, most of them trained in full; the format of the others; and the card's list.
PLAIN = [
    ("lora.modules_to_save=[q_proj]", "nf4", '["lm_head", "q_proj"]'),
    ("lora.modules_to_save=[mlp]", "nf4", '["down_proj", "gate_proj", "lm_head", "up_proj"]'),
    ("lora.modules_to_save=[q_proj]", "int8", '["lm_head", "q_proj"]'),
    (
        "quant.llm_int8_skip_modules=[lm_head,1.mlp.up_proj,v_proj]",
        "nf4",
        '["lm_head", "model.layers.1.mlp.up_proj", "v_proj"]',
    ),
]


@pytest.fixture(scope="module")
def plain_runs(checkpoint: Callable[..., Path], rows: Path, tmp_path_factory: pytest.TempPathFactory):
    """The adapter of every case, and logits of our trained model."""
    folder, base = tmp_path_factory.mktemp("runs"), checkpoint("llama", torch.float32)
    cases = {}
    for index, (setting, quant, _) in enumerate(PLAIN):
        more = ["training.max_steps=2", "training.learning_rate=1e-2", f"run.folder={folder / str(index)}"]
        cases[index] = settings(base, rows, "lora.target_modules=[o_proj]", setting, f"quant={quant}", *more)
    (trained,) = run_ranks(1, train_all, cases, logits)
    return {index: (folder / str(index) / "adapter", trained[index].inspected) for index in cases}


@pytest.mark.parametrize("index", range(len(PLAIN)), ids=[f"{setting}-{quant}" for setting, quant, _ in PLAIN])
def test_the_model_card_loads_onto_a_quantized_base_with_layers_in_full_precision(plain_runs, checkpoint, index: int):
    base = checkpoint("llama", torch.float32)
    (adapter, ours), (_, quant, skip) = plain_runs[index], PLAIN[index]
    (adapter.parent / "usual").touch()
    assert len({file.stat().st_mode for file in (*adapter.iterdir(), adapter.parent / "usual")}) == 1, "by the umask"
    _, onto_full, onto_quantized = (adapter / "README.md").read_text().split("```python\n")
    assert f"llm_int8_skip_modules={skip}," in onto_quantized
    for code in (onto_full, onto_quantized):
        scope: dict[str, Any] = {}
        code = code.partition("```")[0].replace("path/to/this/folder", str(adapter))
        exec(code.replace("path/to/the/base/model", str(base)), scope)
    assert any(isinstance(module, (bnb.nn.Linear4bit, bnb.nn.Linear8bitLt)) for module in scope["model"].modules())
    with torch.no_grad():
        stock = scope["model"].eval()(input_ids=INPUT_IDS).logits
    # In int8 stock layers quantize activations too, which ours do not.
    torch.testing.assert_close(ours, stock.float(), rtol=0, atol=1e-4 if quant == "nf4" else 0.2)
