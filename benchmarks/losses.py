#!/usr/bin/env python3
r"""Losses on real text, kernel by kernel: the same steps in plain torch, fused, and in fp8.

    python benchmarks/losses.py --out losses.json --plot docs/losses.svg
    python benchmarks/losses.py --shape 8b   # from random weights instead

First trains a base on the standard library's documentation (190 M parameters; a minute on an H200), then fine-tunes it
on demo/docstrings.jsonl, 200 steps a side. `plain-halved` is plain once more with half the sequences a pass: the same
gradients, rounded in another order, which tells how far two right runs lie apart. Prints the mean loss of the last 50
steps and the held-out loss, each with its difference from plain.
"""

from __future__ import annotations

import argparse
import json
import math
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "scripts"))

PLAIN = ["kernels.liger=false", "kernels.cross_entropy=torch", "kernels.fuse_layers=false"]
SIDES = {
    "plain": PLAIN,
    "plain-halved": [*PLAIN, "training.micro_batch_size=2"],
    "fused": [],
    "fused-halved": ["training.micro_batch_size=2"],
    "fp8": ["compute=fp8"],
}
NUM_STEPS, NUM_LAST = 200, 50
NUM_AVERAGED = 10  # steps that a point of the plot is the mean of
BASE_STEPS, BASE_BATCH, BASE_CONTEXT, BASE_LEARNING_RATE = 250, 32, 512, 1e-3


def make_base(folder: Path) -> None:
    """Train a Llama of 190 M parameters on documentation, in bf16 autocast; write it in bf16."""
    from transformers import PreTrainedTokenizerFast

    from train_demo_base import build_model, load_text, tokenize

    tokenizer = PreTrainedTokenizerFast.from_pretrained(ROOT / "demo" / "base")
    tokens = tokenize(tokenizer, load_text()[0]).cuda()
    torch.manual_seed(0)
    model: Any = build_model(
        tokenizer,
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=16,
        num_attention_heads=16,
        num_key_value_heads=8,
        max_position_embeddings=BASE_CONTEXT,
    )
    model.cuda()
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    for step in range(1, BASE_STEPS + 1):
        rate = BASE_LEARNING_RATE * min(step / 50, 0.5 * (1 + math.cos(math.pi * step / BASE_STEPS)))
        optimizer.param_groups[0]["lr"] = rate
        starts = torch.randint(len(tokens) - BASE_CONTEXT, (BASE_BATCH, 1), device="cuda")
        batch = tokens[starts + torch.arange(BASE_CONTEXT, device="cuda")]
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 50 == 0:
            print(f"base: step {step}, loss {loss.item():.3f}", flush=True)
    model.bfloat16().save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def run_side(settings: list[str], base: list[str], length: int, folder: Path) -> dict[str, Any]:
    """The losses of all steps, and the held-out loss at the end."""
    command = [
        *(sys.executable, "-m", "qlora_fsdp.train", *base, f"model.tokenizer_path={ROOT}/demo/base"),
        *(f"data.path={ROOT}/demo/docstrings.jsonl", f"data.eval_path={ROOT}/demo/docstrings_eval.jsonl"),
        *(f"training.max_steps={NUM_STEPS}", f"training.max_length={length}", "memory=keep"),
        *("training.micro_batch_size=4", "training.global_batch_size=4"),
        *(f"run.folder={folder}/run", f"data.cache_folder={folder}", *settings),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stdout[-2000:] + done.stderr[-2000:])
    rows = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    summary = json.loads((folder / "run" / "summary.json").read_text())
    losses = [row["loss"] for row in rows if "loss" in row]
    return {
        "losses": losses,
        "held_out": summary["eval_loss"],
        "last": statistics.mean(losses[-NUM_LAST:]),
    }


def plot(results: dict[str, dict[str, Any]], path: Path) -> None:
    """Every side's loss, smoothed, and below it the distance of every step from plain's; one SVG file."""
    from qlora_fsdp.report.charts import HEIGHT, WIDTH, Series, chart, running_mean

    colours = ("#888", "#bbb", "#06c", "#6bf", "#c40")
    steps, plain = range(1, NUM_STEPS + 1), results["plain"]["losses"]
    losses, distances = [], []
    for index, (name, result) in enumerate(results.items()):
        apart = [100 * (loss / wanted - 1) for loss, wanted in zip(result["losses"], plain, strict=True)]
        losses.append(Series(name, steps, running_mean(result["losses"], NUM_AVERAGED), index))
        distances.append(Series(name, steps, apart, index))
    figures = (chart("Loss", losses), chart("Distance from plain", distances, "step; % from plain"))
    parts = [figure[figure.index("<svg") : figure.index("</svg>") + len("</svg>")] for figure in figures]
    sized = [part.replace("<svg", f'<svg y="{i * HEIGHT}" height="{HEIGHT}"', 1) for i, part in enumerate(parts)]
    style = "text{font:11px sans-serif}polyline{fill:none;stroke-width:1.2}.grid{stroke:#ddd}"
    style += "".join(f".c{index}{{stroke:{colour}}}" for index, colour in enumerate(colours))
    legend = "".join(
        f'<text x="400" y="{24 + 14 * index}" style="fill:{colours[index]}">{name}</text>'
        for index, name in enumerate(results)
    )
    size = f'width="{1.5 * WIDTH}" viewBox="0 0 {WIDTH} {2 * HEIGHT}" style="background:#fff"'
    inside = f"<style>{style}</style>{''.join(sized)}{legend}"
    path.write_text(f'<svg xmlns="http://www.w3.org/2000/svg" {size}>{inside}</svg>\n')


def main() -> None:
    """Make the base, run the sides, print the table, write JSON and plot."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=["trained", "8b"], default="trained")
    parser.add_argument("--sides", default=",".join(SIDES))
    parser.add_argument("--length", type=int, default=512, help="tokens a sequence; 4 sequences a step")
    parser.add_argument("--out", type=Path, default=Path("losses.json"))
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        scratch = Path(temporary)
        base = ["model=llama3-8b", "model.weights=random"]
        if args.shape == "trained":
            make_base(scratch / "base")
            base = [f"model.path={scratch}/base"]
        names = args.sides.split(",")
        for name in names:
            (scratch / name).mkdir()
        with ThreadPoolExecutor() as pool:  # side by side on one GPU: no speed is measured
            sides = pool.map(lambda name: run_side(SIDES[name], base, args.length, scratch / name), names)
            results = dict(zip(names, sides, strict=True))
    plain = results["plain"]
    print(f"{'':<16}{'first':>8}{f'last {NUM_LAST}':>10}{'':>9}{'held out':>10}")
    for name, result in results.items():
        last, held_out = (result[key] / plain[key] - 1 for key in ("last", "held_out"))
        print(
            f"{name:<16}{result['losses'][0]:>8.3f}{result['last']:>10.4f}{last:>+9.2%}"
            f"{result['held_out']:>10.4f}{held_out:>+9.2%}"
        )
    command = shlex.join(["python", "benchmarks/losses.py", *sys.argv[1:]])
    args.out.write_text(
        json.dumps({"date": time.strftime("%Y-%m-%d"), "command": command, "sides": results}, indent=1) + "\n"
    )
    if args.plot:
        plot(results, args.plot)


if __name__ == "__main__":
    main()
