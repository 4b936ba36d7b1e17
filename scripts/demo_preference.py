"""Teach a real chat model by DPO which of two summaries is a function's, in 4 bits with two processes on the CPU.

    make demo-preference

The model is SmolLM2-135M-Instruct (scripts/make_smollm2.py). It learns from 180 pairs, the right summary against
another function's (scripts/make_docstring_preferences.py), and is asked about 60 functions of other modules. Each
command is shown as a user would type it.
"""

from __future__ import annotations

import json
import time

from demo_chat import MODEL, ROOT, run
from make_docstring_preferences import write_preferences
from make_smollm2 import make_model

DATA = ROOT / "outputs" / "preferences"
RUN_FOLDER = ROOT / "outputs" / "demo-preference"
NUM_TRAINING, NUM_EVAL = 180, 60
TRAIN = "accelerate launch --config_file accelerate_configs/cpu.yaml -m qlora_fsdp.train experiment=demo_preference"
EVALUATE = (
    "python -m qlora_fsdp evaluate adapter=outputs/demo-preference/adapter data.path=outputs/preferences/eval.jsonl "
    "training.max_length=128 launch.num_processes=2"
)


def show_figures() -> None:
    """Print what metrics.jsonl says of held-out pairs before the first step and after the last."""
    lines = [json.loads(line) for line in (RUN_FOLDER / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    before, *_, after = [line for line in lines if "eval_loss" in line]
    for name, line in (("before", before), ("after", after)):
        chosen, rejected = line["eval_logps/chosen"], line["eval_logps/rejected"]
        print(f"  {name}: log-probability of the right summary {chosen:.1f}, of the other function's {rejected:.1f}")
    print(f"Training has moved {after['eval_rewards/accuracies']:.0%} of the pairs the right way; chance is 50 %.")


def main() -> None:
    """Make model and pairs, train, and evaluate the adapter."""
    start = time.monotonic()
    print(f"Making {MODEL.relative_to(ROOT)} (half a minute the first time)", flush=True)
    make_model(MODEL)
    write_preferences(DATA, NUM_TRAINING, NUM_EVAL)
    run(TRAIN)
    print("\nHeld-out pairs, about functions of modules that are in no pair of training:")
    show_figures()
    run(EVALUATE)
    print(f"The adapter, for PeftModel.from_pretrained: {RUN_FOLDER / 'adapter'} ({time.monotonic() - start:.0f} s)")


if __name__ == "__main__":
    main()
