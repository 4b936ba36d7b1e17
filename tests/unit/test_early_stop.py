"""Early stopping and pruning against transformers' callback and a study of Optuna's."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
from transformers import EarlyStoppingCallback

from qlora_fsdp.config.criterion import Criterion
from qlora_fsdp.config.schema import Pruner
from qlora_fsdp.training.early_stop import num_without_gain, prunes


@pytest.mark.parametrize("threshold", [0.0, 0.15])
def test_patience_counts_as_transformers_does(threshold: float) -> None:
    values = [0.5, 0.6, 0.6, 0.7, 0.65, 0.9, 0.8, 0.95, 0.2]
    callback = EarlyStoppingCallback(100, threshold)
    arguments = SimpleNamespace(metric_for_best_model="f1", greater_is_better=True)
    state = SimpleNamespace(best_metric=None)
    criterion = Criterion("f1", greater_is_better=True)
    for number, value in enumerate(values, start=1):
        callback.check_metric_value(arguments, state, None, value)
        state.best_metric = value if state.best_metric is None else max(value, state.best_metric)
        costs = {step: criterion.cost(each) for step, each in enumerate(values[:number])}
        assert num_without_gain(costs, threshold) == callback.early_stopping_patience_counter


def test_figures_that_are_no_numbers_are_no_gain() -> None:
    criterion = Criterion()
    costs = {step: criterion.cost(math.nan) for step in range(4)}
    assert num_without_gain(costs) == 3 and num_without_gain({}) == 0


@pytest.mark.parametrize(
    ("pruner", "arguments"),
    [
        (Pruner.MedianPruner, {"n_startup_trials": 2}),
        (Pruner.PercentilePruner, {"percentile": 25.0, "n_startup_trials": 1}),
        (Pruner.SuccessiveHalvingPruner, {"min_resource": 1, "reduction_factor": 2}),
    ],
)
def test_a_pruner_sees_what_a_study_of_optuna_shows_it(pruner: Pruner, arguments: dict[str, float]) -> None:
    """Runs one after another, by `study.optimize`, and by what each finds in the folders of the others."""
    optuna = pytest.importorskip("optuna")
    curves = [[3.0, 2.0, 1.0], [3.0, 2.5, 2.0], [2.9, 1.5, 0.9], [3.1, 2.2, 1.5], [2.0, 2.4, 0.5], [3.5, 3.0, 2.9]]
    ended: list[int] = []

    def objective(trial: optuna.Trial) -> float:
        for step, value in enumerate(curves[trial.number], start=1):
            trial.report(value, step)
            if trial.should_prune():
                ended.append(step)
                raise optuna.TrialPruned
        ended.append(len(curves[trial.number]))
        return curves[trial.number][-1]

    study = optuna.create_study(pruner=getattr(optuna.pruners, pruner.value)(**arguments))
    study.optimize(objective, n_trials=len(curves))
    others: list[tuple[dict[int, float], bool]] = []
    for curve, end in zip(curves, ended, strict=True):
        seen = {0: 4.0}
        is_pruned = False
        for step, value in enumerate(curve, start=1):
            seen[step] = value
            is_pruned = prunes(pruner, arguments, seen, others)
            if is_pruned:
                break
        assert len(seen) - 1 == end
        others.append((seen, not is_pruned))
    assert min(ended) < 3 == max(ended)
