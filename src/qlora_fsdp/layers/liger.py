"""Liger's fused kernels (arXiv:2410.10989) for norms, rotary embeddings and activations; and what computes the loss."""

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PretrainedConfig

from qlora_fsdp.common.errors import ConfigError, Problem
from qlora_fsdp.common.replaced import replaced
from qlora_fsdp.config.schema import Kernel, KernelsConfig
from qlora_fsdp.layers.experts.forward import mentions_experts
from qlora_fsdp.layers.head_loss import LossKernel

# Parts of a layer, and what Liger calls its kernels for them.
LIGER_NAMES = {"rms_norm": ("rms_norm",), "rotary": ("rope",), "glu": ("swiglu", "geglu")}
LIGER_LOSS = "fused_linear_cross_entropy"  # `head_loss.py` calls it, so that no model is patched for it
MODELS = "transformers.models."
_stock: dict[tuple[Any, str], Any] = {}  # what was patched in this process: by owner and name, what it was before


def use_fused_kernels(config: KernelsConfig, model: PretrainedConfig, device: torch.device) -> list[str]:
    """Patch transformers' classes of a family with Liger's kernels, by Liger's own function for the family.

    This changes models that are built afterwards, in this process, but for those in `stock_models()`.

    Args:
        config: the choices; `auto` takes Liger's where it is available, but for the loss.
        model: the model's config.
        device: where the model runs.

    Returns:
        The parts whose kernels are Liger's: `rms_norm`, `rotary` and `glu` of a layer, and `cross_entropy`.

    Raises:
        ConfigError: Liger's kernels were asked for, and there are none here.
    """
    model_type = model.get_text_config().model_type
    reason, options = _liger_options(model_type, device)
    parts = [part for part, names in LIGER_NAMES.items() if options.intersection(names)]
    if "glu" in parts and mentions_experts(model):
        parts.remove("glu")  # it also replaces the experts, by kernels that take no quantized weights
    asked = []
    if config.of_layers is Kernel.liger:
        asked.append(Problem("kernels.liger=true", "", "Set kernels.liger=auto."))
    if config.cross_entropy is Kernel.liger:
        asked.append(Problem("kernels.cross_entropy=liger", "", "Set kernels.cross_entropy=auto."))
    lacking = [each for each in asked if not (parts if each.what == "kernels.liger=true" else LIGER_LOSS in options)]
    if lacking:
        why = f"can't be used: {reason or f'Liger has none for {model_type}'}."
        raise ConfigError([replace(each, reason=why) for each in lacking])
    chosen = [] if config.of_layers is Kernel.torch else parts
    if config.cross_entropy is Kernel.liger:
        chosen = [*chosen, "cross_entropy"]
    if not chosen:
        return []
    on = {name for part in chosen for name in LIGER_NAMES.get(part, ())}
    error = _patch(model.get_text_config(), {name: name in on for name in options})
    if error is None:
        return chosen
    if asked:
        why = f"can't be used: Liger's own function for {model_type} fails with this transformers: {error}."
        raise ConfigError([replace(each, reason=why) for each in asked])
    return []


def _patch(config: PretrainedConfig, switches: dict[str, bool]) -> Exception | None:
    """Call Liger's function for a family, and remember what was stock. If it fails, nothing is changed."""
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

    import_module(type(config).__module__.replace("configuration_", "modeling_"))
    before = _models_attributes()
    failure = None
    try:
        MODEL_TYPE_TO_APPLY_LIGER_FN[config.model_type](**switches)
    except Exception as error:  # it imports and patches what a version of transformers may not have
        failure = error
    for (owner, name), value in before.items():
        if vars(owner)[name] is not value:
            if failure is None:
                _stock.setdefault((owner, name), value)
            else:
                setattr(owner, name, value)
    return failure


@contextmanager
def stock_models() -> Iterator[None]:
    """While it lasts, transformers' classes are what they were before `use_fused_kernels` changed any."""
    with replaced([(owner, name, value) for (owner, name), value in _stock.items()]):
        yield


@contextmanager
def plain_activations() -> Iterator[None]:
    """While it lasts, plain torch computes Liger's functions for gated activations, whose kernels run on GPUs alone.

    So a module of Liger's can be run anywhere as it is, whatever arguments its constructor and that of the class in
    whose place it stands may take.
    """
    if "liger_kernel" not in sys.modules:
        yield
        return
    from liger_kernel.ops import LigerGELUMulFunction, LigerSiLUMulFunction

    activations = [
        (LigerSiLUMulFunction, "apply", staticmethod(_silu_and_multiply)),
        (LigerGELUMulFunction, "apply", staticmethod(_gelu_and_multiply)),
    ]
    with replaced(activations):
        yield


def _silu_and_multiply(gate: Tensor, up: Tensor, gate_factor: float = 1.0, down_factor: float = 1.0) -> Tensor:
    return F.silu(gate * gate_factor) * up * down_factor


def _gelu_and_multiply(gate: Tensor, up: Tensor) -> Tensor:
    return F.gelu(gate, approximate="tanh") * up


def stock_classes(kind: type) -> list[Any]:
    """Transformers' classes in whose place a class of Liger's stands in this process; none for other classes."""
    return [value for (owner, name), value in _stock.items() if vars(owner)[name] is kind]


def _models_attributes() -> dict[tuple[Any, str], Any]:
    """All attributes of transformers' imported model files and of their classes, by owner and name."""
    owners: set[Any] = set()
    for name, module in list(sys.modules.items()):
        if not name.startswith(MODELS) or ".modeling_" not in module.__name__:
            continue
        owners.add(module)
        for value in vars(module).values():
            if inspect.isclass(value) and value.__module__.startswith(MODELS):
                owners.add(value)
    return {(owner, name): value for owner in owners for name, value in vars(owner).items()}


def choose_loss_kernel(choice: Kernel, device: torch.device) -> LossKernel:
    """Choose the kernel for a frozen head's loss: as `kernels.cross_entropy` says; `auto` is ours on a GPU."""
    if choice is Kernel.liger:
        return "liger"
    has_triton = device.type == "cuda" and find_spec("triton") is not None
    return "triton" if choice is Kernel.auto and has_triton else "torch"


def _liger_options(model_type: str, device: torch.device) -> tuple[str | None, set[str]]:
    """Why Liger can't be used, or None if it can; and the names of the kernels it has for this family."""
    if device.type != "cuda":
        return "it needs a GPU", set()
    if find_spec("liger_kernel") is None:
        return "liger-kernel is not installed: pip install qlora-fsdp[gpu]", set()
    if find_spec("triton") is None:
        return "Triton is not installed: pip install triton", set()
    logging.getLogger("liger_kernel").setLevel(logging.ERROR)  # it warns of missing back ends for other chips
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

    if model_type not in MODEL_TYPE_TO_APPLY_LIGER_FN:
        return f"Liger does not know model_type={model_type}", set()
    switches = inspect.signature(MODEL_TYPE_TO_APPLY_LIGER_FN[model_type]).parameters
    # What is off by default in a family is slower there, or raises NotImplementedError (glm4's `rope`).
    return None, {name for name, switch in switches.items() if name != "model" and switch.default is not False}
