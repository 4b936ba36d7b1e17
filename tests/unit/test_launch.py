"""Sweeps without training: a stand-in for `accelerate launch` writes what a run would."""

from __future__ import annotations

import csv
import errno
import itertools
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.helpers.lines import broken_pipe, read_lines

from qlora_fsdp.common.errors import ConfigError
from qlora_fsdp.config.checks.check_launch import check_accelerate_file
from qlora_fsdp.config.reading.compose import load_config
from qlora_fsdp.launch import local, multirun, sweep
from qlora_fsdp.launch.ranks import _wait, divide_gpus, launch_command
from qlora_fsdp.launch.sweep import job_name
from qlora_fsdp.train import main

BASE = ["model=tiny", "data=random", "training.max_steps=3"]

# Ends with a loss that is lowest at a learning rate of 0.02; a rank of 13 fails. PARALLEL: waits for so many to begin.
STAND_IN = """
import json, os, pathlib, sys, time
sys.path.append(PROJECT)
settings = dict(a.split("=", 1) for a in sys.argv[1:] if "=" in a)
folder = pathlib.Path(settings["run.folder"])
started = time.time()
(folder / "began").touch()
wanted = int(os.environ.get("PARALLEL", 0))
while len(list(folder.parent.glob("*/began"))) < wanted and time.time() < started + 300: time.sleep(0.01)
times = [started, time.time(), os.environ.get("CUDA_VISIBLE_DEVICES")]
with (folder.parent / "starts.jsonl").open("a") as file: file.write(json.dumps([folder.name, *times]) + chr(10))
if settings.get("lora.r") == "13": print("Error: unlucky"); sys.exit(3)
loss = abs(float(settings.get("training.learning_rate", 0)) - 0.02)
from tests.helpers.quick_config import load_config
from qlora_fsdp.config.reading.compose import to_yaml
(folder / "config.yaml").write_text(to_yaml(load_config(sys.argv[1:])))
(folder / "adapter").mkdir(exist_ok=True)
(folder / "summary.json").write_text(json.dumps({"status": "finished", "steps": 3, "final_loss": loss}))
""".replace("PROJECT", repr(str(Path(__file__).parents[2])))


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(local, "launch_command", lambda config, slot, rest: [sys.executable, "-c", STAND_IN, *rest])
    for name in ("RANK", "ACCELERATE_MIXED_PRECISION"):
        monkeypatch.delenv(name, raising=False)


def starts(folder: Path) -> list[Any]:
    return read_lines(folder / "starts.jsonl")


def test_a_failed_job_stops_no_other_and_only_it_is_started_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["-m", *BASE, "lora.r=13,4", "training.learning_rate=0.01,0.02", "run.folder=s"]
    assert main(argv) == 1
    out = capsys.readouterr().out
    assert "[1/4] lora.r=13 training.learning_rate=0.01: failed" in out and "unlucky" in out
    assert any(line.startswith("*  4       0.02") and line.endswith("/adapter") for line in out.splitlines()), out
    names = [name for name, *_ in starts(tmp_path / "s")]
    assert len(names) == 4 and names[-1] == "lora.r=4__training.learning_rate=0.02"
    jobs = json.loads((tmp_path / "s" / "sweep.json").read_text())["jobs"]
    assert [job["overrides"]["lora.r"] for job in jobs] == ["13", "13", "4", "4"]
    assert [job["loss"] for job in jobs if job["status"] == "finished"] == pytest.approx([0.01, 0.0])
    rows = list(csv.DictReader((tmp_path / "s" / "sweep.csv").open()))
    assert rows[3]["training.learning_rate"] == "0.02" and rows[3]["status"] == "finished"

    assert main([*argv[:-2], "training.learning_rate=0.01,0.02,0.03", "run.folder=s"]) == 1  # and one more value
    assert sorted(name.count("lora.r=4") for name, *_ in starts(tmp_path / "s")[4:]) == [0, 0, 0, 1]


def test_a_sweep_does_not_end_with_its_console(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`... | head`, or a log on a full disk, once ended it with a traceback, and the job that ran with it."""
    for number, stream in enumerate((broken_pipe(), os.fdopen(os.open("/dev/full", os.O_WRONLY), "w"))):
        monkeypatch.setattr("sys.stdout", stream)
        assert main(["-m", *BASE, "lora.r=2,4", f"run.folder={number}"]) == 0
        assert len(starts(tmp_path / str(number))) == 2
        with suppress(OSError):
            stream.close()


def test_a_disk_that_fills_up_ends_no_job_that_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*args: Any) -> Any:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(multirun, "write_results", full)
    create = local.create
    monkeypatch.setattr(local, "create", lambda path: full() if path.parent.name == "lora.r=4" else create(path))
    argv = ["-m", *BASE, "lora.r=2,4,8", "run.folder=s"]
    assert main(argv) == 1
    out = capsys.readouterr().out
    assert "[2/3] lora.r=4: can't be started: No space left on device" in out and out.count(": finished in") == 2
    assert "lora.r=8/adapter" in out
    assert out.endswith("/s: No space left on device.\n")
    monkeypatch.setattr(sweep, "write_results", full)
    assert main(argv) == 2
    captured = capsys.readouterr()
    assert "started" not in captured.out and "can't be written: No space left on device. Free space" in captured.err


def test_results_are_told_where_no_link_can_be_made(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*args: Any) -> Any:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(multirun, "link_best", refuse)
    assert main(["-m", *BASE, "lora.r=2,4", "run.folder=s"]) == 0
    out = capsys.readouterr().out
    assert "can't be written" not in out and "is a link" not in out
    assert "/s: sweep.json, sweep.csv" in out and "Next, with the best:" in out


def test_a_job_is_started_with_what_was_typed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["-m", *BASE, "run.name=1.10,true,text-1,'a,b'", "launch.dry_run=true"]) == 0
    words = re.findall(r" (\S*run.name=\S+) ", capsys.readouterr().out)
    names = [shlex.split(word)[0] for word in words]
    assert names == ["run.name=1.10", "run.name=true", "run.name=text-1", "run.name='a,b'"]
    assert [load_config([name]).run.name for name in names] == ["1.10", "true", "text-1", "a,b"]


def test_of_a_setting_that_is_typed_twice_the_later_values_are_swept(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["-m", *BASE, "lora.r=2", "lora.r=4,8", "launch.dry_run=true"]) == 0
    assert re.findall(r"run.folder=\S+/lora.r=(\d)", capsys.readouterr().out) == ["4", "8"]
    assert main(["-m", *BASE, "lora.r=4,8", "lora.r=2", "launch.dry_run=true"]) == 0
    assert re.findall(r" lora.r=(\d) ", capsys.readouterr().out) == ["2"]


@pytest.mark.parametrize(
    ("swept", "paths"),
    [
        ("data='a,b.jsonl',c.jsonl", ["a,b.jsonl", "c.jsonl"]),
        ("data.path=[c.jsonl,ä.jsonl],ö.jsonl", [["c.jsonl", "ä.jsonl"], "ö.jsonl"]),
        ("data=it's.jsonl,that's.jsonl", ["it's.jsonl", "that's.jsonl"]),
    ],
)
def test_commas_in_quotes_and_brackets_divide_no_values(swept: str, paths: list[object], tmp_path: Path) -> None:
    for name in ("a,b", "c", "ä", "ö", "it's", "that's"):
        (tmp_path / f"{name}.jsonl").write_text('{"text": "a"}\n')
    assert main(["-m", *BASE, swept, "run.folder=s"]) == 0
    jobs = json.loads((tmp_path / "s" / "sweep.json").read_text())["jobs"]
    configs = [yaml.safe_load((Path(job["folder"]) / "config.yaml").read_text()) for job in jobs]
    assert [config["data"]["path"] for config in configs] == paths


def test_jobs_run_side_by_side_on_gpus_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3,5,7")
    monkeypatch.setenv("PARALLEL", "2")
    argv = ["-m", *BASE, "lora.r=range(1,5)", "run.folder=s", "launch.parallel=2", "launch.num_processes=2"]
    assert main(argv) == 0
    spans = sorted(starts(tmp_path / "s"), key=lambda span: span[1])
    assert {gpus for *_, gpus in spans} == {"2,3", "5,7"}
    assert spans[1][1] < spans[0][2], "the first two overlap"
    for gpus in ("2,3", "5,7"):
        own = [span for span in spans if span[3] == gpus]
        assert all(before[2] <= after[1] for before, after in itertools.pairwise(own))


def test_every_override_is_checked_before_the_first_job(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["-m", *BASE, "lora.r=4,0", "training.max_length=8,x", "run.folder=s", "lora.rnk=1"]) == 2
    errors = capsys.readouterr().err
    assert "lora.rnk=1 is not a setting. Did you mean lora.r?" in errors and "training.max_length=x must be" in errors
    assert main(["-m", *BASE, "lora.r=4,0", "run.folder=s"]) == 2
    assert capsys.readouterr().err.startswith("\nError: lora.r=0 must be finite and at least 1.")
    assert not (tmp_path / "s" / "starts.jsonl").exists()


def test_a_glob_sweeps_over_the_options_of_a_group(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    mine = tmp_path / "my_conf" / "optim"
    mine.mkdir(parents=True)
    (mine / "mine.yaml").write_text("name: adamw\nweight_decay: 0.1\n")
    argv = ["-m", "--config-dir", str(mine.parent), *BASE, "launch.dry_run=true"]
    assert main([*argv, "optim=glob([a*,m*],exclude=*_8bit)"]) == 0
    assert re.findall(r" optim=(\w+) ", capsys.readouterr().out) == ["adafactor", "adamw", "mine"]
    assert main([*argv, "optim=glob(z*)", "lora.r=glob(*)"]) == 2
    errors = capsys.readouterr().err
    assert "optim=glob(z*) matches no option of optim, which has adafactor, adamw, adamw_8bit, lion_32bit" in errors
    assert "paged_adamw_8bit. Set optim=glob(*)." in errors
    assert "lora.r=glob(*) matches no option of lora.r, which has none. List the values: lora.r=a,b." in errors


def test_a_finished_job_of_other_settings_is_not_taken_for_this_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["-m", *BASE, "lora.r=4,5", "run.folder=s"]) == 0
    assert main(["-m", *BASE, "lora.r=4,5", "run.folder=s", "training.seed=3"]) == 2
    assert "training.seed=3 was 0 in " in capsys.readouterr().err
    assert main(["-m", *BASE, "lora.r=4,5", "run.folder=s", "memory=keep"]) == 0, "a harmless change"


def test_a_sweeper_of_the_ecosystem_gets_the_losses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper")
    argv = [
        "-m",
        *BASE,
        "run.folder=s",
        "training.learning_rate=interval(0.001,0.1)",
        "lora.r=13,4",
        "lora.lora_alpha=8",
    ]
    sampler = ["hydra/sweeper=optuna", "hydra/sweeper/sampler=random", "hydra.sweeper.sampler.seed=1"]
    assert main([*argv, *sampler, "hydra.sweeper.n_trials=6", "hydra.sweeper.n_jobs=2", "launch.parallel=2"]) == 1
    jobs = json.loads((tmp_path / "s" / "sweep.json").read_text())["jobs"]
    assert len(jobs) == 6 and {job["status"] for job in jobs} == {"new", "finished"}, "random search goes on"
    best = min((job for job in jobs if job["status"] == "finished"), key=lambda job: job["loss"])
    found = (tmp_path / "s" / "optimization_results.yaml").read_text()
    assert f"training.learning_rate: {best['overrides']['training.learning_rate']}" in found


@pytest.mark.parametrize(("seed", "exit_code"), [(1, 1), (2, 2)], ids=["later", "at first"])
def test_a_search_goes_on_after_a_trial_of_refused_settings_unless_it_is_the_first(
    seed: int, exit_code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper")
    sampler = ["hydra/sweeper=optuna", "hydra/sweeper/sampler=random", f"hydra.sweeper.sampler.seed={seed}"]
    argv = ["-m", *BASE, "run.folder=s", "training.learning_rate=interval(0.001,0.1)", "lora.r=4,0", *sampler]
    assert main([*argv, "hydra.sweeper.n_trials=6", "hydra.sweeper.n_jobs=1"]) == exit_code
    refused = "lora.r=0 must be finite and at least 1."
    if exit_code == 2:
        assert f"\nError: {refused}" in capsys.readouterr().err and not (tmp_path / "s" / "starts.jsonl").exists()
        return
    assert f" is not started: {refused}" in capsys.readouterr().err
    jobs = json.loads((tmp_path / "s" / "sweep.json").read_text())["jobs"]
    assert [(job["overrides"]["lora.r"] == "0") == (job["status"] == "new") for job in jobs] == [True] * 6
    assert {job["overrides"]["lora.r"] for job in jobs} == {"0", "4"}


def test_a_launcher_without_m_starts_one_job_in_the_run_folder_itself(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*BASE, "hydra/launcher=accelerate", "run.name=one"]) == 0
    assert (Path("outputs") / "one" / "summary.json").exists()
    more = ["launch.num_processes=3", "launch.dry_run=true", "run.name=two"]
    assert main([*BASE, "hydra/launcher=slurm", *more, "slurm.time=1:00:00", 'slurm.options=["--qos=long"]']) == 0
    script, notes = capsys.readouterr()
    assert "slurm.cpus_per_task is not set" in notes and "cpus" not in script
    for line in ("#SBATCH --time=1:00:00", "#SBATCH --qos=long", "#SBATCH --signal=B:USR1@120", "#SBATCH --requeue"):
        assert line in script.splitlines()
    assert not (Path("outputs") / "two" / "job.sbatch").exists()
    assert "slurm.gpus_per_node is not set" in notes and "gpus" not in script
    for cores in ("slurm.cpus_per_task=16", "slurm.options=[--exclusive]"):
        assert main([*BASE, "hydra/launcher=slurm", *more, cores]) == 0
        assert "cpus_per_task" not in capsys.readouterr().err
    for gpus in ("slurm.gpus_per_node=8", "slurm.options=['--gres=gpu:8']"):
        assert main([*BASE, "hydra/launcher=slurm", *more, gpus]) == 0
        assert "gpus_per_node" not in capsys.readouterr().err


def test_a_container_sees_what_the_settings_name(
    tmp_path_factory: pytest.TempPathFactory, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = tmp_path_factory.mktemp("elsewhere") / "rows.jsonl"
    rows.write_text('{"text": "a"}\n')
    typed = ["model=tiny", f"data.path={rows}", "run.folder=/shared/one", "launch.dry_run=true"]
    assert main([*typed, "hydra/launcher=slurm", "slurm.container=my image.sqsh"]) == 0
    script = capsys.readouterr().out
    (line,) = [line for line in script.splitlines() if line.startswith("srun")]
    options = dict(word.removeprefix("--").split("=", 1) for word in shlex.split(line.rstrip("\\")) if "=" in word)
    here = str(Path.cwd())
    assert (options["container-image"], options["container-workdir"]) == ("my image.sqsh", here)
    mounts = options["container-mounts"].split(",")
    assert all(source == target for source, target in (mount.split(":") for mount in mounts))
    seen = {mount.split(":")[0] for mount in mounts}
    assert {here, "/shared/one", str(rows)} <= seen
    assert any("accelerate_configs" in path for path in seen)


@pytest.mark.parametrize(
    ("argv", "environment", "expected"),
    [
        (["-m", "lora.r=1,2"], {"RANK": "0"}, "Start it plainly: qlora-fsdp train -m"),
        (["-m", "lora.r=1,2"], {"ACCELERATE_MIXED_PRECISION": "no"}, "Start it plainly"),
        (
            ["launch.parallel=2"],
            {},
            "has no effect here: nothing is launched. Leave it out: only `qlora-fsdp` train, evaluate",
        ),
        (["hydra/launcher=joblib"], {}, "Set hydra/launcher=accelerate or hydra/launcher=slurm"),
        (["-m", "run.folder=a,b"], {}, "is swept over. Give one folder"),
        (
            ["-m", "lora.r=1,2", "run.name=${lora.rank}"],
            {},
            "'lora.rank' not found. Name an existing setting in ${...}.",
        ),
        (
            ["-m", "lora.r=1,2", "run.folder=/dev/null/x"],
            {},
            "run.folder=/dev/null/x can't be written: Not a directory.",
        ),
        (["-m", "lora.r=1,", "2"], {}, "- 2 is not of the form key=value."),
        (
            ["-m", "training.seed=range(3,3)"],
            {},
            "training.seed=range(3,3) has no value. Write a stop beyond the start",
        ),
        (["-m", "training.learning_rate=interval(1e-5,1e-4)"], {}, "or name the sweeper: hydra/sweeper=optuna"),
        (["-m", "quant=nf4,nf5"], {}, "Did you mean quant=nf4?"),
        (["-m", "lora.r=1,2", "hydra/launcher=slurm", "launch.num_processes=1,2"], {}, "Start a sweep for each"),
        (["hydra/launcher=slurm"], {"PATH": "/nowhere"}, "needs sbatch, which is not here"),
        (["hydra/launcher=slurm", "slurm.signal_seconds=3600"], {}, "Add --signal=B:USR1@SECONDS to slurm.options"),
        (["hydra/launcher=slurm", "launch.num_processes=4", "slurm.gpus_per_node=2"], {}, "more than slurm.gpus_per"),
        (["hydra/launcher=slurm", "slurm.options=[qos=long]"], {}, "qos=long, which is no option of sbatch"),
        (["hydra/launcher=slurm", "slurm.time=soon"], {}, "Set slurm.time=24:00:00"),
        (["hydra/launcher=slurm", "slurm.time=2:00"], {}, "slurm.time=2:00 is 120 seconds to SLURM"),
        (["hydra/launcher=slurm", "slurm.time=2"], {}, "slurm.time=2 is 120 seconds to SLURM"),
        (["-m", "training.seed=1,2", "training.global_batch_size=3", "launch.num_processes=2"], {}, "size=4"),
    ],
)
def test_what_can_not_be_started(
    argv: list[str],
    environment: dict[str, str],
    expected: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert main([*BASE, *argv]) == 2
    assert expected in capsys.readouterr().err


def test_gpus_are_shared_out() -> None:
    def share(visible: str, *argv: str) -> Any:
        config = load_config([])
        for text in argv:
            key, _, value = text.partition("=")
            setattr(config.launch, key, json.loads(value))
        return divide_gpus(config.launch, {"CUDA_VISIBLE_DEVICES": visible})

    assert share("") == [None]
    assert share("", "parallel=2") == [None, None]
    assert share("0,1,2,3", "parallel=2") == [["0", "1"], ["2", "3"]]
    assert share("4,6") == [["4", "6"]]
    for argv, expected in (
        (["parallel=3", "num_processes=2"], "needs 6 GPUs"),
        (["num_processes=9"], "more than 4 GPUs"),
    ):
        with pytest.raises(ConfigError, match=expected):
            share("0,1,2,3", *argv)


def test_folders_of_jobs() -> None:
    assert job_name({"lora.r": "8", "training.learning_rate": "1e-4"}) == "lora.r=8__training.learning_rate=1e-4"
    odd = job_name({"data.path": "/a b/ü.jsonl"})
    assert odd.startswith("data.path=-a-b--.jsonl-") and shlex.quote(odd).replace("'", "") == odd
    assert odd != job_name({"data.path": "/a b/ö.jsonl"})
    assert len(job_name({"x": "y" * 500})) < 140


def test_jobs_are_not_submitted_twice_while_slurm_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, body in {
        "squeue": "echo 'Unable to contact slurm controller' >&2; exit 1",
        "sbatch": "touch sent",
    }.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert main(["hydra/launcher=slurm", *BASE, "run.folder=run"]) == 2
    assert "squeue does not answer: Unable to contact slurm controller." in capsys.readouterr().err
    assert not (tmp_path / "sent").exists()


def test_own_accelerate_config_may_be_in_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    config = load_config([*BASE, "-m", "launch.config_file='~/own.yaml'"])
    assert str(tmp_path / "own.yaml") in launch_command(config.launch, None, [])
    for number, has_any_port in ((1, True), (2, False)):
        (tmp_path / "own.yaml").write_text(f"num_machines: {number}\nmain_process_port: 29500\n")
        assert ("--main_process_port" in launch_command(config.launch, None, [])) == has_any_port


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (
            "distributed_type: NO\nnum_processes: 2",
            "NO, with which accelerate starts one process, not 2.",
        ),
        ("distributed_type: MULTI_CPU\nnum_processes: 2", "Set distributed_type: MULTI_GPU in it, on a CPU too."),
        ("distributed_type: DEEPSPEED\nnum_processes: 2", "asks for DeepSpeed, which this launcher does not do."),
        ("distributed_type: FSDP\nnum_processes: 0", "has num_processes: 0, which is no number of ranks."),
        ("distributed_type: FSDP\nnum_processes: two", "has num_processes: two, which is no number of ranks."),
        ("mixed_precision: fp8\nnum_processes: 1", "Set compute=fp8, and mixed_precision: bf16 in it."),
        ("a: [", "can't be read: line 1: expected the node content"),
        ("", "holds no lines such as `num_processes: 2`."),
    ],
)
def test_a_file_of_accelerates_that_starts_other_ranks_than_it_says(tmp_path: Path, text: str, reason: str) -> None:
    file = tmp_path / "own.yaml"
    file.write_text(text)
    (problem,) = check_accelerate_file(load_config([*BASE, "-m", f"launch.config_file={file}"]).launch)
    assert str(problem).startswith(f"launch.config_file={file} ") and reason in str(problem)


@pytest.mark.parametrize(
    "text", ["distributed_type: NO\nnum_processes: 1", "distributed_type: MULTI_GPU\nnum_processes: gpu"]
)
def test_a_file_of_accelerates_that_starts_what_it_says(tmp_path: Path, text: str) -> None:
    (tmp_path / "own.yaml").write_text(text)
    assert not list(
        check_accelerate_file(load_config([*BASE, "-m", f"launch.config_file={tmp_path / 'own.yaml'}"]).launch)
    )


def test_a_signal_after_the_ranks_have_ended_changes_nothing() -> None:
    """The launcher takes a moment to end, in which a user may still press Ctrl-C."""
    rank = "bash -c 'sleep 0.5; :' -m qlora_fsdp.train"
    launcher = subprocess.Popen(["bash", "-c", f"{rank}; sleep 1; exit 3"], start_new_session=True)
    signals: list[int] = []
    threading.Timer(1.0, signals.append, [signal.SIGINT]).start()
    assert _wait(launcher, signals) == 3 and signals == [signal.SIGINT]
