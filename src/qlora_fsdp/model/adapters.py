"""Add LoRA adapters to the model through PEFT, and initialise them once they are sharded.

PEFT makes the adapters from its own LoraConfig, names them and saves them, so that other programs can load them. They
are made on the meta device and sharded like the rest of the model. To initialise an adapter every rank draws the whole
small matrix from the same seed and keeps its own rows, so that the values do not depend on the number of ranks.
"""

from __future__ import annotations

import difflib
import math
import re
import warnings
import zlib
from collections.abc import Iterator, Mapping
from typing import Any, cast

import peft
import torch
from peft.tuners.lora import LoraLayer
from peft.tuners.lora.dora import DoraLinearLayer
from peft.utils import ModulesToSaveWrapper
from peft.utils.constants import DUMMY_TARGET_MODULES
from peft.utils.other import TrainableTokensWrapper
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from qlora_fsdp.common.errors import AdapterError
from qlora_fsdp.common.module_names import fits_pattern, is_target, limited_matching
from qlora_fsdp.config.schema import LoraConfig, TaskName
from qlora_fsdp.config.settings import show
from qlora_fsdp.data.tokenizer import AddedTokens
from qlora_fsdp.layers import QuantizedLayer, QuantizedLinear
from qlora_fsdp.layers.lora import LoraLinear
from qlora_fsdp.layers.token_rows import ADAPTER as ADAPTER
from qlora_fsdp.model.new_tokens import fill_copy, grow_copy, initialize_rows, token_rows, use_token_rows
from qlora_fsdp.model.parts import find_decoder
from qlora_fsdp.runtime.rows import gather_rows, local_rows, local_tensor, shard_group

_WRAPPERS = re.compile(
    r"\.(base_layer|original_module|modules_to_save\.\w+|token_adapter)\b"
)  # what PEFT adds to names
NO_TOKENS = AddedTokens()
PEFT_TASKS = {
    TaskName.causal_lm: "CAUSAL_LM",
    TaskName.sequence_classification: "SEQ_CLS",
    TaskName.token_classification: "TOKEN_CLS",
}


def apply_adapters(
    model: PreTrainedModel,
    config: LoraConfig,
    task: TaskName = TaskName.causal_lm,
    tokens: AddedTokens = NO_TOKENS,
) -> peft.PeftModel:
    """Wrap the model in PEFT's. Exactly the adapters and `modules_to_save` require gradients then, all in float32.

    Args:
        model: on meta; changed in place.
        config: what is adapted.
        task: what is learned.
        tokens: the tokens whose rows in embeddings and head are trained.

    Raises:
        AdapterError: a name in target_modules, exclude_modules, modules_to_save or a pattern fits no layer (similar
            names are listed), or PEFT refuses the settings.
    """
    _check_names(model, config)
    settings = peft.LoraConfig(
        r=config.r,
        lora_alpha=config.lora_alpha,  # type: ignore[arg-type]  # PEFT takes fractions too
        lora_dropout=config.lora_dropout,
        use_rslora=config.use_rslora,
        use_dora=config.use_dora,
        target_modules=_targets(model, config),
        exclude_modules=config.exclude_modules,
        modules_to_save=config.modules_to_save,
        rank_pattern=dict(config.rank_pattern),
        alpha_pattern=dict(config.alpha_pattern),
        trainable_token_indices=token_rows(model, tokens, config) or None,
        init_lora_weights=True,  # of no effect on meta: `initialize_adapters` does what lora.init_lora_weights says
        task_type=PEFT_TASKS[task],
    )
    settings._register_custom_module({nn.Linear: LoraLinear})
    fix = "Take it out, or train it in full with lora.modules_to_save."
    if config.target_modules == "all-linear":  # for PEFT these include experts, routers and GPT-2's Conv1D
        fix = f"Set lora.target_modules to a list of linear layers; here are {_linear_endings(model)}."
    tables = [model.get_input_embeddings(), model.get_output_embeddings()]  # before PEFT wraps them
    try:
        with warnings.catch_warnings():
            # PEFT asks transformers under the property's old name.
            warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
            wrapped = peft.get_peft_model(model, settings, autocast_adapter_dtype=False, low_cpu_mem_usage=True)
    except ValueError as error:
        if str(error).startswith("Target module "):
            asked = show("lora.target_modules", config.target_modules)
            raise AdapterError(
                f"{asked} fits a layer that is not linear: {str(error).partition(' is not supported')[0]}. "
                f"Set lora.target_modules=all-linear, or some of {_linear_endings(model)}."
            ) from error
        raise AdapterError(f"lora: PEFT refuses these settings: {error}") from error
    for name, module in wrapped.named_modules():
        name = name.removeprefix("base_model.model.")
        if isinstance(module, LoraLayer) and not isinstance(module, LoraLinear):
            raise AdapterError(
                f"lora.target_modules: {name} is no linear layer ({type(module.get_base_layer()).__name__}). {fix}"
            )
        if isinstance(module, ModulesToSaveWrapper):
            _check_can_be_trained(name, module)
            if module.original_module in tables and tokens.vocab_size > module.original_module.weight.shape[0]:
                grow_copy(module.modules_to_save[ADAPTER], module.original_module.weight.shape[0], tokens.vocab_size)
            _train_in_fp32(module.modules_to_save[ADAPTER], model.dtype)
        if isinstance(module, TrainableTokensWrapper):
            use_token_rows(module)
        if isinstance(module, (LoraLinear, DoraLinearLayer)):
            _to_fp32(module)
    return wrapped


def _check_can_be_trained(name: str, module: ModulesToSaveWrapper) -> None:
    if any(isinstance(child, QuantizedLayer) for child in module.modules()):
        raise AdapterError(
            f"lora.modules_to_save: {name} is quantized in the checkpoint, and codes can't be trained. "
            "Take it out, or set model.path to the model in full precision."
        )


def _targets(model: PreTrainedModel, config: LoraConfig) -> Any:
    """`target_modules` as PEFT is to see it.

    For a multimodal model "all-linear" is limited to the text decoder: the towers have layers of the same names.
    """
    found = find_decoder(model)
    if found is None or config.target_modules != "all-linear":
        return config.target_modules
    name, decoder = found
    endings = sorted({n.rsplit(".", 1)[-1] for n, module in decoder.named_modules() if isinstance(module, nn.Linear)})
    return rf"{re.escape(name)}\..*\.({'|'.join(endings)})"


def base_linears(model: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    """The linear layers of an adapted base, by the names that they have without adapters.

    A layer that is trained in full occurs twice under one name, as the original and as its trained copy.
    """
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and "lora_" not in name:
            yield _WRAPPERS.sub("", name), module


def trainable_names(model: nn.Module) -> list[str]:
    """Names of the parameters that require gradients."""
    return [name for name, param in model.named_parameters() if param.requires_grad]


def _check_names(model: nn.Module, config: LoraConfig) -> None:
    names = [name for name, module in model.named_modules() if name]
    for key in ("target_modules", "exclude_modules", "rank_pattern", "alpha_pattern"):
        with limited_matching(f"lora.{key}"):  # every name once, because PEFT matches every name
            wanted = getattr(config, key)
            for name in names if isinstance(wanted, str) else ():
                is_target(name, wanted)
            for pattern in wanted if isinstance(wanted, Mapping) else ():
                for name in names:
                    fits_pattern(name, pattern)
    endings = {name.rsplit(".", 1)[-1] for name in names}
    problems = []
    for key in ("target_modules", "exclude_modules", "modules_to_save"):
        wanted = getattr(config, key)
        if wanted in (None, "all-linear", DUMMY_TARGET_MODULES):
            continue
        if isinstance(wanted, str):
            if not any(is_target(name, wanted) for name in names):
                problems.append(
                    f"lora.{key}={wanted} is a regular expression that fits no module of {type(model).__name__}. "
                    "Set a list of names, or correct it: it must match a module's whole name."
                )
            continue
        for target in wanted:
            if not any(is_target(name, [target]) for name in names):
                close = difflib.get_close_matches(target, sorted(endings), n=3, cutoff=0.5)
                hint = f"Close: {', '.join(close)}." if close else f"Its linear layers: {_linear_endings(model)}."
                problems.append(f"lora.{key}: {target} fits no module of {type(model).__name__}. {hint}")
    for key in ("rank_pattern", "alpha_pattern"):  # PEFT would warn, and use r and lora_alpha
        for pattern in getattr(config, key):
            if not any(fits_pattern(name, pattern) for name in names):
                fix = "Correct it, or leave it out."
                problems.append(f"lora.{key}: {pattern} fits no module of {type(model).__name__}. {fix}")
    if problems:
        raise AdapterError("\n".join(problems))


def _linear_endings(model: nn.Module) -> str:
    return ", ".join(sorted({n.rsplit(".", 1)[-1] for n, m in model.named_modules() if isinstance(m, nn.Linear)}))


def _to_fp32(module: nn.Module) -> None:
    for child in module.modules():
        for name, param in child._parameters.items():
            if param is not None and param.requires_grad and param.dtype != torch.float32:
                child._parameters[name] = nn.Parameter(param.detach().float())


def _train_in_fp32(module: nn.Module, dtype: torch.dtype) -> None:
    """Keep a module that is trained in full in float32, inside a model that computes in `dtype`."""
    _to_fp32(module)
    if type(module) is nn.Linear:
        module.__class__ = _CastLinear
    else:
        module.register_forward_pre_hook(lambda _, args: tuple(_cast(a, torch.float32) for a in args))
        module.register_forward_hook(lambda _module, _args, output: _cast(output, dtype))


class _CastLinear(nn.Linear):
    """A linear layer with float32 weights that computes in the dtype of its input."""

    def forward(self, input: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.to(input.dtype)
        return F.linear(input, self.weight.to(input.dtype), bias)


def _cast(value: Any, dtype: torch.dtype) -> Any:
    return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value


@torch.no_grad()
def initialize_adapters(
    model: peft.PeftModel, init_lora_weights: bool | str, seed: int, tokens: AddedTokens = NO_TOKENS
) -> None:
    """Fill the adapters' shards. The values depend on the seed, not on the number of ranks. Collective.

    The base must be loaded already: `modules_to_save` start from its weights, new tokens from the mean of its rows, and
    DoRA's magnitudes from the norms of its dequantized rows.

    Args:
        model: the sharded model.
        init_lora_weights: how A and B start; as in PEFT's LoraConfig.
        seed: the same on every rank.
        tokens: the tokens whose rows are trained.

    Raises:
        AdapterError: a row of a base weight under DoRA is all zero, so that its magnitude over its norm would be NaN.
    """
    base = cast(PreTrainedModel, model.get_base_model())
    tables = [base.get_input_embeddings(), base.get_output_embeddings()]
    for name, module in model.named_modules():
        if isinstance(module, ModulesToSaveWrapper):
            originals = dict(module.original_module.named_parameters())
            is_table = any(module is table for table in tables)
            for key, param in module.modules_to_save[ADAPTER].named_parameters():
                fill_copy(param, originals[key], tokens.fresh if is_table else frozenset())
        if isinstance(module, TrainableTokensWrapper):
            initialize_rows(module, tokens.fresh)
        if isinstance(module, LoraLayer) and ADAPTER in module.lora_A:
            lora_a = cast(nn.Linear, module.lora_A[ADAPTER]).weight
            lora_b = cast(nn.Linear, module.lora_B[ADAPTER]).weight
            generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}/{name}".encode()))
            values_a, values_b = _draw(init_lora_weights, lora_a.shape, lora_b.shape, generator)
            for weight, values in ((lora_a, values_a), (lora_b, values_b)):
                first, last = local_rows(weight)
                local_tensor(weight).copy_(values[first:last])
            if ADAPTER in getattr(module, "lora_magnitude_vector", {}):
                delta = (values_b @ values_a) * module.scaling[ADAPTER]
                magnitude = cast(DoraLinearLayer, module.lora_magnitude_vector[ADAPTER]).weight
                _fill_magnitude(name, magnitude, cast(nn.Linear, module.get_base_layer()), delta)


def _draw(
    init: bool | str, shape_a: torch.Size, shape_b: torch.Size, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """A [r, in] and B [out, r] in float32, drawn as PEFT draws them for the same `init_lora_weights`."""
    rank, in_features = shape_a
    values_a, values_b = torch.empty(shape_a), torch.zeros(shape_b)
    if init is True:
        bound = math.sqrt(1 / in_features)  # kaiming_uniform_(a=sqrt(5))
        return values_a.uniform_(-bound, bound, generator=generator), values_b
    if init == "gaussian":
        return values_a.normal_(0.0, 1 / rank, generator=generator), values_b
    assert init == "orthogonal", init
    basis, _ = torch.linalg.qr(torch.randn(rank, rank, generator=generator))
    values_a = (torch.randn(in_features, rank // 2, generator=generator) @ basis[0::2]).t() / 10
    values_b = (torch.randn(rank // 2, shape_b[0], generator=generator).t() @ basis[1::2]) / 10
    return values_a.contiguous(), values_b


def _fill_magnitude(name: str, magnitude: Tensor, base: nn.Linear, delta: Tensor) -> None:
    """Fill this rank's rows of DoRA's magnitudes: norms of the rows of W + delta (arXiv:2402.09353, section 4.1)."""
    first, last = local_rows(magnitude)
    weight = _dequantize_local_rows(base) if isinstance(base, QuantizedLinear) else local_tensor(base.weight)
    norms = torch.linalg.vector_norm(weight.float() + delta[first:last].to(weight.device), dim=1)
    if not norms.all():  # for example a padding token's row in a tied head; forward would compute 0 / 0
        name = name.removeprefix("base_model.model.")
        raise AdapterError(
            f"lora.use_dora=true: {name} has rows that are all zero, and so no direction for DoRA to keep. Add {name} "
            "to lora.exclude_modules, or set lora.use_dora=false."
        )
    local_tensor(magnitude).copy_(norms)


def _dequantize_local_rows(layer: QuantizedLinear) -> Tensor:
    """The rows of the weight that this rank holds, dequantized. Collective."""
    parts = {
        name: gather_rows(local_tensor(part), part.shape[0], shard_group(part))
        for name, part in zip(layer.part_names, layer.parts(), strict=True)
    }
    first, last = local_rows(layer.codes)
    weight = layer.format.dequantize(parts, layer.out_features, layer.in_features, layer.compute_dtype)
    return weight[first:last]
