"""What a run is called, and what the model learns in it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

from typing_extensions import assert_never

from qlora_fsdp.config.schema.facets import ALWAYS, Files, Hosts, Run, When, above, at_least, setting, when


@dataclass
class RunConfig:
    # Name of the run. It is also the last part of the default folder, and the run's name in W&B.
    name: str = setting("run", Run.same, ALWAYS, hosts=Hosts.first, is_planned=False, is_common=True)
    # The run folder. Everything that the run writes is in it.
    folder: str = setting(
        "outputs/${run.name}",
        Run.same,
        ALWAYS,
        other_names=("output_dir",),
        hosts=Hosts.first,
        is_planned=False,
        is_common=True,
    )
    # Start anew in a folder that already holds a run. Its files are replaced, checkpoints included.
    overwrite: bool = setting(False, Run.same, ALWAYS, hosts=Hosts.first, is_planned=False)


class TaskName(Enum):
    causal_lm = "causal_lm"
    preference = "preference"
    reward = "reward"
    sequence_classification = "sequence_classification"
    token_classification = "token_classification"
    grpo = "grpo"
    distill = "distill"

    @property
    def is_causal(self) -> bool:
        """Whether the model writes text: its head gives the next token."""
        match self:
            case TaskName.causal_lm | TaskName.preference | TaskName.grpo | TaskName.distill:
                return True
            case TaskName.reward | TaskName.sequence_classification | TaskName.token_classification:
                return False
            case unknown:
                assert_never(unknown)

    @property
    def compares_answers(self) -> bool:
        """Whether a row of the data has answers to the same prompt, or an answer with a label."""
        match self:
            case TaskName.preference | TaskName.reward:
                return True
            case TaskName.causal_lm | TaskName.sequence_classification | TaskName.token_classification:
                return False
            case TaskName.grpo | TaskName.distill:
                return False
            case unknown:
                assert_never(unknown)

    @property
    def has_labels(self) -> bool:
        """Whether a new head is trained on labels of rows or words."""
        match self:
            case TaskName.sequence_classification | TaskName.token_classification:
                return True
            case TaskName.causal_lm | TaskName.preference | TaskName.reward | TaskName.grpo | TaskName.distill:
                return False
            case unknown:
                assert_never(unknown)

    @property
    def writes_answers(self) -> bool:
        """Whether a row of the data is a prompt alone, and the model learns from what it answers itself."""
        match self:
            case TaskName.grpo | TaskName.distill:
                return True
            case TaskName.causal_lm | TaskName.preference | TaskName.reward:
                return False
            case TaskName.sequence_classification | TaskName.token_classification:
                return False
            case unknown:
                assert_never(unknown)


class LossType(Enum):
    nll = "nll"
    dft = "dft"


class ProblemType(Enum):
    single_label_classification = "single_label_classification"
    multi_label_classification = "multi_label_classification"
    regression = "regression"


_CAUSAL = when("task.name", TaskName.causal_lm)
_WITH_LABELS = when(
    "task.name",
    *(name for name in TaskName if name.has_labels),
    fix="task=sequence_classification or token_classification",
)


@dataclass
class TaskConfig:
    # What the model learns. `causal_lm` is the next token. `preference` is which of two answers was chosen, {"prompt":
    # ..., "chosen": ..., "rejected": ...}. `reward` learns the same by a number for each answer, which a new head gives
    # (Bradley and Terry's loss); a row may have a "margin" that the numbers are to differ by. `grpo` learns from what
    # its own answers to {"prompt": ...} are rewarded with, `distill` from what a teacher would have written in place of
    # each of their tokens. The other two train a new head on the labels of whole rows, {"text": ..., "label": ...}, or
    # of words, {"tokens": [...], "labels": [...]}.
    name: TaskName = setting(TaskName.causal_lm, Run.other, ALWAYS, files=Files.adapters)
    # Whether a row has one label, any number of labels (a list), or numbers. The names are those of transformers.
    problem_type: ProblemType = setting(
        ProblemType.single_label_classification, Run.other, _WITH_LABELS, files=Files.adapters
    )
    # Names of the labels in the order of the head's outputs. Rows give a label by its name or its index. For regression
    # these are the names of the numbers, and null means that there is one number.
    labels: list[str] | None = setting(None, Run.other, _WITH_LABELS, files=Files.adapters)
    # Weights of the labels in the loss, in the same order. Where a row may have several labels, they weigh the positive
    # ones. `balanced` weighs each label inversely to how often it occurs. null weighs all alike.
    class_weights: Any = setting(None, Run.other, _WITH_LABELS, files=Files.adapters)
    # The loss of causal_lm, by TRL's names. nll: the cross-entropy of the next token. dft: each token's, times the
    # probability that the model gives it (arXiv:2508.05629). Evaluations tell the cross-entropy.
    loss_type: LossType = setting(LossType.nll, Run.other, _CAUSAL, files=Files.adapters)
    # Part of the loss that is the mean over all tokens of the vocabulary in place of the next token's, as in
    # transformers (arXiv:1512.00567). Evaluations have none.
    label_smoothing_factor: float = setting(
        0.0,
        Run.other,
        (*_CAUSAL, *when("task.loss_type", LossType.nll)),
        files=Files.adapters,
        bounds=at_least(0, below=1),
        other_names=("label_smoothing",),
    )
    # NEFTune (arXiv:2310.05914): noise on the embeddings of training rows, uniform and at most this much over the root
    # of tokens x hidden size. The paper takes 5 to 15. null: none.
    neftune_noise_alpha: float | None = setting(
        None, Run.other, _CAUSAL, files=Files.adapters, bounds=above(0), other_names=("neftune_alpha",)
    )

    @property
    def is_causal(self) -> bool:
        """Whether the model writes text: its head gives the next token."""
        return self.name.is_causal

    @property
    def compares_answers(self) -> bool:
        """Whether a row of the data has answers to the same prompt, or an answer with a label."""
        return self.name.compares_answers

    @property
    def has_labels(self) -> bool:
        """Whether a new head is trained on labels of rows or words."""
        return self.name.has_labels

    @property
    def writes_answers(self) -> bool:
        """Whether a row of the data is a prompt alone, and the model learns from what it answers itself."""
        return self.name.writes_answers


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
        match self:
            case PreferenceLoss.dpo | PreferenceLoss.ipo | PreferenceLoss.hinge | PreferenceLoss.robust:
                return True
            case PreferenceLoss.kto:
                return True
            case PreferenceLoss.simpo | PreferenceLoss.cpo | PreferenceLoss.orpo:
                return False
            case unknown:
                assert_never(unknown)

    @property
    def is_paired(self) -> bool:
        """Whether a row of the data has two answers, of which one was chosen; else one, with a label."""
        match self:
            case PreferenceLoss.dpo | PreferenceLoss.ipo | PreferenceLoss.hinge | PreferenceLoss.robust:
                return True
            case PreferenceLoss.simpo | PreferenceLoss.cpo | PreferenceLoss.orpo:
                return True
            case PreferenceLoss.kto:
                return False
            case unknown:
                assert_never(unknown)

    @property
    def smooths_labels(self) -> bool:
        """Whether the loss can take a part of the pairs to be swapped (`label_smoothing`)."""
        match self:
            case PreferenceLoss.dpo | PreferenceLoss.robust | PreferenceLoss.cpo | PreferenceLoss.simpo:
                return True
            case PreferenceLoss.ipo | PreferenceLoss.hinge | PreferenceLoss.orpo | PreferenceLoss.kto:
                return False
            case unknown:
                assert_never(unknown)

    @property
    def default_beta(self) -> float:
        """`beta` where it is null."""
        match self:
            case PreferenceLoss.simpo:
                return 2.0
            case PreferenceLoss.dpo | PreferenceLoss.ipo | PreferenceLoss.hinge | PreferenceLoss.robust:
                return 0.1
            case PreferenceLoss.cpo | PreferenceLoss.orpo | PreferenceLoss.kto:
                return 0.1
            case unknown:
                assert_never(unknown)

    @property
    def default_sft_weight(self) -> float:
        """`sft_weight` where it is null."""
        match self:
            case PreferenceLoss.cpo | PreferenceLoss.orpo:
                return 1.0
            case PreferenceLoss.dpo | PreferenceLoss.ipo | PreferenceLoss.hinge | PreferenceLoss.robust:
                return 0.0
            case PreferenceLoss.simpo | PreferenceLoss.kto:
                return 0.0
            case unknown:
                assert_never(unknown)


def _losses(*losses: PreferenceLoss) -> tuple[When, ...]:
    """The condition of a setting that some losses have a part for."""
    return (*_OF_PREFERENCES, *when("preference.loss", *losses))


_OF_PREFERENCES = when("task.name", TaskName.preference, fix="task=preference")
_OF_SIMPO = _losses(PreferenceLoss.simpo)
_OF_KTO = _losses(PreferenceLoss.kto)
_SMOOTHED = _losses(*(loss for loss in PreferenceLoss if loss.smooths_labels))
_PAIRED = _losses(*(loss for loss in PreferenceLoss if loss.is_paired))
_WITH_REFERENCE = _losses(*(loss for loss in PreferenceLoss if loss.needs_reference))


@dataclass
class PreferenceConfig:
    # The loss of task=preference. dpo (arXiv:2305.18290), ipo (arXiv:2310.12036), hinge (SLiC, arXiv:2305.10425),
    # robust (arXiv:2403.00409) and kto (arXiv:2402.01306) compare the model with the base without the adapter, or with
    # the adapter of lora.start. simpo (arXiv:2405.14734), cpo (arXiv:2401.08417) and orpo (arXiv:2403.07691) need no
    # such reference.
    loss: PreferenceLoss = setting(PreferenceLoss.dpo, Run.other, _OF_PREFERENCES, files=Files.adapters)
    # How strongly the loss reacts to differences of log-probabilities: beta of the papers, but IPO's tau and ORPO's
    # lambda. null: 2 for simpo, 0.1 for the others.
    beta: float | None = setting(None, Run.other, _OF_PREFERENCES, files=Files.adapters, bounds=above(0))
    # Part of the pairs whose answers are taken to be swapped: of dpo (conservative DPO), robust, cpo and simpo.
    label_smoothing: float = setting(0.0, Run.other, _SMOOTHED, files=Files.adapters, bounds=at_least(0, below=0.5))
    # SimPO's gamma: how much larger, times beta, a chosen answer's mean log-probability is to be.
    simpo_gamma: float = setting(1.0, Run.other, _OF_SIMPO, files=Files.adapters, bounds=at_least(0))
    # This many times the negative log-likelihood of the chosen answer, a mean over its tokens, is added to a pair's
    # loss. With dpo this is RPO (arXiv:2404.19733). null: 1 for cpo and orpo, 0 for the others.
    sft_weight: float | None = setting(None, Run.other, _PAIRED, files=Files.adapters, bounds=at_least(0))
    # Of kto: the weight of answers whose label is true.
    desirable_weight: float = setting(1.0, Run.other, _OF_KTO, files=Files.adapters, bounds=above(0))
    # Of kto: the weight of answers whose label is false.
    undesirable_weight: float = setting(1.0, Run.other, _OF_KTO, files=Files.adapters, bounds=above(0))
    # Compute the reference's log-probabilities once, before training, and keep them beside the tokenized data. false
    # computes them in each step, in a pass without gradient. Both are the same numbers.
    precompute: bool = setting(True, Run.same, _WITH_REFERENCE)

    @property
    def used_beta(self) -> float:
        """`beta`, or what it is for the loss if it is null."""
        return self.loss.default_beta if self.beta is None else self.beta

    @property
    def used_sft_weight(self) -> float:
        """`sft_weight`, or what it is for the loss if it is null."""
        return self.loss.default_sft_weight if self.sft_weight is None else self.sft_weight
