"""What a run is made of once its settings are resolved: small frozen specs, one for each part of the program.

A setting is typed, checked, resolved and used. `Config` is what was typed: it has `auto`, and None that means auto. It
ends where a run begins: `training/prepare.py` and the commands make the specs of it, and what lies below them gets the
spec of its own subject and can't see the other settings. No spec has an `auto`. Groups of settings that have none are
part of a spec as they are. Imports no torch.

What only a model's files, the hardware or the memory plan can tell is resolved by those who know it: `ModelSpec`
(model/settle.py) has the dtype, the attention and the packing of rows, and `RunPlan` (memory/plan_run.py) the
micro-batch, the activation policies and the sharding, from which `ShardSpec` follows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from qlora_fsdp.config.criterion import Criterion
from qlora_fsdp.config.outlook import Outlook
from qlora_fsdp.config.recorded import plain_settings
from qlora_fsdp.config.schema import (
    CheckpointConfig,
    ComputeConfig,
    Config,
    DataConfig,
    DistillConfig,
    FsdpConfig,
    GrpoConfig,
    KernelsConfig,
    LoraConfig,
    OnBadStep,
    OptimConfig,
    PreferenceConfig,
    Pruner,
    QuantConfig,
    RewardConfig,
    RolloutConfig,
    ShardingStrategy,
    TaskConfig,
    TaskName,
    TrackerName,
    TrackingConfig,
    TrainingConfig,
    WandbMode,
)
from qlora_fsdp.config.trackers import trackers_of, wandb_mode


@dataclass(frozen=True)
class TaskSpec:
    """What the model learns.

    Attributes:
        settings: the task, and the labels of classifiers.
        preference: the loss of task=preference.
        grpo: the loss of task=grpo.
        rollout: how its answers are written.
        distill: the teacher and the loss of task=distill.
    """

    settings: TaskConfig = field(default_factory=TaskConfig)
    preference: PreferenceConfig = field(default_factory=PreferenceConfig)
    grpo: GrpoConfig = field(default_factory=GrpoConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    distill: DistillConfig = field(default_factory=DistillConfig)

    @classmethod
    def of(cls, config: Config) -> TaskSpec:
        """The task of a run or of a command."""
        return cls(config.task, config.preference, config.grpo, config.rollout, config.distill)

    @property
    def name(self) -> TaskName:
        """The task."""
        return self.settings.name

    @property
    def is_causal(self) -> bool:
        """Whether the model writes text: its head gives the next token."""
        return self.settings.is_causal

    @property
    def compares_answers(self) -> bool:
        """Whether a row of the data has answers to the same prompt, or an answer with a label."""
        return self.settings.compares_answers

    @property
    def has_labels(self) -> bool:
        """Whether a new head is trained on labels of rows or words."""
        return self.settings.has_labels

    @property
    def writes_answers(self) -> bool:
        """Whether a row of the data is a prompt alone, and the model learns from what it answers itself."""
        return self.settings.writes_answers

    @property
    def has_pairs(self) -> bool:
        """Whether a row of the data is a prompt with two answers, which stay together in a sequence."""
        is_paired = self.name is TaskName.reward or self.preference.loss.is_paired
        return self.compares_answers and is_paired

    @property
    def has_reference(self) -> bool:
        """Whether the loss compares the model with what it was at the start, at each step or beforehand."""
        if self.name is TaskName.preference:
            return self.preference.loss.needs_reference
        return self.name is TaskName.grpo and self.grpo.beta > 0

    @property
    def computes_reference(self) -> bool:
        """Whether each step computes the reference's log-probabilities of its answers."""
        settings = self.preference
        return self.name is TaskName.preference and settings.loss.needs_reference and not settings.precompute

    @property
    def num_extra_forwards(self) -> int:
        """Forward passes of a micro-batch without a gradient, besides the one that is trained on.

        The reference's, unless it is precomputed; and KTO's of mismatched answers, by the model and by the reference.
        Of answers that the model has written itself, its own before the first step on them, and the reference's; or the
        teacher's, where that shares the base.
        """
        if self.name is TaskName.distill:
            return int(self.distill.shares_base)
        if self.writes_answers:
            return int(self.grpo.needs_old_log_probs) + int(self.grpo.beta > 0)
        if self.name is not TaskName.preference:
            return 0
        in_step = int(self.computes_reference)
        return in_step if self.has_pairs else 1 + 2 * in_step

    def sequence_length(self, max_length: int) -> int:
        """Most tokens of a packed sequence, for rows of at most `max_length`: there is room for a whole pair."""
        return max_length * (2 if self.has_pairs else 1)


@dataclass(frozen=True)
class ModuleSpec:
    """What decides which modules a model has, and what they compute. Equal specs make equal modules.

    Attributes:
        quant: how the base's weights are stored.
        lora: the adapters: the run's, or those of a saved one.
        task: the head and the loss.
        kernels: what computes norms, rotary embeddings, gates and the loss.
        compute: matrix products.
        router_aux_loss_coef: what the load-balancing loss of experts is multiplied by.
        num_slices: ranks that share a sequence, and exchange heads in attention.
    """

    quant: QuantConfig
    lora: LoraConfig
    task: TaskSpec
    kernels: KernelsConfig
    compute: ComputeConfig
    router_aux_loss_coef: float = 0.0
    num_slices: int = 1

    @classmethod
    def of(cls, config: Config) -> ModuleSpec:
        """The modules of a run."""
        return cls(
            quant=config.quant,
            lora=config.lora,
            task=TaskSpec.of(config),
            kernels=config.kernels,
            compute=config.compute,
            router_aux_loss_coef=config.training.router_aux_loss_coef,
            num_slices=config.distributed.num_slices,
        )


@dataclass(frozen=True)
class BatchSpec:
    """The shape of a rank's largest micro-batch.

    Attributes:
        task: what the model learns: pairs of answers stay together, and labels are part of a batch.
        size: sequences, or pairs of them where each answer of a pair is a sequence of its own.
        max_length: most tokens of a row; of a preference, of a prompt with one answer.
        packs_rows: whether several rows share a sequence.
        num_slices: ranks that share a sequence.
    """

    task: TaskSpec
    size: int
    max_length: int
    packs_rows: bool
    num_slices: int = 1

    @classmethod
    def of(cls, config: Config, size: int) -> BatchSpec:
        """The micro-batches of a run; its rows are packed unless it is sure that they are not."""
        return cls(
            task=TaskSpec.of(config),
            size=size,
            max_length=config.training.max_length,
            packs_rows=not config.is_padded,
            num_slices=config.distributed.num_slices,
        )

    @property
    def sequence_length(self) -> int:
        """Most tokens of a packed sequence: there is room for a whole pair."""
        return self.task.sequence_length(self.max_length)

    @property
    def slice_length(self) -> int:
        """Most tokens of a sequence that one rank computes."""
        return -(self.sequence_length // -self.num_slices)


@dataclass(frozen=True)
class DataSpec:
    """Which rows are trained on, and what becomes of them before they are batches.

    Attributes:
        settings: where the rows are, how they are read and cleaned, and which of them are held out.
        task: says what a row has to have.
        max_length: most tokens of a row; of a preference, of a prompt with one answer.
        packs_rows: whether several rows share a sequence.
        seed: of the order of sequences.
        row_seed: of the choice of rows.
        model_path: the model that the tokenizer is of, for messages.
    """

    settings: DataConfig
    task: TaskSpec
    max_length: int
    packs_rows: bool
    seed: int
    row_seed: int
    model_path: str | None = None

    @classmethod
    def of(cls, config: Config) -> DataSpec:
        """The data of a run or of a command; rows are packed where the settings do not say that they are not."""
        training = config.training
        return cls(
            settings=config.data,
            task=TaskSpec.of(config),
            max_length=training.max_length,
            packs_rows=training.packing is not False,
            seed=training.seed,
            row_seed=training.seed if config.data.seed is None else config.data.seed,
            model_path=config.model.path,
        )

    @property
    def sequence_length(self) -> int:
        """Most tokens of a packed sequence: there is room for a whole pair."""
        return self.task.sequence_length(self.max_length)


@dataclass(frozen=True)
class ShardSpec:
    """How a model's parameters are spread over the ranks.

    Attributes:
        strategy: never auto.
        num_shards: ranks among which every parameter is split.
        is_on_one_host: whether all parts of a parameter are on one host.
        cpu_offload: whether shards and optimizer state are in host memory.
        reshard_after_forward: whether layers are freed after their forward, and gathered again for backward.
        reads_peers: whether frozen weights may be read from the memory of the other GPUs of a host.
    """

    strategy: ShardingStrategy
    num_shards: int
    is_on_one_host: bool = True
    cpu_offload: bool = False
    reshard_after_forward: bool = True
    reads_peers: bool = True

    @classmethod
    def of(
        cls,
        settings: FsdpConfig,
        num_ranks: int,
        local_num_ranks: int,
        *,
        strategy: ShardingStrategy | None = None,
        reshard_after_forward: bool = True,
        reads_peers: bool = True,
    ) -> ShardSpec:
        """The sharding of a run, or of a command.

        Args:
            settings: the section `fsdp`.
            num_ranks: all ranks.
            local_num_ranks: those of one host.
            strategy: what the memory plan has chosen. None: no plan has, and auto is FULL_SHARD.
            reshard_after_forward: what the memory plan has chosen.
            reads_peers: the same.
        """
        strategy = settings.sharding_strategy if strategy is None else strategy
        if strategy is ShardingStrategy.auto:
            strategy = ShardingStrategy.FULL_SHARD
        chosen = replace(settings, sharding_strategy=strategy)
        num_shards = chosen.num_shards(num_ranks, local_num_ranks)
        return cls(
            strategy=strategy,
            num_shards=num_shards,
            is_on_one_host=local_num_ranks % num_shards == 0,
            cpu_offload=settings.cpu_offload,
            reshard_after_forward=reshard_after_forward,
            reads_peers=reads_peers,
        )

    @classmethod
    def whole(cls) -> ShardSpec:
        """Every rank has the whole model on its device."""
        return cls(ShardingStrategy.NO_SHARD, num_shards=1)

    @property
    def uses_fsdp(self) -> bool:
        """Whether FSDP has anything to do: parameters are split, or they come from host memory."""
        return self.num_shards > 1 or self.cpu_offload

    @property
    def may_read_peers(self) -> bool:
        """Whether all parts of a parameter are on GPUs of one host, which may read one another's memory."""
        return self.num_shards > 1 and self.is_on_one_host and not self.cpu_offload


@dataclass(frozen=True)
class StepSpec:
    """The optimizer steps of a run.

    Attributes:
        micro_batch_size: sequences of a forward pass.
        global_batch_size: sequences of a step, over all ranks.
        num_slices: ranks that share a sequence.
        max_steps: steps of the run; None: `num_epochs` over the data.
        num_epochs: passes over the data, if `max_steps` is None.
        optim: the optimizer, and how the learning rate changes.
        learning_rate: its peak.
        seed: of the order of sequences and of dropout.
        on_bad_step: what follows a step whose loss or gradient can't be used.
        grad_norm_spike: times the median that a gradient's norm may have; None for any.
        eval_every_steps: steps between evaluations; None: only before and after training.
        criterion: the figure of the evaluations that the run is judged by.
        early_stopping_patience: evaluations in a row without a better figure that end the run; None: none do.
        early_stopping_threshold: by how much a figure must be better to count.
        pruner: Optuna's, which compares the run with the others of its sweep; None: none does.
        pruner_kwargs: arguments of its class.
        deterministic: whether the run repeats to the bit.
        num_iterations: steps on the same sequences, one after another.
        group_by_length: whether the sequences of a step are to be of like lengths.
    """

    micro_batch_size: int
    global_batch_size: int
    num_slices: int = 1
    max_steps: int | None = None
    num_epochs: float = 1.0
    optim: OptimConfig = field(default_factory=OptimConfig)
    learning_rate: float = 2e-4
    seed: int = 0
    on_bad_step: OnBadStep = OnBadStep.stop
    grad_norm_spike: float | None = None
    eval_every_steps: int | None = None
    criterion: Criterion = field(default_factory=Criterion)
    early_stopping_patience: int | None = None
    early_stopping_threshold: float = 0.0
    pruner: Pruner | None = None
    pruner_kwargs: Mapping[str, float] = field(default_factory=dict)
    deterministic: bool = False
    num_iterations: int = 1
    group_by_length: bool = False

    @classmethod
    def of(
        cls,
        training: TrainingConfig,
        optim: OptimConfig,
        num_ranks: int,
        *,
        micro_batch_size: int,
        num_slices: int = 1,
        num_iterations: int = 1,
    ) -> StepSpec:
        """The steps of a run on a number of ranks; the memory plan has chosen the micro-batch and the slices."""
        num_groups = num_ranks // num_slices
        return cls(
            micro_batch_size=micro_batch_size,
            global_batch_size=training.global_batch_size or micro_batch_size * num_groups,
            num_slices=num_slices,
            max_steps=training.max_steps,
            num_epochs=training.num_epochs,
            optim=optim,
            learning_rate=training.learning_rate,
            seed=training.seed,
            on_bad_step=training.on_bad_step,
            grad_norm_spike=training.grad_norm_spike,
            eval_every_steps=training.eval_every_steps,
            criterion=Criterion.of(training),
            early_stopping_patience=training.early_stopping_patience,
            early_stopping_threshold=training.early_stopping_threshold,
            pruner=training.pruner,
            pruner_kwargs=training.pruner_kwargs,
            deterministic=training.deterministic,
            num_iterations=num_iterations,
            group_by_length=training.group_by_length,
        )


@dataclass(frozen=True)
class TrackingSpec:
    """Which trackers get a run's figures, and what they are told of the run.

    Attributes:
        trackers: those that get them.
        wandb: W&B's mode; never auto.
        run_name: the run's name.
        project: W&B's and trackio's project, MLflow's experiment.
        log_adapter: whether the adapter is uploaded at the end.
        recorded: every setting by its key, as the files of a run have it.
    """

    trackers: tuple[TrackerName, ...]
    wandb: WandbMode
    run_name: str
    project: str
    log_adapter: bool
    recorded: Mapping[str, Any]

    @classmethod
    def of(cls, config: Config) -> TrackingSpec:
        """The trackers of a run."""
        tracking = config.tracking
        return cls(
            trackers=tuple(trackers_of(tracking)),
            wandb=wandb_mode(tracking),
            run_name=config.run.name,
            project=tracking.project,
            log_adapter=tracking.log_adapter,
            recorded=plain_settings(config),
        )


@dataclass(frozen=True)
class RunSpec:
    """A run of which nothing is open any more. Each part of the program gets its own part of it.

    Attributes:
        modules: what the model is made of.
        data: which rows are trained on.
        shards: how parameters are spread over the ranks.
        steps: the optimizer steps.
        saving: when checkpoints are written, and how many are kept.
        reward: what rewards answers that the model writes.
        generations: how many texts the model writes at an evaluation, and how long they may be.
        tracking: the trackers.
        recorded: every setting by its key, as the files of a run have it: as it was typed, without what the environment
            gave.
        has_memory_target: whether `memory.target_gib` limits what the run may use.
        outlook: what decides whether it can learn.
    """

    modules: ModuleSpec
    data: DataSpec
    shards: ShardSpec
    steps: StepSpec
    saving: CheckpointConfig
    reward: RewardConfig
    generations: TrackingConfig
    tracking: TrackingSpec
    recorded: Mapping[str, Any]
    has_memory_target: bool
    outlook: Outlook
