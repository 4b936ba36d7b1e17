"""What a run is called, and what the model learns in it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from qlora_fsdp.config.schema.bounds import bounds


@dataclass
class RunConfig:
    # Name of the run. It is also the last part of the default folder, and the run's name in W&B.
    name: str = "run"
    # The run folder. Everything that the run writes is in it.
    folder: str = "outputs/${run.name}"
    # Start anew in a folder that already holds a run. Its files are replaced, checkpoints included.
    overwrite: bool = False


class TaskName(Enum):
    causal_lm = "causal_lm"
    preference = "preference"
    reward = "reward"
    sequence_classification = "sequence_classification"
    token_classification = "token_classification"


class ProblemType(Enum):
    single_label_classification = "single_label_classification"
    multi_label_classification = "multi_label_classification"
    regression = "regression"


@dataclass
class TaskConfig:
    # What the model learns. `causal_lm` is the next token. `preference` is which of two answers was chosen, {"prompt":
    # ..., "chosen": ..., "rejected": ...}. `reward` learns the same by a number for each answer, which a new head gives
    # (Bradley and Terry's loss); a row may have a "margin" that the numbers are to differ by. The other two train a new
    # head on the labels of whole rows, {"text": ..., "label": ...}, or of words, {"tokens": [...], "labels": [...]}.
    name: TaskName = TaskName.causal_lm
    # Whether a row has one label, any number of labels (a list), or numbers. The names are those of transformers.
    problem_type: ProblemType = ProblemType.single_label_classification
    # Names of the labels in the order of the head's outputs. Rows give a label by its name or its index. For regression
    # these are the names of the numbers, and null means that there is one number.
    labels: list[str] | None = None
    # Weights of the labels in the loss, in the same order. Where a row may have several labels, they weigh the positive
    # ones. `balanced` weighs each label inversely to how often it occurs. null weighs all alike.
    class_weights: Any = None

    @property
    def is_causal(self) -> bool:
        """Whether the model writes text: its head gives the next token."""
        return self.name in (TaskName.causal_lm, TaskName.preference)

    @property
    def compares_answers(self) -> bool:
        """Whether a row of the data has answers to the same prompt, or an answer with a label."""
        return self.name in (TaskName.preference, TaskName.reward)

    @property
    def has_labels(self) -> bool:
        """Whether a new head is trained on labels of rows or words."""
        return self.name in (TaskName.sequence_classification, TaskName.token_classification)


class PreferenceLoss(Enum):
    dpo = "dpo"
    ipo = "ipo"
    hinge = "hinge"
    robust = "robust"
    simpo = "simpo"
    cpo = "cpo"
    orpo = "orpo"
    kto = "kto"

    @property
    def needs_reference(self) -> bool:
        """Whether the loss compares the model with what it was before training."""
        return self not in (PreferenceLoss.simpo, PreferenceLoss.cpo, PreferenceLoss.orpo)

    @property
    def is_paired(self) -> bool:
        """Whether a row of the data has two answers, of which one was chosen; else one, with a label."""
        return self is not PreferenceLoss.kto


@dataclass
class PreferenceConfig:
    # The loss of task=preference. dpo (arXiv:2305.18290), ipo (arXiv:2310.12036), hinge (SLiC, arXiv:2305.10425),
    # robust (arXiv:2403.00409) and kto (arXiv:2402.01306) compare the model with the base without the adapter, or with
    # the adapter of lora.start. simpo (arXiv:2405.14734), cpo (arXiv:2401.08417) and orpo (arXiv:2403.07691) need no
    # such reference.
    loss: PreferenceLoss = PreferenceLoss.dpo
    # How strongly the loss reacts to differences of log-probabilities: beta of the papers, but IPO's tau and ORPO's
    # lambda. null: 2 for simpo, 0.1 for the others.
    beta: float | None = field(default=None, metadata=bounds(above=0))
    # Part of the pairs whose answers are taken to be swapped: of dpo (conservative DPO), robust, cpo and simpo.
    label_smoothing: float = field(default=0.0, metadata=bounds(at_least=0, below=0.5))
    # SimPO's gamma: how much larger, times beta, a chosen answer's mean log-probability is to be.
    simpo_gamma: float = field(default=1.0, metadata=bounds(at_least=0))
    # This many times the negative log-likelihood of the chosen answer, a mean over its tokens, is added to a pair's
    # loss. With dpo this is RPO (arXiv:2404.19733). null: 1 for cpo and orpo, 0 for the others.
    sft_weight: float | None = field(default=None, metadata=bounds(at_least=0))
    # Of kto: the weight of answers whose label is true.
    desirable_weight: float = field(default=1.0, metadata=bounds(above=0))
    # Of kto: the weight of answers whose label is false.
    undesirable_weight: float = field(default=1.0, metadata=bounds(above=0))
    # Compute the reference's log-probabilities once, before training, and keep them beside the tokenized data. false
    # computes them in each step, in a pass without gradient. Both are the same numbers.
    precompute: bool = True

    @property
    def used_beta(self) -> float:
        """`beta`, or what it is for the loss if it is null."""
        return self.beta if self.beta is not None else 2.0 if self.loss is PreferenceLoss.simpo else 0.1

    @property
    def used_sft_weight(self) -> float:
        """`sft_weight`, or what it is for the loss if it is null."""
        if self.sft_weight is not None:
            return self.sft_weight
        return 1.0 if self.loss in (PreferenceLoss.cpo, PreferenceLoss.orpo) else 0.0
