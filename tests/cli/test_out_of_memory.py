"""One rank runs out of GPU memory, in any phase: all end with one report and code 3, and checkpoints stay whole."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from qlora_fsdp.model import settle
from qlora_fsdp.model.tasks.causal_lm import CausalLM
from qlora_fsdp.records.run_state import checkpoint_folders, step_of
from qlora_fsdp.runtime import hardware
from qlora_fsdp.sharding import materialize
from qlora_fsdp.training import train_adapter
from tests.cli.launch import SHORT_STEPS, ForkedLaunch

pytestmark = pytest.mark.distributed

SETTINGS = [
    "model=tiny",
    "data=random",
    "data.max_rows=16",
    "data.eval_fraction=0.5",
    "training.max_length=32",
    *SHORT_STEPS,
]
SETTINGS += ["training.max_steps=4", "training.eval_every_steps=2", "checkpoint.every_steps=1", "lora.r=4"]
LARGE = ["training.micro_batch_size=1000", "training.max_steps=1"]
HOST_BYTES = 2 << 30
TINY_HOST_BYTES = 105 << 20
PHASES = ["load", "forward", "backward", "step", "evaluation"]
ERRORS = [  # of torch's allocator; of a copy to pinned memory; of NCCL
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has ..."),
    RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"),
    RuntimeError("[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory: you tried"),
    RuntimeError("NCCL error ... ncclUnhandledCudaError: Cuda failure 2 'out of memory'"),
]


def wait_for_checkpoint(run_folder: Path, step: int) -> None:
    """A checkpoint is written beside training, so that a run could fail before it is complete."""
    while not any(step_of(folder) == step for folder in checkpoint_folders(run_folder / "checkpoints")):
        time.sleep(0.01)


def fail_in(phase: str, error: RuntimeError, run_folder: Path) -> None:
    """On rank 1, let the third step's `phase` be what takes too much: the first evaluation after training."""
    if os.environ["RANK"] != "1":
        return
    calls: dict[str, int] = {}

    def count(name: str, due: int = 3) -> None:
        calls[name] = calls.get(name, 0) + 1
        if name == phase and calls[name] == due:
            if due == 3:
                wait_for_checkpoint(run_folder, 2)
            raise error

    forward, make_optimizer = CausalLM.forward, train_adapter.make_optimizer

    def counted_forward(model: CausalLM, batch: Any) -> Tensor:
        if not model.training:
            if "forward" in calls:
                count("evaluation", 1)
            return forward(model, batch)
        count("forward")
        loss = forward(model, batch)
        loss.register_hook(lambda grad: count("backward"))
        return loss

    def counted_optimizer(*arguments: Any) -> Any:
        optimizer = make_optimizer(*arguments)
        optimizer.register_step_pre_hook(lambda *_: count("step"))
        return optimizer

    CausalLM.forward, train_adapter.make_optimizer = counted_forward, counted_optimizer
    if phase == "load":
        materialize.fill_shards = lambda *arguments, **named: count("load", 1)
    if phase == "prepare":
        settle.choose_attention = lambda *arguments, **named: count("prepare", 1)


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ForkedLaunch]:
    folder = tmp_path_factory.mktemp("short")

    def end(name: str, preexec: Callable[[], None] | None = None) -> ForkedLaunch:
        command = ForkedLaunch(folder / name, 2, *SETTINGS, preexec=preexec)
        command.finish()
        return command

    cases = {}
    for number, phase in enumerate(PHASES):
        error = ERRORS[number % len(ERRORS)]
        cases[phase] = end(phase, partial(fail_in, phase, error, folder / phase / "run"))
    cases["prepare"] = end("prepare", partial(fail_in, "prepare", ERRORS[1], folder / "prepare" / "run"))
    return cases | {"again": end("forward")}


def test_also_before_there_is_a_plan(ended: dict[str, ForkedLaunch]) -> None:
    command = ended["prepare"]
    assert [process.exitcode for process in command.ranks.processes] == [3, 3]
    (error,) = command.errors
    assert error.startswith("rank 1: The GPU is out of memory: CUDA error: out of memory, before the model is loaded.")
    assert "Traceback" not in command.output


def on_a_small_host() -> None:
    """Little memory, whatever this machine has: what is too much for any machine would be planned for a minute."""
    hardware.available_bytes = lambda: HOST_BYTES


def on_a_tiny_host() -> None:
    """Too little for 16 x 128 tokens of the tiny model, and enough for fewer."""
    hardware.available_bytes = lambda: TINY_HOST_BYTES


def test_a_cpu_is_asked_beforehand(tmp_path: Path) -> None:
    """Where nothing else would tell: the kernel kills who takes too much host memory."""
    tiny = ["model=tiny", "data=random", *SHORT_STEPS, *LARGE]
    command = ForkedLaunch(tmp_path, 2, *tiny, preexec=on_a_small_host)
    assert command.finish() == 3
    (error,) = command.errors
    assert re.match(
        r"A rank's tensors need [\d.]+ GiB of host memory by the plan, with .* 1,000 x 2,048 tokens, and 1.0 GiB", error
    )
    assert "What would fit, by the plan:\n  training.micro_batch_size=" in error


def test_a_cpu_gets_the_largest_micro_batch_that_fits(tmp_path: Path) -> None:
    """Where nobody has typed one: the usual 2,048 tokens would take more than there is."""
    tiny = ["model=tiny", "data=random", "training.max_length=128", "training.max_steps=1"]
    command = ForkedLaunch(tmp_path, 1, *tiny, preexec=on_a_tiny_host)
    assert command.finish() == 0, command.output
    (size,) = re.findall(r"Memory: micro-batch (\d+),", command.output)
    assert 1 <= int(size) < 16


@pytest.mark.parametrize("phase", PHASES)
def test_all_ranks_end_with_one_report(ended: dict[str, ForkedLaunch], phase: str) -> None:
    command = ended[phase]
    assert [process.exitcode for process in command.ranks.processes] == [3, 3]
    assert len(command.errors) == 1, command.output
    assert re.match("rank 1: The (GPU|host) is out of memory", command.errors[0])
    assert f", in {phase}." in command.errors[0] and "What would help most, by the plan:" in command.output


def test_checkpoints_are_gone_on_from(ended: dict[str, ForkedLaunch]) -> None:
    for phase in ("backward", "step", "evaluation"):
        newest = checkpoint_folders(ended[phase].run_folder / "checkpoints")[-1]
        assert int(newest.name.removeprefix("step-")) in (1, 2)  # an evaluation comes before its step's checkpoint
    again = ended["again"]  # in the folder of "forward"
    assert again.summary["status"] == "finished" and "Going on from step 2" in again.output
