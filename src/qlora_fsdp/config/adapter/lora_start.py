"""`lora.start=FOLDER`: what the settings of a run follow from when it trains on from a saved adapter.

The adapter's own settings stand where the schema's defaults stood. So a run need not repeat them, and whatever is
written differently, on the command line, in a file or an experiment, is a contradiction that can be named. The dropout
alone may be another one, because it is of the training and not of the adapter. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qlora_fsdp.common.errors import AdapterError, Problem
from qlora_fsdp.common.hub import hub_name
from qlora_fsdp.config.adapter.adapter_config import (
    SETTINGS_FILE,
    adapter_problems,
    read_adapter_config,
    read_lora,
    read_untrained,
)
from qlora_fsdp.config.adapter.foreign_settings import (
    BASE_FINGERPRINT,
    CORRECTED_FORMAT,
    read_base_model,
    read_foreign_settings,
)
from qlora_fsdp.config.bounded_yaml import read_yaml
from qlora_fsdp.config.schema import (
    CheckpointConfig,
    CompressedFormat,
    LoraConfig,
    ModelConfig,
    Owner,
    QuantConfig,
    RunConfig,
    TaskConfig,
    Weights,
)
from qlora_fsdp.config.settings import Sections, keys_of, problem_about, problem_with, show

SETTING = "lora.start"
# Where the adapter that lora.start names is to be read: from that name, the run, and which checkpoint it resumes
FindStart = Callable[[str, RunConfig, CheckpointConfig], Path]


@dataclass(frozen=True)
class StartAdapter:
    """The adapter that a run starts from, as far as it is known before torch is imported.

    Attributes:
        folder: where it is read: what `lora.start` names, or the copy that the run made of it.
        lora: its settings.
        base: what its adapter_config.json calls the base model; None if it names none.
        fingerprint: fingerprint of the base's weights, if this project has trained the adapter; None if it is unknown.
        model: the settings of the base, for a run that names no model itself.
        quant: the settings of the base's quantization in training, by name; empty if they are unknown.
        corrected_format: the format whose rounding it corrects; None for an adapter that corrects none.
        labels: the labels of its head, in the order of the outputs, unless there are none or they are unknown.
        rope_scaling: how positions were scaled; None: they were not. It is the adapter's, whatever the base is called.
        system_prompt: what conversations began with in training; None: nothing that the settings say.
        template_arguments: what the chat template was given in training beside the messages.
    """

    folder: Path
    lora: LoraConfig
    base: str | None
    fingerprint: str | None
    model: dict[str, Any]
    quant: dict[str, Any]
    corrected_format: str | None
    labels: Any
    rope_scaling: dict[str, Any] | None
    system_prompt: str | None
    template_arguments: dict[str, Any]

    def own_value(self, key: str) -> Any:
        """The adapter's value of a setting of `lora`."""
        return getattr(self.lora, key.removeprefix("lora."))

    def defaults(self, model: ModelConfig) -> Sections:
        """The values that replace the schema's defaults, given what `model` is without the adapter."""
        lora_keys = (*keys_of(Owner.adapter), "lora.lora_dropout")
        lora = {key.removeprefix("lora."): self.own_value(key) for key in lora_keys}
        has_name = model.name != ModelConfig.name
        is_made_up = model.weights is not Weights.checkpoint
        names_model = has_name or is_made_up or model.path is not None
        base = {} if names_model else dict(self.model)
        if self.rope_scaling is not None:
            base["rope_scaling"] = self.rope_scaling
        return {"lora": lora, "model": base}


def typed_folder(typed: str, _run: RunConfig, _checkpoint: CheckpointConfig) -> Path:
    """The folder that `lora.start` names: a `FindStart` for commands that resume no run."""
    return Path(typed).expanduser()


def start_problems(start: str, folder: Path) -> list[Problem]:
    """Returns why the folder can't be read as an adapter's.

    Args:
        start: what `lora.start` names.
        folder: that, or a run's copy of it.
    """
    is_typed = folder == Path(start).expanduser()
    return adapter_problems(start if is_typed else str(folder), SETTING)


def read_start(folder: Path) -> StartAdapter:
    """Reads what an adapter's folder says of the adapter and its base. Anybody may have written it.

    Raises:
        AdapterError, ConfigError: it is no LoRA adapter, or one that is not supported, or its files can't be used.
    """
    base = read_base_model(folder, SETTING)
    saved = Sections()
    fingerprint = None
    corrected_format = None
    file = folder / SETTINGS_FILE
    if file.is_file():
        saved, _ = read_foreign_settings(file)
        notes = read_yaml(file, allows_aliases=False)
        fingerprint = _text_of(notes.get(BASE_FINGERPRINT))
        corrected_format = _text_of(notes.get(CORRECTED_FORMAT))
    _check_tables_are_trained(folder)
    saved_model = saved.get("model", {})
    model = {name: value for name, value in saved_model.items() if f"model.{name}" in keys_of(Owner.base)}
    if (folder / "tokenizer_config.json").is_file():  # its own tokenizer is nearer than the one that was named
        model.pop("tokenizer_path", None)
    return StartAdapter(
        folder=folder,
        lora=read_lora(folder, SETTING),
        base=base,
        fingerprint=fingerprint,
        model=model or {"path": base},
        quant=saved.get("quant", {}),
        corrected_format=corrected_format,
        labels=saved.get("task", {}).get("labels"),
        rope_scaling=saved_model.get("rope_scaling") or None,
        system_prompt=saved.get("data", {}).get("system_prompt"),
        template_arguments=saved.get("data", {}).get("template_arguments") or {},
    )


def _text_of(note: Any) -> str | None:
    return note if isinstance(note, str) else None


def _check_tables_are_trained(folder: Path) -> None:
    """Refuse tables that the adapter has as a whole and did not train so: a run would train them.

    Raises:
        AdapterError: there are some.
    """
    saved = read_adapter_config(folder, SETTING)
    tables = read_untrained(folder, SETTING)
    tied = saved.get("ensure_weight_tying") and saved.get("modules_to_save")
    if tables and not tied:
        raise AdapterError(
            f"{SETTING}={folder} has whole tables that it did not train ({', '.join(tables)}): those of a base that "
            "was resized for new tokens. A run would train them as a whole. Merge it into its base with `qlora-fsdp "
            f"merge`, and set model.path to the result, without {SETTING}."
        )


def find_contradictions(
    lora: LoraConfig, model: ModelConfig, quant: QuantConfig, task: TaskConfig, start: StartAdapter
) -> Iterator[Problem]:
    """Yields the settings that somebody wrote and that the adapter does not have, and a base that is not its own."""
    named = show(SETTING, lora.start)
    yield from _compare_lora(lora, start)
    yield from order_problems(task, start.labels, named)
    yield from correction_problems(named, start.corrected_format, start.quant, quant)
    name = model.path or model.name
    if lora.other_base:
        return
    if start.fingerprint is None and start.base is not None and not may_be_same(name, start.base):
        reason = f"is not the base of {named}, which was trained on {start.base}."
        fix = f"Set model.path={start.base}, or leave the model out. If both are one model, write the one's name as "
        fix += "base_model_name_or_path into the adapter's adapter_config.json. If you want another base, set "
        fix += "lora.other_base=true."
        yield problem_with(model, "model.path", reason, fix)


def _compare_lora(lora: LoraConfig, start: StartAdapter) -> Iterator[Problem]:
    """Yields settings of the adapter that it does not have.

    `target_modules=all-linear` means what only the model can tell; it is compared when the model is built. And
    `experts=true` means nothing of a model that has none, or of targets without any.
    """
    named = show(SETTING, lora.start)
    for key in keys_of(Owner.adapter):
        value = getattr(lora, key.removeprefix("lora."))
        own = start.own_value(key)
        is_told_later = key == "lora.target_modules" and value == "all-linear"
        has_no_meaning = key == "lora.experts" and value is True
        if _unordered(value) == _unordered(own) or is_told_later or has_no_meaning:
            continue
        reason = f"contradicts {named}, whose adapter has {show(key, own)}."
        if key == "lora.init_lora_weights":
            reason = f"has no effect: the adapter starts from {named}."
        yield problem_about(key, value, reason, f"Leave {key} out, or start without {SETTING}.")


def order_problems(task: TaskConfig, labels: Any, adapter: str) -> Iterator[Problem]:
    """Yields the problem of labels that are an adapter's own in another order: its head would mean others by them.

    Args:
        task: the section `task`.
        labels: the adapter's labels, as its folder has them.
        adapter: what the user calls the adapter.
    """
    own = task.labels
    if own is None or not isinstance(labels, list):
        return
    if own != labels and sorted(own) == sorted(map(str, labels)):
        reason = f"has the labels of {adapter} in another order, and the outputs of its head are in that of"
        reason += f" {show('task.labels', labels)}."
        yield problem_with(task, "task.labels", reason, "Write them in that order.")


def correction_problems(
    adapter: str, corrected_format: str | None, saved: Mapping[str, Any], quant: QuantConfig
) -> Iterator[Problem]:
    """Yields the problem of an adapter that corrects the rounding of another format than the base has.

    With or without double quantization, which moves scales by a fraction of a step, it is the same format.

    Args:
        adapter: what the user calls the adapter.
        corrected_format: the format whose rounding it corrects; None for an adapter that corrects none.
        saved: the settings of its base's quantization, by name.
        quant: how the base is quantized here.
    """
    if corrected_format is None:
        return
    if corrected_format != quant.base_format:
        reason = f"is not how the base of {adapter} was quantized: that adapter corrects the rounding of "
        reason += f"{corrected_format} (lora.init_lora_weights=loftq), and would be wrong on any other base."
        yield Problem(f"quant={quant.base_format or 'none'}", reason, f"Set quant={corrected_format}.", "quant")
        return
    own_size = saved.get("group_size", quant.group_size)
    if corrected_format == CompressedFormat.int4.value and own_size != quant.group_size:
        reason = f"is not that of the base of {adapter}, whose rounding that adapter corrects."
        yield problem_with(quant, "quant.group_size", reason, f"Set quant.group_size={own_size}.")


def settle_targets(lora: LoraConfig, start: StartAdapter) -> None:
    """Takes the adapter's word on experts, where what was written says nothing else."""
    if lora.target_modules != "all-linear":
        lora.experts = start.lora.experts


def _unordered(value: Any) -> Any:
    """A value in which the order of a list's names is of no account."""
    return sorted(set(value)) if isinstance(value, list) else value


def may_be_same(one: str, other: str) -> bool:
    """Whether two names may be one model: folders and hub names are compared by their last part."""
    return one == other or _last_part(one) == _last_part(other)


def _last_part(name: str) -> str:
    try:
        return Path(hub_name(name) or Path(name).expanduser().resolve()).name.lower()
    except (OSError, RuntimeError, ValueError):  # it is no path
        return name
