"""GRPO and RLOO: TRL's own trainers on stock transformers and PEFT give the losses and figures of our runs.

They get the answers that ours have written. TRL is no dependency of the project: these tests are skipped where it is
not installed.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("trl")

from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

from qlora_fsdp.data.sequences import epoch_order
from qlora_fsdp.data.tokenizer import byte_tokenizer
from qlora_fsdp.training.answers.rollouts import Completion
from tests.helpers.answers import NAMES, answer_settings, lines_of, train_and_record
from tests.helpers.checkpoints import make_checkpoint
from tests.helpers.lines import read_lines
from tests.helpers.quick_config import load_config
from tests.helpers.ranks import run_ranks
from tests.helpers.reference import add_lora, load_stock

pytestmark = [pytest.mark.distributed, pytest.mark.filterwarnings("ignore")]
NUM_STEPS = 20
# Our settings, and TRL's for the same loss. Several steps on the same answers show ratios other than 1.
TWICE = ["grpo.num_iterations=2", "training.learning_rate=3e-3"]
CASES: dict[str, tuple[list[str], dict[str, Any]]] = {
    "dapo": ([], {}),
    "grpo": (
        ["grpo.loss_type=grpo", "grpo.beta=0.1", *TWICE],
        {"loss_type": "grpo", "beta": 0.1, "num_iterations": 2},
    ),
    "dr_grpo": (
        ["grpo.loss_type=dr_grpo", "grpo.scale_rewards=none", "grpo.epsilon_high=0.28", *TWICE],
        {"loss_type": "dr_grpo", "scale_rewards": "none", "epsilon_high": 0.28, "num_iterations": 2},
    ),
    "bnpo": (
        ["grpo.loss_type=bnpo", "grpo.scale_rewards=batch", "grpo.delta=1.3", *TWICE],
        {"loss_type": "bnpo", "scale_rewards": "batch", "delta": 1.3, "num_iterations": 2},
    ),
    "cispo": (
        ["grpo.loss_type=cispo", "grpo.epsilon_high=1.1", *TWICE],
        {"loss_type": "cispo", "epsilon_high": 1.1, "num_iterations": 2},
    ),
    "gspo": (
        [
            "grpo.loss_type=grpo",
            "grpo.importance_sampling_level=sequence",
            "grpo.epsilon=0.01",
            "grpo.beta=0.05",
            *TWICE,
        ],
        {
            "loss_type": "grpo",
            "importance_sampling_level": "sequence",
            "epsilon": 0.01,
            "beta": 0.05,
            "num_iterations": 2,
        },
    ),
    "temperature": (
        ["rollout.temperature=0.7", "grpo.beta=0.1", "grpo.use_bias_correction_kl=false"],
        {"temperature": 0.7, "beta": 0.1, "use_bias_correction_kl": False},
    ),
    "rloo": (["grpo.loss_type=rloo", "grpo.beta=0.05", *TWICE], {"beta": 0.05, "num_iterations": 2}),
    "rloo_normalized": (
        ["grpo.loss_type=rloo", "grpo.normalize_advantages=true"],
        {"beta": 0.0, "normalize_advantages": True},
    ),
}
FIGURES = (
    "loss",
    "grad_norm",
    "reward",
    "reward_std",
    "frac_reward_zero_std",
    *(f"rewards/{name}/{what}" for name in NAMES for what in ("mean", "std")),
    "completions/mean_length",
    "completions/min_length",
    "completions/max_length",
    "completions/clipped_ratio",
    "entropy",
    "kl",
    "clip_ratio/low_mean",
    "clip_ratio/high_mean",
    "clip_ratio/region_mean",
    "cispo_clip_ratio",
)


class HandedIn:
    """A trainer that gets the answers which were written in our run."""

    handed: list[list[Completion]]

    def _generate_single_turn(self, prompt_ids: list[list[int]], *args: Any, **options: Any) -> Any:
        written = self.handed.pop(0)
        assert len(written) == len(prompt_ids)
        tokens = [completion.tokens for completion in written]
        return tokens if isinstance(self, RLOOTrainer) else (tokens, None)


def trl_lines(
    argv: list[str], more: dict[str, Any], written: list[list[Completion]], folder: Path, is_rloo: bool
) -> list[dict[str, float]]:
    config = load_config(argv)
    rows = read_lines(Path(str(config.data.path)))
    num_iterations = more.get("num_iterations", 1)
    number = config.training.global_batch_size or 0
    order = np.concatenate([epoch_order(len(rows), config.training.seed, epoch) for epoch in range(NUM_STEPS)])
    prompts = [rows[row] for row in order[: number * NUM_STEPS // num_iterations]]
    model = add_lora(load_stock(Path(config.model.path or ""), config.quant), config)
    options = {
        "output_dir": str(folder),
        "per_device_train_batch_size": number * config.rollout.num_generations,
        "num_generations": config.rollout.num_generations,
        "max_completion_length": config.rollout.max_completion_length,
        "max_steps": NUM_STEPS,
        "learning_rate": config.training.learning_rate,
        "lr_scheduler_type": "constant",
        "optim": "adamw_torch",
        "max_grad_norm": config.optim.max_grad_norm,
        "logging_steps": 1,
        "shuffle_dataset": False,
        "reward_weights": config.reward.weights,
        "gradient_checkpointing": False,
        "bf16": False,
        "use_cpu": True,
        "report_to": "none",
        "save_strategy": "no",
        **more,
    }
    spec = importlib.util.spec_from_file_location("functions", folder.parent / "functions.py")
    assert spec is not None and spec.loader is not None
    functions = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(functions)
    base, made = (RLOOTrainer, RLOOConfig(**options)) if is_rloo else (GRPOTrainer, GRPOConfig(**options))
    handed_in = type(base.__name__, (HandedIn, base), {})
    trainer = handed_in(
        model=model,
        args=made,
        train_dataset=Dataset.from_list(prompts),
        processing_class=byte_tokenizer(),
        reward_funcs=[getattr(functions, name) for name in NAMES],
    )
    trainer.handed = list(written)
    trainer.train()
    return [line for line in trainer.state.log_history if "loss" in line]


@pytest.mark.parametrize("case", CASES)
def test_trl_gives_the_same_losses_and_figures(tmp_path: Path, case: str) -> None:
    more, theirs = CASES[case]
    make_checkpoint("llama", tmp_path / "model")
    argv = answer_settings(
        tmp_path / "model",
        tmp_path,
        case,
        "quant=none",  # TRL rounds the adapters of quantized models to bfloat16
        f"training.max_steps={NUM_STEPS}",
        *more,
    )
    [found] = run_ranks(1, train_and_record, {case: argv})
    is_rloo = case.startswith("rloo")
    ours, expected = lines_of(argv), trl_lines(argv, theirs, found[case], tmp_path / "trl", is_rloo)
    assert len(ours) == len(expected) == NUM_STEPS
    assert sum(name in expected[0] for name in FIGURES) >= 15
    num_iterations = theirs.get("num_iterations", 1)
    pad = byte_tokenizer().pad_token_id
    for step, (line, other) in enumerate(zip(ours, expected, strict=True)):
        names = [name for name in FIGURES if name in other]
        # Here it is about a group's rewards. TRL looks at the step's, or at those less the divergence.
        if theirs.get("scale_rewards") == "batch" or (is_rloo and theirs["beta"]):
            names = [name for name in names if name != "frac_reward_zero_std"]
        if any(completion.tokens[-1] == pad for completion in found[case][step // num_iterations]):
            names = [name for name in names if name != "completions/clipped_ratio"]  # for TRL such a text has an end
        assert {name: line[name] for name in names} == pytest.approx(
            {name: float(other[name]) for name in names}, abs=1e-5, rel=1e-5
        ), step
