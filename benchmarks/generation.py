#!/usr/bin/env python3
r"""Tokens a second that are generated: this project beside transformers + bitsandbytes + PEFT, in one job.

    python benchmarks/generation.py --shape 8b --out generation.json
    python benchmarks/generation.py --shape 70b --num-gpus 2 --sparse --sides ours

Both sides have the same random weights in nf4 with double quantization, the same random adapter (r=16 on all linear
layers), and the same random prompts, and no text ends early. A figure is all new tokens over all seconds, prompts
included, of a second call; the first records the CUDA graph. `likelihoods` are answers a second, of 20 tokens each,
four to a question of 80, on one GPU. With `--num-gpus` each GPU has some rows of every weight, as `generate` shares a
model that no GPU holds.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import peft
import torch
from make_checkpoint import main as make_checkpoint
from safetensors.torch import save_file
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile
from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig, GenerationConfig

from qlora_fsdp.config.schema import Config
from qlora_fsdp.decoding.completer import Request
from qlora_fsdp.decoding.likelihoods import Scorer, Text
from qlora_fsdp.generate import GenerateSettings
from qlora_fsdp.inference.completions import make_completer
from qlora_fsdp.inference.trained import WHOLE_SHARE, load_trained
from qlora_fsdp.layers.experts.forward import expert_weight_names
from qlora_fsdp.model.tasks.causal_lm import CausalLM
from qlora_fsdp.runtime.processes import Processes
from qlora_fsdp.runtime.run_command import run_command

FIRST_WORD, NUM_WORDS = 3, 500  # of the random checkpoint's vocabulary


def main() -> None:
    """Run the sides in turn; print the table and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=["tiny", "1b", "8b", "70b"], default="8b")
    parser.add_argument("--sides", default="stock,ours")
    parser.add_argument("--num-gpus", type=int, default=1)
    parser.add_argument("--prompts", default="1,8,64", help="numbers of prompts")
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--stock-new-tokens", type=int, default=48, help="of stock transformers, whose rate is steady")
    parser.add_argument("--texts", type=int, default=400, help="whose likelihoods are asked for")
    parser.add_argument("--profile", action="store_true", help="list our kernels, most time first")
    parser.add_argument("--sparse", action="store_true", help="weights of zeros, which take no time to write")
    parser.add_argument("--checkpoint", type=Path, help="a folder to keep the checkpoint in")
    parser.add_argument("--adapter", type=Path, help=argparse.SUPPRESS)  # of a rank, which its launcher has made
    parser.add_argument("--out", type=Path, default=Path("generation.json"))
    args = parser.parse_args()
    if args.num_gpus > 1 and args.sides != "ours":
        parser.error("--num-gpus is for --sides ours")
    if args.adapter:
        return write_rows(run_ours(args, args.checkpoint, args.adapter), args.out)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch:
        checkpoint, adapter = args.checkpoint or Path(scratch) / "base", Path(scratch) / "adapter"
        if not (checkpoint / "model.safetensors.index.json").is_file():
            make_checkpoint(args.shape, checkpoint, sparse=args.sparse)
        write_adapter(checkpoint, adapter)
        if args.num_gpus > 1:
            return launch_ranks(args.num_gpus, checkpoint, adapter)
        for side in args.sides.split(","):
            rows += (run_ours if side == "ours" else run_stock)(args, checkpoint, adapter)
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
    write_rows(rows, args.out)


def launch_ranks(number: int, checkpoint: Path, adapter: Path) -> None:
    """Start this program again, once for each GPU, with what has been made."""
    ranks = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(number), __file__, *sys.argv[1:]]
    subprocess.run([sys.executable, *ranks, "--checkpoint", checkpoint, "--adapter", adapter], check=True)


def write_rows(rows: list[dict[str, Any]], out: Path) -> None:
    """Print the table and write the JSON, in one process of all."""
    if int(os.environ.get("RANK", "0")) > 0:
        return
    print(f"{'side':<8}{'what':<16}{'a second':>12}{'ms/token':>10}{'first, s':>10}{'peak GiB':>10}")
    for row in rows:
        print(
            f"{row['side']:<8}{row['what']:<16}{row['per_second']:>12,.1f}{row['ms_token']:>10.2f}"
            f"{row['first_s']:>10.2f}{row['peak_gib']:>10.1f}"
        )
    out.write_text(json.dumps({"device": device_name(), "torch": torch.__version__, "rows": rows}, indent=1) + "\n")


def write_adapter(checkpoint: Path, folder: Path) -> None:
    """A random LoRA adapter of all linear layers and of all experts, as PEFT saves it."""
    with torch.device("meta"):
        base = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(checkpoint))
    settings = peft.LoraConfig(r=16, lora_alpha=16, target_modules="all-linear")
    if any(expert_weight_names(module) for module in base.modules()):
        settings.target_parameters = ["experts.gate_up_proj", "experts.down_proj"]
        settings.target_modules = ["q_proj", "k_proj", "v_proj", "o_proj"]
    shapes = peft.get_peft_model_state_dict(peft.get_peft_model(base, settings), save_embedding_layers=False)
    settings.base_model_name_or_path, settings.inference_mode = str(checkpoint), True
    settings.save_pretrained(str(folder))
    tensors = {name: torch.randn(shape.shape) * 0.01 for name, shape in shapes.items()}
    save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})


def run_stock(args: argparse.Namespace, checkpoint: Path, adapter: Path) -> list[dict[str, Any]]:
    """Stock libraries' figures."""
    quant = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )
    base = AutoModelForCausalLM.from_pretrained(
        checkpoint, quantization_config=quant, dtype=torch.bfloat16, device_map={"": device()}
    )
    model = peft.PeftModel.from_pretrained(base, str(adapter)).eval()
    base.generation_config.eos_token_id = None
    settings = GenerationConfig(do_sample=False, max_new_tokens=args.stock_new_tokens, pad_token_id=0)

    def complete(prompts: list[list[int]]) -> int:
        ids = torch.tensor(prompts, device=device())
        with torch.inference_mode():
            output = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), generation_config=settings)
        return int(output.numel() - ids.numel())

    def score(texts: list[Text]) -> int:
        """As lm-eval's class for transformers models does it, eight texts of one length at a time."""
        for start in range(0, len(texts), 8):
            batch = texts[start : start + 8]
            with torch.inference_mode():
                logits = model(torch.tensor([text.tokens for text in batch], device=device())).logits
                shares = F.log_softmax(logits, dim=-1, dtype=torch.float32)
            for row, text in zip(shares, batch, strict=True):
                asked, targets = row[-len(text.targets) :], torch.tensor(text.targets, device=device())
                bool((asked.argmax(-1) == targets).all())
                float(asked.gather(1, targets[:, None]).sum())
        return len(texts)

    return measure("stock", args, complete, score)


def run_ours(args: argparse.Namespace, checkpoint: Path, adapter: Path) -> list[dict[str, Any]]:
    """This project's figures."""
    rows: list[dict[str, Any]] = []

    def body(settings: GenerateSettings, config: Config, processes: Processes) -> None:
        whole_share = 0 if args.num_gpus > 1 else WHOLE_SHARE  # a model that one GPU could hold is shared too
        with patch("qlora_fsdp.inference.trained.WHOLE_SHARE", whole_share):
            trained = load_trained(config, settings, processes, generates=True)
        completer = make_completer(trained, GenerationConfig(do_sample=False), processes)
        assert completer is not None, "this model can't be completed in slots"
        scorer = Scorer(cast(CausalLM, trained.model), processes.device)

        def complete(prompts: list[list[int]]) -> int:
            requests = [Request(prompt, args.new_tokens) for prompt in prompts]
            completer.complete(requests)
            return sum(len(request.completion) for request in requests)

        def score(texts: list[Text]) -> int:
            return len(scorer.score(texts))

        rows.extend(measure("ours", args, complete, score, completer.release))
        if args.profile:
            list_kernels(complete, random_words(1, args.prompt_tokens), args.new_tokens)

    overrides = [f"adapter={adapter}", f"model.path={checkpoint}"]
    assert run_command(overrides, GenerateSettings, "", body, optional=["data.path"]) == 0
    return rows


def measure(
    side: str,
    args: argparse.Namespace,
    complete: Callable[[list[list[int]]], int],
    score: Callable[[list[Text]], int],
    release: Callable[[], None] = lambda: None,
) -> list[dict[str, Any]]:
    """A row for each number of prompts, and one of likelihoods: the first call, and the third, by the clock."""
    rows: list[dict[str, Any]] = []
    for number in map(int, args.prompts.split(",")):
        prompts = random_words(number, args.prompt_tokens)
        rows.append({"side": side, "what": f"{number} prompts", **time_calls(complete, prompts, number)})
        release()
    if args.num_gpus > 1:
        return rows
    answers = iter(random_words(args.texts, 20))
    questions = [words for words in random_words(-(args.texts // -4), 80) for _ in range(4)][: args.texts]
    texts = [
        Text((*question, *answer[:-1]), tuple(answer)) for question, answer in zip(questions, answers, strict=True)
    ]
    rows.append({"side": side, "what": "likelihoods", **time_calls(score, texts, 1)})
    return rows


def time_calls(compute: Callable[[Any], int], inputs: Any, number: int) -> dict[str, Any]:
    """Seconds of a first call; of a third one, tokens or texts a second, and ms for each of `number` at a time."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    first_s, _ = timed(compute, inputs)
    timed(compute, inputs)
    seconds, num_done = timed(compute, inputs)
    figures = {
        "per_second": round(num_done / seconds, 1),
        "ms_token": round(seconds / num_done * number * 1000, 2),
        "first_s": round(first_s, 2),
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2) if torch.cuda.is_available() else 0.0,
    }
    print(figures, flush=True)
    return figures


def list_kernels(compute: Callable[[list[list[int]]], int], prompts: list[list[int]], num_tokens: int) -> None:
    """Print the kernels of a fourth call: microseconds and launches for each new token, those of prompts among them."""
    for _ in range(3):
        compute(prompts)
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        compute(prompts)
    kernels = sorted(profiler.key_averages(), key=lambda kernel: -kernel.self_device_time_total)
    print(f"{'us/token':>10}{'a token':>9}  kernel")
    for kernel in kernels[:40]:
        print(
            f"{kernel.self_device_time_total / num_tokens:>10.1f}{kernel.count / num_tokens:>9.1f}  {kernel.key[:110]}"
        )


def timed(compute: Callable[[Any], int], inputs: Any) -> tuple[float, int]:
    """Seconds, and the tokens or texts that were done."""
    started = time.perf_counter()
    num_done = compute(inputs)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - started, num_done


def random_words(number: int, num_tokens: int) -> list[list[int]]:
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
