"""Distillation: TRL's own trainer on stock transformers and PEFT gives the losses and figures of our runs.

It gets the answers that ours have written. TRL is no dependency of the project: these tests are skipped where it is
not installed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest

pytest.importorskip("trl")

from datasets import Dataset
from trl import DistillationConfig, DistillationTrainer

from qlora_fsdp.data.sequences import epoch_order
from qlora_fsdp.data.tokenizer import byte_tokenizer
from qlora_fsdp.training.answers.rollouts import Completion
from tests.helpers.answers import lines_of, train_and_record
from tests.helpers.distillation import by_adapter, distill_settings, make_teacher
from tests.helpers.lines import read_lines
from tests.helpers.quick_config import load_config
from tests.helpers.ranks import run_ranks
from tests.helpers.reference import add_lora, load_stock

pytestmark = [pytest.mark.distributed, pytest.mark.filterwarnings("ignore")]
NUM_STEPS = 20
# Our settings, which for TRL are `beta` and `temperature`.
CASES: dict[str, list[str]] = {
    "reverse": ["distill.beta=1"],
    "forward": ["distill.beta=0", "training.packing=false", "training.micro_batch_size=3"],
    "between": ["distill.beta=0.3", "rollout.temperature=0.7"],
}
FIGURES = ("loss", "grad_norm", "entropy", "completions/mean_length")


class HandedIn(DistillationTrainer):  # type: ignore[misc]
    """A trainer that gets the answers which were written in our run."""

    handed: list[list[Completion]]

    def _generate_single_turn(self, prompt_ids: list[list[int]], *args: Any, **options: Any) -> Any:
        written = self.handed.pop(0)
        assert len(written) == len(prompt_ids)
        return [completion.tokens for completion in written]


def trl_lines(argv: list[str], written: list[list[Completion]], folder: Path) -> list[dict[str, float]]:
    config = load_config(argv)
    rows = read_lines(Path(str(config.data.path)))
    number = config.training.global_batch_size or 0
    order = np.concatenate([epoch_order(len(rows), config.training.seed, epoch) for epoch in range(NUM_STEPS)])
    prompts = [{"prompt": rows[row]["prompt"]} for row in order[: number * NUM_STEPS]]
    stock = Path(config.model.path or "")
    teacher = peft.PeftModel.from_pretrained(load_stock(stock, config.quant), config.distill.teacher_adapter)
    trainer = HandedIn(
        model=add_lora(load_stock(stock, config.quant), config),
        teacher_model=teacher.merge_and_unload(),
        args=DistillationConfig(
            output_dir=str(folder),
            per_device_train_batch_size=number,
            max_completion_length=config.rollout.max_completion_length,
            max_steps=NUM_STEPS,
            learning_rate=config.training.learning_rate,
            lr_scheduler_type="constant",
            optim="adamw_torch",
            max_grad_norm=config.optim.max_grad_norm,
            logging_steps=1,
            shuffle_dataset=False,
            gradient_checkpointing=False,
            bf16=False,
            use_cpu=True,
            report_to="none",
            save_strategy="no",
            beta=config.distill.beta,
            temperature=config.rollout.temperature,
        ),
        train_dataset=Dataset.from_list(prompts),
        processing_class=byte_tokenizer(),
    )
    trainer.handed = list(written)
    trainer.train()
    return [line for line in trainer.state.log_history if "loss" in line]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("distill")
    make_teacher(folder)
    return folder


@pytest.mark.parametrize("case", CASES)
def test_trl_gives_the_same_losses_and_figures(folder: Path, case: str) -> None:
    argv = distill_settings(folder, case, by_adapter(folder), f"training.max_steps={NUM_STEPS}", *CASES[case])
    [found] = run_ranks(1, train_and_record, {case: argv})
    ours = lines_of(argv)
    expected = trl_lines(argv, found[case], folder / f"trl-{case}")
    assert len(ours) == len(expected) == NUM_STEPS
    assert ours[0]["loss"] > 0.1
    for step, (line, other) in enumerate(zip(ours, expected, strict=True)):
        assert {name: line[name] for name in FIGURES} == pytest.approx(
            {name: float(other[name]) for name in FIGURES}, abs=1e-5, rel=1e-5
        ), step
