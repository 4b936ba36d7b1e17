"""A causal language model that learns from a teacher, which scores each token of its answers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Literal, cast

import peft
import torch
from torch import Tensor

from qlora_fsdp.common.errors import ConfigError, Problem
from qlora_fsdp.config.schema import DistillConfig, RolloutConfig
from qlora_fsdp.data.batch import Batch
from qlora_fsdp.layers.divergence import FrozenHead, WholeTeacher, divergences
from qlora_fsdp.layers.head_loss import HeadLoss, LogitTransform
from qlora_fsdp.model.adapters.other_adapter import OtherAdapter
from qlora_fsdp.model.tasks.answering_lm import AnsweringLM
from qlora_fsdp.model.tasks.mismatch import MISMATCH, count_bins
from qlora_fsdp.runtime.fsdp_state import free_gathered

SAME = 1e-6  # nats a token; rounding makes less
FIGURES = ("entropy", "teacher_log_prob", f"{MISMATCH}/mean")


@dataclass(frozen=True)
class OtherModel:
    """A model of its own that teaches: loaded, maybe in shards, without an adapter.

    It is no module, so that the model which it teaches has it beside itself and not in itself: not among the parameters
    that are trained, sharded and saved.

    Attributes:
        model: the teacher.
    """

    model: DistillLM


class DistillLM(AnsweringLM):
    """A PEFT-wrapped causal language model with the divergence of its answers' tokens from a teacher.

    A teacher that shares the base and its head is a further pass without gradient, which gives what the head gets; one
    that is a model of its own gives what its own head gets. The head, or the two, then compute both distributions, some
    tokens at a time.

    Args:
        model: the wrapped model, on meta or not.
        settings: the teacher and the loss.
        rollout: how answers are written.
        transform: see `CausalLM`.

    Attributes:
        teacher: the teacher's adapter, or the teacher; None: the base without an adapter.

    Raises:
        ConfigError: the temperature can't be used with the model, or its head is trained or makes logits in a way of
            its own.
    """

    def __init__(
        self,
        model: peft.PeftModel,
        settings: DistillConfig,
        rollout: RolloutConfig,
        transform: LogitTransform | None,
    ) -> None:
        super().__init__(model, rollout, "torch", transform, FIGURES)
        self.settings = settings
        self.teacher = cast(OtherAdapter | OtherModel | None, None)
        if self.head not in self.gathered_by_model:
            how = "makes its logits in a way of its own" if transform is None else "has a head that is trained"
            fix = "Leave lm_head out of lora.target_modules and lora.modules_to_save, or train another model."
            problem = Problem("task.name=distill", f"can't be used: the model {how}, which a teacher has not.", fix)
            raise ConfigError([problem])

    def forward(self, batch: Batch, wants: Literal["loss", "hidden"] = "loss") -> Tensor:
        """Sum of the divergences of the batch's answers, each token counting 1: float32 scalar.

        Args:
            batch: answers after their prompts, and for the loss what a teacher makes of them (`taught.hidden`).
            wants: the loss; or what the head would get of the tokens at `label_positions`, [num_labels, D]. FSDP
                gathers only in calls of the whole model, so all go through `forward`.
        """
        hidden = self.head_inputs(batch)
        return hidden if wants == "hidden" else self._loss(batch, hidden)

    def _loss(self, batch: Batch, hidden: Tensor) -> Tensor:
        taught = batch.taught
        assert taught is not None
        targets = batch.targets.flatten()[taught.positions]
        head = self.frozen_head(hidden.device)
        if taught.top is not None:
            found = divergences(hidden, head, taught.top, targets, self.settings.beta)
        else:
            assert taught.hidden is not None
            teachers_head = head
            if isinstance(self.teacher, OtherModel):
                teachers_head = self.teacher.model.frozen_head(hidden.device)
            found = divergences(hidden, head, WholeTeacher(taught.hidden, teachers_head), targets, self.settings.beta)
        apart, entropies, own, teachers = found.unbind()
        ones = torch.ones_like(own)
        is_drawn = taught.sampled.isfinite().float()
        mismatch = (own - taught.sampled.nan_to_num()).abs() * is_drawn
        measured = ((entropies, ones), (teachers, ones), (mismatch, is_drawn))
        sums = torch.stack([torch.stack([value.double().sum(), count.double().sum()]) for value, count in measured])
        self.add_sums(torch.cat([sums, count_bins(mismatch, is_drawn)]).detach())
        return apart.sum()

    def frozen_head(self, device: torch.device) -> FrozenHead:
        """The head, whole. Collective where it is in shards."""
        return cast(HeadLoss, self.base.get_output_embeddings().forward).as_frozen(device)

    def with_reference(self, batch: Batch) -> Batch:
        """The batch with what the head gets of the teacher for each token of its answers."""
        assert batch.taught is not None
        if batch.taught.top is not None:
            return batch
        asked = batch if batch.taught.asked is None else batch.taught.asked
        if isinstance(self.teacher, OtherModel):
            other = self.teacher.model
            with torch.no_grad():
                hidden = other(asked, "hidden")
            free_gathered(other)
            return replace(batch, taught=replace(batch.taught, hidden=hidden))
        with self._as_teacher(self.teacher):
            hidden = self(asked, "hidden")
        return replace(batch, taught=replace(batch.taught, hidden=hidden))

    def judge_step(self, step: int, loss: float) -> str | None:
        """As in `TaskModel`: a teacher that predicts what the model predicts has nothing to teach."""
        self.has_learned = self.has_learned or (self.learns and step > 0)
        was_told = not self.learns
        self.learns = abs(loss) > SAME
        if self.learns or was_told:
            return None
        return (
            "the teacher predicts for every token what the model predicts, so that the gradient is zero and nothing is "
            "learned. Give it other prompts (distill.teacher_prompt, or look at that column), "
            "another adapter than lora.start, or another model."
        )

    @contextmanager
    def _as_teacher(self, adapter: OtherAdapter | None) -> Iterator[None]:
        """A context in which the model is the teacher, with its adapter or none, without dropout and gradient."""
        if adapter is None:
            with self.as_reference():
                yield
            return
        with self.without_dropout(), adapter.in_place():
            yield
