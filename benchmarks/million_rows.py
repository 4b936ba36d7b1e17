"""Preparing many rows apart: cold, again, broken off at half and gone on with; disk, and the memory of a rank.

usage: python benchmarks/million_rows.py TOKENIZER_FOLDER WORK_FOLDER [--rows 1000000] [--trl-rows 0]
                                         [--answer-words 10 50] [--out FILE]

Rows are made here: chats of a question and an answer, in words of a page of the docs. With --trl-rows, TRL's SFTTrainer
prepares so many of them too, in one process. CPU seconds are of all processes together; the clock's are beside them.
What a start takes for one row, mostly imports, is taken off both.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
WORDS = (ROOT / "docs" / "data.md").read_text().split()
TEMPLATE = ROOT / "src" / "qlora_fsdp" / "data" / "templates" / "chatml.jinja"
MIB = 2**20
IN_A_RANK = """
import json, sys, time, psutil
from qlora_fsdp.config.reading.compose import load_config
from qlora_fsdp.config.specs import DataSpec, StepSpec
from qlora_fsdp.data.split import split_batches
from qlora_fsdp.training.batches import GlobalBatches
from qlora_fsdp.model.run_tokenizer import load_run_tokenizer
from tests.helpers.one_process import one_process
from qlora_fsdp.data.run_data import prepare_data
import numpy as np
config = load_config(sys.argv[1:])
tokenizer = load_run_tokenizer(config)
process = psutil.Process()
memory, cpu, started = process.memory_full_info().uss, sum(process.cpu_times()[:2]), time.perf_counter()
train = prepare_data(DataSpec.of(config), tokenizer, one_process(), len(tokenizer)).train
cpu = sum(process.cpu_times()[:2]) - cpu
steps = StepSpec.of(config.training, config.optim, 1, micro_batch_size=config.training.micro_batch_size)
split = split_batches(steps, 1, len(train))
next(GlobalBatches(train, split, seed=0, rank=0).micro_batches(split.num_steps // 2))
seconds = time.perf_counter() - started
for sequence in np.random.default_rng(0).integers(len(train), size=1000):
    train.rows_of(int(sequence))
after = process.memory_full_info()
print(json.dumps({"rows": len(train.row_ids), "tokens": int(train.lengths.sum()), "cpu_seconds_to_open": cpu,
                  "seconds_to_the_batch_in_the_middle": seconds, "rss_mib": after.rss / 2**20,
                  "own_mib_after_1000_sequences": (after.uss - memory) / 2**20}))
"""
WITH_TRL = """
import json, sys, psutil
from datasets import Dataset, load_dataset
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
from trl import SFTConfig, SFTTrainer
file, folder, template, out = sys.argv[1:]
tokenizer = AutoTokenizer.from_pretrained(folder)
tokenizer.chat_template = open(template).read()
rows = load_dataset("json", data_files=file, split="train", cache_dir=out)
shape = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **shape))
before = sum(psutil.Process().cpu_times()[:2])
settings = SFTConfig(out, max_length=2048, report_to=[], use_cpu=True)
SFTTrainer(model, args=settings, train_dataset=rows, processing_class=tokenizer)
print(json.dumps({"cpu_seconds": sum(psutil.Process().cpu_times()[:2]) - before}))
"""


@dataclass
class Measured:
    """What a command took.

    Attributes:
        seconds: by the clock.
        cpu_seconds: of all its processes.
        peak_mib: of the folder of the cache.
        output: its last line.
    """

    seconds: float
    cpu_seconds: float
    peak_mib: float
    output: str


def make_rows(file: Path, num_rows: int, answer_words: tuple[int, int]) -> None:
    """Writes chats of a question of ten words and an answer of at least and at most so many."""
    rng = random.Random(0)
    with file.open("w", encoding="utf-8") as out:
        for number in range(num_rows):
            question = f"{number}: {' '.join(rng.choices(WORDS, k=10))}"
            answer = " ".join(rng.choices(WORDS, k=rng.randint(*answer_words)))
            turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
            out.write(json.dumps({"messages": turns}) + "\n")


def size_mib(folder: Path) -> float:
    """What a file, or the files in a folder take, while others make and remove them."""
    total = 0
    for path in (folder, *folder.rglob("*")):
        try:
            total += path.stat().st_size
        except FileNotFoundError:
            continue
    return total / MIB


def measure(command: list[str], cache: Path, stop_at: float | None = None) -> Measured:
    """Runs a command; with `stop_at`, Ctrl-C comes when that share of the rows is tokenized."""
    before, started = os.times(), time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    peak, done = 0.0, threading.Event()

    def watch() -> None:
        nonlocal peak
        is_sent = stop_at is None
        while not done.wait(0.5):
            peak = max(peak, size_mib(cache))
            if not is_sent and share_done(cache) >= (stop_at or 0):
                os.killpg(process.pid, signal.SIGINT)
                is_sent = True

    watcher = threading.Thread(target=watch)
    watcher.start()
    output, _ = process.communicate()
    done.set()
    watcher.join()
    after = os.times()
    used = after.children_user + after.children_system - before.children_user - before.children_system
    return Measured(time.perf_counter() - started, used, peak, output.strip().splitlines()[-1] if output else "")


def share_done(cache: Path) -> float:
    """Of all shards, those that are whole."""
    import numpy as np

    for work in cache.glob(".*.parts"):
        if (work / "plan.json").exists():
            return len(list(work.glob("[0-9]*.arrow"))) / (len(np.load(work / "bounds.npy")) - 1)
    return 0.0


def measure_starts(
    tokenizer: str, folder: Path, num_rows: int, num_trl_rows: int, answer_words: tuple[int, int]
) -> dict[str, Any]:
    """What each start takes; printed as it is found."""
    folder.mkdir(parents=True, exist_ok=True)
    file, one, cache = folder / f"rows-{num_rows}.jsonl", folder / "one.jsonl", folder / "cache"
    make_rows(file, num_rows, answer_words)
    make_rows(one, 1, answer_words)
    found: dict[str, Any] = {"rows": num_rows, "jsonl_mib": size_mib(file), "cores": len(os.sched_getaffinity(0))}

    def note(name: str, figures: Any) -> None:
        found[name] = figures
        print(f"{name}: {json.dumps(figures)}", flush=True)

    def empty() -> None:
        shutil.rmtree(cache, ignore_errors=True)
        cache.mkdir()

    settings = [f"model.tokenizer_path={tokenizer}", "data.chat_template=chatml", f"data.cache_folder={cache}"]
    prepare = [sys.executable, "-m", "qlora_fsdp", "prepare", *settings]
    own = [*prepare, f"data.path={file}"]

    def start(name: str, *more: str, stop_at: float | None = None) -> None:
        took = measure([*own, f"data.num_proc={found['cores']}", *more], cache, stop_at)
        figures = {
            "cpu_seconds": took.cpu_seconds - imports.cpu_seconds,
            "seconds": took.seconds - imports.seconds,
            "peak_cache_mib": took.peak_mib,
            "cache_mib": size_mib(cache),
        }
        note(name, figures if stop_at is None else figures | {"shards_kept": share_done(cache)})

    empty()
    note("loads_before", os.getloadavg())
    imports = measure([*prepare, f"data.path={one}"], cache)
    note("one_row", {"cpu_seconds": imports.cpu_seconds, "seconds": imports.seconds})
    start("cold")
    start("again")
    start("again_with_another_length", "training.max_length=64")
    rank = [sys.executable, "-c", IN_A_RANK, "model=tiny", *settings]
    note("a_rank", json.loads(measure([*rank, f"data.path={file}"], cache).output))
    empty()
    start("broken_off_at_half", stop_at=0.5)
    start("gone_on_with")
    if num_trl_rows:
        few, out = folder / f"rows-{num_trl_rows}.jsonl", folder / "trl"
        make_rows(few, num_trl_rows, answer_words)
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir()
        trl = measure([sys.executable, "-c", WITH_TRL, str(few), tokenizer, str(TEMPLATE), str(out)], out)
        note("trl", json.loads(trl.output) | {"rows": num_trl_rows, "mib": size_mib(out)})
        note("beside_trl", json.loads(measure([*rank, f"data.path={few}", "data.num_proc=1"], cache).output))
    note("loads_after", os.getloadavg())
    return found


def main() -> None:
    """Read the command line, measure, and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tokenizer")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--trl-rows", type=int, default=0)
    parser.add_argument("--answer-words", type=int, nargs=2, default=(10, 50), metavar=("LEAST", "MOST"))
    parser.add_argument("--out", type=Path, help="a JSON file of all figures")
    arguments = parser.parse_args()
    words = (arguments.answer_words[0], arguments.answer_words[1])
    found = measure_starts(arguments.tokenizer, arguments.folder, arguments.rows, arguments.trl_rows, words)
    if arguments.out:
        arguments.out.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
