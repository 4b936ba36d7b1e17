#!/usr/bin/env python3
r"""Tokens a second that are generated on one GPU: this project beside transformers + bitsandbytes + PEFT, in one job.

    python benchmarks/generation.py --shape 8b --out generation.json

Both sides have the same random weights in nf4 with double quantization, the same random adapter (r=16 on all linear
layers), and the same random prompts, and no text ends early. A figure is all new tokens over all seconds, prompts
included. `first` is the first call, which records the CUDA graph; `tokens_s` the one after it.
"""

from __future__ import annotations

import argparse
import gc
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import torch
from make_checkpoint import main as make_checkpoint
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, GenerationConfig

from qlora_fsdp.config.schema import Config
from qlora_fsdp.decoding.completer import Request
from qlora_fsdp.generate import GenerateSettings
from qlora_fsdp.inference.completions import make_completer
from qlora_fsdp.inference.trained import load_trained
from qlora_fsdp.runtime.processes import Processes
from qlora_fsdp.runtime.run_command import run_command

FIRST_WORD, NUM_WORDS = 3, 500  # of the random checkpoint's vocabulary


def main() -> None:
    """Run both sides; print the table and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=["tiny", "1b", "8b", "70b"], default="8b")
    parser.add_argument("--prompts", default="1,8,64", help="numbers of prompts")
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--stock-new-tokens", type=int, default=48, help="of stock transformers, whose rate is steady")
    parser.add_argument("--checkpoint", type=Path, help="a folder to keep the checkpoint in")
    parser.add_argument("--out", type=Path, default=Path("generation.json"))
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        checkpoint, adapter = args.checkpoint or Path(scratch) / "base", Path(scratch) / "adapter"
        if not (checkpoint / "model.safetensors.index.json").is_file():
            make_checkpoint(args.shape, checkpoint)
        rows = run_stock(args, checkpoint, adapter)
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        rows += run_ours(args, adapter)
    print(f"{'side':<8}{'prompts':>8}{'tokens/s':>12}{'ms/token':>10}{'first, s':>10}{'peak GiB':>10}")
    for row in rows:
        print(
            f"{row['side']:<8}{row['prompts']:>8}{row['tokens_s']:>12,.1f}{row['ms_token']:>10.2f}"
            f"{row['first_s']:>10.2f}{row['peak_gib']:>10.1f}"
        )
    args.out.write_text(
        json.dumps({"device": device_name(), "torch": torch.__version__, "rows": rows}, indent=1) + "\n"
    )


def run_stock(args: argparse.Namespace, checkpoint: Path, adapter: Path) -> list[dict[str, Any]]:
    """Stock libraries' figures. Writes the adapter that both sides have."""
    quant = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )
    base = AutoModelForCausalLM.from_pretrained(
        checkpoint, quantization_config=quant, dtype=torch.bfloat16, device_map={"": device()}
    )
    model = peft.get_peft_model(base, peft.LoraConfig(r=16, lora_alpha=16, target_modules="all-linear"))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.01)
    model.save_pretrained(str(adapter))
    model.eval()
    base.generation_config.eos_token_id = None
    settings = GenerationConfig(do_sample=False, max_new_tokens=args.stock_new_tokens, pad_token_id=0)

    def complete(prompts: list[list[int]]) -> int:
        ids = torch.tensor(prompts, device=device())
        with torch.inference_mode():
            output = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), generation_config=settings)
        return int(output.numel() - ids.numel())

    return measure("stock", args, complete)


def run_ours(args: argparse.Namespace, adapter: Path) -> list[dict[str, Any]]:
    """This project's figures."""
    rows: list[dict[str, Any]] = []

    def body(settings: GenerateSettings, config: Config, processes: Processes) -> None:
        trained = load_trained(config, settings.adapter, processes, generates=True)
        completer = make_completer(trained, config, GenerationConfig(do_sample=False), processes)
        assert completer is not None, "this model can't be completed in slots"

        def complete(prompts: list[list[int]]) -> int:
            requests = [Request(prompt, args.new_tokens) for prompt in prompts]
            completer.complete(requests)
            return sum(len(request.completion) for request in requests)

        rows.extend(measure("ours", args, complete, completer.release))

    code = run_command([f"adapter={adapter}"], GenerateSettings, "", body, optional=["data.path"])
    assert code == 0
    return rows


def measure(
    side: str,
    args: argparse.Namespace,
    complete: Callable[[list[list[int]]], int],
    release: Callable[[], None] | None = None,
) -> list[dict[str, Any]]:
    """A row for each number of prompts: the first call, and the second, by the clock."""
    rows = []
    for number in map(int, args.prompts.split(",")):
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        prompts = random_prompts(number, args.prompt_tokens)
        first_s, _ = timed(complete, prompts)
        seconds, num_tokens = timed(complete, prompts)
        rows.append(
            {
                "side": side,
                "prompts": number,
                "tokens_s": round(num_tokens / seconds, 1),
                "ms_token": round(seconds / num_tokens * number * 1000, 2),
                "first_s": round(first_s, 2),
                "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2) if torch.cuda.is_available() else 0.0,
            }
        )
        print(rows[-1], flush=True)
        if release is not None:
            release()
    return rows


def timed(complete: Callable[[list[list[int]]], int], prompts: list[list[int]]) -> tuple[float, int]:
    """Seconds, and the tokens that were generated."""
    started = time.perf_counter()
    num_tokens = complete(prompts)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - started, num_tokens


def random_prompts(number: int, num_tokens: int) -> list[list[int]]:
    """The same words for the same arguments."""
    generator = torch.Generator().manual_seed(number)
    found: list[list[int]] = torch.randint(FIRST_WORD, NUM_WORDS, (number, num_tokens), generator=generator).tolist()
    return found


def device() -> torch.device:
    """The first GPU, or the CPU."""
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def device_name() -> str:
    """For the JSON."""
    return torch.cuda.get_device_name(0) if torch.cuda.is_available() else "CPU"


if __name__ == "__main__":
    main()
