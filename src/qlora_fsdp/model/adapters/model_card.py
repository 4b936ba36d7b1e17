"""The model card of an adapter, README.md: what it was trained on and how, how well, and how to use it.

Names, prompts and what the model wrote come from others' files. So the front matter is dumped by yaml, texts stand in
fences longer than any in them, and control characters are left out.

Python code that loads a saved adapter with stock libraries, for its model card.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import peft
import yaml
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    PretrainedConfig,
    PreTrainedModel,
)

from qlora_fsdp import __version__
from qlora_fsdp.common.hub import LOCAL_BASE
from qlora_fsdp.common.text import plural, printable, printable_lines, show_bytes
from qlora_fsdp.layers.experts.grouped_products import QuantizedExpertWeight
from qlora_fsdp.layers.quantized.linear import QuantizedLinear
from qlora_fsdp.layers.token_rows import ADAPTER
from qlora_fsdp.model.adapters.apply import base_linears
from qlora_fsdp.model.new_tokens import count_tokens
from qlora_fsdp.runtime.hardware import dtype_name

MAX_EXAMPLE = 1500  # characters of a prompt, or of what the model wrote
MAX_LICENSE_BYTES = 2**16  # of a card in which a license is looked for
VLLM_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # the values that vLLM's --max-lora-rank has
SERVER_COMMANDS = """\
vllm serve {folder}
python -m sglang.launch_server --model-path {folder}{options}"""
GGUF_COMMANDS = """\
llama-server --model {folder}/{file}
cd {folder} && ollama create NAME --file Modelfile && ollama run NAME"""
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
LEFT_OUT = """\
# Linear layers that were not quantized in training, such as routers, are not quantized here either: {names}.
"""
ROPE = ", rope_parameters={rope}, max_position_embeddings={positions}"
RESIZE = "\nmodel.resize_token_embeddings({num_tokens})  # as many as the adapter has rows for"


@dataclass(frozen=True)
class CardData:
    """A data set that was trained on.

    Attributes:
        name: its hub name, or the name of a local file or folder without the path to it.
        on_hub: whether it is a hub name.
        num_rows: rows that were trained on; None for a stream.
    """

    name: str
    on_hub: bool
    num_rows: int | None


@dataclass(frozen=True)
class CardFacts:
    """The facts about a run that its model card tells.

    Attributes:
        base: the base model's hub name; None for a local folder or random weights.
        base_name: what the base is called otherwise: its preset's name, or the name of its folder.
        license: the base model's license, by its name on the hub; None if unknown.
        data: what was trained on; empty for random tokens.
        start: the folder of the adapter that was trained on, without the path to it; None for a new adapter.
        settings: what was set, by the setting's name or in words, in the order of the table.
        num_steps: optimizer steps of the whole run.
        is_final: whether all of them are done; else the adapter is part of a checkpoint.
        scales_rope: whether its rotary embeddings are not those of the base's files.
        eval_losses: losses of the held-out rows by the number of steps done; empty if there are none.
        train_losses: mean losses of the first and of the last training steps; None if there are none.
        num_averaged: steps that each of these is the mean of.
        doubt: what the run's figures say against the adapter; None if nothing.
        rank: the largest of the adapter.
        needs_export: why vLLM serves it only as `merge write=adapter` writes it; None if that is not so.
        needs_merge: why vLLM can't serve it beside its base in any form; None if it can.
        use_rslora: whether its scaling is rsLoRA's, which SGLang does not know.
        served_format: the format of the base in training, if servers read it (`merge quantize=...`); None for others.
        corrected_format: the format of the base whose rounding the adapter corrects; None for one that corrects none.
        prompt: how a prompt is written for the adapter.
        example: a prompt and what the model wrote; None if it wrote nothing during training.
        loss: what the losses are means of.
    """

    base: str | None
    base_name: str = "a local model"
    license: str | None = None
    data: tuple[CardData, ...] = ()
    start: str | None = None
    settings: tuple[tuple[str, str], ...] = ()
    num_steps: int = 0
    is_final: bool = True
    scales_rope: bool = False
    eval_losses: tuple[tuple[int, float], ...] = ()
    train_losses: tuple[float, float] | None = None
    num_averaged: int = 10
    doubt: str | None = None
    rank: int = 8
    needs_export: str | None = None
    needs_merge: str | None = None
    use_rslora: bool = False
    served_format: str | None = None
    corrected_format: str | None = None
    prompt: str = ""
    example: tuple[str, str] | None = None
    loss: str = "loss per token, in nats"


def make_card(facts: CardFacts, usage: str, quantized_usage: str = "", is_classifier: bool = False) -> str:
    """Returns the text of README.md.

    Args:
        facts: about the run.
        usage: Python code that loads the adapter onto its base.
        quantized_usage: the same onto the quantized base, where that needs more than the usual or is the only base that
            the adapter belongs to; or empty.
        is_classifier: whether the model gives labels instead of text, and so is not served.
    """
    base = f"[{facts.base}](https://huggingface.co/{facts.base})" if facts.base else code(facts.base_name)
    parts = [
        f"# LoRA adapter for {facts.base or code(facts.base_name)}",
        f"A LoRA adapter for {base}, trained with qlora-fsdp {__version__}: {_steps(facts)}{_start(facts)}.",
        "## Data",
        _data(facts),
        "## Loss",
        _losses(facts),
        "## Settings",
        _table(("Setting", "Value"), facts.settings),
        "## Use",
    ]
    if facts.corrected_format is not None:
        parts.append(
            f"The adapter began as what {facts.corrected_format} rounds away from the base's weights. So it belongs to "
            "a base that is quantized so, and on the base's own weights it would be wrong."
        )
        if quantized_usage:
            parts.append(fence(quantized_usage, "python"))
    else:
        parts.append(fence(usage, "python"))
        if quantized_usage:
            parts += [
                "Onto a quantized base, in which these layers must stay in full precision:",
                fence(quantized_usage, "python"),
            ]
    if not is_classifier:
        parts += _serving(facts)
        if facts.prompt:
            parts += ["## Prompts", facts.prompt]
        if facts.example is not None:
            prompt, written = (_cut(text) for text in facts.example)
            parts += ["## Example", "A held-out prompt:", fence(prompt), "What the model wrote:", fence(written)]
    return f"---\n{_front_matter(facts, is_classifier)}---\n\n" + "\n\n".join(parts) + "\n"


def fence(text: str, language: str = "") -> str:
    """Returns text as a block of code that nothing in the text can end."""
    marks = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{marks}{language}\n{printable_lines(text)}\n{marks}"


def read_license(folder: Path | None) -> str | None:
    """Reads the license that a model's own card names, by its name on the hub; None if it names none."""
    if folder is None:
        return None
    try:
        with (folder / "README.md").open("rb") as stream:
            text = stream.read(MAX_LICENSE_BYTES).decode("utf-8", "replace")
    except OSError:
        return None
    found = re.match(r"---\n(?:[^\n]*\n)*?license:[ \t]*([a-z0-9.+-]{1,40})[ \t]*\n", text)
    return found[1] if found else None


def _front_matter(facts: CardFacts, is_classifier: bool) -> str:
    names = [printable(data.name) for data in facts.data if data.on_hub]
    values: dict[str, Any] = {
        "base_model": facts.base and printable(facts.base),
        "license": facts.license and printable(facts.license),
        "library_name": "peft",
        "pipeline_tag": None if is_classifier else "text-generation",
        "datasets": names or None,
        "tags": ["lora", "qlora", "qlora-fsdp"],
    }
    text: str = yaml.safe_dump({key: value for key, value in values.items() if value is not None}, sort_keys=False)
    return text


def _steps(facts: CardFacts) -> str:
    steps = plural(facts.num_steps, "step")
    return steps if facts.is_final else f"a checkpoint of a run of {steps}"


def _start(facts: CardFacts) -> str:
    return "" if facts.start is None else f" on from the adapter {code(facts.start)}"


def _data(facts: CardFacts) -> str:
    if not facts.data:
        return "Random tokens: the adapter is of a test of speed or memory."
    rows = []
    for data in facts.data:
        name = f"[{data.name}](https://huggingface.co/datasets/{data.name})" if data.on_hub else code(data.name)
        rows.append((name, "streamed" if data.num_rows is None else f"{data.num_rows:,}"))
    return _table(("Data", "Rows"), rows, is_code=False)


def _losses(facts: CardFacts) -> str:
    rows = []
    if facts.eval_losses:
        (first, before), (last, after) = facts.eval_losses[0], facts.eval_losses[-1]
        if last > first:
            of_what = "before training" if first == 0 else f"after {plural(first, 'step')}"
            rows.append(("held-out rows", f"{before:.4f} {of_what}", f"{after:.4f} after {plural(last, 'step')}"))
        else:
            rows.append(("held-out rows", "", f"{after:.4f} after {plural(last, 'step')}"))
    if facts.train_losses is not None:
        start, end = facts.train_losses
        steps = "step" if facts.num_averaged == 1 else f"{facts.num_averaged} steps"
        rows.append(("training rows", f"{start:.4f} in the first {steps}", f"{end:.4f} in the last {steps}"))
    if not rows:
        return "No loss was recorded."
    note = f"Mean {facts.loss}." + ("" if facts.eval_losses else " No held-out rows were evaluated.")
    if facts.doubt is not None:
        note += f" **{facts.doubt}**"
    return f"{_table(('Loss on', 'Before', 'After'), rows, is_code=False)}\n\n{note}"


def _serving(facts: CardFacts) -> list[str]:
    """Commands of servers: beside the base where they take the adapter so, and merged into one GGUF file."""
    merge = "qlora-fsdp merge adapter=path/to/this/folder"
    if facts.corrected_format is not None:
        merge += " base=dequantized"
    converting = f"{merge} out=merged gguf=q8_0 llama_cpp=llama.cpp"
    using = GGUF_COMMANDS.format(folder="merged", file="model-Q8_0.gguf")
    of_format = []
    if facts.served_format is not None:
        kept = f"{merge} out=merged-{facts.served_format} quantize={facts.served_format}"
        serve = f"vllm serve merged-{facts.served_format}"
        of_format = [
            f"Merged into its base, in {facts.served_format}, the format of the base in training:",
            fence(f"{kept}\n{serve}", "sh"),
        ]
    for_gguf = [
        "With llama.cpp or Ollama, merged into its base (llama.cpp/ is a clone of its repository, for its converter):",
        fence(f"{converting}\n{using}", "sh"),
    ]
    if facts.needs_merge is not None:
        why = f"vLLM does not serve this adapter beside its base, because {facts.needs_merge}. Make one model of both:"
        return [
            why,
            fence(f"{merge} out=merged\n{SERVER_COMMANDS.format(folder='merged', options='')}", "sh"),
            *of_format,
            *for_gguf,
        ]
    rank = next((rank for rank in VLLM_RANKS if rank >= facts.rank), facts.rank)
    base = facts.base or LOCAL_BASE
    vllm = f"vllm serve {base} --enable-lora --max-lora-rank {rank} \\\n  --lora-modules adapter="
    sglang = f"python -m sglang.launch_server --model-path {base} --enable-lora \\\n  --lora-paths adapter="
    export = f"{merge} out=for-servers write=adapter\n"
    folder = "path/to/this/folder"
    if facts.needs_export is not None:
        why = (
            f"This folder is for PEFT. vLLM wants its layers in another form, because {facts.needs_export}; "
            "qlora-fsdp merge write=adapter writes them for vLLM, in which the adapter is then a model of the name "
            "`adapter`:"
        )
        commands = [why, fence(f"{export}{vllm}for-servers", "sh")]
    else:
        why = "With vLLM, in which the adapter is then a model of the name `adapter`:"
        commands = [why, fence(f"{vllm}{folder}", "sh")]
    if facts.use_rslora and facts.needs_export is None:
        why = (
            f"With SGLang, in which it is the model `{base}:adapter`. SGLang does not know rsLoRA, by which this "
            "adapter is scaled, and would apply a part of it; so the scaling is written into its weights first:"
        )
        commands += [why, fence(f"{export}{sglang}for-servers", "sh")]
    else:
        used = folder if facts.needs_export is None else "for-servers"
        commands += [f"With SGLang, in which it is the model `{base}:adapter`:", fence(f"{sglang}{used}", "sh")]
    return [*commands, *of_format, *for_gguf]


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], is_code: bool = True) -> str:
    lines = [head, ["---"] * len(head)]
    lines += [[row[0], *map(code, row[1:])] if is_code else row for row in rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def code(text: str) -> str:
    """Returns a text of one line as code in a table's cell."""
    plain = printable(text).replace("`", "'").replace("|", "\\|")
    return f"`{plain}`" if plain.strip() else ""


def _cut(text: str) -> str:
    return text if len(text) <= MAX_EXAMPLE else f"{text[:MAX_EXAMPLE]} ..."


def is_classifier(model: peft.PeftModel) -> bool:
    """Whether the adapter's model gives labels instead of text."""
    return str(model.peft_config[ADAPTER].task_type) in CLASSIFIERS


def describe_usage(
    model: peft.PeftModel, base: str, scales_rope: bool = False, needs_quantized: bool = False
) -> tuple[str, str]:
    """The code that loads the adapter onto its base, and onto its quantized base.

    Args:
        model: PEFT's model.
        base: the hub name or the folder of the base model, as text that the code quotes.
        scales_rope: whether it was trained with other rotary embeddings than the base's files say.
        needs_quantized: whether the second code is wanted although the usual BitsAndBytesConfig is enough.

    Returns:
        Both codes. The second is empty if the base's usual BitsAndBytesConfig is enough, and where transformers knows
        no other way to quantize the base so.
    """
    base_model = _base(model)
    classifier = CLASSIFIERS.get(str(model.peft_config[ADAPTER].task_type))
    auto_class = classifier or auto_class_of(base_model.config)
    num_tokens, num_rows = count_tokens(base_model)
    resize = RESIZE.format(num_tokens=num_tokens) if num_tokens != num_rows else ""
    usage = (CLASSIFIER_USAGE if classifier else USAGE).format(
        base=json.dumps(base), resize=resize, auto_class=auto_class, rope=_rope(base_model) if scales_rope else ""
    )
    return usage, _quantized_usage(model, usage, json.dumps(base), needs_quantized)


def auto_class_of(config: PretrainedConfig) -> str:
    """The class of transformers' that loads a model that writes text: some are known as models for images alone."""
    by_config = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    is_for_images = by_config is None and type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    return "AutoModelForImageTextToText" if is_for_images else "AutoModelForCausalLM"


def _rope(model: PreTrainedModel) -> str:
    config = model.config.get_text_config()
    return ROPE.format(rope=config.rope_parameters, positions=config.max_position_embeddings)


def _quantized_usage(model: peft.PeftModel, usage: str, base: str, is_wanted: bool = False) -> str:
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
    is_usual = plain <= heads and not experts
    if format is None or (is_usual and not is_wanted):
        return ""
    if not format.is_bitsandbytes:  # transformers quantizes to no other format while it loads
        return ""
    note = ""
    if experts:
        size = show_bytes(sum(math.prod(weight.shape) for weight in experts) * base_model.dtype.itemsize)
        note = EXPERTS.format(trained=experts[0].format.quant_type, dtype=dtype_name(base_model.dtype), size=size)
    left_out = {name.rpartition(".")[2] for name in plain - heads - by_parameter}
    if left_out:
        note += LEFT_OUT.format(names=", ".join(sorted(left_out)))
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
