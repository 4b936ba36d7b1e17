"""`hydra/launcher=accelerate`, `slurm`, `skypilot` and `kubernetes`. Hydra finds what is in `hydra_plugins`."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

from hydra.core.config_store import ConfigStore
from hydra.core.utils import JobReturn
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

if TYPE_CHECKING:
    from qlora_fsdp.launch.sweep import Job, Sweep


class _SweepLauncher(Launcher):
    """Starts the jobs of a sweep, in the batches that the sweeper gives.

    Every Hydra program scans this module when it starts, so that the imports wait until a job is to be started.
    """

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        from qlora_fsdp.launch.sweep import Sweep

        self._sweep = Sweep(config)

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        return self._sweep.launch(job_overrides, self._start)

    @abstractmethod
    def _start(self, jobs: list[Job], sweep: Sweep) -> None: ...


class AccelerateLauncher(_SweepLauncher):
    """Starts one `accelerate launch` per job on this host."""

    def _start(self, jobs: list[Job], sweep: Sweep) -> None:
        from qlora_fsdp.launch.local import run_jobs

        run_jobs(jobs, sweep)


class SlurmLauncher(_SweepLauncher):
    """Submits one job script for all jobs of a batch to SLURM."""

    def _start(self, jobs: list[Job], sweep: Sweep) -> None:
        from qlora_fsdp.launch.slurm import submit_jobs

        submit_jobs(jobs, sweep)


class SkypilotLauncher(_SweepLauncher):
    """Hands a managed job for each job of a batch to SkyPilot."""

    def _start(self, jobs: list[Job], sweep: Sweep) -> None:
        from qlora_fsdp.launch.skypilot import submit_to_skypilot

        submit_to_skypilot(jobs, sweep)


class KubernetesLauncher(_SweepLauncher):
    """Hands a Job, or a TrainJob, for each job of a batch to Kubernetes."""

    def _start(self, jobs: list[Job], sweep: Sweep) -> None:
        from qlora_fsdp.launch.kubernetes import submit_to_kubernetes

        submit_to_kubernetes(jobs, sweep)


_LAUNCHERS = {
    "accelerate": AccelerateLauncher,
    "slurm": SlurmLauncher,
    "skypilot": SkypilotLauncher,
    "kubernetes": KubernetesLauncher,
}
for _name, _launcher in _LAUNCHERS.items():
    _node = {"_target_": f"hydra_plugins.qlora_fsdp_launchers.{_launcher.__name__}"}
    ConfigStore.instance().store(group="hydra/launcher", name=_name, node=_node, provider="qlora_fsdp")
