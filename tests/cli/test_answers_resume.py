"""A run on its own answers that is killed in the middle and goes on ends with the adapter of one that was not."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.launch import ForkedLaunch
from tests.helpers.distillation import write_taught
from tests.helpers.lines import read_lines

pytestmark = pytest.mark.distributed
ADAPTER = "adapter/adapter_model.safetensors"
NUM_STEPS, STOPS_AT = 5, 3
# At one step the function does not return while there is a file beside it: the run is killed there.
FUNCTIONS = f"""
import time
from pathlib import Path

def letters(completion_ids, trainer_state, **kwargs):
    waits = Path(__file__).with_name("waits")
    if trainer_state.global_step == {STOPS_AT} and waits.exists():
        Path(__file__).with_name("reached").touch()
        while waits.exists():
            time.sleep(0.1)
    return [float(sum(tokens) % 7) for tokens in completion_ids]
"""


TASKS = {
    "grpo": ["task=grpo", "rollout.num_generations=4"],
    "distill": ["task=distill", "rollout.num_generations=2", "distill.teacher_prompt=hinted", "distill.lmbda=0.5"],
}


def command(folder: Path, task: str) -> list[str]:
    """The arguments of a run whose data and function are in the folder."""
    folder.mkdir()
    (folder / "functions.py").write_text(FUNCTIONS)
    return [
        *TASKS[task],
        "model=tiny",
        "fsdp=full_shard",
        f"data.path={write_taught(folder / 'prompts.jsonl')}",
        f"reward.functions=[{folder / 'functions.py'}:letters]",
        "reward.timeout_seconds=600",
        "training.deterministic=true",
        f"training.max_steps={NUM_STEPS}",
        "training.max_length=48",
        "training.global_batch_size=2",
        "training.learning_rate=1e-3",
        "rollout.max_completion_length=6",
        "lora.r=4",
        "lora.lora_dropout=0.1",
        "checkpoint.every_steps=1",
    ]


def figures(folder: Path) -> list[tuple[float, ...]]:
    """What metrics.jsonl tells of each step that does not depend on the clock."""
    names = ("step", "loss", "grad_norm", "reward", "completions/mean_length", "entropy")
    return [tuple(line[name] for name in names) for line in read_lines(folder / "metrics.jsonl") if "loss" in line]


@pytest.mark.parametrize("task", TASKS)
def test_a_killed_run_ends_with_the_same_adapter_to_the_bit(tmp_path: Path, task: str) -> None:
    straight = ForkedLaunch(tmp_path / "a", 2, *command(tmp_path / "straight", task))
    stopped = tmp_path / "stopped"
    arguments = command(stopped, task)
    (stopped / "waits").touch()
    first = ForkedLaunch(tmp_path / "b", 2, *arguments)
    first.wait_for(lambda: (stopped / "reached").exists(), "the step in which it is killed")
    first.kill()
    lines_before = len(figures(first.run_folder))
    assert 0 < lines_before <= STOPS_AT
    (stopped / "waits").unlink()
    second = ForkedLaunch(tmp_path / "b", 2, *arguments)
    assert second.finish() == 0, second.output
    assert "Going on from step" in second.output
    assert straight.finish() == 0, straight.output
    assert figures(second.run_folder) == figures(straight.run_folder)
    assert len(figures(straight.run_folder)) == NUM_STEPS
    assert (second.run_folder / ADAPTER).read_bytes() == (straight.run_folder / ADAPTER).read_bytes()
