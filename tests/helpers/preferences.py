"""The independent reference of preferences: stock transformers and PEFT, one answer at a time, the papers' formulas.

Nothing of `qlora_fsdp` computes here. The data's own sequences say which rows a step has.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
import peft
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from qlora_fsdp.config.schema import Config
from qlora_fsdp.config.specs import DataSpec
from qlora_fsdp.data.run_data import prepare_data
from qlora_fsdp.data.sequences import Sequences, epoch_order
from qlora_fsdp.data.tokenizer import byte_tokenizer
from tests.helpers.checkpoints import VOCAB
from tests.helpers.lines import write_lines
from tests.helpers.one_process import one_process
from tests.helpers.quick_config import load_config
from tests.helpers.reference import add_lora, load_stock, load_stock_adapter
from tests.helpers.runs import WORDS

BOS, EOS = 256, 257
Example = dict[str, Any]


def write_pairs(file: Path, num_rows: int = 40) -> Path:
    """Pairs as text, up to 60 bytes a side, both answers of unlike lengths."""
    rng = random.Random(1)

    def words(at_most: int) -> str:
        return " ".join(rng.choices(WORDS, k=rng.randint(1, at_most)))

    rows = [{"prompt": words(3) + " ", "chosen": words(6), "rejected": f"{words(5)}?"} for _ in range(num_rows)]
    return write_lines(file, rows)


def write_judged(file: Path, num_rows: int = 40) -> Path:
    """Answers with labels, two of three good."""
    write_pairs(file, num_rows)
    pairs = [json.loads(line) for line in file.read_text().splitlines()]
    rows = [
        {"prompt": row["prompt"], "completion": row["chosen" if n % 3 else "rejected"], "label": n % 3 > 0}
        for n, row in enumerate(pairs)
    ]
    return write_lines(file, rows)


def read_examples(config: Config) -> list[Example]:
    """The rows of the file."""
    return [json.loads(line) for line in Path(config.data.path).read_text().splitlines()]


def step_rows(config: Config) -> list[list[int]]:
    """For each step the rows of the file that it trains on."""
    data = prepare_data(DataSpec.of(config), byte_tokenizer(), one_process(), VOCAB).train
    assert isinstance(data, Sequences)
    size, num_steps = config.training.global_batch_size, config.training.max_steps
    assert size is not None and num_steps is not None
    num_epochs = math.ceil(size * num_steps / len(data))
    order = np.concatenate([epoch_order(len(data), config.training.seed, epoch) for epoch in range(num_epochs)])
    return [
        [row for sequence in order[step * size :][:size] for row in data.row_ids_of(int(sequence)).tolist()]
        for step in range(num_steps)
    ]


def stock_figures(argv: Sequence[str]) -> list[dict[str, float]]:
    """Loss and figures of every step of the same run with stock libraries."""
    config = load_config(argv)
    model = Stock.load(config)
    params = [p for p in model.policy.parameters() if p.requires_grad]
    wanted = config.optim
    optimizer = torch.optim.AdamW(params, config.training.learning_rate, tuple(wanted.betas), wanted.eps, 0.0)
    examples, lines = read_examples(config), []
    for rows in step_rows(config):
        if "chosen" in examples[0]:
            found = [pair_figures(model, examples[row], config) for row in rows]
        else:
            found = judged_figures(model, examples, rows, config)
        for figures in found:
            (figures["loss"] / len(rows)).backward()
        torch.nn.utils.clip_grad_norm_(params, wanted.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        names = dict.fromkeys(name for figures in found for name in figures)
        line = {name: fmean(float(f[name].detach()) for f in found if name in f) for name in names}
        if "kl" in line:
            line["rewards/margins"] = line["rewards/chosen"] - line["rewards/rejected"]
        lines.append(line)
    return lines


class Stock(NamedTuple):
    """What is trained, and the model that it started from; None where that is the base alone."""

    policy: peft.PeftModel
    start: peft.PeftModel | None

    @classmethod
    def load(cls, config: Config) -> Stock:
        base, start = Path(config.model.path or ""), config.lora.start
        if start is None:
            return cls(add_lora(load_stock(base, config.quant), config), None)
        policy, before = (load_stock_adapter(base, Path(start), config.quant) for _ in ("policy", "start"))
        return cls(policy, before.eval())


def log_prob(model: peft.PeftModel, prompt: str, answer: str, max_length: int) -> tuple[Tensor, int]:
    """log p(answer and end | prompt), and the tokens of these; of the first `max_length` tokens of all."""
    ids = torch.tensor([[BOS, *prompt.encode(), *answer.encode(), EOS][:max_length]])
    logps = model(input_ids=ids).logits[0, :-1].float().log_softmax(-1)
    tokens = ids[0, 1:]
    chosen = logps[torch.arange(len(tokens)), tokens][len(prompt.encode()) :]
    return chosen.sum(), len(chosen)


def reference_log_prob(model: Stock, prompt: str, answer: str, max_length: int) -> Tensor:
    """The same of the base without the adapter, or with the one that training started from."""
    with torch.no_grad(), model.policy.disable_adapter() if model.start is None else nullcontext():
        return log_prob(model.start or model.policy, prompt, answer, max_length)[0]


def pair_figures(model: Stock, row: Example, config: Config) -> dict[str, Tensor]:
    """Loss and figures of a pair. Settings are read as they are typed, so every default is stated here again."""
    settings, loss = config.preference, config.preference.loss.value
    beta = settings.beta or (2.0 if loss == "simpo" else 0.1)
    epsilon, gamma = settings.label_smoothing, settings.simpo_gamma
    length = config.training.max_length
    (w, num_w), (r, num_r) = (
        log_prob(model.policy, row["prompt"], row[side], length) for side in ("chosen", "rejected")
    )
    nll = -w / num_w
    if loss in ("dpo", "ipo", "hinge", "robust"):
        ratio_w = w - reference_log_prob(model, row["prompt"], row["chosen"], length)
        ratio_r = r - reference_log_prob(model, row["prompt"], row["rejected"], length)
    elif loss in ("simpo", "orpo"):
        w, r = w / num_w, r / num_r
        ratio_w, ratio_r = w, r
    else:
        ratio_w, ratio_r = w, r
    h = beta * (ratio_w - ratio_r)
    log_odds = (w - torch.log1p(-w.exp())) - (r - torch.log1p(-r.exp()))
    value = {
        "dpo": lambda: -(1 - epsilon) * logsigmoid(h) - epsilon * logsigmoid(-h),
        "cpo": lambda: -(1 - epsilon) * logsigmoid(h) - epsilon * logsigmoid(-h),
        "simpo": lambda: -(1 - epsilon) * logsigmoid(h - gamma) - epsilon * logsigmoid(gamma - h),
        "robust": lambda: (-(1 - epsilon) * logsigmoid(h) + epsilon * logsigmoid(-h)) / (1 - 2 * epsilon),
        "hinge": lambda: torch.clamp(1 - h, min=0),
        "ipo": lambda: (ratio_w / num_w - ratio_r / num_r - 1 / (2 * beta)) ** 2,
        "orpo": lambda: -beta * logsigmoid(log_odds),
    }[loss]()
    weight = settings.sft_weight if settings.sft_weight is not None else float(loss in ("cpo", "orpo"))
    figures = {
        "loss": value + weight * nll,
        "rewards/chosen": beta * ratio_w,
        "rewards/rejected": beta * ratio_r,
        "rewards/margins": h,
        "rewards/accuracies": (h > 0).float(),
        "logps/chosen": w,
        "logps/rejected": r,
    }
    if weight:
        figures["nll_loss"] = nll
    if loss == "orpo":
        figures |= {"log_odds_ratio": logsigmoid(log_odds), "log_odds_chosen": log_odds}
    return figures


def judged_figures(
    model: Stock, examples: Sequence[Example], rows: Sequence[int], config: Config
) -> list[dict[str, Tensor]]:
    """KTO's loss and figures of each answer of a step, whose prompts with other answers give the step's KL."""
    settings = config.preference
    beta, length, moved = settings.beta or 0.1, config.training.max_length, []
    for row in rows:
        prompt, other = examples[row]["prompt"], examples[row - 1]["completion"]
        with torch.no_grad():
            now, before = (
                log_prob(model.policy, prompt, other, length)[0],
                reference_log_prob(model, prompt, other, length),
            )
            moved.append(now - before)
    kl = torch.stack(moved).mean().clamp(min=0)
    found = []
    for row in rows:
        prompt, answer, is_good = (examples[row][key] for key in ("prompt", "completion", "label"))
        logp, _ = log_prob(model.policy, prompt, answer, length)
        ratio = logp - reference_log_prob(model, prompt, answer, length)
        side, weight = ("chosen", settings.desirable_weight) if is_good else ("rejected", settings.undesirable_weight)
        value = torch.sigmoid(beta * (ratio - kl if is_good else kl - ratio))
        found.append({"loss": weight * (1 - value), f"rewards/{side}": beta * ratio, f"logps/{side}": logp, "kl": kl})
    return found
