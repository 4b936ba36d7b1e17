"""`hydra/launcher=kubernetes`: a Job of Kubernetes, or a TrainJob of Kubeflow's, for each run.

A pod that is evicted gets SIGTERM, on which its ranks save and stop, and `grace_seconds` for that. The Job then makes
the pod anew, and the run resumes from its folder on the shared volume. Errors that another start can't mend, such as a
setting that can't be used, end the Job. Imports no torch.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from qlora_fsdp.common.errors import LaunchError, Problem, refuse
from qlora_fsdp.common.run_key import RUN_KEY, make_key
from qlora_fsdp.common.terminal import say
from qlora_fsdp.config.schema import KubernetesConfig, KubernetesKind
from qlora_fsdp.launch.node_script import (
    MEETING_PORT,
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

ENDING = [2, 3, 4, 5]  # exit codes of errors that another start would meet again (docs/errors.md)
CONTAINER = "node"  # the name that Kubeflow's runtimes have for it too
IMAGE_USER = 1000  # of the Dockerfile
MANAGER = "qlora-fsdp.io/launcher"
NO_CLAIM = "Set kubernetes.claim to a PersistentVolumeClaim, and run.folder to a folder below kubernetes.mount_path."


def submit_to_kubernetes(jobs: list[Job], sweep: Sweep) -> None:
    """Hands the jobs to `kubectl create`, or prints them.

    Raises:
        ConfigError: settings that would have no effect, or a run folder that would be lost.
        LaunchError: kubectl is not here, or the cluster refuses a job.
    """
    if not jobs:
        return
    _check(jobs, sweep)
    settings = jobs[0].config.kubernetes
    names = job_names(jobs)
    documents: list[dict[str, Any]] = []
    for job, name in zip(jobs, names, strict=True):
        if settings.kind is KubernetesKind.job:
            documents += _job(job, name)
        else:
            documents.append(_train_job(job, name))
    not_copied = f"copy it to the volume of kubernetes.claim, and name it as a path below {settings.mount_path}."
    mounts = [settings.mount_path]
    for note in notes_on_files_left_here(jobs, mounts, not_copied, workdir=None):
        print(note, file=sys.stderr)  # a dry run's documents are on stdout
    if jobs[0].config.launch.dry_run:
        print_result(as_yaml(documents).removesuffix("\n"))
        if settings.nodes > 1:  # no secret is printed
            names_of_keys = ", ".join(f"{name}-key" for name in names)
            told = f"Note: pods wait for Secrets that are yours to make: {names_of_keys}. For each: kubectl create "
            told += f"secret generic NAME --from-literal={RUN_KEY}=$(openssl rand -hex 16)"
            print(told, file=sys.stderr)
        return
    if shutil.which("kubectl") is None:
        raise LaunchError(
            "hydra/launcher=kubernetes needs kubectl, which is not here. launch.dry_run=true prints the jobs, to be "
            "applied elsewhere."
        )
    if settings.nodes > 1:
        documents = [*(_key_secret(name, settings) for name in names), *documents]
    command = ["kubectl", "create", "-f", "-"]
    done = subprocess.run(command, input=as_yaml(documents), capture_output=True, text=True, check=False)
    if done.returncode and "AlreadyExists" in done.stderr:
        raise LaunchError(_explain_there_already(_names_in(done.stderr, names), done.stdout, settings))
    if done.returncode:
        raise LaunchError(f"Kubernetes refuses the job: {' '.join(done.stderr.split())}. Set kubernetes.*.")
    space = "" if settings.namespace is None else f" -n {settings.namespace}"
    say(f"Submitted {', '.join(names)}. To look at it: kubectl get pods{space} -l app.kubernetes.io/name=qlora-fsdp")


def _names_in(text: str, names: Sequence[str]) -> list[str]:
    """The jobs that kubectl's lines on objects that are there already are about: `NAME`, or `NAME-key`, in quotes."""
    return [name for name in names if f'"{name}"' in text or f'"{name}-key"' in text]


def _explain_there_already(names: Sequence[str], created: str, settings: KubernetesConfig) -> str:
    """What to do about a job that was submitted before: `apply` would change nothing of it, or its key as it runs.

    Args:
        names: of the jobs that were there.
        created: kubectl's lines on what it has created all the same: it goes on behind an object that is there.
        settings: of Kubernetes.
    """
    space = "" if settings.namespace is None else f" -n {settings.namespace}"
    kind = "trainjobs" if settings.kind is KubernetesKind.train_job else "jobs"
    labels = f"'app.kubernetes.io/instance in ({','.join(names)})'"
    told = f"Kubernetes has {', '.join(names)} already, running or finished. Look: kubectl get {kind}{space}. "
    if created.strip():
        told += f"It has also said: {'; '.join(created.split(chr(10))).strip('; ')}. "
    return told + (
        f"To go on from its newest checkpoint, remove it, and submit it again: kubectl delete {kind},services,secrets"
        f"{space} -l {labels}. Or set another run.name."
    )


def _check(jobs: Sequence[Job], sweep: Sweep) -> None:
    """Refuses what makes no sense before anything is submitted."""
    settings = jobs[0].config.kubernetes
    refuse_launch_settings(jobs, "kubernetes", "kubernetes.gpus_per_node")
    mounts = [] if settings.claim is None else [settings.mount_path]
    problems = list(folders_not_kept(jobs, mounts, NO_CLAIM))
    if settings.image is None:
        fix = "Set kubernetes.image to one that has qlora-fsdp (docs/clusters.md has a Dockerfile)."
        problems.append(Problem("kubernetes.image", "is missing.", fix))
    problems += sweep_that_waits(sweep, "the cluster's volume")
    refuse(problems)


def _labels(name: str, settings: KubernetesConfig) -> dict[str, str]:
    labels = {"app.kubernetes.io/name": "qlora-fsdp", "app.kubernetes.io/instance": name}
    if settings.queue is not None:
        labels["kueue.x-k8s.io/queue-name"] = settings.queue
    return labels


def _metadata(name: str, settings: KubernetesConfig) -> dict[str, Any]:
    found: dict[str, Any] = {"name": name, "labels": _labels(name, settings)}
    if settings.namespace is not None:
        found["namespace"] = settings.namespace
    return found


def _job(job: Job, name: str) -> list[dict[str, Any]]:
    """An indexed Job, a pod for each node. Several nodes find the first by the name that a Service gives it."""
    settings = job.config.kubernetes
    main = f"{name}-0.{name}"
    variables = NodeVariables("$JOB_COMPLETION_INDEX", main, str(settings.gpus_per_node))
    script = node_script(job.arguments, settings.setup, settings.nodes, variables)
    container = {
        "name": CONTAINER,
        "image": settings.image,
        "command": ["bash", "-ec", script],
        "env": _environment(name, settings),
        "resources": _resources(settings),
        "volumeMounts": _mounts(settings),
    }
    pod: dict[str, Any] = {
        "restartPolicy": "Never",  # the Job makes a new pod, maybe on another machine
        "terminationGracePeriodSeconds": settings.grace_seconds,
        "containers": [container],
        "volumes": _volumes(settings),
        **_owner_of_volumes(settings),
    }
    documents: list[dict[str, Any]] = []
    if settings.nodes > 1:
        pod["subdomain"] = name
        service = {
            "clusterIP": "None",
            "selector": {"app.kubernetes.io/instance": name},
            "ports": [{"name": "meeting", "port": MEETING_PORT}],
            "publishNotReadyAddresses": True,
        }
        documents.append(
            {"apiVersion": "v1", "kind": "Service", "metadata": _metadata(name, settings), "spec": service}
        )
    spec = {
        "completionMode": "Indexed",
        "completions": settings.nodes,
        "parallelism": settings.nodes,
        "backoffLimit": settings.retries * settings.nodes,
        "podFailurePolicy": {
            "rules": [
                {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
                {
                    "action": "FailJob",
                    "onExitCodes": {"containerName": CONTAINER, "operator": "In", "values": ENDING},
                },
            ]
        },
        "template": {"metadata": {"labels": _labels(name, settings)}, "spec": pod},
    }
    documents.append({"apiVersion": "batch/v1", "kind": "Job", "metadata": _metadata(name, settings), "spec": spec})
    return documents


def _train_job(job: Job, name: str) -> dict[str, Any]:
    """A TrainJob on Kubeflow's runtime for torch, which tells each node which one it is."""
    settings = job.config.kubernetes
    variables = NodeVariables("$PET_NODE_RANK", "$PET_MASTER_ADDR", str(settings.gpus_per_node))
    script = node_script(job.arguments, settings.setup, settings.nodes, variables)
    pod = {
        **_owner_of_volumes(settings),
        "terminationGracePeriodSeconds": settings.grace_seconds,
        "volumes": _volumes(settings),
        "containers": [{"name": CONTAINER, "volumeMounts": _mounts(settings)}],
    }
    replicated = [{"name": CONTAINER, "template": {"spec": {"template": {"spec": pod}}}}]
    patch = {"manager": MANAGER, "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": replicated}}}}
    spec = {
        "runtimeRef": {"name": settings.runtime},
        "trainer": {
            "image": settings.image,
            "command": ["bash", "-ec", script],
            "numNodes": settings.nodes,
            "numProcPerNode": settings.gpus_per_node,
            "resourcesPerNode": _resources(settings),
            "env": _environment(name, settings),
        },
        "runtimePatches": [patch],
    }
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": _metadata(name, settings),
        "spec": spec,
    }


def _environment(name: str, settings: KubernetesConfig) -> list[dict[str, Any]]:
    """Variables whose values are in Secrets of the cluster, and in no file."""
    places = dict(settings.secrets)
    if settings.nodes > 1:
        places[RUN_KEY] = f"{name}-key"
    return [
        {"name": variable, "valueFrom": {"secretKeyRef": {"name": secret, "key": variable}}}
        for variable, secret in places.items()
    ]


def _key_secret(name: str, settings: KubernetesConfig) -> dict[str, Any]:
    """By this the ranks of several nodes know one another's messages (docs/security.md)."""
    metadata = _metadata(name, settings) | {"name": f"{name}-key"}
    return {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "stringData": {RUN_KEY: make_key()}}


def _resources(settings: KubernetesConfig) -> dict[str, Any]:
    limits: dict[str, Any] = {"nvidia.com/gpu": settings.gpus_per_node}
    requests: dict[str, Any] = {}
    if settings.cpus is not None:
        requests["cpu"] = settings.cpus
    if settings.memory is not None:
        requests["memory"] = settings.memory
        limits["memory"] = settings.memory
    return {"requests": requests, "limits": limits} if requests else {"limits": limits}


def _mounts(settings: KubernetesConfig) -> list[dict[str, Any]]:
    mounts = [{"name": "shm", "mountPath": "/dev/shm"}]  # noqa: S108  # through it NCCL's ranks talk
    if settings.claim is not None:
        mounts.append({"name": "shared", "mountPath": settings.mount_path})
    return mounts


def _owner_of_volumes(settings: KubernetesConfig) -> dict[str, Any]:
    """Lets the Dockerfile's user write to a fresh volume, which is root's."""
    if settings.claim is None:
        return {}
    return {"securityContext": {"fsGroup": IMAGE_USER, "fsGroupChangePolicy": "OnRootMismatch"}}


def _volumes(settings: KubernetesConfig) -> list[dict[str, Any]]:
    volumes: list[dict[str, Any]] = [{"name": "shm", "emptyDir": {"medium": "Memory"}}]
    if settings.claim is not None:
        volumes.append({"name": "shared", "persistentVolumeClaim": {"claimName": settings.claim}})
    return volumes
