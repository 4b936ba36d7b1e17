"""Whole runs on the ranks of a test: settings in, losses and whatever a test wants to look at out."""

from __future__ import annotations

import contextlib
import io
import os
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

import qlora_fsdp.training.prepare as first_half
import qlora_fsdp.training.run as pipeline
import qlora_fsdp.training.train_adapter as stage
from qlora_fsdp.config.world import World
from qlora_fsdp.layers.quantized.linear import QuantizedLinear
from qlora_fsdp.model.tasks.task_model import TaskModel
from qlora_fsdp.runtime.processes import Processes
from qlora_fsdp.runtime.rows import gather_rows, local_tensor, shard_group
from qlora_fsdp.sharding.shard import bypassing_root
from qlora_fsdp.tracing.model_tracer import ModelTracer
from qlora_fsdp.training.loop import TrainResult
from qlora_fsdp.training.step import StepRunner
from tests.helpers.lines import write_lines
from tests.helpers.quick_config import composing_quickly, load_config
from tests.helpers.ranks import Meeting

WORDS = ["the", "cat", "sat", "on", "a", "mat", "while", "rain", "fell", "over", "old", "town", "and", "birds", "sang"]
Inspect = Callable[[TaskModel, Processes], Any]


@dataclass(frozen=True)
class Trained:
    """What a rank saw of a run: the loss of every step, and what `inspect` found in the trained model."""

    losses: list[float]
    inspected: Any = None


def write_rows(file: Path, num_rows: int = 400) -> Path:
    """Rows of prompt and completion, 10 to 60 bytes long."""
    rng = random.Random(0)

    def words(at_most: int) -> str:
        return " ".join(rng.choices(WORDS, k=rng.randint(1, at_most)))

    rows = [{"prompt": words(3), "completion": words(8)} for _ in range(num_rows)]
    return write_lines(file, rows)


def settings(checkpoint: Path, rows: Path, *more: str, packing: bool = True) -> list[str]:
    """The command line of a short run: 20 steps of 4 sequences at a constant rate, sharded; `more` wins."""
    return [
        *([] if any(text.startswith("fsdp=") for text in more) else ["fsdp=full_shard"]),
        f"model.path={checkpoint}",
        "model.tokenizer_path=bytes",
        f"data.path={rows}",
        f"data.cache_folder={rows.parent / 'cache'}",
        f"run.folder={rows.parent / 'runs' / checkpoint.name}",
        "run.overwrite=true",
        "lora.r=8",
        "optim.lr_scheduler_type=constant",
        "optim.warmup_ratio=0",
        "training.max_steps=20",
        "training.max_length=64",
        "training.micro_batch_size=1",
        "training.global_batch_size=4",
        "training.learning_rate=1e-3",
        f"training.packing={str(packing).lower()}",
        *more,
    ]


def printed_by(main: Callable[[Sequence[str]], int], arguments: Sequence[str]) -> str:
    """What a command prints on this rank of a world."""
    Meeting.new_port()
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), composing_quickly():
        assert main(arguments) == 0
    return printed.getvalue()


_trace_assembled = first_half.trace_assembled
_traced: dict[str, ModelTracer] = {}


def _trace_once(*args: Any) -> ModelTracer:
    """The tracer that an earlier run of this process has made for a model of the same shapes, with what it found."""
    made = _trace_assembled(*args)
    key = (made.files.folder, made.files.config.to_json_string(False), made.computing, made.tokens)
    return _traced.setdefault(repr(key), made)


def train_here(argv: Sequence[str], inspect: Inspect | None = None, train: bool = True) -> Trained:
    """One run on this rank of a world, through the whole pipeline; without `train`, only up to the loop."""
    Meeting.new_port()
    seen: dict[str, Any] = {}
    train_stage = stage.train

    def train_and_inspect(runner: StepRunner, *args: Any) -> TrainResult:
        result = train_stage(runner, *args) if train else TrainResult()
        seen["losses"] = result.losses
        seen["inspected"] = inspect(runner.model, runner.processes) if inspect is not None else None
        return result

    stage.train, first_half.trace_assembled = train_and_inspect, _trace_once
    try:
        pipeline.run(load_config(argv), World.from_environment(os.environ))
    finally:
        stage.train, first_half.trace_assembled = train_stage, _trace_assembled
    return Trained(**seen)


def train_all(
    cases: Mapping[Any, Sequence[str]], inspect: Inspect | None = None, train: bool = True
) -> dict[Any, Trained]:
    """Several runs one after another on this rank of a world."""
    return {case: train_here(argv, inspect, train) for case, argv in cases.items()}


def attention_of(model: TaskModel, processes: Processes) -> str:
    """The name of the model's attention in transformers' registry."""
    return str(model.base.config._attn_implementation)


@torch.no_grad()
def logits_of(model: TaskModel, input_ids: Tensor) -> Tensor:
    """Logits of the sharded model: float32 [B, L, V] on the CPU."""
    model.eval()
    with bypassing_root(model, trains=True):
        return model.base(input_ids=input_ids, use_cache=False).logits.float().cpu()


@torch.no_grad()
def gathered_parts(model: TaskModel, processes: Processes) -> dict[str, Tensor]:
    """Every quantized weight's parts as FSDP gathers them, by the base model's name: uint8 [rows, bytes] on the CPU."""
    parts = {}
    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for unit in units:
        unit.unshard()
    for name, layer in model.base.named_modules():
        if isinstance(layer, QuantizedLinear):
            name = name.replace(".base_layer", "")
            for part in layer.part_names:
                values = getattr(layer, part).detach().cpu().contiguous()
                parts[f"{name}.{part}"] = values.view(torch.uint8).view(len(values), -1).clone()
    for unit in units:
        unit.reshard()
    return parts


def gathered_adapter(model: TaskModel, processes: Processes) -> dict[str, Tensor]:
    """What is trained, whole, by name, on every rank."""
    return {
        name: gather_rows(local_tensor(param), param.shape[0], shard_group(param)).clone()
        for name, param in model.model.named_parameters()
        if param.requires_grad
    }
