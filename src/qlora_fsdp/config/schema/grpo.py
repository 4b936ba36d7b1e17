"""Learning from rewards for answers that the model writes itself: how it writes, what rewards it, and the loss."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from typing_extensions import assert_never

from qlora_fsdp.config.schema.facets import Files, Run, When, above, at_least, setting, when
from qlora_fsdp.config.schema.task import TaskName

_OF_GRPO = when("task.name", TaskName.grpo, fix="task=grpo")
_OF_ANSWERS = when("task.name", *(name for name in TaskName if name.writes_answers), fix="task=grpo or task=distill")


@dataclass
class RolloutConfig:
    # Answers to each prompt of a step. With task=grpo they are compared with one another: a group. With task=distill
    # one is enough.
    num_generations: int = setting(
        8, Run.other, _OF_ANSWERS, files=Files.users, bounds=at_least(1), other_names=("group_size",)
    )
    # Answers to each held-out prompt, of which pass@1 and pass@k are estimated. null: num_generations.
    num_generations_eval: int | None = setting(None, Run.same, _OF_ANSWERS, bounds=at_least(1))
    # Most tokens of an answer. A prompt has room for training.max_length less these, and is left out if it is longer.
    max_completion_length: int = setting(256, Run.other, _OF_ANSWERS, files=Files.users, bounds=at_least(1))
    # What logits are divided by before a token is drawn, in training too.
    temperature: float = setting(1.0, Run.other, _OF_ANSWERS, files=Files.users, bounds=above(0))
    # Draw among the likeliest tokens that make up this much probability. 1: among all.
    top_p: float = setting(1.0, Run.other, _OF_ANSWERS, files=Files.users, bounds=above(0))
    # Draw among this many of the likeliest tokens. 0: among all.
    top_k: int = setting(0, Run.other, _OF_ANSWERS, files=Files.users, bounds=at_least(0))
    # Draw among tokens that are at least this many times as likely as the likeliest one (arXiv:2407.01082). 0: among
    # all.
    min_p: float = setting(0.0, Run.other, _OF_ANSWERS, files=Files.users, bounds=at_least(0, below=1))
    # How often prompts whose answers all have one reward are replaced by others before a step, at most (DAPO,
    # arXiv:2503.14476). 0: they stay, and nothing is learned from them.
    dynamic_sampling: int = setting(0, Run.other, _OF_GRPO, files=Files.users, bounds=at_least(0))
    # Texts that a rank writes at the same time, at most. null: as many as are fast and fit.
    max_slots: int | None = setting(None, Run.same, _OF_ANSWERS, bounds=at_least(1))

    @property
    def used_num_generations_eval(self) -> int:
        """`num_generations_eval`, or what it is if it is null."""
        return self.num_generations if self.num_generations_eval is None else self.num_generations_eval


@dataclass
class RewardConfig:
    # What rewards answers: functions as FILE.py:NAME, with TRL's signature, or names of those that are built in
    # (docs/grpo.md). Files are programs, which run with your rights: only what you type here counts.
    functions: list[str] = setting([], Run.other, _OF_ANSWERS, files=Files.none)
    # Reward models: folders of adapters of task=reward on the same base, each named in figures by its run.
    models: list[str] = setting([], Run.other, _OF_ANSWERS, files=Files.users)
    # What the rewards of each function, and then of each model, are multiplied by before they are added. null: 1 each.
    weights: list[float] | None = setting(None, Run.other, _OF_ANSWERS, files=Files.users)
    # An answer to a held-out prompt passes where the first of the functions gives at least this much (pass@k).
    pass_threshold: float = setting(1.0, Run.same, _OF_ANSWERS, bounds=above(0))
    # Seconds that a function has for the answers of a step.
    timeout_seconds: float = setting(60.0, Run.same, _OF_ANSWERS, bounds=above(0))


class PolicyLoss(Enum):
    grpo = "grpo"
    dr_grpo = "dr_grpo"
    dapo = "dapo"
    bnpo = "bnpo"
    cispo = "cispo"
    rloo = "rloo"

    @property
    def clips_below(self) -> bool:
        """Whether ratios of probabilities are clipped from below too, by `epsilon`."""
        match self:
            case PolicyLoss.grpo | PolicyLoss.dr_grpo | PolicyLoss.dapo | PolicyLoss.bnpo | PolicyLoss.rloo:
                return True
            case PolicyLoss.cispo:
                return False
            case unknown:
                assert_never(unknown)

    @property
    def default_epsilon_high(self) -> float | None:
        """`epsilon_high` where it is null; None: that of `epsilon`."""
        match self:
            case PolicyLoss.cispo:
                return 5.0
            case PolicyLoss.grpo | PolicyLoss.dr_grpo | PolicyLoss.dapo | PolicyLoss.bnpo | PolicyLoss.rloo:
                return None
            case unknown:
                assert_never(unknown)


def _losses(*losses: PolicyLoss) -> tuple[When, ...]:
    """The condition of a setting that some losses have a part for."""
    return (*_OF_GRPO, *when("grpo.loss_type", *losses))


_OF_TOKENS = _losses(*(loss for loss in PolicyLoss if loss is not PolicyLoss.rloo))
_CLIPPED_BELOW = _losses(*(loss for loss in PolicyLoss if loss.clips_below))
_CLIPPED_TWICE = _losses(PolicyLoss.grpo, PolicyLoss.dr_grpo, PolicyLoss.dapo, PolicyLoss.bnpo)
_OF_RLOO = _losses(PolicyLoss.rloo)


class SamplingLevel(Enum):
    token = "token"
    sequence = "sequence"


class ScaleRewards(Enum):
    group = "group"
    batch = "batch"
    none = "none"


@dataclass
class GrpoConfig:
    # The loss. dapo (arXiv:2503.14476) is a mean over the tokens of a step. grpo (arXiv:2402.03300) is a mean over the
    # tokens of each answer, then over answers. dr_grpo (arXiv:2503.20783) divides by max_completion_length instead.
    # bnpo is TRL's mean over the tokens of a micro-batch; a step is one here, however it is divided, so that it is
    # dapo's. cispo (arXiv:2506.13585) weighs log-probabilities by clipped ratios. rloo (arXiv:2402.14740) takes each
    # answer as a whole, and compares it with the others of its group.
    loss_type: PolicyLoss = setting(PolicyLoss.dapo, Run.other, _OF_GRPO, files=Files.users)
    # How strongly the model is held to the base, by the divergence of its tokens from the base's: k3 of
    # http://joschu.net/blog/kl-approx.html, or for rloo a part of the reward. 0 needs no pass of the base.
    beta: float = setting(0.0, Run.other, _OF_GRPO, files=Files.users, bounds=at_least(0))
    # Weigh the divergence by the ratio of probabilities, which makes its gradient unbiased (arXiv:2512.02556).
    use_bias_correction_kl: bool = setting(True, Run.other, _OF_TOKENS, files=Files.users)
    # Steps on the answers of each generation.
    num_iterations: int = setting(1, Run.other, _OF_GRPO, files=Files.users, bounds=at_least(1))
    # How far below 1 the ratio of probabilities counts.
    epsilon: float = setting(0.2, Run.other, _CLIPPED_BELOW, files=Files.users, bounds=at_least(0, below=1))
    # How far above 1 it counts; of cispo, how large it may be. null: epsilon; 5 for cispo. DAPO's paper takes 0.28.
    epsilon_high: float | None = setting(None, Run.other, _OF_GRPO, files=Files.users, bounds=at_least(0))
    # The most that it may be where the reward is below the mean (arXiv:2505.07291), above 1 + epsilon_high.
    delta: float | None = setting(None, Run.other, _CLIPPED_TWICE, files=Files.users, bounds=above(1))
    # Whether the ratio is each token's, or the mean of an answer's (GSPO, arXiv:2507.18071).
    importance_sampling_level: SamplingLevel = setting(SamplingLevel.token, Run.other, _OF_TOKENS, files=Files.users)
    # What a reward less its group's mean is divided by: the spread of the group or of the step, or nothing.
    scale_rewards: ScaleRewards = setting(ScaleRewards.group, Run.other, _OF_TOKENS, files=Files.users)
    # Divide rloo's advantages by their spread over the step.
    normalize_advantages: bool = setting(False, Run.other, _OF_RLOO, files=Files.users)
    # Do not learn from answers that have no end within max_completion_length.
    mask_truncated_completions: bool = setting(False, Run.other, _OF_GRPO, files=Files.users)
    # Weigh each token's loss by its probability in training over the one that it was drawn with, which slots round in
    # another way, but by no more than importance_sampling_clip_max: truncated importance sampling.
    importance_sampling_correction: bool = setting(True, Run.other, _OF_TOKENS, files=Files.users)
    # The most that such a weight may be.
    importance_sampling_clip_max: float = setting(3.0, Run.other, _OF_TOKENS, files=Files.users, bounds=at_least(1))

    @property
    def used_epsilon_high(self) -> float:
        """`epsilon_high`, or what it is for the loss if it is null."""
        if self.epsilon_high is not None:
            return self.epsilon_high
        default = self.loss_type.default_epsilon_high
        return self.epsilon if default is None else default

    @property
    def needs_old_log_probs(self) -> bool:
        """Whether the log-probabilities of answers before the first of their steps are needed by themselves."""
        has_part_in_reward = self.loss_type is PolicyLoss.rloo and self.beta > 0
        return self.num_iterations > 1 or has_part_in_reward
