"""Data that is streamed: the same windows from any place, shares of a mix, and what goes wrong in it."""

from __future__ import annotations

import bz2
import errno
import gzip
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import datasets
import fsspec
import numpy as np
import psutil
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet
import pytest
from tests.helpers.streams import GLOBAL_BATCH_SIZE, NUM_SEQUENCES, SETTINGS, TOKENIZER, row_tokenizer
from tests.helpers.streams import stream as stream_on

from qlora_fsdp.common.errors import DataError
from qlora_fsdp.config.schema import BadRows, DataConfig, DataFormat, LossOn
from qlora_fsdp.data.batch import collate
from qlora_fsdp.data.chats.told import NO_STOP, THOUGHTS_LEFT_OUT, TOLD
from qlora_fsdp.data.files.position import Position
from qlora_fsdp.data.read import find_source, iterate_rows
from qlora_fsdp.data.split import BatchSplit
from qlora_fsdp.data.streams.kept_windows import KeptWindows
from qlora_fsdp.data.streams.share import ShareTable, ToldRows, join_told
from qlora_fsdp.data.streams.stream import StreamedSequences
from qlora_fsdp.data.streams.window_maker import EndlessRows
from qlora_fsdp.data.streams.windows import Place, Window, find_place, note_place
from qlora_fsdp.data.tokenize import RowTokenizer
from qlora_fsdp.data.workers import Workers
from qlora_fsdp.runtime.processes import Processes, start_processes, stop_processes
from qlora_fsdp.training.batches import GlobalBatches


@pytest.fixture(scope="module", autouse=True)
def processes() -> Iterator[Processes]:
    """One process, which exchanges rows with itself."""
    _started[:] = [start_processes(60, use_cpu=True)]
    yield _started[0]
    stop_processes()


_started: list[Processes] = []


def stream(paths: list[Any], weights: tuple[float, ...] = (1.0,), packing: bool = True, **more: Any):
    return stream_on(paths, _started[0], weights, replace(SETTINGS, packing=packing), **more)


def write(file: Path, *rows: Any) -> Path:
    file.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return file


def texts(data: StreamedSequences, first: int, last: int) -> list[list[str]]:
    indices = data.order(first, last, seed=0)
    return [[str(TOKENIZER.decode(tokens[1:-1].tolist())) for tokens, _ in data.rows_of(int(i))] for i in indices]


def test_from_any_window_on_a_stream_is_the_same(tmp_path: Path):
    rows = write(tmp_path / "rows.jsonl", *({"text": f"row {n}"} for n in range(33)))
    places = tmp_path / "stream.jsonl"
    data = stream([rows], note=lambda window: note_place(places, "key", window))
    found = texts(data, 0, NUM_SEQUENCES)
    counts = Counter(text for row in found for text in row)
    assert set(counts) == {f"row {n}" for n in range(33)} and max(counts.values()) - min(counts.values()) <= 2
    assert found != sorted(found) and any(len(row) > 1 for row in found)  # shuffled and packed
    for first in (1, 17, 40, NUM_SEQUENCES - 1):
        start = find_place([places], "key", first)
        assert start is not None and start.sequence <= first
        again = stream([rows], start=start)
        assert texts(again, first, NUM_SEQUENCES) == found[first:]
    assert start.window > 2 and start.num_drawn[0] > 33 > start.positions[0].number  # in a later pass over the file
    assert find_place([places], "another", 40) is None and find_place([tmp_path / "none"], "key", 0) is None


def test_counts_and_batches_are_those_of_the_rows(tmp_path: Path):
    data = stream([write(tmp_path / "rows.jsonl", *({"prompt": "ab", "completion": "c" * n} for n in range(1, 30)))])
    indices = data.order(4, 8, seed=0)
    batch = collate(data, indices, micro_batch_size=4)
    assert data.num_target_tokens(indices) == int((batch.targets != -100).sum())
    assert data.lengths_of(indices).sum() == int((batch.input_ids != 258).sum()) and batch.labels is None
    texts(data, 0, NUM_SEQUENCES)
    with pytest.raises(StopIteration):  # long past, and forgotten
        data.rows_of(0)


def test_nobody_knows_the_epoch_of_a_stream(tmp_path: Path):
    """It was the part of the run that is done, however often the rows were read."""
    file = write(tmp_path / "a.jsonl", *({"text": "ab" * n} for n in range(1, 9)))
    batches = GlobalBatches(stream([file]), BatchSplit(1, 2, 1, 4, 8), seed=0, rank=0)
    assert batches.of_step(0).epoch is None


def test_a_mix_keeps_its_shares_at_every_moment(tmp_path: Path):
    one = write(tmp_path / "one.jsonl", *({"text": "a"} for _ in range(5)))
    two = write(tmp_path / "two.jsonl", *({"text": "b"} for _ in range(100)))
    data = stream([one, two], (1.0, 3.0), packing=False)
    for last in (20, 40, 60):
        assert Counter(row[0] for row in texts(data, last - 20, last)) == {"a": 5, "b": 15}


def test_a_data_set_that_is_read_over_and_over_is_told(tmp_path: Path):
    short = write(tmp_path / "short.jsonl", *({"text": f"row {n}"} for n in range(3)))
    long = write(tmp_path / "long.jsonl", *({"text": f"row {n}"} for n in range(10)))
    report = str(stream([short, long], (1.0, 1.0)).first_window.report)
    assert "20 rows read" in report and f"{short} has 3 rows, read over and over" in report
    assert "long.jsonl has" not in report


def test_hub_data_sets_are_streamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def load(path: str, name: str | None, split: str, streaming: bool) -> datasets.IterableDataset:
        assert streaming
        return datasets.Dataset.from_dict({"text": [f"row {n}" for n in range(9)]}).to_iterable_dataset()

    monkeypatch.setattr(datasets, "load_dataset", load)
    data = stream([Path("org/name")], buffer_rows=9, packing=False)
    assert sorted(row[0] for row in texts(data, 0, 9)) == [f"row {n}" for n in range(9)]


def test_a_hub_that_is_lost_is_no_bug(monkeypatch: pytest.MonkeyPatch):
    """Its libraries raise errors of all kinds, after they have tried for minutes."""

    def make() -> Iterator[dict[str, str]]:
        yield from ({"text": f"row {n}"} for n in range(25))
        raise RuntimeError("Server disconnected.")

    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **more: datasets.IterableDataset.from_generator(make))
    data = stream([Path("org/name")], packing=False)
    with pytest.raises(DataError, match=r"^org/name can't be read on: RuntimeError: Server disconnected\. If the hub"):
        texts(data, 0, NUM_SEQUENCES)


def test_bad_rows_end_it_or_are_counted(tmp_path: Path):
    rows = write(tmp_path / "rows.jsonl", *({"text": f"row {n}"} for n in range(25)), "{broken", {"no": "text"})
    window = stream([rows], buffer_rows=27).first_window
    assert {p.kind: p.num_rows for p in window.report.problems} == {"not JSON": 1, "wrong keys": 1}
    strict = stream([rows], strict=True)  # the bad ones are in the second window
    with pytest.raises(DataError, match=r"(?s)data.bad_rows=error, and .*rows.jsonl:26"):
        texts(strict, 0, NUM_SEQUENCES)
    with pytest.raises(DataError, match="has token 257, but the model has only 257"):
        stream([rows], vocab_size=257)
    with pytest.raises(DataError, match="There is no usable row"):
        stream([write(tmp_path / "bad.jsonl", {"no": "text"})])
    with pytest.raises(DataError, match="has no rows"):
        stream([write(tmp_path / "empty.jsonl")])


def test_buffers_without_a_usable_row_are_passed_by(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """The run once ended at the first, and met it again whenever it was started."""
    bad, good = [{"no": "text"}] * 65, [{"text": f"row {n}"} for n in range(25)]
    places, windows = tmp_path / "stream.jsonl", []

    def note(window: Window) -> None:
        note_place(places, "key", window)
        windows.append(window)

    with caplog.at_level(logging.WARNING, "qlora_fsdp"):
        data = stream([write(tmp_path / "rows.jsonl", *good, *bad, *good)], note=note)
        found = texts(data, 0, NUM_SEQUENCES)
    assert {text for row in found for text in row} == {f"row {n}" for n in range(25)}
    assert [window.place.window for window in windows][:4] == [0, 1, 4, 5]
    report = windows[2].report
    assert (report.num_rows, report.num_used_rows, report.problems[0].num_rows) == (60, 10, 50)
    assert "Reading on, as no row here can be used" in caplog.text and "rows.jsonl:41" in caplog.records[0].message
    for window in windows:
        again = stream([tmp_path / "rows.jsonl"], start=find_place([places], "key", window.place.sequence))
        assert again.first_window.place == window.place
        assert texts(again, window.place.sequence, NUM_SEQUENCES) == found[window.place.sequence :]


def test_data_that_begins_without_a_usable_row_ends_it(tmp_path: Path):
    """A wrong setting is told at once, and not when all of a large data set has been read."""
    rows = write(tmp_path / "rows.jsonl", *[{"no": "text"}] * 25, {"text": "too late"})
    with pytest.raises(DataError, match=r"There is no usable row\. .*rows\.jsonl: 20 rows read, 0 used"):
        stream([rows])
    assert texts(stream([rows], buffer_rows=26), 0, 1) == [["too late"]]


def test_a_data_set_of_a_mix_that_begins_without_a_usable_row_ends_it(tmp_path: Path):
    """Without it the others would be trained on in other shares than were asked for."""
    good = write(tmp_path / "good.jsonl", *[{"text": f"row {n}"} for n in range(40)])
    bad = write(tmp_path / "bad.jsonl", *[{"no": "text"}] * 8, {"text": "too late"})
    told = r"There is no usable row of .*bad\.jsonl\. .*20 rows read, 15 used(.|\n)*a larger data\.buffer_rows"
    with pytest.raises(DataError, match=told):
        stream([good, bad], weights=[3, 1])
    assert "too late" in str(texts(stream([good, bad], weights=[3, 1], buffer_rows=36), 0, 7))


def test_buffers_that_teach_attention_nothing_end_it_only_at_the_beginning(tmp_path: Path):
    """A later one once ended the run too, although others stand around it."""

    def without_ends(batches: Any) -> Iterator[Any]:
        """Of a text of one letter only its second token is left to be predicted."""
        for out in map(row_tokenizer(), batches):
            yield out | {key: [row[: max(2, len(row) - 1)] for row in out[key]] for key in ("tokens", "is_target")}

    long, short = [{"text": f"row {n}"} for n in range(20)], [{"text": "x"}] * 20
    late = write(tmp_path / "late.jsonl", *long, *short)
    found = texts(stream([late], packing=False, map_batches=without_ends), 0, 40)
    assert found[20:] == [[""]] * 20
    early = write(tmp_path / "early.jsonl", *short, *long)
    with pytest.raises(DataError, match=r"early\.jsonl: the only target of every row is its second token"):
        stream([early], map_batches=without_ends)


def test_data_that_has_no_usable_row_any_more_ends_it_once_it_is_read(tmp_path: Path):
    bad = write(tmp_path / "bad.jsonl", *[{"no": "text"}] * 45)
    with pytest.raises(DataError, match=r"There is no usable row\. .*bad\.jsonl: 100 rows read, 0 used"):
        stream([bad], start=Place(1, 5, [20], [Position()]))


def test_a_place_that_cannot_be_written_is_written_later(tmp_path: Path):
    window = stream([write(tmp_path / "rows.jsonl", {"text": "a b c"})]).first_window
    file = tmp_path / "gone" / "stream.jsonl"
    note_place(file, "key", window)
    assert not file.parent.exists()
    file.parent.mkdir()
    note_place(file, "key", window)
    assert file.read_text().count('"sequence": 0') == 2


def test_kept_windows_are_gone_on_with_and_made_again_where_they_are_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    rows = write(tmp_path / "rows.jsonl", *({"text": f"row {n}"} for n in range(33)), "{broken", {"no": "text"})
    tokenized: list[int] = []

    def map_batches(batches: Any) -> Any:
        for batch in batches:
            tokenized.append(len(batch["row"]))
            yield row_tokenizer()(batch)

    def open_stream(run: str, start: Place | None = None, key: str = "key", **more: Any) -> StreamedSequences:
        (tmp_path / run).mkdir(exist_ok=True)
        kept = KeptWindows(tmp_path / run, [tmp_path / "run"], key, GLOBAL_BATCH_SIZE)
        tokenized.clear()
        return stream([rows], kept=kept, start=start, map_batches=map_batches, **more)

    windows: list[Window] = []
    (tmp_path / "run" / "checkpoints" / "step-00000002").mkdir(parents=True)
    data = open_stream("run", note=windows.append)
    found = texts(data, 0, NUM_SEQUENCES)
    folder = tmp_path / "run" / "windows"
    files = sorted(folder.iterdir())
    firsts = [window.place.sequence for window in windows]
    before_step = max(first for first in firsts if first <= 2 * GLOBAL_BATCH_SIZE)
    assert [int(file.stem) for file in files] == sorted({before_step, *firsts[-3:]}) and len(firsts) > 4

    last = windows[-1]
    for run in ("run", "another"):  # its own files, and those of the run whose checkpoint is resumed
        again = open_stream(run, start=last.place)
        assert not tokenized and texts(again, last.place.sequence, NUM_SEQUENCES) == found[last.place.sequence :]
        assert again.first_window.report == last.report and again.first_window.next_place == last.next_place
    with pytest.raises(DataError, match="has token"):  # what is read is checked as what is made
        open_stream("run", start=last.place, vocab_size=100)
    assert not tokenized

    file, content = files[-1], files[-1].read_bytes()
    shutil.rmtree(tmp_path / "another")

    def is_made_again(**more: Any) -> bool:
        assert texts(open_stream("another", start=last.place, **more), last.place.sequence, NUM_SEQUENCES)
        shutil.rmtree(tmp_path / "another")
        return sum(tokenized) >= 20

    assert is_made_again(key="of other data")
    for damaged in (b"", content[:-1], content[:-9] + b"\0" * 9, content[:500] + b"\1" + content[501:], b"\0" * 99):
        file.write_bytes(damaged)
        assert is_made_again()
    file.unlink()
    assert is_made_again()
    os.mkfifo(file)
    assert is_made_again()

    def fill(*arguments: Any) -> Any:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("qlora_fsdp.data.streams.kept_windows.create", fill)
    with caplog.at_level(logging.WARNING, "qlora_fsdp"):
        assert texts(open_stream("full"), 0, NUM_SEQUENCES) == found
    assert [record.message.partition(". ")[0] for record in caplog.records] == [
        f"{tmp_path / 'full' / 'windows'} can't be written: No space left on device"
    ]
    assert not list((tmp_path / "full" / "windows").iterdir())


ROWS = [{"text": f"row {n} " + "x" * (n % 7)} for n in range(53)]
LINES = [json.dumps(row).encode() for row in ROWS]
BLANK = b"\xef\xbb\xbf" + b"\n".join([*LINES[:20], b"", b" ", *LINES[20:], b"", b""])


def in_groups(file: Path) -> None:
    pa.parquet.write_table(pa.Table.from_pylist(ROWS), file, row_group_size=10)


def as_stream(file: Path) -> None:
    table = pa.Table.from_pylist(ROWS)
    with pa.ipc.new_stream(str(file), table.schema) as writer:
        writer.write_table(table, max_chunksize=12)


FILES: dict[str, Any] = {
    "rows.jsonl": lambda file: file.write_bytes(BLANK),
    "lines.json": lambda file: file.write_bytes(BLANK),
    "list.json": lambda file: file.write_text(json.dumps(ROWS)),
    "rows.jsonl.gz": lambda file: file.write_bytes(gzip.compress(BLANK)),
    "rows.jsonl.bz2": lambda file: file.write_bytes(bz2.compress(BLANK)),
    "rows.csv": lambda file: file.write_text("text\n" + "".join(f"{row['text']}\n" for row in ROWS)),
    "rows.parquet": in_groups,
    "rows.arrow": as_stream,
    "indexed.arrow": lambda file: pa.feather.write_feather(pa.Table.from_pylist(ROWS), str(file), chunksize=9),
}


def check_positions(source: Any) -> None:
    """From every position, also one that was written down, the rows are those that follow in one pass after another."""
    whole = list(iterate_rows(source))
    for num_rows in (1, 19, 21, 22, 23, 40, len(whole) - 1, len(whole), len(whole) + 3):
        rows = EndlessRows(source, Position())
        assert rows.take(num_rows) == list(islice(cycle(whole), num_rows))
        position = Position.from_json(json.loads(json.dumps(asdict(rows.position))))
        again = EndlessRows(source, position).take(len(whole))
        assert again == rows.take(len(whole)) == list(islice(cycle(whole), num_rows, num_rows + len(whole)))


@pytest.mark.parametrize("name", FILES)
def test_every_kind_of_file_is_read_on_from_any_position(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str):
    monkeypatch.setattr("qlora_fsdp.data.files.row_files.BATCH_ROWS", 4)
    FILES[name](tmp_path / name)
    (tmp_path / "zz.jsonl").write_text('{"text": "another file"}\n' * 3)
    check_positions(find_source(str(tmp_path), DataConfig()))


def test_remote_files_and_hub_data_sets_are_read_on_from_any_position(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    memory = fsspec.filesystem("memory")
    try:
        for name in ("rows.jsonl", "rows.parquet"):
            FILES[name](tmp_path / name)
            memory.pipe(f"/stream/{name}", (tmp_path / name).read_bytes())
        check_positions(find_source("memory://stream", DataConfig()))
    finally:
        memory.rm("/stream", recursive=True)
    parts = [str(tmp_path / f"{part}.parquet") for part in range(3)]
    for part, file in enumerate(parts):
        pa.parquet.write_table(pa.Table.from_pylist(ROWS[part::3]), file, row_group_size=5)
    load = datasets.load_dataset

    def load_files(*args: Any, streaming: bool, **more: Any) -> datasets.IterableDataset:
        return load("parquet", data_files=parts, split="train", streaming=streaming, cache_dir=str(tmp_path))

    monkeypatch.setattr(datasets, "load_dataset", load_files)
    source = find_source("org/name", DataConfig(streaming=True))
    check_positions(source)
    rows = EndlessRows(source, Position())
    rows.take(40)
    assert rows.position.hub is not None and rows.position.number == 40


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet"])
def test_what_is_before_a_position_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str):
    monkeypatch.setattr("qlora_fsdp.data.files.row_files.BATCH_ROWS", 10)
    file = tmp_path / name
    FILES[name](file)
    rows = EndlessRows(find_source(str(file), DataConfig()), Position())
    rows.take(42)
    with file.open("r+b") as damaged:
        damaged.seek(4)
        damaged.write(b"\0" * 300)
    damaged_source = find_source(str(file), DataConfig())
    assert EndlessRows(damaged_source, rows.position).take(9) == rows.take(9)
    try:  # from the beginning the damage is seen
        first = next(iterate_rows(damaged_source))[1]
    except DataError:
        first = b""
    assert first != LINES[0]


def test_sequences_are_those_of_all_rows_at_once(tmp_path: Path):
    """A window of all rows, beside the rows tokenized and packed in one go."""
    data = stream([write(tmp_path / "rows.jsonl", *ROWS)], buffer_rows=len(ROWS))
    window = data.first_window
    out = row_tokenizer()({"place": [""] * len(LINES), "row": LINES})
    plain = list(zip(out["tokens"], out["is_target"], strict=True))
    found = [part for row in range(len(ROWS)) for part in window.sequences.rows.read(row)]
    for (tokens, is_target), (own_tokens, own_is_target) in zip(plain, found, strict=True):
        assert (tokens == own_tokens).all() and (is_target == own_is_target).all()
    assert sorted(window.sequences.row_ids) == list(range(len(ROWS)))
    assert window.sequences.lengths.max() <= SETTINGS.max_length


def test_workers_tokenize_as_this_process_does_and_end_with_it(tmp_path: Path):
    rows = write(tmp_path / "rows.jsonl", *ROWS, "{broken")
    own, by_workers = stream([rows]), stream([rows], map_batches=Workers(row_tokenizer(), 2).map)
    assert texts(own, 0, NUM_SEQUENCES) == texts(by_workers, 0, NUM_SEQUENCES)
    script = (
        "import psutil\n"
        "from qlora_fsdp.data.workers import Workers\n"
        "if __name__ == '__main__':\n"
        "    workers = Workers(dict, 1)\n"
        "    assert list(workers.map([{'row': [1]}])) == [{'row': [1]}]\n"
        "    print(*(child.pid for child in psutil.Process().children(recursive=True)), flush=True)\n"
        "    input()\n"
    )
    (tmp_path / "parent.py").write_text(script)
    with subprocess.Popen(
        [sys.executable, tmp_path / "parent.py"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        children = [psutil.Process(int(pid)) for pid in parent.stdout.readline().split()]
        parent.kill()
    assert len(children) >= 2  # the server of forks, and the worker
    _, alive = psutil.wait_procs(children, timeout=60)
    assert not alive


def test_a_killed_worker_ends_it_with_one_message(tmp_path: Path):
    workers = Workers(_kill_itself, 1)
    with pytest.raises(DataError, match=r"A process that tokenizes was killed.* Set data\.num_proc lower"):
        stream([write(tmp_path / "rows.jsonl", *ROWS)], map_batches=workers.map)


def _kill_itself(batch: Any) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


def test_what_a_template_leaves_out_is_counted_in_streams_too(tmp_path: Path):
    answer = {"role": "assistant", "content": "Hello!", "reasoning_content": "A greeting."}
    rows = [{"messages": [{"role": "user", "content": str(number)}, answer]} for number in range(30)]
    path = write(tmp_path / "rows.jsonl", *rows)
    tokenize = RowTokenizer(TOKENIZER, DataFormat.auto, LossOn.completion, 200, BadRows.skip)
    (tmp_path / "run").mkdir()
    for _ in range(2):  # the second time with the window of a file
        kept = KeptWindows(tmp_path / "run", [], "key", GLOBAL_BATCH_SIZE)
        settings = replace(SETTINGS, max_length=200)
        data = stream_on([path], _started[0], settings=settings, map_batches=partial(map, tokenize), kept=kept)
        (told,) = data.first_window.report.told
        assert told.startswith(f"20 rows used: {TOLD[THOUGHTS_LEFT_OUT]} (rows.jsonl:1, ") and told.endswith(":5, ...)")


def test_what_is_told_of_several_shares_is_told_once():
    def table(*told: ToldRows) -> ShareTable:
        return ShareTable(np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0, np.int32), (), -1, "", told)

    even = ToldRows(NO_STOP, 30, tuple((row, f"rows:{row}") for row in (0, 2, 4, 6, 8)))
    odd = ToldRows(NO_STOP, 2, ((1, "rows:1"), (3, "rows:3")))
    other = ToldRows(THOUGHTS_LEFT_OUT, 1, ((5, "rows:5"),))
    both = ToldRows(NO_STOP, 32, tuple((row, f"rows:{row}") for row in (0, 1, 2, 3, 4)))
    assert join_told([table(even), table(odd, other)]) == (other, both)
