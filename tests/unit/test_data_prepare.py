"""Files to sequences: bad rows, the cache, errors on several ranks, splits."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import os
import re
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import datasets
import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import pytest
import torch
from tests.helpers.one_process import Alone, one_process
from torch.distributed import HashStore

from qlora_fsdp.common.errors import DataError
from qlora_fsdp.config.data_sets import slice_rows
from qlora_fsdp.config.schema import (
    BadRows,
    Config,
    DataConfig,
    DataFormat,
    LossOn,
    ModelConfig,
    TrainingConfig,
)
from qlora_fsdp.config.specs import DataSpec
from qlora_fsdp.data import shards, tokenize_source
from qlora_fsdp.data.files import json_list, row_files
from qlora_fsdp.data.read import find_source, iterate_rows, look_for_unused
from qlora_fsdp.data.run_data import PreparedData, prepare_data
from qlora_fsdp.data.sequences import Sequences
from qlora_fsdp.data.tokenizer import load_tokenizer

TOKENIZER = load_tokenizer(ModelConfig(tokenizer_path="bytes"), DataConfig())


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., PreparedData]:
    """Prepares data in one process; keywords are settings of `data` and `training`."""

    def run(
        path: Path | str | list[str] | None, *, is_main: bool = True, vocab_size: int = 259, **settings: Any
    ) -> PreparedData:
        training_keys = {key: settings.pop(key) for key in ("max_length", "seed", "packing") if key in settings}
        path = str(path) if isinstance(path, Path) else path
        settings |= {"seed": settings.pop("data_seed")} if "data_seed" in settings else {}
        data = DataConfig(path=path, cache_folder=str(tmp_path / "cache"), **settings)
        config = Config(data=data, training=TrainingConfig(**{"max_length": 64, **training_keys}))
        return prepare_data(DataSpec.of(config), TOKENIZER, one_process(0 if is_main else 1), vocab_size)

    return run


@pytest.mark.parametrize("streaming", [False, True])
def test_a_system_prompt_that_is_empty_in_the_first_row_is_told_beside_text(
    run: Callable[..., PreparedData], tmp_path: Path, streaming: bool
):
    rows = [{"prompt": "p", "completion": "c", "system": system, "tools": []} for system in ("", "You are terse.")]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    if streaming:
        source = find_source(str(tmp_path / "rows.jsonl"), DataConfig(streaming=True))
        assert look_for_unused(source, {}) == ("system",)
    else:
        assert run(tmp_path / "rows.jsonl").report.sources[0].unused == ("system",)


@pytest.mark.parametrize("is_table", [False, True])
@pytest.mark.parametrize(
    ("row", "settings", "unused"),
    [
        ({"prompt": "p", "completion": "c", "system": "s", "id": 1}, {}, {"system", "id"}),
        ({"prompt": "p", "completion": "c", "system": ""}, {}, set()),
        ({"q": "p", "a": "c", "label": False}, {"columns": {"prompt": "q", "completion": "a"}}, {"label"}),
        ({"instruction": "i", "input": "", "output": "o", "system": "s"}, {}, {"system"}),
        ({"messages": [{"role": "user", "content": "u"}], "system": "s"}, {"loss_on": LossOn.all}, set()),
        ({"text": "t", **{f"c{n}": n for n in range(13)}}, {}, {*(f"c{n}" for n in range(12)), "..."}),
    ],
)
def test_columns_that_are_not_used_are_told(
    run: Callable[..., PreparedData],
    tmp_path: Path,
    row: dict[str, Any],
    settings: dict[str, Any],
    unused: set[str],
    is_table: bool,
):
    path = tmp_path / ("rows.parquet" if is_table else "rows.jsonl")
    if is_table:
        pq.write_table(pa.Table.from_pylist([row]), path)
    else:
        write_lines(path, row)
    settings = {"chat_template": "chatml", "max_length": 512, **settings}
    for _ in ("tokenized", "in the cache"):
        report = run(path, **settings).report.sources[0]
        assert set(report.unused) == unused and ("columns that are not used: " in str(report)) == bool(unused)


def texts(sequences: Sequences) -> list[str]:
    """The rows, as text, sorted: packing changes their order."""
    rows = [row for i in range(len(sequences)) for row in sequences.rows_of(i)]
    return sorted(TOKENIZER.decode(tokens.tolist(), skip_special_tokens=True) for tokens, _ in rows)


def write_lines(path: Path, *lines: Any) -> Path:
    path.write_bytes(b"".join((x if isinstance(x, bytes) else json.dumps(x).encode()) + b"\n" for x in lines))
    return path


BAD_LINES = [
    {"prompt": "a", "completion": "b"},
    b"{not json",
    b"",
    b'{"text": "caf\xe9"}',
    {"question": "a", "answer": "b"},
    {"text": 3},
    {"text": " "},
    {"messages": [{"role": "user", "content": "Hi"}]},
    {"messages": [{"from": "user", "value": "Hi"}]},
    ["a"],
    {"text": "x" * 100},
    {"text": "good", "messages_": None, "more": {"deep": [1, "a"]}},
]


def test_bad_rows_are_counted_with_their_lines(tmp_path, run):
    prepared = run(write_lines(tmp_path / "chats.jsonl", *BAD_LINES), bad_rows=BadRows.skip)
    [source] = prepared.report.sources
    assert (source.num_rows, source.num_used_rows) == (12, 2)
    places = {p.kind: [example.split(" ")[0] for example in p.examples] for p in source.problems}
    assert places == {
        "not JSON": ["chats.jsonl:2"],
        "empty": ["chats.jsonl:3", "chats.jsonl:7"],
        "not UTF-8": ["chats.jsonl:4"],
        "wrong keys": ["chats.jsonl:5", "chats.jsonl:10"],
        "wrong types": ["chats.jsonl:6"],
        "no target token": ["chats.jsonl:8,"],  # and 9, for the same reason
        "longer than training.max_length": ["chats.jsonl:11"],
    }
    assert texts(prepared.train) == ["ab", "good"]
    assert "keys are question, answer" in str(prepared.report)


def test_a_key_that_is_there_twice_is_refused(tmp_path, run):
    twice = b'{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "content": "c"}]}'
    prepared = run(write_lines(tmp_path / "chats.jsonl", twice, {"text": "good"}))
    assert texts(prepared.train) == ["good"]
    assert "1 row left out (wrong keys): chats.jsonl:1 (an object has 'content' twice)" in str(prepared.report)


def test_truncate_keeps_long_rows_and_says_so(tmp_path, run):
    prepared = run(write_lines(tmp_path / "a.jsonl", {"text": "x" * 100}, {"prompt": "p", "completion": "y" * 99}))
    assert texts(prepared.train) == ["p" + "y" * 62, "x" * 37, "x" * 63]
    assert "1 row cut (longer than training.max_length): a.jsonl:2 (102 tokens)" in str(prepared.report)
    split = "1 row split (longer than training.max_length; all of it is used): a.jsonl:1 (102 tokens)"
    assert split in str(prepared.report)


def test_error_policy_lists_the_rows(tmp_path, run, monkeypatch):
    path = write_lines(tmp_path / "chats.jsonl", *BAD_LINES)
    for _ in range(2):
        with pytest.raises(DataError, match=r"(?s)data\.bad_rows=error.*chats\.jsonl:4.*data\.bad_rows=skip"):
            run(path, bad_rows=BadRows.error)
        monkeypatch.setattr(tokenize_source, "read_rows", None)  # what is tokenized serves any policy
    assert texts(run(path, bad_rows=BadRows.skip).train) == ["ab", "good"]


def test_only_five_examples_of_a_kind(tmp_path, run):
    prepared = run(write_lines(tmp_path / "a.jsonl", {"text": "a"}, *[b"{"] * 3000, {"text": "b"}), num_proc=2)
    [problem] = prepared.report.sources[0].problems
    assert problem.num_rows == 3000
    examples, more = problem.examples
    assert examples.partition(" (")[0] == ", ".join(f"a.jsonl:{line}" for line in range(2, 7)) and more == "..."
    assert texts(prepared.train) == ["a", "b"]


def test_few_long_rows_are_tokenized_by_several_processes_too(tmp_path, run, monkeypatch):
    path = write_lines(tmp_path / "a.jsonl", *({"text": str(number) * 5000} for number in range(3)))
    expected, asked = texts(run(path, max_length=512).train), []
    in_workers = shards._in_workers
    monkeypatch.setattr(tokenize_source, "BYTES_A_PROCESS", 10_000)
    monkeypatch.setattr(shards, "_in_workers", lambda *args: asked.append(args[1:3]) or in_workers(*args))
    os.utime(path, ns=(0, 0))
    assert texts(run(path, max_length=512, num_proc=8).train) == expected
    assert asked == [([0, 1, 2], 3)]  # one row each


def test_no_usable_row(tmp_path, run):
    with pytest.raises(DataError, match=r"(?s)no usable row.*a\.jsonl:1"):
        run(write_lines(tmp_path / "a.jsonl", {"question": "a"}))
    with pytest.raises(DataError, match="has no rows"):
        run(write_lines(tmp_path / "empty.jsonl"))


def test_csv_lines(tmp_path, run):
    path = tmp_path / "a.csv"
    path.write_bytes(b'\xef\xbb\xbfprompt,completion\n"one\ntwo",NA\n\nx\n1,2\na,caf\xe9\na,b,c\n')
    prepared = run(path)
    assert texts(prepared.train) == ["12", "one\ntwoNA"]
    places = {p.kind: [example.split(" ")[0] for example in p.examples] for p in prepared.report.sources[0].problems}
    assert places == {"empty": ["a.csv:4"], "wrong keys": ["a.csv:5,"], "not UTF-8": ["a.csv:7"]}


def test_a_table_with_tabs(tmp_path, run):
    path = tmp_path / "a.tsv"
    path.write_text('prompt\tcompletion\none, two\t"a\ttab"\n', encoding="utf-8")
    assert texts(run(path).train) == ["one, twoa\ttab"]
    path.write_text("prompt;completion\none;two\n", encoding="utf-8")
    with pytest.raises(
        DataError, match=r"a\.tsv has ';' between its columns, not '.t'\. Save it with commas as \.csv, or"
    ):
        run(path)


@pytest.mark.parametrize("rows", ['text\nfine\n"open\nfine\n', 'text\nfine\n"it ""is"" open', '"text\nfine\n'])
def test_a_quote_that_is_not_closed(tmp_path, run, rows):
    """All that follows was one row, cut to pieces and trained on."""
    (tmp_path / "a.csv").write_text(rows)
    line = 1 if rows.startswith('"') else 3
    with pytest.raises(DataError, match=rf"a\.csv can't be read: a quote in the row of line {line} is not closed"):
        run(tmp_path / "a.csv")
    (tmp_path / "a.csv").write_text('text\n"closed\n"\nhe said "hi"\n5" wide\n"and ""so"""')
    assert sorted(texts(run(tmp_path / "a.csv").train)) == ['5" wide', 'and "so"', "closed\n", 'he said "hi"']


def test_a_json_list_that_can_not_be_read(tmp_path, run):
    (tmp_path / "a.json").write_text("[" * 100_000 + "]" * 100_000)
    with pytest.raises(DataError, match="can't be read as a JSON list: maximum recursion depth"):
        run(tmp_path / "a.json")


def test_half_characters_are_bad_rows(tmp_path, run):
    (tmp_path / "list.json").write_text('[{"text": "half \\ud83d of it"}, {"text": "caf\\u00e9"}]')
    prepared = run(tmp_path / "list.json")
    assert texts(prepared.train) == ["caf\u00e9"]
    assert [p.kind for p in prepared.report.sources[0].problems] == ["not UTF-8"]
    lines = b'{"text": "half \\ud83d of it"}', b'{"text": "both \\ud83d\\ude00"}'
    prepared = run(write_lines(tmp_path / "a.jsonl", *lines))
    assert texts(prepared.train) == ["both \U0001f600"]
    [problem] = prepared.report.sources[0].problems
    assert (problem.kind, problem.examples) == (
        "not UTF-8",
        ('a.jsonl:1 ("\\ud83d" is half of a character, without its other half)',),
    )


def test_parquet_text_that_is_not_marked_as_text(tmp_path, run):
    """Some writers mark no column as UTF-8; its repr, b'...', was trained on."""
    column = pa.array([b"caf\xc3\xa9", b"caf\xe9"], pa.binary())
    pq.write_table(pa.table({"text": column}), tmp_path / "a.parquet")
    prepared = run(tmp_path / "a.parquet")
    assert texts(prepared.train) == ["caf\xe9"]
    assert [(p.kind, p.num_rows) for p in prepared.report.sources[0].problems] == [("not UTF-8", 1)]


@pytest.mark.parametrize("mark", [";", "\t", "|"])
def test_csv_without_commas(tmp_path, run, mark: str):
    (tmp_path / "a.csv").write_text(f"prompt{mark}completion\na{mark}b, c\n")
    with pytest.raises(DataError, match=r"a\.csv has '.*' between its columns, not ','\. Save it with commas"):
        run(tmp_path / "a.csv")


def test_csv_with_two_columns_of_one_name(tmp_path, run):
    (tmp_path / "a.csv").write_text("text,text\na,b\n")
    with pytest.raises(DataError, match="two columns text"):
        run(tmp_path / "a.csv")


def test_every_kind_of_file_gives_the_same_rows(tmp_path, run):
    rows = [{"prompt": f"p{i}", "completion": f"c{i}"} for i in range(20)]
    files = {name: tmp_path / name for name in ("a.jsonl", "list.json", "lines.json", "a.parquet", "a.csv")}
    write_lines(files["a.jsonl"], *rows)
    write_lines(files["lines.json"], *rows)
    files["list.json"].write_text(json.dumps(rows, indent=2))
    pq.write_table(pa.Table.from_pylist(rows), files["a.parquet"])
    files["a.csv"].write_text("prompt,completion\n" + "".join(f"{r['prompt']},{r['completion']}\n" for r in rows))
    expected = sorted(f"p{i}c{i}" for i in range(20))
    for path in files.values():
        assert texts(run(path).train) == expected, path


COMPRESS = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress, ".zst": pa.Codec("zstd").compress}


@pytest.mark.parametrize("suffix", COMPRESS)
def test_compressed_files_give_the_same_rows(tmp_path, run, suffix):
    def compress(text: str) -> bytes:
        packed = COMPRESS[suffix](text.encode())
        return packed if isinstance(packed, bytes) else packed.to_pybytes()

    rows = [{"prompt": f"p{i}", "completion": f"c{i}\u2028é"} for i in range(2000)]
    halves = ["".join(json.dumps(row, ensure_ascii=False) + "\n" for row in part) for part in (rows[:900], rows[900:])]
    files = {name: tmp_path / f"{name}{suffix}" for name in ("a.jsonl", "b.json", "c.json", "d.csv", "cut.jsonl")}
    files["a.jsonl"].write_bytes(b"".join(map(compress, halves)))  # two compressed streams, one after another
    files["b.json"].write_bytes(compress("".join(halves)))
    files["c.json"].write_bytes(compress(json.dumps(rows)))
    lines = "".join(f"{row['prompt']},{row['completion']}\n" for row in rows)
    files["d.csv"].write_bytes(compress(f"prompt,completion\n{lines}"))
    files["cut.jsonl"].write_bytes(compress("".join(halves))[:-40])
    expected = sorted(f"{row['prompt']}{row['completion']}" for row in rows)
    for name in ("a.jsonl", "b.json", "c.json", "d.csv"):
        assert texts(run(files[name]).train) == expected, name
    with pytest.raises(DataError, match=rf"cut\.jsonl\{suffix} can't be read"):
        run(files["cut.jsonl"])
    (tmp_path / f"a.parquet{suffix}").touch()
    with pytest.raises(DataError, match=r"no known kind.*\.tsv also as .*\.gz"):
        run(tmp_path / f"a.parquet{suffix}")


def test_each_file_of_a_folder_that_is_not_used_is_named(tmp_path, run):
    folder = tmp_path / "rows"
    (folder / "part").mkdir(parents=True)
    write_lines(folder / "a.jsonl", {"text": "a"})
    (folder / "part" / "b.jsonl.gz").write_bytes(gzip.compress(b'{"text": "b"}\n'))
    assert texts(run(folder).train) == ["a", "b"]
    assert len(str(run(folder).report).splitlines()) == 2
    for name in ("README.md", "part/c.log", ".d.jsonl", "e.txt.gz"):
        (folder / name).write_text("no row")
    (folder / "f.jsonl").touch()
    (folder / os.fsdecode(b"m\xe4.jsonl")).write_text('{"text": "m"}\n')
    (folder / "other").symlink_to(tmp_path)
    (folder / "gone.jsonl").symlink_to(tmp_path / "gone")
    for _ in range(2):  # from the cache too
        lines = str(run(folder).report).splitlines()
        assert lines[1:-1] == [
            "  1 file left out (names that begin with a dot): .d.jsonl",
            "  2 files left out (of no known kind): e.txt.gz, part/c.log",
            "  1 file left out (empty): f.jsonl",
            "  1 file left out (neither files nor folders): gone.jsonl",
            "  1 file left out (names that are no UTF-8): m?.jsonl",
            "  1 file left out (links to folders, which are not followed): other",
            "  1 file left out (text beside files of rows): README.md",
        ]
    for number in range(30):
        (folder / f"{number:02}.log").touch()
    assert ", 19.log and 12 more" in str(run(folder).report)


def test_blank_lines_at_the_end_are_no_rows(tmp_path, run):
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "a"}\n\n{"text": "b"}\n\n  \r\n\n')
    (tmp_path / "a.csv").write_text("text\na\n\nb\n\n\n")
    for name in ("a.jsonl", "a.csv"):
        source = run(tmp_path / name).report.sources[0]
        first_blank = f"{name}:{2 if name == 'a.jsonl' else 3}"
        assert (source.num_rows, [p.examples for p in source.problems]) == (3, [(first_blank,)])
    (tmp_path / "b.jsonl").write_bytes(b'{"text": "a"}\n\n\n')
    assert texts(run(tmp_path / "b.jsonl", bad_rows=BadRows.error).train) == ["a"]


def test_folders(tmp_path, run):
    book = tmp_path / "book"
    (book / "part").mkdir(parents=True)
    (book / "part" / "a.txt").write_text("a" * 50)
    (book / "b.md").write_text("b")
    (book / "c.log").write_text("no")
    assert texts(run(book).train) == ["a" * 50, "b"]
    write_lines(book / "rows.jsonl", {"text": "row"})  # now the text files are taken for notes on the data
    assert texts(run(book).train) == ["row"]
    (book / ".ipynb_checkpoints").mkdir()
    write_lines(book / ".ipynb_checkpoints" / "rows-checkpoint.jsonl", {"text": "row"})
    write_lines(book / "._rows.jsonl", {"text": "macOS"})
    assert texts(run(book).train) == ["row"]


def test_a_folder_whose_files_are_of_several_splits_is_told(tmp_path, run):
    """As one that was downloaded from the hub, where the name of the data set would have given one of them."""
    folder = tmp_path / "rows"
    (folder / "data").mkdir(parents=True)
    for name in ("train-00000-of-00002", "train-00001-of-00002", "test-00000-of-00001"):
        write_lines(folder / "data" / f"{name}.jsonl", {"text": name})
    (told,) = run(folder).report.sources[0].skipped
    assert told.startswith("files of the splits test and train are all read")
    assert f"'{folder}/**/train*' names those of one" in told
    (source,) = run(f"{folder}/**/train*").report.sources
    assert (source.num_rows, source.skipped) == (2, ())


def test_parquet_messages_with_missing_fields(tmp_path, run):
    chats = [[{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yo", "name": "bot"}]] * 2
    chats[1] = [{"role": "user", "content": "Ho"}, *chats[0][1:]]
    pq.write_table(pa.Table.from_pylist([{"messages": chat} for chat in chats]), tmp_path / "a.parquet")
    prepared = run(tmp_path / "a.parquet", max_length=128)
    assert prepared.report.num_target_tokens == 2 * len([*b"Yo<|im_end|>", "<eos>"])


def test_missing_paths(tmp_path, run):
    with pytest.raises(DataError, match=r"data\.path is not set"):
        run(None)
    with pytest.raises(DataError, match="does not exist"):
        run(tmp_path / "missing.jsonl")
    (tmp_path / "a.xlsx").touch()
    with pytest.raises(DataError, match=r"data\.path=.*no known kind.*\.jsonl"):
        run(tmp_path / "a.xlsx")
    rows, empty = write_lines(tmp_path / "rows.jsonl", {"text": "a"}), write_lines(tmp_path / "empty.jsonl")
    with pytest.raises(DataError, match=r"data\.eval_path=.*no known kind"):
        run(rows, eval_path=str(tmp_path / "a.xlsx"))
    with pytest.raises(DataError, match=r"set data\.eval_path"):
        run(rows, eval_path=str(empty))
    with pytest.raises(DataError, match=r"data\.mix=.*no known kind"):
        run(None, mix={str(tmp_path / "a.xlsx"): 1.0})
    with pytest.raises(DataError, match="neither a file nor a folder"):
        run(Path("/dev/null"))
    (tmp_path / "void").mkdir()
    with pytest.raises(DataError, match="folder with no file"):
        run(tmp_path / "void")
    (tmp_path / "cut.json").write_text('[{"text": "a"}, ')
    with pytest.raises(DataError, match=r"cut\.json can't be read"):
        run(tmp_path / "cut.json")
    (tmp_path / "cut.parquet").write_bytes(b"PAR1")
    with pytest.raises(DataError, match=r"cut\.parquet can't be read"):
        run(tmp_path / "cut.parquet")
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match=r"data\.cache_folder"):
        write = write_lines(tmp_path / "a.jsonl", {"text": "a"})
        config = Config(data=DataConfig(path=str(write), cache_folder=str(tmp_path / "file" / "cache")))
        prepare_data(DataSpec.of(config), TOKENIZER, one_process(), 259)


def test_tokens_beyond_the_vocabulary(tmp_path, run):
    path = write_lines(tmp_path / "a.jsonl", {"text": "a"})
    with pytest.raises(DataError, match=r"token 257, but the model has only 257.*model\.tokenizer_path"):
        run(path, vocab_size=257)


def test_cache_is_used_until_something_that_matters_changes(tmp_path, run, monkeypatch):
    path = write_lines(tmp_path / "a.jsonl", *({"text": f"row {i}"} for i in range(10)), b"{")
    first = run(path)
    calls = []
    read_rows = tokenize_source.read_rows
    monkeypatch.setattr(tokenize_source, "read_rows", lambda *args: calls.append(args) or read_rows(*args))
    again = run(path, seed=1)
    assert not calls
    assert again.report.sources == first.report.sources
    assert texts(again.train) == texts(first.train)
    assert (
        run(path, max_length=4).report.sources[0].num_used_rows == 20
    )  # rows are kept whole, and cut when they are loaded
    assert not calls
    run(path, max_length=2**17 + 1)  # beyond what is kept of any row
    assert len(calls) == 1
    os.utime(path, ns=(0, 0))
    run(path)
    assert len(calls) == 2


@pytest.mark.parametrize("damage", ["short", "no report", "broken report"])
def test_a_damaged_cache_is_made_again(tmp_path, run, damage):
    path = write_lines(tmp_path / "a.jsonl", {"text": "abc"}, {"text": "def"})
    run(path)
    [entry] = [entry for entry in (tmp_path / "cache").iterdir() if entry.is_dir()]
    if damage == "short":
        (entry / "tokens.bin").write_bytes((entry / "tokens.bin").read_bytes()[:-1])
    elif damage == "no report":
        (entry / "report.json").unlink()
    else:
        (entry / "report.json").write_text("{")
    assert texts(run(path).train) == ["abc", "def"]
    assert [e for e in (tmp_path / "cache").iterdir() if e.is_dir()] == [entry]  # and nothing temporary is left


def test_all_ranks_raise_the_error_of_one(tmp_path):
    """Three ranks, two of them main (two nodes); the second node does not see the file."""
    good = write_lines(tmp_path / "a.jsonl", {"text": "abc"})
    barrier, slots, raised = threading.Barrier(3), [None] * 3, [None] * 3

    def work(rank: int) -> None:
        class Rank(Alone):
            def gather(self, value: Any, kind: Any, patiently: bool = False) -> list[Any]:
                slots[rank] = value
                barrier.wait(timeout=60)
                return list(slots)

        path = good if rank < 2 else tmp_path / "gone.jsonl"
        config = Config(data=DataConfig(path=str(path), cache_folder=str(tmp_path / f"node{rank // 2}")))
        try:
            processes = Rank(rank, 3, rank % 2, 2, torch.device("cpu"), HashStore())
            prepare_data(DataSpec.of(config), TOKENIZER, processes, 259)
        except DataError as error:
            raised[rank] = str(error)

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert raised[0] is not None and "gone.jsonl does not exist" in raised[0]
    assert raised[0] == raised[1] == raised[2]


def test_other_ranks_read_what_the_main_rank_wrote(tmp_path, run):
    path = write_lines(tmp_path / "a.jsonl", {"text": "abc"})
    with pytest.raises(DataError, match=r"data\.cache_folder"):
        run(path, is_main=False)
    run(path)
    assert texts(run(path, is_main=False).train) == ["abc"]


def test_held_out_rows(tmp_path, run):
    rows = [f"row {i}" for i in range(50)]
    path = write_lines(tmp_path / "a.jsonl", *({"text": row} for row in rows))
    prepared = run(path, eval_fraction=0.1)
    held_out = texts(prepared.eval)
    assert len(held_out) == 5
    assert sorted(held_out + texts(prepared.train)) == sorted(rows)
    assert texts(run(path, eval_fraction=0.1, packing=False).eval) == held_out
    assert texts(run(path, eval_fraction=0.1, seed=1).eval) != held_out
    assert len(texts(run(path, eval_fraction=0.001).eval)) == 1
    with pytest.raises(DataError, match=r"data\.eval_fraction"):
        run(write_lines(tmp_path / "b.jsonl", {"text": "one"}), eval_fraction=0.1)
    separate = run(path, eval_path=str(write_lines(tmp_path / "c.jsonl", {"text": "c"})), max_rows=7, eval_fraction=0.5)
    assert texts(separate.eval) == ["c"]
    assert len(texts(separate.train)) == 7


def test_all_pieces_of_a_text_are_held_out_or_none(tmp_path, run):
    def write(name: str, first: str, num_texts: int) -> Path:
        return write_lines(tmp_path / name, *({"text": chr(ord(first) + n) * 100} for n in range(num_texts)))

    small, large = write("small.jsonl", "a", 20), write("large.jsonl", "A", 20)
    cut = {"max_length": 16, "deduplicate": False}
    for data, num_texts in (({}, 20), ({"mix": {str(small): 1, str(large): 1}}, 40)):
        prepared = run(None if data else small, eval_fraction=0.1, **cut, **data)
        held_out, train = texts(prepared.eval), texts(prepared.train)
        assert (len(held_out), len(train)) == (7 * num_texts // 10, 7 * num_texts * 9 // 10)
        assert not {text[0] for text in held_out} & {text[0] for text in train}
    assert len(texts(run(small, eval_fraction=0.01, **cut).eval)) == 7
    with pytest.raises(DataError, match=r"of 7 usable rows, all of one row of the data, leaves none to train on"):
        run(write("one.jsonl", "a", 1), eval_fraction=0.1, **cut)


def test_max_rows_is_a_seeded_choice(tmp_path, run):
    path = write_lines(tmp_path / "a.jsonl", *({"text": f"row {i}"} for i in range(50)))
    chosen = texts(run(path, max_rows=10).train)
    assert len(set(chosen)) == 10
    assert texts(run(path, max_rows=10).train) == chosen
    assert texts(run(path, max_rows=10, seed=1).train) != chosen


def test_random_rows(run):
    prepared = run(None, format=DataFormat.random, max_rows=10, vocab_size=50, eval_fraction=0.2)
    assert (len(prepared.train), len(prepared.eval)) == (8, 2)
    assert prepared.report.num_target_tokens == 8 * 63
    [(tokens, is_target)] = prepared.train.rows_of(3)
    assert tokens.max() < 50 and len(np.unique(tokens)) > 20 and is_target.sum() == 63
    np.testing.assert_array_equal(tokens, prepared.train.rows_of(3)[0][0])
    assert not np.array_equal(tokens, prepared.train.rows_of(4)[0][0])


def test_a_mix_has_every_row_and_the_shares_of_its_weights(tmp_path, run):
    few = write_lines(tmp_path / "few.jsonl", *({"text": f"few {n}"} for n in range(7)))
    many = write_lines(tmp_path / "many.jsonl", *({"text": f"many {n}"} for n in range(40)))
    prepared = run(None, mix={str(few): 1, str(many): 3}, max_length=16)
    counts = Counter(texts(prepared.train))
    times = [counts[f"few {n}"] for n in range(7)]
    assert [counts[f"many {n}"] for n in range(40)] == [1] * 40  # the largest for its weight is seen once
    assert sum(times) == 13 and set(times) == {1, 2}  # a quarter of 53
    first, second = prepared.report.mix
    assert (first.num_rows, first.num_used_rows, second.num_used_rows) == (7, 13, 40)
    assert first.row_share == 13 / 53 and first.token_share + second.token_share == pytest.approx(1)
    assert f"mix: {few}: 7 rows 1.86 times, 24.5% of the rows" in str(prepared.report)
    assert texts(run(None, mix={str(few): 1, str(many): 3}, max_length=16).train) == texts(prepared.train)


def test_what_a_mix_holds_out_is_not_repeated(tmp_path, run):
    few = write_lines(tmp_path / "few.jsonl", *({"text": f"few {n}"} for n in range(10)))
    many = write_lines(tmp_path / "many.jsonl", *({"text": f"many {n}"} for n in range(40)))
    prepared = run(None, mix={str(few): 2, str(many): 1}, eval_fraction=0.2, packing=False)
    train, held_out = texts(prepared.train), texts(prepared.eval)
    assert len(held_out) == 10 and sum(text.startswith("few") for text in held_out) == 2
    assert not set(train) & set(held_out) and len(set(train)) == 40
    assert len(train) == 32 + 64


def test_columns_have_the_names_that_the_data_gives_them(tmp_path, run):
    rows = [{"question": f"q{n}", "answer": f"a{n}", "output": 7} for n in range(3)]
    path = write_lines(tmp_path / "a.jsonl", *rows)
    columns = {"prompt": "question", "completion": "answer"}
    with pytest.raises(DataError) as caught:
        run(path)
    message = str(caught.value)
    assert message.count("keys are") == 1 and "a.jsonl:1, a.jsonl:2, a.jsonl:3 (keys are question, answer" in message
    assert "set data.columns={prompt: question, completion: answer}" in message and len(message) < 400
    assert texts(run(path, columns=columns).train) == ["q0a0", "q1a1", "q2a2"]
    assert texts(run(path, columns={"text": "answer"}).train) == ["a0", "a1", "a2"]  # another entry of the cache
    with pytest.raises(
        DataError, match=r"no reply, which data\.columns names for completion; keys are question, answer"
    ):
        run(path, columns={"prompt": "question", "completion": "reply"})
    dolly = write_lines(tmp_path / "d.jsonl", {"instruction": "i", "context": "c", "response": "r"})
    with pytest.raises(DataError, match=r"set data\.columns=\{input: context, output: response\}"):
        run(dolly)  # a prompt alone would leave the context out
    other = write_lines(tmp_path / "b.jsonl", {"a": 1, "b": 2})
    with pytest.raises(DataError, match=r"keys are a, b, and not messages; .*data\.columns=\{prompt: NAME"):
        run(other)


CHAT = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yo"}]
TURNS = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Yo"}]


def test_conversations_by_any_name_are_the_same(tmp_path, run):
    spoken = [{"by": turn["from"], "said": turn["value"]} for turn in TURNS]
    same: list[tuple[dict[str, Any], dict[str, str]]] = [
        ({"messages": CHAT}, {}),
        ({"conversations": TURNS}, {}),
        ({"messages": TURNS}, {}),
        ({"conversations": TURNS}, {"messages": "conversations", "role": "from", "content": "value"}),
        ({"dialog": spoken}, {"messages": "dialog", "role": "by", "content": "said"}),
        ({"conversations": spoken}, {"role": "by", "content": "said"}),
    ]
    found: list[Any] = []
    for number, (row, columns) in enumerate(same):
        train = run(write_lines(tmp_path / f"{number}.jsonl", row), columns=columns, max_length=128).train
        [(tokens, is_target)] = train.rows_of(0)
        found.append((tokens.tolist(), is_target.tolist()))
        assert found[-1] == found[0], (row, columns)
    with pytest.raises(DataError, match=r"message 1 has no role \(keys: by, said; data\.columns=\{role: NAME"):
        run(write_lines(tmp_path / "c.jsonl", {"messages": spoken}))
    with pytest.raises(DataError, match=r"set data\.columns=\{messages: dialog, role: by, content: said\}"):
        run(write_lines(tmp_path / "d.jsonl", {"dialog": spoken}))


def test_of_tables_only_the_columns_that_rows_need_are_read(tmp_path, run, monkeypatch):
    rows = [{"question": f"q{n}", "answer": f"a{n}", **{f"extra{k}": k for k in range(5)}} for n in range(2500)]
    table = pa.Table.from_pylist(rows)
    pq.write_table(table, tmp_path / "a.parquet")
    datasets.Dataset(table).save_to_disk(str(tmp_path / "saved"), num_shards=2)
    datasets.DatasetDict({"train": datasets.Dataset(table)}).save_to_disk(str(tmp_path / "splits"))
    pa.feather.write_feather(table, str(tmp_path / "feather.arrow"))
    (tmp_path / "saved" / "cache-1.arrow").write_bytes(b"what map left there")
    dumped: list[dict[str, Any]] = []
    dump_row = row_files.dump_row
    monkeypatch.setattr(row_files, "dump_row", lambda row: dumped.append(row) or dump_row(row))
    columns = {"prompt": "question", "completion": "answer"}
    for name in ("a.parquet", "saved", "splits", "feather.arrow"):
        dumped.clear()
        assert len(texts(run(tmp_path / name, columns=columns).train)) == 2500
        assert dumped[0] == {"question": "q0", "answer": "a0"} and dumped[-100]["answer"] == "a2400"
        with pytest.raises(DataError, match="keys are question, answer, extra0"):  # for the message all are read
            run(tmp_path / name)
    with pytest.raises(DataError, match=r"has no split test: it has train\. Set data\.split"):
        run(tmp_path / "splits", columns=columns, split="test")


def test_objects_of_tables_have_the_fields_of_their_own_row(tmp_path):
    """Arrow gives each call of a tool the arguments of all calls, null where it has none."""
    rows = [
        {"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "tool_calls": [{"name": n, "args": a}]}]}
        for n, a in (("f", {"x": 1}), ("g", {"city": "Rome"}))
    ]
    table = pa.Table.from_pylist([{**row, "tools": None} for row in rows])
    pq.write_table(table, tmp_path / "a.parquet")
    pa.feather.write_feather(table, str(tmp_path / "a.arrow"))
    datasets.Dataset(table).save_to_disk(str(tmp_path / "saved"))
    for name in ("a.parquet", "a.arrow", "saved"):
        source = find_source(str(tmp_path / name), DataConfig())
        assert [json.loads(row) for _, row in iterate_rows(source)] == [{**row, "tools": None} for row in rows]
    hub = replace(source, files=(), hub=datasets.load_from_disk(str(tmp_path / "saved")))
    assert [json.loads(row)["messages"] for _, row in iterate_rows(hub)] == [row["messages"] for row in rows]


PICTURE = {"bytes": b"that no library can decode", "path": None}


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet", "a.arrow", "hub", "streamed from the hub"])
@pytest.mark.parametrize(
    ("key", "values"),
    [
        *(("images", [["a.png"], [], None]), ("image", ["a.png", "", None]), ("images", [[PICTURE], [], None])),
        ("image", [True, False, None]),
    ],
)
def test_rows_with_images_are_left_out_of_tables_too(
    tmp_path: Path, run: Callable[..., PreparedData], monkeypatch: pytest.MonkeyPatch, name: str, key: str, values: Any
):
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]
    rows = [{"messages": messages, key: value} for value in values]
    table = pa.Table.from_pylist(rows)
    if name == "a.jsonl":
        write_lines(tmp_path / name, *json.loads(json.dumps(rows, default=str)))
    elif name == "a.parquet":
        pq.write_table(table, tmp_path / name)
    elif name == "a.arrow":
        pa.feather.write_feather(table, str(tmp_path / name))
    hub = datasets.Dataset(table)
    if values[0] == [PICTURE]:
        hub = hub.cast_column(key, datasets.List(datasets.Image()))
    hub = hub.to_iterable_dataset() if name.startswith("streamed") else hub
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: hub)
    path = tmp_path / name if name.startswith("a.") else "org/name"
    report = run(path, chat_template="chatml", max_length=128, deduplicate=False).report.sources[0]
    assert report.num_used_rows == 2 and report.unused == ()
    [problem] = report.problems
    assert f"the row has {key}, and training is on text alone" in str(problem)


def test_an_object_of_nulls_is_no_image():
    table = pa.table({"image": pa.array([{"bytes": None, "path": None}, PICTURE, None])})
    assert [json.loads(row)["image"] for row in row_files.dump_table(table)] == [False, True, False]


def test_patterns_and_lists_of_paths(tmp_path, run, monkeypatch):
    (tmp_path / "part").mkdir()
    for name in ("a.jsonl", "b.jsonl", "part/c.jsonl", "part/d[1].jsonl"):
        write_lines(tmp_path / name, {"text": name})
    (tmp_path / "part" / "e.log").touch()
    monkeypatch.chdir(tmp_path)
    assert texts(run("*.jsonl").train) == ["a.jsonl", "b.jsonl"]
    assert texts(run("[ab].jsonl", eval_path="part/*").eval) == ["part/c.jsonl", "part/d[1].jsonl"]
    assert texts(run("part/d[1].jsonl").train) == ["part/d[1].jsonl"]
    assert texts(run(tmp_path / "**" / "*.jsonl").train) == ["a.jsonl", "b.jsonl", "part/c.jsonl", "part/d[1].jsonl"]
    assert "1 file left out (of no known kind): e.log" in str(run("part/*").report)
    several = run(["b.jsonl", "part", "?.jsonl"], eval_path=["a.jsonl"])
    assert texts(several.train) == ["a.jsonl", "b.jsonl", "part/c.jsonl", "part/d[1].jsonl"]  # each file once
    assert texts(several.eval) == ["a.jsonl"] and "b.jsonl, part, ?.jsonl: 4 rows read" in str(several.report)
    assert texts(run(None, mix={"[ab].jsonl": 1.0, "part/c*": 2.0}).train).count("part/c.jsonl") == 4
    with pytest.raises(DataError, match=r"data\.path=\*\.log matches no file of \.jsonl"):
        (tmp_path / "x.log").touch()
        run("*.log")
    with pytest.raises(DataError, match=r"data\.path=\[a\.jsonl,gone\.jsonl\] names gone\.jsonl, which does not exist"):
        run(["a.jsonl", "gone.jsonl"])


def test_a_json_list_is_read_in_pieces(tmp_path, monkeypatch):
    """Wherever a block ends: the rows, and the message for a damaged list, are those of the whole."""
    rows = [
        {"text": 'é"[]{},\\ \U0001f600', "more": [1.5e10, -3, True, None, {"a": []}]},
        {},
        [1],
        "x",
        12345,
        None,
        -0.5,
    ]
    whole = json.dumps(rows, indent=1, ensure_ascii=False).encode()
    damaged = [
        whole[:-1],
        whole + b" x",
        whole.replace(b"null", b"nul", 1),
        whole.replace(b"},\n", b"}\n", 1),
        whole[:26],
    ]
    for block in (1, 2, 3, 7, 64, 2**20):
        monkeypatch.setattr(json_list, "BLOCK_BYTES", block)
        for data in (whole, b"\xef\xbb\xbf" + json.dumps(rows).encode(), b" [ ] \n"):
            found = [json.loads(row) for row in json_list.read_list(io.BytesIO(data))]
            assert found == json.loads(data.decode("utf-8-sig"))
        for data in damaged:
            with pytest.raises(ValueError) as expected:
                json.loads(data)
            with pytest.raises(json_list.NotAList, match=re.escape(str(expected.value))):
                list(json_list.read_list(io.BytesIO(data)))
        with pytest.raises(json_list.NotAList, match="byte 9 of the file is 0xe9, not UTF-8"):
            list(json_list.read_list(io.BytesIO(b'["abcdef\xe9"]')))


def test_files_at_urls(tmp_path, run):
    memory = fsspec.filesystem("memory")
    memory.pipe("/bucket/a.jsonl", b'{"text": "a"}\n')
    memory.pipe("/bucket/part/b.jsonl.gz", gzip.compress(b'{"text": "b"}\n'))
    memory.pipe("/bucket/list.json", b'[{"text": "c"}]')
    memory.pipe("/bucket/notes.docx", b"no row")
    sink = io.BytesIO()
    pq.write_table(pa.table({"text": ["d"], "more": [1]}), sink)
    memory.pipe("/bucket/d.parquet", sink.getvalue())
    try:
        assert texts(run("memory://bucket/a.jsonl").train) == ["a"]
        whole = run("memory://bucket")
        assert texts(whole.train) == ["a", "b", "c", "d"] and "1 file left out (of no known kind): notes.docx" in str(
            whole.report
        )
        assert texts(run(["memory://bucket/*.json*", "memory://bucket/part/*.gz"]).train) == ["a", "b", "c"]
        memory.pipe("/bucket/a.jsonl", b'{"text": "A"}\n')  # of the same size
        assert texts(run("memory://bucket/a.jsonl").train) == ["A"]
        memory.pipe("/bucket/cut.jsonl.gz", gzip.compress(b'{"text": "b"}\n' * 99)[:-20])
        with pytest.raises(DataError, match=r"memory:///bucket/cut\.jsonl\.gz can't be read"):
            run("memory://bucket/cut.jsonl.gz")
        with pytest.raises(DataError, match="memory://bucket/none does not exist"):
            run("memory://bucket/none")
        with pytest.raises(DataError, match=r"nothing://a can't be read: .*Protocol not known"):
            run("nothing://a")
    finally:
        memory.rm("/bucket", recursive=True)


def test_rows_that_attention_can_learn_nothing_from_are_refused(tmp_path, run):
    """Training ended with gradients of zeros."""
    path = write_lines(tmp_path / "a.jsonl", {"text": "ab"}, {"prompt": "", "completion": "c"})
    for packing in (True, False):
        with pytest.raises(DataError, match=r"a\.jsonl: the only target of every row is its second token"):
            run(path, max_length=2, packing=packing)
    assert run(path, max_length=3).report.num_target_tokens == 2 + 2
    assert run(write_lines(tmp_path / "b.jsonl", {"prompt": "ab", "completion": "c"}), max_length=4).train


def test_files_on_the_web(tmp_path, run):
    write_lines(tmp_path / "a.jsonl", {"text": "a"})
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(b'{"text": "b"}\n'))
    handler = partial(SimpleHTTPRequestHandler, directory=str(tmp_path))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        place = f"http://127.0.0.1:{server.server_port}"
        assert texts(run([f"{place}/a.jsonl?raw=1", f"{place}/b.jsonl.gz"]).train) == ["a", "b"]
        write_lines(tmp_path / "a.jsonl", {"text": "A"})
        os.utime(tmp_path / "a.jsonl", (0, 0))
        assert texts(run(f"{place}/a.jsonl").train) == ["A"]
        with pytest.raises(DataError, match=r"none\.jsonl can't be read: FileNotFoundError: .*Check the URL"):
            run(f"{place}/none.jsonl")
        server.shutdown()
    with pytest.raises(DataError, match=r"a\.jsonl can't be read: .*Check the URL"):
        run(f"{place}/a.jsonl")


def test_a_mix_until_the_shortest_repeats_no_row(tmp_path, run):
    few = write_lines(tmp_path / "few.jsonl", *({"text": f"few {i}"} for i in range(10)))
    many = write_lines(tmp_path / "many.jsonl", *({"text": f"many {i}"} for i in range(40)))
    mix = {str(few): 2, str(many): 1}
    prepared = run(None, mix=mix, mix_until="shortest")
    found = texts(prepared.train)
    assert [sum(text.startswith(name) for text in found) for name in ("few", "many")] == [10, 5]
    assert len(set(found)) == 15
    first, second = prepared.report.mix
    assert f"mix: {few}: 10 rows once, 66.7% of the rows" in str(first)
    assert f"mix: {many}: 5 of 40 rows once, 33.3% of the rows" in str(second)
    assert texts(run(None, mix=mix, mix_until="shortest").train) == found
    assert texts(run(None, mix=mix, mix_until="shortest", seed=1).train) != found


def test_data_sets_of_a_mix_may_have_a_template_and_a_form_of_their_own(tmp_path, run):
    row = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}], "text": "t"}
    chats, texts_, plain = (write_lines(tmp_path / f"{name}.jsonl", row) for name in ("chats", "texts", "plain"))
    (tmp_path / "own.jinja").write_text("{% for m in messages %}{{ m.role[0] + ':' + m.content + ';' }}{% endfor %}")
    own = {"format": "messages", "chat_template": str(tmp_path / "own.jinja")}
    mix = {str(chats): own, str(texts_): {"format": "text"}, str(plain): {"format": "messages"}}
    found = texts(run(None, mix=mix, max_length=256, chat_template="alpaca", deduplicate=False).train)
    assert len(found) == 3 and {"u:q;a:a;", "t"} < set(found) and any("### Instruction" in text for text in found)


def test_a_mix_of_so_many_tokens_repeats_some_rows_and_leaves_others_out(tmp_path, run):
    short = write_lines(tmp_path / "short.jsonl", *({"text": f"{i:08}"} for i in range(100)))  # 10 tokens a row
    long = write_lines(tmp_path / "long.jsonl", *({"text": f"{i:048}"} for i in range(20)))  # 50
    prepared = run(None, mix={str(short): 1, str(long): 1}, mix_until=3000)
    assert prepared.report.num_tokens == 3000
    assert [part.num_used_rows for part in prepared.report.mix] == [50, 50]
    assert [part.num_rows for part in prepared.report.mix] == [100, 20]


def test_data_sets_of_a_mix_have_settings_of_their_own(tmp_path, run):
    chats = write_lines(tmp_path / "chats.jsonl", *({"q": f"q{i}", "a": f"a{i}"} for i in range(30)))
    talks = [
        {"messages": [{"role": "user", "content": f"u{i}"}, {"role": "assistant", "content": "x"}]} for i in (1, 2)
    ]
    talks[1]["messages"].insert(0, {"role": "system", "content": "own"})
    talk = write_lines(tmp_path / "talk.jsonl", *talks)
    own = {"weight": 5, "split": "[10%:-7]", "columns": {"prompt": "q", "completion": "a"}, "max_rows": 10}
    mix = {str(chats): own, str(talk): {"system_prompt": "Be kind."}}
    prepared = run(None, mix=mix, max_length=256)
    found = texts(prepared.train)
    assert [part.num_rows for part in prepared.report.mix] == [10, 2]
    assert {int(text[1:].split("a")[0]) for text in found if text.startswith("q")} <= set(range(3, 23))
    assert sum("Be kind." in text for text in found) == sum("own" in text for text in found) == 1


@pytest.mark.parametrize(
    ("split", "expected"),
    [("train[:3]", "012"), ("[8:]", "89"), ("train[-2:]", "89"), ("[20%:50%]", "234"), ("train", "0123456789")],
)
def test_a_slice_takes_these_rows_of_files(split: str, expected: str, tmp_path, run):
    path = write_lines(tmp_path / "rows.jsonl", *({"text": str(i)} for i in range(10)))
    assert "".join(texts(run(path, split=split).train)) == expected
    rows = [{"text": str(i)} for i in range(10)]
    assert [row["text"] for row in np.array(rows)[list(slice_rows(split, 10))]] == list(expected)


def test_one_file_may_be_trained_on_and_held_out_by_slices(tmp_path, run):
    path = write_lines(tmp_path / "rows.jsonl", *({"text": str(i)} for i in range(10)))
    prepared = run(path, split="[:8]", eval_path=str(path), eval_split="[8:]", max_rows=4)
    assert set(texts(prepared.train)) < set("01234567")
    assert texts(prepared.eval) == ["8", "9"]


@pytest.mark.parametrize(
    ("weights", "until", "fix"),
    [((1, 1e-9), "longest", "data.mix_until=shortest"), ((1, 1), 10**13, "a smaller data.mix_until")],
)
def test_an_epoch_of_a_mix_that_no_memory_holds_is_refused(tmp_path, run, weights, until, fix):
    paths = [write_lines(tmp_path / f"{name}.jsonl", {"text": name}, {"text": 2 * name}) for name in "ab"]
    mix = {str(path): weight for path, weight in zip(paths, weights, strict=True)}
    told = rf"gives an epoch [0-9,]+ rows, .*\.jsonl [0-9,]+ times, .* or {re.escape(fix)}\."
    with pytest.raises(DataError, match=told):
        run(None, mix=mix, mix_until=until)


def test_the_name_of_a_split_is_not_asked_of_other_files(tmp_path, run):
    path = write_lines(tmp_path / "rows.jsonl", *({"text": str(i)} for i in range(4)))
    splits = {"train": [{"text": "a"}], "extra": [{"text": "b"}]}
    by_name = {name: datasets.Dataset.from_list(rows) for name, rows in splits.items()}
    datasets.DatasetDict(by_name).save_to_disk(str(tmp_path / "saved"))
    prepared = run(tmp_path / "saved", split="extra", eval_path=str(path))  # the name is that of data.path's split
    assert (texts(prepared.train), len(texts(prepared.eval))) == (["b"], 4)


def test_data_seed_chooses_rows_whatever_the_seed_of_training(tmp_path, run):
    path = write_lines(tmp_path / "rows.jsonl", *({"text": str(i)} for i in range(100)))
    first = run(path, max_rows=40, eval_fraction=0.25, data_seed=3)
    again = run(path, max_rows=40, eval_fraction=0.25, data_seed=3, seed=1)
    assert (texts(first.train), texts(first.eval)) == (texts(again.train), texts(again.eval))
    others = [run(path, max_rows=40, eval_fraction=0.25, seed=3), run(path, max_rows=40, data_seed=4)]
    assert texts(others[0].train) == texts(first.train) and set(texts(others[1].train)) != set(texts(first.train))


def test_what_leaves_no_rows_is_told_in_one_message(tmp_path, run):
    path = write_lines(tmp_path / "rows.jsonl", *({"text": str(i)} for i in range(3)))
    with pytest.raises(DataError, match=r"data\.split=\[5:\] takes none of the 3 rows of .*rows\.jsonl"):
        run(path, split="[5:]")
    with pytest.raises(DataError, match=r"data\.split=train\[:1\]\+train\[2:\] can be used with hub data sets alone"):
        run(path, split="train[:1]+train[2:]")
    empty = tmp_path / "empty.jsonl"
    empty.write_text("")
    with pytest.raises(DataError, match=r"There is no usable row\. .*empty\.jsonl has no rows\n.*set data\.mix"):
        run(None, mix={str(path): 1, str(empty): 1})
    saved = tmp_path / "saved"
    datasets.DatasetDict({"train": datasets.Dataset.from_list([{"text": "a"}])}).save_to_disk(saved)
    with pytest.raises(DataError, match=r"data\.mix=.*saved has no split test: it has train"):
        run(None, mix={str(saved): {"split": "test[:5]"}})


def test_a_system_prompt_that_the_template_refuses_is_named(tmp_path, run):
    template = tmp_path / "own.jinja"
    template.write_text(
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system here') }}{% endif %}"
        "{{ m.content }}{% endfor %}"
    )
    turns = [{"role": "user", "content": "u"}, {"role": "assistant", "content": "x"}]
    path = write_lines(tmp_path / "rows.jsonl", {"messages": turns})
    with pytest.raises(
        DataError, match=r"no system here(.|\n)*data\.chat_template; or leave data\.system_prompt out\."
    ):
        run(path, chat_template=str(template), system_prompt="Be kind.")
