"""Fine-tune the demo's base model in 4 bits with two processes on the CPU, and show what it learned.

    make demo

Trains on demo/docstrings.jsonl. Losses and answers are about modules of the standard library whose source neither the
base model nor the adapter has seen.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import time
import warnings
from pathlib import Path

from qlora_fsdp.common.startup import quick_imports

ROOT = Path(__file__).resolve().parents[1]
RUN_FOLDER = ROOT / "outputs" / "demo"
COMMAND = "accelerate launch --config_file accelerate_configs/cpu.yaml -m qlora_fsdp.train experiment=demo"
QUESTIONS = (
    "What does `textwrap.dedent(text)` do?\n",
    "What does `zipfile.ZipFile.open(name, mode='r', pwd=None, *, force_zip64=False)` do?\n",
    "What does `configparser.RawConfigParser.read_file(f, source=None)` do?\n",
)
MAX_ANSWER_TOKENS = 32


def train() -> None:
    """Runs the command as a user would type it, and shows it."""
    print(f"$ {COMMAND}", flush=True)
    program, *arguments = shlex.split(COMMAND)
    done = subprocess.run([Path(sys.executable).with_name(program), *arguments], cwd=ROOT, check=False)
    if done.returncode:
        sys.exit(done.returncode)


def show_losses() -> None:
    """Prints the evaluation loss before the first step and after the last, from metrics.jsonl."""
    lines = [json.loads(line) for line in (RUN_FOLDER / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    before, *_, after = [line["eval_loss"] for line in lines if "eval_loss" in line]
    print(f"\nLoss a token on questions about unseen modules: {before:.3f} before, {after:.3f} after.")


def show_answers() -> None:
    """Prints what the base model says without the adapter and with it, through stock transformers and PEFT."""
    with quick_imports():
        import torch
        from peft import PeftModel
        from transformers import AutoModelForCausalLM, AutoTokenizer
        from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    warnings.simplefilter("ignore")  # about deprecations between these libraries
    base = AutoModelForCausalLM.from_pretrained(ROOT / "demo" / "base", dtype=torch.float32)
    model = PeftModel.from_pretrained(base, RUN_FOLDER / "adapter").eval()
    tokenizer = AutoTokenizer.from_pretrained(RUN_FOLDER / "adapter")

    def answer(question: str) -> str:
        prompt = tokenizer(question, return_tensors="pt")
        tokens = model.generate(**prompt, max_new_tokens=MAX_ANSWER_TOKENS, do_sample=False)[0]
        reply = tokens[prompt["input_ids"].shape[1] :]
        return repr(tokenizer.decode(reply, skip_special_tokens=True))

    print(
        "The base model goes on with source code; with the adapter it answers in a sentence, if seldom the right one."
    )
    for question in QUESTIONS:
        with model.disable_adapter():
            before = answer(question)
        print(f"\n{question}  before: {before}\n  after:  {answer(question)}")


def main() -> None:
    """Trains, then shows losses, answers and where the adapter is."""
    start = time.monotonic()
    train()
    show_losses()
    show_answers()
    seconds = time.monotonic() - start
    print(f"\nThe adapter, for PeftModel.from_pretrained: {RUN_FOLDER / 'adapter'} ({seconds:.0f} s in all)")


if __name__ == "__main__":
    main()
