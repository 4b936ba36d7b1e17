"""`qlora-fsdp prepare`: the run that follows tokenizes nothing, whatever the task, and Ctrl-C loses next to nothing."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from qlora_fsdp import prepare
from qlora_fsdp.common.startup import KEPT, begin
from qlora_fsdp.data import tokenize_source
from qlora_fsdp.data.tokenize import RowTokenizer
from tests.cli.launch import SHORT_STEPS, ForkedLaunch
from tests.helpers.lines import write_lines

pytestmark = pytest.mark.distributed

CHAT = [{"messages": [{"role": "user", "content": f"{n}"}, {"role": "assistant", "content": "yes"}]} for n in range(20)]
TEXT = [{"text": f"a text {n}"} for n in range(20)]
PAIRS = [{"prompt": f"{n}", "chosen": "yes", "rejected": "no"} for n in range(20)]
LABELLED = [{"text": f"a text {n}", "label": "even" if n % 2 == 0 else "odd"} for n in range(20)]
CASES: dict[str, tuple[list[dict[str, Any]], list[str]]] = {
    "mixture": (CHAT, ["data.mix={{rows}: 1, {more}: {weight: 2, max_rows: 7}}", "data.eval_path={more}"]),
    "preference": (PAIRS, ["data.path={rows}", "task=preference", "data.eval_fraction=0.2"]),
    "classification": (LABELLED, ["data.path={rows}", "task=sequence_classification", "task.labels=[even,odd]"]),
}


def refuse_to_read() -> None:
    def read_rows(*arguments: object) -> None:
        raise AssertionError("the data is tokenized again")

    tokenize_source.read_rows = read_rows  # type: ignore[assignment]  # in a process of its own


@pytest.mark.parametrize("case", CASES)
def test_the_run_that_follows_tokenizes_nothing(case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows, given = CASES[case]
    names = {
        "{rows}": str(write_lines(tmp_path / "rows.jsonl", rows)),
        "{more}": str(write_lines(tmp_path / "more.jsonl", TEXT)),
    }
    for name, path in names.items():
        given = [text.replace(name, path) for text in given]
    settings = ["model=tiny", "model.config.num_hidden_layers=1", "training.max_length=128", *given]
    settings.append(f"data.cache_folder={tmp_path / 'cache'}")
    assert prepare.main(settings) == 0
    told = capsys.readouterr().out
    assert told.splitlines()[-1].startswith("Next: qlora-fsdp train model=tiny ")
    steps = [*SHORT_STEPS, "training.max_steps=1", "training.packing=false"]
    command = ForkedLaunch(tmp_path, 1, *settings, *steps, preexec=refuse_to_read)
    assert command.finish() == 0, command.output
    for line in told.splitlines()[:1]:
        assert f"Data: {line}" in command.output


def test_data_may_be_named_by_its_paths_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [str(write_lines(tmp_path / name, rows)) for name, rows in (("a b.jsonl", TEXT), ("c.jsonl", CHAT))]
    given = ["model.tokenizer_path=bytes", f"data.cache_folder={tmp_path / 'cache'}"]
    assert prepare.main([*files, *given]) == prepare.main([files[0], *given]) == 0
    told = capsys.readouterr().out
    assert f"{files[0]}, {files[1]}: 40 rows read" in told and f"{files[0]}: 20 rows read" in told
    assert told.splitlines()[-1].startswith("Next: qlora-fsdp train model=NAME 'data.path=")  # a run needs one


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["data=random"], "data.format=random is made while it is trained on: there is nothing to prepare."),
        (["data.streaming=true"], "data.streaming=true tokenizes rows while they are trained on"),
    ],
)
def test_what_there_is_nothing_to_prepare_of(
    given: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = write_lines(tmp_path / "rows.jsonl", TEXT)
    assert prepare.main(["model=tiny", f"data.path={rows}", *given]) == 2
    assert said in capsys.readouterr().err


def hold_and_prepare(folder: Path, settings: list[str]) -> None:
    gc.freeze()  # what is garbage of other tests here may belong to threads that the fork has not
    whole, calls = RowTokenizer.whole, 0

    def held(self: RowTokenizer, batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
        nonlocal calls
        calls += 1
        if calls == 5:
            (folder / f"held-{os.getpid()}").touch()
            signal.pause()
        return whole(self, batch)

    RowTokenizer.whole = held  # type: ignore[method-assign]  # in a process of its own
    begin(KEPT)
    prepare.main(settings)


def test_ctrl_c_keeps_what_is_tokenized(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    rows = write_lines(
        tmp_path / "rows.jsonl", [{"text": f"a text {n}"} for n in range(tokenize_source.ROWS_A_PROCESS + 1)]
    )
    settings = ["model=tiny", f"data.path={rows}", f"data.cache_folder={tmp_path / 'cache'}", "data.num_proc=2"]
    process = multiprocessing.get_context("fork").Process(target=partial(hold_and_prepare, tmp_path, settings))
    process.start()
    deadline = time.monotonic() + 120
    while len(list(tmp_path.glob("held-*"))) < 2:
        assert process.is_alive() and time.monotonic() < deadline
        time.sleep(0.05)
    main = psutil.Process(process.pid)
    workers = main.children()
    for each in (*workers, main):  # as a terminal does
        each.send_signal(signal.SIGINT)
    process.join()
    assert process.exitcode == 130 and not psutil.wait_procs(workers, timeout=60)[1]
    assert f"Interrupted by SIGINT. {KEPT}" in capfd.readouterr().err
    assert prepare.main(settings) == 0
    captured = capfd.readouterr()
    assert f"of 2,001 rows of {rows} have been tokenized before" in captured.err and "2,001 rows read" in captured.out
