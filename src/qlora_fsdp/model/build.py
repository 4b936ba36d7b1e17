"""Build the model on meta: its shapes, with quantized linears in place, and no weights.

config.json (or the config of a named model) -> transformers' own model class on the meta device -> every linear layer
that is to be quantized swapped for a `QuantizedLinear` -> a list of which checkpoint tensor fills which parameter.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from accelerate import init_empty_weights
from torch import nn
from torch.nn.modules.conv import _ConvNd
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.quantizers.base import get_keys_to_not_convert
from transformers.quantizers.quantizers_utils import should_convert_module

from qlora_fsdp.common.errors import CheckpointError, ConfigError, Problem
from qlora_fsdp.common.text import count, show_bytes, show_size
from qlora_fsdp.config.check_model import int8_embeddings_problem
from qlora_fsdp.config.schema import Config, EmbeddingStorage, LoraConfig, QuantConfig, TaskConfig, TaskName
from qlora_fsdp.layers import Format, QuantizedEmbedding, QuantizedLinear, parse_storage
from qlora_fsdp.model.count import dtype_name
from qlora_fsdp.model.find import ModelFiles
from qlora_fsdp.model.parts import describe_task, find_decoder, find_head, find_new, is_outside_backbone
from qlora_fsdp.weights.assign import assign, map_keys, stored_formats
from qlora_fsdp.weights.fill import Assignment
from qlora_fsdp.weights.safetensors_files import list_some

AUTO_CLASSES: dict[TaskName, Any] = {
    TaskName.causal_lm: AutoModelForCausalLM,
    TaskName.sequence_classification: AutoModelForSequenceClassification,
    TaskName.token_classification: AutoModelForTokenClassification,
}


@dataclass
class BuiltModel:
    """A model on meta and what fills it.

    Attributes:
        model: transformers' own class.
        assignments: what fills each parameter.
        format: of the quantized linears; None: nothing is quantized.
        notes: what the user should know.
        head: modules of a new head, to be trained in full.
    """

    model: PreTrainedModel
    assignments: list[Assignment]
    format: Format | None
    notes: list[str] = field(default_factory=list)
    head: list[str] = field(default_factory=list)

    @property
    def kind(self) -> str:
        """`nf4`, `fp4`, `int8`, or that nothing is quantized."""
        return self.format.quant_type if self.format else "unquantized"

    @property
    def std(self) -> float:
        """Of weights that are made up."""
        return float(getattr(self.model.config, "initializer_range", 0.02))


def build_model(
    files: ModelFiles,
    quant: QuantConfig,
    dtype: torch.dtype,
    attn_implementation: str,
    *,
    trust_remote_code: bool = False,
    keep: list[str] | None = None,
    task: TaskConfig | None = None,
    pad_token_id: int | None = None,
) -> BuiltModel:
    """The model on meta with its linears swapped, and the assignment of checkpoint tensors to its parameters.

    Args:
        files: of `find_model`.
        quant: quantization settings; a checkpoint that is already quantized wins over them, and a note says so.
        dtype: of all parameters that are not quantized, and of the matrix products.
        attn_implementation: a name in transformers' attention registry.
        trust_remote_code: run the checkpoint's own model code.
        keep: modules to leave in full precision besides `quant.llm_int8_skip_modules`: `lora.modules_to_save`.
        task: what the model's head is for; None: the next token.
        pad_token_id: of the tokenizer, for a classifier.

    Raises:
        CheckpointError: missing, unexpected or misshaped tensors: all are listed.
        ConfigError: layers whose rows can't be quantized: all are listed.
    """
    config = files.config
    stored_quant = getattr(config, "quantization_config", None)
    if stored_quant is not None:
        del config.quantization_config  # or transformers would look for its own quantizer
    stored_quant = stored_quant if files.tensors else None  # weights that are made up are quantized as `quant` says
    if stored_quant is not None and stored_quant.get("quant_method", "bitsandbytes") != "bitsandbytes":
        raise CheckpointError(
            f"model.path={files.folder} is quantized with {stored_quant['quant_method']}; only full precision and "
            "bitsandbytes can be trained here. Set model.path to the model in full precision."
        )
    task = task or TaskConfig()
    classifies, auto_class = task.name is not TaskName.causal_lm, AUTO_CLASSES[task.name]
    if classifies:
        describe_task(config, task, pad_token_id)
    try:
        with init_empty_weights(include_buffers=False):
            model = auto_class.from_config(
                config, dtype=dtype, attn_implementation=attn_implementation, trust_remote_code=trust_remote_code
            )
    except ValueError as error:  # no such class for this model_type, or no such attention
        reason = str(error).partition(".\n")[0]
        raise CheckpointError(
            f"model.path={files.folder or config.model_type} can't be built as {auto_class.__name__}: {reason}. Set "
            "model.path to another model, task, or model.attn_implementation=eager."
        ) from error
    dropped = _drop_towers(model)
    model.tie_weights()  # on meta, ties made while building are lost
    model.config.use_cache = False
    keys = map_keys(model, files.tensors)
    keys = {key: stored for key, stored in keys.items() if not key.startswith(tuple(f"{name}." for name in dropped))}
    notes = [f"only the text part of {type(model).__name__} is used: {', '.join(dropped)} left out"] if dropped else []
    new = find_new(model, keys) if classifies else set()
    head = find_head(model, new) if classifies else []
    if new and files.tensors:
        notes.append(f"new, and trained in full: {', '.join(sorted(new))}")
    formats = stored_formats(keys, quant) if stored_quant is not None else {}
    if stored_quant is not None:
        found = {f.quant_type + (" with double quantization" if f.double_quant else "") for f in formats.values()}
        notes.append(
            f"the checkpoint is already quantized ({', '.join(sorted(found))}): its bytes are taken as they are, and "
            "quant.* is not used"
        )
        _check_stored(model, formats)
        _swap_linears(model, lambda name, layer: formats.get(name), dtype)
        format = next(iter(formats.values()), None)
    else:
        format = choose_format(quant)
        if format is not None:
            linears = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
            for skip in quant.llm_int8_skip_modules or []:
                if all(should_convert_module(name, [skip]) for name in linears):
                    notes.append(f"quant.llm_int8_skip_modules: {skip} fits no linear layer, so that none is left out")
            _swap_chosen_linears(model, format, quant, dtype, [*(keep or []), *head])
    if format is not None:
        notes += _note_experts(model, format)
    if quant.embeddings is EmbeddingStorage.int8:
        _swap_ends(model, parse_storage(quant.bnb_4bit_quant_storage.value), dtype, new_head=bool(head))
    model.requires_grad_(False)
    is_optional = partial(is_outside_backbone, model=model) if classifies else lambda name: False
    assignments = assign(model, keys, not files.tensors, new, is_optional)
    return BuiltModel(model, assignments, format, notes, head)


def build_configured(
    files: ModelFiles,
    config: Config,
    lora: LoraConfig,
    dtype: torch.dtype,
    attn_implementation: str,
    tokenizer: PreTrainedTokenizerBase,
) -> BuiltModel:
    """`build_model` as a run's settings say, with the name by which an adapter remembers its base.

    Args:
        files: of `find_model`.
        config: `model`, `quant` and `task` are used.
        lora: the adapter's settings, in use those that are saved with it.
        dtype: as of `build_model`.
        attn_implementation: as of `build_model`.
        tokenizer: of the model.
    """
    built = build_model(
        files,
        config.quant,
        dtype,
        attn_implementation,
        trust_remote_code=config.model.trust_remote_code,
        keep=list(lora.modules_to_save or []),
        task=config.task,
        pad_token_id=tokenizer.pad_token_id,
    )
    built.model.name_or_path = config.model.path or config.model.name
    return built


def _drop_towers(model: PreTrainedModel) -> list[str]:
    """Take the towers for images and sound out of a multimodal model, whose adapter is then one for its text decoder.

    Returns:
        Names of what was taken out; none for a model of text alone.
    """
    found = find_decoder(model)
    if found is None:
        return []
    name, decoder = found
    parent_name = name.rpartition(".")[0]
    parent = model.get_submodule(parent_name)
    others = [child for child, module in parent.named_children() if module is not decoder]
    for child in others:
        setattr(parent, child, nn.Identity())
    return [f"{parent_name}.{child}" for child in others]


def choose_format(quant: QuantConfig) -> Format | None:
    """The format that `quant` asks for, or None for no quantization."""
    storage = parse_storage(quant.bnb_4bit_quant_storage.value)
    if quant.load_in_8bit:
        return Format("int8", storage=storage)
    if quant.load_in_4bit:
        return Format(quant.bnb_4bit_quant_type.value, quant.bnb_4bit_use_double_quant, storage=storage)
    return None


def quant_settings(format: Format | None, quant: QuantConfig) -> QuantConfig:
    """The settings that would give `format`: a checkpoint that is already quantized need not be as `quant` says."""
    return replace(
        quant,
        load_in_4bit=format is not None and format.is_4bit,
        load_in_8bit=format is not None and not format.is_4bit,
        bnb_4bit_use_double_quant=format is not None and format.double_quant,
    )


def _swap_chosen_linears(
    model: PreTrainedModel, format: Format, quant: QuantConfig, dtype: torch.dtype, keep: list[str]
) -> None:
    skip = quant.llm_int8_skip_modules
    skip = get_keys_to_not_convert(model) if skip is None else list(skip)
    skip += [name for name, _ in model.named_modules() if name.endswith(tuple(keep))]  # as PEFT finds modules_to_save
    problems, table = [], getattr(model.get_input_embeddings(), "weight", None)

    def choose(name: str, layer: nn.Linear) -> Format | None:
        if not should_convert_module(name, skip) or layer.weight is table:
            return None
        reason = format.refuses(layer.in_features)
        if reason is not None:
            problems.append(f"{name} {reason}")
        return format if reason is None else None

    _swap_linears(model, choose, dtype)
    if problems:
        raise ConfigError(
            [
                Problem(
                    f"quant.bnb_4bit_quant_type={format.quant_type}",
                    f"can't quantize {len(problems)} layers, whose blocks would cross rows:\n{list_some(problems)}\n",
                    "Set quant=int8, or add them to quant.llm_int8_skip_modules.",
                )
            ]
        )


def _note_experts(model: PreTrainedModel, format: Format) -> list[str]:
    """Experts that are one tensor, most of such a model, which is then far larger than its number of bits says."""
    if not any("expert" in key for key in model.config.get_text_config().to_dict()):
        return []
    found = {
        name: [p for p in module.parameters(recurse=False) if p.ndim > 2 and len(p) > 1]
        for name, module in model.named_modules()
        if not isinstance(module, (QuantizedLinear, _ConvNd))
    }
    names, params = [name for name in found if found[name]], [p for each in found.values() for p in each]
    if not params:
        return []
    modules = f"{count(len(names), 'module')} such as {names[0]}"
    size = show_bytes(sum(p.numel() * p.dtype.itemsize for p in params))
    return [
        f"{show_size(sum(p.numel() for p in params))} parameters stay in {dtype_name(params[0].dtype)} ({size}): "
        f"{format.quant_type} is for linear layers, and experts are one tensor in {modules}"
    ]


def _check_stored(model: nn.Module, formats: dict[str, Format]) -> None:
    layers = {name: layer for name, layer in model.named_modules() if name in formats and isinstance(layer, nn.Linear)}
    reasons = {name: formats[name].refuses(layer.in_features) for name, layer in layers.items()}
    problems = [f"{name} {reason}" for name, reason in reasons.items() if reason is not None]
    if problems:
        raise CheckpointError(
            f"{len(problems)} quantized layers of the checkpoint can't be split by rows, because blocks cross rows. "
            f"Set model.path to the model in full precision, and quant=int8:\n{list_some(problems)}"
        )


def _swap_ends(model: PreTrainedModel, storage: torch.dtype, dtype: torch.dtype, new_head: bool) -> None:
    """int8 for the embeddings and, unless it is new, the head."""
    embeddings, head = model.get_input_embeddings(), None if new_head else model.get_output_embeddings()
    names = {id(module): name for name, module in model.named_modules()}
    is_tied = head is not None and head.weight is embeddings.weight
    if is_tied or type(embeddings) is not nn.Embedding:
        raise ConfigError([int8_embeddings_problem(is_tied, type(embeddings).__name__)])
    format = Format("int8", storage=storage)
    rows, columns = embeddings.weight.shape
    model.set_submodule(names[id(embeddings)], QuantizedEmbedding(rows, columns, format, dtype))
    if type(head) is nn.Linear:
        quantized = QuantizedLinear(head.in_features, head.out_features, head.bias is not None, format, dtype)
        model.set_submodule(names[id(head)], quantized)


def _swap_linears(model: nn.Module, choose: Callable[[str, nn.Linear], Format | None], dtype: torch.dtype) -> None:
    for name, layer in list(model.named_modules()):
        if type(layer) is not nn.Linear:
            continue
        format = choose(name, layer)
        if format is not None:
            quantized = QuantizedLinear(layer.in_features, layer.out_features, layer.bias is not None, format, dtype)
            model.set_submodule(name, quantized)
