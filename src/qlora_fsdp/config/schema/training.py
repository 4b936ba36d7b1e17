"""The steps of a run, its checkpoints, and where its figures and its adapter go."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

from typing_extensions import assert_never

from qlora_fsdp.config.schema.facets import ALWAYS, Files, Hosts, Run, above, at_least, setting, when
from qlora_fsdp.config.schema.model import Dtype


class Optimizer(Enum):
    adamw = "adamw"
    adamw_8bit = "adamw_8bit"
    paged_adamw_32bit = "paged_adamw_32bit"
    paged_adamw_8bit = "paged_adamw_8bit"
    lion_32bit = "lion_32bit"
    lion_8bit = "lion_8bit"
    adafactor = "adafactor"

    @property
    def is_bitsandbytes(self) -> bool:
        """Whether bitsandbytes computes it. Each rank then has a state of its own shards, which fits no others.

        Its state and its step are on the GPU, so that parameters in host memory can't use it.
        """
        match self:
            case Optimizer.adamw | Optimizer.adafactor:
                return False
            case Optimizer.adamw_8bit | Optimizer.paged_adamw_32bit | Optimizer.paged_adamw_8bit:
                return True
            case Optimizer.lion_32bit | Optimizer.lion_8bit:
                return True
            case unknown:
                assert_never(unknown)

    @property
    def is_paged(self) -> bool:
        """Whether its state may go to host memory while the GPU has no room for it. Only CUDA has such memory."""
        match self:
            case Optimizer.paged_adamw_32bit | Optimizer.paged_adamw_8bit:
                return True
            case Optimizer.adamw | Optimizer.adamw_8bit | Optimizer.adafactor:
                return False
            case Optimizer.lion_32bit | Optimizer.lion_8bit:
                return False
            case unknown:
                assert_never(unknown)

    @property
    def moments(self) -> tuple[int, int]:
        """How many means it keeps of each element, and in how many bits."""
        match self:
            case Optimizer.adamw | Optimizer.paged_adamw_32bit:
                return 2, 32
            case Optimizer.adamw_8bit | Optimizer.paged_adamw_8bit:
                return 2, 8
            case Optimizer.lion_32bit:
                return 1, 32
            case Optimizer.lion_8bit:
                return 1, 8
            case Optimizer.adafactor:  # of each row and column
                return 0, 32
            case unknown:
                assert_never(unknown)


class LrScheduler(Enum):
    cosine = "cosine"
    linear = "linear"
    constant = "constant"
    cosine_with_min_lr = "cosine_with_min_lr"
    warmup_stable_decay = "warmup_stable_decay"
    polynomial = "polynomial"
    cosine_with_restarts = "cosine_with_restarts"

    @property
    def arguments(self) -> dict[str, float]:
        """What optim.lr_scheduler_kwargs may set of it, with the defaults, which are transformers' where it has any."""
        match self:
            case LrScheduler.cosine | LrScheduler.linear | LrScheduler.constant:
                return {}
            case LrScheduler.cosine_with_min_lr:
                return {"min_lr_rate": 0.1}
            case LrScheduler.warmup_stable_decay:
                return {"decay_ratio": 0.2, "min_lr_ratio": 0.0}
            case LrScheduler.polynomial:
                return {"power": 1.0, "lr_end": 1e-7}
            case LrScheduler.cosine_with_restarts:
                return {"num_cycles": 1}
            case unknown:
                assert_never(unknown)


@dataclass
class OptimConfig:
    # adamw: torch's fused AdamW. adamw_8bit: bitsandbytes' AdamW with block-wise 8-bit state (arXiv:2110.02861).
    # paged_adamw_32bit and paged_adamw_8bit: bitsandbytes', whose state goes to host memory while the GPU has no room.
    # lion_32bit and lion_8bit: bitsandbytes' Lion (arXiv:2302.06675), with one mean in place of two; its paper takes
    # betas of 0.9 and 0.99, and learning rates three to ten times lower. adafactor: transformers' Adafactor
    # (arXiv:1804.04235) with the run's learning rate; it keeps means of rows and columns, and has no betas and no eps.
    name: Optimizer = setting(Optimizer.adamw, Run.fixed, ALWAYS, files=Files.users, other_names=("optimizer",))
    # Decoupled weight decay (arXiv:1711.05101).
    weight_decay: float = setting(0.0, Run.other, ALWAYS, files=Files.users, bounds=at_least(0))
    # Decay of the running means of the gradient and of its square.
    betas: list[float] = setting([0.9, 0.999], Run.other, ALWAYS, files=Files.users)
    # Added to the denominator.
    eps: float = setting(1e-08, Run.other, ALWAYS, files=Files.users, bounds=above(0))
    # LoRA+ (arXiv:2402.12354): the learning rate of the adapters' B, and of vectors such as DoRA's, is this many times
    # that of all else, as in PEFT's create_loraplus_optimizer. The paper takes 16, and a lower training.learning_rate.
    loraplus_lr_ratio: float | None = setting(None, Run.other, ALWAYS, files=Files.users, bounds=above(0))
    # Peak learning rate of what is trained of the embeddings: all of them, rows of new tokens, or their adapter, as
    # PEFT's loraplus_lr_embedding; LoRA+ does not multiply it. null: training.learning_rate.
    embedding_learning_rate: float | None = setting(
        None,
        Run.other,
        ALWAYS,
        files=Files.users,
        bounds=above(0),
        other_names=("embedding_lr", "loraplus_lr_embedding"),
    )
    # Peak learning rate of the adapters of experts. null: training.learning_rate.
    expert_learning_rate: float | None = setting(None, Run.other, ALWAYS, files=Files.users, bounds=above(0))
    # Clip the gradient's global norm to this. 0 does not clip.
    max_grad_norm: float = setting(1.0, Run.other, ALWAYS, files=Files.users, bounds=at_least(0))
    # Shape of the learning rate after warmup, by transformers' names. cosine and linear fall to 0. cosine_with_min_lr
    # falls to min_lr_rate times the peak (0.1). warmup_stable_decay stays at the peak and falls during the last
    # decay_ratio of the steps (0.2), as a cosine, to min_lr_ratio times the peak (0). polynomial falls to lr_end (1e-7)
    # with a power (1). cosine_with_restarts begins again num_cycles times (1).
    lr_scheduler_type: LrScheduler = setting(LrScheduler.cosine, Run.other, ALWAYS, files=Files.users)
    # Arguments of this shape, by their names above.
    lr_scheduler_kwargs: dict[str, float] = setting(
        {}, Run.other, ALWAYS, files=Files.users, example="'{min_lr_rate: 0.05}'"
    )
    # Part of the steps during which the learning rate rises from 0.
    warmup_ratio: float = setting(0.03, Run.other, ALWAYS, files=Files.users, bounds=at_least(0, below=1))
    # Number of warmup steps. It wins over warmup_ratio.
    warmup_steps: int | None = setting(None, Run.other, ALWAYS, files=Files.users, bounds=at_least(0))


DEFAULT_GLOBAL_BATCH = 16


class Pruner(Enum):
    """Classes of Optuna."""

    MedianPruner = "MedianPruner"
    PercentilePruner = "PercentilePruner"
    SuccessiveHalvingPruner = "SuccessiveHalvingPruner"


class OnBadStep(Enum):
    stop = "stop"
    skip = "skip"
    rollback = "rollback"


@dataclass
class TrainingConfig:
    # Most tokens per sequence. With task=preference it is most tokens of a prompt with one answer, and a sequence has
    # room for two of these.
    max_length: int = setting(
        2048,
        Run.other,
        ALWAYS,
        files=Files.users,
        bounds=at_least(2),
        other_names=("max_seq_length", "sequence_len", "cutoff_len", "max_seq_len"),
        is_common=True,
    )
    # Optimizer steps. It wins over num_epochs: the data is repeated as often as needed. null: num_epochs over the data.
    max_steps: int | None = setting(None, Run.other, ALWAYS, files=Files.users, bounds=at_least(1), is_common=True)
    # Passes over the data.
    num_epochs: float = setting(
        1.0,
        Run.other,
        ALWAYS,
        files=Files.users,
        bounds=above(0),
        other_names=("epochs", "num_train_epochs"),
        is_common=True,
    )
    # Sequences per GPU and forward pass. `auto`: the smallest power of two that divides a rank's part of the global
    # batch and has the best predicted speed, but for 1 %; on a CPU about 2,048 tokens. The losses do not depend on it.
    micro_batch_size: Any = setting(
        "auto",
        Run.same,
        ALWAYS,
        bounds=at_least(1),
        words=("auto",),
        other_names=("batch_size", "per_device_train_batch_size"),
        is_common=True,
    )
    # Sequences per optimizer step, over all ranks. The default is the QLoRA paper's; where it is no multiple of
    # micro_batch_size x ranks, the nearest one is taken. null: micro_batch_size x ranks.
    global_batch_size: int | None = setting(
        DEFAULT_GLOBAL_BATCH,
        Run.other,
        ALWAYS,
        files=Files.users,
        bounds=at_least(1),
        other_names=("gradient_accumulation_steps",),
        is_common=True,
    )
    # Peak learning rate.
    learning_rate: float = setting(
        0.0002, Run.other, ALWAYS, files=Files.users, bounds=above(0), other_names=("lr",), is_common=True
    )
    # Seed of the initialisation, of the data's order and of dropout.
    seed: int = setting(0, Run.other, ALWAYS, files=Files.adapters, bounds=at_least(0, below=2**31), is_common=True)
    # Let a run repeat to the bit on the same GPUs. Kernels that add in any order are replaced by slower ones or refused
    # by name, and every micro-batch sums its gradients over the ranks. On CPUs runs repeat without it.
    deterministic: bool = setting(False, Run.same, ALWAYS)
    # Put several rows into one sequence of max_length tokens, without letting them see one another. `auto`: where a
    # small model of the same kind shows that they do not; otherwise each row is a sequence, and the log says why. true:
    # the same, but a run whose rows would see one another ends with an error.
    packing: Any = setting(
        "auto", Run.same, ALWAYS, files=Files.adapters, values=(True, False, "auto"), other_names=("sample_packing",)
    )
    # Put padded rows of like lengths into a step, as transformers' sampler of this name: less padding, in an order that
    # is less random. Packed rows have no padding.
    group_by_length: bool = setting(False, Run.other, ALWAYS, files=Files.users)
    # dtype of activations and matrix products. `auto`: bfloat16 on GPUs that have it, else float32. float16 is refused,
    # because it needs loss scaling, which is not here.
    precision: Dtype = setting(Dtype.auto, Run.other, ALWAYS, files=Files.users, other_names=("bf16", "fp16"))
    # Evaluate each time this many steps are done, and at the end. null: only before and after training.
    eval_every_steps: int | None = setting(None, Run.same, ALWAYS, bounds=at_least(1), other_names=("eval_steps",))
    # The figure of the evaluations by which the run is judged: where it stops early, and which checkpoint and which run
    # of a sweep is the best. loss, or another that the task has: accuracy, f1, rewards/accuracies, or reward and pass@1
    # of answers to held-out prompts.
    metric_for_best_model: str = setting("loss", Run.same, ALWAYS)
    # Whether its greatest value is the best. null: unless its name ends with loss or mae.
    greater_is_better: bool | None = setting(None, Run.same, ALWAYS)
    # Stop when this many evaluations in a row have not been better than the best before them (transformers'
    # EarlyStoppingCallback). The adapter is that of the last step unless checkpoint.best_at_end is set. null: never.
    early_stopping_patience: int | None = setting(
        None, Run.same, when("training.eval_every_steps"), bounds=at_least(1), other_names=("patience",)
    )
    # By how much an evaluation has to be better for that.
    early_stopping_threshold: float = setting(
        0.0, Run.same, when("training.early_stopping_patience"), bounds=at_least(0)
    )
    # In a sweep, stop after an evaluation where one of Optuna's pruners says that the sweep's other runs were better by
    # then. The run has finished then, with an adapter. It needs the package optuna and any sweeper. null: none does.
    pruner: Pruner | None = setting(None, Run.same, when("training.eval_every_steps"))
    # Arguments of the pruner's class. PercentilePruner needs its percentile.
    pruner_kwargs: dict[str, float] = setting({}, Run.same, when("training.pruner"), example="'{n_startup_trials: 2}'")
    # Of a mixture of experts: what its load-balancing loss (arXiv:2101.03961) is multiplied by before it is added. 0
    # adds none, whatever the model's config says.
    router_aux_loss_coef: float = setting(0.0, Run.other, ALWAYS, files=Files.users, bounds=at_least(0))
    # What to do when a step's loss or gradient is NaN or infinite. Its rows are written to run.folder/bad_steps. stop:
    # save and end. skip: continue with the next batch. rollback: the same, from the weights of the newest checkpoint.
    on_bad_step: OnBadStep = setting(OnBadStep.stop, Run.same, ALWAYS)
    # A step is also bad when its gradient norm is more than this many times the median of the last 100 steps. null:
    # never.
    grad_norm_spike: float | None = setting(None, Run.same, ALWAYS, bounds=above(1))


@dataclass
class CheckpointConfig:
    # Write a checkpoint, which includes the adapter, each time this many steps are done. null: not by steps. SIGTERM,
    # SIGUSR1 and the first Ctrl-C write one in any case, and end the run.
    every_steps: int | None = setting(None, Run.same, ALWAYS, bounds=at_least(1), other_names=("save_steps",))
    # Write a checkpoint when this many minutes have passed since the last one.
    every_minutes: float | None = setting(None, Run.same, ALWAYS, bounds=above(0))
    # Number of checkpoints to keep. An older one is removed once a newer one is complete.
    keep_last: int = setting(2, Run.same, ALWAYS, bounds=at_least(1), other_names=("save_total_limit",))
    # Besides these, keep this many of the best by training.metric_for_best_model.
    keep_best: int = setting(0, Run.same, ALWAYS, bounds=at_least(0))
    # At the end, write the adapter of the best kept checkpoint by training.metric_for_best_model, unless the last
    # step's is better still (transformers' load_best_model_at_end). It needs keep_best.
    best_at_end: bool = setting(False, Run.same, ALWAYS, other_names=("load_best_model_at_end",))
    # auto: resume from the newest checkpoint in run.folder, if there is one. none: start anew, which removes the
    # checkpoints. Or the folder of a checkpoint, of this run or of another.
    resume: str = setting("auto", Run.same, ALWAYS, other_names=("resume_from_checkpoint",), hosts=Hosts.place)
    # Settings that may differ from the checkpoint's although this makes it another run, e.g. [training.learning_rate].
    allow_changes: list[str] = setting([], Run.same, ALWAYS)


class WandbMode(Enum):
    auto = "auto"
    online = "online"
    offline = "offline"
    disabled = "disabled"


class TrackerName(Enum):
    wandb = "wandb"
    tensorboard = "tensorboard"
    mlflow = "mlflow"
    trackio = "trackio"


@dataclass
class TrackingConfig:
    # Trackers that get every figure: wandb, tensorboard, mlflow, trackio.
    report_to: list[str] = setting([], Run.same, ALWAYS, hosts=Hosts.first, is_planned=False)
    # How W&B is reached. auto: as WANDB_MODE says, or else online if a key is configured, and if not it gets nothing,
    # with a note that says so. offline: its files stay in the run folder, for `wandb sync`.
    wandb_mode: WandbMode = setting(WandbMode.auto, Run.same, ALWAYS, hosts=Hosts.first, is_planned=False)
    # Project in W&B and trackio, experiment in MLflow.
    project: str = setting("qlora-fsdp", Run.same, ALWAYS, hosts=Hosts.first, is_planned=False)
    # Upload the adapter to W&B and MLflow as an artifact when the run has finished.
    log_adapter: bool = setting(False, Run.same, ALWAYS, hosts=Hosts.first, is_planned=False)
    # At every evaluation, let the model complete the beginnings of this many held-out rows. The texts go to
    # generations.jsonl, report.html and the trackers. 0: none.
    num_generations: int = setting(0, Run.same, ALWAYS, bounds=at_least(0), hosts=Hosts.first, is_planned=False)
    # Most tokens per completion. Every token is a pass through the whole model.
    generation_tokens: int = setting(64, Run.same, ALWAYS, bounds=at_least(1), hosts=Hosts.first, is_planned=False)


@dataclass
class HubConfig:
    # Upload the adapter to the Hugging Face hub when the run has finished (transformers' push_to_hub). Whether that is
    # allowed is found out before training. A failed upload does not fail the run.
    push: bool = setting(False, Run.same, ALWAYS, hosts=Hosts.first)
    # The repository, ORG/NAME, or NAME for one of your own (transformers' hub_model_id). It is made if it is not there.
    repo: str | None = setting(None, Run.same, ALWAYS, hosts=Hosts.first)
    # Whether a new repository is private (transformers' hub_private_repo). One that is there stays as it is.
    private: bool = setting(True, Run.same, ALWAYS, hosts=Hosts.first)
