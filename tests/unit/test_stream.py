"""Data that is streamed: the same windows from any place, shares of a mix, and what goes wrong in it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import pytest

from qlora_fsdp.common.errors import DataError
from qlora_fsdp.config.schema import BadRows, DataConfig, DataFormat, LossOn
from qlora_fsdp.data.batch import collate
from qlora_fsdp.data.read import find_source
from qlora_fsdp.data.sequences import SequenceSettings
from qlora_fsdp.data.split import BatchSplit
from qlora_fsdp.data.stream import StreamedSequences
from qlora_fsdp.data.tokenize import RowTokenizer
from qlora_fsdp.data.tokenizer import byte_tokenizer
from qlora_fsdp.data.window_maker import WindowMaker
from qlora_fsdp.data.windows import find_place, note_place
from qlora_fsdp.runtime.processes import Processes, start_processes, stop_processes

TOKENIZER = byte_tokenizer()
NUM_SEQUENCES = 60


@pytest.fixture(scope="module", autouse=True)
def processes() -> Iterator[Processes]:
    """One process, which exchanges rows with itself."""
    started = start_processes(60, use_cpu=True)
    _started.append(started)
    yield started
    stop_processes()
    _started.clear()


_started: list[Processes] = []


def write(file: Path, *rows: Any) -> Path:
    file.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return file


def stream(
    paths: list[Path], weights: tuple[float, ...] = (1.0,), packing: bool = True, **more: Any
) -> StreamedSequences:
    tokenize = RowTokenizer(TOKENIZER, DataFormat.auto, LossOn.completion, 32, BadRows.skip)
    sources = [find_source(str(path), DataConfig(streaming=True)) for path in paths]
    settings = SequenceSettings(max_length=32, pad_token_id=258, packing=packing, seed=3)
    split = BatchSplit(1, 4, 1, NUM_SEQUENCES // 4, NUM_SEQUENCES)
    making = {"map_batches": partial(map, tokenize), "buffer_rows": 20, "vocab_size": 259, "strict": False}
    making = {key: more.pop(key, value) for key, value in making.items()}
    maker = WindowMaker(sources, weights, settings=settings, split=split, processes=_started[0], **making)
    return StreamedSequences(maker, num_sequences=NUM_SEQUENCES, num_kept=20, key="ab" * 16, **more)


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


def test_a_mix_keeps_its_shares_at_every_moment(tmp_path: Path):
    one = write(tmp_path / "one.jsonl", *({"text": "a"} for _ in range(5)))
    two = write(tmp_path / "two.jsonl", *({"text": "b"} for _ in range(100)))
    data = stream([one, two], (1.0, 3.0), packing=False)
    for last in (20, 40, 60):
        assert Counter(row[0] for row in texts(data, last - 20, last)) == {"a": 5, "b": 15}


def test_hub_data_sets_are_streamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def load(path: str, name: str | None, split: str, streaming: bool) -> datasets.IterableDataset:
        assert streaming
        return datasets.Dataset.from_dict({"text": [f"row {n}" for n in range(9)]}).to_iterable_dataset()

    monkeypatch.setattr(datasets, "load_dataset", load)
    data = stream([Path("org/name")], buffer_rows=9, packing=False)
    assert sorted(row[0] for row in texts(data, 0, 9)) == [f"row {n}" for n in range(9)]


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


def test_a_place_that_cannot_be_written_is_written_later(tmp_path: Path):
    window = stream([write(tmp_path / "rows.jsonl", {"text": "a b c"})]).first_window
    file = tmp_path / "gone" / "stream.jsonl"
    note_place(file, "key", window)
    assert not file.parent.exists()
    file.parent.mkdir()
    note_place(file, "key", window)
    assert file.read_text().count('"sequence": 0') == 2
