"""Every family of docs/models.md on a GPU, as a user installs it: does it train, packed, recorded, with which kernels?

A tiny random model of each takes a few steps with Liger's kernels and the attention that `auto` chooses, its
activations kept and then recomputed. Losses are those of stock transformers, bitsandbytes and PEFT on the CPU in
float32. Each family has a process and a time limit of its own, so that one that fails, or leaves CUDA unusable, ends
no other.

One line a family is printed, whether it passes or not:

    llama             trains    packed  recorded  varlen   rms_norm, rotary, glu       0.1 %
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from qlora_fsdp.common.errors import UserError
from tests.compare_families import EPS, MORE, make_config
from tests.helpers.checkpoints import FAMILIES, OTHER_FAMILIES, write_checkpoint
from tests.helpers.ranks import RanksFailed, run_ranks
from tests.helpers.reference import stock_losses
from tests.helpers.runs import settings, train_here, write_rows

EVERY = sorted({*FAMILIES, *OTHER_FAMILIES, "mistral3"})
REFUSED = {"gpt2": "is no linear layer"}  # families that a run refuses by name
STEPS = 5  # graphs are recorded after two
TOLERANCE = 2e-2  # of a loss of about 5.5, relative: bfloat16 itself is known to 4e-3
LIMIT_SECONDS = 150  # for all runs of a family
AT_A_TIME = 8  # processes on one GPU; each needs about 1 GiB of it and a core or two
ACTIVATIONS = ("none", "full")


@dataclass
class Found:
    """What a family's runs showed.

    Attributes:
        losses: of each step, by the policy of activations.
        log: the lines that the runs logged.
        error: why there are no losses; None if there are.
    """

    losses: dict[str, list[float]]
    log: list[str]
    error: str | None = None

    @property
    def is_packed(self) -> bool:
        return not any(re.search(r"rows of \w+ are padded", line) for line in self.log)

    def line(self, family: str, difference: float | None) -> str:
        """One line for the user; the difference is relative."""
        if self.error is not None:
            return f"{family:20} {self.error}"
        model = next(line for line in self.log if line.startswith("Model: "))
        attention = re.search(r"(\w+) attention", model)
        kernels = re.search(r"Liger kernels: ([^;]*)", model)
        assert attention is not None and kernels is not None
        recorded = any("recorded as a CUDA graph for" in line for line in self.log)
        launched = [line for line in self.log if "launched one by one" in line]
        how = "recorded" if recorded and not launched else "launched"
        packing = "packed" if self.is_packed else "padded"
        name = attention.group(1).removeprefix("qlora_fsdp_")
        shown = "no reference" if difference is None else f"{difference:.1%}"
        why = f"  {launched[0]}" if launched else ""
        return f"{family:20} trains  {packing}  {how}  {name:10} {kernels.group(1):24} {shown}{why}"


def try_family(family: str, folder: Path) -> Found:
    """The runs of one family, in a process of their own."""
    found = Found({}, [])
    try:
        checkpoint = write_checkpoint(make_config(family), folder / family)
        for activations in ACTIVATIONS:
            argv = [*arguments(checkpoint, folder), f"memory.activations={activations}"]
            found.losses[activations] = train_here(argv).losses
            lines = (folder / f"{family}-run" / "train.log").read_text().splitlines()
            found.log += [line.partition("  ")[2] for line in lines]  # without the time
    except UserError as error:
        found.error = f"refused: {' '.join(str(error).split())}"
    except Exception as error:
        found.error = f"failed: {type(error).__name__}: {' '.join(str(error).split())[:300]}"
    return found


def arguments(checkpoint: Path, folder: Path, packing: str = "auto") -> list[str]:
    """The command line of a run."""
    more = [f"training.max_steps={STEPS}", f"optim.eps={EPS}", f"training.packing={packing}"]
    own_folders = [f"run.folder={folder / checkpoint.name}-run", f"data.cache_folder={folder / checkpoint.name}-cache"]
    return settings(checkpoint, folder / "rows.jsonl", *more, *own_folders, *MORE.get(checkpoint.name, []))


def reference(family: str, folder: Path, is_packed: bool) -> list[float]:
    """Losses of stock libraries on the CPU, in a process of their own."""
    return stock_losses(arguments(folder / family, folder, str(is_packed).lower()))


def each(function: Callable[..., Any], calls: Sequence[tuple[Any, ...]], gpu: bool) -> list[Any]:
    """The results of calls in processes of their own, some at a time; or why there is none."""

    def call(args: tuple[Any, ...]) -> Any:
        try:
            (result,) = run_ranks(1, function, *args, gpu=gpu, timeout_seconds=LIMIT_SECONDS)
        except RanksFailed as error:
            lines = [line for line in str(error).splitlines() if line.strip()]
            return f"failed: {lines[0][:200]} ... {lines[-1][:200]}"
        return result

    with ThreadPoolExecutor(AT_A_TIME) as pool:
        return list(pool.map(call, calls))


def try_all(families: Sequence[str], folder: Path, gpu: bool = True) -> dict[str, tuple[Found, list[float] | str]]:
    """What was found of families, with the losses of the reference or why there are none."""
    write_rows(folder / "rows.jsonl")
    # First all on the GPU, then all on the CPU: which of both a process sees is set in this process's environment.
    runs = each(try_family, [(family, folder) for family in families], gpu)
    found = {
        family: Found({}, [], run) if isinstance(run, str) else run for family, run in zip(families, runs, strict=True)
    }
    trained = [family for family, run in found.items() if run.error is None]
    stock = each(reference, [(family, folder, found[family].is_packed) for family in trained], gpu=False)
    expected = dict(zip(trained, stock, strict=True))
    return {family: (run, expected.get(family, "not asked")) for family, run in found.items()}


def largest_difference(run: Found, expected: list[float]) -> float:
    """The largest relative difference of a loss."""
    pairs = [pair for losses in run.losses.values() for pair in zip(losses, expected, strict=True)]
    return max(abs(loss - stock) / stock for loss, stock in pairs)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[dict[str, Any]]:
    """All families of this session's tests at once."""
    of_this_file = [item for item in request.session.items if item.path == request.path]
    wanted = {item.callspec.params["family"] for item in of_this_file if isinstance(item, pytest.Function)}
    yield try_all(sorted(wanted), tmp_path_factory.mktemp("families"))


@pytest.mark.parametrize("family", EVERY)
def test_family(results: dict[str, Any], family: str, capsys: pytest.CaptureFixture[str]):
    run, expected = results[family]
    difference = largest_difference(run, expected) if isinstance(expected, list) else None
    with capsys.disabled():
        print(f"\n{run.line(family, difference)}", flush=True)
    if family in REFUSED:
        assert run.error is not None and REFUSED[family] in run.error
        return
    assert run.error is None
    assert difference is not None, expected
    assert difference < TOLERANCE
