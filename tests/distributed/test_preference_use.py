"""`evaluate` compares an adapter with what training compared it with, whatever was trained and wherever it started."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from qlora_fsdp import evaluate
from tests.helpers.checkpoints import make_checkpoint
from tests.helpers.lines import read_lines
from tests.helpers.preferences import write_judged, write_pairs
from tests.helpers.ranks import run_ranks
from tests.helpers.reference import save_stock_adapter
from tests.helpers.runs import printed_by, settings, train_here

pytestmark = pytest.mark.distributed
START = "lora.start=FOLDER/start"
CASES = {
    "new": ["preference.loss=ipo", "preference.beta=0.4"],
    "from an adapter": [START],
    "from an adapter, kto": [START, "preference.loss=kto"],
    "with the head": ["lora.modules_to_save=[lm_head]"],
    "with new tokens": ["tokenizer.add_tokens=[cat]"],
    "with new tokens and the embeddings": ["tokenizer.add_tokens=[cat]", "lora.modules_to_save=[embed_tokens]"],
    "dora": ["lora.use_dora=true"],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("preference-use")
    make_checkpoint("llama", folder / "model")
    for name, num_rows in (("train", 20), ("held_out", 9)):
        write_pairs(folder / f"{name}-pairs.jsonl", num_rows)
        write_judged(folder / f"{name}-judged.jsonl", num_rows)
    save_stock_adapter(folder / "model", {"r": 8, "target_modules": ["q_proj", "up_proj"]}, folder / "start")
    return folder


def rows_of(folder: Path, case: str, name: str) -> Path:
    return folder / f"{name}-{'judged' if 'kto' in case else 'pairs'}.jsonl"


def training(folder: Path, case: str) -> list[str]:
    more = [text.replace("FOLDER", str(folder)) for text in CASES[case]]
    own = ["task=preference", f"run.folder={folder / case.replace(' ', '_').replace(',', '')}"]
    own += [
        "training.max_steps=4",
        "checkpoint.every_steps=2",
        "training.learning_rate=1e-2",
        f"data.eval_path={rows_of(folder, case, 'held_out')}",
    ]
    return settings(folder / "model", rows_of(folder, case, "train"), *own, *more)


def evaluation(folder: Path, case: str, adapter: Path | None = None) -> list[str]:
    adapter = adapter or folder / case.replace(" ", "_").replace(",", "") / "adapter"
    data = [f"data.path={rows_of(folder, case, 'held_out')}", f"data.cache_folder={folder}/cache"]
    return [f"adapter={adapter}", *data, "training.max_length=64"]


def train_and_evaluate(cases: Mapping[str, tuple[Sequence[str], Sequence[str]]]) -> dict[str, str]:
    """On one of the ranks: what `evaluate` prints of the adapter that a run has written."""
    printed = {}
    for case, (argv, arguments) in cases.items():
        train_here([text for text in argv if not (case.startswith("from") and text.startswith("lora.r="))])
        printed[case] = printed_by(evaluate.main, arguments)
    return printed


@pytest.fixture(scope="module")
def printed(folder: Path) -> dict[str, str]:
    cases = {case: (training(folder, case), evaluation(folder, case)) for case in CASES}
    return run_ranks(2, train_and_evaluate, cases)[0]


@pytest.mark.parametrize("case", CASES)
def test_the_figures_are_those_that_training_ended_with(folder: Path, printed: dict[str, str], case: str) -> None:
    adapter = Path(evaluation(folder, case)[0].partition("=")[2])
    lines = read_lines(adapter.parent / "metrics.jsonl")
    last = [line for line in lines if line.get("eval_loss") is not None][-1]
    expected = {name.removeprefix("eval_"): value for name, value in last.items() if name.startswith("eval_")}
    del expected["seconds"]
    found = json.loads(printed[case])
    assert {name: found[name] for name in expected} == pytest.approx(expected, abs=1e-5, rel=1e-5)
    assert abs(expected["rewards/margins"]) > 0.01


def test_checkpoints_know_the_start_of_their_run(folder: Path, printed: dict[str, str], capfd) -> None:
    checkpoint = folder / "from_an_adapter" / "checkpoints" / "step-00000002"
    assert evaluate.main(evaluation(folder, "from an adapter", checkpoint / "adapter")) == 0
    found, of_the_end = json.loads(capfd.readouterr().out), json.loads(printed["from an adapter"])
    assert 0 < found["rewards/margins"] < of_the_end["rewards/margins"]


def test_a_start_that_is_not_there_is_asked_for(
    folder: Path, printed: dict[str, str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """An adapter that was moved away from its run, or that is compared with another start, gets no figures."""
    case = "from an adapter"
    moved = tmp_path / "moved"
    shutil.copytree(folder / "from_an_adapter" / "adapter", moved)
    arguments = evaluation(folder, case, moved)
    assert evaluate.main(arguments) == 2
    assert "was trained on from another adapter, which preference.loss=dpo compares it with" in capfd.readouterr().err
    other = save_stock_adapter(folder / "model", {"r": 8, "target_modules": ["q_proj", "up_proj"]}, tmp_path / "other")
    shutil.copy(folder / "from_an_adapter" / "adapter" / "adapter_model.safetensors", other)
    assert evaluate.main([*arguments, f"lora.start={other}"]) == 2
    assert f"lora.start={other} does not have it" in capfd.readouterr().err
    assert evaluate.main([*arguments, f"lora.start={folder}/start"]) == 0
    found, expected = json.loads(capfd.readouterr().out), json.loads(printed[case])
    for figures in (found, expected):
        del figures["adapter"], figures["seconds"], figures["data"]
    assert found == pytest.approx(expected, abs=1e-5, rel=1e-5)
