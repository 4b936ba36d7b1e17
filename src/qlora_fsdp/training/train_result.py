"""How training went, as the loop counts it and summary.json tells it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Any

from qlora_fsdp.config.outlook import Ends
from qlora_fsdp.records.run_state import NUM_FINAL, num_averaged
from qlora_fsdp.training.evaluate import EvaluationResult
from qlora_fsdp.training.step_recorder import StepRecorder


@dataclass
class TrainResult:
    """How training went. A start is one launch of the command: a run that was resumed has had several.

    Attributes:
        num_steps: optimizer steps done, including skipped ones and those of earlier starts.
        losses: mean loss per target token of the steps of this start, without the steps whose gradient was not used.
        num_used: steps whose gradient was used, including those of earlier starts.
        first_used: (loss, gradient norm) of the first NUM_FINAL steps whose gradient was used, even if an earlier start
            ran them.
        last_used: the same of the last ones.
        eval_losses: (step, loss) of each evaluation, including those of earlier starts.
        eval_metrics: the task's other figures in the last evaluation.
        first_step_seconds: duration of the first step after this start, with compilation and allocation.
        tokens_per_second_per_gpu: median over the steps after the first.
        step_gpu_peak_gib: largest peak memory of tensors over the steps, in GiB; None on a CPU.
        doubt: what its figures say against the run; None if nothing.
    """

    num_steps: int = 0
    losses: list[float] = field(default_factory=list)
    num_used: int = 0
    first_used: list[tuple[float, float]] = field(default_factory=list)
    last_used: list[tuple[float, float]] = field(default_factory=list)
    eval_losses: list[tuple[int, float]] = field(default_factory=list)
    eval_metrics: dict[str, float] = field(default_factory=dict)
    first_step_seconds: float | None = None
    tokens_per_second_per_gpu: float | None = None
    step_gpu_peak_gib: float | None = None
    doubt: str | None = None

    def add_step(self, loss: float, norm: float, is_good: bool) -> None:
        """Count a step. Its loss and its gradient's norm count only if its gradient was used (`is_good`)."""
        self.num_steps += 1
        if is_good:
            self.losses.append(loss)
            self.num_used += 1
            self.first_used = [*self.first_used, (loss, norm)][:NUM_FINAL]
            self.last_used = [*self.last_used, (loss, norm)][-NUM_FINAL:]

    def add_earlier(self, used: Sequence[tuple[float, float]]) -> None:
        """Add (loss, gradient norm) of the steps of earlier starts whose gradient was used."""
        self.num_used = len(used)
        self.first_used = list(used[:NUM_FINAL])
        self.last_used = list(used[-NUM_FINAL:])

    @property
    def num_averaged(self) -> int:
        """Steps at either end that the initial and the final loss are means of, as in a run's folder."""
        return num_averaged(self.num_used)

    @property
    def ends(self) -> Ends | None:
        """The figures of the first and of the last steps; None if the gradient of no step was used."""
        if not self.last_used:
            return None
        first, last = self.first_used[: self.num_averaged], self.last_used[-self.num_averaged :]
        losses = fmean(loss for loss, _ in first), fmean(loss for loss, _ in last)
        norms = median(norm for _, norm in first), median(norm for _, norm in last)
        return Ends(first[0][0], losses, norms, self.eval_losses)

    def add_evaluation(self, step: int, evaluation: EvaluationResult | None) -> None:
        """Add the evaluation after `step` steps. Without held-out rows it is None, and nothing is added."""
        if evaluation is not None:
            self.eval_losses.append((step, evaluation.loss))
            self.eval_metrics = evaluation.metrics

    def num_evaluations_without_gain(self) -> int:
        """Evaluations since the one with the lowest loss."""
        losses = [loss for _, loss in self.eval_losses]
        return len(losses) - 1 - losses.index(min(losses)) if losses else 0

    def add_measured(self, recorder: StepRecorder) -> None:
        """Add what the recorder measured over all steps of this start."""
        self.first_step_seconds = recorder.first_step_seconds
        self.tokens_per_second_per_gpu = recorder.tokens_per_second_per_gpu
        self.step_gpu_peak_gib = recorder.step_gpu_peak_gib

    def describe(self) -> dict[str, Any]:
        """Figures for summary.json."""
        ends = self.ends
        return {
            "steps": self.num_steps,
            "initial_loss": None if ends is None else ends.losses[0],
            "final_loss": None if ends is None else ends.losses[1],
            "losses_are_means_of": self.num_averaged,
            **({} if self.doubt is None else {"doubt": self.doubt}),
            "initial_eval_loss": self.eval_losses[0][1] if self.eval_losses else None,
            "eval_loss": self.eval_losses[-1][1] if self.eval_losses else None,
            **({"eval_metrics": self.eval_metrics} if self.eval_metrics else {}),
            "first_step_seconds": self.first_step_seconds,
            "step_gpu_peak_gib": self.step_gpu_peak_gib,
            "tokens_per_second_per_gpu": self.tokens_per_second_per_gpu,
        }
