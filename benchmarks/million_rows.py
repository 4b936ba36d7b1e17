"""Preparing many rows apart: cold, again, broken off at half and gone on with; disk, and the memory of a rank.

usage: python benchmarks/million_rows.py TOKENIZER_FOLDER WORK_FOLDER [NUM_ROWS [NUM_TRL_ROWS]]

Rows are made here: chats of a question and an answer, in words of a page of the docs. Without NUM_ROWS there are a
million. With NUM_TRL_ROWS, TRL's SFTTrainer prepares so many of them too, in one process. Times are of the CPU, all
processes together, because hosts are busy with other work; the clock's are beside them.
"""

from __future__ import annotations

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

import psutil

ROOT = Path(__file__).parents[1]
WORDS = (ROOT / "docs" / "data.md").read_text().split()
TEMPLATE = ROOT / "src" / "qlora_fsdp" / "data" / "templates" / "chatml.jinja"
MIB = 2**20
IN_A_RANK = """
import json, sys, psutil
from qlora_fsdp.config.compose import load_config
from qlora_fsdp.training.start import load_run_tokenizer
from tests.helpers.one_process import one_process
from qlora_fsdp.data.run_data import prepare_data
import numpy as np
config = load_config(sys.argv[1:])
tokenizer = load_run_tokenizer(config)
process = psutil.Process()
memory, cpu = process.memory_full_info().uss, sum(process.cpu_times()[:2])
train = prepare_data(config, tokenizer, one_process(), len(tokenizer)).train
opened = process.memory_full_info().uss, sum(process.cpu_times()[:2])
for sequence in np.random.default_rng(0).integers(len(train), size=1000):
    train.rows_of(int(sequence))
print(json.dumps({"rows": len(train.row_ids), "tokens": int(train.lengths.sum()), "MiB": (opened[0] - memory) / 2**20,
                  "CPU s": opened[1] - cpu}))
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
print(json.dumps({"CPU s": sum(psutil.Process().cpu_times()[:2]) - before}))
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


def make_rows(file: Path, num_rows: int) -> None:
    """Writes chats of 20 to 60 words."""
    rng = random.Random(0)
    with file.open("w", encoding="utf-8") as out:
        for number in range(num_rows):
            question = f"{number}: {' '.join(rng.choices(WORDS, k=10))}"
            answer = " ".join(rng.choices(WORDS, k=rng.randint(10, 50)))
            turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
            out.write(json.dumps({"messages": turns}) + "\n")


def size_mib(folder: Path) -> float:
    """What files in a folder take, while others make and remove them."""
    total = 0
    for path in folder.rglob("*"):
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


def main(tokenizer: str, folder: Path, num_rows: int = 1_000_000, num_trl_rows: int = 0) -> None:
    """Print what each start takes."""
    folder.mkdir(parents=True, exist_ok=True)
    file, cache = folder / f"rows-{num_rows}.jsonl", folder / "cache"
    if not file.exists():
        make_rows(file, num_rows)
    shutil.rmtree(cache, ignore_errors=True)
    cache.mkdir()
    one = folder / "one.jsonl"
    make_rows(one, 1)
    settings = [f"model.tokenizer_path={tokenizer}", "data.chat_template=chatml", f"data.cache_folder={cache}"]
    prepare = [sys.executable, "-m", "qlora_fsdp", "prepare", *settings]
    workers = [f"data.num_proc={len(os.sched_getaffinity(0))}"]

    def show(name: str, found: Measured, more: str = "") -> None:
        about = f"CPU {found.cpu_seconds - imports.cpu_seconds:.1f} s, clock {found.seconds - imports.seconds:.1f} s"
        print(f"{name}: {about}{more}", flush=True)

    imports = measure([*prepare, f"data.path={one}"], cache)
    print(f"{num_rows:,} rows, {file.stat().st_size / MIB:.0f} MiB; loads {os.getloadavg()}", flush=True)
    print(f"one row: CPU {imports.cpu_seconds:.1f} s, clock {imports.seconds:.1f} s, which the others are without")
    cold = measure([*prepare, f"data.path={file}", *workers], cache)
    show("cold", cold, f", cache at most {cold.peak_mib:.0f} MiB, at the end {size_mib(cache):.0f} MiB")
    show("again", measure([*prepare, f"data.path={file}"], cache))
    show("again, another length", measure([*prepare, f"data.path={file}", "training.max_length=64"], cache))
    rank = [sys.executable, "-c", IN_A_RANK, "model=tiny", *settings, f"data.path={file}", "training.max_steps=1"]
    print(f"a rank that opens it: {measure(rank, cache).output}", flush=True)
    shutil.rmtree(cache)
    cache.mkdir()
    stopped = measure([*prepare, f"data.path={file}", *workers], cache, stop_at=0.5)
    print(f"broken off at half by Ctrl-C: clock {stopped.seconds - imports.seconds:.1f} s", flush=True)
    print(f"kept: {share_done(cache):.1%} of the shards, {size_mib(cache):.0f} MiB", flush=True)
    show("gone on", measure([*prepare, f"data.path={file}", *workers], cache))
    if num_trl_rows:
        few = folder / f"rows-{num_trl_rows}.jsonl"
        make_rows(few, num_trl_rows)
        out = folder / "trl"
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir()
        found = measure([sys.executable, "-c", WITH_TRL, str(few), tokenizer, str(TEMPLATE), str(out)], out)
        print(f"TRL, {num_trl_rows:,} rows: {found.output}, {size_mib(out):.0f} MiB", flush=True)
        ours = measure([*rank[:-2], f"data.path={few}", "training.max_steps=1", "data.num_proc=1"], cache)
        print(f"the same rows here, in one process: {ours.output}")
    print(f"loads {os.getloadavg()}, {psutil.cpu_count()} cores")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), *map(int, sys.argv[3:5]))
