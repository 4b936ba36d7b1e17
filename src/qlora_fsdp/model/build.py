"""Build the model on the meta device: it has its classes and shapes, and no memory yet.

The model's config tells transformers which of its classes to make. Every linear layer that is to be quantized is then
swapped for a `QuantizedLinear`. At the end each parameter is assigned the tensor in the model files that will fill it,
so that a file that does not fit is found before anything large exists.

In a memory plan one of several transformer layers that are alike stands for the others.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from accelerate import init_empty_weights
from torch import nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.modeling_layers import GradientCheckpointingLayer

from qlora_fsdp.common.errors import CheckpointError
from qlora_fsdp.common.hub import without_hub
from qlora_fsdp.common.text import plural, shorten
from qlora_fsdp.config.schema import EmbeddingStorage, QuantConfig, TaskConfig, TaskName
from qlora_fsdp.layers.experts.forward import EXPERTS_IMPLEMENTATION
from qlora_fsdp.layers.experts.llama4 import compute_chosen_experts
from qlora_fsdp.layers.quantized.format import Format
from qlora_fsdp.layers.recurrent.replace import replace_functions
from qlora_fsdp.model.experts import check_num_chosen
from qlora_fsdp.model.find import ModelFiles
from qlora_fsdp.model.limited_building import LimitedBuilding, TooLarge
from qlora_fsdp.model.parts import describe_task, find_decoder, find_head, find_new, is_outside_backbone
from qlora_fsdp.model.swap_layers import (
    choose_format,
    note_experts,
    note_nothing_quantized,
    swap_chosen_linears,
    swap_experts,
    swap_stored_layers,
    swap_tables,
)
from qlora_fsdp.runtime.hardware import dtype_name
from qlora_fsdp.weights.assign import assign, stored_formats
from qlora_fsdp.weights.composed import Assignment, Stored, is_scaled
from qlora_fsdp.weights.map_keys import map_keys
from qlora_fsdp.weights.scaled import COMPRESSED, METHODS, attach_scales, input_bits

AUTO_CLASSES: dict[TaskName, Any] = {
    TaskName.causal_lm: AutoModelForCausalLM,
    TaskName.preference: AutoModelForCausalLM,
    TaskName.grpo: AutoModelForCausalLM,
    TaskName.distill: AutoModelForCausalLM,
    TaskName.reward: AutoModelForSequenceClassification,
    TaskName.sequence_classification: AutoModelForSequenceClassification,
    TaskName.token_classification: AutoModelForTokenClassification,
}


@dataclass(frozen=True)
class BuildSettings:
    """How the model is built from its files.

    Attributes:
        quant: quantization settings. Model files that are already quantized win over them, and a note says so.
        dtype: dtype of all parameters that are not quantized, and of the matrix products.
        attn_implementation: a name in transformers' attention registry.
        task: what the model's head is for.
        keep: modules to leave in full precision besides `quant.llm_int8_skip_modules`: `lora.modules_to_save`.
        pad_token_id: the tokenizer's padding token, which a classifier needs to know.
        trust_remote_code: run model code that comes with the files.
        shares_equal_layers: make layers that are alike one module, for a plan; such a model can't be trained.
    """

    quant: QuantConfig
    dtype: torch.dtype
    attn_implementation: str
    task: TaskConfig = field(default_factory=TaskConfig)
    keep: Sequence[str] = ()
    pad_token_id: int | None = None
    trust_remote_code: bool = False
    shares_equal_layers: bool = False

    @property
    def is_classifier(self) -> bool:
        return not self.task.is_causal


@dataclass
class MetaModel:
    """A model on the meta device, and what fills it.

    Attributes:
        model: an instance of transformers' own class, with quantized layers in it.
        config: the config that the model was made from, the task's labels included.
        assignments: what fills each parameter.
        format: format of the quantized linear layers; None if nothing is quantized.
        notes: what the user should know.
        head: names of the modules of a new head, which are trained in full.
    """

    model: PreTrainedModel
    config: PretrainedConfig
    assignments: list[Assignment]
    format: Format | None
    notes: list[str] = field(default_factory=list)
    head: list[str] = field(default_factory=list)

    @property
    def kind(self) -> str:
        """The format's name, as `quant=...` has it, or `unquantized`."""
        return self.format.quant_type if self.format else "unquantized"

    @property
    def std(self) -> float:
        """Standard deviation of randomly initialised weights."""
        return float(getattr(self.model.config, "initializer_range", 0.02))


def build_model(files: ModelFiles, settings: BuildSettings) -> MetaModel:
    """Build the model, and assign the tensors of its files to its parameters. The files' config is left as it is.

    Raises:
        CheckpointError: tensors are missing, unexpected or of another shape (all are listed), or transformers has no
            such model.
        ConfigError: layers can't be quantized; all are listed.
    """
    config = deepcopy(files.config)
    stored = _take_stored_quantization(config, files)
    if settings.is_classifier:
        describe_task(config, settings.task, settings.pad_token_id)
    model = _make_on_meta(config, files, settings)
    replace_functions(model)
    check_num_chosen(model)
    dropped = drop_towers(model)
    if settings.shares_equal_layers:
        share_equal_layers(model)
    tensors = _tensors_of(model, files, dropped, stored)
    if type(model.config) is not type(config):  # a class for the text of a model that has more (Llama 4)
        left_out = sorted({name.partition(".")[0] for name in tensors} - {name for name, _ in model.named_children()})
        tensors = {name: tensor for name, tensor in tensors.items() if name.partition(".")[0] not in left_out}
        dropped += left_out
    new = find_new(model, tensors) if settings.is_classifier else set()
    head = find_head(model, new) if settings.is_classifier else []
    notes = [f"only the text part of {type(model).__name__} is used: {', '.join(dropped)} left out"] if dropped else []
    if new and files.tensors:
        notes.append(f"not in the base's files, so trained in full: {', '.join(sorted(new))}")
    notes += _note_inputs(stored, settings.dtype)
    dequantized_from: str | None = None
    if stored is not None and stored["quant_method"] in METHODS and not stored_formats(tensors):
        dequantized_from = str(stored["quant_method"])
        stored = None
    format, more_notes = _swap_layers(model, None if stored is None else tensors, settings, head)
    model.requires_grad_(False)
    may_lack = partial(is_outside_backbone, model=model) if settings.is_classifier else lambda name: False
    assignments = assign(model, tensors, not files.tensors, new, may_lack)
    if dequantized_from is not None:
        notes.append(_note_dequantized(dequantized_from, settings.quant.base_format, assignments))
    return MetaModel(model, config, assignments, format, notes + more_notes, head)


def _note_inputs(stored: dict[str, Any] | None, dtype: torch.dtype) -> list[str]:
    """A note if servers round the inputs of a checkpoint's layers, which is not done here.

    Args:
        stored: the config's `quantization_config`; None if the files are in full precision.
        dtype: in which layers get their inputs.
    """
    if stored is None or stored["quant_method"] != COMPRESSED:
        return []
    bits = input_bits(stored)
    if not bits:
        return []
    to = " and ".join(str(number) for number in bits)
    return [
        f"the checkpoint asks servers to round the inputs of its layers to {to} bits, which is not done here: layers "
        f"compute with inputs in {dtype_name(dtype)}"
    ]


def _note_dequantized(method: str, base_format: str | None, assignments: Sequence[Assignment]) -> str:
    """What becomes of the weights of a checkpoint that is quantized in another way than the layers of the model.

    Args:
        method: its `quant_method`.
        base_format: that of the model's layers; None if they are not quantized.
        assignments: of all weights.
    """
    scaled = [each for each in assignments if each.stored is not None and is_scaled(each.stored)]
    num_kept = sum(assignment.keeps_codes for assignment in scaled)
    num_twice = sum(assignment.is_quantized for assignment in scaled) - num_kept
    if num_twice == 0 and num_kept > 0:
        return f"the checkpoint is in {method}: the codes of {plural(num_kept, 'weight')} are taken as they are"
    note = f"the checkpoint is in {method}, which is dequantized while it is read"
    if num_twice == 0:
        return note
    note += f", and quantized again as quant says: {plural(num_twice, 'weight')} are rounded twice"
    if method == "mxfp4" and base_format != "mxfp4":
        note += ". quant=mxfp4 takes the codes as they are"
    elif method == "mxfp4":
        note += ". Codes are kept where both weights of a layer's experts are quantized"
    return note


def _take_stored_quantization(config: PretrainedConfig, files: ModelFiles) -> dict[str, Any] | None:
    """Take the files' own quantization out of `config`, where transformers would act on it, and return it.

    Returns:
        The config's `quantization_config`, with its `quant_method`; None if the files are in full precision.

    Raises:
        CheckpointError: they are quantized in another way than any here.
    """
    stored = getattr(config, "quantization_config", None)
    if stored is None:
        return None
    del config.quantization_config
    if not files.tensors:  # random weights are quantized as the settings say
        return None
    if not isinstance(stored, dict):
        raise CheckpointError(f"{files.folder}/config.json: its quantization_config is damaged. Copy it again.")
    method = stored.get("quant_method", "bitsandbytes")
    if method not in ("bitsandbytes", *METHODS):
        raise CheckpointError(
            f"model.path={files.folder} is quantized with {shorten(str(method))}; only full precision, bitsandbytes, "
            f"{' and '.join(METHODS)} can be trained here. Set model.path to the model in full precision."
        )
    return {**stored, "quant_method": method}


def language_model_class(config: PretrainedConfig) -> Any:
    """The one of transformers' auto classes that makes a model which predicts tokens of this config."""
    is_causal = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING
    if not is_causal and type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        return AutoModelForImageTextToText  # the only class that transformers has for its text
    return AutoModelForCausalLM


@contextmanager
def on_meta() -> Iterator[None]:
    """While it lasts, models are made with parameters on the meta device. Buffers are real."""
    with init_empty_weights(include_buffers=False), LimitedBuilding(on_meta=True):
        yield


def _make_on_meta(config: PretrainedConfig, files: ModelFiles, settings: BuildSettings) -> PreTrainedModel:
    """An instance of transformers' class for this config and task. Its parameters are on meta, its buffers are real."""
    auto_class = AUTO_CLASSES[settings.task.name]
    if auto_class is AutoModelForCausalLM:
        auto_class = language_model_class(config)
    offline = nullcontext() if settings.trust_remote_code else without_hub()
    try:
        with on_meta(), offline:
            model: PreTrainedModel = auto_class.from_config(
                config,
                dtype=settings.dtype,
                attn_implementation=settings.attn_implementation,
                experts_implementation=EXPERTS_IMPLEMENTATION,
                trust_remote_code=settings.trust_remote_code,
            )
    except TooLarge as error:
        raise CheckpointError(
            f"model.path={files.folder or config.model_type}: its config can't be used: {error}. Check model.path, or "
            "model.config."
        ) from error
    except Exception as error:  # no such class or attention; or a config whose values contradict the class's code
        reason = str(error).partition(".\n")[0]
        reason = reason if isinstance(error, ValueError) else f"{type(error).__name__}: {reason}"
        is_about_attention = "attention" in reason.lower() or "attn" in reason.lower()
        fix = "model.attn_implementation=eager" if is_about_attention else "model.path to another model, or task"
        raise CheckpointError(
            f"model.path={files.folder or config.model_type} can't be built as {auto_class.__name__}: {reason}. "
            f"Set {fix}."
        ) from error
    if settings.task.is_causal:
        _check_learns_from_text(model)
    model.config.use_cache = False
    if hasattr(model.config, "rescale_every"):  # RWKV halves some weights in evaluation, but neither codes nor adapters
        model.config.rescale_every = 0
    compute_chosen_experts(model)
    return model


def _check_learns_from_text(model: PreTrainedModel) -> None:
    """Refuse a class that can't predict tokens from the tokens before them alone.

    Raises:
        CheckpointError: it wants an image or sound beside tokens, or reads with an encoder what it answers.
    """
    arguments = inspect.signature(type(model).forward).parameters.values()
    named = [each for each in arguments if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)]
    wanted = [each.name for each in named if each.default is each.empty and each.name not in ("self", "input_ids")]
    reason = None
    if wanted:
        reason = f"its forward wants {' and '.join(wanted)} beside tokens"
    elif model.config.is_encoder_decoder:
        reason = "it is an encoder with a decoder, which writes about what the encoder has read"
    if reason is not None:
        raise CheckpointError(
            f"{type(model).__name__} can't be trained on text alone: {reason}. Set model.path to a model whose decoder "
            "reads text."
        )


class AbsentTower(nn.Identity):
    """Stands where a tower was that no text goes through."""

    def forward(self, input: Any) -> Any:
        """Fails, because a tower that text does go through must not be left out."""
        raise RuntimeError("a part of the model was left out that the model computes text with")


def drop_towers(model: PreTrainedModel) -> list[str]:
    """Take the towers for images and sound out of a multimodal model, so that only its text decoder is adapted.

    Returns:
        The names of the modules that were taken out; none for a model of text alone.
    """
    names = []
    if (found := find_decoder(model)) is not None:
        name, decoder = found
        parent_name = name.rpartition(".")[0]
        parent = model.get_submodule(parent_name)
        others = [child for child, module in parent.named_children() if module is not decoder]
        for child in others:
            setattr(parent, child, AbsentTower())
        names = [f"{parent_name}.{child}" for child in others]
    for name in _other_towers(model):
        model.set_submodule(name, AbsentTower())
        names.append(name)
    model.tie_weights()  # weights that were tied while the model was made lost their tie when they moved to meta
    return names


def _other_towers(model: PreTrainedModel) -> list[str]:
    """Models within the model that have a config of their own, beside that of the whole and that of its text."""
    of_text = {id(model.config), id(model.config.get_text_config())}
    kinds = {type(model.config), type(model.config.get_text_config())}
    found: list[str] = []
    for name, module in model.named_modules():
        if not isinstance(module, PreTrainedModel) or module is model or name.startswith(tuple(f"{n}." for n in found)):
            continue
        is_of_text = id(module.config) in of_text or type(module.config) in kinds
        has_text = any(part is model.get_input_embeddings() for part in module.modules())
        if not is_of_text and not has_text:
            found.append(name)
    return found


def _tensors_of(
    model: PreTrainedModel, files: ModelFiles, dropped: Sequence[str], quantization: dict[str, Any] | None
) -> dict[str, Stored]:
    """The stored tensors by the names that the model gives them, without those of modules that were taken out."""
    prefixes, tensors = tuple(f"{name}." for name in dropped), files.tensors
    if quantization is not None and quantization["quant_method"] in METHODS:
        tensors = attach_scales(tensors, quantization)
    return {key: stored for key, stored in map_keys(model, tensors).items() if not key.startswith(prefixes)}


def _swap_layers(
    model: PreTrainedModel,
    quantized_tensors: dict[str, Stored] | None,
    settings: BuildSettings,
    head: Sequence[str],
) -> tuple[Format | None, list[str]]:
    """Swap the layers that are quantized in the model files or, if none are, those that the settings choose.

    Args:
        model: changed in place.
        quantized_tensors: the stored tensors, if some of them are quantized.
        settings: how the model is built.
        head: modules of a new head, which stay in full precision.

    Returns:
        The format of the swapped linear layers, and notes for the user.
    """
    quant, dtype = settings.quant, settings.dtype
    notes: list[str] = []
    if quantized_tensors is not None:
        formats = stored_formats(quantized_tensors)
        found = {f.quant_type + (" with double quantization" if f.double_quant else "") for f in formats.values()}
        notes.append(
            f"the checkpoint is already quantized ({', '.join(sorted(found))}): its bytes are taken as they are, and "
            "quant.* is not used"
        )
        scaled = [key for key, each in quantized_tensors.items() if is_scaled(each)]
        others = [key for key in scaled if key.removesuffix(".weight") not in formats]
        if others:
            notes.append(
                f"{plural(len(others), 'weight')} of the checkpoint, such as {others[0]}, are in no format that is "
                "trained here: they are dequantized while they are read, and stay in 16 bits"
            )
        swap_stored_layers(model, formats, dtype)
        format = next(iter(formats.values()), None)
    else:
        format = choose_format(quant, dtype)
        if format is not None:
            notes += swap_chosen_linears(model, format, quant, dtype, [*settings.keep, *head])
            swap_experts(model, format, quant, dtype)
    if format is not None:
        notes += [*note_nothing_quantized(model, format), *note_experts(model, format)]
    if quant.embeddings is EmbeddingStorage.int8:
        notes += swap_tables(model, dtype, bool(head), settings.keep)
    return format, notes


def share_equal_layers(model: PreTrainedModel) -> None:
    """Put one module in the place of all layers that are alike: it runs several times then.

    A plan needs no layer twice, and adapting hundreds of modules takes seconds.

    Args:
        model: on meta, as transformers made it; changed in place, and of no use for training afterwards.
    """
    for modules in list(model.modules()):
        if isinstance(modules, nn.ModuleList) and all(isinstance(m, GradientCheckpointingLayer) for m in modules):
            kinds: dict[Any, nn.Module] = {}
            for index, layer in enumerate(modules):
                modules[index] = kinds.setdefault(kind_of(layer), layer)


def kind_of(layer: nn.Module) -> Any:
    """Equal for layers that are alike: classes, sizes and simple attributes of all modules, but for their position."""
    return tuple(
        (
            name,
            type(module).__name__,
            tuple((key, p.shape, p.dtype, p.requires_grad) for key, p in module._parameters.items() if p is not None),
            tuple((key, value) for key, value in vars(module).items() if _is_simple(key, value)),
        )
        for name, module in layer.named_modules()
    )


def _is_simple(name: str, value: Any) -> bool:
    if not isinstance(value, (int, float, str, bool, torch.dtype)):
        return False
    return not any(part in name for part in ("idx", "index", "layer_id", "layer_number"))
