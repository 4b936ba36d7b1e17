"""predict: what stock transformers and PEFT say of the same rows, on one and two ranks, killed and gone on with."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import psutil
import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoTokenizer, pipeline

from qlora_fsdp.config.schema import ProblemType
from qlora_fsdp.predict import __main__ as predict
from tests.cli.launch import SCRIPT, child_environment, run_forked
from tests.helpers.classification import (
    CLASSES,
    LABELS,
    WORD_LABELS,
    make_encoder,
    write_labelled_rows,
    write_labelled_words,
)
from tests.helpers.lines import read_lines, write_lines
from tests.helpers.preferences import BOS, EOS, write_pairs
from tests.helpers.ranks import run_ranks
from tests.helpers.runs import printed_by, settings, train_all

pytestmark = pytest.mark.distributed
TEXTS = ["rain fell over the old town", "birds", "a", "town birds rain on a cat that sat", "old rain"]
DEMO = Path(__file__).parents[2] / "demo" / "base"
# Case: family, what its checkpoint has besides the backbone, outputs, settings of the task.
CASES = {
    "classes": ("llama", "head", 3, ["task=sequence_classification", f"task.labels=[{','.join(LABELS)}]"]),
    "several": (
        *("bert", "head", 3),
        [
            "task=sequence_classification",
            "task.problem_type=multi_label_classification",
            f"task.labels=[{','.join(LABELS)}]",
        ],
    ),
    "numbers": (
        *("bert", "head", 2),
        ["task=sequence_classification", "task.problem_type=regression", "task.labels=[length,sign]"],
    ),
    "words": ("bert", "head for words", 3, ["task=token_classification", f"task.labels=[{','.join(WORD_LABELS)}]"]),
    "rewards": ("llama", "head", 1, ["task=reward"]),
}
FORMS = {
    "classes": ProblemType.single_label_classification,
    "several": ProblemType.multi_label_classification,
    "numbers": ProblemType.regression,
}
ASKED: dict[str, list[dict[str, Any]]] = {
    "classes": [{"id": number, "text": text, "label": "of the user"} for number, text in enumerate(TEXTS)],
    "several": [{"text": text} for text in TEXTS],
    "numbers": [{"text": text} for text in TEXTS],
    "words": [{"tokens": text.split()} for text in TEXTS],
    "rewards": [
        {"prompt": "the cat", "completion": " sat"},
        {"prompt": "the cat", "chosen": " sat", "rejected": " sang?"},
        {"prompt": "the", "responses": [" town", " rain", " old old old"]},
        {"prompt": "rain", "completion": " fell over"},
        {"prompt": "birds", "completion": " sang"},
    ],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("predict")


@pytest.fixture(scope="module")
def adapters(folder: Path) -> dict[str, Path]:
    runs = {}
    for case, (family, kind, num_outputs, more) in CASES.items():
        base = make_encoder(family, kind, folder / f"{case}-base", num_outputs)
        rows = folder / f"{case}.jsonl"
        if case == "words":
            write_labelled_words(rows, 24)
        elif case == "rewards":
            write_pairs(rows)
        else:
            write_labelled_rows(rows, FORMS[case], 24)
        few = ["training.max_steps=2", "training.learning_rate=1e-2", "quant=none", f"run.folder={folder / case}"]
        runs[case] = settings(base, rows, *few, *more, packing=False)
        write_lines(folder / f"{case}-asked.jsonl", ASKED[case])
    run_ranks(1, train_all, runs)
    return {case: folder / case / "adapter" for case in CASES}


def load_stock(case: str, adapter: Path, base: Path) -> nn.Module:
    """The base with the adapter, by transformers and PEFT alone."""
    config = AutoConfig.from_pretrained(adapter)
    model = CLASSES[CASES[case][1]].from_pretrained(base, config=config, dtype=torch.float32)
    return peft.PeftModel.from_pretrained(model, adapter).eval()


def predict_all(adapters: dict[str, Path], folder: Path, num_ranks: int) -> None:
    for case, adapter in adapters.items():
        out = folder / f"{case}-{num_ranks}.jsonl"
        arguments = [f"adapter={adapter}", f"data.path={folder / f'{case}-asked.jsonl'}", f"out={out}", "batch_size=2"]
        printed_by(predict.main, arguments)


@pytest.fixture(scope="module", params=[1, 2])
def predicted(request: pytest.FixtureRequest, adapters: dict[str, Path], folder: Path) -> dict[str, list[Any]]:
    run_ranks(request.param, predict_all, adapters, folder, request.param)
    return {case: read_lines(folder / f"{case}-{request.param}.jsonl") for case in adapters}


def test_rows_stay_as_they_are_and_in_order(predicted: dict[str, list[Any]], folder: Path) -> None:
    for case, rows in predicted.items():
        own = [{name: row[name] for name in asked} for row, asked in zip(rows, ASKED[case], strict=True)]
        assert own == ASKED[case]
    assert not list(folder.glob("*.part"))


@pytest.mark.parametrize("case", ["classes", "several"])
def test_classes_are_those_of_a_stock_pipeline(
    predicted: dict[str, list[Any]], adapters: dict[str, Path], folder: Path, case: str
) -> None:
    model = load_stock(case, adapters[case], folder / f"{case}-base")
    stock = pipeline("text-classification", model=model, tokenizer=AutoTokenizer.from_pretrained(adapters[case]))
    for row, found in zip(predicted[case], stock(TEXTS, top_k=None), strict=True):
        expected = {each["label"]: each["score"] for each in found}
        assert row["probabilities"] == pytest.approx(expected, abs=1e-5)
        if case == "classes":
            assert row["prediction"] == found[0]["label"]
        else:
            assert sorted(row["prediction"]) == sorted(name for name, score in expected.items() if score >= 0.5)


def test_numbers_are_those_of_a_stock_pipeline(
    predicted: dict[str, list[Any]], adapters: dict[str, Path], folder: Path
) -> None:
    model = load_stock("numbers", adapters["numbers"], folder / "numbers-base")
    tokenizer = AutoTokenizer.from_pretrained(adapters["numbers"])
    stock = pipeline("text-classification", model=model, tokenizer=tokenizer, function_to_apply="none")
    for row, found in zip(predicted["numbers"], stock(TEXTS, top_k=None), strict=True):
        assert row["prediction"] == pytest.approx({each["label"]: each["score"] for each in found}, abs=1e-5)
        assert "probabilities" not in row


def test_words_have_the_label_of_their_first_token(
    predicted: dict[str, list[Any]], adapters: dict[str, Path], folder: Path
) -> None:
    model = load_stock("words", adapters["words"], folder / "words-base")
    tokenizer = AutoTokenizer.from_pretrained(adapters["words"])
    stock = pipeline("token-classification", model=model, tokenizer=tokenizer, ignore_labels=[])
    for row, text in zip(predicted["words"], TEXTS, strict=True):
        by_start = {each["start"]: each for each in stock(text)}
        starts = [sum(len(word) + 1 for word in text.split()[:number]) for number in range(len(text.split()))]
        assert row["prediction"] == [by_start[start]["entity"] for start in starts]
        assert row["probabilities"] == pytest.approx([by_start[start]["score"] for start in starts], abs=1e-5)


def test_rewards_are_the_stock_models(predicted: dict[str, list[Any]], adapters: dict[str, Path], folder: Path) -> None:
    model = load_stock("rewards", adapters["rewards"], folder / "rewards-base")

    @torch.no_grad()
    def reward(prompt: str, answer: str) -> float:
        ids: Tensor = torch.tensor([[BOS, *prompt.encode(), *answer.encode(), EOS]])
        return float(model(input_ids=ids).logits[0, 0])

    for row in predicted["rewards"]:
        if "responses" in row:
            expected: Any = [reward(row["prompt"], answer) for answer in row["responses"]]
        elif "chosen" in row:
            expected = {side: reward(row["prompt"], row[side]) for side in ("chosen", "rejected")}
        else:
            expected = reward(row["prompt"], row["completion"])
        assert row["prediction"] == pytest.approx(expected, abs=1e-5)


def start(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(SCRIPT), "predict", *arguments],
        env=child_environment(),
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def finish(folder: Path, *arguments: str) -> tuple[int, str]:
    return run_forked(folder, "predict", *arguments)


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 300
    while not condition():
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()[0]
        time.sleep(0.05)


def kill_all(process: subprocess.Popen[str]) -> None:
    every = [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]
    for each in every:
        each.kill()
    process.communicate()
    psutil.wait_procs(every[:-1])


@pytest.mark.slow
def test_it_goes_on_where_it_was_killed(
    adapters: dict[str, Path], predicted: dict[str, list[Any]], tmp_path: Path
) -> None:
    rows = write_lines(tmp_path / "many.jsonl", [{"number": n, "text": TEXTS[n % 5]} for n in range(4000)])
    arguments = [f"adapter={adapters['classes']}", f"data.path={rows}", "batch_size=1", "launch.num_processes=2"]
    out, part = tmp_path / "out.csv", tmp_path / "out.csv.part"
    process = start(tmp_path, *arguments, f"out={out}")
    wait_for(lambda: part.exists() and part.read_bytes().count(b"\n") > 20, process)
    kill_all(process)
    assert not out.exists()
    whole = part.read_bytes()
    whole = whole[: whole.rfind(b"\n") + 1]
    num_done = whole.count(b"\n") - 1
    part.write_bytes(whole + b'{"prediction": "ra')

    others = write_lines(tmp_path / "others.jsonl", [{"text": "another"}])
    changed = [arguments[0], f"data.path={others}", f"out={out}"]
    code, printed = finish(tmp_path, *changed)
    assert code == 2 and "was begun with other rows (data.path)" in printed and "Traceback" not in printed, printed
    code, printed = finish(tmp_path, f"adapter={adapters['several']}", f"data.path={rows}", f"out={out}")
    assert code == 2 and "was begun with another adapter" in printed, printed

    code, printed = finish(tmp_path, *[arguments[0], arguments[1], "batch_size=64"], f"out={out}")
    assert code == 0, printed
    assert f"Goes on behind row {num_done:,} of 4,000" in printed
    with out.open(newline="") as stream:
        found = list(csv.DictReader(stream))
    assert [int(row["number"]) for row in found] == list(range(4000))
    expected = {row["text"]: row["prediction"] for row in predicted["classes"]}
    assert all(row["prediction"] == expected[row["text"]] for row in found)
    assert all(sum(float(row[f"probabilities.{name}"]) for name in LABELS) == pytest.approx(1) for row in found)
    assert not part.exists()


def test_texts_are_those_of_generate(tmp_path: Path) -> None:
    rows = write_lines(tmp_path / "asked.jsonl", [{"prompt": "rain", "id": 1}, {"prompt": "the old town"}])
    own = [f"model.path={DEMO}", "raw=true", "max_new_tokens=6"]
    code, printed = finish(tmp_path, *own, f"data.path={rows}", f"out={tmp_path / 'out.jsonl'}")
    assert code == 0, printed
    code, printed = run_forked(tmp_path, "generate", *own, f"prompts={rows}")
    assert code == 0, printed
    answers = [line for line in printed.splitlines() if line.startswith("{")]
    expected = [json.loads(line)["completion"] for line in answers]
    assert len(expected) == 2
    found = read_lines(tmp_path / "out.jsonl")
    assert [row["prediction"] for row in found] == expected and found[0]["id"] == 1


MISTAKES = [
    ([], ["out is missing."]),
    (["out=o.xlsx"], ["has an unknown ending", ".csv"]),
    (["out=o.csv", "batch_size=0"], ["must be at least 1"]),
    (["out=o.csv", "temperature=1"], ["temperature=1.0", "writes no text"]),
    (["out=o.csv", "data.max_rows=2"], ["data.max_rows=2", "every row of data.path"]),
]


@pytest.mark.parametrize(("typed", "said"), MISTAKES)
def test_mistakes_are_told(
    adapters: dict[str, Path],
    folder: Path,
    typed: list[str],
    said: list[str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    rows = folder / "classes-asked.jsonl"
    assert predict.main([f"adapter={adapters['classes']}", f"data.path={rows}", *typed]) == 2
    printed = capsys.readouterr().err
    for text in said:
        assert text in printed


@pytest.mark.parametrize("suffix", ["jsonl", "csv"])
def test_half_a_character_is_written_as_json_escapes_it(tmp_path: Path, suffix: str):
    file = predict.PredictionFile(tmp_path / f"out.{suffix}", {"data.path": "rows.jsonl"})
    assert file.open() == 0
    file.add([{"text": "whole"}])
    with file.part.open("a", encoding="utf-8") as stream:
        stream.write('{"text": "\\ud800 half"}\n')
    file.finish([{"id": 1}, {"id": 2}])
    assert "\\ud800 half" in file.out.read_text(encoding="utf-8")
    if suffix == "jsonl":
        assert read_lines(file.out)[1] == {"id": 2, "text": "\ud800 half"}
