"""Collect the facts of a run for the model card of its adapter: base, data, losses, settings and an example."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from qlora_fsdp.common.hub import hub_name
from qlora_fsdp.config.reading.commands import read_corrected_format
from qlora_fsdp.config.schema import DataFormat, ModelConfig, TaskName
from qlora_fsdp.config.specs import TaskSpec
from qlora_fsdp.data.format import ALPACA
from qlora_fsdp.data.read import training_paths
from qlora_fsdp.data.template_arguments import template_arguments
from qlora_fsdp.layers.experts.grouped_products import QuantizedExpertWeight
from qlora_fsdp.model.adapters.model_card import CardData, CardFacts, code, fence, read_license
from qlora_fsdp.model.adapters.serving import Serving, find_serving, peft_settings
from qlora_fsdp.model.experts import is_apart
from qlora_fsdp.records.run_state import GENERATIONS_FILE, read_metrics
from qlora_fsdp.training.loop import TrainResult
from qlora_fsdp.training.prepare import Prepared

SHOWN = (  # settings, where they are not off, and a start of the adapter that is not the plain one
    "lora.r",
    "lora.lora_alpha",
    "lora.lora_dropout",
    "lora.target_modules",
    "lora.modules_to_save",
    "lora.use_rslora",
    "lora.use_dora",
    "lora.init_lora_weights",
    "training.learning_rate",
    "optim.lr_scheduler_type",
    "training.max_length",
    "training.seed",
)
QUESTION = "What is the capital of France?"


def describe_adapter(
    prepared: Prepared,
    result: TrainResult,
    folder: Path,
    form: DataFormat | None,
    is_final: bool = True,
) -> CardFacts:
    """The facts for the model card as they are now.

    Args:
        prepared: the run.
        result: what it has done so far.
        folder: the run folder.
        form: the form of the rows; None if it is unknown.
        is_final: whether training is over; else the adapter is part of a checkpoint.
    """
    spec = prepared.spec
    recorded = spec.recorded
    lora = spec.modules.lora
    ends = result.ends
    serving = serving_of(prepared)
    return CardFacts(
        base=hub_name(recorded["model.path"]),
        base_name=_base_name(recorded),
        license=read_license(prepared.assembled.files.folder),
        data=_data(prepared),
        start=_start(recorded),
        settings=_settings(prepared),
        num_steps=result.num_steps if is_final else prepared.split.num_steps,  # it may have stopped early
        is_final=is_final,
        scales_rope=bool(recorded["model.rope_scaling"]),
        eval_losses=tuple(result.eval_losses),
        train_losses=None if ends is None else ends.losses,
        num_averaged=result.num_averaged,
        doubt=result.doubt,
        rank=max(lora.r, *lora.rank_pattern.values(), 1),
        needs_export=serving.export,
        needs_merge=serving.merge,
        use_rslora=lora.use_rslora,
        served_format=_served_format(prepared),
        corrected_format=corrected_format(prepared),
        prompt=_describe_prompt(form, prepared.tokenizer),
        example=_example(folder),
        loss=_name_loss(spec.modules.task),
    )


def _served_format(prepared: Prepared) -> str | None:
    """The format of the base, if servers read it and `merge` writes all of the base in it.

    Experts that are one tensor in the files, as gpt-oss's, are written in 16 bits, and none are written in a format
    with a global scale.
    """
    meta = prepared.assembled.meta
    if meta.format is None or meta.format.is_bitsandbytes:
        return None
    for assignment in meta.assignments:
        is_of_experts = isinstance(assignment.module, QuantizedExpertWeight)
        if is_of_experts and (meta.format.has_global_scale or not is_apart(assignment.stored)):
            return None
    return meta.format.quant_type


def corrected_format(prepared: Prepared) -> str | None:
    """The format of the base whose rounding the adapter corrects since its start, or since that of `lora.start`."""
    if prepared.start is not None:
        return read_corrected_format(str(prepared.start.folder))
    modules = prepared.spec.modules
    return modules.quant.base_format if modules.lora.corrects_rounding else None


def serving_of(prepared: Prepared) -> Serving:
    """How a server applies the adapter of a run."""
    corrected = corrected_format(prepared)
    if corrected is not None:
        return Serving(merge=f"it corrects what {corrected} rounds away from its base, so that it belongs to no other")
    model = prepared.model
    return find_serving(model.base, prepared.assembled.meta.assignments, peft_settings(model.model))


def _name_loss(task: TaskSpec) -> str:
    """What a loss of the run is, and what it is a mean over."""
    if task.name is TaskName.preference:
        unit = "pair" if task.has_pairs else "answer"
        return f"{task.preference.loss.value} loss per {unit} of answers"
    if task.name is TaskName.reward:
        return "loss per pair of answers"
    if task.name is TaskName.distill:
        return "divergence from the teacher per token"
    if task.writes_answers:
        return f"{task.grpo.loss_type.value} loss per answer"
    return "loss per label" if task.has_labels else CardFacts.loss


def _base_name(recorded: Mapping[str, Any]) -> str:
    name = recorded["model.name"]
    path = recorded["model.path"]
    if name != ModelConfig.name or path is None:
        return str(name)
    return Path(path).expanduser().resolve().name


def _start(recorded: Mapping[str, Any]) -> str | None:
    """The last parts of the start's path: `sft/adapter`, as every run calls its own `adapter`."""
    path = recorded["lora.start"]
    return None if path is None else "/".join(Path(path).expanduser().resolve().parts[-2:])


def _data(prepared: Prepared) -> tuple[CardData, ...]:
    """Names and rows of the training data. Of a local file the card has the name alone: it may be published."""
    report = prepared.data.report
    data = prepared.spec.data.settings
    if data.format is DataFormat.random:
        return ()
    if not data.mix:
        num_rows = None if data.streaming else report.num_rows
        return (_describe_part(prepared.spec.recorded["data.path"], num_rows),)
    rows_of = {str(part.path): part.num_rows for part in report.mix}
    found = []
    for path, recorded in zip(training_paths(data), prepared.spec.recorded["data.mix"], strict=True):
        num_rows = None if data.streaming else rows_of.get(str(path))
        found.append(_describe_part(recorded, num_rows))
    return tuple(found)


def _describe_part(recorded: str | Sequence[str], num_rows: int | None) -> CardData:
    """A data set by its setting as it was typed: a path, or several."""
    paths = [recorded] if isinstance(recorded, str) else list(recorded)
    names = [path if _is_on_hub(path) else Path(path).expanduser().name for path in paths]
    on_hub = len(paths) == 1 and _is_on_hub(paths[0])
    return CardData(", ".join(names), on_hub, num_rows)


def _is_on_hub(path: str) -> bool:
    return hub_name(path) is not None and not Path(path).expanduser().exists()


def _settings(prepared: Prepared) -> tuple[tuple[str, str], ...]:
    found = [("base weights", prepared.assembled.meta.kind)]
    for key in SHOWN:
        value = prepared.spec.recorded[key]
        is_plain_start = key == "lora.init_lora_weights" and value is True
        if value not in (None, False, []) and not is_plain_start:
            shown = f"{value:g}" if isinstance(value, float) else getattr(value, "value", value)
            found.append((key, ", ".join(map(str, shown)) if isinstance(shown, list) else str(shown)))
    return (*found, ("sequences per step", str(prepared.split.global_batch_size)))


def _describe_prompt(form: DataFormat | None, tokenizer: PreTrainedTokenizerBase) -> str:
    match form:
        case DataFormat.messages:
            by_template = "Conversations are written by the chat template in this folder."
            turns = [{"role": "user", "content": QUESTION}]
            arguments = template_arguments(tokenizer)
            if arguments:
                by_template += f" It is given {code(json.dumps(arguments))}, a server's `chat_template_kwargs`."
            try:
                text = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False, **arguments)
            except Exception:  # a template is a program, and its sandbox lets any error through
                return by_template
            return f"{by_template} A question becomes\n\n{fence(str(text))}"
        case DataFormat.instruction:
            return f"Instructions are written as in Alpaca:\n\n{fence(ALPACA.format(instruction=QUESTION))}"
        case DataFormat.prompt_completion:
            return "Prompts are given as they are, without a chat template."
        case DataFormat.text:
            return "The adapter was trained on plain text, and goes on with the text that it is given."
        case _:
            return ""


def _example(folder: Path) -> tuple[str, str] | None:
    """The first prompt of the last evaluation, and what the model wrote."""
    rows = list(read_metrics(folder, last=True, file=GENERATIONS_FILE))
    first = next((row for row in rows if row["step"] == rows[-1]["step"]), None)
    if first is None:
        return None
    return str(first.get("prompt", "")), str(first.get("completion", ""))
