"""`qlora-fsdp score`: what a teacher makes of the answers in the data, for `distill.teacher_scores`; resumable."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if __name__ == "__main__":
    from qlora_fsdp.common.startup import begin

    begin()

from qlora_fsdp.common.errors import Problem, refuse
from qlora_fsdp.common.files import digest_file
from qlora_fsdp.common.startup import end_process, quick_imports
from qlora_fsdp.common.text import plural
from qlora_fsdp.config.adapter.adapter_config import ADAPTER_WEIGHTS
from qlora_fsdp.config.reading.commands import BaseAndAdapterSettings
from qlora_fsdp.config.schema import Config, DistillConfig
from qlora_fsdp.config.settings import problem_with
from qlora_fsdp.config.specs import DataSpec
from qlora_fsdp.runtime.run_command import log, run_command

if TYPE_CHECKING:
    from qlora_fsdp.runtime.processes import Processes

USAGE = """
What a teacher makes of the answers in the data: for each token the likeliest ones with their probabilities, in a
folder. A run of task=distill learns from it by distill.teacher_scores=FOLDER, and needs no teacher then.

usage: qlora-fsdp score [adapter=DIR] model=NAME data.path=FILE out=FOLDER [launch.num_processes=N] [setting=value ...]

  model=NAME       the teacher, or model.path=FOLDER; or adapter=DIR, an adapter, which also knows its base
  data.path=FILE   rows with a prompt and a completion; data.*, training.max_length, rollout.max_completion_length,
                   rollout.temperature and distill.teacher_prompt as in the run to come
  out=FOLDER       a new folder. The rows are in order. Broken off in any way, the same command goes on behind them
  top_k=64         how many of the likeliest tokens; how likely all others are together is kept too

Several processes share the rows, and the model's weights where these don't fit each.

examples:
  qlora-fsdp score model=qwen3-32b data.path=answered.jsonl out=scores
  qlora-fsdp train task=distill model=qwen3-8b data.path=answered.jsonl distill.teacher_scores=scores distill.lmbda=0
"""

ROWS_A_PART = 256  # that are computed before they are written


@dataclass
class ScoreSettings(BaseAndAdapterSettings):
    """Settings of `score`, as its --help says."""

    out: str | None = None
    top_k: int = 64


def score(settings: ScoreSettings, config: Config, processes: Processes) -> None:
    """Load the teacher, and write what it makes of the rows that are not written yet."""
    refuse([*_find_problems(settings), *_not_used(config.distill)])
    assert settings.out is not None
    with quick_imports():
        from qlora_fsdp.data.questions import prepare_questions, question_of
        from qlora_fsdp.data.teacher_scores import ScoreWriter, digest_tokens
        from qlora_fsdp.inference.trained import assemble_trained, load_trained
        from qlora_fsdp.model.assemble import describe_base
        from qlora_fsdp.training.answers.score_answers import AnswerScorer, num_scored_tokens

    trained = assemble_trained(config, settings, processes)
    num_tokens = num_scored_tokens(trained)
    if settings.top_k >= num_tokens:
        reason = f"is not below the number of tokens, {num_tokens:,}."
        refuse([Problem(f"top_k={settings.top_k}", reason, "Set top_k=64, the default.")])
    data = prepare_questions(DataSpec.of(config), trained.tokenizer, processes, trained.model.vocab_size)
    for line in str(replace(data.report, purpose="scoring")).splitlines():
        log.info(f"Data: {line}")
    questions = [question_of(data.train, index) for index in range(len(data.train))]
    identity: dict[str, Any] = {
        "model": config.model.path or config.model.name,
        "base": describe_base(trained.meta.assignments, processes),
        "adapter": None,
        "quant": str(config.quant),
        "tokenizer": digest_tokens(trained.tokenizer),
        "top_k": settings.top_k,
        "temperature": config.rollout.temperature,
    }
    if settings.adapter is not None:
        identity["adapter"] = digest_file(Path(settings.adapter).expanduser() / ADAPTER_WEIGHTS)
    writer = ScoreWriter(Path(settings.out).expanduser(), identity, questions)
    num_done = processes.share(writer.open() if processes.is_main else None, int, patiently=True)
    if num_done:
        log.info(f"Goes on behind row {num_done:,} of {len(questions):,}, which {settings.out} has")
    if num_done < len(questions):
        trained = load_trained(config, settings, processes)
        scorer = AnswerScorer(trained, DataSpec.of(config), settings.top_k, processes)
        for first in range(num_done, len(questions), ROWS_A_PART):
            found = scorer.score(questions[first : first + ROWS_A_PART])
            if processes.is_main:
                writer.add(first, found)
    if processes.is_main:
        log.info(f"Scores of {plural(len(questions), 'answer')} in {settings.out}")


def _find_problems(settings: ScoreSettings) -> Iterator[Problem]:
    """Yields what is wrong with the command's own settings."""
    if settings.out is None:
        yield Problem("out", "is missing.", "Set out to a new folder, such as out=scores.")
    if settings.top_k < 1:
        yield Problem(f"top_k={settings.top_k}", "must be at least 1.", "Set top_k=64, the default.")


def _not_used(distill: DistillConfig) -> Iterator[Problem]:
    """Yields settings of teachers, of which the model of the command is one."""
    for name in ("teacher_adapter", "teacher_model", "teacher_scores"):
        if getattr(distill, name) is not None:
            reason = "has no effect: the model of this command is the teacher."
            yield problem_with(distill, f"distill.{name}", reason, "Leave it out; set model.path or adapter.")
    if distill.lmbda != 0:
        reason = "has no effect: answers in the data are scored."
        yield problem_with(distill, "distill.lmbda", reason, "Leave it out.")


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    for implied in ("task=distill", "distill.lmbda=0"):
        name = implied.partition("=")[0]
        if not any(text.lstrip("+").partition("=")[0] == name for text in arguments):
            arguments.append(implied)
    return run_command(arguments, ScoreSettings, USAGE, score, optional=["reward.functions", "distill.teacher_adapter"])


if __name__ == "__main__":
    end_process(main())
