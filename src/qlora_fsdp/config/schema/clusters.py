"""How runs are handed to clusters without SLURM: settings of hydra/launcher=skypilot and kubernetes."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from qlora_fsdp.config.schema.facets import ALWAYS, Files, Run, at_least, setting, when


@dataclass
class SkypilotConfig:
    # GPUs of each node, as SkyPilot names them: H100:8, or L4:1.
    accelerators: str | None = setting(None, Run.start, ALWAYS)
    # Nodes per job.
    num_nodes: int = setting(1, Run.start, ALWAYS, bounds=at_least(1))
    # Cloud, region and zone: aws, gcp/us-central1, k8s/my-context. null: the cheapest that has the GPUs.
    infra: str | None = setting(None, Run.start, ALWAYS, files=Files.none)
    # CPU cores of a node, as SkyPilot has them: 32, or 32+ for at least as many. null: what comes with the GPUs.
    cpus: str | None = setting(None, Run.start, ALWAYS)
    # GiB of memory of a node, in the same way.
    memory: str | None = setting(None, Run.start, ALWAYS)
    # Spot machines, which may be taken back: the run then goes on on others. Set checkpoint.every_minutes too.
    use_spot: bool = setting(False, Run.start, ALWAYS)
    # Container image with qlora-fsdp. null: the cloud's own, in which skypilot.setup installs it.
    image: str | None = setting(None, Run.start, ALWAYS, files=Files.none)
    # Folder of this host that every node gets a copy of, and in which the run starts.
    workdir: str | None = setting(None, Run.start, ALWAYS, files=Files.none)
    # Buckets by the folders where nodes see them. run.folder has to be in one.
    file_mounts: dict[str, str] = setting(
        {}, Run.start, ALWAYS, files=Files.none, example="'{/shared: \"s3://bucket\"}'"
    )
    # Variables of this shell that the run gets as secrets, by their names: [HF_TOKEN].
    secrets: list[str] = setting([], Run.start, ALWAYS, files=Files.none)
    # Shell commands that each node runs once, before the run.
    setup: list[str] = setting([], Run.start, ALWAYS, files=Files.none)


class KubernetesKind(Enum):
    job = "job"
    train_job = "train_job"


@dataclass
class KubernetesConfig:
    # job: a Job of Kubernetes itself. train_job: a TrainJob of Kubeflow's trainer.
    kind: KubernetesKind = setting(KubernetesKind.job, Run.start, ALWAYS)
    # Container image with qlora-fsdp.
    image: str | None = setting(None, Run.start, ALWAYS, files=Files.none)
    # Nodes per job: a pod on each.
    nodes: int = setting(1, Run.start, ALWAYS, bounds=at_least(1))
    # GPUs of a node, and so its ranks.
    gpus_per_node: int = setting(1, Run.start, ALWAYS, bounds=at_least(1))
    # CPU cores of a node. null: the cluster's default.
    cpus: str | None = setting(None, Run.start, ALWAYS)
    # Memory of a node, as Kubernetes writes it: 256Gi. null: the cluster's default.
    memory: str | None = setting(None, Run.start, ALWAYS)
    # Namespace. null: that of kubectl's context.
    namespace: str | None = setting(None, Run.start, ALWAYS, files=Files.none)
    # Queue of Kueue.
    queue: str | None = setting(None, Run.start, ALWAYS)
    # PersistentVolumeClaim that all nodes share (ReadWriteMany where there are several). run.folder has to be in it.
    claim: str | None = setting(None, Run.start, ALWAYS, files=Files.none)
    # Folder at which they see it.
    mount_path: str = setting("/shared", Run.start, ALWAYS)
    # Variables that are keys of Secrets, each with the Secret's name: {HF_TOKEN: hub}.
    secrets: dict[str, str] = setting({}, Run.start, ALWAYS, files=Files.none, example="'{HF_TOKEN: hub}'")
    # Seconds that an evicted pod gets to save.
    grace_seconds: int = setting(120, Run.start, ALWAYS, bounds=at_least(1))
    # How often a node may fail, and be started again. Evictions do not count.
    retries: int = setting(
        3, Run.start, when("kubernetes.kind", KubernetesKind.job, fix="kubernetes.kind=job"), bounds=at_least(0)
    )
    # Kubeflow's runtime, of train_job.
    runtime: str = setting(
        "torch-distributed", Run.start, when("kubernetes.kind", KubernetesKind.train_job), files=Files.none
    )
    # Shell commands to run first on each node.
    setup: list[str] = setting([], Run.start, ALWAYS, files=Files.none)
