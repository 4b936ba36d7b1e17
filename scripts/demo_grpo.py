"""Teach the demo's base model to sort letters by rewards for its own answers, with two processes on the CPU.

    make demo-grpo
    python scripts/demo_grpo.py --short

First the base model learns from a few examples what an answer looks like, and no more: it then sorts four letters
rightly about one time in five. After that it gets no answers, only rewards: 1 for the right order, 0 for anything else.
Rewards are told for letters that were in neither training. It is an error if they do not rise as they should: from
below 0.3 to above 0.8, or with `--short`, in which there are fewer steps, by 0.1. Each command is shown as a user would
type it.
"""

from __future__ import annotations

import json
import random
import sys
import time
from itertools import permutations
from pathlib import Path

from demo_chat import ROOT, run

DATA = ROOT / "outputs" / "letters"
RUN_FOLDER = ROOT / "outputs" / "demo-grpo"
LETTERS, NUM_SORTED = "abcdefghij", 4
NUM_EXAMPLES, NUM_HELD_OUT = 1000, 64
TRAIN = "accelerate launch --config_file accelerate_configs/cpu.yaml -m qlora_fsdp.train"
START = (
    f"{TRAIN} experiment=demo run.name=demo-letters data.path=outputs/letters/examples.jsonl data.eval_path=null "
    "training.max_length=128 training.max_steps=60"
)
LEARN = f"{TRAIN} experiment=demo_grpo reward.functions=[exact_match]"
SHORT_STEPS, SHORT_GAIN = 30, 0.1
MOST_BEFORE, LEAST_AFTER = 0.3, 0.8


def write_letters(folder: Path) -> None:
    """Write examples with answers, questions, and questions that are held out."""
    rows = []
    for letters in permutations(LETTERS, NUM_SORTED):
        answer = " ".join(sorted(letters))
        rows.append({"prompt": f"Sort: {' '.join(letters)} ->", "completion": f" {answer}", "answer": answer})
    random.Random(0).shuffle(rows)
    parts = {
        "examples": (("prompt", "completion"), rows[:NUM_EXAMPLES]),
        "questions": (("prompt", "answer"), rows[NUM_EXAMPLES:-NUM_HELD_OUT]),
        "held_out": (("prompt", "answer"), rows[-NUM_HELD_OUT:]),
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name, (columns, chosen) in parts.items():
        lines = [json.dumps({column: row[column] for column in columns}) for row in chosen]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


def held_out_rewards() -> list[tuple[int, float]]:
    """Steps and the mean reward of answers to held-out questions after them, from metrics.jsonl."""
    lines = [json.loads(line) for line in (RUN_FOLDER / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return [(line["step"], line["eval_reward"]) for line in lines if "eval_reward" in line]


def why_not_learned(before: float, after: float, is_short: bool) -> str | None:
    """What is wrong with the rewards before and after; None if the model has learned."""
    if before >= MOST_BEFORE:
        return f"the start already gets {before:.2f}, which is to be below {MOST_BEFORE}"
    if is_short and after < before + SHORT_GAIN:
        return f"{before:.2f} has become {after:.2f}, which is to be {SHORT_GAIN} more"
    if not is_short and after <= LEAST_AFTER:
        return f"{before:.2f} has become {after:.2f}, which is to be above {LEAST_AFTER}"
    return None


def main() -> None:
    """Make the start, let it learn, and show the curve."""
    is_short = "--short" in sys.argv[1:]
    start = time.monotonic()
    write_letters(DATA)
    run(START)
    run(f"{LEARN} training.max_steps={SHORT_STEPS}" if is_short else LEARN)
    curve = held_out_rewards()
    print("\nMean reward of answers about letters that were in neither training:")
    for step, reward in curve:
        print(f"  after {step:>3} steps {reward:.2f}  {'#' * round(40 * reward)}")
    reason = why_not_learned(curve[0][1], curve[-1][1], is_short)
    if reason is not None:
        raise SystemExit(f"It has not learned: {reason}.")
    print(f"The adapter, for PeftModel.from_pretrained: {RUN_FOLDER / 'adapter'} ({time.monotonic() - start:.0f} s)")


if __name__ == "__main__":
    main()
