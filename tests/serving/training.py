"""The runs whose adapters are served: each learns two sentences."""

from __future__ import annotations

from pathlib import Path

from qlora_fsdp.config.world import World
from qlora_fsdp.training.run import run
from tests.helpers.quick_config import load_config


def train(base: Path, folder: Path, rows: Path, *more: str) -> None:
    """Train an adapter of a base on rows, by the settings that all of them have and some more."""
    settings = [
        f"model.path={base}",
        f"run.folder={folder}",
        f"data.path={rows}",
        f"data.cache_folder={rows.parent / 'cache'}",
        "quant=none",
        "lora.r=8",
        "training.packing=false",
        "training.max_length=64",
        "training.max_steps=40",
        "training.micro_batch_size=4",
        "training.learning_rate=2e-2",
    ]
    run(load_config([*settings, *more]), World())
