"""`from qlora_fsdp import train, load`, as a script and as the notebook of examples/ have it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import qlora_fsdp
from qlora_fsdp import ConfigError, LoadedModel, RunFailed, RunState, load, read_run, train
from qlora_fsdp.config.schema import ProblemType
from qlora_fsdp.python import load_model
from tests.cli.launch import child_environment
from tests.helpers.classification import LABELS, make_encoder, write_labelled_rows
from tests.helpers.ranks import run_ranks
from tests.helpers.runs import settings, train_all

ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "examples" / "first-adapter.ipynb"
QUESTION = "What does `textwrap.dedent(text)` do?\n"
DEMO: dict[str, Any] = {
    "model.path": str(ROOT / "demo" / "base"),
    "data": ROOT / "demo" / "docstrings.jsonl",  # a Path, which is text to YAML
    "training": {"max_length": 64, "max_steps": 3},
    "launch": {"num_processes": 2},
}


@pytest.fixture(autouse=True)
def variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """What `train` hands on to the command is what other tests' commands get."""
    for name, value in child_environment().items():
        monkeypatch.setenv(name, value)


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    """`load` finds a process without a group, as in a script of its own, and leaves none to other tests."""
    load_model._alone.cache_clear()
    yield
    if load_model._alone.cache_info().currsize:
        torch.distributed.destroy_process_group()
        load_model._alone.cache_clear()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunState:
    folder = tmp_path_factory.mktemp("python") / "run"
    with pytest.MonkeyPatch.context() as patch:
        for name, value in child_environment().items():
            patch.setenv(name, value)
        return train(DEMO | {"run.folder": folder})


def test_train_returns_the_finished_run(run: RunState) -> None:
    assert run == read_run(run.folder)
    assert (run.status, run.step, run.num_steps) == ("finished", 3, 3)
    assert run.adapter == run.folder / "adapter"
    assert run.report == run.folder / "report.html"
    assert len([line for line in run.metrics() if "loss" in line]) == 3
    assert json.loads((run.folder / "summary.json").read_text())["num_ranks"] == 2


def test_what_is_loaded_is_pefts_model_and_writes_what_stock_libraries_write(run: RunState) -> None:
    """Without quantization, so that both compute with the same weights."""
    model = load(run.adapter, {"quant": "none"})
    assert isinstance(model, LoadedModel) and isinstance(model.model, peft.PeftModel)
    stock = peft.PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(DEMO["model.path"], dtype=torch.float32), str(run.adapter)
    ).eval()
    tokenizer = AutoTokenizer.from_pretrained(run.adapter)
    asked = tokenizer(QUESTION, return_tensors="pt")
    with torch.no_grad():
        torch.testing.assert_close(model.model(**asked).logits, stock(**asked).logits, atol=1e-4, rtol=1e-4)
        written = stock.generate(**asked, max_new_tokens=12, do_sample=False)
        own = model.model.generate(**asked, max_new_tokens=12, do_sample=False)
    assert own.tolist() == written.tolist()
    text = tokenizer.decode(written[0, asked["input_ids"].shape[1] :], skip_special_tokens=True)
    assert model.complete([QUESTION, QUESTION], max_new_tokens=12, raw=True) == [text, text]
    with pytest.raises(ConfigError, match=r"task\.name=causal_lm writes text"):
        model.predict([{"text": "a"}])
    with pytest.raises(ConfigError, match="prompts is one text, and not a list of them"):
        model.complete(QUESTION)
    # A second one in the same process, quantized as it was trained.
    assert load(run.adapter).complete([QUESTION], max_new_tokens=2, raw=True)


def test_a_classifier_predicts(tmp_path: Path) -> None:
    base = make_encoder("llama", "head", tmp_path / "base", 3)
    rows = write_labelled_rows(tmp_path / "rows.jsonl", ProblemType.single_label_classification, 12)
    typed = ["task=sequence_classification", f"task.labels=[{','.join(LABELS)}]", "training.max_steps=1"]
    run = settings(base, rows, *typed, f"run.folder={tmp_path / 'run'}", packing=False)
    run_ranks(1, train_all, {"one": run})
    model = load(tmp_path / "run" / "adapter")
    predicted = model.predict([{"text": "rain fell"}, {"text": "birds"}])
    assert all(row["prediction"] in LABELS and set(row["probabilities"]) == set(LABELS) for row in predicted)
    with pytest.raises(ConfigError, match="writes no text"):
        model.complete(["rain"])


def test_mistakes_are_raised_before_anything_is_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "Popen", None)
    with pytest.raises(ConfigError) as found:
        train(DEMO | {"run.folder": tmp_path / "run", "training.lr": 1, "lora.r": "many"})
    assert "Did you mean training.learning_rate?" in str(found.value)
    assert "lora.r=many" in str(found.value)
    with pytest.raises(ConfigError, match=r"slurm\.setup"):
        train(DEMO | {"slurm.setup": ["true"]})
    with pytest.raises(ConfigError, match="can't be read"):
        train(tmp_path / "none.yaml")


def test_a_run_that_fails_is_an_exception_with_its_message(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    wrong = DEMO | {"run.folder": tmp_path / "run", "training.learning_rate": 1e30, "launch": {"num_processes": 1}}
    with pytest.raises(RunFailed, match=r"Step 2: loss nan.*training\.learning_rate lower") as failed:
        train(wrong, quiet=True)
    assert failed.value.exit_code == 5
    assert failed.value.run.status == "failed"
    assert capfd.readouterr().out == ""


SCRIPT = """\
import sys
from qlora_fsdp import train

try:
    train({settings!r})
except KeyboardInterrupt:
    print("stopped by the user", flush=True)
    sys.exit(7)
"""


def test_a_notebooks_stop_button_lets_the_run_save_and_the_same_call_goes_on(tmp_path: Path) -> None:
    """The button sends SIGINT to the kernel's process alone."""
    settings = DEMO | {"data": str(DEMO["data"]), "run.folder": str(tmp_path / "run"), "checkpoint.every_steps": 1000}
    settings["training"] = {"max_length": 64, "max_steps": 100_000, "micro_batch_size": 1, "global_batch_size": 2}
    script = [sys.executable, "-c", SCRIPT.format(settings=settings)]
    process = subprocess.Popen(script, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=tmp_path)
    assert process.stdout is not None
    printed = ""
    for line in process.stdout:
        printed += line
        if line.startswith("1/100000"):
            os.kill(process.pid, signal.SIGINT)
    assert process.wait() == 7, printed
    assert printed.endswith("stopped by the user\n")
    stopped = read_run(tmp_path / "run")
    assert stopped.status == "interrupted" and stopped.checkpoint is not None and stopped.step is not None
    settings["training"]["max_steps"] = stopped.step + 1
    finished = train(settings | {"checkpoint.allow_changes": ["training.max_steps"]}, quiet=True)
    assert finished.status == "finished" and finished.step == stopped.step + 1


def test_names_are_there_whatever_was_imported_before() -> None:
    """Importing the module of the command puts it in the place of the package's `train`: it can be called too."""
    code = "import qlora_fsdp, qlora_fsdp.train; from qlora_fsdp import train; "
    code += "assert callable(train) and callable(qlora_fsdp.train) and callable(train.main)"
    subprocess.run([sys.executable, "-c", code], check=True)
    code = "import sys; from qlora_fsdp import RunState, train; assert 'torch' not in sys.modules; train.main"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert all(hasattr(qlora_fsdp, name) for name in qlora_fsdp.__all__)


def test_the_notebook_runs(tmp_path: Path) -> None:
    """Every cell, by a kernel of its own, in a folder that looks like the clone."""
    nbclient = pytest.importorskip("nbclient", reason="nbclient and ipykernel are not here")
    nbformat = pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    (tmp_path / "demo").symlink_to(ROOT / "demo")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    kernel = nbclient.NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(tmp_path)}})
    kernel.execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    printed = "".join(output.text for output in outputs if output.output_type == "stream")
    assert "2,438 rows, the first is" in printed
    assert "Finished: 60 steps" in printed
    assert "the adapter is in outputs/notebook/adapter" in printed.replace(f"{tmp_path}/", "")
    assert "base ['" in printed and "trained ['" in printed
    # What stands in the clone has no outputs.
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    assert all(not cell.get("outputs") for cell in cells)
