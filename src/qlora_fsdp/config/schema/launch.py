"""The processes of a run, and the jobs of a cluster that start them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from qlora_fsdp.config.schema.facets import ALWAYS, Files, Run, at_least, setting


@dataclass
class DistributedConfig:
    # A collective that takes longer than this means that a rank is gone or stuck, and ends all ranks.
    timeout_seconds: int = setting(600, Run.same, ALWAYS, bounds=at_least(1))
    # Ranks that share each sequence: every one computes a slice of it, so that rows can be as many times as long. It
    # divides the ranks and the model's attention heads. The losses do not depend on it (docs/long-rows.md). auto: 1, or
    # where a sequence does not fit on a GPU, the smallest number of GPUs on which it does, by the memory plan.
    context_parallel: Any = setting("auto", Run.same, ALWAYS, bounds=at_least(1), words=("auto",))

    @property
    def num_slices(self) -> int:
        """Slices of a sequence; 1 also is what auto does where no plan has chosen."""
        return self.context_parallel if isinstance(self.context_parallel, int) else 1

    def num_groups(self, num_ranks: int) -> int:
        """Groups of ranks that have sequences of their own, which a step's are divided among."""
        return max(1, num_ranks // max(1, self.num_slices))


@dataclass
class LaunchConfig:
    # For what `qlora-fsdp`, `-m` or `hydra/launcher=...` starts: processes per job, one per GPU; on SLURM, per node.
    # null: all GPUs, of which jobs that run at the same time get equal shares.
    num_processes: int | None = setting(None, Run.start, ALWAYS, bounds=at_least(1))
    # An accelerate config. null: accelerate_configs/one_node.yaml, or multi_node.yaml where slurm.nodes is above 1.
    config_file: str | None = setting(None, Run.start, ALWAYS, files=Files.none)
    # Jobs of a sweep that run at the same time, on disjoint GPUs.
    parallel: int = setting(1, Run.start, ALWAYS, bounds=at_least(1))
    # Print the commands or the job script, and start nothing.
    dry_run: bool = setting(False, Run.start, ALWAYS)


SIGNAL_SECONDS = 120  # before SLURM's time limit, when a run is told to save


@dataclass
class SlurmConfig:
    # Partition (queue). null: the cluster's default, as for all settings below.
    partition: str | None = setting(None, Run.start, ALWAYS)
    # Account to charge.
    account: str | None = setting(None, Run.start, ALWAYS)
    # Time limit of a job, e.g. 24:00:00 or 2-00:00:00. A run that needs longer saves two minutes before it, and is
    # queued again.
    time: str | None = setting(None, Run.start, ALWAYS)
    # Nodes per job. Each starts launch.num_processes processes.
    nodes: int = setting(1, Run.start, ALWAYS, bounds=at_least(1))
    # GPUs per node. It is also the number of processes where launch.num_processes is null.
    gpus_per_node: int | None = setting(None, Run.start, ALWAYS, bounds=at_least(1))
    # CPU cores per node. null: the cluster's default for one task, which may be 1.
    cpus_per_task: int | None = setting(None, Run.start, ALWAYS, bounds=at_least(1))
    # Further options of sbatch, one per entry: ["--qos=long","--mem=0"].
    options: list[str] = setting([], Run.start, ALWAYS, files=Files.none)
    # Shell commands to run first in the job script, e.g. ["module load cuda/12.8"] or
    # ["source venv/bin/activate"].
    setup: list[str] = setting([], Run.start, ALWAYS, files=Files.none)
    # Container image, through srun --container-image (Pyxis). Its `python` is used.
    container: str | None = setting(None, Run.start, ALWAYS, files=Files.none)
