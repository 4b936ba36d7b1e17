"""What one sees of a run while it trains: the table, the live line below it, and train.log."""

from __future__ import annotations

import contextlib
import io
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.quick_config import load_config

from qlora_fsdp import merge
from qlora_fsdp.common.terminal import wrap_words
from qlora_fsdp.config.schema import Config, DataFormat
from qlora_fsdp.config.specs import DataSpec, TrackingSpec
from qlora_fsdp.records.console import Console, start_log, stop_log
from qlora_fsdp.records.journal import ROWS_BETWEEN_HEADERS, Journal, ProgressTable
from qlora_fsdp.records.run_folder import log
from qlora_fsdp.records.run_summary import commands_for, describe_end


def figures(step: int, **more: Any) -> dict[str, Any]:
    return {
        **{"step": step, "loss": 2.5, "grad_norm": 0.125, "learning_rate": 2e-4, "tokens_per_second_per_gpu": 16139.4},
        **{"mfu": None, "gpu_peak_gib": None, "seconds": 0.5, **more},
    }


def test_columns_line_up_below_their_names():
    table = ProgressTable(900)
    lines = table.with_header(table.row({"step": 0, "eval_loss": 2.125}, note="accuracy 0.5000, 3.0 s"))
    lines += table.with_header(table.row(figures(1), 3905.0))
    lines += table.with_header(table.row(figures(2, mfu=0.412, gpu_peak_gib=61.25), 12 * 86400 + 3.0))
    lines += table.with_header(table.row(figures(3, mfu=0.4, gpu_peak_gib=61.25, loss=None, skipped=True), 3.0))
    first, evaluation, step, second, measured, skipped = lines
    assert first.split("  ")[0] == "step" and "MFU" not in first and "GiB" not in first
    assert second.split() == ["step", "loss", "eval", "loss", "grad", "norm", "lr", "tokens/s/GPU", "MFU", "GiB", "ETA"]
    for line, header, name, value in (
        (evaluation, first, "eval loss", "2.1250"),
        (step, first, "loss", "2.5000"),
        (step, first, "tokens/s/GPU", "16,139"),
        (step, first, "ETA", "1:05:05"),
        (measured, second, "MFU", "41%"),
        (measured, second, "GiB", "61.2"),
        (measured, second, "grad norm", "0.1250"),
        (skipped, second, "loss", "skipped"),
    ):
        assert line.index(value) + len(value) == header.index(name) + len(name), (line, header)
    assert evaluation.endswith("  accuracy 0.5000, 3.0 s") and "12 days" in measured
    table.with_header("")
    headers = [len(table.with_header("")) - 1 for _ in range(2 * ROWS_BETWEEN_HEADERS)]
    assert sum(headers) == 2, "a header now and then"


class Terminal(io.StringIO):
    """A terminal 60 columns wide, and what it shows in the end."""

    def isatty(self) -> bool:
        return True

    @property
    def shown(self) -> list[str]:
        lines = [line.rpartition("\033[K")[2] for line in self.getvalue().split("\n")]
        return [re.sub(r"\033\[[0-9;]*m", "", line) for line in lines]


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Terminal]:
    found = Terminal()
    for name in ("NO_COLOR", "TERM"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "60")
    yield found
    stop_log()


def record(folder: Path, terminal: Terminal) -> None:
    """A short run with a line of others in it."""
    with contextlib.redirect_stdout(terminal):
        start_log(folder)
    journal = Journal(folder, TrackingSpec.of(load_config(["model=tiny", "data=random"])), 4, is_main=True)
    for step in (1, 2, 3):
        journal.step(figures(step, loss=float(step)))
    log.warning("\033]0;title\007 of others")
    journal.evaluation(3, 2.125, {}, 0.5)


def test_the_time_that_is_left_counts_neither_the_first_evaluation_nor_the_first_step_again(
    terminal: Terminal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """An evaluation of ten minutes, a first step of one, and then two seconds a step and five for an evaluation."""
    now = 0.0
    monkeypatch.setenv("COLUMNS", "99")
    monkeypatch.setattr(time, "monotonic", lambda: now)
    with contextlib.redirect_stdout(terminal):
        start_log(tmp_path)
    tracking = TrackingSpec.of(load_config(["model=tiny", "data=random"]))
    journal = Journal(tmp_path, tracking, 101, is_main=True, first_step=0)
    shown = []
    for step, seconds in ((1, 660.0), (2, 2.0), (3, 7.0), (11, 46.0)):
        now += seconds
        journal.step(figures(step, seconds=60.0 if step == 1 else 2.0))
        shown.append(re.findall(r"[\d:]+$", terminal.shown[-1] or terminal.shown[-2])[0])
    assert shown == ["1:40:00", "0:03:18", "0:07:21", "0:08:15"]


def test_the_live_line_stays_below_the_log(terminal: Terminal, tmp_path: Path):
    record(tmp_path, terminal)
    shown = terminal.shown
    assert [line.split()[0] for line in shown[:3]] == ["step", "1/4", "?]0;title?"]
    assert [line.split()[0] for line in shown[-2:]] == ["3/4", "3/4"], "the evaluation's row and the live line"
    assert all(len(line) < 60 for line in shown[-1:]), "one that is broken in two can't be replaced"
    assert "\033[33m?]0;title? of others\033[0m" in terminal.getvalue(), "a warning is yellow"
    lines = (tmp_path / "train.log").read_text().splitlines()
    assert all(re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d  \S", line) for line in lines)
    assert "\033" not in "".join(lines) and [line.split()[2] for line in lines] == [
        *("step", "1/4", "?]0;title?", "step", "3/4")
    ]


@pytest.mark.parametrize(("name", "value"), [("NO_COLOR", "1"), ("TERM", "dumb")])
def test_a_terminal_without_colors(terminal: Terminal, tmp_path: Path, monkeypatch: Any, name: str, value: str):
    monkeypatch.setenv(name, value)
    record(tmp_path, terminal)
    assert "\033[3" not in terminal.getvalue() and "\033[2m" not in terminal.getvalue()
    assert ("\033" in terminal.getvalue()) is (name == "NO_COLOR"), "a dumb terminal has no live line either"


def test_a_file_has_no_live_line(tmp_path: Path):
    console = Console(io.StringIO())
    console.live("1/4")
    assert console.stream.getvalue() == ""  # type: ignore[attr-defined]


def end_of_merge(out: Path, config: Config, form: DataFormat | None, quantize: str | None = None) -> str:
    return merge._describe_end(out, False, DataSpec.of(config), config.model.trust_remote_code, form, quantize)


def test_the_end_says_what_there_is_and_what_to_type(tmp_path: Path):
    folder = tmp_path / "my run"
    (folder / "adapter").mkdir(parents=True)
    (folder / "adapter" / "chat_template.jinja").touch()
    losses = {"initial_loss": 3.0, "final_loss": 2.0, "initial_eval_loss": 3.5, "eval_loss": 2.5}
    summary = {"steps": 1200, "seconds": 3905.0, "losses_are_means_of": 10} | losses
    given = f"adapter='{folder}/adapter'"
    assert describe_end(folder, summary, is_causal=True, is_random=False, trusts_code=False).splitlines() == [
        "Finished: 1,200 steps in 1:05:05.",
        "  training loss    3.0000 -> 2.0000, means of 10 steps",
        "  evaluation loss  3.5000 -> 2.5000",
        f"  adapter          {folder}/adapter",
        "Next:",
        f"  qlora-fsdp chat {given}",
        f"  qlora-fsdp merge {given} out='{folder}/merged'",
        f"  qlora-fsdp push {given} repo=ORG/NAME",
    ]
    assert describe_end(folder, summary | {"steps": 1}, True, False, False).startswith("Finished: 1 step in ")
    (folder / "adapter" / "chat_template.jinja").unlink()
    (asks,) = commands_for(folder / "adapter", is_causal=True, is_random=True, trusts_code=False)
    assert asks == f'qlora-fsdp generate {given} prompt="..."', "chat refuses a tokenizer without a chat template"
    predicts = "qlora-fsdp predict adapter=a data.path=FILE out=predictions.csv"
    evaluates = "qlora-fsdp evaluate adapter=a data.path=FILE"
    assert commands_for(Path("a"), is_causal=False, is_random=True, trusts_code=False) == [predicts, evaluates]
    config = load_config(["model.path=some/model", "data=random", "model.trust_remote_code=true"])
    asks, merges, pushes = describe_end(folder, summary, True, False, trusts_code=True).splitlines()[-3:]
    assert asks == f'  qlora-fsdp generate {given} model.trust_remote_code=true prompt="..."', (
        "the adapter's folder can't allow it"
    )
    assert "model.trust_remote_code=true" in merges
    assert "trust" not in pushes, "which loads no model"
    (asks,) = end_of_merge(tmp_path / "merged", config, None).splitlines()[1:]
    assert asks == f'  qlora-fsdp generate model.path={tmp_path}/merged model.trust_remote_code=true prompt="..."'


def test_a_merge_tells_how_prompts_were_written_in_training(tmp_path: Path):
    """A merged model's folder does not say it, and a chat template would write them otherwise."""
    (tmp_path / "chat_template.jinja").touch()
    config = load_config(["model=tiny", "data=random", "data.system_prompt=Be terse."])
    asks, note = end_of_merge(tmp_path, config, DataFormat.messages).splitlines()[1:]
    assert asks == f"  qlora-fsdp chat model.path={tmp_path}"
    assert note.endswith("data.system_prompt sets it: Be terse.")
    asks, note = end_of_merge(tmp_path, config, DataFormat.instruction).splitlines()[1:]
    assert asks == f'  qlora-fsdp generate model.path={tmp_path} raw=true prompt="..."'
    assert note.startswith("Note: the adapter was trained on instruction rows")


@pytest.mark.parametrize("form", [DataFormat.messages, DataFormat.instruction])
def test_a_merge_for_servers_names_no_command_that_refuses_it(tmp_path: Path, form: DataFormat):
    config = load_config(["model=tiny", "data=random", "data.system_prompt=Be terse."])
    said, command, _ = end_of_merge(tmp_path, config, form, "int4").splitlines()
    assert "vLLM loads it, and so does transformers with the package compressed-tensors" in said
    assert command == f"  vllm serve {tmp_path}"


def test_sentences_break_between_words_on_a_narrow_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands and tables stay whole, and a file gets lines as they are."""

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("COLUMNS", "30")
    command = "  qlora-fsdp chat adapter=outputs/a-long-name/adapter"
    table = "step  loss    tokens/s  time left"
    text = f"Set training.learning_rate=0.0002 or another number\n{command}\n{table}"
    broken = wrap_words(text, Terminal()).split("\n")
    assert broken == ["Set", "training.learning_rate=0.0002", "or another number", command, table]
    assert wrap_words(text, io.StringIO()) == text
