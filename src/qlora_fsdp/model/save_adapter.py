"""Save the adapter in PEFT's files, so that PEFT loads it without this project.

The trained parameters are gathered on rank 0, which writes the folder under a temporary name and renames it.
"""

from __future__ import annotations

import json
import socket
from copy import copy
from pathlib import Path
from typing import cast

import peft
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from qlora_fsdp import __version__
from qlora_fsdp.common.disk import write_elsewhere
from qlora_fsdp.common.errors import RunFolderError
from qlora_fsdp.common.files import remove_leftovers, replacing
from qlora_fsdp.config.commands import SETTINGS_FILE
from qlora_fsdp.layers import QuantizedLinear
from qlora_fsdp.model.adapters import ADAPTER, base_linears
from qlora_fsdp.model.new_tokens import count_tokens
from qlora_fsdp.records.record_files import check_own, records_in
from qlora_fsdp.records.run_folder import writing
from qlora_fsdp.runtime.processes import Processes
from qlora_fsdp.runtime.rows import gather_rows, local_tensor, shard_group

CARD = """---
base_model: {base}
library_name: peft
tags: [lora, qlora, qlora-fsdp]
---

# LoRA adapter for {base}

Trained with qlora-fsdp {version}: {card}.

```python
{usage}
```
{quantized}"""

USAGE = """\
from peft import PeftModel
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained("{base}"){resize}
model = PeftModel.from_pretrained(model, "path/to/this/folder")"""

CLASSIFIER_USAGE = """\
from peft import PeftModel
from transformers import AutoConfig, {auto_class}

folder = "path/to/this/folder"
config = AutoConfig.from_pretrained(folder)  # has the labels; the head is in the adapter
model = {auto_class}.from_pretrained("{base}", config=config){resize}
model = PeftModel.from_pretrained(model, folder)"""

# bitsandbytes would quantize layers that were trained in full, and PEFT could not put the trained weights there.
QUANTIZED = """
Onto a quantized base, in which these layers must stay in full precision, as they did in training:

```python
import torch
from transformers import BitsAndBytesConfig
{imports}

quantization = BitsAndBytesConfig(
    {options},
    llm_int8_skip_modules={skip},
)
{lines}
```
"""
OPTIONS_4BIT = """\
load_in_4bit=True,
    bnb_4bit_quant_type="{quant_type}",
    bnb_4bit_use_double_quant={double_quant},
    bnb_4bit_compute_dtype={dtype}"""

CLASSIFIERS = {"SEQ_CLS": "AutoModelForSequenceClassification", "TOKEN_CLS": "AutoModelForTokenClassification"}
RESIZE = "\nmodel.resize_token_embeddings({num_tokens})  # as many as the tokenizer in this folder has"


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
    card: str,
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
        card: one line for the model card.
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
    marks = {
        name: torch.empty(param.shape, device="meta") for name, param in model.named_parameters() if param.requires_grad
    }
    names = {id(mark): name for name, mark in marks.items()}
    tensors = peft.get_peft_model_state_dict(model, state_dict=marks, save_embedding_layers=False)
    return {key: names[id(tensor)] for key, tensor in tensors.items()}


def write_adapter(
    model: peft.PeftModel,
    state: dict[str, Tensor],
    keys: dict[str, str],
    folder: Path,
    tokenizer: PreTrainedTokenizerBase | None,
    card: str,
    settings: str,
) -> None:
    """Write the files of an adapter.

    Args:
        model: PEFT's model.
        state: its whole trained parameters, as `gather_trainable` returns them.
        keys: what `adapter_keys` returned earlier, as a step may be running now.
        folder: a folder that does not exist yet.
        tokenizer: saved in the same folder; None for none.
        card: one line for the model card.
        settings: the text of SETTINGS_FILE.
    """
    config = model.peft_config[ADAPTER]
    folder.mkdir(parents=True)
    save_file(
        {key: state[name].contiguous() for key, name in keys.items()},
        folder / "adapter_model.safetensors",
        {"format": "pt"},
    )
    saved = copy(config)  # training may be using `config` meanwhile
    saved.inference_mode = True
    saved.save_pretrained(str(folder))
    if tokenizer is not None:
        tokenizer.save_pretrained(str(folder))
    auto_class, base_model = CLASSIFIERS.get(str(config.task_type)), cast(PreTrainedModel, model.get_base_model())
    if auto_class is not None:
        base_model.config.save_pretrained(folder)  # has the labels' names and the head's size
    base = config.base_model_name_or_path or "the base model"
    num_tokens, num_rows = count_tokens(base_model)
    resize = RESIZE.format(num_tokens=num_tokens) if num_tokens > num_rows else ""
    usage = (CLASSIFIER_USAGE if auto_class else USAGE).format(base=base, resize=resize, auto_class=auto_class)
    quantized = _quantized_usage(model, usage, base)
    readme = CARD.format(base=base, version=__version__, card=card, usage=usage, quantized=quantized)
    (folder / "README.md").write_text(readme)
    (folder / SETTINGS_FILE).write_text(settings, encoding="utf-8")


def _quantized_usage(model: peft.PeftModel, usage: str, base: str) -> str:
    """How to load the adapter onto a quantized base; empty if its usual BitsAndBytesConfig is enough."""
    base_model = cast(PreTrainedModel, model.get_base_model())
    head = base_model.get_output_embeddings()
    heads = {
        name for name, module in base_model.named_modules() if module is head
    }  # which transformers does not quantize
    formats = {name: m.format if isinstance(m, QuantizedLinear) else None for name, m in base_linears(base_model)}
    format = next((format for name, format in formats.items() if format is not None and name not in heads), None)
    plain = {name for name, own in formats.items() if own != format}
    if format is None or plain <= heads:
        return ""
    options = "load_in_8bit=True"
    if format.is_4bit:
        dtype, double_quant = base_model.dtype, format.double_quant
        options = OPTIONS_4BIT.format(quant_type=format.quant_type, double_quant=double_quant, dtype=dtype)
    start_of_base = f'from_pretrained("{base}"'
    usage = usage.replace(start_of_base, f"{start_of_base}, quantization_config=quantization")
    imports, lines = usage.split("\n\n", 1)
    quantized_ends = {name.rpartition(".")[2] for name in formats.keys() - plain}
    ends = {name: name.rpartition(".")[2] for name in plain}
    skip = sorted({name if end in quantized_ends else end for name, end in ends.items()})
    return QUANTIZED.format(imports=imports, options=options, skip=json.dumps(skip), lines=lines)
