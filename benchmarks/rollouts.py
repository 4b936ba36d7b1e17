#!/usr/bin/env python3
r"""Tokens a second of many prompts, computed in several ways in one process.

    python benchmarks/rollouts.py --shape 8b --out rollouts.json
    python benchmarks/rollouts.py --model outputs/models/smollm2-135m-instruct --out kl.json

`dequantized`: weights are dequantized for each step, or multiplied by bitsandbytes' kernel, and torch computes
attention over whole slots and sampling. `codes`: products with codes by our kernel, the rest as before. `all`:
attention and sampling by our kernels too, as the program does. `--profile` lists the kernels of `all`, those of prompts
taken off.

The model has random codes, and a random adapter (r=16 on all linear layers). A figure is all new tokens over all
seconds, prompts included, of a second call; the first compiles and records. Then the logits of both ways are compared
where a whole text is read in one call of that many tokens: KL is the mean over tokens of that of the products' from the
dequantized weights' distribution. `noise` is the same for dequantized weights alone, whose products are summed in
another order: the same tokens at the beginning of a call of 512. `--model` compares the logits of a real model alone.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from generation import device_name, random_words, timed, write_adapter
from load_experts import write_model
from make_checkpoint import SHAPES
from make_checkpoint import main as make_checkpoint
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from transformers import AutoTokenizer, GenerationConfig

from qlora_fsdp.config.reading.compose import load_config
from qlora_fsdp.config.schema import Config
from qlora_fsdp.decoding import sampling
from qlora_fsdp.decoding.completer import Request
from qlora_fsdp.generate import GenerateSettings
from qlora_fsdp.inference.completions import make_completer
from qlora_fsdp.inference.trained import load_trained
from qlora_fsdp.layers import decode_linear
from qlora_fsdp.layers.attention import slots
from qlora_fsdp.layers.decode_linear import DecodeLayers
from qlora_fsdp.layers.experts.decode import CodedWeight
from qlora_fsdp.layers.quantized.stored_weight import StoredWeight
from qlora_fsdp.model.find import make_config
from qlora_fsdp.runtime.processes import Processes
from qlora_fsdp.runtime.run_command import run_command

COMPARED_TOKENS = (4, 16, 32, 64, 128)
LONGEST_TEXT = 512  # whose products are computed with dequantized weights either way
REAL_TEXT = Path(__file__).parent.parent / "docs" / "use.md"


def main() -> None:
    """Measure both ways in turn; print a table and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="8b", help="tiny, 1b, 8b, 70b, or a preset of conf/model")
    parser.add_argument("--layers", type=int, help="fewer than a preset has")
    parser.add_argument(
        "--model", type=Path, help="a folder of a real model: its logits are compared, nothing is timed"
    )
    parser.add_argument("--prompts", default="1,8,64,256", help="numbers of prompts")
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--ways", default="dequantized,codes,all")
    parser.add_argument("--profile", action="store_true", help="list the kernels of a step, most time first")
    parser.add_argument("--skip-comparison", action="store_true", help="of the logits of both ways of products")
    parser.add_argument("--out", type=Path, default=Path("rollouts.json"))
    parser.add_argument("settings", nargs="*", help="further settings, such as quant=mxfp4")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []

    def compare_real(settings: GenerateSettings, config: Config, processes: Processes) -> None:
        trained = load_trained(config, settings, processes, generates=True)
        tokenizer = AutoTokenizer.from_pretrained(args.model)
        words = tokenizer(REAL_TEXT.read_text(encoding="utf-8")).input_ids
        with torch.no_grad():
            rows.extend(compare(trained.model.base, processes.device, words[:LONGEST_TEXT]))

    def body(settings: GenerateSettings, config: Config, processes: Processes) -> None:
        trained = load_trained(config, settings, processes, generates=True)
        fill(trained.model.base)
        generation = GenerationConfig(do_sample=True, temperature=1.0, top_k=0, top_p=1.0)
        for number in map(int, args.prompts.split(",")):
            prompts = random_words(number, args.prompt_tokens)
            for name in args.ways.split(","):
                completer = make_completer(trained, generation, processes, max_slots=number)
                assert completer is not None, "this model can't be completed in slots"

                def complete(prompts: list[list[int]], completer: Any = completer) -> int:
                    requests = [Request(prompt, args.new_tokens) for prompt in prompts]
                    completer.complete(requests)
                    return sum(len(request.completion) for request in requests)

                def read(prompts: list[list[int]], completer: Any = completer) -> int:
                    completer.complete([Request(prompt, 1) for prompt in prompts])
                    return len(prompts)

                with computed(name):
                    first_s, _ = timed(complete, prompts)
                    seconds, num_tokens = timed(complete, prompts)
                    read_s, _ = timed(read, prompts)
                    if args.profile and name == "all":
                        list_kernels(complete, read, prompts, args.new_tokens)
                completer.release()
                row = {"prompts": number, "products": name, "tokens_s": round(num_tokens / seconds, 1)}
                row["read_ms"] = round(read_s * 1000, 1)
                row |= {"ms_step": round(seconds / args.new_tokens * 1000, 2), "first_s": round(first_s, 1)}
                rows.append(row)
                print(row, flush=True)
        with torch.no_grad():
            if args.skip_comparison:
                return
            rows.extend(compare(trained.model.base, processes.device, random_words(1, LONGEST_TEXT)[0]))

    with tempfile.TemporaryDirectory() as scratch:
        checkpoint, adapter = Path(scratch) / "base", Path(scratch) / "adapter"
        if args.model:
            checkpoint = args.model
        elif args.shape in SHAPES:
            make_checkpoint(args.shape, checkpoint, sparse=True)
        else:
            write_preset(args.shape, checkpoint, args.layers)
        write_adapter(checkpoint, adapter)
        overrides = [f"adapter={adapter}", f"model.path={checkpoint}", *args.settings]
        if not args.model:
            overrides.append("model.weights=random")
        measure = compare_real if args.model else body
        assert run_command(overrides, GenerateSettings, "", measure, optional=["data.path"]) == 0
    args.out.write_text(
        json.dumps({"device": device_name(), "torch": torch.__version__, "rows": rows}, indent=1) + "\n"
    )


def write_preset(name: str, base: Path, num_layers: int | None) -> None:
    """A model folder of a preset's shape, of whose weights nothing is read."""
    preset = load_config([f"model={name}", "data=random"]).model
    config = make_config(preset.config, name)
    if num_layers is not None:
        config.num_hidden_layers = num_layers
        if hasattr(config, "layer_types"):
            config.layer_types = config.layer_types[:num_layers]
    write_model(config, base)


@contextmanager
def computed(name: str) -> Iterator[None]:
    """While it lasts, texts are completed in one of the ways above."""
    with ExitStack() as patches:
        if name == "dequantized":
            patches.enter_context(patch.object(decode_linear, "products_tile", lambda layers, x: None))
            patches.enter_context(patch.object(CodedWeight, "tile", lambda weight, num_rows: None))
        if name != "all":
            for module in (slots, sampling):
                patches.enter_context(patch.object(module, "has_tensor_cores", lambda device: False))
        yield


def list_kernels(
    complete: Callable[[list[list[int]]], int],
    read: Callable[[list[list[int]]], int],
    prompts: list[list[int]],
    num_steps: int,
) -> None:
    """Print the kernels of a step: microseconds and launches, those of a call that reads the prompts taken off."""
    activity = ProfilerActivity.CUDA if torch.cuda.is_available() else ProfilerActivity.CPU
    found: list[dict[str, tuple[float, int]]] = []
    for compute in (complete, read):
        with profile(activities=[activity]) as profiler:
            compute(prompts)
        kernels = profiler.key_averages()
        found.append({kernel.key: (kernel.self_device_time_total, kernel.count) for kernel in kernels})
    rows: list[tuple[float, float, str]] = []
    for key, (all_us, all_count) in found[0].items():
        read_us, read_count = found[1].get(key, (0.0, 0))
        rows.append(((all_us - read_us) / num_steps, (all_count - read_count) / num_steps, key))
    rows.sort(reverse=True)
    print(f"{len(prompts)} prompts: {sum(row[0] for row in rows) / 1000:.2f} ms of kernels a step")
    for microseconds, count, key in rows[:40]:
        print(f"{microseconds:>10.1f}{count:>8.1f}  {key[:110]}", flush=True)


@torch.no_grad()
def fill(model: nn.Module) -> None:
    """Random weights, quantized or not, of one scale in place of what the model was made with."""
    torch.manual_seed(0)
    for module in model.modules():
        if isinstance(module, StoredWeight):
            module.codes.view(torch.uint8).random_()
            if module.format.double_quant:
                module.scales.view(torch.uint8).random_()
                module.nested_scales.fill_(0.005)
                module.nested_scales[-1] = 0.03
            elif module.format.is_4bit and not module.format.is_bitsandbytes:
                module.scales.view(module.format.scale_dtype).uniform_(0.025, 0.035)
            else:
                module.scales.uniform_(0.025, 0.035)
        elif not isinstance(module, nn.Linear) or "lora" not in type(module).__module__:
            for name, parameter in module.named_parameters(recurse=False):
                if parameter.ndim > 1 and not parameter.requires_grad and name == "weight":
                    parameter.normal_(std=0.04)
                elif parameter.ndim == 1 and name == "weight":
                    parameter.fill_(1.0)


def compare(model: Any, device: torch.device, words: list[int]) -> list[dict[str, Any]]:
    """How far the distributions of both ways are from one another, on the first tokens of a text."""
    layers = DecodeLayers(model)
    text = torch.tensor([words], device=device)

    def log_probabilities(name: str, num_tokens: int) -> Tensor:
        with computed(name), layers.in_use():
            logits: Tensor = model(input_ids=text[:, :num_tokens], use_cache=False).logits[0]
        return logits.double().log_softmax(-1)

    found = []
    longest = log_probabilities("dequantized", len(words))
    for number in COMPARED_TOKENS:
        base = log_probabilities("dequantized", number)
        ours = log_probabilities("codes", number)
        row = {"tokens": number, "KL": divergence(base, ours), "noise": divergence(base, longest[:number])}
        row["same_choice"] = float((base.argmax(-1) == ours.argmax(-1)).double().mean())
        row["entropy"] = float(-(base.exp() * base).sum(-1).mean())
        found.append(row)
        print(row, flush=True)
    return found


def divergence(base: Tensor, other: Tensor) -> float:
    """Mean KL of tokens, in nats."""
    return float((base.exp() * (base - other)).sum(-1).mean())


if __name__ == "__main__":
    main()
