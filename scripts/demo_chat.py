"""Fine-tune a real chat model in 4 bits with two processes on the CPU, then talk to it.

    make demo-chat

The model is SmolLM2-135M-Instruct, out of a Python package (scripts/make_smollm2.py), so that no model hub is needed.
It learns from 300 chats (demo/chats.jsonl) to answer what a function of the standard library does in one sentence.
Each command is shown as a user would type it. On a terminal the demo ends in a conversation; elsewhere three questions
are asked.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import time
from pathlib import Path

from make_smollm2 import make_model

ROOT = Path(__file__).resolve().parents[1]
MODEL = ROOT / "outputs" / "models" / "smollm2-135m-instruct"
RUN_FOLDER = ROOT / "outputs" / "demo-chat"
TRAIN = "accelerate launch --config_file accelerate_configs/cpu.yaml -m qlora_fsdp.train experiment=demo_chat"
CHAT = "python -m qlora_fsdp.chat adapter=outputs/demo-chat/adapter max_new_tokens=40"
QUESTIONS = (
    "What does `textwrap.dedent(text)` do?",
    "What does `shutil.copyfile(src, dst)` do?",
    "What is the capital of France?",
)


def run(command: str, text: str | None = None) -> None:
    """Run a command as a user would type it, and show it; `text` is typed into it.

    Raises:
        SystemExit: it failed; with its exit code.
    """
    print(f"\n$ {command}", flush=True)
    program, *arguments = shlex.split(command)
    done = subprocess.run(
        [Path(sys.executable).with_name(program), *arguments], cwd=ROOT, input=text, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(done.returncode)


def show_losses() -> None:
    """Print the held-out loss before the first step and after the last, from metrics.jsonl."""
    lines = [json.loads(line) for line in (RUN_FOLDER / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    before, *_, after = [line["eval_loss"] for line in lines if "eval_loss" in line]
    print(f"\nLoss per token on held-out answers: {before:.2f} before, {after:.2f} after.")


def main() -> None:
    """Make the model, train, and talk."""
    start = time.monotonic()
    print(f"Making {MODEL.relative_to(ROOT)} (half a minute the first time)", flush=True)
    make_model(MODEL)
    run(TRAIN)
    show_losses()
    print(f"The adapter, for PeftModel.from_pretrained: {RUN_FOLDER / 'adapter'} ({time.monotonic() - start:.0f} s)")
    run(CHAT, None if sys.stdin.isatty() else "".join(f"{question}\n/reset\n" for question in QUESTIONS))


if __name__ == "__main__":
    main()
