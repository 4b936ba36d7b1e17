"""Python code that loads a saved adapter with stock libraries, for its model card."""

from __future__ import annotations

import json
import math
from typing import cast

import peft
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, PreTrainedModel

from qlora_fsdp.common.text import show_bytes
from qlora_fsdp.layers import QuantizedExpertWeight, QuantizedLinear
from qlora_fsdp.layers.token_rows import ADAPTER
from qlora_fsdp.model.adapters.apply import base_linears
from qlora_fsdp.model.new_tokens import count_tokens
from qlora_fsdp.runtime.hardware import dtype_name

CLASSIFIERS = {"SEQ_CLS": "AutoModelForSequenceClassification", "TOKEN_CLS": "AutoModelForTokenClassification"}

USAGE = """\
from peft import PeftModel
from transformers import {auto_class}, AutoTokenizer

folder = "path/to/this/folder"
tokenizer = AutoTokenizer.from_pretrained(folder)
model = {auto_class}.from_pretrained({base}{rope}){resize}
model = PeftModel.from_pretrained(model, folder)"""

CLASSIFIER_USAGE = """\
from peft import PeftModel
from transformers import AutoConfig, {auto_class}

folder = "path/to/this/folder"
config = AutoConfig.from_pretrained(folder)  # has the labels; the head is in the adapter
model = {auto_class}.from_pretrained({base}, config=config{rope}){resize}
model = PeftModel.from_pretrained(model, folder)"""

# bitsandbytes would quantize layers that were trained in full, and PEFT could not put the trained weights there.
QUANTIZED = """\
import torch
from transformers import BitsAndBytesConfig
{imports}

{note}quantization = BitsAndBytesConfig(
    {options},
    llm_int8_skip_modules={skip},
)
{lines}"""
OPTIONS_4BIT = """\
load_in_4bit=True,
    bnb_4bit_quant_type="{quant_type}",
    bnb_4bit_use_double_quant={double_quant},
    bnb_4bit_compute_dtype={dtype}"""

EXPERTS = """\
# bitsandbytes quantizes linear layers only. Experts are none: they were {trained} in training, and take
# {size} in {dtype} here.
"""

ROPE = ", rope_parameters={rope}, max_position_embeddings={positions}"
RESIZE = "\nmodel.resize_token_embeddings({num_tokens})  # as many as the adapter has rows for"


def is_classifier(model: peft.PeftModel) -> bool:
    """Whether the adapter's model gives labels instead of text."""
    return str(model.peft_config[ADAPTER].task_type) in CLASSIFIERS


def describe_usage(model: peft.PeftModel, base: str, scales_rope: bool = False) -> tuple[str, str]:
    """The code that loads the adapter onto its base, and onto its quantized base.

    Args:
        model: PEFT's model.
        base: the hub name or the folder of the base model, as text that the code quotes.
        scales_rope: whether it was trained with other rotary embeddings than the base's files say.

    Returns:
        Both codes. The second is empty if the base's usual BitsAndBytesConfig is enough.
    """
    base_model = _base(model)
    classifier = CLASSIFIERS.get(str(model.peft_config[ADAPTER].task_type))
    auto_class = classifier or _auto_class(base_model)
    num_tokens, num_rows = count_tokens(base_model)
    resize = RESIZE.format(num_tokens=num_tokens) if num_tokens != num_rows else ""
    usage = (CLASSIFIER_USAGE if classifier else USAGE).format(
        base=json.dumps(base), resize=resize, auto_class=auto_class, rope=_rope(base_model) if scales_rope else ""
    )
    return usage, _quantized_usage(model, usage, json.dumps(base))


def _auto_class(model: PreTrainedModel) -> str:
    """The class of transformers' that gives this model for its files: some are known as models for images alone."""
    by_config = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(model.config), None)
    is_for_images = by_config is None and type(model.config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    return "AutoModelForImageTextToText" if is_for_images else "AutoModelForCausalLM"


def _rope(model: PreTrainedModel) -> str:
    config = model.config.get_text_config()
    return ROPE.format(rope=config.rope_parameters, positions=config.max_position_embeddings)


def _quantized_usage(model: peft.PeftModel, usage: str, base: str) -> str:
    base_model = _base(model)
    head = base_model.get_output_embeddings()  # which transformers does not quantize
    heads = {name for name, module in base_model.named_modules() if module is head}
    formats = {name: m.format if isinstance(m, QuantizedLinear) else None for name, m in base_linears(base_model)}
    format = next((format for name, format in formats.items() if format is not None and name not in heads), None)
    settings = cast(peft.LoraConfig, model.peft_config[ADAPTER])
    parameters = [f".{name}" for name in settings.target_parameters or []]
    # PEFT can't adapt codes of a linear layer that it finds by its parameter.
    by_parameter = {name for name in formats if f".{name}.weight".endswith(tuple(parameters))} if parameters else set()
    plain = {name for name, own in formats.items() if own != format} | by_parameter
    experts = [module for module in base_model.modules() if isinstance(module, QuantizedExpertWeight)]
    if format is None or (plain <= heads and not experts):
        return ""
    note = ""
    if experts:
        size = show_bytes(sum(math.prod(weight.shape) for weight in experts) * base_model.dtype.itemsize)
        note = EXPERTS.format(trained=experts[0].format.quant_type, dtype=dtype_name(base_model.dtype), size=size)
    options = "load_in_8bit=True"
    if format.is_4bit:
        dtype, double_quant = base_model.dtype, format.double_quant
        options = OPTIONS_4BIT.format(quant_type=format.quant_type, double_quant=double_quant, dtype=dtype)
    start_of_base = f"from_pretrained({base}"
    usage = usage.replace(start_of_base, f"{start_of_base}, quantization_config=quantization")
    imports, lines = usage.split("\n\n", 1)
    quantized_ends = {name.rpartition(".")[2] for name in formats.keys() - plain}
    ends = {name: name.rpartition(".")[2] for name in plain}
    skip = sorted({name if end in quantized_ends else end for name, end in ends.items()})
    return QUANTIZED.format(imports=imports, note=note, options=options, skip=json.dumps(skip), lines=lines)


def _base(model: peft.PeftModel) -> PreTrainedModel:
    return cast(PreTrainedModel, model.get_base_model())
