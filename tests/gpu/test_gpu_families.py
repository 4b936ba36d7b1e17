"""Every family of docs/models.md on a GPU, as a user installs it: does it train, packed, recorded, with which kernels?

A tiny random model of each takes a few steps with Liger's kernels and the attention that `auto` chooses, its
activations kept and then recomputed. Losses are those of stock transformers, bitsandbytes and PEFT on the CPU in
float32. Each family has a process and a time limit of its own, so that one that fails, or leaves CUDA unusable, ends
no other.

One line a family is printed, whether it passes or not:

    llama             trains    packed  recorded  varlen   rms_norm, rotary, glu       0.1 %
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.checkpoints import FAMILIES, OTHER_FAMILIES
from tests.helpers.families import Found, each, largest_difference, reference, try_family
from tests.helpers.runs import write_rows

EVERY = sorted({*FAMILIES, *OTHER_FAMILIES, "mistral3", "qwen3_vl"})
REFUSED = {"gpt2": "is no linear layer"}  # families that a run refuses by name
STEPS = 5  # graphs are recorded after two
TOLERANCE = 2e-2  # of a loss of about 5.5, relative: bfloat16 itself is known to 4e-3
LIMIT_SECONDS = 150  # for all runs of a family
AT_A_TIME = 8  # processes on one GPU; each needs about 1 GiB of it and a core or two
ACTIVATIONS = ("none", "full")
LIMITS = (LIMIT_SECONDS, AT_A_TIME)


def try_all(families: Sequence[str], folder: Path, gpu: bool = True) -> dict[str, tuple[Found, list[float] | str]]:
    """What was found of families, with the losses of the reference or why there are none."""
    write_rows(folder / "rows.jsonl")
    # First all on the GPU, then all on the CPU: which of both a process sees is set in this process's environment.
    runs = each(try_family, [(family, folder, STEPS, ACTIVATIONS) for family in families], gpu, *LIMITS)
    found = {
        family: Found({}, [], run) if isinstance(run, str) else run for family, run in zip(families, runs, strict=True)
    }
    trained = [family for family, run in found.items() if run.error is None]
    calls = [(family, folder, STEPS, found[family].is_packed) for family in trained]
    stock = each(reference, calls, False, *LIMITS)
    expected = dict(zip(trained, stock, strict=True))
    return {family: (run, expected.get(family, "not asked")) for family, run in found.items()}


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
