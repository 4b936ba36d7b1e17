"""A folder that somebody else has made, or may write to, decides neither what is written nor what is removed.

Every case has a file or folder of the victim's outside of the prepared folder, which must be as it was at the end.
"""

from __future__ import annotations

import csv
import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from qlora_fsdp.common.errors import RunFolderError
from qlora_fsdp.common.files import (
    create,
    fresh_folder,
    open_to_append,
    remove,
    remove_leftovers,
    replacing,
    write_atomically,
)
from qlora_fsdp.config.schema import Config
from qlora_fsdp.records.check_run_folder import FOLLOWED, check_run_folder, is_marked
from qlora_fsdp.records.run_folder import close_run_folder
from qlora_fsdp.report.__main__ import main as report
from qlora_fsdp.report.sweep_table import write_results
from qlora_fsdp.runtime.processes import Processes
from qlora_fsdp.training.checkpoints.checkpoint import remove_checkpoints
from qlora_fsdp.training.checkpoints.resume import begin_attempt
from tests.helpers.quick_config import load_config
from tests.helpers.run_folders import start_folder


@pytest.fixture
def victim(tmp_path: Path) -> Iterator[Path]:
    """A folder of the victim's, with a file that nobody else's folder may change."""
    folder = tmp_path / "victim"
    (folder / "step-00000100").mkdir(parents=True)
    for file in (folder / "authorized_keys", folder / "step-00000100" / "data"):
        file.write_text("mine\n")
    yield folder
    found = {str(file.relative_to(folder)): file.read_text() for file in folder.rglob("*") if file.is_file()}
    assert found == {"authorized_keys": "mine\n", "step-00000100/data": "mine\n"}


def config(folder: Path, *more: str) -> Config:
    return load_config(["model=tiny", "data=random", f"run.folder={folder}", *more])


def obstacle(folder: Path, *more: str) -> str:
    """Why a run can't be started in a folder, as the command line says it; empty if it can."""
    return "\n".join(map(str, check_run_folder(config(folder, *more).run)))


def start(folder: Path, processes: Processes) -> Path:
    try:
        return start_folder(config(folder), processes)
    finally:
        close_run_folder()


def checkpoint(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text(json.dumps({"sha256": "0", "step": 1, "files": {}}))
    return folder


def test_a_report_is_not_written_through_prepared_links(tmp_path: Path, victim: Path, processes: Processes):
    folder = start(tmp_path / "run", processes)
    key = victim / "authorized_keys"
    (folder / "report.html").symlink_to(key)
    for pid in (os.getpid(), os.getpid() + 1):
        (folder / f".report.html.{pid}.tmp").symlink_to(key)
    (folder / "summary.json").write_text('{"status": "failed", "error": "\\nssh-ed25519 AAAA\\n"}')
    assert report([str(folder)]) == 0
    assert "<html" in (folder / "report.html").read_text() and not (folder / "report.html").is_symlink()


def test_files_are_written_under_names_that_nobody_can_prepare(tmp_path: Path, victim: Path):
    write_atomically(tmp_path / "a", "one")
    names = set()
    for _ in range(3):
        with replacing(tmp_path / "a") as temporary:
            names.add(temporary.parent.name)
            assert stat.S_IMODE(temporary.parent.stat().st_mode) == 0o700
            temporary.write_text("two")
    assert len(names) == 3 and (tmp_path / "a").read_text() == "two" and list(tmp_path.glob(".a*")) == []
    link = tmp_path / "link"
    link.symlink_to(victim / "authorized_keys")
    with create(link) as file:
        file.write(b"text")
    assert not link.is_symlink()
    link.unlink()
    link.symlink_to(victim / "authorized_keys")
    with pytest.raises(OSError, match="is a link"):
        open_to_append(link)
    os.mkfifo(tmp_path / "pipe")
    for call in (open_to_append, lambda path: write_atomically(path, "text")):
        with pytest.raises(OSError):
            call(tmp_path / "pipe")
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)


def test_a_replaced_file_stays_as_private_as_it_was(tmp_path: Path):
    file = tmp_path / "report.html"
    file.write_text("old")
    file.chmod(0o600)
    write_atomically(file, "new")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_a_folder_is_replaced_whole_or_not_at_all(tmp_path: Path):
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "old").touch()
    with pytest.raises(OSError, match="full"), replacing(tmp_path / "adapter") as temporary:
        temporary.mkdir()
        raise OSError("full")
    assert [path.name for path in tmp_path.rglob("*")] == ["adapter", "old"]
    with replacing(tmp_path / "adapter") as temporary:
        temporary.mkdir()
        (temporary / "new").touch()
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["adapter", "new"]


def test_what_killed_processes_left_behind_goes_and_links_in_it_lead_nowhere(tmp_path: Path, victim: Path):
    with fresh_folder(tmp_path / "a") as own:
        own.rename(own.with_name(".a.killed.tmp"))
    (tmp_path / ".a.killed.tmp" / "link").symlink_to(victim)
    (tmp_path / ".a.linked.tmp").symlink_to(victim)
    remove_leftovers(tmp_path / "a")
    assert [path.name for path in tmp_path.iterdir()] == ["victim"]
    remove(tmp_path / "nothing")


def test_a_repository_with_files_of_the_same_names_is_no_run(tmp_path: Path, processes: Processes):
    """Not even one with a `.lock`, and run.overwrite=true replaces what runs wrote and nothing else."""
    for name in ("adapter", "tensorboard"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "mine").write_text("mine")
    for name in (".lock", "config.yaml"):
        (tmp_path / name).write_text("mine")
    before = {path: path.is_file() and path.read_text() for path in tmp_path.rglob("*")}
    for more in ([], ["run.overwrite=true"]):
        message = obstacle(tmp_path, *more)
        assert f"run.folder={tmp_path} holds adapter, config.yaml, tensorboard, .lock, of no run. Set ano" in message
    with pytest.raises(RunFolderError, match="of no run"):
        start(tmp_path, processes)
    assert {path: path.is_file() and path.read_text() for path in tmp_path.rglob("*")} == before


def test_a_file_of_mlflow_that_no_run_has_written_is_not_replaced(tmp_path: Path):
    (tmp_path / "mlflow.json").write_text("mine")
    assert f"run.folder={tmp_path} holds mlflow.json, of no run." in obstacle(tmp_path, "tracking=mlflow")


def test_links_in_a_run_folder_are_refused_by_name(tmp_path: Path, victim: Path, processes: Processes):
    folder = start(tmp_path / "run", processes)
    for name in FOLLOWED:
        (folder / name).rename(tmp_path / "aside") if (folder / name).exists() else None
        (folder / name).symlink_to(victim if name in ("checkpoints", "wandb") else victim / "authorized_keys")
        for more in ([], ["run.overwrite=true"]):
            assert f"run.folder={folder} holds the link {name}, and a run follows no links" in obstacle(folder, *more)
        with pytest.raises(RunFolderError, match=f"the link {name},"):
            start(folder, processes)
        (folder / name).unlink()
        (tmp_path / "aside").rename(folder / name) if (tmp_path / "aside").exists() else None
    assert obstacle(folder) == ""


def test_a_folder_that_is_no_checkpoint_is_not_removed(tmp_path: Path, victim: Path, processes: Processes):
    folder = start(tmp_path / "run", processes)
    checkpoints = folder / "checkpoints"
    of_the_run = checkpoint(checkpoints / "step-00000100")
    (checkpoints / ".step-00000050.fedcba9876543210.tmp").mkdir()
    (checkpoints / ".step-00000051.0123456789abcdef.tmp").symlink_to(victim)
    others = [checkpoints / ".step-by-step.tmp", checkpoints / "step-100"]
    for path in others:
        path.mkdir()
        (path / "mine").touch()
    assert "holds checkpoints/step-100, of no run." in obstacle(folder, "checkpoint.resume=none")
    begin_attempt(None, folder)
    assert not of_the_run.exists() and sorted(checkpoints.iterdir()) == sorted(others)
    (checkpoints / "step-00000200").symlink_to(victim)
    assert "holds the link checkpoints/step-00000200," in obstacle(folder, "run.overwrite=true")
    remove_checkpoints(checkpoints, [])
    assert (checkpoints / "step-00000200").is_symlink()


def test_honest_folders_are_as_easy_as_before(tmp_path: Path, processes: Processes):
    """A scratch folder that is a link, a run that was moved, a folder of one's own with other files in it."""
    scratch = tmp_path / "disk"
    scratch.mkdir()
    (tmp_path / "outputs").symlink_to(scratch)
    folder = tmp_path / "outputs" / "run"
    assert start(folder, processes) == scratch / "run"
    assert obstacle(folder) == "" and obstacle(folder, "run.overwrite=true") == ""
    checkpoint(scratch / "run" / "checkpoints" / "step-00000002")
    moved = (scratch / "run").rename(tmp_path / "moved")
    assert obstacle(moved) == "" and is_marked(moved)
    start(moved, processes)
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "README.md").touch()
    assert obstacle(tmp_path / "project") == ""
    (tmp_path / "only").mkdir()
    moved.joinpath("checkpoints").rename(tmp_path / "only" / "checkpoints")  # what was copied to another host
    assert obstacle(tmp_path / "only") == ""


def test_a_table_of_a_sweep_holds_no_formula(tmp_path: Path):
    """A spreadsheet computes what begins like one, which may run a command."""
    harmless = {"lora.r": "8", "training.learning_rate": "-1e-4", "a": "+.5", "b": "1,2", "error": None}
    formulas = ["=cmd|' /C calc'!A0", "+1+1", "-x", "@SUM(A1)", "\t=1", "\r=1", "\n=1"]
    jobs = [{"overrides": harmless | {"data.path": text}, "status": "new"} for text in formulas]
    write_results(tmp_path, jobs)
    with (tmp_path / "sweep.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["data.path"] for row in rows] == ["'" + text.replace("\r", " ") for text in formulas]
    assert all(row[name] == (value or "") for row in rows for name, value in harmless.items())
    assert json.loads((tmp_path / "sweep.json").read_text())["jobs"] == jobs
