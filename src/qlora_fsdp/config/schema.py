"""The contract: every setting, its type and its default. YAML under conf/ only supplies values.

Names follow `BitsAndBytesConfig` (quant), `LoraConfig` (lora) and FSDP (fsdp) wherever these have one. The comment
above a field is its documentation, and `bounds` beside it are the numbers that it takes: both are checked or shown
wherever the setting is, and docs/configuration.md is generated from them. Nothing here imports torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum
from typing import Any


@dataclass(frozen=True)
class Bounds:
    """The finite numbers that a setting takes: those from `low` on, or above it if `low` is excluded, below `high`."""

    low: float
    includes_low: bool
    high: float

    def allow(self, value: float) -> bool:
        """Whether a setting may have this value."""
        return self.low < value < self.high or (self.includes_low and value == self.low)

    def __str__(self) -> str:
        text = f"at least {self.low:g}" if self.includes_low else f"greater than {self.low:g}"
        return text + (f" and less than {self.high:g}" if math.isfinite(self.high) else "")


def bounds(*, at_least: float | None = None, above: float | None = None, below: float = math.inf) -> dict[str, Bounds]:
    """The metadata of a field whose numbers are bounded; give either `at_least` or `above`."""
    low = above if at_least is None else at_least
    assert low is not None, "a bounded setting has a lower bound"
    return {"bounds": Bounds(low, at_least is not None, below)}


class TaskName(Enum):
    causal_lm = "causal_lm"
    sequence_classification = "sequence_classification"
    token_classification = "token_classification"


class ProblemType(Enum):
    single_label_classification = "single_label_classification"
    multi_label_classification = "multi_label_classification"
    regression = "regression"


class Weights(Enum):
    checkpoint = "checkpoint"
    random = "random"


class AttnImplementation(Enum):
    auto = "auto"
    varlen = "varlen"
    sdpa = "sdpa"
    eager = "eager"
    flash_attention_2 = "flash_attention_2"
    flash_attention_4 = "flash_attention_4"


class QuantType4bit(Enum):
    nf4 = "nf4"
    fp4 = "fp4"


class EmbeddingStorage(Enum):
    none = "none"
    int8 = "int8"


class QuantStorage(Enum):
    auto = "auto"
    uint8 = "uint8"
    bfloat16 = "bfloat16"
    float16 = "float16"
    float32 = "float32"


class Dtype(Enum):
    auto = "auto"
    bfloat16 = "bfloat16"
    float16 = "float16"
    float32 = "float32"


class ShardingStrategy(Enum):
    FULL_SHARD = "FULL_SHARD"
    SHARD_GRAD_OP = "SHARD_GRAD_OP"
    HYBRID_SHARD = "HYBRID_SHARD"
    NO_SHARD = "NO_SHARD"


class Activations(Enum):
    auto = "auto"
    none = "none"
    selective = "selective"
    every_k = "every_k"
    full = "full"
    offload = "offload"


class MatmulKind(Enum):
    dequantized = "dequantized"
    fp8 = "fp8"


class Kernel(Enum):
    auto = "auto"
    liger = "liger"
    torch = "torch"


class DataFormat(Enum):
    auto = "auto"
    messages = "messages"
    sharegpt = "sharegpt"
    prompt_completion = "prompt_completion"
    instruction = "instruction"
    text = "text"
    random = "random"


class LossOn(Enum):
    completion = "completion"
    all = "all"


class BadRows(Enum):
    error = "error"
    skip = "skip"
    truncate = "truncate"


class OnBadStep(Enum):
    stop = "stop"
    skip = "skip"
    rollback = "rollback"


class Optimizer(Enum):
    adamw = "adamw"
    adamw_8bit = "adamw_8bit"


class LrScheduler(Enum):
    cosine = "cosine"
    linear = "linear"
    constant = "constant"


class WandbMode(Enum):
    auto = "auto"
    online = "online"
    offline = "offline"
    disabled = "disabled"


@dataclass
class RunConfig:
    # Name of the run; also the last part of the default folder, and the run's name in W&B.
    name: str = "run"
    # The run folder itself. Everything the run writes is in it.
    folder: str = "outputs/${run.name}"
    # Start anew in a folder that already holds a run; its files, checkpoints included, are replaced.
    overwrite: bool = False


@dataclass
class TaskConfig:
    # What is learned: the next token; or, with a new head, the labels of whole rows, {"text": ..., "label": ...}, or of
    # words, {"tokens": [...], "labels": [...]}.
    name: TaskName = TaskName.causal_lm
    # One label a row, any number of labels a row (a list), or numbers. The names are those of transformers.
    problem_type: ProblemType = ProblemType.single_label_classification
    # Names of the labels in the order of the head's outputs; rows give a label by its name or its index. For
    # regression, names of the numbers; null: one number.
    labels: list[str] | None = None
    # Weights of the labels in the loss, in the same order (with several labels a row: of their positives), or
    # `balanced`: inverse to how often each occurs. null: all count alike.
    class_weights: Any = None


@dataclass
class ModelConfig:
    # Short name of the model, for messages.
    name: str = "custom"
    # A folder with config.json and safetensors files, or a hub name such as meta-llama/Meta-Llama-3-8B.
    path: str | None = None
    # Branch, tag or commit of a hub model.
    revision: str | None = None
    # Where the tokenizer is, if not beside the model. `bytes` is a built-in byte-level tokenizer.
    tokenizer_path: str | None = None
    # `random` makes up weights from the config alone: dry runs at real size, with no download.
    weights: Weights = Weights.checkpoint
    # Attention kernel. `auto`: flash_attention_4 where it is installed, on a Hopper or Blackwell GPU; else varlen,
    # where torch and the GPU have it; else sdpa, or eager for models that transformers has no sdpa for.
    attn_implementation: AttnImplementation = AttnImplementation.auto
    # Keep the quantized weights in files (bitsandbytes' format), which later runs and the jobs of a sweep load: a
    # quarter of the bytes, quantized already. Written by the first run that needs them.
    cache_quantized: bool = False
    # Where these are kept; of many nodes, best a disk of each. null: ~/.cache/qlora_fsdp/quantized
    cache_folder: str | None = None
    # Run model code that comes with the checkpoint. Only for checkpoints you trust.
    trust_remote_code: bool = False
    # The transformers config of the model (model_type, hidden_size, ...), for `weights=random`: used alone, or, where
    # `path` is a local folder, over its config.json. A checkpoint that is loaded keeps its own config.json.
    config: dict[str, Any] = field(default_factory=dict)


@dataclass
class TokenizerConfig:
    # New tokens, which the tokenizer then never splits. Their rows of embeddings and head are trained, alone (PEFT's
    # trainable_token_indices), unless lora.modules_to_save names the embeddings or the head; a new row starts at the
    # mean of the old ones. A token that the tokenizer has already is trained from the row it has.
    add_tokens: list[str] = field(default_factory=list)
    # The same, as special tokens: left out when text is decoded with skip_special_tokens.
    add_special_tokens: list[str] = field(default_factory=list)


@dataclass
class QuantConfig:
    # Quantize linear layers to 4 bits (QLoRA, arXiv:2305.14314).
    load_in_4bit: bool = True
    # Quantize linear layers to 8 bits: int8 codes with one fp32 scale a row (LLM.int8, arXiv:2208.07339, weights only).
    load_in_8bit: bool = False
    # Code book of the 4-bit codes.
    bnb_4bit_quant_type: QuantType4bit = QuantType4bit.nf4
    # Quantize the scales too: 0.37 bits a weight less.
    bnb_4bit_use_double_quant: bool = True
    # dtype in which codes are stored and gathered. `auto`: bfloat16. uint8 needs torch >= 2.13; float16 is refused.
    bnb_4bit_quant_storage: QuantStorage = QuantStorage.auto
    # dtype of the matrix products. `auto`: training.precision; where that is auto, another value sets both. float16 is
    # refused.
    bnb_4bit_compute_dtype: Dtype = Dtype.auto
    # How frozen input embeddings and a frozen output head are stored. none: in training.precision. int8: codes with one
    # fp32 scale a row, half the memory.
    embeddings: EmbeddingStorage = EmbeddingStorage.none
    # Linear layers to leave unquantized, by name or end of name. null: the output head, as in transformers.
    llm_int8_skip_modules: list[str] | None = None


@dataclass
class LoraConfig:
    # Rank of the adapters.
    r: int = field(default=16, metadata=bounds(at_least=1))
    # The adapters' output is scaled by lora_alpha / r (lora_alpha / sqrt(r) with use_rslora).
    lora_alpha: float = field(default=32, metadata=bounds(above=0))
    # Dropout on the adapters' input.
    lora_dropout: float = field(default=0.0, metadata=bounds(at_least=0, below=1))
    # Names, or ends of names, of the linear layers to adapt; a regular expression; or `all-linear`.
    target_modules: Any = "all-linear"
    # Names, or ends of names, of layers that target_modules should not match.
    exclude_modules: list[str] | None = None
    # Modules trained in full and saved with the adapter, e.g. a classification head.
    modules_to_save: list[str] | None = None
    # true (Kaiming A, zero B), gaussian, or orthogonal. Others start from the full-precision weight: refused by name.
    init_lora_weights: Any = True
    # Rank-stabilized scaling (arXiv:2312.03732).
    use_rslora: bool = False
    # Weight-decomposed LoRA (arXiv:2402.09353).
    use_dora: bool = False
    # Ranks that differ from r: {name or regular expression: rank}.
    rank_pattern: dict[str, int] = field(default_factory=dict)
    # Alphas that differ from lora_alpha: {name or regular expression: alpha}.
    alpha_pattern: dict[str, float] = field(default_factory=dict)


@dataclass
class FsdpConfig:
    # FULL_SHARD: every rank holds a part of each layer. SHARD_GRAD_OP: the same, with layers that stay gathered between
    # forward and backward. HYBRID_SHARD: shard within groups of hybrid_shard_size, replicate between them. NO_SHARD:
    # every rank holds all.
    sharding_strategy: ShardingStrategy = ShardingStrategy.FULL_SHARD
    # Free a layer after its forward, and gather it again for backward. null: unless the memory plan has room to keep
    # all layers gathered.
    reshard_after_forward: bool | None = None
    # Ranks a shard group under HYBRID_SHARD. null: the ranks of one node.
    hybrid_shard_size: int | None = field(default=None, metadata=bounds(at_least=1))
    # Keep shards (and optimizer state) in host memory; layers come to the GPU to be used.
    cpu_offload: bool = False
    # Layers gathered ahead of the one that runs, in forward; at least 1 with cpu_offload.
    forward_prefetch: int = field(default=1, metadata=bounds(at_least=0))
    # The same in backward. FSDP2 gathers one layer ahead by itself.
    backward_prefetch: int = field(default=1, metadata=bounds(at_least=1))

    @property
    def reshards(self) -> bool:
        """Whether layers are freed after their forward, unless the memory plan has room to keep them gathered."""
        return self.reshard_after_forward is not False and self.sharding_strategy is not ShardingStrategy.SHARD_GRAD_OP

    def num_shards(self, num_ranks: int, local_num_ranks: int) -> int:
        """Ranks among which every parameter is split, of so many in all and on a node."""
        if self.sharding_strategy is ShardingStrategy.HYBRID_SHARD:
            return self.hybrid_shard_size or local_num_ranks
        return 1 if self.sharding_strategy is ShardingStrategy.NO_SHARD else num_ranks

    def takes_part(self, num_shards: int) -> bool:
        """Whether there is anything for FSDP to do: parameters are split, or come from host memory."""
        return num_shards > 1 or self.cpu_offload


@dataclass
class MemoryConfig:
    # What becomes of a layer's activations until backward. none: they are kept. selective: but for the norms' outputs,
    # which cost little to make again. full: only the layer's input is kept, the rest is computed again. every_k: full
    # for every k-th layer. offload: as full, with the inputs in host memory. auto: for each layer the fastest of these
    # with which the run fits, by the memory plan.
    activations: Activations = Activations.auto
    # k of every_k.
    every_k: int = 2
    # GiB of a GPU that the run may use in all; held to, so that it stands for a smaller GPU. null: the free memory less
    # 5 %, which auto counts with.
    target_gib: float | None = field(default=None, metadata=bounds(above=0))
    # When the GPU is out of memory, write torch's record of allocations to the run folder (for
    # pytorch.org/memory_viz). Slows steps a little.
    snapshot: bool = False


@dataclass
class ComputeConfig:
    # Products with the quantized base. dequantized: in training.precision. fp8: both factors in float8_e4m3fn with a
    # scale a row, forward and for the input's gradient; the adapters' products stay in bfloat16. 4-bit bases on Ada,
    # Hopper or later.
    matmul: MatmulKind = MatmulKind.dequantized


@dataclass
class KernelsConfig:
    # RMS norms. auto: Liger's fused kernels (arXiv:2410.10989) on a GPU where they are installed and know the model,
    # else torch's own operations.
    rms_norm: Kernel = Kernel.auto
    # Rotary position embeddings.
    rotary: Kernel = Kernel.auto
    # The gated activation of the MLP (SwiGLU, GeGLU).
    glu: Kernel = Kernel.auto
    # The loss over a frozen output head.
    cross_entropy: Kernel = Kernel.auto
    # Compute q, k and v together, and gate, up and down, where all are quantized and adapted without dropout or DoRA;
    # with rms_norm=auto also, on a GPU, each norm of a Llama, Mistral, Qwen 2 or 3 layer with its residual. false: each
    # by itself.
    fuse_layers: bool = True


@dataclass
class DataConfig:
    # A .jsonl, .json, .csv or .parquet file, a folder of .txt/.md files or of any of these, or a hub data set's name.
    path: str | None = None
    # Several of these with their weights, instead of path: {chats.jsonl: 3, code.jsonl: 1} makes three of four rows
    # chats. An epoch has every row at least once; what is small for its weight is repeated.
    mix: dict[str, float] = field(default_factory=dict)
    # Subset of a hub data set.
    name: str | None = None
    # Split of a hub data set.
    split: str = "train"
    # Held-out data of the same form. null: eval_fraction of the rows.
    eval_path: str | None = None
    # Part of the rows held out for evaluation when there is no eval_path. 0: no evaluation.
    eval_fraction: float = field(default=0.0, metadata=bounds(at_least=0, below=1))
    # Use at most this many rows (after shuffling by training.seed), of a mix of each data set. null: all.
    max_rows: int | None = field(default=None, metadata=bounds(at_least=1))
    # Form of the rows. `auto` looks at their keys. `random`: random tokens, for dry runs.
    format: DataFormat = DataFormat.auto
    # Train on the completion (the assistant's turns), or on every token.
    loss_on: LossOn = LossOn.completion
    # A Jinja file, or the name of a template that ships here (chatml, llama3, alpaca). null: the tokenizer's own.
    chat_template: str | None = None
    # What to do with an unusable row: stop and list them, leave them out, or cut rows longer than training.max_length
    # (other bad rows are left out).
    bad_rows: BadRows = BadRows.truncate
    # Read the rows while training, for data that is larger than the disk, in the order of the files. training.max_steps
    # tells the end, and evaluation needs data.eval_path. Every rank reads and tokenizes all rows.
    streaming: bool = False
    # With streaming: rows that are tokenized, packed together and shuffled at a time, ahead of the training.
    buffer_rows: int = field(default=10000, metadata=bounds(at_least=1))
    # Processes that tokenize. null: one a CPU core this rank may use, at most 8.
    num_proc: int | None = field(default=None, metadata=bounds(at_least=1))
    # Where tokenized data is kept. null: ~/.cache/qlora_fsdp/data
    cache_folder: str | None = None


@dataclass
class OptimConfig:
    # adamw: torch's fused AdamW. adamw_8bit: bitsandbytes' block-wise 8-bit state (arXiv:2110.02861).
    name: Optimizer = Optimizer.adamw
    # Decoupled weight decay (arXiv:1711.05101).
    weight_decay: float = field(default=0.0, metadata=bounds(at_least=0))
    # Decay of the running means of the gradient and of its square.
    betas: list[float] = field(default_factory=lambda: [0.9, 0.999])
    # Added to the denominator.
    eps: float = field(default=1e-8, metadata=bounds(above=0))
    # Clip the gradient's global norm to this. 0: do not clip.
    max_grad_norm: float = field(default=1.0, metadata=bounds(at_least=0))
    # Shape of the learning rate after warmup.
    lr_scheduler_type: LrScheduler = LrScheduler.cosine
    # Part of the steps over which the learning rate rises from 0.
    warmup_ratio: float = field(default=0.03, metadata=bounds(at_least=0, below=1))
    # Steps of warmup; wins over warmup_ratio.
    warmup_steps: int | None = field(default=None, metadata=bounds(at_least=0))


@dataclass
class TrainingConfig:
    # Tokens a sequence, at most.
    max_length: int = field(default=2048, metadata=bounds(at_least=2))
    # Optimizer steps. null: num_epochs over the data. Wins over num_epochs: the data is repeated as often as needed.
    max_steps: int | None = field(default=None, metadata=bounds(at_least=1))
    # Passes over the data.
    num_epochs: float = field(default=1.0, metadata=bounds(above=0))
    # Sequences a GPU a forward pass. `auto`: the power of two, dividing the global batch, with the best predicted
    # speed.
    micro_batch_size: Any = field(default=1, metadata=bounds(at_least=1))
    # Sequences an optimizer step, over all ranks. null: micro_batch_size x ranks.
    global_batch_size: int | None = field(default=None, metadata=bounds(at_least=1))
    # Peak learning rate.
    learning_rate: float = field(default=2e-4, metadata=bounds(above=0))
    # Seed of initialisation, data order and dropout.
    seed: int = field(default=0, metadata=bounds(at_least=0, below=2**31))
    # Put several rows into one sequence of max_length tokens, without letting them see one another.
    packing: bool = True
    # dtype of activations and matrix products. `auto`: bfloat16 on GPUs that have it, else float32. float16 is refused:
    # it needs loss scaling, which is not here.
    precision: Dtype = Dtype.auto
    # Evaluate every so many steps, and at the end. null: only before and after.
    eval_every_steps: int | None = field(default=None, metadata=bounds(at_least=1))
    # What to do when a step's loss or gradient is NaN or infinite; its rows are written to run.folder/bad_steps. stop:
    # save and end. skip: go on with the next batch. rollback: the same, from the weights of the newest checkpoint.
    on_bad_step: OnBadStep = OnBadStep.stop
    # A step is bad, too, when its gradient's norm is more than so many times the median of the last 100. null: never.
    grad_norm_spike: float | None = field(default=None, metadata=bounds(above=1))


@dataclass
class CheckpointConfig:
    # Write a checkpoint, which has the adapter too, every so many steps. null: not by steps. SIGTERM, SIGUSR1 and the
    # first Ctrl-C write one in any case, and end the run.
    every_steps: int | None = field(default=None, metadata=bounds(at_least=1))
    # Write a checkpoint when so many minutes have passed since the last.
    every_minutes: float | None = field(default=None, metadata=bounds(above=0))
    # Checkpoints to keep; older ones are removed once a newer one is whole.
    keep_last: int = field(default=2, metadata=bounds(at_least=1))
    # Besides these, keep so many of those with the lowest evaluation loss.
    keep_best: int = field(default=0, metadata=bounds(at_least=0))
    # auto: go on from the newest checkpoint in run.folder, if there is one. none: start anew, which removes them. Or
    # the folder of a checkpoint, of this run or another.
    resume: str = "auto"
    # Settings that may differ from the checkpoint's though the run is then another one, e.g. [training.learning_rate].
    allow_changes: list[str] = field(default_factory=list)


@dataclass
class TrackingConfig:
    # W&B. auto: online if a key is configured, else disabled.
    wandb: WandbMode = WandbMode.disabled
    # W&B project.
    project: str = "qlora-fsdp"
    # W&B user or team. null: the key's own.
    entity: str | None = None
    # Upload the adapter to W&B when the run has finished, as an artifact.
    log_adapter: bool = False
    # Write TensorBoard's event files to run.folder/tensorboard.
    tensorboard: bool = False
    # At every evaluation, complete the beginnings of so many held-out rows: to generations.jsonl, report.html and the
    # trackers. 0: none.
    num_generations: int = field(default=0, metadata=bounds(at_least=0))
    # Tokens of each, at most. Every token is a pass through the whole model.
    generation_tokens: int = field(default=64, metadata=bounds(at_least=1))


@dataclass
class DistributedConfig:
    # A collective that takes longer than this means that a rank is gone or stuck: all stop.
    timeout_seconds: int = field(default=600, metadata=bounds(at_least=1))


@dataclass
class LaunchConfig:
    # For jobs that `-m` or `hydra/launcher=...` starts. Processes a job, one a GPU; on SLURM, a node. null: jobs that
    # run at the same time get equal shares of the GPUs.
    num_processes: int | None = field(default=None, metadata=bounds(at_least=1))
    # An accelerate config. null: accelerate_configs/one_node.yaml, or multi_node.yaml where slurm.nodes is above 1.
    config_file: str | None = None
    # GPUs of this host to use, by index. null: all that are visible.
    devices: list[int] | None = None
    # Jobs of a sweep that run at the same time, on disjoint GPUs.
    parallel: int = field(default=1, metadata=bounds(at_least=1))
    # Print the commands or the job script, and start nothing.
    dry_run: bool = False


@dataclass
class SlurmConfig:
    # Partition (queue). null: the cluster's default, as for all below.
    partition: str | None = None
    # Account to charge.
    account: str | None = None
    # Time limit of a job, e.g. 24:00:00 or 2-00:00:00 (in YAML with quotes). A run that needs longer queues again.
    time: str | None = None
    # Nodes a job; each starts launch.num_processes processes.
    nodes: int = field(default=1, metadata=bounds(at_least=1))
    # GPUs a node; also the number of processes where launch.num_processes is null.
    gpus_per_node: int | None = field(default=None, metadata=bounds(at_least=1))
    # CPU cores a node. null: the cluster's default for one task, which may be 1.
    cpus_per_task: int | None = field(default=None, metadata=bounds(at_least=1))
    # Further options of sbatch, one an entry: ["--qos=long","--mem=0"].
    options: list[str] = field(default_factory=list)
    # Environment modules to load, e.g. [cuda/12.8].
    modules: list[str] = field(default_factory=list)
    # Shell commands to run first in the job script, e.g. ["source venv/bin/activate"].
    setup: list[str] = field(default_factory=list)
    # Container image, through srun --container-image (Pyxis). Its `python` is used.
    container: str | None = None
    # Seconds before the time limit at which a run is told to save, after which the job queues again.
    signal_seconds: int = field(default=120, metadata=bounds(at_least=1, below=65536))


@dataclass
class Config:
    run: RunConfig = field(default_factory=RunConfig)
    task: TaskConfig = field(default_factory=TaskConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    quant: QuantConfig = field(default_factory=QuantConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    fsdp: FsdpConfig = field(default_factory=FsdpConfig)
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    compute: ComputeConfig = field(default_factory=ComputeConfig)
    kernels: KernelsConfig = field(default_factory=KernelsConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    distributed: DistributedConfig = field(default_factory=DistributedConfig)
    launch: LaunchConfig = field(default_factory=LaunchConfig)
    slurm: SlurmConfig = field(default_factory=SlurmConfig)
