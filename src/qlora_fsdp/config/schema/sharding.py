"""How the ranks share a model, what stays in memory, which kernels compute, and how ranks are started."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

from typing_extensions import assert_never

from qlora_fsdp.config.schema.facets import ALWAYS, Files, Run, above, at_least, setting, when


class ShardingStrategy(Enum):
    auto = "auto"
    FULL_SHARD = "FULL_SHARD"
    SHARD_GRAD_OP = "SHARD_GRAD_OP"
    HYBRID_SHARD = "HYBRID_SHARD"
    NO_SHARD = "NO_SHARD"


@dataclass
class FsdpConfig:
    # auto: NO_SHARD where the memory plan has room to spare for whole copies and they are no slower, else FULL_SHARD.
    # FULL_SHARD: every rank holds a part of each layer. SHARD_GRAD_OP: the same, but layers stay gathered between
    # forward and backward. HYBRID_SHARD: parameters are sharded within groups of hybrid_shard_size ranks and replicated
    # between the groups. NO_SHARD: every rank holds all parameters.
    sharding_strategy: ShardingStrategy = setting(ShardingStrategy.auto, Run.same_shards, ALWAYS)
    # Free a layer after its forward, and gather it again for backward. null frees layers unless the memory plan has
    # room to keep all of them gathered.
    reshard_after_forward: bool | None = setting(None, Run.same, ALWAYS)
    # Ranks per shard group under HYBRID_SHARD. null: the ranks of one node.
    hybrid_shard_size: int | None = setting(
        None,
        Run.same_shards,
        when("fsdp.sharding_strategy", ShardingStrategy.HYBRID_SHARD, fix="fsdp=hybrid_shard"),
        bounds=at_least(1),
    )
    # Keep shards and optimizer state in host memory. Layers come to the GPU only to be used.
    cpu_offload: bool = setting(False, Run.same, ALWAYS, is_common=True)

    @property
    def reshards(self) -> bool:
        """Whether layers are freed after their forward, unless the memory plan has room to keep them gathered."""
        return self.reshard_after_forward is not False and self.sharding_strategy is not ShardingStrategy.SHARD_GRAD_OP

    @property
    def may_be_whole(self) -> bool:
        """Whether auto may give each rank the whole base: not if a setting says how its parts are to be handled."""
        is_open = self.sharding_strategy is ShardingStrategy.auto
        return is_open and not self.cpu_offload and self.reshard_after_forward is None

    def num_shards(self, num_ranks: int, local_num_ranks: int) -> int:
        """Ranks among which every parameter is split, given the ranks in all and those of one node.

        `auto` is split like FULL_SHARD, which it is where no plan has chosen: on CPUs, and in use.
        """
        match self.sharding_strategy:
            case ShardingStrategy.auto | ShardingStrategy.FULL_SHARD | ShardingStrategy.SHARD_GRAD_OP:
                return num_ranks
            case ShardingStrategy.HYBRID_SHARD:
                return self.hybrid_shard_size or local_num_ranks
            case ShardingStrategy.NO_SHARD:
                return 1
            case other:
                assert_never(other)


class Activations(Enum):
    auto = "auto"
    none = "none"
    selective = "selective"
    attention = "attention"
    half = "half"
    full = "full"
    offload_attention = "offload_attention"
    offload = "offload"


@dataclass
class MemoryConfig:
    # What happens to a layer's activations until backward needs them. none: all are kept. selective: all but the norms'
    # outputs, which cost little to compute again. full: only the layer's input is kept, and the rest is computed again.
    # attention: full, but attention's result is kept too, and is not computed again. half: full for every second
    # layer. offload and offload_attention: full and attention, with what is kept in host memory. auto: for each layer
    # the fastest of these with which the run fits, by the memory plan.
    activations: Activations = setting(Activations.auto, Run.same, ALWAYS, other_names=("gradient_checkpointing",))
    # Tokens that gated MLPs, experts and norms compute at a time, so that what they need does not grow with the length
    # (docs/long-rows.md). The results are the same but for rounding. auto: all at once, or 8192 of long micro-batches
    # if the run fits or is faster so, by the memory plan. null: all at once.
    tile_tokens: Any = setting("auto", Run.same, ALWAYS, bounds=at_least(64), words=("auto", None))
    # Compute the loss with some thousand rows of a head in int8 (quant.embeddings=int8) at a time, so that the whole is
    # never dequantized: 2 GiB less of a vocabulary of 128,000 with a hidden size of 8192. The results are the same but
    # for rounding. auto: if the run fits only so, by the memory plan.
    head_in_pieces: Any = setting("auto", Run.same, ALWAYS, values=("auto", True, False))
    # Where the run leaves memory free, keep dequantized weights, of as many layers as there is room for. true: from
    # forward to backward, which does not dequantize them again; short steps are a tenth faster. run: until the run
    # ends, so that they are dequantized once; short steps are another tenth faster. A base that FSDP shards keeps them
    # until backward in both cases. This needs a CUDA graph (compute.cuda_graph).
    keep_dequantized: Any = setting(True, Run.same, ALWAYS, values=(True, False, "run"))
    # GiB of each GPU that the run may use in all. The limit is enforced, so that a large GPU can stand for a smaller
    # one. null: the free memory less 5 %, by which auto decides.
    target_gib: float | None = setting(None, Run.same, ALWAYS, bounds=above(0))
    # When the GPU runs out of memory, write torch's record of allocations to the run folder, for
    # pytorch.org/memory_viz. This slows steps a little.
    snapshot: bool = setting(False, Run.same, ALWAYS)

    @property
    def num_tile_tokens(self) -> int | None:
        """Tokens of a tile; None for all at once, which also is what auto does where no plan has chosen."""
        return None if self.tile_tokens == "auto" else self.tile_tokens


class MatmulKind(Enum):
    dequantized = "dequantized"
    fp8 = "fp8"


@dataclass
class ComputeConfig:
    # Matrix products with the quantized base. dequantized: in training.precision. fp8: both factors in float8_e4m3fn
    # with one scale per row, in forward and for the gradient of the input; the products of adapters and of experts stay
    # in bfloat16. fp8 needs a 4-bit base and an Ada, Hopper or later GPU.
    matmul: MatmulKind = setting(MatmulKind.dequantized, Run.other, ALWAYS, files=Files.users)
    # Record forward and backward of a micro-batch as a CUDA graph, so that a step does not wait for Python. `auto`:
    # what can't be recorded is computed kernel by kernel, and the log says why. true: the same, but a run that can't
    # record its steps ends with an error.
    cuda_graph: Any = setting("auto", Run.other, ALWAYS, files=Files.users, values=(True, False, "auto"))


class Kernel(Enum):
    auto = "auto"
    liger = "liger"
    torch = "torch"


class Dequantizer(Enum):
    bitsandbytes = "bitsandbytes"
    triton = "triton"


@dataclass
class KernelsConfig:
    # Norms, rotary embeddings and the gated activation of the MLP (SwiGLU, GeGLU) on a GPU. auto: a kernel of this
    # project for frozen norms (where fuse_layers is true), and Liger's (arXiv:2410.10989) for the rest where it is
    # installed and knows the model. true: Liger's for all that it has for the model. false: torch's own operations.
    liger: Any = setting("auto", Run.same, ALWAYS, values=(True, False, "auto"))
    # The loss over a frozen output head. auto: a Triton kernel of this project on a GPU; liger: Liger's, which asks the
    # device, so that steps can't be captured (compute.cuda_graph).
    cross_entropy: Kernel = setting(Kernel.auto, Run.same, ALWAYS)
    # What dequantizes 4-bit weights on a GPU. bitsandbytes: its kernel, after one pass over quantized scales. triton: a
    # kernel of this project that does both in one pass; the same bits, and steps of 8B are 1 % (16,384 tokens) to 4 %
    # (1,024) faster. Parts of a weight (slices of experts) and fp8 take it in any case, because bitsandbytes' kernel
    # writes whole weights alone.
    dequantize: Dequantizer = setting(Dequantizer.bitsandbytes, Run.same, ALWAYS)
    # Compute q, k and v together, and gate, up and down, where all of them are quantized and adapted without dropout or
    # DoRA. On a GPU with liger=auto, norms and residuals of pre-norm layers, such as Llama's, are also computed
    # together. false computes each by itself.
    fuse_layers: bool = setting(True, Run.same, ALWAYS)

    @property
    def of_layers(self) -> Kernel:
        """What computes norms, rotary embeddings and the MLP's activation."""
        if self.liger == "auto":
            return Kernel.auto
        return Kernel.liger if self.liger else Kernel.torch


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
    # Container image, through srun --container-image (Pyxis). Its `python` is used. It sees the folder of the command,
    # that of the run and the files that settings name.
    container: str | None = setting(None, Run.start, ALWAYS, files=Files.none)


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
