"""Checks of the settings of answers that the model writes, and of what rewards them. Part of `check_settings`."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from qlora_fsdp.common.errors import Problem
from qlora_fsdp.common.hub import path_exists
from qlora_fsdp.common.text import plural
from qlora_fsdp.config.adapter.adapter_config import ADAPTER_CONFIG, adapter_problems
from qlora_fsdp.config.checks.check_model import check_path
from qlora_fsdp.config.reward_names import BUILT_IN, PACKAGES, model_name, split_function
from qlora_fsdp.config.schema import (
    CheckpointConfig,
    Config,
    DataConfig,
    DataFormat,
    DistillConfig,
    GrpoConfig,
    Kernel,
    LoraConfig,
    LossOn,
    ModelConfig,
    RewardConfig,
    TaskConfig,
    TaskName,
)
from qlora_fsdp.config.schema.distill import SCORES_HEADER
from qlora_fsdp.config.settings import problem_about, problem_with, show


def check_rewards(task: TaskConfig, reward: RewardConfig) -> Iterator[Problem]:
    """Yields why there are no rewards, or which of their functions can't be there."""
    if not task.writes_answers:
        return
    if task.name is TaskName.grpo and not reward.functions and not reward.models:
        fix = f"Set reward.functions=[rewards.py:NAME], or one that is built in: {', '.join(BUILT_IN)}."
        yield problem_with(reward, "reward.functions", "names no function: nothing would reward an answer.", fix)
    for name in reward.functions:
        yield from _check_function(reward, name)
    if len(set(reward.functions)) < len(reward.functions):
        yield problem_with(reward, "reward.functions", "names a function twice.", "Name each once; reward.weights=.")
    elif len({split_function(name)[1] for name in reward.functions}) < len(reward.functions):
        reason = "has two functions of one name, whose figures could not be told apart."
        yield problem_with(reward, "reward.functions", reason, "Give one of them another name.")
    for folder in reward.models:
        yield from adapter_problems(folder, "reward.models")
    names = [split_function(name)[1] for name in reward.functions] + [model_name(folder) for folder in reward.models]
    if reward.models and len(set(names)) < len(names):
        reason = f"has two rewards of one name ({', '.join(names)}), whose figures could not be told apart."
        yield problem_with(reward, "reward.models", reason, "Copy a model to a folder of another name.")
    num_rewards = len(reward.functions) + len(reward.models)
    if reward.weights is not None and len(reward.weights) != num_rewards:
        has = f"has {plural(len(reward.weights), 'number')}, and reward.functions {len(reward.functions)}"
        has += f" and reward.models {len(reward.models)}." if reward.models else "."
        yield problem_with(reward, "reward.weights", has, "Give each one, or leave it out.")


def _check_function(reward: RewardConfig, name: str) -> Iterator[Problem]:
    file, function = split_function(name)
    if file is None:
        if name not in BUILT_IN:
            reason = f"has {name}, which is neither FILE.py:NAME nor built in."
            fix = f"Write the file and the function, such as rewards.py:correct; built in are {', '.join(BUILT_IN)}."
            yield problem_with(reward, "reward.functions", reason, fix)
        elif name in PACKAGES and find_spec(PACKAGES[name][0]) is None:
            package = PACKAGES[name][1]
            reason = f"has {name}, which needs a package that is not installed."
            yield problem_with(reward, "reward.functions", reason, f'pip install "{package}"')
    elif not Path(file).is_file():
        reason = f"has {name}, and the file {file} does not exist, seen from {Path.cwd()}."
        yield problem_with(reward, "reward.functions", reason, "Name a file that is there.")
    elif not function.isidentifier():
        reason = f"has {name}, and {function or 'nothing'} is no name of a function."
        yield problem_with(reward, "reward.functions", reason, "Write FILE.py:NAME.")


def check_rollouts(config: Config) -> Iterator[Problem]:
    """Yields what does not go with answers that the model writes."""
    if not config.task.writes_answers:
        return
    name = show("task.name", config.task.name)
    rollout = config.rollout
    most = config.training.max_length
    if rollout.max_completion_length >= most:
        reason = f"leaves no room for a prompt: training.max_length={most} is for both."
        yield problem_with(rollout, "rollout.max_completion_length", reason, f"Set it below {most}.")
    if rollout.top_p > 1:
        yield problem_with(rollout, "rollout.top_p", "is a probability.", "Set it to 1 or less.")
    yield from _check_data(config.data, name)
    yield from _check_loss(config.grpo, config.checkpoint)
    if config.task.name is TaskName.grpo and rollout.num_generations < 2:
        reason = "must be at least 2: the answers to a prompt are compared with one another."
        yield problem_with(rollout, "rollout.num_generations", reason, "Set rollout.num_generations=8, the default.")
    if config.task.name is TaskName.distill:
        yield from _check_teacher(config.distill, config.lora)
        yield from _check_teacher_model(config.distill, config.model)
        yield from _check_teacher_scores(config.distill)
        if config.memory.head_in_pieces is True:
            reason = "is not there for task=distill: its divergence is computed with the whole head."
            yield problem_with(config.memory, "memory.head_in_pieces", reason, "Leave it out.")
    yield from _check_other_models(config)
    refused = (
        ("kernels.cross_entropy", config.kernels.cross_entropy, Kernel.liger, "sums over all tokens"),
        ("fsdp.cpu_offload", config.fsdp.cpu_offload, True, "has the weights where no text can be written"),
    )
    for key, value, bad, why in refused:
        if value == bad:
            yield problem_about(key, value, f"can't be used with {name}: it {why}.", f"Leave {key} out.")
    if config.training.router_aux_loss_coef > 0:
        reason = f"can't be used with {name}."
        yield problem_with(config.training, "training.router_aux_loss_coef", reason, "Set it to 0.")
    if config.tracking.num_generations > 0:
        reason = f"has no effect with {name}: what is written in each step is in generations.jsonl."
        yield problem_with(config.tracking, "tracking.num_generations", reason, "Leave it out.")


def _check_data(data: DataConfig, name: str) -> Iterator[Problem]:
    """Yields settings of rows that do not go with prompts."""
    if data.format is not DataFormat.auto:
        yield problem_with(data, "data.format", f"has no effect with {name}: rows have a prompt.", "Leave it out.")
    if data.loss_on is not LossOn.completion:
        yield problem_with(data, "data.loss_on", f"has no effect with {name}: answers are trained on.", "Leave it out.")
    if not data.deduplicate:
        yield problem_with(data, "data.deduplicate", f"has no effect with {name}: all prompts stay.", "Leave it out.")
    if data.mix:
        reason = f"can't be used with {name}."
        yield problem_with(data, "data.mix", reason, "Set data.path to one data set, or to a list of files.")
    if "[" in data.split:
        yield problem_with(data, "data.split", f"takes some rows, which {name} can't.", "Set data.max_rows.")
    others = [key for key in data.columns if key != "prompt"]
    if others:
        reason = f"renames {', '.join(others)}, and {name} reads prompts; functions get all other columns as they are."
        yield problem_with(data, "data.columns", reason, "Write {prompt: NAME}.")
    cleaning = {
        "data.near_duplicates": data.near_duplicates,
        "data.decontaminate": data.decontaminate,
        "data.min_tokens": data.min_tokens,
        "data.max_tokens": data.max_tokens,
    }
    for key, value in cleaning.items():
        if value:
            yield problem_about(key, value, f"can't be used with {name}.", "Leave it out.")


def _check_loss(grpo: GrpoConfig, checkpoint: CheckpointConfig) -> Iterator[Problem]:
    """Yields what is wrong with the loss."""
    is_used = grpo.loss_type.clips_below  # elsewhere it is told that it has no effect
    if is_used and grpo.delta is not None and grpo.delta <= 1 + grpo.used_epsilon_high:
        reason = f"is to be above 1 + epsilon_high, {1 + grpo.used_epsilon_high:g}, or it clips what that is to clip."
        yield problem_with(grpo, "grpo.delta", reason, "Set it higher.")
    every = checkpoint.every_steps
    if every is not None and every % grpo.num_iterations:
        reason = f"falls between steps on the same answers, of which grpo.num_iterations={grpo.num_iterations} makes."
        fix = f"Set a multiple of {grpo.num_iterations}."
        yield problem_with(checkpoint, "checkpoint.every_steps", reason, fix)


def _check_teacher(distill: DistillConfig, lora: LoraConfig) -> Iterator[Problem]:
    """Yields why there is no teacher, or what is wrong with the loss."""
    for key in ("lmbda", "beta"):
        if getattr(distill, key) > 1:
            yield problem_with(distill, f"distill.{key}", "is a part.", "Set it to 1 or less.")
    if distill.teacher_adapter is not None:
        yield from adapter_problems(distill.teacher_adapter, "distill.teacher_adapter")
    if distill.teacher_adapter is not None and lora.use_dora:
        reason = "can't be switched off, and the teacher would compute with it."
        yield problem_with(lora, "lora.use_dora", reason, "Set it to false, or leave distill.teacher_adapter out.")
    has_prompt = distill.teacher_prompt is not None or distill.teacher_system_prompt is not None
    if distill.teacher_adapter is None and distill.shares_base and not has_prompt and lora.start is None:
        reason = "is the base with the model's own prompts, which is what the model is already: nothing can be learned."
        fix = (
            "Set it to an adapter of the same base, distill.teacher_model to another model with the same tokenizer, or "
            "distill.teacher_prompt to a column with other prompts."
        )
        yield problem_with(distill, "distill.teacher_adapter", reason, fix)


def _check_teacher_model(distill: DistillConfig, model: ModelConfig) -> Iterator[Problem]:
    """Yields what is wrong with a teacher that is a model of its own."""
    path = distill.teacher_model
    if path is None:
        return
    key = "distill.teacher_model"
    fix = f"Set {key} to a folder with config.json and safetensors files."
    yield from check_path(key, path, fix)
    folder = Path(path).expanduser()
    if (folder / ADAPTER_CONFIG).is_file():
        reason = "is an adapter, and not a model."
        fix = "Set distill.teacher_adapter to it where it is of the same base; else merge it (qlora-fsdp merge)."
        yield problem_about(key, path, reason, fix)
    elif path_exists(path) and not (folder / "config.json").is_file():
        yield problem_about(key, path, "has no config.json.", fix)
    if distill.teacher_adapter is not None:
        reason = f"can't be used with {show(key, path)}: it would be of that model, which teaches as it is."
        fix = "Merge the two (qlora-fsdp merge), and name the merged model alone."
        yield problem_with(distill, "distill.teacher_adapter", reason, fix)
    if path == model.path:
        reason = "is the model that is trained, which would be twice in memory."
        fix = "Leave it out: the base without the adapter teaches by distill.teacher_prompt, or with lora.start."
        yield problem_about(key, path, reason, fix)


def _check_teacher_scores(distill: DistillConfig) -> Iterator[Problem]:
    """Yields what is wrong with what a teacher makes of the answers in the data."""
    path = distill.teacher_scores
    if path is None:
        return
    key = "distill.teacher_scores"
    write = "Write it by qlora-fsdp score, with the teacher as model.path and this run's settings of data."
    if not (Path(path).expanduser() / SCORES_HEADER).is_file():
        yield problem_about(key, path, f"has no {SCORES_HEADER}.", write)
    if distill.lmbda > 0:
        reason = f"knows of the answers in the data alone, and {show('distill.lmbda', distill.lmbda)} asks for others."
        yield problem_about(key, path, reason, "Set distill.lmbda=0, or name a teacher in its place.")
    for name in ("teacher_adapter", "teacher_model"):
        if getattr(distill, name) is not None:
            reason = f"can't be used with {show(key, path)}, which is in its place."
            yield problem_with(distill, f"distill.{name}", reason, "Leave one of them out.")


def _check_other_models(config: Config) -> Iterator[Problem]:
    """Yields what the run trains beside the matrices, which a model of the same base would compute with, too."""
    grpo = config.grpo
    lora = config.lora
    of_tokens: dict[str, Any] = {
        "tokenizer.add_tokens": config.tokenizer.add_tokens,
        "tokenizer.add_special_tokens": config.tokenizer.add_special_tokens,
    }
    trained = {**of_tokens, "lora.modules_to_save": lora.modules_to_save}
    if grpo.beta > 0 and lora.start is None:
        for key, value in trained.items():
            if value:
                reason = f"is trained beside the adapter, and with grpo.beta={grpo.beta:g} the reference would have it."
                yield problem_about(key, value, reason, "Set grpo.beta=0, or leave it out.")
    if config.reward.models:
        for key, value in {**trained, "lora.use_dora": lora.use_dora}.items():
            if value:
                reason = "is trained beside the matrices, and reward.models would compute with it."
                yield problem_about(key, value, reason, f"Leave {key} out, or use reward.functions.")
    if config.task.name is not TaskName.distill:
        return
    for key, value in (trained if config.distill.shares_base else of_tokens).items():
        if value:
            reason = "is trained beside the matrices, and the teacher would compute with it."
            if not config.distill.shares_base:
                reason = "makes tokens that the teacher does not know."
            yield problem_about(key, value, reason, f"Leave {key} out.")
