"""How training went, as the loop counts it and summary.json tells it."""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from qlora_fsdp.records.run_state import NUM_FINAL
from qlora_fsdp.training.evaluate import EvaluationResult
from qlora_fsdp.training.step_recorder import StepRecorder


@dataclass
class TrainResult:
    """How training went. A start is one launch of the command: a run that was resumed has had several.

    Attributes:
        num_steps: optimizer steps done, including skipped ones and those of earlier starts.
        losses: mean loss per target token of the steps of this start, without the steps whose gradient was not used.
        last_losses: the same of the last NUM_FINAL steps whose gradient was used, even if an earlier start ran them.
        eval_losses: (step, loss) of each evaluation, including those of earlier starts.
        eval_metrics: the task's other figures in the last evaluation.
        first_step_seconds: duration of the first step after this start, with compilation and allocation.
        tokens_per_second_per_gpu: median over the steps after the first.
        step_gpu_peak_gib: largest peak memory of tensors over the steps, in GiB; None on a CPU.
    """

    num_steps: int = 0
    losses: list[float] = field(default_factory=list)
    last_losses: list[float] = field(default_factory=list)
    eval_losses: list[tuple[int, float]] = field(default_factory=list)
    eval_metrics: dict[str, float] = field(default_factory=dict)
    first_step_seconds: float | None = None
    tokens_per_second_per_gpu: float | None = None
    step_gpu_peak_gib: float | None = None

    def add_step(self, loss: float, is_good: bool) -> None:
        """Count a step. Its loss counts only if its gradient was used (`is_good`)."""
        self.num_steps += 1
        if is_good:
            self.losses.append(loss)
            self.last_losses = [*self.last_losses, loss][-NUM_FINAL:]

    def add_evaluation(self, step: int, evaluation: EvaluationResult | None) -> None:
        """Add the evaluation after `step` steps. Without held-out rows it is None, and nothing is added."""
        if evaluation is not None:
            self.eval_losses.append((step, evaluation.loss))
            self.eval_metrics = evaluation.metrics

    def add_measured(self, recorder: StepRecorder) -> None:
        """Add what the recorder measured over all steps of this start."""
        self.first_step_seconds = recorder.first_step_seconds
        self.tokens_per_second_per_gpu = recorder.tokens_per_second_per_gpu
        self.step_gpu_peak_gib = recorder.step_gpu_peak_gib

    def describe(self) -> dict[str, Any]:
        """Figures for summary.json."""
        return {
            "steps": self.num_steps,
            "final_loss": fmean(self.last_losses) if self.last_losses else None,
            "initial_eval_loss": self.eval_losses[0][1] if self.eval_losses else None,
            "eval_loss": self.eval_losses[-1][1] if self.eval_losses else None,
            **({"eval_metrics": self.eval_metrics} if self.eval_metrics else {}),
            "first_step_seconds": self.first_step_seconds,
            "step_gpu_peak_gib": self.step_gpu_peak_gib,
            "tokens_per_second_per_gpu": self.tokens_per_second_per_gpu,
        }
