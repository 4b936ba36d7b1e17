"""Commands of the pages, word for word, on a tiny model and one file of chats: they end with 0 and do what is said.

tests/unit/test_documented_commands.py checks the settings of all of them; these run.
"""

from __future__ import annotations

import io
import json
import os
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest

from qlora_fsdp import __main__ as command_line
from tests.cli.launch import ROOT
from tests.helpers.ranks import run_ranks
from tests.helpers.runs import printed_by

pytestmark = pytest.mark.distributed

RUN = "model.path={model} model.tokenizer_path=bytes data=chats.jsonl"
USE, FEW = "docs/use.md", " max_new_tokens=4"
EVALUATE = "qlora-fsdp evaluate adapter=outputs/run/adapter data.path=held_out.jsonl"
GENERATE = 'qlora-fsdp generate adapter=outputs/run/adapter prompt="What does textwrap.dedent do?"'
COMPLETE = "qlora-fsdp generate adapter=outputs/run/adapter prompts=asked.jsonl out=answered.jsonl"
CHAT = "qlora-fsdp chat adapter=outputs/run/adapter temperature=0.7 top_p=0.9"
MERGE = "qlora-fsdp merge adapter=outputs/run/adapter out=merged report_data=held_out.jsonl"
MERGE_NF4 = "qlora-fsdp merge adapter=outputs/run/adapter out=merged-nf4 quantize=nf4"
AGAIN = "--config outputs/first/config.yaml run.name=second"

# The page, what stands there, what is typed here, and what is printed, or the file that is written.
DOCUMENTED: list[tuple[str, str, str, str]] = [
    ("README.md", "qlora-fsdp preview", f"qlora-fsdp preview {RUN}", "Next: qlora-fsdp train"),
    ("README.md", "qlora-fsdp train", f"qlora-fsdp train {RUN} training.max_length=64", "outputs/run/adapter"),
    (USE, EVALUATE, EVALUATE, "loss"),
    (USE, GENERATE, GENERATE + FEW, ""),
    (USE, COMPLETE, COMPLETE + FEW, "answered.jsonl"),
    (USE, CHAT, CHAT + FEW, ""),
    (USE, MERGE, MERGE, "merged/merge_report.json"),
    (USE, MERGE_NF4, MERGE_NF4, "merged-nf4/config.json"),
    ("docs/watching.md", "qlora-fsdp status outputs", "qlora-fsdp status outputs", "finished"),
    ("docs/watching.md", "qlora-fsdp report", "qlora-fsdp report outputs/run --output all.html", "all.html"),
    ("docs/configuration.md", "qlora-fsdp schema", "qlora-fsdp schema", "$schema"),
    (
        "docs/configuration.md",
        AGAIN,
        f"qlora-fsdp train {AGAIN} run.folder=outputs/second".replace("first", "run"),
        "outputs/second/adapter",
    ),
]
ROW = {"messages": [{"role": "user", "content": "Hello?"}, {"role": "assistant", "content": "Hello."}]}


def run_all(folder: Path, model: Path) -> list[tuple[str, bool]]:
    """What each command printed, and whether the file that it should write is there."""
    os.chdir(folder)
    results = []
    for *_, typed, expected in DOCUMENTED:
        with mock.patch.object(sys, "stdin", io.StringIO("Hello?\n/exit\n")):
            printed = printed_by(_main, shlex.split(typed.format(model=model))[1:])
        results.append((printed, bool(expected) and Path(expected).exists()))
    return results


def _main(argv: list[str]) -> int:
    with (
        mock.patch.object(command_line, "begin", lambda detail: None),
        mock.patch.object(command_line, "end_with_the_reader", lambda: None),
    ):
        return command_line.main(argv)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, checkpoint: Callable[..., Path]) -> list[tuple[str, bool]]:
    folder = tmp_path_factory.mktemp("documented")
    for name in ("chats.jsonl", "held_out.jsonl"):
        (folder / name).write_text(20 * (json.dumps(ROW) + "\n"))
    (folder / "asked.jsonl").write_text(json.dumps({"prompt": "Hello?"}) + "\n")
    found: list[tuple[str, bool]] = run_ranks(1, run_all, folder, checkpoint("llama"))[0]
    return found


@pytest.mark.parametrize("place", range(len(DOCUMENTED)), ids=[text[:60] for _, text, *_ in DOCUMENTED])
def test_a_command_of_the_pages_runs(place: int, results: list[tuple[str, bool]]) -> None:
    page, text, _, expected = DOCUMENTED[place]
    assert text in (ROOT / page).read_text(), "the page has changed: change this test too"
    printed, is_written = results[place]
    assert is_written or (printed.strip() and expected in printed), printed
