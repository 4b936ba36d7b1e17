"""By which figure of the evaluations a run is judged: where it stops, and which adapter or run of a sweep is best."""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from qlora_fsdp.config.schema import Pruner, TrainingConfig

LOSS = "loss"
LOWER_IS_BETTER = ("loss", "mae")  # how the names of such figures end


@dataclass(frozen=True)
class Criterion:
    """A figure of the evaluations, as transformers' `metric_for_best_model` and `greater_is_better` say it.

    Attributes:
        name: the figure's name: `loss`, or one of the task's own.
        greater_is_better: whether the greatest is the best; else the lowest is.
    """

    name: str = LOSS
    greater_is_better: bool = False

    @classmethod
    def of(cls, training: TrainingConfig) -> Criterion:
        """The figure that the settings name."""
        name = training.metric_for_best_model.removeprefix("eval_")
        greater = training.greater_is_better
        if greater is None:
            greater = not name.endswith(LOWER_IS_BETTER)
        return cls(name, greater)

    @property
    def better(self) -> str:
        """What a better figure is, in a word."""
        return "higher" if self.greater_is_better else "lower"

    def cost(self, value: float) -> float:
        """The figure as a number of which the lowest is the best: infinite where it is none."""
        if not math.isfinite(value):
            return math.inf
        return -value if self.greater_is_better else value

    def values(
        self, losses: Iterable[tuple[int, float]], metrics: Iterable[tuple[int, Mapping[str, float]]]
    ) -> dict[int, float]:
        """The figure after each number of steps; NaN where an evaluation does not have it.

        Args:
            losses: (step, loss) of each evaluation.
            metrics: (step, the task's other figures) of each.
        """
        if self.name == LOSS:
            return dict(losses)
        others = dict(metrics)
        return {step: others.get(step, {}).get(self.name, math.nan) for step, _ in losses}

    def costs(
        self, losses: Iterable[tuple[int, float]], metrics: Iterable[tuple[int, Mapping[str, float]]]
    ) -> dict[int, float]:
        """The same by `cost`."""
        return {step: self.cost(value) for step, value in self.values(losses, metrics).items()}


def make_pruner(pruner: Pruner, arguments: Mapping[str, float]) -> Any:
    """One of Optuna's pruners.

    Raises:
        ImportError: Optuna is missing.
        TypeError, ValueError: its class refuses the arguments.
    """
    optuna: Any = importlib.import_module("optuna")
    counts_as_integers = {name: int(value) if float(value).is_integer() else value for name, value in arguments.items()}
    return getattr(optuna.pruners, pruner.value)(**counts_as_integers)
