"""Learning from a teacher that scores each token of an answer: who teaches, and the loss."""

from __future__ import annotations

from dataclasses import dataclass

from qlora_fsdp.config.schema.facets import Files, Hosts, Run, at_least, setting, when
from qlora_fsdp.config.schema.task import TaskName

SCORES_HEADER = "scores.json"  # in a folder that `qlora-fsdp score` has written
_OF_DISTILL = when("task.name", TaskName.distill, fix="task=distill")


@dataclass
class DistillConfig:
    # The teacher: the folder of an adapter on the same base. null: the base without an adapter.
    teacher_adapter: str | None = setting(None, Run.other, _OF_DISTILL, files=Files.users)
    # A teacher of another base: a folder of a model or a hub name, quantized and sharded as the model is, and with the
    # same tokenizer. null: teacher and model share the base.
    teacher_model: str | None = setting(
        None,
        Run.other,
        _OF_DISTILL,
        files=Files.users,
        other_names=("teacher_model_name_or_path",),
        hosts=Hosts.place,
    )
    # In place of a teacher: a folder of what one makes of the answers in the data, written by `qlora-fsdp score`. Of
    # other answers it knows nothing, so lmbda is 0. null: a teacher takes part.
    teacher_scores: str | None = setting(None, Run.other, _OF_DISTILL, files=Files.users, hosts=Hosts.place)
    # The column that has the prompt as the teacher gets it, text or messages as the prompt is: with hints, examples or
    # the solution that the model itself does not see. null: the model's own prompt.
    teacher_prompt: str | None = setting(None, Run.other, _OF_DISTILL, files=Files.users)
    # A system prompt that the teacher alone gets, before prompts that are messages, in place of the row's own.
    teacher_system_prompt: str | None = setting(None, Run.other, _OF_DISTILL, files=Files.users)
    # Part of the steps on answers that the model writes. The others are on the answers in the column `completion`
    # (GKD, arXiv:2306.13649). 0: on these alone.
    lmbda: float = setting(1.0, Run.other, _OF_DISTILL, files=Files.users, bounds=at_least(0))
    # The divergence of each token's distribution, by the same paper: 1 is the reverse KL, the model's from the
    # teacher's; 0 the forward KL; between them the generalized divergence of Jensen and Shannon. Logits of both are
    # divided by rollout.temperature.
    beta: float = setting(1.0, Run.other, _OF_DISTILL, files=Files.users, bounds=at_least(0))

    @property
    def shares_base(self) -> bool:
        """Whether the teacher is a pass of the base that is trained."""
        return self.teacher_model is None and self.teacher_scores is None
