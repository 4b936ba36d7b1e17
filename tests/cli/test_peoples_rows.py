"""Files of rows as people have them, through the command: used, or answered with one message and exit code 2."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
import torch

from qlora_fsdp.data.tokenizer import byte_tokenizer
from tests.cli.launch import run_forked
from tests.helpers.checkpoints import make_checkpoint
from tests.helpers.lines import write_lines

pytestmark = pytest.mark.distributed
SHORT = "training.max_length=64"
CHATS = ["prepare", "model=base", SHORT, "data.cache_folder=cache", "data.chat_template=chatml"]
EVEN = [*CHATS[:-1], "task=sequence_classification"]
# Files of rows that can't be used: what is typed, and what the message holds.
ROWS: dict[str, tuple[list[str], str]] = {
    "human and bot": ([*CHATS, "data=bots.jsonl"], "(roles: human, bot; write assistant for the role of who answers)"),
    "a chat without an answer": ([*CHATS, "data=asked.jsonl"], "no message of the assistant (roles: user)"),
    "an answer that is null": ([*CHATS, "data=null.jsonl"], "message 2 has no content"),
    "an empty answer": ([*CHATS, "data=unsaid.jsonl"], "completion is empty"),
    "numbers in place of texts": ([*CHATS, "data=numbers.jsonl"], "prompt is int, not text"),
    "no JSON": ([*CHATS, "data=words.jsonl"], "2 rows left out (not JSON): words.jsonl:1"),
    "blank lines": ([*CHATS, "data=blank.jsonl"], "blank.jsonl has no rows"),
    "Windows-1252": ([*CHATS, "data=western.jsonl"], "convert it: iconv -f WINDOWS-1252 -t UTF-8 OLD > NEW"),
    "columns of one's own": (
        [*CHATS, "data=own.jsonl"],
        "keys are Frage, Antwort, and not messages; prompt, completion",
    ),
    "a column that is not there": (
        [*CHATS, "data=own.jsonl", "data.columns={prompt: Frage, completion: answer}"],
        "no answer, which data.columns names for completion; keys are Frage, Antwort",
    ),
    "bars between columns": ([*CHATS, "data=bars.csv"], "bars.csv has '|' between its columns"),
    "a table without names": ([*CHATS, "data=unnamed.csv"], "keys are 0, the cat, and not messages"),
    "a table with commas in its texts": ([*CHATS, "data=ragged.csv"], "a CSV line with more or fewer cells"),
    "a spreadsheet under the name of a table": ([*CHATS, "data=sheet.csv"], "sheet.csv is no text: by its first bytes"),
    "rows that are not packed": ([*CHATS, "data=plain.jsonl.gz"], "plain.jsonl.gz can't be read: Not a gzipped file"),
    "packed rows that are cut": ([*CHATS, "data=half.jsonl.gz"], "half.jsonl.gz can't be read: Compressed file ended"),
    "pairs that are the same": (
        [*CHATS[:-1], "task=preference", "data=same.jsonl"],
        "24 rows left out (chosen and rejected are the same)",
    ),
    "labels of another task": (
        [*EVEN, "task.labels=[cat,dog]", "data=labels.jsonl"],
        "'even' is neither one of task.labels (cat, dog) nor an index of them",
    ),
}
# Files of rows that are used: what is typed, and what is said of them.
USED: dict[str, tuple[list[str], str]] = {
    "human and bot of turns": ([*CHATS, "data=turns.jsonl"], "24 rows read, 24 used"),
    "Windows' line ends and mark": ([*CHATS, "data=windows.jsonl"], "24 rows read, 24 used"),
    "no line end at the end": ([*CHATS, "data=unended.jsonl"], "24 rows read, 24 used"),
    "a table of tabs": ([*CHATS, "data=tabs.tsv"], "1 row read, 1 used"),
    "one array": ([*CHATS, "data=array.jsonl"], "24 rows read, 24 used"),
    "packed": ([*CHATS, "data=rows.jsonl.gz"], "24 rows read, 24 used"),
    "two forms in one file": ([*CHATS, "data=mixed.jsonl"], "48 rows read, 48 used"),
    "one broken row": ([*CHATS, "data=broken.jsonl"], "1 row left out (not JSON): broken.jsonl:25"),
    "rows that are held out too": (
        [*CHATS, "data=24.jsonl", "data.eval_path=24.jsonl"],
        "the same as 24 of the 24 eval",
    ),
    "a label that no row has": (
        [*EVEN, "task.labels=[even,odd,prime]", "data=labels.jsonl"],
        "warning: no row has the label prime. Add such rows, or leave it out of task.labels.",
    ),
    "one label": (
        [*EVEN, "task.labels=[even,odd]", "data=evens.jsonl"],
        "warning: every row has the label even: there is nothing to tell apart.",
    ),
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a base and the files of ROWS and USED."""
    folder = tmp_path_factory.mktemp("rows")
    byte_tokenizer().save_pretrained(make_checkpoint("llama", folder / "base", torch.float32))
    write_peoples_rows(folder)
    return folder


def write_peoples_rows(folder: Path) -> None:
    numbers = range(24)
    plain = [{"prompt": f"{n}: ", "completion": "the cat"} for n in numbers]
    lines = [json.dumps(row) for row in plain]
    chats = [[{"role": "human", "content": f"{n}?"}, {"role": "bot", "content": "the cat"}] for n in numbers]
    turns = [[{"from": "human", "value": f"{n}?"}, {"from": "bot", "value": "the cat"}] for n in numbers]
    asked = {"role": "user", "content": "Cat?"}
    files = {
        "24": plain,
        "bots": [{"messages": chat} for chat in chats],
        "turns": [{"conversations": each} for each in turns],
        "asked": [{"messages": [asked]}] * 24,
        "null": [{"messages": [asked, {"role": "assistant", "content": None}]}] * 24,
        "unsaid": [{"prompt": f"{n}", "completion": ""} for n in numbers],
        "numbers": [{"prompt": n, "completion": n + 1} for n in numbers],
        "own": [{"Frage": f"{n}", "Antwort": "the cat"} for n in numbers],
        "mixed": [*plain, *({"messages": [asked, {"role": "assistant", "content": f"{n}"}]} for n in numbers)],
        "array": [plain],
        "same": [{"prompt": f"{n}", "chosen": "yes", "rejected": "yes"} for n in numbers],
        "labels": [{"text": f"{n}", "label": ("even", "odd")[n % 2]} for n in numbers],
        "evens": [{"text": f"{n}", "label": "even"} for n in numbers],
    }
    for name, rows in files.items():
        write_lines(folder / f"{name}.jsonl", rows)
    (folder / "words.jsonl").write_text("the cat\nthe dog\n")
    (folder / "blank.jsonl").write_text("\n\n\n")
    (folder / "western.jsonl").write_bytes('{"prompt": "größe", "completion": "é"}\n'.encode("latin-1"))
    (folder / "windows.jsonl").write_bytes("\ufeff".encode() + "".join(f"{line}\r\n" for line in lines).encode())
    (folder / "unended.jsonl").write_text("\n".join(lines))
    (folder / "broken.jsonl").write_text("\n".join([*lines, '{"prompt": "a", "comp']))
    packed = gzip.compress((folder / "24.jsonl").read_bytes())
    (folder / "rows.jsonl.gz").write_bytes(packed)
    (folder / "half.jsonl.gz").write_bytes(packed[: len(packed) // 2])
    (folder / "plain.jsonl.gz").write_text("\n".join(lines))
    (folder / "bars.csv").write_text("prompt|completion\n" + "".join(f"{n}|the cat\n" for n in numbers))
    (folder / "unnamed.csv").write_text("".join(f"{n},the cat\n" for n in numbers))
    (folder / "ragged.csv").write_text("prompt,completion\n" + "".join(f"{n},the cat, a dog\n" for n in numbers))
    (folder / "sheet.csv").write_bytes(b"PK\x03\x04 and so on")
    (folder / "tabs.tsv").write_text("prompt\tcompletion\n0\tthe cat\n")


@pytest.mark.parametrize("case", ROWS)
def test_rows_that_can_not_be_used_are_answered(case: str, place: Path) -> None:
    argv, part = ROWS[case]
    code, printed = run_forked(place, *argv)
    assert code == 2, printed
    assert printed.count("Error: ") == 1 and part in printed and "Traceback" not in printed, printed


@pytest.mark.parametrize("case", USED)
def test_rows_that_can_be_used_are(case: str, place: Path) -> None:
    argv, part = USED[case]
    code, printed = run_forked(place, *argv)
    assert code == 0 and part in printed, printed
