#!/usr/bin/env python3
r"""Seconds of a step of TRL's GRPOTrainer on a model in 4 bits, one GPU: what benchmarks/grpo.py is compared with.

    python benchmarks/make_checkpoint.py 8b 8b-folder
    python benchmarks/trl_grpo.py --model 8b-folder --generator generate --out trl_grpo.json

The model is loaded in nf4 by bitsandbytes, with an adapter of rank 16 on all linear layers. Prompts are random words of
the checkpoint's tokenizer. As the model is random, hardly an answer ends early. Answers are written by transformers'
`generate`, or by its continuous batching (`--generator continuous`). TRL's other engine, vLLM, wants weights in 16 bits
that it is sent after each step.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from generation import device_name
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig
from trl import GRPOConfig, GRPOTrainer
from trl_sft import GIB, TARGETS

NUM_WORDS = 500  # that the checkpoint's tokenizer knows
FIGURES = ("reward", "completions/mean_length", "entropy", "grad_norm")


class TimedTrainer(GRPOTrainer):  # type: ignore[misc]
    """TRL's trainer, which also measures how long answers take to write."""

    rollout_seconds = 0.0

    def _generate(self, *args: Any, **kwargs: Any) -> Any:
        start = time.time()
        found = super()._generate(*args, **kwargs)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.rollout_seconds += time.time() - start
        return found


def remainder(completions: list[str], **_: Any) -> list[float]:
    """A reward that differs from answer to answer."""
    return [float(sum(ord(letter) for letter in text) % 17) for text in completions]


def make_trainer(args: argparse.Namespace) -> TimedTrainer:
    """The trainer, whose model is loaded in 4 bits."""
    draw = np.random.default_rng(0)
    numbers = draw.integers(0, NUM_WORDS, (args.prompts * args.steps, args.prompt_tokens))
    rows = [{"prompt": " ".join(f"w{number}" for number in row)} for row in numbers]
    model = AutoModelForCausalLM.from_pretrained(
        args.model,
        dtype=torch.bfloat16,
        attn_implementation="sdpa",
        device_map={"": 0} if torch.cuda.is_available() else None,
        quantization_config=BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_compute_dtype=torch.bfloat16,
            bnb_4bit_use_double_quant=True,
        ),
    )
    num_answers = args.prompts * args.generations
    settings = GRPOConfig(
        output_dir="/tmp/trl_grpo",
        per_device_train_batch_size=args.mbs,
        gradient_accumulation_steps=num_answers // args.mbs,
        num_generations=args.generations,
        max_completion_length=args.new_tokens,
        max_steps=args.steps,
        beta=0.0,
        temperature=1.0,
        learning_rate=1e-5,
        lr_scheduler_type="constant",
        bf16=torch.cuda.is_available(),
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        gradient_checkpointing=not args.no_checkpointing,
        gradient_checkpointing_kwargs={"use_reentrant": False},
        use_liger_kernel=args.liger,
        optim="adamw_torch_fused",
        use_cpu=not torch.cuda.is_available(),
        use_transformers_continuous_batching=args.generator == "continuous",
    )
    lora = LoraConfig(r=16, lora_alpha=32, lora_dropout=0.0, target_modules=TARGETS, task_type="CAUSAL_LM")
    return TimedTrainer(
        model=model,
        reward_funcs=remainder,
        args=settings,
        train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(args.model),
        peft_config=lora,
    )


def main() -> None:
    """Train, print each step's figures, and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--generations", type=int, default=8)
    parser.add_argument("--new-tokens", type=int, default=512)
    parser.add_argument("--mbs", type=int, default=8, help="answers of a micro-batch")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--generator", choices=["generate", "continuous"], default="generate")
    parser.add_argument("--liger", action="store_true")
    parser.add_argument("--no-checkpointing", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("trl_grpo.json"))
    args = parser.parse_args()
    trainer = make_trainer(args)
    trainer.train()
    steps = [line for line in trainer.state.log_history if "reward" in line]
    shown = [{name: line.get(name) for name in ("step_time", *FIGURES)} for line in steps]
    for number, step in enumerate(shown, start=1):
        print(f"step {number}: {json.dumps(step)}")
    peak = torch.cuda.max_memory_allocated() / GIB if torch.cuda.is_available() else 0.0
    found = {
        "device": device_name(),
        "torch": torch.__version__,
        "arguments": {name: str(value) for name, value in vars(args).items()},
        "steps": shown,
        "rollout_seconds": round(trainer.rollout_seconds / args.steps, 2),
        "peak_gib": round(peak, 2),
    }
    print(f"seconds of writing a step {found['rollout_seconds']}, peak {found['peak_gib']} GiB")
    args.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
