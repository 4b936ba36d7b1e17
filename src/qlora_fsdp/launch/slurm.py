"""Submits jobs to SLURM by one readable job script, as an array job if there are several. Imports no torch."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from qlora_fsdp.common.errors import ConfigError, LaunchError, Problem, refuse
from qlora_fsdp.common.files import shipped_file, write_atomically
from qlora_fsdp.common.run_key import RUN_KEY
from qlora_fsdp.common.terminal import say
from qlora_fsdp.common.text import printable
from qlora_fsdp.config.schema import SIGNAL_SECONDS, LaunchConfig, SlurmConfig
from qlora_fsdp.config.settings import problem_about
from qlora_fsdp.launch.node_script import files_of_settings, is_below
from qlora_fsdp.launch.sweep import Job, Sweep
from qlora_fsdp.records.run_state import CONSOLE_FILE, SLURM_FILE, read_job_id, slurm_queue
from qlora_fsdp.runtime.run_command import print_result

POLL_SECONDS = 5.0  # between two looks at the queue, where a sweeper waits for results
SCRIPT = "job.sbatch"
NO_CORES = (
    "Note: slurm.cpus_per_task is not set, so a node's ranks share the cores that the cluster gives one task by "
    "default, which may be one core. Set slurm.cpus_per_task to a node's cores, or to some 8 for each GPU."
)
NO_GPUS = (
    "Note: slurm.gpus_per_node is not set, so the job asks for no GPU, and starts one process a node. Set "
    "slurm.gpus_per_node to a node's GPUs."
)
SAYS_CORES = ("--cpus-per-task", "-c", "--cpus-per-gpu", "--exclusive")  # options of sbatch's
SAYS_GPUS = ("--gpus", "-G", "--gres", "--tres", "--exclusive")
CONTROL_CHARACTER = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029]")


def submit_jobs(jobs: list[Job], sweep: Sweep) -> None:
    """Submits the jobs that are not queued already as one job script, and waits for their end if the sweeper does.

    Raises:
        ConfigError: jobs of one script ask SLURM for different things.
        LaunchError: SLURM is not there, does not answer, or refuses the script.
    """
    if not jobs:  # all have finished before
        return
    _refuse_differences(jobs)
    refuse(list(_find_misfits(jobs[0].config.launch, jobs[0].config.slurm)))
    _refuse_control_characters(jobs, sweep.folder, Path.cwd())
    slurm = jobs[0].config.slurm
    if slurm.cpus_per_task is None and not _has_option(slurm, SAYS_CORES):
        print(NO_CORES, file=sys.stderr)  # a dry run's script is on stdout
    if slurm.gpus_per_node is None and not _has_option(slurm, SAYS_GPUS):
        print(NO_GPUS, file=sys.stderr)
    if jobs[0].config.launch.dry_run:
        print_result(_render_script(jobs, sweep.folder, Path.cwd()).removesuffix("\n"))
        return
    queue = slurm_queue()
    queued = [job for job in jobs if read_job_id(job.folder) in queue]
    for job in queued:
        job_id = read_job_id(job.folder)
        say(f"{job.label}: SLURM has it already, as job {job_id} ({queue[job_id]}).")
    todo = [job for job in jobs if job not in queued]
    if todo:
        _submit(todo, sweep.folder, _render_script(todo, sweep.folder, Path.cwd()))
    while sweep.waits and _are_queued(jobs):
        time.sleep(POLL_SECONDS)


def _render_script(jobs: Sequence[Job], folder: Path, working_folder: Path) -> str:
    """Returns the job script: sbatch's options, then one `accelerate launch` per node under `srun`.

    Args:
        jobs: at least one job. All ask SLURM for the same, and several make an array job.
        folder: the folder of the sweep, for SLURM's own output.
        working_folder: the folder that relative paths start from.
    """
    config = jobs[0].config
    parts = [
        _options(jobs, config.run.name, config.launch.parallel, config.slurm, folder, working_folder),
        "\n".join(config.slurm.setup),
        _arguments(jobs),
        _step(config.launch, config.slurm, _container(jobs, folder, working_folder)),
        _ENDING,
    ]
    if len(jobs) > 1 and not config.slurm.container:
        parts.append(f"{shlex.quote(sys.executable)} -m qlora_fsdp.report {shlex.quote(str(folder))} >/dev/null")
    parts.append("exit $status")
    return "\n\n".join(part for part in parts if part) + "\n"


def _options(
    jobs: Sequence[Job], run_name: str, parallel: int, slurm: SlurmConfig, folder: Path, working_folder: Path
) -> str:
    name = re.sub(r"[^\w.-]", "-", run_name)
    array = None
    output = f"{folder}/slurm-%j.out"
    if len(jobs) > 1:
        array = f"0-{len(jobs) - 1}"
        output = f"{folder}/slurm-%A_%a.out"
        if parallel > 1:
            array += f"%{parallel}"
    values = {
        "job-name": name,
        "array": array,
        "partition": slurm.partition,
        "account": slurm.account,
        "time": slurm.time,
        "nodes": slurm.nodes,
        "ntasks-per-node": 1,
        "gpus-per-node": slurm.gpus_per_node,
        "cpus-per-task": slurm.cpus_per_task,
        "chdir": working_folder,
        "output": output,
        "open-mode": "append",
    }
    options = [f"--{name}={value}" for name, value in values.items() if value]
    options += ["--requeue", f"--signal=B:USR1@{SIGNAL_SECONDS}", *slurm.options]
    return "\n".join(["#!/usr/bin/env bash", *(f"#SBATCH {_word(option)}" for option in options)])


def _arguments(jobs: Sequence[Job]) -> str:
    def assign(job: Job) -> str:
        return f"run_folder={shlex.quote(str(job.folder))}; arguments=({shlex.join(job.arguments)})"

    if len(jobs) == 1:
        return assign(jobs[0])
    cases = [f"  {index}) {assign(job)} ;;" for index, job in enumerate(jobs)]
    return "\n".join(["# Each job of the sweep", 'case "$SLURM_ARRAY_TASK_ID" in', *cases, "esac"])


def _find_config_file(launch: LaunchConfig, slurm: SlurmConfig) -> Path:
    """The file of accelerate's settings."""
    if launch.config_file is not None:
        return Path(launch.config_file).expanduser().resolve()
    name = "multi_node" if slurm.nodes > 1 else "one_node"
    return Path(shipped_file(f"accelerate_configs/{name}.yaml"))


def _container(jobs: Sequence[Job], folder: Path, working_folder: Path) -> str:
    """srun's options for a container (Pyxis); none without one.

    It sees the folder of the command, that of the runs, and the files that settings name, each at its place.
    """
    config = jobs[0].config
    if not config.slurm.container:
        return ""
    wanted = [working_folder, folder, *(job.folder for job in jobs)]
    wanted.append(_find_config_file(config.launch, config.slurm).parent)
    for job in jobs:
        wanted += [Path(path).expanduser().absolute() for _, path in files_of_settings(job.config)]
    mounts: list[str] = []
    for path in map(str, wanted):
        if not any(is_below(path, mount) for mount in mounts):
            mounts.append(path)
    listed = ",".join(f"{path}:{path}" for path in mounts)
    options = {"image": config.slurm.container, "workdir": str(working_folder), "mounts": listed}
    return "".join(f" --container-{name}={shlex.quote(value)}" for name, value in options.items())


def _step(launch: LaunchConfig, slurm: SlurmConfig, container: str) -> str:
    """Starts `srun` in the background, so that the shell receives signals.

    Args:
        launch: how many processes there are.
        slurm: the nodes.
        container: srun's options for it.
    """
    has_many_nodes = slurm.nodes > 1
    num_local = launch.num_processes or slurm.gpus_per_node or 1
    config_file = _find_config_file(launch, slurm)
    python = "python" if slurm.container else sys.executable
    cpus = f" --cpus-per-task={slurm.cpus_per_task}" if slurm.cpus_per_task else ""
    options = f"--config_file {shlex.quote(str(config_file))} --num_processes {num_local * slurm.nodes}"
    meeting = ""
    node = ""
    if has_many_nodes:
        meeting = 'MAIN_NODE=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)\n'
        meeting += "MAIN_PORT=$((20000 + SLURM_JOB_ID % 20000))\n"
        options += f' --num_machines {slurm.nodes} --main_process_ip "$MAIN_NODE" --main_process_port "$MAIN_PORT"'
        node = ' --machine_rank "$SLURM_NODEID"'
    else:
        options += " --main_process_port 0"
    return (
        f"{_SECRET}\n{meeting}# USR1 is for the ranks, which save; the launchers above them ignore it.\n"
        f"launcher=({shlex.quote(python)} {options})\n"
        f"srun --ntasks-per-node=1{cpus}{container} --kill-on-bad-exit=1 \\\n"
        f'  --output="$run_folder/{CONSOLE_FILE}" --open-mode=append bash -c \'trap "" USR1\n'
        f'  exec "$1" -m qlora_fsdp.launch.run_accelerate{node} "${{@:2}}"\' \\\n'
        '  bash "${launcher[@]}" -m qlora_fsdp.train "${arguments[@]}" &\n'
        "step=$!"
    )


_SECRET = f"""\
# By this the ranks know one another's messages (docs/security.md).
export {RUN_KEY}=$(od -An -N16 -tx1 /dev/urandom | tr -d ' \\n')"""
_ENDING = """\
# USR1 comes before the time limit: pass it on until the run has saved, then queue again. TERM reaches the ranks too.
told_to_save=no
trap 'told_to_save=yes' USR1
trap : TERM
while kill -0 "$step" 2>/dev/null; do
  if [[ $told_to_save == yes ]]; then kill -USR1 "$step"; fi
  sleep 2 &
  wait $!
done
wait "$step"
status=$?
if [[ $told_to_save == yes && $status != 0 ]] && ! grep -qs '"status": "failed"' "$run_folder/summary.json"; then
  scontrol requeue "${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_}${SLURM_ARRAY_TASK_ID:-$SLURM_JOB_ID}"
fi"""


def _submit(jobs: Sequence[Job], folder: Path, script: str) -> None:
    if shutil.which("sbatch") is None:
        raise LaunchError(
            "hydra/launcher=slurm needs sbatch, which is not here. Start it on a login node, or set "
            "launch.dry_run=true to print the job script, or hydra/launcher=accelerate to use this host."
        )
    for job in jobs:
        job.folder.mkdir(parents=True, exist_ok=True)
    file = folder / SCRIPT
    write_atomically(file, script)
    done = subprocess.run(["sbatch", "--parsable", str(file)], capture_output=True, text=True, check=False)
    if done.returncode:
        reason = done.stderr.strip().removeprefix("sbatch: error: ").replace("\nsbatch: error: ", " ")
        raise LaunchError(
            f"SLURM refuses {file}: {reason}. Set slurm.partition, slurm.account, slurm.time and the like."
        )
    number = done.stdout.strip().partition(";")[0]
    for index, job in enumerate(jobs):
        job_id = f"{number}_{index}" if len(jobs) > 1 else number
        write_atomically(job.folder / SLURM_FILE, json.dumps({"job_id": job_id}) + "\n")
    jobs_word = f"{len(jobs)} jobs" if len(jobs) > 1 else jobs[0].label
    say(f"Submitted {jobs_word} as SLURM job {number}; the script is {file}.")
    say(f"To look at it: qlora-fsdp status {folder}")


def _refuse_differences(jobs: Sequence[Job]) -> None:
    if any((job.config.slurm, job.config.launch) != (jobs[0].config.slurm, jobs[0].config.launch) for job in jobs):
        reason = "differ between the jobs of a sweep, and SLURM has one script for all."
        raise ConfigError([Problem("slurm.* and launch.*", reason, "Start a sweep for each value.")])


def _find_misfits(launch: LaunchConfig, slurm: SlurmConfig) -> Iterator[Problem]:
    """Yields settings that SLURM would ignore, or that fail only when the job has its turn."""
    num_processes = launch.num_processes or 0
    if slurm.gpus_per_node and num_processes > slurm.gpus_per_node:
        reason = f"is more than slurm.gpus_per_node={slurm.gpus_per_node}, and each process on a node has a GPU."
        fix = "Leave it out: it follows from slurm.gpus_per_node."
        yield problem_about("launch.num_processes", launch.num_processes, reason, fix)
    if odd := [option for option in slurm.options if not option.startswith("-")]:
        reason = f"has {odd[0] or 'an empty text'}, which is no option of sbatch."
        yield problem_about("slurm.options", slurm.options, reason, 'Write them as in ["--qos=long"].')


def _has_option(slurm: SlurmConfig, names: tuple[str, ...]) -> bool:
    """Whether one of the further options of sbatch's is one of these."""
    return any(option.startswith(names) for option in slurm.options)


def _refuse_control_characters(jobs: Sequence[Job], folder: Path, working_folder: Path) -> None:
    """A line break in a value would begin a line of its own in the script, which SLURM or the shell might obey."""
    config = jobs[0].config
    settings: dict[str, Any] = {f"slurm.{key}": value for key, value in asdict(config.slurm).items() if key != "setup"}
    settings["launch.config_file"] = config.launch.config_file
    settings["run.folder"] = [str(folder), *(str(job.folder) for job in jobs)]
    reason = "has a line break or another control character, which no job script may have."
    fix = "Name it without."
    problems = []
    for name, value in settings.items():
        for text in _control_characters(value):
            problems.append(Problem(f"{name}={text}", reason, fix, name))
    for name, value in {"The working folder": str(working_folder), "The path of Python": sys.executable}.items():
        for text in _control_characters(value):
            problems.append(Problem(f"{name}, {text},", reason, fix, ""))
    refuse(problems)


def _control_characters(value: Any) -> list[str]:
    """The texts among a setting's values that have control characters, printable."""
    values = value if isinstance(value, list) else [value]
    return [printable(text) for text in values if isinstance(text, str) and CONTROL_CHARACTER.search(text)]


def _are_queued(jobs: Sequence[Job]) -> bool:
    """Whether SLURM has any of the jobs. If it does not answer, they count as queued, and not as failed."""
    try:
        queue = slurm_queue()
    except LaunchError:
        return True
    return any(read_job_id(job.folder) in queue for job in jobs)


def _word(option: str) -> str:
    """An option as sbatch reads it: in quotes if it has spaces, quotes, or a `#`, which begins a comment."""
    return option if re.search(r"[\s\"'#\\]", option) is None else shlex.quote(option)
