"""`qlora-fsdp evaluate`: a model's loss and perplexity, what its answers are rewarded with, or lm-eval's scores."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if __name__ == "__main__":
    from qlora_fsdp.common.startup import begin

    begin()

from qlora_fsdp.common.errors import Problem, refuse
from qlora_fsdp.common.startup import end_process, quick_imports
from qlora_fsdp.config.data_sets import all_paths
from qlora_fsdp.config.reading.commands import BaseAndAdapterSettings
from qlora_fsdp.config.schema import Config, DataConfig, TaskConfig, TaskName
from qlora_fsdp.config.settings import show
from qlora_fsdp.config.specs import DataSpec, ShardSpec, StepSpec
from qlora_fsdp.runtime.run_command import check_out, log, print_result, run_command, write_out

if TYPE_CHECKING:
    from qlora_fsdp.runtime.processes import Processes

USAGE = """
Loss and perplexity of a model on data of yours, or its scores on lm-eval's tasks, with an adapter or without. Of
task=grpo: what answers to prompts are rewarded with, and how many pass; of task=distill how far they are from what the
teacher would write. Several processes share model and data.

usage: qlora-fsdp evaluate [adapter=DIR] data.path=FILE [...]
       qlora-fsdp evaluate [adapter=DIR] tasks=NAME,NAME,FILE.yaml [...]

  adapter=DIR     the adapter's folder, which also knows its base model. Without one: the base model, model.path=...
  data.path=FILE  rows as for training, all of them; data.* and training.max_length=2048 as there, to be typed again
  out=FILE.json   write the figures there too
  other_base=true use the adapter on a base with other weights than those that it was trained on (default: false)

Answers that the model writes, with an adapter of task=grpo or task=distill, or with one of these typed:
  reward.functions=[...]   as for training, to be typed again; rollout.* too, such as rollout.num_generations_eval=8,
                           and of task=distill distill.*

Tasks of EleutherAI's lm-eval (pip install "qlora-fsdp[lm-eval]"), named as there:
  tasks=NAMES     tasks, groups, tags, or YAML files of your own, with commas between
  num_fewshot=N   examples before each question (default: the task's)
  limit=N         the first N rows of each task (default: all)
  batch_size=N    requests a process at a time, at most (default: as many as are fast)
  max_length=N    tokens of a request at most (default: as many as the model knows positions)
  apply_chat_template=true  ask in turns of a conversation (default: false)

examples:
  qlora-fsdp evaluate adapter=outputs/run/adapter data.path=held_out.jsonl
  qlora-fsdp evaluate model=llama3-70b data.path=held_out.jsonl training.max_length=4096 launch.num_processes=4
  qlora-fsdp evaluate adapter=outputs/run/adapter data.path=questions.jsonl 'reward.functions=[rewards.py:correct]'
  qlora-fsdp evaluate adapter=outputs/run/adapter tasks=arc_easy,hellaswag limit=200 launch.num_processes=2
"""


@dataclass
class EvaluateSettings(BaseAndAdapterSettings):
    """Settings of `evaluate`, as its --help says."""

    out: str | None = None
    tasks: str | None = None
    num_fewshot: int | None = None
    limit: int | None = None
    batch_size: int | None = None
    max_length: int | None = None
    apply_chat_template: bool = False


def evaluate_model(settings: EvaluateSettings, config: Config, processes: Processes) -> None:
    """Load the model, evaluate it, and print one line of JSON."""
    if processes.is_main:
        sources = all_paths(config.data)
        if settings.tasks is not None:
            sources = [name for name in settings.tasks.split(",") if name.endswith((".yaml", ".yml"))]
        refuse([*check_out(settings.out, sources), *_without_tasks(settings), *_with_held_out(config.data)])
    if settings.tasks is not None:
        by = evaluate_on_tasks
    elif config.task.writes_answers:
        by = evaluate_on_prompts
    else:
        by = evaluate_on_data
    figures = {"adapter": settings.adapter, **by(settings, config, processes)}
    if not processes.is_main:
        return
    if settings.out is not None:
        write_out(settings.out, json.dumps(figures, indent=1) + "\n")
    print_result(json.dumps(figures))


def _without_tasks(settings: EvaluateSettings) -> Iterator[Problem]:
    """Refuses settings of lm-eval's tasks where there are none: data has others, under like names."""
    if settings.tasks is not None:
        return
    of_data = {"limit": "data.split=train[:N]", "max_length": "training.max_length=N"}
    for field in fields(EvaluateSettings):
        value = getattr(settings, field.name)
        if field.name not in ("adapter", "out", "other_base") and value != field.default:
            fix = f"For data set {of_data[field.name]}." if field.name in of_data else "Leave it out."
            yield Problem(show(field.name, value), "has no effect without tasks=.", fix)


def _with_held_out(data: DataConfig) -> Iterator[Problem]:
    """Refuses settings that hold rows out: the rows that are not held out would be evaluated, those of training."""
    if data.eval_fraction > 0:
        fix = "Set data.eval_fraction=0, and data.path to a file of the held-out rows."
        reason = "would leave the held-out rows out, and evaluate those that training used."
        yield Problem(show("data.eval_fraction", data.eval_fraction), reason, fix)
    if data.eval_path is not None:
        reason = "is not read: the rows of data.path are evaluated."
        fix = f"Set {show('data.path', data.eval_path)} and data.eval_path=null."
        yield Problem(show("data.eval_path", data.eval_path), reason, fix)


def evaluate_on_data(settings: EvaluateSettings, config: Config, processes: Processes) -> dict[str, Any]:
    """Loss and perplexity on the user's data, or a classifier's figures."""
    with quick_imports():
        from qlora_fsdp.data.run_data import prepare_data
        from qlora_fsdp.data.split import split_batches
        from qlora_fsdp.inference.trained import load_trained
        from qlora_fsdp.model.positions import check_positions
        from qlora_fsdp.model.tasks.classifier import Classifier
        from qlora_fsdp.training.capture.passes import EagerPasses
        from qlora_fsdp.training.evaluate import evaluate
        from qlora_fsdp.training.memory_use import PhasePeaks

    trained = load_trained(config, settings, processes)
    for note in trained.notes:
        log.info(f"Note: {note}")
    spec = replace(DataSpec.of(config), packs_rows=trained.spec.packs_rows)
    data = prepare_data(spec, trained.tokenizer, processes, trained.model.vocab_size, for_training=False)
    for line in str(replace(data.report, purpose="evaluation")).splitlines():
        log.info(f"Data: {line}")
    beyond = check_positions(trained.model, trained.meta.config.get_text_config(), data)
    if beyond is not None:
        log.info(f"Note: {beyond}")
    if isinstance(trained.model, Classifier):
        trained.model.weigh_classes(data.train, processes.device)
    started = time.perf_counter()
    size = config.training.micro_batch_size
    steps = StepSpec.of(
        config.training,
        config.optim,
        processes.num_ranks,
        micro_batch_size=size if isinstance(size, int) else 1,  # auto: one sequence at a time
    )
    split = split_batches(steps, processes.num_ranks, len(data.train))
    passes = EagerPasses(trained.model, processes.device, PhasePeaks(processes.device))
    found = evaluate(trained.model, data.train, split, passes, processes)
    assert found is not None  # only training can be told to stop
    figures: dict[str, Any] = {"data": config.data.path or config.data.mix, "loss": found.loss}
    if config.task.name is TaskName.causal_lm:
        figures["perplexity"] = math.exp(min(found.loss, 700.0))
        figures["num_target_tokens"] = data.report.num_target_tokens
    else:
        figures |= found.metrics | {"num_rows": data.report.num_rows}
    return figures | {"seconds": round(time.perf_counter() - started, 2)}


def evaluate_on_prompts(settings: EvaluateSettings, config: Config, processes: Processes) -> dict[str, Any]:
    """What the model's answers to the user's prompts are rewarded with, and how many of them pass.

    Raises:
        ConfigError: this model can't write answers here.
        AdapterError: the adapter that teaches, or one that rewards, can't be used here.
        RewardError: a function can't be used, or has failed.
    """
    with quick_imports():
        from qlora_fsdp.data.questions import prepare_questions
        from qlora_fsdp.data.sequences import SequenceSettings
        from qlora_fsdp.data.split import BatchSplit
        from qlora_fsdp.inference.trained import fits_whole, load_trained
        from qlora_fsdp.model.tasks.distill_lm import DistillLM
        from qlora_fsdp.training.answers.evaluate import evaluate_answers
        from qlora_fsdp.training.answers.from_teacher import FromTeacher, put_teacher_in
        from qlora_fsdp.training.answers.reward_models import RewardModels
        from qlora_fsdp.training.answers.rewarded import RewardedAnswers
        from qlora_fsdp.training.answers.rollouts import Rollouts
        from qlora_fsdp.training.teacher import assemble_teacher, check_scores, check_teacher_positions, load_teacher

    trained = load_trained(config, settings, processes, generates=True)
    for note in trained.notes:
        log.info(f"Note: {note}")
    spec = DataSpec.of(config)
    data = prepare_questions(spec, trained.tokenizer, processes, trained.model.vocab_size)
    for line in str(replace(data.report, purpose="evaluation")).splitlines():
        log.info(f"Data: {line}")
    started = time.perf_counter()
    trusted = config.model.trust_remote_code
    rollouts = Rollouts(trained.model, config.rollout, trained.tokenizer, config.training.seed, processes, trusted)
    layout = SequenceSettings.of(replace(spec, packs_rows=False), trained.tokenizer)
    split = BatchSplit(1, processes.num_ranks, processes.num_ranks, 1, 1)
    models = None
    if config.reward.models:
        models = RewardModels(config.reward.models, trained, str(config.model.path), layout, split, processes)
    teaching = None
    if isinstance(trained.model, DistillLM):
        put_teacher_in(trained, config.distill, str(config.model.path), processes)
        teacher = assemble_teacher(config, trained, processes)
        if teacher is not None:
            check_teacher_positions(teacher, config.training.max_length)
            shards = ShardSpec.whole()
            if processes.num_ranks > 1 and not fits_whole(teacher, False, processes):
                shards = ShardSpec.of(config.fsdp, processes.num_ranks, processes.local_num_ranks)
            trained.model.teacher = load_teacher(teacher, shards, config.training.seed, processes)
        seed = config.training.seed
        scores = check_scores(spec.task, trained.tokenizer, data, processes)
        teaching = FromTeacher(trained.model, config.distill, layout, split, seed, processes, False, scores)
    rewarded = RewardedAnswers(rollouts, config.reward, 0, processes, models)
    try:
        found = evaluate_answers(rewarded, data.train, teaching)
    finally:
        rewarded.close()
    seconds = round(time.perf_counter() - started, 2)
    return {"data": config.data.path, **found, "num_prompts": len(data.train), "seconds": seconds}


def evaluate_on_tasks(settings: EvaluateSettings, config: Config, processes: Processes) -> dict[str, Any]:
    """The metrics of lm-eval's tasks.

    Raises:
        ConfigError: lm-eval is not installed, a setting makes no sense, or a name is not a task.
        DataError: a task's data can't be loaded.
    """
    names = [name.strip() for name in (settings.tasks or "").split(",") if name.strip()]
    check_tasks(settings, config.task, names)
    from qlora_fsdp.inference.lm_eval import ModelInStep, SharedLM, evaluate_tasks, find_tasks
    from qlora_fsdp.inference.trained import load_trained

    manager = find_tasks(names)
    trained = load_trained(config, settings, processes, generates=True)
    started = time.perf_counter()
    found = evaluate_tasks(
        SharedLM(ModelInStep(trained, processes), settings.batch_size, settings.max_length),
        manager,
        names,
        num_fewshot=settings.num_fewshot,
        limit=settings.limit,
        apply_chat_template=settings.apply_chat_template,
    )
    return {"tasks": found, "seconds": round(time.perf_counter() - started, 2)}


def check_tasks(settings: EvaluateSettings, task: TaskConfig, names: Sequence[str]) -> None:
    """Refuse what lm-eval could not do, before it is imported.

    Raises:
        ConfigError: all problems that were found.
    """
    problems = []
    if find_spec("lm_eval") is None:
        fix = 'pip install "qlora-fsdp[lm-eval]"'
        problems.append(Problem(f"tasks={settings.tasks}", "needs lm-eval, which is not installed.", fix))
    if not task.is_causal:
        reason = "asks for text, which a classifier has none of."
        problems.append(Problem(f"tasks={settings.tasks}", reason, "Set data.path to rows with labels instead."))
    if not names:
        problems.append(Problem("tasks", "names no task.", "Set tasks to what `lm-eval ls tasks` lists."))
    for name in ("limit", "batch_size", "max_length"):
        value = getattr(settings, name)
        if value is not None and value < 1:
            problems.append(Problem(f"{name}={value}", "must be at least 1.", f"Set {name} higher, or leave it out."))
    if settings.num_fewshot is not None and settings.num_fewshot < 0:
        fix = "Set num_fewshot=0 or higher."
        problems.append(Problem(f"num_fewshot={settings.num_fewshot}", "is below 0.", fix))
    refuse(problems)


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code."""
    arguments = sys.argv[1:] if argv is None else argv
    has_own = any(text.startswith("tasks=") for text in arguments)  # lm-eval's tasks bring their data
    optional = ["data.path", "reward.functions"] if has_own else []
    return run_command(arguments, EvaluateSettings, USAGE, evaluate_model, optional)


if __name__ == "__main__":
    end_process(main())
