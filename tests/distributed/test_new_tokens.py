"""New tokens: the losses of stock libraries at any number of ranks, and an adapter and tokenizer that they load."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import peft
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoTokenizer

from qlora_fsdp import evaluate, generate
from qlora_fsdp.model.tasks.task_model import TaskModel
from qlora_fsdp.runtime.processes import Processes
from tests.helpers.lines import read_lines, write_lines
from tests.helpers.quick_config import load_config
from tests.helpers.ranks import once, run_ranks
from tests.helpers.reference import load_stock, stock_losses
from tests.helpers.runs import logits_of, settings, train_all

pytestmark = pytest.mark.distributed
# The byte tokenizer has 259 tokens and the models 264 rows: five rows are replaced, and three come behind the table.
TOKENS = ["<call>", "</call>", "<t0>", "<t1>", "<t2>", "<t3>", "<t4>"]
SPECIAL = "<|end|>"
PROMPT = "rain <t1><t4> and <call>birds</call><|end|>"
NUM_STEPS, STEP = 4, 2
RESUMED = ["untied"]
WHOLE = "lora.modules_to_save=[embed_tokens,lm_head]"
CASES = {
    "untied": ("llama", []),
    "tied, softcap, scaled embeddings": ("gemma2", []),
    "as a whole, int8, not packed": ("mistral", [WHOLE, "quant=int8", "training.packing=false"]),
    "embeddings as a whole, tied": ("qwen2", ["lora.modules_to_save=[embed_tokens]"]),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("new_tokens")


@pytest.fixture(scope="module")
def marked_rows(rows: Path, folder: Path) -> Path:
    """The usual rows with new tokens among their words; <t3> is never there."""
    marks = [*TOKENS[:5], TOKENS[6], SPECIAL]
    lines = read_lines(rows)
    for number, row in enumerate(lines):
        for key in row:
            row[key] = row[key].replace(" ", marks[number % len(marks)], 1) + marks[(number + 1) % len(marks)]
    file = folder / "rows.jsonl"
    return write_lines(file, lines)


@pytest.fixture(scope="module")
def argv(checkpoint: Callable[..., Path], marked_rows: Path, folder: Path) -> Callable[[str, int], list[str]]:
    """`argv(case, num_ranks)`: the settings of a case."""

    def make(case: str, num_ranks: int) -> list[str]:
        family, more = CASES[case]
        return settings(
            checkpoint(family, torch.float32),
            marked_rows,
            f"tokenizer.add_tokens={json.dumps(TOKENS)}",
            f"tokenizer.add_special_tokens={json.dumps([SPECIAL])}",
            f"training.max_steps={NUM_STEPS}",
            "training.learning_rate=1e-2",
            f"checkpoint.every_steps={STEP}",
            f"training.micro_batch_size={4 // num_ranks}",
            f"run.folder={folder / str(list(CASES).index(case))}-{num_ranks}",
            *more,
        )

    return make


INPUT_IDS = [256, *b"rain ", 262, 265, *b" and ", 259, *b"birds", 260, 266]


def checkpoint_of(run: Path) -> Path:
    return run / "checkpoints" / f"step-{STEP:08}"


def prompt_logits(model: TaskModel, processes: Processes) -> Tensor:
    return logits_of(model, torch.tensor([INPUT_IDS]))


@pytest.fixture(scope="module")
def runs(argv: Callable[[str, int], list[str]]):
    """`runs(num_ranks)`: every case on so many ranks; on two, also some gone on with from a checkpoint."""

    def run(num_ranks: int):
        cases = {case: argv(case, num_ranks) for case in CASES}
        if num_ranks == 2:
            for case, arguments in [(case, cases[case]) for case in RESUMED]:
                source = Path(load_config(arguments).run.folder)
                resume = f"checkpoint.resume={checkpoint_of(source)}"
                cases[f"{case}, resumed"] = [*arguments, f"run.folder={source}-resumed", resume]
        return run_ranks(num_ranks, train_all, cases, prompt_logits)

    return once(run)


@pytest.mark.parametrize("case", CASES)
def test_losses_are_those_of_stock_libraries_on_any_number_of_ranks(runs, argv, case: str):
    one, (first, second) = runs(1)[0][case].losses, (rank[case].losses for rank in runs(2))
    assert first == second and len(one) == NUM_STEPS and one[-1] < one[0] - 0.05
    assert first == pytest.approx(one, abs=1e-5)
    assert one == pytest.approx(stock_losses(argv(case, 1)), abs=1e-5)
    assert case not in RESUMED or runs(2)[0][f"{case}, resumed"].losses == first[STEP:]


@pytest.mark.parametrize("case", CASES)
def test_stock_libraries_load_adapter_and_tokenizer(runs, argv, case: str):
    config, ours = load_config(argv(case, 2)), runs(2)[0][case].inspected
    adapter = Path(config.run.folder) / "adapter"
    tokenizer = AutoTokenizer.from_pretrained(adapter)
    assert tokenizer(PROMPT).input_ids == INPUT_IDS and len(tokenizer) == 267
    assert tokenizer.decode(INPUT_IDS, skip_special_tokens=True).endswith("</call>")
    model = load_stock(Path(config.model.path), config.quant)
    assert f"resize_token_embeddings({len(tokenizer)})" in (adapter / "README.md").read_text()
    model.resize_token_embeddings(len(tokenizer))
    model = peft.PeftModel.from_pretrained(model, adapter).eval()
    with torch.no_grad():
        stock = model(input_ids=torch.tensor([INPUT_IDS])).logits
    torch.testing.assert_close(ours, stock, rtol=0, atol=1e-5)


def test_rows_alone_are_saved(runs, argv):
    runs(2)
    saved = load_file(Path(load_config(argv("untied", 2)).run.folder) / "adapter" / "adapter_model.safetensors")
    shapes = {name: tuple(value.shape) for name, value in saved.items() if "lora_" not in name}
    assert shapes == {
        "base_model.model.lm_head.token_adapter.trainable_tokens_delta": (8, 64),
        "base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta": (8, 64),
    }


@pytest.mark.parametrize("case", ["untied", "as a whole, int8, not packed"])
def test_evaluate_and_generate_know_them(runs, argv, marked_rows: Path, tmp_path: Path, capsys, case: str):
    config, losses = load_config(argv(case, 2)), runs(2)[0][case].losses
    adapter = f"adapter={Path(config.run.folder) / 'adapter'}"
    cache = [f"data.cache_folder={tmp_path}", "training.max_length=64"]
    assert evaluate.main([adapter, f"data.path={marked_rows}", *cache]) == 0
    assert json.loads(capsys.readouterr().out)["loss"] < losses[-1] + 0.2
    assert generate.main([adapter, f"prompt={PROMPT}", "max_new_tokens=4"]) == 0
