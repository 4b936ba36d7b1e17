"""Where a run can be caught: the function that each stage begins with, and what replaces it in a test."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from torch import nn

from qlora_fsdp.data.tokenize import RowTokenizer
from qlora_fsdp.model.tasks.causal_lm import CausalLM
from qlora_fsdp.sharding import materialize
from qlora_fsdp.training import run, train_adapter
from qlora_fsdp.training.checkpoints import thread as checkpoint_thread
from qlora_fsdp.training.checkpoints.saver import Saver

# An object, and the name of its function
STAGES: dict[str, tuple[Any, str]] = {
    "settings": (run, "check_world"),
    "data": (run, "prepare"),
    "workers that tokenize": (RowTokenizer, "whole"),
    "load": (materialize, "fill_shards"),
    "forward": (CausalLM, "forward"),
    "checkpoint": (checkpoint_thread, "write_checkpoint"),
    "export": (train_adapter, "save_adapter"),
    "report": (run, "write_report"),
}


def at_stage(stage: str, due: int, act: Callable[[], Any]) -> None:
    """Call `act` in this process before the stage, when that is entered for the `due`-th time."""
    owner, name = STAGES[stage]
    function, num_calls = getattr(owner, name), 0

    def acting(*arguments: Any, **named: Any) -> Any:
        nonlocal num_calls
        num_calls += not _is_planned(arguments)
        if num_calls == due and not _is_planned(arguments):
            act()
        return function(*arguments, **named)

    setattr(owner, name, acting)


def _is_planned(arguments: tuple[Any, ...]) -> bool:
    """Whether a model on meta is called, which the memory plan does before there is one with weights."""
    modules = [argument for argument in arguments if isinstance(argument, nn.Module)]
    return any(parameter.is_meta for module in modules for parameter in module.parameters())


def wait_until_signalled(signalled: Path) -> None:
    """Say, in this rank's working folder, that it is here, and wait for the file `signalled`, a minute at most."""
    Path(f"held-{os.environ['RANK']}").touch()
    deadline = time.monotonic() + 60
    while not signalled.exists() and time.monotonic() < deadline:
        time.sleep(0.05)


def let_rank_1_tell_first() -> None:
    """Have rank 0 end after the checkpoint of a signal only once its watch, to which rank 1 has told, interrupts it."""
    stop = Saver.stop

    def stopping(self: Saver, step: int) -> NoReturn:
        try:
            stop(self, step)
        finally:
            deadline = time.monotonic() + 60
            while os.environ["RANK"] == "0" and time.monotonic() < deadline:
                time.sleep(0.05)

    Saver.stop = stopping  # type: ignore[method-assign]
