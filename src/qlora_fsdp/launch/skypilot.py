"""`hydra/launcher=skypilot`: one managed job of SkyPilot's for each run, on whichever cloud has its GPUs.

A managed job is started again when its machines are taken back, and the run resumes from its folder, which is on a
bucket that every start mounts. Imports no torch.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from qlora_fsdp.common.errors import LaunchError, Problem, refuse
from qlora_fsdp.common.run_key import RUN_KEY, make_key
from qlora_fsdp.common.terminal import say
from qlora_fsdp.config.schema import SkypilotConfig
from qlora_fsdp.launch.node_script import (
    NodeVariables,
    as_yaml,
    folders_not_kept,
    job_names,
    node_script,
    notes_on_files_left_here,
    refuse_launch_settings,
    sweep_that_waits,
)
from qlora_fsdp.launch.sweep import Job, Sweep
from qlora_fsdp.runtime.run_command import print_result

VARIABLES = NodeVariables(
    rank="$SKYPILOT_NODE_RANK",
    main='$(head -n 1 <<<"$SKYPILOT_NODE_IPS")',
    gpus="SKYPILOT_NUM_GPUS_PER_NODE",
)
SAVED = [138, 143]  # exit codes of a run that a signal has told to save
NOT_SAVED = (
    "Note: a spot machine may be gone without a signal, and the run begins anew then. Set checkpoint.every_minutes=15."
)
NOT_COPIED = "put it into a bucket of skypilot.file_mounts, or below skypilot.workdir, and name it from there."
NO_MOUNT = 'Set skypilot.file_mounts={/shared: "s3://BUCKET"} and run.folder=/shared/NAME.'


def submit_to_skypilot(jobs: list[Job], sweep: Sweep) -> None:
    """Hands each job to `sky jobs launch`, or prints the tasks.

    Raises:
        ConfigError: settings that SkyPilot would ignore, or a run folder that would be lost.
        LaunchError: SkyPilot is not here, or refuses a task.
    """
    if not jobs:
        return
    settings = jobs[0].config.skypilot
    _check(jobs, sweep)
    if settings.use_spot and not any(map(_saves_on_the_way, jobs)):
        print(NOT_SAVED, file=sys.stderr)  # a dry run's task is on stdout
    for note in notes_on_files_left_here(jobs, list(settings.file_mounts), NOT_COPIED, settings.workdir):
        print(note, file=sys.stderr)
    tasks = [_task(job, name) for job, name in zip(jobs, job_names(jobs), strict=True)]
    if jobs[0].config.launch.dry_run:
        print_result(as_yaml(tasks).removesuffix("\n"))
        return
    if shutil.which("sky") is None:
        raise LaunchError(
            "hydra/launcher=skypilot needs SkyPilot's `sky`, which is not here: pip install skypilot[aws] or another "
            "cloud's. launch.dry_run=true prints the task."
        )
    secrets = [*settings.secrets, *([RUN_KEY] if settings.num_nodes > 1 else [])]
    if missing := [name for name in settings.secrets if name not in os.environ]:
        raise LaunchError(f"skypilot.secrets names {missing[0]}, which is no variable here. Export it first.")
    with TemporaryDirectory() as folder:
        for task, job in zip(tasks, jobs, strict=True):
            file = Path(folder) / "managed.yaml"
            file.write_text(as_yaml([task]), encoding="utf-8")
            options = [part for name in secrets for part in ("--secret", name)]
            command = ["sky", "jobs", "launch", "--yes", "--async", *options, str(file)]
            environment = os.environ | {RUN_KEY: make_key()}
            done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
            if done.returncode:
                reason = (done.stderr.strip() or done.stdout.strip()).splitlines()[-1:]
                raise LaunchError(f"SkyPilot refuses {job.label}: {''.join(reason)}. `sky check` tells more.")
            say(f"Submitted {job.label} to SkyPilot as {task['name']}. To look at it: sky jobs queue")


def _check(jobs: Sequence[Job], sweep: Sweep) -> None:
    """Refuses what makes no sense before anything is submitted."""
    settings = jobs[0].config.skypilot
    refuse_launch_settings(jobs, "skypilot", "skypilot.accelerators")
    problems = list(folders_not_kept(jobs, list(settings.file_mounts), NO_MOUNT))
    if settings.accelerators is None:
        problems.append(Problem("skypilot.accelerators", "is missing.", "Set skypilot.accelerators=H100:8."))
    problems += sweep_that_waits(sweep, "the bucket")
    refuse(problems)


def _saves_on_the_way(job: Job) -> bool:
    checkpoint = job.config.checkpoint
    return checkpoint.every_steps is not None or checkpoint.every_minutes is not None


def _task(job: Job, name: str) -> dict[str, Any]:
    settings = job.config.skypilot
    task: dict[str, Any] = {"name": name, "num_nodes": settings.num_nodes, "resources": _resources(settings)}
    if settings.workdir is not None:
        task["workdir"] = settings.workdir
    if settings.file_mounts:
        task["file_mounts"] = {
            place: {"source": bucket, "mode": "MOUNT"} for place, bucket in settings.file_mounts.items()
        }
    names = [*settings.secrets, *([RUN_KEY] if settings.num_nodes > 1 else [])]
    if names:
        task["secrets"] = dict.fromkeys(names)  # `sky jobs launch --secret NAME` takes each from the environment
    if settings.setup:
        task["setup"] = "\n".join(settings.setup) + "\n"
    task["run"] = node_script(job.arguments, [], settings.num_nodes, VARIABLES)
    return task


def _resources(settings: SkypilotConfig) -> dict[str, Any]:
    values: dict[str, Any] = {
        "infra": settings.infra,
        "accelerators": settings.accelerators,
        "cpus": settings.cpus,
        "memory": settings.memory,
        "use_spot": settings.use_spot or None,
        "image_id": None if settings.image is None else f"docker:{settings.image}",
    }
    found = {name: value for name, value in values.items() if value is not None}
    found["job_recovery"] = {"recover_on_exit_codes": SAVED}
    return found
