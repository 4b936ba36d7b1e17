"""Every source of rows, damaged in each way: what is whole is used and the rest named, or one message says why not."""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import json
import lzma
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import datasets
import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from tests.helpers.one_process import one_process

from qlora_fsdp.common.errors import DataError
from qlora_fsdp.config.schema import BadRows, Config, DataConfig, TrainingConfig
from qlora_fsdp.config.specs import DataSpec
from qlora_fsdp.data.run_data import PreparedData, prepare_data
from qlora_fsdp.data.sequences import Sequences
from qlora_fsdp.data.tokenizer import byte_tokenizer

NUM_ROWS = 60
ROWS = [{"prompt": f"Question {n}? ", "completion": f"Answer {n * n}."} for n in range(NUM_ROWS)]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS).encode()
SCHEMA = pa.Table.from_pylist(ROWS)


def prepare(path: str | list[str], cache: Path, **more: Any) -> PreparedData[Sequences]:
    config = Config(
        data=DataConfig(path=path, cache_folder=str(cache), **more),
        training=TrainingConfig(max_length=128, packing=False),
    )
    return prepare_data(DataSpec.of(config), byte_tokenizer(), one_process(), 259)


def as_csv() -> bytes:
    text = io.StringIO()
    writer = csv.DictWriter(text, ["prompt", "completion"])
    writer.writeheader()
    writer.writerows(ROWS)
    return text.getvalue().encode()


def as_parquet() -> bytes:
    sink = io.BytesIO()
    pq.write_table(SCHEMA, sink, row_group_size=10)
    return sink.getvalue()


def as_arrow(is_indexed: bool) -> bytes:
    sink = io.BytesIO()
    with (pa.ipc.new_file if is_indexed else pa.ipc.new_stream)(sink, SCHEMA.schema) as writer:
        writer.write_table(SCHEMA, max_chunksize=10)
    return sink.getvalue()


FILES: dict[str, Callable[[], bytes]] = {
    "rows.jsonl": lambda: LINES,
    "rows.json": lambda: json.dumps(ROWS).encode(),
    "rows.csv": as_csv,
    "rows.parquet": as_parquet,
    "stream.arrow": lambda: as_arrow(False),
    "indexed.arrow": lambda: as_arrow(True),
    "rows.jsonl.gz": lambda: gzip.compress(LINES),
    "rows.csv.bz2": lambda: bz2.compress(as_csv()),
    "rows.json.xz": lambda: lzma.compress(json.dumps(ROWS).encode()),
    "rows.jsonl.zst": lambda: pa.Codec("zstd").compress(LINES).to_pybytes(),
}
DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "cut in the middle": lambda whole: whole[: len(whole) * 2 // 3],
    "without its end": lambda whole: whole[:-9],
    "empty": lambda whole: b"",
    "zeros in the middle": lambda whole: whole[: len(whole) // 2] + bytes(200) + whole[len(whole) // 2 + 200 :],
    "noise": lambda whole: random.Random(0).randbytes(len(whole)),
}
# Half a cell at the end of a CSV file is a cell, and Arrow has no checksums.
NOT_TO_BE_SEEN = [("without its end", "rows.csv"), ("zeros in the middle", "stream.arrow")]


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", [*DAMAGES, "none"])
def test_a_damaged_file_is_used_as_far_as_it_goes_or_refused_by_name(name: str, damage: str, tmp_path: Path) -> None:
    file = tmp_path / name
    whole = FILES[name]()
    file.write_bytes(DAMAGES[damage](whole) if damage != "none" else whole)
    try:
        report = prepare(str(file), tmp_path / "cache").report
    except DataError as error:
        assert damage != "none" and name in str(error), error
        assert any(fix in str(error) for fix in ("Repair", "leave it out", "Set ", "set ")), error
        return
    (source,) = report.sources
    assert str(source).startswith(f"{file}: ")
    if damage == "none":
        assert source.num_used_rows == NUM_ROWS and not source.problems
    elif (damage, name) not in NOT_TO_BE_SEEN:  # rows a line can be used in part: the broken ones are named
        assert name in ("rows.jsonl", "rows.csv"), report
        assert 0 < source.num_used_rows < NUM_ROWS
        assert any(f"{name}:" in problem.examples[0] for problem in source.problems), report


def test_a_shard_with_a_renamed_column_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "shards"
    folder.mkdir()
    for number in range(3):
        part = SCHEMA.slice(20 * number, 20)
        names = ["question", "completion"] if number == 1 else part.column_names
        pq.write_table(part.rename_columns(names), folder / f"part-{number}.parquet")
    report = str(prepare(str(folder), tmp_path / "cache").report)
    assert "60 rows read, 40 used" in report
    assert "20 rows left out (wrong keys): part-1.parquet row 1, part-1.parquet row 2" in report
    assert "set data.columns={prompt: question}" in report
    with pytest.raises(DataError, match=r"data\.bad_rows=error, and .*\n.*20 rows left out \(wrong keys\): part-1"):
        prepare(str(folder), tmp_path / "cache", bad_rows=BadRows.error)


def test_a_shard_that_is_cut_is_named_and_nothing_is_kept(tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    datasets.Dataset.from_list(ROWS).save_to_disk(saved, num_shards=2)
    (first, second) = sorted(saved.glob("*.arrow"))
    second.write_bytes(second.read_bytes()[:-700])
    with pytest.raises(DataError, match=f"{second.name} can't be read: .*Repair it, or leave it out"):
        prepare(str(saved), tmp_path / "cache")
    assert not [path for path in (tmp_path / "cache").iterdir() if path.is_dir() and not path.name.startswith(".")]
    assert prepare(str(first), tmp_path / "cache").report.num_rows == 30


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """memory://refusing/, which has a good file and one that may be refused."""
    memory = fsspec.filesystem("memory")
    memory.pipe("/refusing/a.jsonl", LINES)
    memory.pipe("/refusing/secret.jsonl", LINES)
    yield monkeypatch
    monkeypatch.undo()
    memory.rm("/refusing", recursive=True)


def refuse(*_: object, **__: object) -> None:
    raise PermissionError("403 Forbidden: Access Denied")


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.txt", "a.jsonl.gz"])
@pytest.mark.parametrize("codec", ["utf-16-le", "utf-16-be"])
def test_utf_16_is_named(name: str, codec: str, bucket: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As PowerShell's > writes it."""
    text = as_csv().decode() if "csv" in name else LINES.decode()
    content = ("\ufeff" + text).encode(codec)
    content = gzip.compress(content) if name.endswith("gz") else content
    (tmp_path / name).write_bytes(content)
    fsspec.filesystem("memory").pipe(f"/refusing/utf/{name}", content)
    for path in (str(tmp_path / name), f"memory://refusing/utf/{name}"):
        with pytest.raises(DataError, match=r"a\.\w+(\.gz)? is UTF-16, .* iconv -f UTF-16 -t UTF-8"):
            prepare(path, tmp_path / "cache")


@pytest.mark.parametrize("method", ["find", "isdir"])
def test_a_bucket_that_can_not_be_listed(method: str, bucket: pytest.MonkeyPatch, tmp_path: Path) -> None:
    bucket.setattr(MemoryFileSystem, method, refuse)
    with pytest.raises(DataError, match=r"data\.path=memory://refusing can't be read: PermissionError: 403") as failed:
        prepare("memory://refusing", tmp_path)
    assert "your credentials" in str(failed.value)


def test_a_file_of_a_bucket_that_can_not_be_opened(bucket: pytest.MonkeyPatch, tmp_path: Path) -> None:
    opened = MemoryFileSystem._open
    bucket.setattr(
        MemoryFileSystem,
        "_open",
        lambda self, path, *a, **k: refuse() if "secret" in path else opened(self, path, *a, **k),
    )
    assert prepare("memory://refusing/a.jsonl", tmp_path).report.num_rows == NUM_ROWS
    with pytest.raises(DataError, match=r"refusing/secret\.jsonl can't be read: 403 Forbidden"):
        prepare("memory://refusing", tmp_path)


@pytest.mark.parametrize("damage", ["empty", "noise"])
def test_a_mixture_names_the_data_set_that_has_no_row(damage: str, tmp_path: Path) -> None:
    good, bad = tmp_path / "good.jsonl", tmp_path / "bad.jsonl"
    good.write_bytes(LINES)
    bad.write_bytes(DAMAGES[damage](LINES))
    with pytest.raises(DataError, match=r"There is no usable row\. .*bad\.jsonl") as failed:
        prepare(None, tmp_path / "cache", mix={str(good): 1, str(bad): 1})
    assert "set data.mix" in str(failed.value)
