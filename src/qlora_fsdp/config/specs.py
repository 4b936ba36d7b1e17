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

from dataclasses import dataclass, field

from qlora_fsdp.config.schema import (
    ComputeConfig,
    Config,
    DataConfig,
    KernelsConfig,
    LoraConfig,
    PreferenceConfig,
    QuantConfig,
    TaskConfig,
    TaskName,
)


@dataclass(frozen=True)
class TaskSpec:
    """What the model learns.

    Attributes:
        settings: the task, and the labels of classifiers.
        preference: the loss of task=preference.
    """

    settings: TaskConfig = field(default_factory=TaskConfig)
    preference: PreferenceConfig = field(default_factory=PreferenceConfig)

    @classmethod
    def of(cls, config: Config) -> TaskSpec:
        """The task of a run."""
        return cls(config.task, config.preference)

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
    def has_pairs(self) -> bool:
        """Whether a row of the data is a prompt with two answers, which stay together in a sequence."""
        is_paired = self.name is TaskName.reward or self.preference.loss.is_paired
        return self.compares_answers and is_paired

    @property
    def computes_reference(self) -> bool:
        """Whether each step computes the reference's log-probabilities of its answers."""
        settings = self.preference
        return self.name is TaskName.preference and settings.loss.needs_reference and not settings.precompute

    @property
    def num_extra_forwards(self) -> int:
        """Forward passes of a micro-batch without a gradient, besides the one that is trained on.

        The reference's, unless it is precomputed; and KTO's of mismatched answers, by the model and by the reference.
        """
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
