"""Add LoRA adapters to the model through PEFT.

PEFT makes the adapters from its own LoraConfig, names them and saves them, so that other programs can load them. They
are made on the meta device and sharded like the rest of the model. Then initialize.py fills them.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Collection, Iterator
from typing import Any, cast

import peft
import torch
from peft.tuners.lora import LoraLayer
from peft.tuners.lora.dora import DoraLinearLayer
from peft.utils import ModulesToSaveWrapper
from peft.utils.other import TrainableTokensWrapper
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from qlora_fsdp.common.errors import AdapterError
from qlora_fsdp.common.module_names import fits_pattern
from qlora_fsdp.config.adapter.adapter_config import PREFIX
from qlora_fsdp.config.schema import LoraConfig, TaskName
from qlora_fsdp.config.settings import show
from qlora_fsdp.data.tokenizer import NO_TOKENS, AddedTokens
from qlora_fsdp.layers.experts.forward import ExpertLora
from qlora_fsdp.layers.lora import LoraEmbedding, LoraLinear
from qlora_fsdp.layers.quantized_layer import QuantizedLayer
from qlora_fsdp.layers.token_rows import ADAPTER
from qlora_fsdp.model.adapters.targets import Targets, find_targets, linear_endings
from qlora_fsdp.model.experts import has_experts
from qlora_fsdp.model.new_tokens import resize_copy, token_rows, use_token_rows

# What PEFT adds to names.
_WRAPPERS = re.compile(r"\.(base_layer|original_module|modules_to_save\.\w+|token_adapter)\b")
_EXPERTS_ALONE = (
    "lora.modules_to_save: {name} has the experts of a mixture, which can have adapters alone. Take it out, and let "
    "lora.target_modules mean them."
)
PEFT_TASKS = {
    TaskName.causal_lm: "CAUSAL_LM",
    TaskName.preference: "CAUSAL_LM",
    TaskName.grpo: "CAUSAL_LM",
    TaskName.distill: "CAUSAL_LM",
    TaskName.reward: "SEQ_CLS",
    TaskName.sequence_classification: "SEQ_CLS",
    TaskName.token_classification: "TOKEN_CLS",
}


def apply_adapters(
    model: PreTrainedModel,
    config: LoraConfig,
    task: TaskName = TaskName.causal_lm,
    tokens: AddedTokens = NO_TOKENS,
    unreached: Collection[str] = (),
) -> peft.PeftModel:
    """Wrap the model in PEFT's. Exactly the adapters and `modules_to_save` require gradients then, all in float32.

    The model is on meta, and is changed in place. Of `tokens` the rows in embeddings and head are trained.

    Raises:
        AdapterError: a name in target_modules, exclude_modules, modules_to_save or a pattern fits no layer (similar
            names are listed), or PEFT refuses the settings.
    """
    targets = find_targets(model, config, unreached)
    _check_by_parameter(config, targets)
    settings = _peft_settings(model, config, targets, task, tokens)
    tables = [model.get_input_embeddings(), model.get_output_embeddings()]  # before PEFT wraps them
    try:
        with warnings.catch_warnings():
            # PEFT asks transformers under the property's old name.
            warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
            # It names an option of its own. Here a tied head that is trained alone is saved, and merged, as untied.
            warnings.filterwarnings("ignore", "Model has `tie_word_embeddings=True`", UserWarning)
            # It does not know the layers that are adapted below. `describe_idle_patterns` does.
            warnings.filterwarnings("ignore", "The following (rank|alpha)_pattern keys did not match", RuntimeWarning)
            wrapped = peft.get_peft_model(model, settings, autocast_adapter_dtype=False, low_cpu_mem_usage=True)
    except ValueError as error:
        if str(error).startswith("Target module "):
            asked = show("lora.target_modules", config.target_modules)
            raise AdapterError(
                f"{asked} fits a layer that is not linear: {str(error).partition(' is not supported')[0]}. "
                f"Set lora.target_modules=all-linear, or some of {linear_endings(model)}."
            ) from error
        raise AdapterError(f"lora: PEFT refuses these settings: {error}") from error
    _adapt_by_parameter(model, targets, settings)
    for name, module in wrapped.named_modules():
        name = name.removeprefix(PREFIX)
        if isinstance(module, LoraEmbedding):
            _check_embedding(name, module, config, tables)
        if isinstance(module, LoraLayer) and not isinstance(module, (LoraLinear, LoraEmbedding, ExpertLora)):
            fix = "Take it out, or train it in full with lora.modules_to_save."
            if config.target_modules == "all-linear":  # for PEFT these include experts, routers and GPT-2's Conv1D
                fix = f"Set lora.target_modules to a list of linear layers; here are {linear_endings(model)}."
            raise AdapterError(
                f"lora.target_modules: {name} is no linear layer ({type(module.get_base_layer()).__name__}). {fix}"
            )
        if isinstance(module, ModulesToSaveWrapper):
            _check_can_be_trained(name, module)
            if module.original_module in tables:
                num_rows = module.original_module.weight.shape[0]
                size = tokens.whole.get(name, max(num_rows, tokens.vocab_size))
                if size != num_rows:
                    resize_copy(module.modules_to_save[ADAPTER], num_rows, size)
            _train_in_fp32(module.modules_to_save[ADAPTER], model.dtype)
        if isinstance(module, TrainableTokensWrapper):
            use_token_rows(module)
        if isinstance(module, (LoraLinear, LoraEmbedding, ExpertLora, DoraLinearLayer)):
            _to_fp32(module)
    return wrapped


def _peft_settings(
    model: PreTrainedModel, config: LoraConfig, targets: Targets, task: TaskName, tokens: AddedTokens
) -> peft.LoraConfig:
    """PEFT's settings of the adapters. PEFT puts our `LoraLinear` where it would put a linear layer of its own."""
    settings = peft.LoraConfig(
        r=config.r,
        lora_alpha=config.lora_alpha,  # type: ignore[arg-type]  # PEFT takes fractions too
        lora_dropout=config.lora_dropout,
        use_rslora=config.use_rslora,
        use_dora=config.use_dora,
        target_modules=targets.target_modules,
        exclude_modules=None if has_experts(model) else config.exclude_modules,
        modules_to_save=config.modules_to_save,
        rank_pattern=dict(config.rank_pattern),
        alpha_pattern=dict(config.alpha_pattern),
        trainable_token_indices=token_rows(model, tokens, config) or None,
        init_lora_weights=True,  # of no effect on meta: `initialize_adapters` does what lora.init_lora_weights says
        task_type=PEFT_TASKS[task],
    )
    settings._register_custom_module({nn.Linear: LoraLinear, nn.Embedding: LoraEmbedding})
    return settings


def _check_by_parameter(config: LoraConfig, targets: Targets) -> None:
    """Refuse what PEFT can't load for adapters that it finds by `target_parameters`.

    Raises:
        AdapterError: dropout, DoRA or an orthogonal start are asked for.
    """
    if not targets.by_parameter:
        return
    where = targets.experts[0].name if targets.experts else targets.linears[0]
    for key, plain in (("lora_dropout", 0.0), ("use_dora", False)):
        value = getattr(config, key)
        if value != plain:
            raise AdapterError(
                f"{show(f'lora.{key}', value)}: PEFT has none for {where}, whose adapter it finds by its parameter. "
                f"Set {show(f'lora.{key}', plain)}, or lora.target_modules to other layers, such as [q_proj,v_proj]."
            )
    if targets.experts and str(config.init_lora_weights).lower() == "orthogonal":
        raise AdapterError(
            f"lora.init_lora_weights=orthogonal is for one matrix, and {where} has one for each expert. Set "
            "lora.init_lora_weights=true, or lora.experts=false."
        )


def _adapt_by_parameter(model: PreTrainedModel, targets: Targets, settings: peft.LoraConfig) -> None:
    """Put adapters on the layers that PEFT is not to find by their modules' names.

    Args:
        model: with the adapters that PEFT has found; changed in place.
        targets: what gets an adapter.
        settings: PEFT's settings, which will be saved with the adapter; changed in place, so that PEFT finds the rest.
    """
    if not targets.by_parameter:
        return
    with torch.device("meta"):  # from the start: no room for adapters is asked for before the plan has seen them
        for name in targets.linears:
            rank, alpha = _rank_and_alpha(settings, name)
            layer = LoraLinear(model.get_submodule(name), ADAPTER, settings, r=rank, lora_alpha=alpha)
            model.set_submodule(name, layer)
        for place in targets.experts:
            rank, alpha = _rank_and_alpha(settings, place.name)
            experts = model.get_submodule(place.module)
            wrapper = ExpertLora(experts, ADAPTER, place.key, settings, r=rank, lora_alpha=alpha)
            model.set_submodule(place.module, wrapper)
    settings.target_parameters = targets.target_parameters
    # PEFT will look for a layer's rank under the name of its parameter.
    for patterns in (_patterns(settings, "rank_pattern"), _patterns(settings, "alpha_pattern")):
        found = {pattern for pattern in patterns if any(fits_pattern(name, pattern) for name in targets.linears)}
        patterns.update({rf"{pattern}\.weight": patterns[pattern] for pattern in found})


def _rank_and_alpha(settings: peft.LoraConfig, name: str) -> tuple[int, int]:
    """The rank and alpha that PEFT's patterns give a layer."""
    ranks, alphas = _patterns(settings, "rank_pattern"), _patterns(settings, "alpha_pattern")
    rank = next((rank for pattern, rank in ranks.items() if fits_pattern(name, pattern)), settings.r)
    return rank, next((alpha for pattern, alpha in alphas.items() if fits_pattern(name, pattern)), settings.lora_alpha)


def _patterns(settings: peft.LoraConfig, name: str) -> dict[str, int]:
    return cast(dict[str, int], getattr(settings, name))


def _check_embedding(name: str, module: LoraEmbedding, config: LoraConfig, tables: list[Any]) -> None:
    """Refuse an adapter of embeddings that would be computed in another way than PEFT's.

    Raises:
        AdapterError: DoRA is asked for, or these are no embeddings of tokens.
    """
    reason = None
    if config.use_dora:
        reason = "can't have DoRA's magnitudes here. Set lora.use_dora=false, or take it out"
    elif module.get_base_layer() is not tables[0]:
        reason = "is not the table of the tokens' embeddings, which alone can have an adapter. Take it out"
    if reason is not None:
        raise AdapterError(f"lora.target_modules: {name} {reason}.")


def _check_can_be_trained(name: str, module: ModulesToSaveWrapper) -> None:
    if any(isinstance(child, QuantizedLayer) for child in module.modules()):
        if has_experts(module):
            raise AdapterError(_EXPERTS_ALONE.format(name=name))
        raise AdapterError(
            f"lora.modules_to_save: {name} is quantized in the checkpoint, and codes can't be trained. "
            "Take it out, or set model.path to the model in full precision."
        )


def check_no_experts_are_trained_whole(model: nn.Module) -> None:
    """Refuse to train experts themselves: their products compute gradients of adapters and inputs alone.

    An adapter that has whole experts can be used all the same.

    Raises:
        AdapterError: `lora.modules_to_save` names some.
    """
    for name, module in model.named_modules():
        if isinstance(module, ModulesToSaveWrapper) and has_experts(module):
            raise AdapterError(_EXPERTS_ALONE.format(name=name.partition(PREFIX)[2]))


def describe_idle_patterns(model: nn.Module, config: LoraConfig) -> list[str]:
    """Notes for the log on patterns for ranks and alphas that fit no layer with an adapter."""
    adapted = []
    for name, module in model.named_modules():
        if isinstance(module, LoraLayer):
            weight = f".{module.parameter_name}" if isinstance(module, ExpertLora) else ""
            adapted.append(_WRAPPERS.sub("", name) + weight)
    return [
        f"lora.{key}: {pattern} fits no layer or weight with an adapter, and has no effect"
        for key in ("rank_pattern", "alpha_pattern")
        for pattern in getattr(config, key)
        if not any(fits_pattern(name, pattern) for name in adapted)
    ]


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
