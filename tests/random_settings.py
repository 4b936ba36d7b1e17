"""Random models and settings against stock libraries, for as long as you like: `python -m tests.random_settings SEED`.

No part of `make test`, whose cases are the same every time. A line a run: how far its losses are from those of stock
transformers, bitsandbytes and PEFT in one process, or why it was refused; then the settings, if that is too far.
"""

from __future__ import annotations

import itertools
import random
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from qlora_fsdp.common.errors import UserError
from tests.helpers import shared as shared  # how this process computes
from tests.helpers.checkpoints import FAMILIES, SHAPE, quantize_checkpoint
from tests.helpers.ranks import RanksFailed, run_ranks
from tests.helpers.reference import stock_losses
from tests.helpers.runs import settings, train_here, write_rows

RUNS_A_WORLD = 6
TOO_FAR = 1e-4  # of 6 steps of AdamW, which makes much of little where a gradient is nearly zero


def make_model(rng: random.Random, folder: Path) -> tuple[str, bool]:
    """Write a random checkpoint; its family, and whether it ties head and embeddings."""
    family = rng.choice(["llama", *(name for name in FAMILIES if name != "bert")])
    hidden = 64 * rng.choice([1, 2, 3])
    heads = rng.choice([number for number in (2, 3, 4, 6) if hidden % number == 0])
    head_dim = rng.choice([size for size in (32, 64) if heads * size % 64 == 0])
    if family in ("qwen2", "phi3"):  # their heads share the hidden size out
        hidden = heads * head_dim
    shape = SHAPE | {
        "hidden_size": hidden,
        "intermediate_size": 64 * rng.choice([1, 2, 3, 5]),
        "num_hidden_layers": rng.choice([1, 2, 3, 4]),
        "num_attention_heads": heads,
        "num_key_value_heads": rng.choice([1, heads]),
        "head_dim": head_dim,
        "attention_bias": rng.random() < 0.3,
        "mlp_bias": rng.random() < 0.3,
        **({} if family == "phi3" else {"tie_word_embeddings": family.startswith("gemma") or rng.random() < 0.4}),
    }
    values = shape | {key: value for key, value in FAMILIES[family].items() if key not in shape}
    config = AutoConfig.for_model(family, **values, initializer_range=0.1)
    model = AutoModelForCausalLM.from_config(config, dtype=rng.choice([torch.bfloat16, torch.float16, torch.float32]))
    model.save_pretrained(folder, max_shard_size=rng.choice(["50KB", "200KB", "5GB"]))
    return family, bool(values.get("tie_word_embeddings", False))


def draw(rng: random.Random, num_ranks: int, family: str, is_tied: bool) -> list[str]:
    """Overrides that fit together, most of the time."""

    def some(chance: float, *options: str) -> list[str]:
        return [rng.choice(options)] if rng.random() < chance else []

    quant = rng.choice(["nf4", "nf4", "fp4", "int8", "none"])
    is_4bit, has_int8_ends = quant in ("nf4", "fp4"), not is_tied and rng.random() < 0.3
    micro_batch_size = rng.choice([1, 1, 2, 3])
    found = [f"quant={quant}", f"lora.r={rng.choice([1, 3, 8, 16])}", f"lora.lora_alpha={rng.choice([4, 16, 33])}"]
    if is_4bit:
        found += some(0.5, "quant.bnb_4bit_use_double_quant=false")
        found += some(0.3, *(f"quant.llm_int8_skip_modules=[lm_head,{name}]" for name in ("o_proj", "layers.0")))
    adapted = ["[qkv_proj]", "[gate_up_proj,o_proj]"] if family == "phi3" else ["[q_proj]", "[k_proj,up_proj,lm_head]"]
    targets = some(0.5, *adapted, "'.*layers.0.*proj'", "[down_proj,o_proj]")
    found += [f"lora.target_modules={names}" for names in targets]
    if not targets:
        found += some(0.3, "lora.exclude_modules=[o_proj]", "lora.exclude_modules=[layers.0.mlp.down_proj]")
        found += some(0.3, "lora.rank_pattern={down_proj:5}", "lora.alpha_pattern={down_proj:5.0}")
    found += some(0.25, "lora.use_rslora=true") + some(0.25, "lora.use_dora=true")
    if has_int8_ends:
        found += ["quant.embeddings=int8"]
    else:
        found += some(
            0.3, *(f"lora.modules_to_save=[{n}]" for n in ("lm_head", "embed_tokens", "embed_tokens,lm_head"))
        )
        found += some(0.2, "tokenizer.add_tokens=[<a>,<b>,cat]")
    found += some(0.7, *(f"fsdp.sharding_strategy={name}" for name in ("SHARD_GRAD_OP", "NO_SHARD", "FULL_SHARD")))
    if num_ranks == 4:
        found += some(0.2, "fsdp=hybrid_shard fsdp.hybrid_shard_size=2")
    found += some(0.4, "fsdp.reshard_after_forward=true", "fsdp.reshard_after_forward=false", "fsdp.cpu_offload=true")
    names = ("none", "selective", "attention", "half", "full", "offload_attention", "offload")
    found += some(0.9, *(f"memory.activations={name}" for name in names))
    found += some(0.3, "kernels.fuse_layers=false") + some(0.2, "data.eval_fraction=0.1 training.eval_every_steps=2")
    found += some(0.3, "optim.weight_decay=0.1") + some(0.3, "optim.max_grad_norm=0.1") + some(0.2, "data.loss_on=all")
    found += [
        f"training.micro_batch_size={micro_batch_size}",
        f"training.global_batch_size={micro_batch_size * num_ranks * rng.choice([1, 2, 3])}",
        f"training.max_length={rng.choice([32, 48, 64, 100])}",
        f"training.seed={rng.randrange(100)}",
        "training.max_steps=6",
    ]
    return [setting for group in found for setting in group.split(" ")]


def train_each(cases: Mapping[int, Sequence[str]]) -> dict[int, list[float] | str]:
    """Losses of runs on this rank of a world, or why they were refused."""
    found: dict[int, list[float] | str] = {}
    for case, argv in cases.items():
        try:
            found[case] = train_here(argv).losses
        except UserError as error:
            found[case] = str(error)
    return found


def run_world(rng: random.Random, folder: Path) -> None:
    num_ranks, rows, cases = rng.choice([1, 2, 2, 3, 4]), write_rows(folder / "rows.jsonl"), dict[int, list[str]]()
    for case in range(RUNS_A_WORLD):
        model = folder / f"model-{case}"
        family, is_tied = make_model(rng, model)
        more = draw(rng, num_ranks, family, is_tied)
        if more[0] == "quant=nf4" and rng.random() < 0.2 and not any("skip_modules" in setting for setting in more):
            options: dict[str, Any] = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
            model = quantize_checkpoint(model, folder / f"quantized-{case}", **options)
        own = ["run.overwrite=true", f"run.folder={folder / f'run-{case}'}"]
        cases[case] = settings(model, rows, *more, *own, packing=rng.random() < 0.6)
    try:
        ranks = run_ranks(num_ranks, train_each, cases)
    except RanksFailed as error:  # one refused what others did not see, and ended them
        print(f"a world of {num_ranks} ranks ended: {str(error)[:500]}", flush=True)
        return
    for case, argv in cases.items():
        ours = ranks[0][case]
        if isinstance(ours, str):
            print(f"refused: {ours[:150]!r}", flush=True)
            continue
        try:
            distance = max(abs(a - b) for a, b in zip(ours, stock_losses(argv), strict=True))
        except Exception as error:  # stock libraries refuse less, and fail instead
            print(f"stock fails: {error!r}"[:150], flush=True)
            continue
        if any(rank[case] != ours for rank in ranks):
            distance = float("nan")
        print(f"{distance:.1e} from stock on {num_ranks} ranks", flush=True)
        if not distance < TOO_FAR:
            print(f"TOO FAR: {' '.join(argv)}", flush=True)


def main() -> None:
    seed = int(sys.argv[1])
    for world in itertools.count():
        print(f"seed {seed}, world {world}", flush=True)
        with TemporaryDirectory() as folder:
            run_world(random.Random(f"{seed}/{world}"), Path(folder))


if __name__ == "__main__":
    main()
