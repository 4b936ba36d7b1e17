"""Mistakes of a walk through README and the ten jobs, each through the command: one message, exit code 2, no traceback.

Those of a first hour are in test_mistakes.py. Here are words of other programs, numbers as people write them,
and rewards.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from qlora_fsdp.__main__ import main

TRAIN = ["train", "model=tiny", "data=rows.jsonl", "training.max_steps=1", "training.max_length=64"]
CLASSIFY = [*TRAIN, "task=sequence_classification"]
GRPO = [*TRAIN, "task=grpo", "rollout.max_completion_length=4", "rollout.num_generations=2"]

# What is typed, and what the message holds. These end before torch is imported.
TYPED: list[tuple[list[str], list[str]]] = [
    # The command line
    (["tarin", "model=tiny"], ["tarin is no command. Did you mean qlora-fsdp train?"]),
    (["train", "--model", "tiny", "data=rows.jsonl"], ["without dashes", "Write model=tiny."]),
    (["train", "model", "=", "tiny"], ["has spaces around the equals sign", "Write model=tiny."]),
    (["train", "model==tiny", "data=rows.jsonl"], ["model==tiny has two equals signs. Write model=tiny."]),
    ([*TRAIN, "lora.r==8"], ["lora.r==8 has two equals signs. Write lora.r=8."]),
    ([*TRAIN, "run.name="], ["run.name= has no value."]),
    (["train", "--config", "folder"], ["folder can't be read: Is a directory. Name a YAML file"]),
    (["train", "--config", "a.yaml", "--config", "b.yaml"], ["--config is given 2 times."]),
    # Values
    ([*TRAIN, "training.learning_rate=0,0002"], ["for a number with a fraction write training.learning_rate=0.0002"]),
    ([*TRAIN, "training.learning_rate=2e-4f"], ["must be a number. Set training.learning_rate=0.0002."]),
    (
        [*TRAIN, "training.max_length=2k"],
        ["training.max_length=2k must be a whole number. Set training.max_length=2048"],
    ),
    ([*TRAIN, "training.seed=-1"], ["at least 0 and less than 2147483648. Set training.seed=0"]),
    ([*TRAIN, "data.eval_fraction=5%"], ["data.eval_fraction=5% must be a number. Set data.eval_fraction=0.05."]),
    ([*TRAIN, "lora.lora_dropout=1.5"], ["lora.lora_dropout=1.5 must be", "less than 1"]),
    ([*TRAIN, "optim.lr_scheduler_type=cosin"], ["Set optim.lr_scheduler_type=cosine."]),
    ([*TRAIN, "launch.num_processes=0"], ["launch.num_processes=0 must be", "at least 1"]),
    ([*TRAIN, "data.format=alpacca"], ["data.format=alpacca must be one of auto, messages"]),
    ([*TRAIN, "quant.load_in_4bit=maybe"], ["quant.load_in_4bit=maybe must be true or false."]),
    # Tasks by the names of their methods
    ([*TRAIN, "task=sft"], ["task=sft is no option", "Did you mean task=causal_lm?"]),
    ([*TRAIN, "task=dpo"], ["Did you mean task=preference preference.loss=dpo?"]),
    ([*TRAIN, "task=kto"], ["Did you mean task=preference preference.loss=kto?"]),
    ([*TRAIN, "task=classification"], ["Did you mean task=sequence_classification?"]),
    ([*TRAIN, "task=ner"], ["Did you mean task=token_classification?"]),
    ([*TRAIN, "task=preference", "preference.loss=dppo"], ["must be one of dpo, ipo", "Set preference.loss=dpo."]),
    ([*TRAIN, "grpo.beta=0.1"], ["grpo.beta=0.1 has no effect with task.name=causal_lm. Set task=grpo too"]),
    (CLASSIFY, ["task.labels=null names too few labels. Set task.labels="]),
    ([*CLASSIFY, "task.labels=[a,a]"], ["task.labels=[a,a] names a label twice."]),
    # Rewards
    (GRPO, ["reward.functions=[] names no function", "Set reward.functions=[rewards.py:NAME]"]),
    ([*GRPO, "reward.functions=rewards.py:good"], ["must be a list", "Set reward.functions=[rewards.py:good]."]),
    ([*GRPO, "reward.functions=[rewards.py]"], ["has rewards.py, which is neither FILE.py:NAME nor built in"]),
    ([*GRPO, "reward.functions=[exact_matc]"], ["has exact_matc", "built in are exact_match"]),
    ([*GRPO, "reward.functions=[other.py:good]"], ["the file other.py does not exist, seen from"]),
    ([*GRPO, "reward.functions=[exact_match]", "reward.weights=[1,2]"], ["has 2 numbers, and reward.functions 1."]),
    ([*GRPO, "reward.functions=[exact_match]", "rollout.num_generations=1"], ["rollout.num_generations=1 must be"]),
    (
        [*GRPO, "reward.functions=[exact_match]", "rollout.max_completion_length=64"],
        ["rollout.max_completion_length=64 leaves no room for a prompt", "Set it below 64."],
    ),
]


@pytest.fixture
def walkers_folder(own_process: None) -> None:
    Path("rows.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    Path("rewards.py").write_text("def good(completions, **kwargs):\n    return [1.0 for _ in completions]\n")
    Path("folder").mkdir()


@pytest.mark.usefixtures("walkers_folder")
@pytest.mark.parametrize(("argv", "parts"), TYPED, ids=lambda value: " ".join(value[-2:]))
def test_what_is_typed_wrongly_is_answered(
    argv: list[str], parts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith("\nError: ") and not printed.out
    assert printed.err.count("Error: ") == 1 and len(printed.err) < 1000
    for part in parts:
        assert part in printed.err
