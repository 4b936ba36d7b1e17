"""Replace a model's plain layers with quantized ones, while the model is still on the meta device.

It also tells which classes of linear layers compute just what nn.Linear computes, so that they may be quantized and
adapted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, cast

import torch
from torch import nn
from torch.nn import functional as F
from transformers import PreTrainedModel
from transformers.quantizers.base import get_keys_to_not_convert
from transformers.quantizers.quantizers_utils import should_convert_module
from typing_extensions import assert_never

from qlora_fsdp.common.errors import CheckpointError, ConfigError, Problem
from qlora_fsdp.common.module_names import is_target, match_skips, try_matching
from qlora_fsdp.common.sizes import GROUP_SIZES
from qlora_fsdp.common.text import list_some, plural, show_bytes, show_size
from qlora_fsdp.config.checks.check_model import int8_embeddings_problem
from qlora_fsdp.config.schema import CompressedFormat, QuantConfig
from qlora_fsdp.layers.experts.forward import expert_weight_names
from qlora_fsdp.layers.experts.grouped_products import QuantizedExpertWeight
from qlora_fsdp.layers.quantized.compressed import MXFP4_GROUP, NVFP4_GROUP
from qlora_fsdp.layers.quantized.format import Format
from qlora_fsdp.layers.quantized.linear import QuantizedEmbedding, QuantizedLinear
from qlora_fsdp.model.experts import ExpertWeightPlace, expert_weights, find_routers, other_experts
from qlora_fsdp.runtime.hardware import dtype_name, is_shortage

IN_FEATURES = 32
OUT_FEATURES = 48
NUM_TOKENS = 7
TOLERANCE = 1e-6  # of the largest output; sums of 32 products in another order differ by less


def choose_format(quant: QuantConfig, dtype: torch.dtype) -> Format | None:
    """The format that the settings ask for, or None for no quantization.

    Args:
        quant: the settings.
        dtype: the model's, to which the scales of compressed-tensors' formats are rounded.
    """
    match quant.compressed_tensors:
        case CompressedFormat.int4:
            return Format("int4", blocksize=quant.group_size, scale_dtype=dtype)
        case CompressedFormat.fp8:
            return Format("fp8", scale_dtype=dtype)
        case CompressedFormat.mxfp4:
            return Format("mxfp4", blocksize=MXFP4_GROUP)
        case CompressedFormat.nvfp4:
            return Format("nvfp4", blocksize=NVFP4_GROUP, scale_dtype=torch.float8_e4m3fn)
        case CompressedFormat.none:
            pass
        case unknown:
            assert_never(unknown)
    if quant.load_in_8bit:
        return Format("int8")
    if quant.load_in_4bit:
        return Format(quant.bnb_4bit_quant_type.value, quant.bnb_4bit_use_double_quant)
    return None


def quant_settings(format: Format | None, quant: QuantConfig) -> QuantConfig:
    """The settings that lead to `format`, which differ from `quant` where the model files are quantized already."""
    is_bitsandbytes = format is not None and format.is_bitsandbytes
    compressed = CompressedFormat.none
    if format is not None and not is_bitsandbytes:
        compressed = CompressedFormat(format.quant_type)
    return replace(
        quant,
        load_in_4bit=format is not None and is_bitsandbytes and format.is_4bit,
        load_in_8bit=format is not None and is_bitsandbytes and not format.is_4bit,
        compressed_tensors=compressed,
        bnb_4bit_use_double_quant=format is not None and format.double_quant,
    )


def swap_stored_layers(model: nn.Module, formats: Mapping[str, Format], dtype: torch.dtype) -> None:
    """Swap exactly the layers whose codes are in the model files.

    Raises:
        CheckpointError: blocks cross rows, so that the codes can't be split between ranks; all such layers are listed.
    """
    experts = [place for place in expert_weights(model) if place.name in formats]
    row_lengths: dict[str, int] = {}
    for name, layer in model.named_modules():
        if name in formats and isinstance(layer, nn.Linear):
            row_lengths[name] = layer.in_features
    for place in experts:
        row_lengths[place.name] = place.weight_in(model).shape[2]
    problems = []
    for name, length in row_lengths.items():
        reason = formats[name].why_not(length)
        if reason is not None:
            problems.append(f"{name} {reason}")
    if problems:
        raise CheckpointError(
            f"{len(problems)} quantized layers of the checkpoint can't be split by rows, because blocks cross rows. "
            f"Set model.path to the model in full precision, and quant=int8:\n{list_some(problems)}"
        )
    _swap_linears(model, lambda name, layer: formats.get(name), dtype)
    for place in experts:
        _swap_expert_weight(model, place, formats[place.name], dtype)


def swap_chosen_linears(
    model: PreTrainedModel, format: Format, quant: QuantConfig, dtype: torch.dtype, keep: Sequence[str]
) -> list[str]:
    """Swap every linear layer that the settings do not leave out.

    Args:
        model: changed in place.
        format: format of the swapped layers.
        quant: names the layers that are left out. None leaves out what transformers would: the output head, for one.
            Routers of experts are always left out.
        dtype: dtype of the layers' inputs and outputs.
        keep: modules that are trained in full and therefore stay in full precision.

    Returns:
        Notes for the user, on names in the settings that fit no layer.

    Raises:
        ConfigError: layers can't be quantized because blocks would cross their rows; all are listed.
    """
    linears = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    skip = quant.llm_int8_skip_modules
    skip = _left_out_by_transformers(model) if skip is None else list(skip)
    skip += [name for name, _ in model.named_modules() if name.endswith(tuple(keep))]  # as PEFT finds modules_to_save
    named = list(quant.llm_int8_skip_modules or [])
    unused, quantized = try_matching("quant.llm_int8_skip_modules", match_skips, linears, named, skip)
    notes = [f"quant.llm_int8_skip_modules: {each} fits no linear layer, so that none is left out" for each in unused]
    chosen = set(quantized) - find_routers(model)
    problems, table = [], getattr(model.get_input_embeddings(), "weight", None)

    def choose(name: str, layer: nn.Linear) -> Format | None:
        if name not in chosen or layer.weight is table:
            return None
        reason = format.why_not(layer.in_features)
        if reason is not None:
            problems.append(f"{name} {reason}")
        return format if reason is None else None

    _swap_linears(model, choose, dtype)
    if problems:
        raise _cannot_quantize(format, problems)
    return notes


def _left_out_by_transformers(model: PreTrainedModel) -> list[str]:
    """What transformers leaves out by itself: the head, what is tied to it, and whatever has the last parameter.

    It asks before it ties weights, when the last parameter is a tied head's own. Here that has happened, and the last
    one may be a layer's (OLMo has no weights in its norms, nanochat neither).
    """
    found = set(get_keys_to_not_convert(model))
    last, last_of_all = ([*model.named_parameters(remove_duplicate=each)][-1][0] for each in (True, False))
    if last != last_of_all and last not in {name for pair in model.all_tied_weights_keys.items() for name in pair}:
        found.discard(last.removesuffix(".weight"))
    return list(found)


def _cannot_quantize(format: Format, problems: list[str]) -> ConfigError:
    reason = f"can't quantize {len(problems)} layers, whose blocks would cross rows:\n{list_some(problems)}\n"
    if format.is_bitsandbytes:
        fix = "Set quant=int8, or add them to quant.llm_int8_skip_modules."
        return ConfigError([Problem(f"quant.bnb_4bit_quant_type={format.quant_type}", reason, fix)])
    fix = "Set quant=fp8, which rows of any length can have, or add them to quant.llm_int8_skip_modules."
    smaller = [str(size) for size in GROUP_SIZES if size < format.blocksize]
    if smaller:
        fix = f"Set a smaller quant.group_size, {' or '.join(smaller)}. Or: {fix}"
    setting = f"quant.compressed_tensors={format.quant_type}"
    if format.quant_type == "int4":
        setting = f"quant.group_size={format.blocksize}"
    return ConfigError([Problem(setting, reason, fix)])


def swap_experts(model: PreTrainedModel, format: Format, quant: QuantConfig, dtype: torch.dtype) -> None:
    """Swap the weights of fused experts, each of which is one tensor of three dimensions.

    Groups of mxfp4 are to lie along the inputs of a matrix, as in published files. So where a class calls its weights
    transposed (gpt-oss), with inputs as rows, the transposes are kept.

    Raises:
        ConfigError: weights can't be quantized because blocks would cross their rows; all are listed.
    """
    skips = list(quant.llm_int8_skip_modules or [])
    by_module: dict[str, list[ExpertWeightPlace]] = {}
    for place in expert_weights(model):
        if should_convert_module(place.module, skips) and should_convert_module(place.name, skips):
            by_module.setdefault(place.module, []).append(place)
    turned = {name for name, places in by_module.items() if _turns_experts(model.get_submodule(name), places, format)}
    problems: list[str] = []
    for name, places in by_module.items():
        for place in places:
            reason = format.why_not(place.weight_in(model).shape[1 if name in turned else 2])
            if reason is not None:
                problems.append(f"{place.name} {reason}")
    if problems:
        raise _cannot_quantize(format, problems)
    for name, places in by_module.items():
        for place in places:
            _swap_expert_weight(model, place, format, dtype, turns=name in turned)
    for name in turned:
        experts: Any = model.get_submodule(name)
        experts.is_transposed = False


def _turns_experts(module: Any, quantized: Sequence[ExpertWeightPlace], format: Format) -> bool:
    """Whether a module of fused experts, of whose two weights some are quantized, gets the transposes of both."""
    are_all_quantized = len(quantized) == len(expert_weight_names(module))
    return format.quant_type == "mxfp4" and bool(module.is_transposed) and are_all_quantized


def _swap_expert_weight(
    model: nn.Module, place: ExpertWeightPlace, format: Format, dtype: torch.dtype, turns: bool = False
) -> None:
    module = model.get_submodule(place.module)
    num_experts, num_rows, num_columns = place.weight_in(model).shape
    shape = (num_experts, num_columns, num_rows) if turns else (num_experts, num_rows, num_columns)
    delattr(module, place.key)
    setattr(module, place.key, QuantizedExpertWeight(shape, format, dtype, is_turned=turns))


def swap_tables(model: PreTrainedModel, dtype: torch.dtype, has_new_head: bool, keep: Sequence[str]) -> list[str]:
    """Swap input embeddings, output head and tables that have something of each token for every layer for int8.

    A head and embeddings that share a weight stay as they are.

    Args:
        model: changed in place.
        dtype: dtype of the rows that are looked up, and of the head's inputs and outputs.
        has_new_head: the head is new, and stays as it is.
        keep: modules that are trained in full, and stay as they are.

    Returns:
        A note if only tables for all layers are swapped.

    Raises:
        ConfigError: nothing is swapped. Embeddings and head share a weight, or the embeddings are of a class of their
            own, and there is no table for all layers.
    """
    embeddings = model.get_input_embeddings()
    head = None if has_new_head else model.get_output_embeddings()
    names = {id(module): name for name, module in model.named_modules()}
    format = Format("int8")
    per_layer = [table for table in find_per_layer_tables(model) if not is_target(names[id(table)], keep)]
    for table in per_layer:
        rows, columns = table.weight.shape
        lookup = None if type(table) is nn.Embedding else table
        model.set_submodule(names[id(table)], QuantizedEmbedding(rows, columns, format, dtype, lookup))
    is_tied = head is not None and head.weight is embeddings.weight
    if is_tied or type(embeddings) is not nn.Embedding:
        if not per_layer:
            raise ConfigError([int8_embeddings_problem(is_tied, type(embeddings).__name__)])
        swapped = ", ".join(names[id(table)] for table in per_layer)
        return [f"quant.embeddings=int8 stores {swapped}; the embeddings stay as they are, whose weight is the head's"]
    rows, columns = embeddings.weight.shape
    table = QuantizedEmbedding(rows, columns, format, dtype)
    table.padding_idx = embeddings.padding_idx
    model.set_submodule(names[id(embeddings)], table)
    if type(head) is nn.Linear:
        model.set_submodule(names[id(head)], _quantized_like(head, format, dtype))
    return []


def find_per_layer_tables(base: PreTrainedModel) -> list[nn.Embedding]:
    """Tables that have something of each token for every layer, and so are wider than the embeddings.

    Gemma 4 E2B's is of 2.3 billion parameters, more than half of the model (`embed_tokens_per_layer`). Gemma 3n's knows
    fewer tokens than its embeddings. A table of positions, which may be wide too (OPT-350m's), is short.
    """
    own = next((module for module in base.get_input_embeddings().modules() if isinstance(module, nn.Embedding)), None)
    if own is None:
        return []
    found: list[nn.Embedding] = []
    for table in base.modules():
        if not isinstance(table, nn.Embedding) or not any(True for _ in table.parameters(recurse=False)):
            continue
        is_of_tokens = 2 * table.num_embeddings > own.num_embeddings
        if is_of_tokens and table.embedding_dim > own.embedding_dim:
            found.append(table)
    return found


def note_nothing_quantized(model: PreTrainedModel, format: Format) -> list[str]:
    """A note if no layer of the model is quantized, though the settings ask for it."""
    if any(isinstance(module, (QuantizedLinear, QuantizedExpertWeight)) for module in model.modules()):
        return []
    return [
        f"nothing is quantized: {type(model).__name__} has no layers for {format.quant_type}, which is for linear "
        f"layers and fused experts, or the settings leave them all out. Its weights stay in {dtype_name(model.dtype)}"
    ]


def note_experts(model: PreTrainedModel, format: Format) -> list[str]:
    """A note if the model's experts are single tensors, which stay in full precision.

    Experts are most of such a model, so it is far larger than its number of bits suggests.
    """
    found = other_experts(model)
    names, params = list(found), [p for each in found.values() for p in each]
    if not params:
        return []
    modules = f"{plural(len(names), 'module')} such as {names[0]}"
    size = show_bytes(sum(p.numel() * p.dtype.itemsize for p in params))
    return [
        f"{show_size(sum(p.numel() for p in params))} parameters stay in {dtype_name(params[0].dtype)} ({size}): "
        f"{format.quant_type} is for linear layers and experts as transformers fuses them, not for those in {modules}"
    ]


def _swap_linears(model: nn.Module, choose: Callable[[str, nn.Linear], Format | None], dtype: torch.dtype) -> None:
    for name, layer in list(model.named_modules()):
        if not isinstance(layer, nn.Linear) or not computes_linear(layer):
            continue
        format = choose(name, layer)
        if format is not None:
            model.set_submodule(name, _quantized_like(layer, format, dtype))


def _quantized_like(layer: nn.Linear, format: Format, dtype: torch.dtype) -> QuantizedLinear:
    quantized = QuantizedLinear(layer.in_features, layer.out_features, layer.bias is not None, format, dtype)
    quantized.replaces = type(layer)
    return quantized


def computes_linear(layer: nn.Linear) -> bool:
    """Whether a layer computes x W^T + b, and no more, by the forward of its class."""
    if type(layer) is nn.Linear or isinstance(layer, QuantizedLinear):
        return True
    is_plain = set(layer._parameters) == {"weight", "bias"} and not (layer._buffers or layer._modules)
    return is_plain and _is_linear_class(cast(Any, type(layer)), layer.bias is not None)


@cache
def _is_linear_class(kind: Any, has_bias: bool) -> bool:
    with torch.random.fork_rng(devices=[]), torch.device("cpu"), torch.no_grad():
        torch.manual_seed(0)
        layer, x = nn.Linear(IN_FEATURES, OUT_FEATURES, has_bias), torch.randn(NUM_TOKENS, 1, IN_FEATURES)
        expected = F.linear(x, layer.weight, layer.bias)
        layer.__class__ = kind
        try:
            found = layer(x)
        except Exception as error:  # it needs what its own constructor would have made
            if is_shortage(error):
                raise
            return False
        if not isinstance(found, torch.Tensor) or found.shape != expected.shape:
            return False
        return bool((found - expected).abs().max() <= TOLERANCE * expected.abs().max())
