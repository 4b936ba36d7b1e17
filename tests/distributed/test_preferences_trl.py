"""Preferences: TRL's own trainers on stock transformers and PEFT give the losses and figures of our runs.

TRL is no dependency of the project: these tests are skipped where it is not installed.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trl")

import peft
from datasets import Dataset
from torch.utils.data import SequentialSampler
from transformers import PreTrainedTokenizerBase
from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer

from qlora_fsdp.config.schema import Config
from qlora_fsdp.data.tokenizer import byte_tokenizer
from tests.helpers.checkpoints import make_checkpoint
from tests.helpers.preferences import read_examples, step_rows, write_judged, write_pairs
from tests.helpers.quick_config import load_config
from tests.helpers.ranks import run_ranks
from tests.helpers.reference import add_lora, load_stock
from tests.helpers.runs import settings, train_all

pytestmark = [pytest.mark.distributed, pytest.mark.filterwarnings("ignore")]
NUM_ROWS, NUM_STEPS = 8, 20
# Not quantized: TRL rounds the adapters of quantized models to bfloat16.
COMMON = [
    "task=preference",
    "quant=none",
    "training.packing=false",
    f"training.max_steps={NUM_STEPS}",
    "optim.max_grad_norm=1.0",
]
PAIRS = [*COMMON, "training.global_batch_size=4", "training.micro_batch_size=4"]
JUDGED = [*COMMON, f"training.global_batch_size={NUM_ROWS}", f"training.micro_batch_size={NUM_ROWS}"]
# Our settings, and TRL's for the same loss.
CASES: dict[str, tuple[list[str], dict[str, Any]]] = {
    "dpo": ([], {"loss_type": ["sigmoid"]}),
    "ipo": (["preference.loss=ipo"], {"loss_type": ["ipo"]}),
    "hinge": (["preference.loss=hinge"], {"loss_type": ["hinge"]}),
    "robust": (
        ["preference.loss=robust", "preference.label_smoothing=0.1"],
        {"loss_type": ["robust"], "label_smoothing": 0.1},
    ),
    "rpo": (["preference.sft_weight=0.5"], {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.5]}),
    "kto": (
        ["preference.loss=kto", "preference.desirable_weight=1.5"],
        {"desirable_weight": 1.5, "undesirable_weight": 1.0},
    ),
}
EXPERIMENTAL: dict[str, tuple[list[str], dict[str, Any]]] = {
    "simpo": (["preference.loss=simpo"], {"loss_type": "simpo", "cpo_alpha": 0.0, "beta": 2.0, "simpo_gamma": 1.0}),
    "cpo without likelihood": (
        ["preference.loss=cpo", "preference.sft_weight=0.0"],
        {"loss_type": "sigmoid", "cpo_alpha": 0.0, "beta": 0.1},
    ),
}


class InOrder:
    """A trainer that takes rows as they come."""

    def _get_train_sampler(self, *args: Any) -> SequentialSampler:
        return SequentialSampler(self.train_dataset)  # type: ignore[attr-defined]


def trl_lines(argv: Sequence[str], more: dict[str, Any], folder: Path, kind: str) -> list[dict[str, float]]:
    """The log of TRL's trainer on the rows of each of our steps."""
    config = load_config(argv)
    examples = read_examples(config)
    rows = [examples[row] for step in step_rows(config) for row in step]
    model = add_lora(load_stock(Path(config.model.path or ""), config.quant), config)
    size = NUM_ROWS if kind == "kto" else 1
    if kind == "kto":  # rotated among all rows, in the order of the file
        rows = examples * NUM_STEPS
    options = {
        "output_dir": str(folder),
        "per_device_train_batch_size": size,
        "gradient_accumulation_steps": len(rows) // NUM_STEPS // size,
        "max_steps": NUM_STEPS,
        "learning_rate": config.training.learning_rate,
        "lr_scheduler_type": "constant",
        "optim": "adamw_torch",
        "max_grad_norm": config.optim.max_grad_norm,
        "logging_steps": 1,
        "max_length": config.training.max_length,
        "gradient_checkpointing": False,
        "bf16": False,
        "use_cpu": True,
        "report_to": "none",
        "save_strategy": "no",
        **more,
    }
    trainer = _trainer(kind, model, options, Dataset.from_list(rows), byte_tokenizer())
    trainer.train()
    return [line for line in trainer.state.log_history if "loss" in line]


def _trainer(
    kind: str, model: peft.PeftModel, options: dict[str, Any], data: Dataset, tokenizer: PreTrainedTokenizerBase
) -> Any:
    if kind == "kto":
        base, made = KTOTrainer, KTOConfig(**options)
    elif kind in EXPERIMENTAL:
        from trl.experimental.cpo import CPOConfig, CPOTrainer

        base, made = CPOTrainer, CPOConfig(**options)
    else:
        base, made = DPOTrainer, DPOConfig(**options)
    in_order = type(base.__name__, (InOrder, base), {})
    return in_order(model=model, args=made, train_dataset=data, processing_class=tokenizer)


def our_lines(config: Config) -> list[dict[str, float]]:
    lines = [json.loads(line) for line in (Path(config.run.folder) / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "loss" in line]


@pytest.mark.parametrize("case", [*CASES, *EXPERIMENTAL])
def test_trl_gives_the_same_losses_and_figures(tmp_path: Path, case: str) -> None:
    more, theirs = (CASES | EXPERIMENTAL)[case]
    make_checkpoint("llama", tmp_path / "model")
    write = write_judged if case == "kto" else write_pairs
    rows = write(tmp_path / "rows.jsonl", NUM_ROWS)
    argv = settings(tmp_path / "model", rows, *(JUDGED if case == "kto" else PAIRS), *more)
    run_ranks(1, train_all, {case: argv})
    ours, expected = our_lines(load_config(argv)), trl_lines(argv, theirs, tmp_path / "trl", case)
    assert len(ours) == len(expected) == NUM_STEPS
    names = [name for name in ours[0] if name.startswith(("rewards/", "logps/")) or name in ("loss", "kl")]
    assert len(names) == 7
    for line, other in zip(ours, expected, strict=True):
        assert {name: line[name] for name in names} == pytest.approx(
            {name: float(other[name]) for name in names}, abs=1e-5, rel=1e-5
        )
