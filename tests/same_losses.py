"""Twenty losses of sixteen unlike settings, to the bit: `python -m tests.same_losses FILE [NAME ...]`.

No part of `make test`. Run it before a change that shall not change what is computed: FILE does not exist, and gets the
losses. Run it again afterwards: each line says whether a run's losses are the same, and how far they are apart if not.
Names choose some of the runs.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.helpers import shared as shared  # how this process computes
from tests.helpers.checkpoints import make_checkpoint
from tests.helpers.classification import make_encoder, write_labelled_rows
from tests.helpers.preferences import write_judged, write_pairs
from tests.helpers.quick_config import load_config
from tests.helpers.ranks import run_ranks
from tests.helpers.runs import settings, train_all, write_rows

# For each run: its ranks, its model, its rows, and its settings.
RUNS: dict[str, tuple[int, str, str, list[str]]] = {
    "nf4, packed": (1, "llama", "rows", ["lora.lora_dropout=0.1"]),
    "nf4, padded": (1, "qwen3", "rows", ["training.packing=false", "training.micro_batch_size=2"]),
    "fp4, one scale a block": (1, "gemma2", "rows", ["quant=fp4", "quant.bnb_4bit_use_double_quant=false"]),
    "int8": (1, "mistral", "rows", ["quant=int8", "quant.embeddings=int8"]),
    "dora": (1, "llama", "rows", ["lora.use_dora=true", "kernels.fuse_layers=false"]),
    "experts": (1, "qwen3_moe", "rows", ["training.router_aux_loss_coef=0.01", "lora.use_rslora=true"]),
    "adamw_8bit": (1, "llama", "rows", ["optim=adamw_8bit", "optim.weight_decay=0.1"]),
    "all chosen by the plan": (
        1,
        "llama",
        "rows",
        ["fsdp=auto", "training.micro_batch_size=auto", "data.eval_fraction=0.1", "training.eval_every_steps=10"],
    ),
    "streaming": (1, "llama", "rows", ["data.streaming=true", "data.buffer_rows=50"]),
    "new tokens": (1, "llama", "rows", ["tokenizer.add_tokens=[<a>,the]", "lora.modules_to_save=null"]),
    "dpo": (1, "llama", "pairs", ["task=preference", "preference.sft_weight=0.1"]),
    "kto": (1, "llama", "judged", ["task=preference", "preference.loss=kto", "preference.precompute=false"]),
    "reward": (1, "llama_reward", "pairs", ["task=reward", "training.packing=false"]),
    "classification": (
        1,
        "llama_head",
        "labelled",
        ["task=sequence_classification", "task.labels=[rain,birds,town]", "task.class_weights=balanced"],
    ),
    "sharded, activations in host memory": (2, "llama", "rows", ["memory=offload", "training.micro_batch_size=2"]),
    "sharded, parameters in host memory": (2, "qwen3", "rows", ["fsdp=offload", "memory=recompute"]),
    "one sequence on two ranks": (2, "qwen3", "rows", ["distributed.context_parallel=2"]),
}


def make_runs(folder: Path, names: Sequence[str]) -> dict[str, list[str]]:
    """The command lines of these runs, whose models and rows are written to a folder."""
    rows = {
        "rows": write_rows(folder / "rows.jsonl"),
        "pairs": write_pairs(folder / "pairs.jsonl"),
        "judged": write_judged(folder / "judged.jsonl"),
    }
    argv = {}
    for name in names:
        _, model, kind, more = RUNS[name]
        checkpoint = folder / model
        if not checkpoint.exists():
            if model == "llama_head":
                make_encoder("llama", "head", checkpoint)
            elif model == "llama_reward":
                make_encoder("llama", "head", checkpoint, num_labels=1)
            else:
                make_checkpoint(model, checkpoint)
        if kind == "labelled":
            packing = "training.packing=false"
            more = [*more, packing]
            form = load_config([f"model.path={checkpoint}", "data.path=x", *more]).task.problem_type
            rows[kind] = write_labelled_rows(folder / "labelled.jsonl", form, 40)
        own = f"run.folder={folder / 'runs' / str(len(argv))}"
        argv[name] = settings(checkpoint, rows[kind], own, *more)
    return argv


def main() -> None:
    file, names = Path(sys.argv[1]), sys.argv[2:] or list(RUNS)
    found: dict[str, list[float]] = {}
    with TemporaryDirectory() as folder:
        argv = make_runs(Path(folder), names)
        for num_ranks in (1, 2):
            cases = {name: argv[name] for name in names if RUNS[name][0] == num_ranks}
            if cases:
                found |= {name: trained.losses for name, trained in run_ranks(num_ranks, train_all, cases)[0].items()}
    if not file.exists():
        file.write_text(json.dumps(found, indent=1))
        return
    before = json.loads(file.read_text())
    for name, losses in found.items():
        apart = max(abs(a - b) for a, b in zip(losses, before[name], strict=True))
        verdict = "the same" if losses == before[name] else f"DIFFERENT, by up to {apart:.1e}"
        print(f"{name}: {len(losses)} losses, {losses[0]:.6f} to {losses[-1]:.6f}, {verdict}")


if __name__ == "__main__":
    main()
