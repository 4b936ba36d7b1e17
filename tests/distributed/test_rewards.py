"""`task=reward`: the losses of stock libraries at any number of ranks, and a model that they load."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from statistics import fmean

import peft
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid
from transformers import AutoConfig, AutoModelForSequenceClassification

from tests.helpers.classification import load_stock_classifier, make_encoder
from tests.helpers.lines import read_lines, write_lines
from tests.helpers.preferences import BOS, EOS, Example, read_examples, step_rows, write_pairs
from tests.helpers.quick_config import load_config
from tests.helpers.ranks import run_ranks
from tests.helpers.reference import add_lora
from tests.helpers.runs import settings, train_here

pytestmark = pytest.mark.distributed
MAX_LENGTH = 48  # some pairs are cut


@pytest.fixture(scope="module")
def argv(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[str]]:
    folder = tmp_path_factory.mktemp("rewards")
    base = make_encoder("llama", "head", folder / "base", num_labels=1)
    plain = write_pairs(folder / "plain.jsonl")
    rows = read_lines(plain)
    with_margins = [row | {"margin": number % 5 / 4} for number, row in enumerate(rows)]
    write_lines(folder / "margins.jsonl", with_margins)

    def make(name: str, *more: str) -> list[str]:
        own = [f"run.folder={folder / 'runs' / name}", "task=reward", f"training.max_length={MAX_LENGTH}"]
        own += ["training.max_steps=4", "training.learning_rate=1e-2", "data.eval_fraction=0", *more]
        return settings(base, folder / "plain.jsonl", *own, packing=False)

    return make


def reward(model: nn.Module, row: Example, side: str) -> Tensor:
    ids = torch.tensor([[BOS, *row["prompt"].encode(), *row[side].encode(), EOS][:MAX_LENGTH]])
    return model(input_ids=ids).logits[0, 0].float()


def stock_rewards(argv: list[str]) -> list[dict[str, float]]:
    """Loss and figures of every step with stock libraries, an answer at a time: TRL's RewardTrainer's formula."""
    config = load_config(argv)
    model = add_lora(load_stock_classifier(Path(config.model.path or ""), config), config, "SEQ_CLS").train()
    params = [param for param in model.parameters() if param.requires_grad]
    optimizer = torch.optim.AdamW(params, config.training.learning_rate, weight_decay=0.0)
    examples, lines = read_examples(config), []
    for rows in step_rows(config):
        found = []
        for row in (examples[number] for number in rows):
            chosen, rejected = reward(model, row, "chosen"), reward(model, row, "rejected")
            loss = -logsigmoid(chosen - rejected - row.get("margin", 0.0))
            (loss / len(rows)).backward()
            found.append(
                [value.item() for value in (loss, chosen, rejected, chosen - rejected, (chosen > rejected) + 0.0)]
            )
        torch.nn.utils.clip_grad_norm_(params, config.optim.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        names = ("loss", "rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies")
        lines.append(dict(zip(names, map(fmean, zip(*found, strict=True)), strict=True)))
    return lines


CASES = {
    "two ranks": (2, []),
    "one rank, micro-batches of two": (1, ["training.micro_batch_size=2"]),
    "no_shard": (2, ["fsdp=no_shard", "training.global_batch_size=6"]),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("data", ["plain", "margins"])
def test_losses_and_figures_are_those_of_stock_libraries(argv: Callable[..., list[str]], case: str, data: str):
    num_ranks, more = CASES[case]
    run = argv(f"{list(CASES).index(case)}-{data}", *more)
    run = [text.replace("plain.jsonl", f"{data}.jsonl") for text in run]
    expected = stock_rewards(run)
    losses = run_ranks(num_ranks, train_here, run)[0].losses
    assert losses == pytest.approx([line["loss"] for line in expected], abs=1e-5)
    folder = Path(load_config(run).run.folder)
    lines = [line for line in read_lines(folder / "metrics.jsonl") if line.get("loss") is not None]
    assert len(lines) == len(expected) == 4
    for line, figures in zip(lines, expected, strict=True):
        assert {name: line[name] for name in figures} == pytest.approx(figures, abs=1e-5)


def test_stock_peft_loads_the_reward_model(argv: Callable[..., list[str]]):
    """Its rewards are those of our last evaluation, on the same rows."""
    run = argv("loaded", "quant=none")
    run.append(f"data.eval_path={load_config(run).data.path}")
    run_ranks(2, train_here, run)
    config = load_config(run)
    adapter = Path(config.run.folder) / "adapter"
    hf_config = AutoConfig.from_pretrained(adapter)
    assert hf_config.num_labels == 1
    base = AutoModelForSequenceClassification.from_pretrained(config.model.path, config=hf_config, dtype=torch.float32)
    model = peft.PeftModel.from_pretrained(base, adapter).eval()
    with torch.no_grad():
        rewards = [
            [reward(model, row, side).item() for side in ("chosen", "rejected")] for row in read_examples(config)
        ]
    evaluated = [line for line in read_lines(adapter.parent / "metrics.jsonl") if line.get("eval_loss") is not None]
    figures = {key.removeprefix("eval_"): value for key, value in evaluated[-1].items()}
    assert figures["rewards/margins"] == pytest.approx(fmean(a - b for a, b in rewards), abs=1e-5)
    assert (
        figures["rewards/accuracies"] == pytest.approx(fmean(float(a > b) for a, b in rewards)) and len(evaluated) == 2
    )
    assert figures["loss"] < evaluated[0]["eval_loss"] - 0.1  # rejected answers end with a question mark
