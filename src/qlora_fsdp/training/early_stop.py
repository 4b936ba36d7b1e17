"""Whether a run is worth going on with: by its own evaluations, or compared with a sweep's other runs by a pruner."""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from qlora_fsdp.common.errors import ConfigError
from qlora_fsdp.common.text import join_words, plural
from qlora_fsdp.config.criterion import LOSS, Criterion, make_pruner
from qlora_fsdp.config.schema import Pruner
from qlora_fsdp.config.settings import problem_about
from qlora_fsdp.config.specs import StepSpec
from qlora_fsdp.records.run_folder import log
from qlora_fsdp.records.run_state import SWEEP_FILE, read_jobs, read_metrics, read_run
from qlora_fsdp.runtime.processes import Processes

PRUNED = "Optuna's"  # how the reason begins where a pruner has ended a run


class EarlyStop:
    """Says after an evaluation whether the run ends there.

    Args:
        spec: the figure that the run is judged by, the patience and the pruner.
        folder: the run folder; the sweep's is above it.
        processes: rank 0 reads the other runs of the sweep.
    """

    def __init__(self, spec: StepSpec, folder: Path, processes: Processes) -> None:
        self.spec = spec
        self.folder = folder
        self.processes = processes
        if spec.pruner is not None and processes.is_main and not (folder.parent / SWEEP_FILE).is_file():
            log.warning(
                f"training.pruner={spec.pruner.value} stops nothing: it compares the run with the others of a sweep "
                f"(train -m), and there is no {SWEEP_FILE} in {folder.parent}."
            )

    def reason(self, values: Mapping[int, float]) -> str | None:
        """Why the run is to end here; None if it is not. Collective.

        Args:
            values: the figure that the run is judged by, of each evaluation so far, by the number of steps done.
        """
        criterion = self.spec.criterion
        costs = {step: criterion.cost(value) for step, value in values.items()}
        patience = self.spec.early_stopping_patience
        if patience is not None and num_without_gain(costs, self.spec.early_stopping_threshold) >= patience:
            return f"{plural(patience, 'evaluation')} without a {criterion.better} {criterion.name}"
        if self.spec.pruner is None:
            return None
        prunes = self.processes.is_main and self._prunes(costs)
        if self.processes.share(prunes, bool):
            return f"{PRUNED} {self.spec.pruner.value}, by the evaluations of the sweep's other runs"
        return None

    def _prunes(self, costs: Mapping[int, float]) -> bool:
        """What the pruner says, once it has seen the evaluations of the sweep's other runs."""
        others = []
        for folder, _ in read_jobs(self.folder.parent / SWEEP_FILE):
            if folder == self.folder.resolve():
                continue
            state = read_run(folder)
            was_pruned = (state.stopped_early or "").startswith(PRUNED)
            is_complete = state.status == "finished" and not was_pruned
            others.append((read_costs(folder, self.spec.criterion), is_complete))
        assert self.spec.pruner is not None
        return prunes(self.spec.pruner, self.spec.pruner_kwargs, costs, others)


def check_figure(criterion: Criterion, metrics: Mapping[str, float]) -> None:
    """Refuses a figure that the run's first evaluation does not have. Later ones may lack it: it is no number there.

    Raises:
        ConfigError: it has none of this name.
    """
    if criterion.name != LOSS and criterion.name not in metrics:
        key = "training.metric_for_best_model"
        reason = f"is no figure of this run's evaluations, which have {join_words([LOSS, *metrics])}."
        raise ConfigError([problem_about(key, criterion.name, reason, "Set one of them.")])


def num_without_gain(costs: Mapping[int, float], threshold: float = 0.0) -> int:
    """Evaluations since the last one whose cost was lower than the lowest before it by more than the threshold.

    The counter of transformers' EarlyStoppingCallback.
    """
    lowest = math.inf
    number = -1  # the first has none before it
    for cost in costs.values():
        gains = lowest - cost > threshold
        number = 0 if gains else number + 1
        lowest = min(lowest, cost)
    return max(number, 0)


def read_costs(folder: Path, criterion: Criterion) -> dict[int, float]:
    """The cost of each evaluation that a run has recorded, by the number of steps done."""
    found = {}
    for line in read_metrics(folder):
        value = line.get(f"eval_{criterion.name}")
        step = line["step"]
        if type(step) is int and isinstance(value, float):
            found[step] = criterion.cost(value)
    return found


def prunes(
    pruner: Pruner,
    arguments: Mapping[str, float],
    own: Mapping[int, float],
    others: Sequence[tuple[Mapping[int, float], bool]],
) -> bool:
    """Whether one of Optuna's pruners would end a run after its newest evaluation.

    The other runs are replayed to it in a study of its own, which is in memory, so that it needs no storage that all
    processes reach and works with any sweeper of Hydra. The evaluations before the first step say nothing of a run.

    Args:
        pruner: which.
        arguments: those of its class.
        own: the run's costs by step.
        others: costs by step of each other run, and whether it has come to its end, which no pruned one has.

    """
    optuna: Any = importlib.import_module("optuna")
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(pruner=make_pruner(pruner, arguments))
    for costs, is_complete in others:
        trial = study.ask()
        says = _replay(trial, costs)
        if is_complete and says is not None:
            study.tell(trial, list(costs.values())[-1])
    return bool(_replay(study.ask(), own))


def _replay(trial: Any, costs: Mapping[int, float]) -> bool | None:
    """What the pruner says of the last evaluation of a run; None without one after the first step."""
    says = None
    for step, cost in costs.items():
        if step > 0:
            trial.report(cost, step)
            says = bool(trial.should_prune())
    return says
