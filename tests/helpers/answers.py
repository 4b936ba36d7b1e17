"""Runs on answers that the model writes: prompts, functions that reward, and what was written in each step."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from qlora_fsdp.training.answers.rollouts import Completion, Rollouts
from tests.helpers.lines import write_lines
from tests.helpers.quick_config import load_config
from tests.helpers.runs import train_here

FUNCTIONS = """
def vowels(completions, **kwargs):
    return [sum(letter in "aeiou" for letter in text) / (1 + len(text)) for text in completions]

async def early(prompts, completions, completion_ids, weight, **kwargs):
    return [None if weight[n] == 0 else weight[n] * (completion_ids[n][0] % 16) / 16 for n in range(len(prompts))]
"""
NAMES = ("vowels", "early")


def write_prompts(file: Path, num_rows: int = 8) -> Path:
    """Prompts of 5 to 11 bytes, with a column that a function asks for; for one in four it has nothing to say."""
    rows = [{"prompt": f"{number} plus {number * 7 % 10}", "weight": number % 4} for number in range(num_rows)]
    return write_lines(file, rows)


def answer_settings(model: Path, folder: Path, name: str, *more: str) -> list[str]:
    """The command line of six steps of four prompts with four answers each, in a run folder of that name."""
    functions = folder / "functions.py"
    functions.write_text(FUNCTIONS)
    rows = write_prompts(folder / "prompts.jsonl")
    return [
        "task=grpo",
        *([] if any(text.startswith("fsdp=") for text in more) else ["fsdp=full_shard"]),
        f"model.path={model}",
        "model.tokenizer_path=bytes",
        f"data.path={rows}",
        f"run.folder={folder / 'runs' / name}",
        "run.overwrite=true",
        "lora.r=8",
        "optim.warmup_ratio=0",
        "training.learning_rate=3e-4",
        "training.max_steps=6",
        "training.max_length=48",
        "training.global_batch_size=4",
        "training.micro_batch_size=2",
        "rollout.num_generations=4",
        "rollout.max_completion_length=12",
        f"reward.functions=[{functions}:vowels,{functions}:early]",
        "reward.weights=[1,0.5]",
        *more,
    ]


def train_and_record(cases: Mapping[str, Sequence[str]]) -> dict[str, list[list[Completion]]]:
    """Several runs on this rank of a world. Returns for each what was written in every step."""
    found: dict[str, list[list[Completion]]] = {}
    whole = Rollouts.write
    for case, argv in cases.items():
        steps: list[list[Completion]] = []

        def write(self: Rollouts, *args: Any, steps: list[list[Completion]] = steps) -> list[Completion]:
            steps.append(whole(self, *args))
            return steps[-1]

        Rollouts.write = write  # type: ignore[method-assign]
        try:
            train_here(argv)
        finally:
            Rollouts.write = whole  # type: ignore[method-assign]
        found[case] = steps
    return found


def lines_of(argv: Sequence[str]) -> list[dict[str, float]]:
    """The figures of every step of a run."""
    file = Path(load_config(argv).run.folder) / "metrics.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    return [line for line in lines if "loss" in line]
