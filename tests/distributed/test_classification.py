"""Classifiers: losses of stock libraries on any number of ranks, and an adapter that stock PEFT loads, head and all."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import peft
import pytest
import torch
import yaml
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer

from qlora_fsdp import evaluate, generate, merge
from qlora_fsdp.config.adapter.adapter_config import SETTINGS_FILE
from qlora_fsdp.config.schema import ProblemType, TaskName
from qlora_fsdp.data.tokenizer import byte_tokenizer
from qlora_fsdp.model.build import AUTO_CLASSES
from qlora_fsdp.model.tasks.task_model import TaskModel
from qlora_fsdp.runtime.processes import Processes
from qlora_fsdp.sharding.shard import bypassing_root
from qlora_fsdp.weights.safetensors_files import read_headers
from tests.helpers.classification import (
    LABELS,
    WORD_LABELS,
    load_stock_classifier,
    make_encoder,
    stock_classifier_losses,
    write_labelled_rows,
    write_labelled_words,
)
from tests.helpers.lines import read_lines
from tests.helpers.quick_config import load_config
from tests.helpers.ranks import once, run_ranks
from tests.helpers.runs import printed_by, settings, train_all

pytestmark = pytest.mark.distributed
TEXTS = ["rain fell over the old town", "birds"]
NUM_STEPS = 5
SINGLE, MULTI, REGRESSION = ProblemType
WORDS = TaskName.token_classification

# Case: family, what its checkpoint has besides the backbone, the kind of labels, other settings.
CASES = {
    "llama": ("llama", "head", SINGLE, []),
    "bert": ("bert", "head", SINGLE, ["task.class_weights=[1.0,2.5,0.5]"]),
    "longformer int8": ("longformer", "head", SINGLE, ["quant=int8"]),
    "several labels": ("bert", "head", MULTI, ["quant=int8", "task.class_weights=[1.0,2.5,0.5]"]),
    "numbers": ("llama", "head", REGRESSION, ["quant=int8", "task.labels=[length,constant]"]),
    "llama, words": ("llama", "head for words", WORDS, []),
    "bert, words": ("bert", "head for words", WORDS, ["quant=int8", "task.class_weights=[0.5,2,1]"]),
    "bert, words, new head": ("bert", "masked lm", WORDS, ["task.class_weights=balanced"]),
    "longformer, words": (
        "longformer",
        "head for words",
        WORDS,
        ["lora.exclude_modules=[query_global,key_global,value_global]"],
    ),
    "llama, new head": ("llama", "no head", SINGLE, ["quant=int8"]),
    "bert, new head": ("bert", "no head", SINGLE, []),
    "bert, new head and pooler": ("bert", "masked lm", SINGLE, ["task.class_weights=balanced"]),
    "longformer, new head": ("longformer", "no head", SINGLE, ["lora.use_rslora=true"]),
}
WITH_HEAD = [case for case, (_, kind, _, _) in CASES.items() if kind.startswith("head")]


def trained_logits(model: TaskModel, processes: Processes) -> Tensor:
    """Logits of two rows of unlike lengths."""
    batch = byte_tokenizer()(TEXTS, return_tensors="pt", padding=True)
    model.eval()
    with bypassing_root(model, trains=True):
        return model.base(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("classification")


@pytest.fixture(scope="module")
def argv(folder: Path) -> Callable[[str, int], list[str]]:
    """`argv(case, num_ranks)`: the settings of a case."""

    def make(case: str, num_ranks: int) -> list[str]:
        family, kind, form, more = CASES[case]
        num_labels = 2 if form is REGRESSION else len(LABELS)
        checkpoint = folder / f"{family}-{kind}-{num_labels}"
        rows, held_out = folder / f"{form.value}.jsonl", folder / f"{form.value}-held-out.jsonl"
        if not checkpoint.exists():
            make_encoder(family, kind, checkpoint, num_labels)
        if not rows.exists():
            for file, num_rows in ((rows, 60), (held_out, 18)):
                write_labelled_words(file, num_rows) if form is WORDS else write_labelled_rows(file, form, num_rows)
        return [
            *settings(checkpoint, rows, packing=False),
            *(
                ["task=token_classification"]
                if form is WORDS
                else ["task=sequence_classification", f"task.problem_type={form.value}"]
            ),
            f"task.labels=[{','.join(WORD_LABELS if form is WORDS else LABELS)}]",
            f"training.max_steps={NUM_STEPS}",
            f"training.micro_batch_size={4 // num_ranks}",
            f"run.folder={folder / case.replace(' ', '_').replace(',', '')}-{num_ranks}",
            f"data.eval_path={held_out}",
            *more,
        ]

    return make


@pytest.fixture(scope="module")
def runs(argv: Callable[[str, int], list[str]]):
    """`runs(num_ranks)`: every case on so many ranks; logits of two, so that nothing comes before saving on one."""

    def run(num_ranks: int):
        inspect = trained_logits if num_ranks == 2 else None
        return run_ranks(num_ranks, train_all, {case: argv(case, num_ranks) for case in CASES}, inspect)

    return once(run)


@pytest.mark.parametrize("case", CASES)
def test_one_and_two_ranks_give_the_same_losses(runs, case: str):
    one, (first, second) = runs(1)[0][case].losses, (rank[case].losses for rank in runs(2))
    assert first == second
    assert first == pytest.approx(one, abs=1e-5) and len(one) == NUM_STEPS


@pytest.mark.parametrize("case", CASES)
def test_one_and_two_ranks_save_the_same_adapter(runs, argv, case: str):
    runs(1), runs(2)
    one, two = (
        load_file(Path(load_config(argv(case, num_ranks)).run.folder) / "adapter" / "adapter_model.safetensors")
        for num_ranks in (1, 2)
    )
    assert one.keys() == two.keys()
    for name in one:
        torch.testing.assert_close(one[name], two[name], rtol=0, atol=2e-4)


@pytest.mark.parametrize("case", WITH_HEAD)
def test_stock_libraries_give_the_same_losses(runs, argv, case: str):
    assert runs(2)[0][case].losses == pytest.approx(stock_classifier_losses(argv(case, 2)), abs=1e-5)


@pytest.mark.parametrize("case", CASES)
def test_stock_peft_loads_the_head_that_was_trained(runs, argv, case: str):
    config = load_config([*argv(case, 2)])
    ours = runs(2)[0][case].inspected
    adapter = Path(config.run.folder) / "adapter"
    assert AutoConfig.from_pretrained(adapter).id2label == dict(enumerate(config.task.labels))
    trained = json.loads((adapter / "adapter_config.json").read_text())["modules_to_save"]
    base = load_stock_classifier(Path(config.model.path), config, trained)
    model = peft.PeftModel.from_pretrained(base, adapter).eval()
    batch = AutoTokenizer.from_pretrained(adapter)(TEXTS, return_tensors="pt", padding=True)
    with torch.no_grad():
        stock = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    torch.testing.assert_close(ours, stock, rtol=0, atol=1e-5)


@pytest.mark.parametrize("case", ["llama, words", "bert, new head", "bert, new head and pooler"])
def test_the_commands_know_classifiers_and_merged_ones_need_no_adapter(runs, argv, tmp_path: Path, capsys, case: str):
    config = load_config([*argv(case, 2)])
    ours, adapter = runs(2)[0][case].inspected, f"adapter={Path(config.run.folder) / 'adapter'}"
    assert evaluate.main([adapter, f"data.path={config.data.eval_path}", f"data.cache_folder={tmp_path}"]) == 0
    summary = json.loads((Path(config.run.folder) / "summary.json").read_text())
    figures = json.loads(capsys.readouterr().out)
    assert figures["loss"] == pytest.approx(summary["eval_loss"], abs=1e-5)
    saved = yaml.safe_load((Path(config.run.folder) / "adapter" / SETTINGS_FILE).read_text())
    weights = saved["task"]["class_weights"]  # those of the training data, whatever is evaluated
    assert weights is None if config.task.class_weights is None else all(isinstance(one, float) for one in weights)
    assert {name: figures[name] for name in summary["eval_metrics"]} == pytest.approx(summary["eval_metrics"])
    assert merge.main([adapter, f"out={tmp_path / 'merged'}", "base=dequantized"]) == 0
    auto_class = AUTO_CLASSES[config.task.name]
    keys = read_headers(tmp_path / "merged").keys()
    assert not [key for key in keys if key.startswith(("cls.", "lm_head."))]  # the base's own head is left out
    model = auto_class.from_pretrained(tmp_path / "merged", dtype=torch.float32, attn_implementation="eager").eval()
    batch = AutoTokenizer.from_pretrained(tmp_path / "merged")(TEXTS, return_tensors="pt", padding=True)
    with torch.no_grad():
        stock = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    torch.testing.assert_close(ours, stock, rtol=0, atol=1e-5)
    assert generate.main([adapter, "prompt=rain"]) == 2
    assert f"task.name={config.task.name.value} writes no text." in capsys.readouterr().err


@pytest.mark.parametrize("case", ["several labels", "numbers"])
def test_two_ranks_evaluate_rows_of_several_numbers_as_training_did(runs, argv, tmp_path: Path, case: str):
    runs(2)
    config = load_config([*argv(case, 2)])
    folder = Path(config.run.folder)
    arguments = [f"adapter={folder / 'adapter'}", f"data.path={config.data.eval_path}", f"data.cache_folder={tmp_path}"]
    printed, _ = run_ranks(2, printed_by, evaluate.main, arguments)
    figures, summary = json.loads(printed), json.loads((folder / "summary.json").read_text())
    assert figures["loss"] == pytest.approx(summary["eval_loss"], abs=1e-5)
    assert {name: figures[name] for name in summary["eval_metrics"]} == pytest.approx(summary["eval_metrics"], abs=1e-5)


@pytest.mark.parametrize(
    ("case", "names"),
    [("bert", {"accuracy", "f1", "auc"}), ("bert, words", {"accuracy", "precision", "recall", "f1"})],
)
def test_figures_of_evaluation_do_not_depend_on_the_ranks(runs, argv, case: str, names: set[str]):
    runs(1), runs(2)

    def read(num_ranks: int) -> dict[str, float]:
        folder = Path(load_config(argv(case, num_ranks)).run.folder)
        summary = json.loads((folder / "summary.json").read_text())
        lines = read_lines(folder / "metrics.jsonl")
        assert lines[-1]["eval_accuracy"] == summary["eval_metrics"]["accuracy"]
        assert summary["eval_loss"] < summary["initial_eval_loss"]
        return dict(summary["eval_metrics"])

    assert set(read(1)) == names
    assert read(2) == pytest.approx(read(1), abs=1e-6)
