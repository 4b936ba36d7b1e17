"""A run that starts from a saved adapter (`lora.start`): where it is read, whether it fits, and notes about it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from qlora_fsdp.common.errors import AdapterError
from qlora_fsdp.common.files import digest_file
from qlora_fsdp.config.adapter.adapter_config import ADAPTER_WEIGHTS
from qlora_fsdp.config.adapter.lora_start import SETTING, StartAdapter, read_start
from qlora_fsdp.config.schema import Config, TokenizerConfig
from qlora_fsdp.config.settings import show, value_of
from qlora_fsdp.config.specs import DataSpec
from qlora_fsdp.model.adapters.read_adapter import BASE_FIX, SavedAdapter
from qlora_fsdp.model.assemble import AssembledModel, assemble, check_fingerprint
from qlora_fsdp.model.run_tokenizer import check_chat_rows, tokenizer_folder
from qlora_fsdp.model.settle import settle_model
from qlora_fsdp.records.run_folder import writing
from qlora_fsdp.records.run_state import START_FOLDER
from qlora_fsdp.records.start_folder import keep_start
from qlora_fsdp.runtime.processes import Processes

# Settings of the quantized base after which its weights are other numbers.
QUANTIZATION = ("load_in_4bit", "load_in_8bit", "compressed_tensors", "group_size", "bnb_4bit_quant_type")


def open_start(place: Path | None, folder: Path, processes: Processes) -> SavedAdapter:
    """The adapter that the run starts from, of which the run folder gets a copy. Collective.

    A run that resumes reads the copy, and no longer needs the folder that `lora.start` names.

    Args:
        place: where the adapter is read; None on other ranks than 0.
        folder: the run's.
        processes: rank 0 copies, and tells the others.

    Raises:
        RunFolderError: the copy can't be written.
    """
    found = None
    if place is not None:
        with writing(folder):
            keep_start(place, folder)
        found = place, digest_file(folder / START_FOLDER / ADAPTER_WEIGHTS)
    place, digest = processes.share(found, tuple[Path, str])
    return SavedAdapter(place, SETTING, digest)


def assemble_for_training(start: SavedAdapter | None, config: Config, processes: Processes) -> AssembledModel:
    """The model on meta with the adapters that `config.lora` describes. Collective.

    Args:
        start: the adapter that the run starts from; None for a new one. Its tokenizer is used unless the settings name
            one, because it may know more tokens and another chat template than the base's. With tokens of its own it is
            used in any case.
        config: the run's settings, which have taken those of `lora` from the start.
        processes: all ranks take part.

    Raises:
        AdapterError: it does not fit the model, was trained on other weights, or has NaN or infinite values.
    """
    if start is None:
        spec = settle_model(config, config.lora, processes, trains=True)
        assembled = assemble(spec, processes.device)
        return replace(
            assembled, notes=[*assembled.notes, *_chat_notes(assembled, DataSpec.of(config), config.tokenizer)]
        )
    about, tokens = read_start(start.folder), start.read_tokens()
    folder = tokenizer_folder(start, config.model, tokens)
    try:
        spec = settle_model(config, config.lora, processes, trains=True, tokenizer_folder=folder, saved_tokens=tokens)
        assembled = assemble(spec, processes.device)
        chat_notes = _chat_notes(assembled, DataSpec.of(config), config.tokenizer)
    except AdapterError as error:
        raise AdapterError(f"{start} does not fit the model: {error}") from error
    fix = BASE_FIX
    fix += ", and leave lora.target_modules out" if config.lora.target_modules == "all-linear" else ""
    start.check(assembled.model.model, assembled.meta.head, fix + _about_tokens(config.tokenizer))
    if not config.lora.other_base:
        check_fingerprint(
            assembled,
            about.fingerprint,
            processes,
            base=show("model.path", config.model.path or config.model.name),
            adapter=str(start),
            fix=f", which was called {about.base}. Set model.path to these. If you want the adapter to start on "
            "others all the same, set lora.other_base=true.",
        )
    start.check_values(processes)
    return replace(assembled, notes=[*assembled.notes, *chat_notes, *_notes(start, about, config)])


def _chat_notes(assembled: AssembledModel, data: DataSpec, added: TokenizerConfig) -> list[str]:
    """A note if the model has never learned the markers of the chat template that the settings name."""
    saved = assembled.spec.modules.lora.modules_to_save or []
    return check_chat_rows(assembled.files.tensors, assembled.tokenizer, data, added, saved)


def _about_tokens(typed: TokenizerConfig) -> str:
    """The end of an advice, where tokens are typed that the adapter may have already."""
    is_typed = typed.add_tokens or typed.add_special_tokens
    return ", and leave out tokenizer.add_tokens: its own tokens are known" if is_typed else ""


def _notes(start: SavedAdapter, about: StartAdapter, config: Config) -> list[str]:
    """Notes for the user about the start, one sentence each."""
    notes = [f"The adapter starts from {start.folder}."]
    differing = []
    for name in QUANTIZATION:
        if name in about.quant and show("", about.quant[name]) != show("", value_of(config, f"quant.{name}")):
            differing.append(show(f"quant.{name}", about.quant[name]))
    if differing:
        was = ", ".join(differing)
        notes.append(f"It was trained on a base with {was}, which is quantized in another way here.")
    trained_with = {
        "data.system_prompt": about.system_prompt,
        "data.template_arguments": about.template_arguments or None,
        "model.rope_scaling": about.rope_scaling,
    }
    for key, value in trained_with.items():
        if value is not None and value != value_of(config, key):
            notes.append(
                f"It was trained with {show(key, value)}, and this run has {show(key, value_of(config, key))}."
            )
    return notes
