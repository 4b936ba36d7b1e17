"""W&B and TensorBoard show one run for one run folder, however often the run is started."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.helpers.quick_config import load_config

from qlora_fsdp.config.specs import TrackingSpec
from qlora_fsdp.config.trackers import check_trackers, wandb_mode
from qlora_fsdp.records.journal import Journal, note_missing_key

ROW = {"prompt": "<b>", "completion": "c", "reference": "r"}


class Wandb:
    """What W&B is told."""

    def __init__(self) -> None:
        self.started: list[dict[str, Any]] = []
        self.logged: list[tuple[int, dict[str, Any]]] = []
        self.uploaded: list[list[str]] = []
        self.is_in_use = False

    def teardown(self, exit_code: int) -> None:
        self.is_in_use = False

    class Error(Exception):
        """W&B's own."""

    def init(self, **options: Any) -> Any:
        assert not self.is_in_use
        if options["mode"] == "online":
            self.is_in_use = True
            raise self.Error("no such host\nand so on")
        self.started.append(options)
        return SimpleNamespace(
            id=options["id"],
            summary={},
            log=lambda figures, step: self.logged.append((step, figures)),
            log_artifact=lambda artifact: self.uploaded.append(artifact.folders),
            finish=lambda exit_code: None,
        )

    def Table(self, columns: list[str], data: list[list[Any]]) -> list[dict[str, Any]]:  # W&B's name
        return [dict(zip(columns, row, strict=True)) for row in data]

    def Artifact(self, name: str, type: str) -> Any:
        folders: list[str] = []
        return SimpleNamespace(folders=folders, add_dir=folders.append)


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> Wandb:
    found = Wandb()
    monkeypatch.setitem(sys.modules, "wandb", found)
    return found


def test_run_that_goes_on_is_the_same_run_in_wandb(tmp_path: Path, wandb: Wandb):
    config = load_config(["tracking=wandb", "tracking.wandb_mode=offline", "run.name=mine"])
    for first_step in (0, 7, 9, 0):
        Journal(tmp_path, TrackingSpec.of(config), 10, is_main=True, first_step=first_step).close({})
    ids = [options["id"] for options in wandb.started]
    assert ids[0] == ids[1] == ids[2] != ids[3]
    assert all(options["resume"] == "allow" and options["name"] == "mine" for options in wandb.started)
    assert wandb.uploaded == []


@pytest.mark.parametrize("planted", [["a"], {"a": 1}, 5, "../other", "x" * 65, ""])
def test_an_id_that_no_tracker_makes_is_not_given_to_one(tmp_path: Path, wandb: Wandb, planted: Any):
    (tmp_path / "wandb.json").write_text(json.dumps({"id": planted}))
    config = load_config(["tracking=wandb", "tracking.wandb_mode=offline"])
    Journal(tmp_path, TrackingSpec.of(config), 10, is_main=True, first_step=7).close({})
    (options,) = wandb.started
    assert re.fullmatch("[0-9a-f]{8}", options["id"])


def test_wandb_gets_generations_and_on_request_the_adapter(tmp_path: Path, wandb: Wandb):
    journal = Journal(
        tmp_path,
        TrackingSpec.of(load_config(["tracking=wandb", "tracking.wandb_mode=offline", "tracking.log_adapter=true"])),
        10,
        is_main=True,
    )
    journal.evaluation(4, 1.5, {}, 0.1)
    journal.generations(4, [ROW])
    journal.checkpoint(2, tmp_path, 0.1, 3.0)  # it was written while steps 3 and 4 were done
    journal.close({"status": "finished"})
    assert [step for step, _ in wandb.logged] == [4, 4, 4], "W&B takes nothing for a step that is past"
    assert wandb.logged[1][1] == {"generations": [{"step": 4, **ROW}]}
    assert wandb.uploaded == [[str(tmp_path / "adapter")]]


def test_a_run_does_not_end_with_its_trackers(tmp_path: Path, wandb: Wandb, caplog: pytest.LogCaptureFixture):
    """W&B can't be reached at the start, so it is told offline; later its process is gone."""
    config = load_config(["tracking=wandb", "tracking.wandb_mode=online"])
    journal = Journal(tmp_path, TrackingSpec.of(config), 10, is_main=True)
    assert [options["mode"] for options in wandb.started] == ["offline"]
    assert "W&B can't be reached: no such host. It goes on offline; to send it later: wandb sync " in caplog.text
    journal.evaluation(4, 1.5, {}, 0.1)
    journal.trackers[0].run.log = None  # type: ignore[attr-defined]
    journal.evaluation(5, 1.4, {}, 0.1)
    journal.close({"status": "finished"})
    assert [step for step, _ in wandb.logged] == [4] and "Wandb failed and gets no more figures" in caplog.text
    assert (tmp_path / "metrics.jsonl").read_text().count("eval_loss") == 2


def test_tensorboard_has_one_curve_of_a_run_that_went_on(tmp_path: Path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = load_config(["tracking=tensorboard"])
    first = Journal(tmp_path, TrackingSpec.of(config), 10, is_main=True)
    for step in (1, 2, 3):
        first.evaluation(step, 10.0 + step, {}, 0.1)
    first.generations(3, [ROW])
    first.close({})
    second = Journal(tmp_path, TrackingSpec.of(config), 10, is_main=True, first_step=2)
    second.evaluation(3, 20.0, {}, 0.1)
    second.close({})
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(event.step, event.value) for event in events.Scalars("eval_loss")] == [(1, 11.0), (2, 12.0), (3, 20.0)]
    assert "generation 1/text_summary" in events.Tags()["tensors"]


def test_names_as_in_transformers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "sqlite:////tmp/mlflow.db")
    monkeypatch.setattr("qlora_fsdp.config.trackers.find_spec", lambda name: None)
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL", "NETRC"):
        monkeypatch.delenv(name, raising=False)

    def complaints(*argv: str) -> list[str]:
        return [str(problem) for problem in check_trackers(load_config(argv).tracking)]

    assert complaints("tracking.report_to=[wandb]") == [], "without a key it gets nothing, and a note says so"
    assert complaints("tracking.report_to=[aim]") == [
        "tracking.report_to=[aim] names aim, which is no tracker here. Set some of "
        "tracking.report_to=[wandb,tensorboard,mlflow,trackio]."
    ]
    (problem,) = complaints("tracking=mlflow")
    assert problem.endswith(
        "needs the package mlflow, which is not installed. Run pip install mlflow, or set tracking=none."
    )
    (problem,) = complaints("tracking=tensorboard")
    assert problem.startswith("tracking.report_to=[tensorboard] needs the package tensorboard")
    monkeypatch.setattr("qlora_fsdp.config.trackers.find_spec", lambda name: name)
    (problem,) = complaints("tracking=wandb", "tracking.wandb_mode=online")
    assert problem.startswith("tracking.wandb_mode=online needs a key, and W&B has none here. Run `wandb login`")
    assert "tracking.wandb_mode=offline" in problem
    assert complaints("tracking.wandb_mode=offline", "tracking.report_to=[trackio,wandb,tensorboard]") == []
    (problem,) = complaints("tracking.wandb_mode=offline")
    assert problem.startswith("tracking.wandb_mode=offline has no effect: tracking.report_to does not name W&B. Set")


def test_where_wandb_finds_a_key(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL", "WANDB_CONFIG_DIR", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    config = load_config(["tracking=wandb"])
    note_missing_key(config.tracking)
    assert "W&B gets nothing of this run" in caplog.text and "tracking.wandb_mode=offline" in caplog.text
    (tmp_path / ".netrc").write_text("machine wandb.example.org login user password secret\n")
    assert wandb_mode(config.tracking).value == "disabled"
    (tmp_path / ".config" / "wandb").mkdir(parents=True)
    (tmp_path / ".config" / "wandb" / "settings").write_text("[default]\nbase_url = https://wandb.example.org\n")
    assert wandb_mode(config.tracking).value == "online"
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert wandb_mode(config.tracking).value == "offline"
    caplog.clear()
    note_missing_key(config.tracking)
    note_missing_key(load_config([]).tracking)
    assert caplog.text == ""


def test_mlflow_and_trackio_get_the_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """As stand-ins of the two packages see it."""
    told: list[Any] = []

    def note(name: str, result: Any = None) -> Any:
        return lambda *args, **options: (told.append((name, args, options)), result)[1]

    started = SimpleNamespace(info=SimpleNamespace(run_id="id"))
    names = ("set_experiment", "log_params", "log_metrics", "log_table", "log_artifacts", "end_run")
    mlflow = SimpleNamespace(**{name: note(name) for name in names}, start_run=note("start_run", started))
    monkeypatch.delenv("MLFLOW_EXPERIMENT_NAME", raising=False)
    run = SimpleNamespace(log=note("trackio.log"), finish=note("finish"))
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)  # type: ignore[arg-type]
    monkeypatch.setitem(
        sys.modules, "trackio", SimpleNamespace(init=note("init", run), Table=lambda dataframe: dataframe)
    )  # type: ignore[arg-type]
    settings = ["tracking.report_to=[mlflow,trackio]", "tracking.log_adapter=true", "run.name=mine"]
    for first_step, summary in ((0, {}), (7, {"status": "finished"})):
        journal = Journal(tmp_path, TrackingSpec.of(load_config(settings)), 10, is_main=True, first_step=first_step)
        journal.evaluation(8, 1.5, {}, 0.1)
        journal.generations(8, [{**ROW, "rewards": "1 (correct 1)"}])
        journal.evaluation(9, 1.5, {"pass@1": 0.5}, 0.1)
        journal.close(summary)
    by_name = {name: [(args, options) for each, args, options in told if each == name] for name, _, _ in told}
    assert [options["run_id"] for _, options in by_name["start_run"]] == [None, "id"], "the same run"
    assert by_name["start_run"][0][1]["run_name"] == by_name["init"][0][1]["name"] == "mine"
    assert by_name["log_metrics"][0] == (({"eval_loss": 1.5, "eval_seconds": 0.1},), {"step": 8})
    assert by_name["trackio.log"][0] == (({"eval_loss": 1.5, "eval_seconds": 0.1},), {"step": 8})
    columns = {name: [text] for name, text in {"step": 8, **ROW, "rewards": "1 (correct 1)"}.items()}
    assert by_name["log_table"][0] == ((columns, "generations/step-8.json"), {})
    assert by_name["trackio.log"][1][0][0]["generations"].to_dict("list") == columns
    assert by_name["log_metrics"][1][0][0]["eval_pass_at_1"] == 0.5, "MLflow takes no @ in a name"
    assert [args for args, _ in by_name["end_run"]] == [("FAILED",), ("FINISHED",)]
    assert len(by_name["log_artifacts"]) == 1 and len(by_name["finish"]) == 2
    params = [args[0] for args, _ in by_name["log_params"]]
    assert all(len(some) <= 100 for some in params) and [some.get("lora.r") for some in params].count("16") == 1
