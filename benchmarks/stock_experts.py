#!/usr/bin/env python3
r"""The other side of a mixture of experts on one GPU: stock transformers, bitsandbytes and PEFT, with random weights.

    python benchmarks/stock_experts.py --model qwen3-30b-a3b --seq 4096 --mbs 4 --adapt attention
    python -m qlora_fsdp.train experiment=dry_run model=qwen3-30b-a3b training.packing=false \
        training.max_length=4096 training.micro_batch_size=4 training.global_batch_size=null training.max_steps=8

What stock libraries do best: linear layers in nf4 with double quantization, transformers' grouped products of experts
that stay in bf16, Liger's norms, rotary embeddings and loss (--liger), adapters on attention alone or, with `--adapt
experts`, also PEFT's `target_parameters`, of which each forward makes whole weights. Rows are random tokens of full
length. The model is made on the GPU: no checkpoint of 57 GiB is written or read. Prints RESULT {json}: the median step
after the second, tokens/s, what the base and adapters take, and the peak, in GiB of tensors.
"""

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import bitsandbytes as bnb
import torch
import yaml
from accelerate import init_empty_weights
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

GIB = 2**30
PRESETS = Path(__file__).resolve().parents[1] / "conf" / "model"
ATTENTION, EXPERTS = ["q_proj", "k_proj", "v_proj", "o_proj"], ["experts.gate_up_proj", "experts.down_proj"]


def main() -> None:
    """Make the model, train some steps, and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3-30b-a3b", help="a preset")
    parser.add_argument("--layers", type=int, help="fewer layers than the model has")
    parser.add_argument("--seq", type=int, default=4096)
    parser.add_argument("--mbs", type=int, default=4)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--adapt", choices=["attention", "experts"], default="attention")
    parser.add_argument("--no-checkpointing", action="store_true")
    parser.add_argument("--liger", action="store_true")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    started = time.perf_counter()
    model = make_model(args, device)
    made_seconds, base_gib = time.perf_counter() - started, allocated_gib(device)
    lora = LoraConfig(
        r=16,
        lora_alpha=32,
        target_modules=ATTENTION,
        target_parameters=EXPERTS if args.adapt == "experts" else None,
        task_type="CAUSAL_LM",
    )
    if not args.no_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.enable_input_require_grads()
    peft_model = get_peft_model(model, lora).train()
    seconds, losses = train(peft_model, args, device)
    median = sorted(seconds[2:])[len(seconds[2:]) // 2]
    figures = {
        "side": f"stock, adapters on {args.adapt}" + ", liger" * args.liger + ", kept" * args.no_checkpointing,
        "made_s": round(made_seconds, 1),
        "step_s": round(median, 3),
        "tokens_s": round(args.mbs * args.seq / median),
        "base_gib": round(base_gib, 2),
        "peak_gib": round(torch.cuda.max_memory_allocated() / GIB, 2) if device.type == "cuda" else None,
        "losses": [round(loss, 4) for loss in losses],
    }
    print(f"RESULT {json.dumps(figures)}", flush=True)


def make_model(args: argparse.Namespace, device: torch.device) -> Any:
    """A model of a preset's shape: random weights, those of linear layers but the head and the routers in nf4."""
    values: dict[str, Any] = yaml.safe_load((PRESETS / f"{args.model}.yaml").read_text())["config"]
    config = AutoConfig.for_model(**values | ({"num_hidden_layers": args.layers} if args.layers else {}))
    config._experts_implementation = "grouped_mm"
    if args.liger:  # not its experts, which tune themselves for minutes
        from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

        MODEL_TYPE_TO_APPLY_LIGER_FN[config.model_type](swiglu=False)
    with init_empty_weights(include_buffers=False):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if type(child) is nn.Linear and child is not model.get_output_embeddings():
                setattr(parent, name, quantized(child, device))
    for module, name, param in without_memory(model):
        filled = torch.empty(param.shape, dtype=torch.bfloat16, device=device)
        _ = filled.fill_(1.0) if param.ndim == 1 else filled.normal_(std=config.initializer_range)
        module._parameters[name] = nn.Parameter(filled, requires_grad=False)
    model.is_loaded_in_4bit = True  # PEFT asks for it
    model.config.use_cache = False
    return model.to(device)


def quantized(linear: nn.Linear, device: torch.device) -> nn.Module:
    """A layer of the same shape with random weights in nf4."""
    kinds: Any = bnb.nn
    sizes, has_bias = (linear.in_features, linear.out_features), linear.bias is not None
    layer: nn.Module = kinds.Linear4bit(*sizes, has_bias, torch.bfloat16, quant_type="nf4", device="meta")
    weight = torch.empty(linear.weight.shape, dtype=torch.bfloat16, device=device).normal_(std=0.02)
    params = kinds.Params4bit(weight, requires_grad=False, quant_type="nf4", compress_statistics=True)
    params.module = layer  # which gets the scales
    layer.weight = params.to(device)
    return layer


def without_memory(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    """Parameters that are still on meta: the module and the name of each."""
    for module in model.modules():
        for name, param in list(module._parameters.items()):
            if param is not None and param.is_meta:
                yield module, name, param


def train(model: Any, args: argparse.Namespace, device: torch.device) -> tuple[list[float], list[float]]:
    """Seconds and loss of each step, on random tokens."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4, fused=True)
    generator = torch.Generator(device).manual_seed(1)
    vocab, seconds, losses = model.config.vocab_size, [], []
    for _ in range(args.steps):
        ids = torch.randint(3, vocab, (args.mbs, args.seq), generator=generator, device=device)
        started = time.perf_counter()
        with torch.autocast(device.type, torch.bfloat16):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())  # waits for the GPU
        seconds.append(time.perf_counter() - started)
    return seconds, losses


def allocated_gib(device: torch.device) -> float:
    """GiB of tensors on the device; 0 on a CPU."""
    return torch.cuda.memory_allocated() / GIB if device.type == "cuda" else 0.0


if __name__ == "__main__":
    main()
