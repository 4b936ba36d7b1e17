"""Small files of rows that unpack to gigabytes: each is refused by name, and says what an honest user sets."""

from __future__ import annotations

import bz2
import csv
import gzip
import lzma
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from qlora_fsdp import preview
from qlora_fsdp.common.errors import DataError
from qlora_fsdp.config.schema import DataConfig
from qlora_fsdp.data.files import unpacking
from qlora_fsdp.data.read import find_source, iterate_rows

ROW = b'{"prompt": "a", "completion": "b"}\n'
HUGE = 10**7  # characters of one value


def zstd(content: bytes) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(content)
    return bytes(sink.getvalue())


PACK: dict[str, Callable[[bytes], bytes]] = {
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": zstd,
}
TEXTS = {
    "many rows": (".jsonl", ROW * 2**17),
    "one row": (".jsonl", b'{"text": "' + b"a" * 2**22),
    "no line break": (".jsonl", b" " * 2**22),
    "one text of a list": (".json", b'["' + b"a" * 2**22),
    "one cell": (".csv", b"text\n" + b"a" * 2**22),
}


@pytest.fixture
def small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unpacking, "FREE_BYTES", 2**20)
    monkeypatch.setattr(unpacking, "BATCH_BYTES", 2**26)


def read(file: Path) -> int:
    return sum(1 for _ in iterate_rows(find_source(str(file), DataConfig(path=str(file)))))


def refusal(file: Path) -> str:
    with pytest.raises(DataError) as caught:
        read(file)
    return str(caught.value)


@pytest.mark.usefixtures("small_limits")
@pytest.mark.parametrize("suffix", PACK)
@pytest.mark.parametrize("case", TEXTS)
def test_a_compressed_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str, case: str) -> None:
    inside, content = TEXTS[case]
    file = tmp_path / f"rows{inside}{suffix}"
    file.write_bytes(PACK[suffix](content))
    assert file.stat().st_size < 2**15
    ratio = 2**20 // file.stat().st_size
    monkeypatch.setattr(unpacking, "MAX_RATIO", ratio)
    told = refusal(file)
    assert told.startswith(f"{file} unpacks to more than 1.0 MiB, more than {ratio} times its size")
    if case == "many rows":
        monkeypatch.setattr(unpacking, "MAX_RATIO", 10**6)
        assert read(file) == 2**17


@pytest.mark.usefixtures("small_limits")
def test_rows_that_repeat_the_names_of_columns(tmp_path: Path) -> None:
    file = tmp_path / "rows.csv"
    with file.open("w", newline="") as stream:
        csv.writer(stream).writerows([["text", "a" * 10_000], *[["", ""]] * 20_000])
    assert "unpacks to more than" in refusal(file)


def repeated(value: Any, num_rows: int) -> pa.DictionaryArray:
    return pa.DictionaryArray.from_arrays(pa.array([0] * num_rows, pa.int32()), pa.array([value]))


@pytest.mark.parametrize("is_plain", [False, True])
def test_a_parquet_file_of_a_kilobyte(tmp_path: Path, is_plain: bool) -> None:
    """Its 1,000 rows of ten megabytes would be one batch. Its schema may say that it is a dictionary, or may not."""
    file = tmp_path / "rows.parquet"
    table = pa.table({"text": repeated("x" * HUGE, 1000)})
    pq.write_table(table, file, compression="zstd", store_schema=not is_plain)
    assert file.stat().st_size < 1024
    told = refusal(file)
    assert told.startswith(f"{file} unpacks to more than 128.0 MiB, more than 200 times")


@pytest.mark.usefixtures("small_limits")
def test_a_list_of_millions_of_values(tmp_path: Path) -> None:
    """One row, whose values are all the same and take no place in the file."""
    file = tmp_path / "rows.parquet"
    schema = pa.schema([("text", pa.list_(pa.int32()))])
    with pq.ParquetWriter(file, schema, compression="zstd") as writer:
        values = pa.ListArray.from_arrays(pa.array([0, 4 * 10**6], pa.int32()), pa.nulls(4 * 10**6, pa.int32()))
        writer.write_table(pa.table([values], schema=schema))
    assert file.stat().st_size < 2**12
    assert "unpacks to more than 1.0 MiB" in refusal(file)


@pytest.mark.usefixtures("small_limits")
@pytest.mark.parametrize("compression", ["zstd", None])
@pytest.mark.parametrize("new_file", [pa.ipc.new_file, pa.ipc.new_stream])
def test_an_arrow_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compression: str | None, new_file: Callable[..., Any]
) -> None:
    monkeypatch.setattr(unpacking, "MAX_RATIO", 2)
    batch = pa.record_batch({"text": repeated("x" * 10**5, 10_000)})
    file = tmp_path / "rows.arrow"
    with new_file(str(file), batch.schema, options=pa.ipc.IpcWriteOptions(compression=compression)) as writer:
        writer.write_batch(batch)
    assert "unpacks to more than" in refusal(file)


@pytest.mark.usefixtures("small_limits")
def test_rows_without_values(tmp_path: Path) -> None:
    """Empty rows take no bytes of the file, but each has its place."""
    file = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"other": pa.nulls(10**5)}), file)
    assert file.stat().st_size < 2**11
    assert "unpacks to more than 1.0 MiB" in refusal(file)


def test_values_that_python_does_not_have(tmp_path: Path) -> None:
    file = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"text": pa.array([10**7], pa.date32())}), file)  # a day of the year 29,349
    assert refusal(file).startswith(f"{file} can't be read: ")


def test_honest_files_are_read_as_ever(tmp_path: Path) -> None:
    texts = [f"Row {number}. " + "The same words in each of them. " * 20 for number in range(3000)]
    pq.write_table(pa.table({"text": texts}), tmp_path / "a.parquet", compression="zstd")
    lines = "".join(f'{{"text": "{text}"}}\n' for text in texts).encode()
    for suffix, pack in PACK.items():
        (tmp_path / f"b.jsonl{suffix}").write_bytes(pack(lines))
    assert read(tmp_path) == 3000 * (1 + len(PACK))


def test_a_command_ends_with_the_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "rows.jsonl.gz"
    file.write_bytes(gzip.compress(b" " * (unpacking.FREE_BYTES + 2**20)))
    argv = ["model=tiny", "model.tokenizer_path=bytes", f"data.path={file}", f"data.cache_folder={tmp_path / 'cache'}"]
    assert preview.main(argv) == 2
    shown = capsys.readouterr().err
    assert f"Error: {file} unpacks to more than 128.0 MiB" in shown and "Traceback" not in shown
