"""Save the adapter in PEFT's files, so that PEFT loads it without this project.

The trained parameters are gathered on rank 0, which writes the folder under a temporary name and renames it.
"""

from __future__ import annotations

import socket
import stat
from copy import copy
from pathlib import Path
from typing import cast

import peft
import torch
from peft.utils.transformers_weight_conversion import convert_peft_adapter_state_dict_for_transformers
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from qlora_fsdp.common.errors import RunFolderError
from qlora_fsdp.common.files import remove_leftovers, replacing, write_elsewhere
from qlora_fsdp.common.hub import LOCAL_BASE, loadable_name
from qlora_fsdp.config.adapter.adapter_config import ADAPTER_WEIGHTS, PREFIX, SETTINGS_FILE
from qlora_fsdp.layers.token_rows import ADAPTER
from qlora_fsdp.model.adapters.model_card import CardFacts, describe_usage, is_classifier, make_card
from qlora_fsdp.model.adapters.read_adapter import adapter_parameters
from qlora_fsdp.model.parts import general_name
from qlora_fsdp.records.record_files import check_own, records_in
from qlora_fsdp.records.run_folder import writing
from qlora_fsdp.runtime.processes import Processes
from qlora_fsdp.runtime.rows import gather_rows, local_tensor, shard_group


@torch.no_grad()
def gather_trainable(model: nn.Module, processes: Processes) -> dict[str, Tensor]:
    """The whole trained parameters by name, in float32 on the CPU of rank 0; empty on other ranks. Collective."""
    whole = {}
    for name, param in model.named_parameters():
        if param.requires_grad:
            local = local_tensor(param).to(processes.device)
            values = gather_rows(local, param.shape[0], shard_group(param))
            if processes.is_main:
                whole[name] = values.cpu()
    return whole


def save_adapter(
    model: peft.PeftModel,
    folder: Path,
    tokenizer: PreTrainedTokenizerBase | None,
    card: CardFacts,
    settings: str,
    processes: Processes,
) -> None:
    """Write `folder` (adapter_model.safetensors, adapter_config.json, tokenizer, ...), whole or not at all. Collective.

    Days of training may be in the adapter. If the folder can't be written, the adapter goes to another one, which the
    error names.

    Args:
        model: PEFT's model, sharded.
        folder: an adapter already there is replaced once the new one is complete.
        tokenizer: saved in the same folder; None for none.
        card: what the model card tells of the run.
        settings: the text of SETTINGS_FILE.
        processes: all ranks take part; rank 0 writes.

    Raises:
        RunFolderError: the folder can't be written; what was there before is untouched.
    """
    state = gather_trainable(model, processes)
    if processes.is_main:
        remove_leftovers(folder)
        keys, run_folder = adapter_keys(model), folder.parent

        def write_to(place: Path) -> None:
            write_adapter(model, state, keys, place / folder.name, tokenizer, card, settings)
            records_in(run_folder).write_rest(place)

        try:
            with writing(run_folder):
                check_own(run_folder)
                with replacing(folder) as temporary:
                    write_adapter(model, state, keys, temporary, tokenizer, card, settings)
        except RunFolderError as error:
            place = write_elsewhere(run_folder, sum(value.nbytes for value in state.values()), write_to)
            if place is None:
                raise RunFolderError(f"{error} No other folder takes the adapter either, so it is lost.") from error
            raise RunFolderError(
                f"{error} All steps are done, and the adapter is in {place / folder.name} on {socket.gethostname()}: "
                "copy it from there."
            ) from error
    processes.wait(patiently=True)  # the disk may be slow, and the adapter large


def adapter_keys(model: peft.PeftModel) -> dict[str, str]:
    """The keys of adapter_model.safetensors, each with the name of the trained parameter under that key.

    Not to be called while a step runs: PEFT asks modules for their state, and FSDP then frees what is gathered.
    """
    names = {id(param): name for name, param in model.named_parameters()}
    return {key: names[id(param)] for key, param in adapter_parameters(model).items()}


def describe_lost_keys(model: peft.PeftModel) -> list[str]:
    """A note on layers whose adapters PEFT would not find again in the adapter's file; none for nearly all models.

    When PEFT loads an adapter, it gives its keys the names that transformers' rules give to weights of files in an
    older form. For a few models the rules change keys that need no change.

    Args:
        model: PEFT's model, on meta or not.
    """
    keys = adapter_parameters(model)
    found = convert_peft_adapter_state_dict_for_transformers(model, model.peft_config[ADAPTER], dict(keys), ADAPTER)
    base = cast(PreTrainedModel, model.get_base_model())
    layers = {key.removeprefix(PREFIX).partition(".lora_")[0] for key in keys.keys() - found.keys()}
    if not layers:
        return []
    names = sorted({general_name(base, name) for name in layers})
    return [
        f"PEFT {peft.__version__} changes the names of these layers when it loads an adapter, and loads it without "
        f"them: {', '.join(names)}. qlora-fsdp's commands load all of it, and merge writes a model that any program "
        "loads. lora.exclude_modules leaves them out"
    ]


def write_adapter(
    model: peft.PeftModel,
    state: dict[str, Tensor],
    keys: dict[str, str],
    folder: Path,
    tokenizer: PreTrainedTokenizerBase | None,
    card: CardFacts,
    settings: str,
) -> None:
    """Write the files of an adapter.

    Args:
        model: PEFT's model.
        state: its whole trained parameters, as `gather_trainable` returns them.
        keys: what `adapter_keys` returned earlier, as a step may be running now.
        folder: a folder that does not exist yet.
        tokenizer: saved in the same folder; None for none.
        card: what the model card tells of the run.
        settings: the text of SETTINGS_FILE.
    """
    config = model.peft_config[ADAPTER]
    folder.mkdir(parents=True)
    tensors = {key: state[name].contiguous() for key, name in keys.items()}
    save_file(tensors, folder / ADAPTER_WEIGHTS, {"format": "pt"})
    saved = copy(config)  # training may be using `config` meanwhile
    saved.inference_mode = True
    if saved.base_model_name_or_path is not None:  # AutoPeftModel loads the base by it, from any folder
        saved.base_model_name_or_path = loadable_name(saved.base_model_name_or_path)
    saved.save_pretrained(str(folder))
    if tokenizer is not None:
        tokenizer.save_pretrained(str(folder))
    if is_classifier(model):
        cast(PreTrainedModel, model.get_base_model()).config.save_pretrained(folder)  # labels' names, the head's size
    usage, quantized_usage = describe_usage(
        model, card.base or LOCAL_BASE, card.scales_rope, card.corrected_format is not None
    )
    text = make_card(card, usage, quantized_usage, is_classifier(model))
    (folder / "README.md").write_text(text, encoding="utf-8")
    (folder / SETTINGS_FILE).write_text(settings, encoding="utf-8")
    _share_as_usual(folder)


def _share_as_usual(folder: Path) -> None:
    """Give every file the mode that the umask asks for. safetensors and transformers keep some to their owner alone."""
    mode = (folder / SETTINGS_FILE).stat().st_mode  # an ordinary new file
    for file in folder.iterdir():
        if file.is_file():
            file.chmod(stat.S_IMODE(mode))
