#!/usr/bin/env python3
r"""Predicted beside measured memory, and speed, of many short runs on one host of GPUs.

    python benchmarks/memory.py --set calibrate --out memory.json

Runs that need fewer GPUs than there are go side by side, and one process makes all runs of its GPUs, so that most of
the time is spent in steps. Weights and data are random (`model.weights=random`). A cap is torch's
`set_per_process_memory_fraction`. Prints a row a run and writes JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

STEPS = 4
FIRST_PORT = 29_700


@dataclass(frozen=True)
class Case:
    """One run.

    Attributes:
        shape: of conf/model, behind `llama3-`.
        length: tokens a sequence.
        policy: of memory.activations.
        cap_gib: most that torch's allocator may take of each GPU.
    """

    shape: str
    num_gpus: int
    length: int
    micro_batch_size: int
    policy: str
    overrides: tuple[str, ...] = ()
    cap_gib: float | None = None

    @property
    def name(self) -> str:
        cap = f" cap {self.cap_gib:g}" if self.cap_gib else ""
        more = " " + " ".join(self.overrides) if self.overrides else ""
        return f"{self.shape} {self.num_gpus} GPU {self.length} x {self.micro_batch_size} {self.policy}{more}{cap}"

    def arguments(self, folder: Path) -> list[str]:
        """Of qlora_fsdp.train."""
        return [
            *("experiment=dry_run", f"model=llama3-{self.shape}", "data.max_rows=64", f"training.max_steps={STEPS}"),
            *(f"training.max_length={self.length}", f"training.micro_batch_size={self.micro_batch_size}"),
            *(f"memory.activations={self.policy}", f"run.folder={folder}", "run.overwrite=true"),
            *(f"data.cache_folder={folder}/cache", *self.overrides),
        ]


OFFLOAD = ("fsdp=offload",)
ACCUMULATE = ("training.global_batch_size=16",)
SETS = {
    # The plan against the measurement: sizes, ranks, lengths, policies, offload.
    "calibrate": [
        Case("8b", 1, 1024, 8, "none"),
        Case("8b", 1, 4096, 4, "full"),
        Case("8b", 1, 8192, 1, "every_k"),
        Case("8b", 1, 8192, 2, "offload"),
        Case("8b", 1, 4096, 1, "full", OFFLOAD),
        Case("8b", 2, 4096, 4, "none"),
        Case("8b", 2, 8192, 1, "full", OFFLOAD),
        Case("8b", 2, 1024, 4, "every_k", ACCUMULATE),
        Case("70b", 2, 1024, 1, "full"),
        Case("70b", 4, 4096, 1, "none"),
        Case("70b", 4, 8192, 1, "full"),
        Case("70b", 4, 4096, 1, "offload", OFFLOAD),
        Case("70b", 4, 1024, 2, "full", ACCUMULATE),
        Case("8b", 4, 4096, 2, "none", ("quant=int8",)),
    ],
    # What must fit.
    "fit": [
        Case("8b", 1, 2048, 1, "full", (), 10),
        Case("70b", 2, 2048, 1, "offload", ("optim=adamw_8bit",), 24),
        Case("70b", 2, 2048, 1, "offload", OFFLOAD, 12),
        Case("70b", 4, 8192, 1, "full", (), 40),
    ],
    # auto against every policy by hand, at four sizes of GPU.
    "auto": [
        Case("8b", 1, 4096, 4, policy, (f"memory.target_gib={target}",))
        for target in (24, 40, 80, 139)
        for policy in ("auto", "none", "every_k", "full", "offload")
    ],
}


def main() -> None:
    """Run a set of cases; print the table and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--set", choices=SETS, default="calibrate")
    parser.add_argument("--only", default="", help="part of the names of the cases to run")
    parser.add_argument("--num-gpus", type=int, default=4, help="of this host")
    parser.add_argument("--out", type=Path, default=Path("memory.json"))
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker is not None:
        run_worker(args.worker)
        return
    cases = [case for case in SETS[args.set] if args.only in case.name and case.num_gpus <= args.num_gpus]
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for num_gpus in sorted({case.num_gpus for case in cases}):
            rows += run_side_by_side([case for case in cases if case.num_gpus == num_gpus], args.num_gpus, Path(folder))
            args.out.write_text(json.dumps(rows, indent=2) + "\n")
    print_table(rows)


def run_side_by_side(cases: list[Case], num_gpus: int, folder: Path) -> list[dict[str, Any]]:
    """Runs of equal size, on as many groups of GPUs as there are; a row a case."""
    size = cases[0].num_gpus
    lanes = min(num_gpus // size, len(cases))
    processes, files = [], []
    for lane in range(lanes):
        work = folder / f"{size}-{lane}"
        work.mkdir()
        (work / "cases.json").write_text(json.dumps([asdict(case) for case in cases[lane::lanes]]))
        files.append(work / "rows.jsonl")
        for rank in range(size):
            environment = os.environ | {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(size),
                "LOCAL_WORLD_SIZE": str(size),
                "MASTER_ADDR": "127.0.0.1",
                "FIRST_PORT": str(FIRST_PORT + 100 * size + 20 * lane),
                "CUDA_VISIBLE_DEVICES": ",".join(str(lane * size + gpu) for gpu in range(size)),
                "OMP_NUM_THREADS": "4",
            }
            with (work / f"rank{rank}.log").open("w") as log:
                command = [sys.executable, str(Path(__file__).resolve()), "--worker", str(work)]
                processes.append(subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT))
    for process in processes:
        process.wait()
    rows = [json.loads(line) for file in files if file.exists() for line in file.read_text().splitlines()]
    done = {row["name"] for row in rows}
    for lane, file in enumerate(files):
        for case in cases[lane::lanes]:
            if case.name not in done:
                rows.append({"name": case.name, "failed": (file.parent / "rank0.log").read_text()[-600:]})
    for row in rows:
        print(json.dumps({key: row.get(key) for key in ("name", "seconds", "failed")}), flush=True)
    return rows


def run_worker(folder: Path) -> None:
    """One rank: all cases of its lane, in one process."""
    import torch

    from qlora_fsdp.config.compose import load_config
    from qlora_fsdp.config.world import World
    from qlora_fsdp.errors import UserError
    from qlora_fsdp.run import run

    rank = int(os.environ["RANK"])
    for index, values in enumerate(json.loads((folder / "cases.json").read_text())):
        case, started = Case(**values | {"overrides": tuple(values["overrides"])}), time.time()
        os.environ["MASTER_PORT"] = str(int(os.environ["FIRST_PORT"]) + index)
        row: dict[str, Any] = {"name": case.name} | asdict(case)
        if torch.cuda.is_available():
            device = int(os.environ["LOCAL_RANK"])
            row["left_gib"] = torch.cuda.memory_allocated(device) / 2**30  # of the case before: should be 0
            torch.cuda.reset_peak_memory_stats(device)
            total = torch.cuda.mem_get_info(device)[1]
            torch.cuda.set_per_process_memory_fraction((case.cap_gib or 1e9) * 2**30 / total if case.cap_gib else 1.0)
        try:
            row |= run(load_config(case.arguments(folder / "run")), World.from_environment(os.environ))
        except UserError as error:
            row["failed"] = str(error)
            with contextlib.suppress(OSError, ValueError):
                row["memory"] = json.loads((folder / "run" / "summary.json").read_text()).get("memory")
        row["seconds"] = round(time.time() - started, 1)
        if rank == 0:
            with (folder / "rows.jsonl").open("a") as rows:
                rows.write(json.dumps(row) + "\n")
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def print_table(rows: list[dict[str, Any]]) -> None:
    """A line a case: GiB of tensors predicted/measured in each phase, what else there was, and speed."""
    width = max(len(row["name"]) for row in rows)
    columns = ("load", "forward", "backward", "error", "reserved", "outside", "host", "tokens/s/GPU")
    print(" " * width + "".join(f"{column:>16}" for column in columns))
    for row in rows:
        memory = row.get("memory") or {}
        plan, found = memory.get("predicted"), memory.get("measured") or {}
        if plan is None or "tensors_gib" not in found:
            print(f"{row['name']:<{width}}  {str(row.get('failed'))[-300:]}")
            continue
        tensors = found["tensors_gib"]
        cells = [
            f"{plan['tensors_gib'][p]:.2f}/{tensors.get(p, float('nan')):.2f}" for p in ("load", "forward", "backward")
        ]
        errors = [plan["tensors_gib"][p] - tensors[p] for p in ("forward", "backward") if p in tensors]
        worst = max(errors, key=abs, default=float("nan"))
        reserved = max(found["reserved_gib"].values())
        tensors_peak = max(tensors.values())
        host = f"{sum(plan['host_gib_a_rank'].values()):.1f}/{found['host_gib']:.1f}"
        cells += [f"{worst:+.2f}", f"{reserved:.2f} ({reserved - tensors_peak:+.2f})"]
        cells += [f"{plan['libraries_gib']:.2f}/{found['outside_gib']:.2f}", host]
        cells += [f"{row.get('tokens_per_second_per_gpu') or float('nan'):,.0f}"]
        print(f"{row['name']:<{width}}" + "".join(f"{cell:>16}" for cell in cells) + ("  FAILED" * ("failed" in row)))


if __name__ == "__main__":
    main()
