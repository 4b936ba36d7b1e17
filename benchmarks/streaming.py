"""CPU time of the whole job to stream rows, at several numbers of ranks, and how soon a resumed run has its rows.

usage: python benchmarks/streaming.py TOKENIZER_FOLDER [--rows 20000] [--buffer-rows 1900] [--ranks 1 2 4]
                                      [--resume-rows 200000] [--out FILE] [--kind jsonl|parquet|jsonl.gz]
                                      [--seek ROWS] [setting=value ...]

Conversations of some 366 tokens on average are written to a file. So many ranks (processes of this host that meet over
gloo) stream it and make the micro-batches of every step, as training does, but compute nothing. CPU time is user and
system time of all ranks and of their workers, from before the stream is opened to after the last batch; imports of a
rank are no part of it. The digest is one of all tokens and targets by step: it must not depend on the ranks.

Then a file of --resume-rows is streamed by two ranks, in the buffers that a run has without a setting, and resumed at
90 % of its steps by each number of ranks: how soon is the first batch there? The digest of the last steps must be the
one of the run that did not stop.

With --seek ROWS, the first of these rows are repeated to so many in a file, and the seconds are told until 1,000 rows
from 90 % of them on are there: by the position that a run has noted, and from the beginning. Nothing is tokenized.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import random
import socket
import subprocess
import sys
import time
import zlib
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

ROOT = Path(__file__).parents[1]
WORDS = (ROOT / "docs" / "data.md").read_text().split()
BATCH_SIZE, MAX_LENGTH, TOKENS_A_ROW = 32, 2048, 366
SEEK_ROWS = 10_000
DEFAULT_BUFFER_ROWS = 10_000  # of data.buffer_rows
KEPT = 0.9  # of the rows that are streamed: the window after them is not begun


def write_rows(file: Path, num_rows: int, num_times: int = 1) -> None:
    """Conversations of two turns in words of a page of the docs, all of them so many times."""
    rng = random.Random(0)

    def say(num_words: int) -> str:
        return " ".join(rng.choices(WORDS, k=num_words))

    rows = []
    for _ in range(num_rows):
        turns = (("user", rng.randint(5, 80)), ("assistant", rng.randint(20, 270)))
        rows.append({"messages": [{"role": role, "content": say(length)} for role, length in turns]})
    if file.suffix == ".parquet":
        import pyarrow as pa
        import pyarrow.parquet as pq

        table = pa.Table.from_pylist(rows)
        with pq.ParquetWriter(file, table.schema) as writer:
            for _ in range(num_times):
                writer.write_table(table)
        return
    text = "".join(json.dumps(row) + "\n" for row in rows).encode()
    with gzip.open(file, "wb", compresslevel=1) if file.suffix == ".gz" else file.open("wb") as out:
        for _ in range(num_times):
            out.write(text)


def count_steps(num_rows: int) -> int:
    """Steps of a job over `num_rows` rows."""
    return int(KEPT * num_rows * TOKENS_A_ROW / MAX_LENGTH / BATCH_SIZE)


def resumed_step(num_steps: int) -> int:
    """The step at which a job of `num_steps` is resumed."""
    return int(0.9 * num_steps)


def cpu_seconds() -> float:
    """Processor time of this process and those below it."""
    import psutil

    this = psutil.Process()
    times = [each.cpu_times() for each in (this, *this.children(recursive=True))]
    return float(sum(each.user + each.system for each in times))


def rank_main(job: dict[str, Any]) -> None:
    """What a rank does: stream, make batches, and print the figures of the job on rank 0."""
    from transformers import AutoTokenizer

    from qlora_fsdp.config.schema import Config, DataConfig, TrainingConfig
    from qlora_fsdp.config.specs import DataSpec
    from qlora_fsdp.data.split import BatchSplit
    from qlora_fsdp.data.streams.stream import open_stream
    from qlora_fsdp.runtime.processes import start_processes
    from qlora_fsdp.training.batches import GlobalBatches

    tokenizer = AutoTokenizer.from_pretrained(job["tokenizer"])
    processes = start_processes(600, use_cpu=True)
    data = DataConfig(path=job["file"], streaming=True, buffer_rows=job["buffer_rows"], **job["settings"])
    training = TrainingConfig(packing=True, max_length=MAX_LENGTH, max_steps=1)
    config = replace(Config(), data=data, training=training)
    folder, first_step, num_steps = Path(job["folder"]), job["first_step"], count_steps(job["rows"])
    size = BATCH_SIZE // processes.num_ranks
    split = BatchSplit(size, BATCH_SIZE, processes.num_ranks, num_steps, num_steps * BATCH_SIZE)

    processes.wait()
    before, started = cpu_seconds(), time.monotonic()
    stream = open_stream(DataSpec.of(config), tokenizer, split, processes, folder, first_step, len(tokenizer)).train
    opened = time.monotonic() - started
    batches = GlobalBatches(stream, split, seed=0, rank=processes.rank)
    num_tokens, digest, last_digest, first_batch = 0, 0, 0, 0.0
    micro_batches = batches.micro_batches(first_step)
    for step in range(first_step, num_steps):
        batch = batches.of_step(step)
        num_tokens += batch.num_tokens
        if step == resumed_step(num_steps):  # a window is kept for as long as a checkpoint stands in it
            last_digest = digest
            if processes.is_main:
                (folder / "checkpoints" / f"step-{step:08}").mkdir(parents=True, exist_ok=True)
        for _ in range(batch.num_micro_batches):
            micro = next(micro_batches)
            first_batch = first_batch or time.monotonic() - started
            for row, (ids, targets) in enumerate(zip(micro.input_ids, micro.targets, strict=True)):
                place = (step * BATCH_SIZE + row + processes.rank * size).to_bytes(8, "little")
                digest += zlib.crc32(targets.numpy().tobytes(), zlib.crc32(ids.numpy().tobytes(), zlib.crc32(place)))
    processes.wait()
    seconds = time.monotonic() - started
    found = processes.gather((cpu_seconds() - before, digest, digest - last_digest), tuple[float, int, int])
    if processes.is_main:
        cpu = [each for each, _, _ in found]
        figures: dict[str, Any] = {
            "ranks": processes.num_ranks,
            "cpu_seconds": round(sum(cpu), 2),
            "cpu_seconds_a_rank": [round(each, 2) for each in cpu],
            "seconds": round(seconds, 2),
            "opened_seconds": round(opened, 2),
            "first_batch_seconds": round(first_batch, 2),
            "tokens": num_tokens,
            "digest": sum(each for _, each, _ in found) % 2**64,
            "digest_of_last_steps": sum(each for _, _, each in found) % 2**64,
        }
        print(json.dumps(figures), flush=True)
    processes.wait()
    sys.stdout.flush()
    os._exit(0)  # what is made ahead is not wanted


def seek_main(file: Path, num_rows: int) -> None:
    """How long it takes to have rows from 90 % of a file on."""
    from qlora_fsdp.config.schema import DataConfig
    from qlora_fsdp.data.files.position import Position
    from qlora_fsdp.data.read import find_source
    from qlora_fsdp.data.streams.window_maker import EndlessRows

    write_rows(file, SEEK_ROWS, num_rows // SEEK_ROWS)
    source = find_source(str(file), DataConfig())
    started, cpu = time.monotonic(), time.process_time()
    rows = EndlessRows(source, Position())
    for _ in range(int(0.9 * num_rows) // 1000):
        rows.take(1000)
    position = replace(rows.position)
    expected = rows.take(1000)
    read = {"seconds": time.monotonic() - started, "cpu_seconds": time.process_time() - cpu}
    started, cpu = time.monotonic(), time.process_time()
    assert EndlessRows(source, position).take(1000) == expected
    sought = {"seconds": time.monotonic() - started, "cpu_seconds": time.process_time() - cpu}
    print(json.dumps({"file": file.name, "gib": file.stat().st_size / 2**30, "read": read, "sought": sought}))


def start_ranks(num_ranks: int, job: dict[str, Any]) -> dict[str, Any]:
    """Run a job of so many ranks, and wait for its figures."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    ranks = []
    for rank in range(num_ranks):
        world = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks}
        named = world | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "STREAM_JOB": json.dumps(job)}
        environment = os.environ | {key: str(value) for key, value in named.items()}
        ranks.append(subprocess.Popen([sys.executable, __file__], env=environment, stdout=subprocess.PIPE, text=True))
    outputs = [process.communicate()[0] for process in ranks]
    if any(process.returncode for process in ranks):
        raise SystemExit("A rank failed.")
    found: dict[str, Any] = json.loads(outputs[0].splitlines()[-1])
    print(json.dumps(found), flush=True)
    return found


def main() -> None:
    """Start the jobs one after another; each prints its figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tokenizer")
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--buffer-rows", type=int, default=1_900)
    parser.add_argument("--resume-rows", type=int, default=200_000, help="0: nothing is resumed")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--kind", default="jsonl")
    parser.add_argument("--seek", type=int, default=0)
    parser.add_argument("--out", help="a JSON file of all figures")
    parser.add_argument("settings", nargs="*", help="of data, in JSON, such as num_proc=2")
    arguments = parser.parse_args()
    with TemporaryDirectory() as temporary:
        file = Path(temporary) / f"rows.{arguments.kind}"
        if arguments.seek:
            return seek_main(file, arguments.seek)
        write_rows(file, arguments.rows)
        job = {
            "tokenizer": arguments.tokenizer,
            "settings": {
                key: json.loads(value) for key, _, value in (text.partition("=") for text in arguments.settings)
            },
            **{"file": str(file), "rows": arguments.rows, "buffer_rows": arguments.buffer_rows, "first_step": 0},
        }
        found: dict[str, Any] = {"load_before": os.getloadavg(), "cores": os.cpu_count(), "sharing": [], "resumed": []}
        for num_ranks in arguments.ranks:
            folder = Path(temporary) / str(num_ranks)
            folder.mkdir()
            found["sharing"].append(start_ranks(num_ranks, job | {"folder": str(folder)}))
        assert len({each["digest"] for each in found["sharing"]}) == 1
        if arguments.resume_rows:
            num_times = max(1, arguments.resume_rows // arguments.rows)
            write_rows(file, arguments.rows, num_times)
            folder = Path(temporary) / "resumed"
            folder.mkdir()
            job |= {"folder": str(folder), "rows": arguments.rows * num_times, "buffer_rows": DEFAULT_BUFFER_ROWS}
            found["uninterrupted"] = start_ranks(2, job)
            job["first_step"] = resumed_step(count_steps(job["rows"]))
            for num_ranks in arguments.ranks:
                again = start_ranks(num_ranks, job)
                assert again["digest"] == found["uninterrupted"]["digest_of_last_steps"]
                found["resumed"].append(again)
    found["load_after"] = os.getloadavg()
    if arguments.out:
        Path(arguments.out).write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    rank_main(json.loads(os.environ["STREAM_JOB"])) if "STREAM_JOB" in os.environ else main()
