"""A real llama.cpp on the CPU applies what `merge gguf=` writes, and answers as `generate` does in the same weights.

The model is a tiny Llama of random weights with SmolLM2's tokenizer, which llama.cpp's converter knows, and an adapter
that has learned two sentences. `make test-serving` sets llama.cpp up.
"""

from __future__ import annotations

import contextlib
import io
import json
import subprocess
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from qlora_fsdp import generate, merge
from qlora_fsdp.inference.gguf_files import gguf_name, write_gguf_model
from qlora_fsdp.inference.merge_report import load_stock
from tests.helpers.lines import write_lines
from tests.helpers.quick_config import composing_quickly
from tests.helpers.smollm2 import find_gguf, needs_smollm2
from tests.serving.training import train

ROOT = Path(__file__).parents[2]
INSTALLED = ROOT / ".llama_cpp"
LLAMA_CPP = INSTALLED / "llama.cpp"
IS_INSTALLED = (INSTALLED / ".installed").exists()
pytestmark = [
    pytest.mark.skipif(not IS_INSTALLED, reason="there is no llama.cpp here: make test-serving installs it"),
    needs_smollm2,
    pytest.mark.slow,
]
SENTENCES = ["the cat sat on a mat while rain fell", "birds sang over the old town"]
PROMPT = "the cat"
MAX_TOKENS = 12
TYPES = ["f32", "q8_0", "q4_0"]


@dataclass(frozen=True)
class Served:
    """What both sides do.

    Attributes:
        folder: holds `base`, `run`, `merged` and the adapter as GGUF (`for-llama-cpp`).
        prompt: as tokens.
        ours: what `generate` writes: with base and adapter, and with the merged model.
        theirs: what llama.cpp answers (tests/serving/llama.py), by the name of what it was given.
    """

    folder: Path
    prompt: list[int]
    ours: dict[str, str]
    theirs: dict[str, dict[str, Any]]

    def text_of(self, name: str) -> str:
        """What `generate` would print of an answer of llama.cpp's."""
        tokenizer = AutoTokenizer.from_pretrained(self.folder / "base")
        text: str = tokenizer.decode(self.theirs[name]["tokens"], skip_special_tokens=True)
        return text

    def distance(self, name: str, model: nn.Module) -> float:
        """The largest distance of llama.cpp's log-probabilities from a model's, over the likeliest of each place."""
        answer = self.theirs[name]
        tokens = torch.tensor([[*self.prompt, *answer["tokens"]]])
        with torch.inference_mode():
            places = model(input_ids=tokens).logits[0, len(self.prompt) - 1 : -1].log_softmax(-1)
        differences = []
        for place, top in zip(places, answer["top"], strict=True):
            theirs = torch.tensor(list(top.values()))
            ours = place[torch.tensor([int(token) for token in top])]
            differences.append((ours - theirs).abs().max().item())
        return max(differences)


def make_base(folder: Path) -> Path:
    file = find_gguf()
    assert file is not None
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.1,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        tie_word_embeddings=True,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def train_scaled(base: Path, folder: Path, rows: Path) -> Path:
    """An adapter whose scalings llama.cpp does not know: rsLoRA's, and a rank and an alpha of one layer alone."""
    train(base, folder, rows, "lora.use_rslora=true", "lora.rank_pattern={q_proj: 4}", "lora.alpha_pattern={v_proj: 5}")
    return folder / "adapter"


def generated(argv: list[str]) -> str:
    """What `generate` prints, without the end of the line."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        assert generate.main([*argv, f"prompt={PROMPT}", "raw=true", f"max_new_tokens={MAX_TOKENS}"]) == 0
    return printed.getvalue().removesuffix("\n")


@pytest.fixture(scope="module")
def converters_packages() -> Iterator[None]:
    """What llama.cpp's converter imports and this project does not need: it is in the environment of llama.cpp."""
    version = sysconfig.get_python_version()
    site = str(INSTALLED / "lib" / f"python{version}" / "site-packages")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(site)
        patch.setenv("PYTHONPATH", site, prepend=":")
        yield


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, converters_packages: None) -> Served:
    folder = tmp_path_factory.mktemp("llama_cpp")
    rows = write_lines(folder / "rows.jsonl", [{"prompt": "", "completion": text} for text in SENTENCES] * 8)
    base = make_base(folder / "base")
    merged, alone = folder / "merged", folder / "for-llama-cpp"
    with composing_quickly():
        adapter = train_scaled(base, folder / "run", rows)
        converted = [f"adapter={adapter}", f"llama_cpp={LLAMA_CPP}"]
        assert merge.main([*converted, f"out={merged}", f"gguf={','.join(TYPES)}", "report=false"]) == 0
        assert merge.main([*converted, f"out={alone}", "write=adapter", "gguf=f32"]) == 0
        (of_base,) = write_gguf_model(base, ["f32"], str(LLAMA_CPP), trusts_code=False)
        ours = {"adapter": generated([f"adapter={adapter}"]), "merged": generated([f"model.path={merged}"])}
    prompt = AutoTokenizer.from_pretrained(base)(PROMPT).input_ids
    given: dict[str, tuple[Path, Path | None]] = {
        "base": (of_base, None),
        "adapter": (of_base, alone / gguf_name("adapter", "f32")),
    }
    given |= {name: (merged / gguf_name("model", name), None) for name in TYPES}
    jobs = [
        {"model": str(file), "adapter": beside and str(beside), "prompt": prompt, "max_tokens": MAX_TOKENS}
        for file, beside in given.values()
    ]
    command = [INSTALLED / "bin" / "python", ROOT / "tests" / "serving" / "llama.py"]
    lines = "".join(f"{json.dumps(job)}\n" for job in jobs)
    done = subprocess.run(command, input=lines, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    answers = [line.removeprefix("ANSWER ") for line in done.stdout.splitlines() if line.startswith("ANSWER ")]
    theirs = dict(zip(given, map(json.loads, answers), strict=True))
    return Served(folder, prompt, ours, theirs)


def test_llama_cpp_applies_the_adapter_as_peft_does(served: Served):
    model = AutoModelForCausalLM.from_pretrained(served.folder / "base", dtype=torch.float32)
    of_base = served.distance("adapter", model)
    model = peft.PeftModel.from_pretrained(model, served.folder / "run" / "adapter").eval()
    of_adapter = served.distance("adapter", model)
    assert of_base > 1
    assert of_adapter < 1e-4
    assert served.text_of("adapter") == served.ours["adapter"] != served.text_of("base")


@pytest.mark.parametrize(("name", "largest"), [("f32", 1e-4), ("q8_0", 0.1), ("q4_0", 0.1)])
def test_llama_cpp_computes_a_merged_file_as_transformers_does(served: Served, name: str, largest: float):
    """Of quantized files llama.cpp rounds what goes into a product to 8 bits, as transformers does not."""
    file = gguf_name("model", name)
    model = load_stock(served.folder / "merged", torch.float32, torch.device("cpu"), False, gguf_file=file)
    assert served.distance(name, model) < largest


def test_the_merged_model_answers_as_generate_does(served: Served):
    assert served.text_of("f32") == served.ours["merged"] == served.ours["adapter"]
