#!/usr/bin/env python3
r"""Products of few rows with quantized weights: which tiles are right, and which are fastest, beside what is there.

    python benchmarks/products.py --out products.json --seconds 330

Each weight lies in memory several times, and each launch takes another copy, so that none is in the cache. A figure is
microseconds of one launch in a CUDA graph of many. All tiles are compiled first, by as many processes as there are
cores. Then a process of its own tries them, which is started again where one of them has broken it: the tiles of a
weight and a number of rows are checked against float64 and timed once, and the best of them again, more carefully.
`--dry-run` runs a few tiles of small weights in Triton's interpreter, on a CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

if "--dry-run" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported

import torch
from torch import Tensor

from qlora_fsdp.layers.kernels import triton_products
from qlora_fsdp.layers.kernels.triton_products import Tile, WeightCodes, products, scaled, split_even_odd
from qlora_fsdp.layers.quantized.format import Format, code_book, dynamic_map

COLD_BYTES = 160e6  # of codes that are read before the same ones come again; an H100's cache has 50 MB
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
TUNED_ROWS = (16, 32, 64, 128, 256)  # all tiles are tried with; the others take the best ones of the next larger
NUM_BEST = 8
WRONG = 6e-3  # of the norm: bfloat16 outputs alone are 1.7e-3 away


class Weight(NamedTuple):
    """A product to measure: of one matrix [outputs, width], or of as many experts."""

    name: str
    outputs: int
    width: int
    quant_type: str = "nf4"
    double_quant: bool = True
    blocksize: int = 64
    experts: int = 0
    top_k: int = 8


WEIGHTS = [
    Weight("8b gate+up", 28672, 4096),
    Weight("8b down", 4096, 14336),
    Weight("8b qkv", 6144, 4096),
    Weight("8b o", 4096, 4096),
    Weight("qwen3-30b gate_up", 1536, 2048, experts=128),
    Weight("qwen3-30b down", 2048, 768, experts=128),
    Weight("8b gate+up plain", 28672, 4096, double_quant=False),
    Weight("8b o plain", 4096, 4096, double_quant=False),
    Weight("8b gate+up int8", 28672, 4096, "int8", False),
    Weight("8b o int8", 4096, 4096, "int8", False),
    Weight("70b gate+up", 57344, 8192),
    Weight("70b down", 8192, 28672),
    Weight("70b qkv", 10240, 8192),
    Weight("70b o", 8192, 8192),
    Weight("gpt-oss-20b as rows", 5760, 2880, experts=32, top_k=4),
]
DRY_WEIGHTS = [
    Weight("small", 96, 256),
    Weight("small int8", 96, 256, "int8", False),
    Weight("small experts", 48, 256, experts=4, top_k=2),
]


def tiles(rows: int, is_of_experts: bool) -> Iterator[Tile]:
    """All tiles to try for a number of rows, without splits. Each of many experts has a few of the rows."""
    by_rows = {16: [16], 32: [32], 64: [64], 128: [64, 128], 256: [64, 128]}[rows]
    if is_of_experts:
        by_rows = [size for size in (16, 32, 64, 128) if size <= rows]
    elif rows == 256:  # a program has no registers for sums of blocks: it multiplies the weight with its scales
        yield Tile(64, 256, 1, 1, 4, 3, scales_weight=True)
        yield Tile(128, 256, 1, 1, 8, 3, scales_weight=True)
    for tile_rows in by_rows:
        shapes = [(64, 4), (128, 8)]
        if tile_rows <= 32:
            shapes += [(128, 4), (32, 2)]
        if tile_rows <= 16:
            shapes.append((32, 4))
        if tile_rows >= 64:
            shapes.append((64, 8))
        for outputs, num_warps in shapes:
            for step, num_stages in ((1, 5), (2, 3), (2, 4), (4, 2), (4, 3)):
                if step * num_stages * max(tile_rows, 32) > 1100:
                    continue  # shared memory
                yield Tile(outputs, tile_rows, step, 1, num_warps, num_stages)


def fits(tile: Tile, weight: Weight) -> bool:
    """Whether the tile's steps divide the weight's rows."""
    sub = min(64, weight.blocksize)
    return weight.width % (sub * tile.step) == 0


def splits(tile: Tile, weight: Weight, rows: int) -> list[int]:
    """In how many parts sums may be worth splitting."""
    if weight.experts:
        return [1]
    programs = -(-weight.outputs // tile.outputs) * -(-rows // tile.rows)
    num_steps = weight.width // (64 * tile.step)
    return [split for split in (1, 2, 3, 4, 8) if (split == 1 or programs * split <= 1000) and split * 2 <= num_steps]


class Bench:
    """The copies of one weight, and what computes with them.

    Args:
        weight: which.
        device: where.
        copies: how many; None: as many as the cache does not hold.
    """

    def __init__(self, weight: Weight, device: torch.device, copies: int | None = None, bias: bool = False) -> None:
        self.weight, self.device = weight, device
        self.format = Format(weight.quant_type, weight.double_quant, weight.blocksize)  # type: ignore[arg-type]
        num_rows = weight.outputs * max(1, weight.experts)
        self.num_rows = num_rows
        self.num_bytes = self.format.num_bytes(num_rows, weight.width)
        self.copies = copies or max(2, int(COLD_BYTES // self.num_bytes) + 1)
        generator = torch.Generator(device).manual_seed(0)
        codes, absmax = [], []
        for start in range(0, num_rows, 8192):
            count = min(8192, num_rows - start)
            dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
            some = torch.randn(count, weight.width, device=device, generator=generator).mul_(0.02).to(dtype)
            found = self.format.quantize_rows(some)
            codes.append(found[0])
            absmax.append(found[1])
        parts = {"codes": torch.cat(codes), "scales": torch.cat(absmax)}
        if weight.double_quant:
            parts["scales"], parts["nested_scales"] = self.format.quantize_scales(parts["scales"])
        self.parts = [{name: part.clone() for name, part in parts.items()} for _ in range(self.copies)]
        self.bias = None
        if bias:
            self.bias = torch.randn(num_rows, device=device, generator=generator).to(self.dtype)
        self.counts = torch.zeros(65536, dtype=torch.int32, device=device)
        self.values = tuple(code_book(weight.quant_type, torch.device("cpu")).tolist()) if self.format.is_4bit else ()
        book = torch.tensor(scaled(self.values, self.dtype) if self.values else [0.0] * 16)
        self.books = book.float().to(device), dynamic_map(device)

    @property
    def dtype(self) -> torch.dtype:
        """In which rows are; Triton's interpreter has no products of bfloat16."""
        return torch.bfloat16 if self.device.type == "cuda" else torch.float32

    def codes(self, number: int) -> WeightCodes:
        """A copy, as the kernel reads it."""
        parts = self.parts[number % self.copies]
        if not self.format.is_4bit:
            return WeightCodes(parts["codes"].view(torch.int8), parts["scales"], None, self.bias)
        scales = parts["scales"]
        if self.format.double_quant:
            scales = scales.view(torch.uint8)
        return WeightCodes(parts["codes"].view(torch.uint8), scales, parts.get("nested_scales"), self.bias)

    def rows(self, number: int) -> tuple[Tensor, Tensor | None]:
        """Random rows, and where each expert's end."""
        generator = torch.Generator(self.device).manual_seed(number)
        num_rows = number * self.weight.top_k if self.weight.experts else number
        x = torch.randn(num_rows, self.weight.width, device=self.device, generator=generator).to(self.dtype)
        if not self.weight.experts:
            return x, None
        expert = torch.randint(self.weight.experts, (num_rows,), device=self.device, generator=generator).sort()[0]
        experts = torch.arange(self.weight.experts, device=self.device)
        return x, torch.searchsorted(expert, experts, right=True, out_int32=True)

    def exact(self, x: Tensor, ends: Tensor | None) -> Tensor:
        """The product in float64, of weights in float32."""
        found = torch.empty(len(x), self.weight.outputs, dtype=torch.float64, device=self.device)
        whole = self.format.dequantize(self.parts[0], self.num_rows, self.weight.width, torch.float32)
        if ends is None:
            for start in range(0, self.num_rows, 4096):
                found[:, start : start + 4096] = x.double() @ whole[start : start + 4096].double().t()
            return found if self.bias is None else found + self.bias.double()
        first = 0
        for expert, (end, some) in enumerate(
            zip(ends.tolist(), whole.view(self.weight.experts, -1, self.weight.width), strict=True)
        ):
            found[first:end] = x[first:end].double() @ some.double().t()
            if self.bias is not None:
                found[first:end] += self.bias.view(self.weight.experts, -1)[expert].double()
            first = end
        return found

    def ours(self, x: Tensor, ends: Tensor | None, tile: Tile, number: int) -> Tensor:
        """With the kernel; `x` has its columns split."""
        (y,) = products(
            x,
            [self.codes(number)],
            self.values,
            self.books,
            self.weight.blocksize,
            tile,
            self.counts,
            ends=ends,
            interprets=self.device.type == "cpu",
        )
        return y

    def time(
        self,
        x: Tensor,
        ends: Tensor | None,
        tile: Tile,
        copies: int,
        replays: int,
        limit: float = 1e9,
        splits: bool = False,
    ) -> float:
        """Microseconds of a product with the kernel; `splits`: its columns are split each time."""

        def compute(number: int) -> Tensor:
            return self.ours(self.split(x) if splits else x, ends, tile, number)

        return microseconds(compute, copies, replays, limit)

    def split(self, x: Tensor) -> Tensor:
        """As the kernel takes rows."""
        return split_even_odd(x) if self.format.is_4bit else x

    def others(self, x: Tensor, ends: Tensor | None) -> dict[str, Callable[[int], Any]]:
        """What the kernel is compared with."""
        weight = self.weight

        def dequantized(number: int) -> Tensor:
            return self.format.dequantize(self.parts[number % self.copies], self.num_rows, weight.width, self.dtype)

        held = dequantized(0)
        num_held = max(1, min(6, int(COLD_BYTES // held.nbytes) + 1))
        all_held = [held.clone() for _ in range(num_held)]
        if weight.experts:
            shape = weight.experts, weight.outputs, weight.width
            grouped = torch.nn.functional.grouped_mm
            return {
                "bf16": lambda i: grouped(x, all_held[i % num_held].view(shape).transpose(1, 2), offs=ends),
                "today": lambda i: grouped(x, dequantized(i).view(shape).transpose(1, 2), offs=ends),
            }
        found: dict[str, Callable[[int], Any]] = {
            "bf16": lambda i: x @ all_held[i % num_held].t(),
            "today": lambda i: x @ dequantized(i).t(),
        }
        if self.format.is_4bit and len(x) <= 64:
            found["gemm_4bit"] = lambda i: self.bitsandbytes(x, i)
        return found

    def bitsandbytes(self, x: Tensor, number: int) -> Tensor:
        """bitsandbytes' own product with codes."""
        parts = self.parts[number % self.copies]
        scales, nested = parts["scales"], {}
        if self.format.double_quant:
            nested = {
                "absmax_8bit": scales.view(torch.uint8).view(-1),
                "absmax_code": self.books[1],
                "absmax_offset": parts["nested_scales"][-1],
            }
            scales = parts["nested_scales"][:-1]
        shape = self.weight.outputs, self.weight.width
        y: Tensor = torch.ops.bitsandbytes.gemm_4bit.default(
            x,
            parts["codes"].view(torch.uint8).view(-1, 1),
            shape,
            scales.view(-1),
            self.weight.blocksize,
            self.weight.quant_type,
            **nested,
        )
        return y


def microseconds(compute: Callable[[int], Any], copies: int, replays: int, limit: float = 1e9) -> float:
    """Of one call, in a CUDA graph of as many as there are copies; the best of several replays."""
    if not torch.cuda.is_available():
        started = time.perf_counter()
        compute(0)
        return (time.perf_counter() - started) * 1e6
    compute(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for number in range(copies):
            compute(number)
    best = 1e9
    graph.replay()
    for _ in range(replays):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        best = min(best, start.elapsed_time(end) * 1000 / copies)
        if best > limit:
            break
    graph.reset()
    return best


def error(y: Tensor, exact: Tensor) -> float:
    """The distance, as a part of the norm; infinite where there is a NaN."""
    found = float((y.double() - exact).norm() / exact.norm())
    return found if found == found else float("inf")


# --- compiling ahead ----------------------------------------------------------------------------------------------


class Warmed:
    """Stands for the kernel, and compiles it in place of a launch."""

    def __init__(self, function: Any) -> None:
        self.function = function

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def warm(*args: Any, **options: Any) -> None:
            self.function.warmup(*args, grid=grid, **options)

        return warm


def compile_tile(weight: Weight, tile: Tile) -> str:
    """Compile one tile, in a process of the pool. Returns what went wrong."""
    try:
        is_check = weight.name == "check"
        if not isinstance(triton_products._products_kernel, Warmed):
            triton_products._products_kernel = Warmed(triton_products._products_kernel.function)  # type: ignore
        small = weight
        if not is_check:
            experts = min(2, weight.experts)
            small = weight._replace(name="", outputs=256, width=weight.width % 1024 + 1024, experts=experts)
        bench = _benches.get(small)
        if bench is None:
            bench = _benches[small] = Bench(small, torch.device("cuda"), 1, bias=is_check)
        x, ends = bench.rows(2 * tile.rows)
        bench.ours(x, ends, tile, 0)
    except Exception as problem:
        return f"{type(problem).__name__}: {str(problem)[-200:]}"
    return ""


_benches: dict[Weight, Bench] = {}


def compile_all(weights: list[Weight]) -> list[str]:
    """Compile every tile of every kind of weight, with all cores."""
    wanted: dict[tuple[Any, ...], tuple[Weight, Tile]] = {}
    for weight in weights:
        kind: tuple[Any, ...] = weight.quant_type, weight.double_quant, weight.blocksize, bool(weight.experts)
        kind = (*kind, weight.width % 256 == 0)
        for rows in TUNED_ROWS:
            for tile in tiles(rows, weight.experts > 0):
                if not fits(tile, weight):
                    continue
                for split in (1,) if weight.experts else (1, 2):
                    wanted.setdefault((*kind, tile, split), (weight, tile._replace(split=split)))
    for weight, tile in checks():
        has_whole_rows = weight.outputs % 16 == 0
        kind = "check", weight.quant_type, weight.double_quant, weight.blocksize, bool(weight.experts), has_whole_rows
        wanted.setdefault((*kind, weight.width % 256 == 0, tile, tile.split > 1), (weight, tile))
    problems = []
    workers = max(1, min(24, os.cpu_count() or 1))
    started = time.perf_counter()
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        jobs = {pool.submit(compile_tile, weight, tile): (weight, tile) for weight, tile in wanted.values()}
        try:
            for job in as_completed(jobs, timeout=150):
                problem = job.result()
                if problem:
                    weight, tile = jobs[job]
                    problems.append(f"{weight.quant_type} {tuple(tile)}: {problem}")
        except Exception as problem:  # what is missing is compiled when it is tried
            problems.append(f"the processes ended: {type(problem).__name__}: {problem}")
            pool.shutdown(wait=False, cancel_futures=True)
    print(
        f"{len(wanted)} kernels in {time.perf_counter() - started:.0f} s, {len(problems)} can't be compiled", flush=True
    )
    return problems


# --- trying -------------------------------------------------------------------------------------------------------


class Results:
    """Writes a line of JSON for each thing that is found."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def add(self, kind: str, **values: Any) -> None:
        """Append a line, which survives this process."""
        with self.path.open("a") as file:
            file.write(json.dumps({"kind": kind, **values}) + "\n")

    def read(self) -> list[dict[str, Any]]:
        """All lines so far."""
        return [json.loads(line) for line in self.path.read_text().splitlines()] if self.path.exists() else []


def tune(weight: Weight, results: Results, device: torch.device, deadline: float, skipped: set[Any]) -> None:
    """All tiles for the numbers of rows that are tuned, and the best of them for the others."""
    bench = Bench(weight, device)
    best: list[Tile] = []
    rows_to_try = sorted(ROWS, reverse=True)
    if device.type == "cpu":
        rows_to_try = [16, 2]
    for rows in rows_to_try:
        if time.time() > deadline:
            results.add("skipped", weight=weight.name, rows=rows)
            continue
        x, ends = bench.rows(rows)
        split_x = bench.split(x)
        exact = bench.exact(x, ends)
        if rows in TUNED_ROWS:
            found = [tile for tile in tiles(rows, weight.experts > 0) if fits(tile, weight)]
            candidates = [tile._replace(split=split) for tile in found for split in splits(tile, weight, rows)]
            if device.type == "cpu":
                candidates = candidates[:: len(candidates) // 3]
        else:
            candidates = best
        timed: list[tuple[float, Tile, float]] = []
        fastest = 1e9
        for tile in candidates:
            key = weight.name, rows, tuple(tile)
            if key in skipped or time.time() > deadline:
                continue
            results.add("begin", key=[weight.name, rows, tile])
            try:
                y = bench.ours(split_x, ends, tile, 0)
                wrong = error(y, exact)
                if not wrong < WRONG:
                    results.add("wrong", weight=weight.name, rows=rows, tile=tile, error=wrong)
                    continue
                taken = bench.time(split_x, ends, tile, min(bench.copies, 12), 2, limit=1.5 * fastest)
            except Exception as problem:
                results.add("failed", weight=weight.name, rows=rows, tile=tile, problem=str(problem)[-200:])
                if "illegal" in str(problem) or "CUDA error" in str(problem):
                    raise
                continue
            fastest = min(fastest, taken)
            timed.append((taken, tile, wrong))
            results.add("tried", weight=weight.name, rows=rows, tile=tile, us=round(taken, 2))
        timed.sort(key=lambda one: one[0])
        again = []
        for _, tile, wrong in timed[:NUM_BEST]:
            taken = bench.time(split_x, ends, tile, bench.copies, 12)
            again.append((taken, tile, wrong))
        if not again:
            continue
        again.sort(key=lambda one: one[0])
        best = [tile for _, tile, _ in again]
        taken, tile, wrong = again[0]
        with_split = bench.time(x, ends, tile, bench.copies, 12, splits=True)
        row: dict[str, Any] = {"ours": taken, "ours+split": with_split}
        for name, compute in bench.others(x, ends).items():
            try:
                row[name] = microseconds(compute, min(8, bench.copies), 8)
                if name != "bf16":
                    row[f"{name} error"] = error(compute(0), exact)
            except Exception as problem:
                results.add("failed", weight=weight.name, rows=rows, tile=name, problem=str(problem)[-200:])
        read_bytes = bench.num_bytes
        if ends is not None:
            has_rows = torch.diff(ends, prepend=ends.new_zeros(1)) > 0
            read_bytes = int(bench.num_bytes * has_rows.sum() / len(ends))
        row["gb_s"] = read_bytes / taken / 1000
        rounded = {name: round(value, 6 if "error" in name else 2) for name, value in row.items()}
        top = [(round(taken, 2), tile) for taken, tile, _ in again]
        results.add("best", weight=weight.name, rows=rows, tile=tile, error=round(wrong, 6), top=top, **rounded)
        print(json.dumps({"weight": weight.name, "rows": rows, "tile": tuple(tile), **rounded}), flush=True)


def checks() -> Iterator[tuple[Weight, Tile]]:
    """Every format, block and tile shape, with ragged widths."""
    chosen = [
        Tile(64, 16, 1, 2, 4, 3),
        Tile(64, 16, 4, 3, 4, 3),
        Tile(32, 16, 4, 1, 2, 2),
        Tile(128, 16, 2, 2, 8, 3),
        Tile(64, 32, 2, 1, 4, 3),
        Tile(64, 64, 1, 2, 4, 3),
        Tile(128, 64, 1, 1, 8, 3),
        Tile(128, 128, 1, 2, 8, 3),
    ]
    formats = [("nf4", False, 64), ("nf4", True, 64), ("fp4", True, 64), ("fp4", False, 128), ("nf4", True, 128)]
    formats += [("nf4", False, 256), ("nf4", True, 512), ("nf4", False, 32), ("int8", False, 64)]
    for quant_type, double_quant, blocksize in formats:
        for outputs, width, experts in ((1000, 1536, 0), (200, 512, 8), (72, 2880 if blocksize <= 64 else 2560, 0)):
            weight = Weight("check", outputs, width, quant_type, double_quant, blocksize, experts, 2)
            for tile in chosen:
                if fits(tile, weight):
                    yield weight, tile._replace(split=1 if experts else tile.split)


def check_formats(results: Results, device: torch.device, deadline: float, skipped: set[Any]) -> None:
    """Every format, block and tile shape, with biases and ragged widths, against float64."""
    num_checked = 0
    bench: Bench | None = None
    for number, (weight, tile) in enumerate(checks()):
        key = "check", 0, (tuple(tile), tuple(weight))
        is_left_out = device.type == "cpu" and number % 9
        if is_left_out or time.time() > deadline or key in skipped:
            continue
        if bench is None or bench.weight != weight:
            bench = Bench(weight, device, 1, bias=True)
        results.add("begin", key=key)
        x, ends = bench.rows(tile.rows + tile.rows // 2)
        try:
            wrong = error(bench.ours(bench.split(x), ends, tile, 0), bench.exact(x, ends))
        except Exception as problem:
            results.add("failed", weight=str(weight), rows=len(x), tile=tile, problem=str(problem)[-200:])
            if "illegal" in str(problem) or "CUDA error" in str(problem):
                raise
            continue
        num_checked += 1
        if not wrong < WRONG:
            results.add("wrong", weight=str(weight), rows=len(x), tile=tile, error=wrong)
            print("WRONG", weight, tuple(tile), wrong, flush=True)
    results.add("checked", num=num_checked)
    print(f"{num_checked} products of all formats compared with float64", flush=True)


def freeze(value: Any) -> Any:
    """Lists of JSON as tuples."""
    return tuple(freeze(one) for one in value) if isinstance(value, list) else value


def work(results: Results, deadline: float, dry: bool, names: list[str]) -> None:
    """What the process of its own does: all that is not done yet."""
    device = torch.device("cpu" if dry else "cuda")
    lines = results.read()
    done = {line["weight"] for line in lines if line["kind"] == "done"}
    skipped = {freeze(line["key"]) for line in lines if line["kind"] == "broken"}
    if not dry and not any(line["kind"] == "copy" for line in lines):
        source = torch.empty(2**30, dtype=torch.uint8, device=device).random_()
        target = torch.empty_like(source)
        taken = microseconds(lambda i: target.copy_(source), 2, 5)
        results.add("copy", gb_s=2 * source.nbytes / taken / 1000, device=torch.cuda.get_device_name())
        print(f"{torch.cuda.get_device_name()}: copies {2 * source.nbytes / taken / 1000:.0f} GB/s", flush=True)
    for weight in DRY_WEIGHTS if dry else WEIGHTS:
        if weight.name in done or (names and weight.name not in names):
            continue
        tune(weight, results, device, deadline, skipped)
        results.add("done", weight=weight.name)
        if device.type == "cuda":
            torch.cuda.empty_cache()
    if "check" not in done:
        check_formats(results, device, deadline + 40, skipped)
        results.add("done", weight="check")


def main() -> None:
    """Compile, start the process that tries, again where it broke, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("products.json"))
    parser.add_argument("--seconds", type=float, default=330, help="after which nothing new is tried")
    parser.add_argument("--weights", default="", help="names, separated by commas; all if empty")
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--work", type=float, help=argparse.SUPPRESS)  # the deadline, of the process that tries
    args = parser.parse_args()
    names = [name for name in args.weights.split(",") if name]
    results = Results(args.out.with_suffix(".jsonl"))
    if args.work is not None:
        return work(results, args.work, args.dry_run, names)
    results.path.unlink(missing_ok=True)
    deadline = time.time() + args.seconds
    problems: list[str] = []
    if not args.dry_run:
        wanted = [weight for weight in WEIGHTS if not names or weight.name in names]
        problems = compile_all(wanted)
    command = [sys.executable, __file__, "--work", str(deadline), "--out", str(args.out), "--weights", args.weights]
    command += ["--dry-run"] if args.dry_run else []
    for _ in range(6):
        try:
            ended = subprocess.run(command, timeout=max(30, deadline + 50 - time.time()), check=False).returncode
        except subprocess.TimeoutExpired:
            ended = -1
        if ended == 0:
            break
        begun = [line["key"] for line in results.read() if line["kind"] == "begin"]
        print(f"ended with {ended}, in {begun[-1:]}", flush=True)
        if not begun or time.time() > deadline:
            break
        results.add("broken", key=begun[-1])
    lines = [line for line in results.read() if line["kind"] != "begin"]
    args.out.write_text(json.dumps({"torch": torch.__version__, "uncompiled": problems, "lines": lines}) + "\n")
    results.path.unlink(missing_ok=True)
    print_table(lines, problems)


def print_table(lines: list[dict[str, Any]], problems: list[str]) -> None:
    """The best tiles, and how many failed."""
    counts = {
        kind: sum(line["kind"] == kind for line in lines) for kind in ("tried", "wrong", "failed", "broken", "skipped")
    }
    print(counts, "uncompiled", len(problems))
    for line in [*lines, *({"kind": "uncompiled", "problem": problem} for problem in problems[:3])]:
        if line["kind"] in ("wrong", "broken", "uncompiled"):
            print(str(line)[:250])
    failed: dict[str, int] = {}
    for line in lines:
        if line["kind"] == "failed":
            problem = f"{line['problem'][-90:]}"
            failed[problem] = failed.get(problem, 0) + 1
    for problem, number in list(failed.items())[:8]:
        print(f"failed {number}: {problem}")
    heads = "bf16", "today", "gemm_4bit", "ours", "ours+split", "gb_s"
    print(f"{'weight':<22}{'rows':>5}" + "".join(f"{head:>11}" for head in heads) + "  error    tile")
    for line in lines:
        if line["kind"] == "best":
            figures = "".join(f"{line[head]:>11.1f}" if head in line else f"{'':>11}" for head in heads)
            print(f"{line['weight']:<22}{line['rows']:>5}{figures}  {line['error']:.1e}  {tuple(line['tile'])}")


if __name__ == "__main__":
    main()
