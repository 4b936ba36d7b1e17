"""Find what gets an adapter: linear layers, and the weights of fused experts.

`all-linear` means every linear layer that an adapter can be trained on. Left out are those that no gradient reaches
(model/parts.py), those for which PEFT has no adapters, and those whose class computes more than a product
(model/swap_layers.py).

In a model without experts PEFT itself finds the layers that `lora.target_modules` name. In a model with experts or a
router this module finds them, for two reasons. First, PEFT takes names such as `gate_proj` for those that experts had
before transformers fused them, and replaces them in the settings (`_convert_peft_config_moe`), even if the model has
other layers of these names. Second, it would adapt the router. So PEFT gets such layers by the names of their
parameters, in `target_parameters`, which it leaves as they are. If `all-linear` leaves layers out, PEFT gets a list of
the others.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import peft
from peft.tuners.tuners_utils import _check_lora_target_modules_mamba, _find_minimal_target_modules
from peft.utils import transformers_weight_conversion as peft_conversion
from peft.utils.constants import DUMMY_TARGET_MODULES
from torch import nn
from transformers import PreTrainedModel

from qlora_fsdp.common.errors import AdapterError
from qlora_fsdp.common.module_names import fits_pattern, is_target, match_all, try_matching
from qlora_fsdp.config.schema import LoraConfig
from qlora_fsdp.model.experts import ExpertWeightPlace, expert_weights, find_routers
from qlora_fsdp.model.parts import find_decoder, general_name, is_for_another_place
from qlora_fsdp.model.swap_layers import computes_linear

WITHOUT_EXPERTS = "or set lora.experts=false"
MAX_LISTED = 10  # names that fit nothing


@dataclass(frozen=True)
class Targets:
    """The layers and weights that get an adapter.

    Attributes:
        target_modules: the linear layers that PEFT finds by their names: PEFT's setting of this name.
        linears: full names of linear layers that PEFT would take for experts.
        experts: weights of fused experts.
        target_parameters: `linears` and `experts` as PEFT names them when it loads the adapter.
    """

    target_modules: Any
    linears: list[str] = field(default_factory=list)
    experts: list[ExpertWeightPlace] = field(default_factory=list)
    target_parameters: list[str] = field(default_factory=list)

    @property
    def by_parameter(self) -> bool:
        """Whether PEFT loads some of the adapters through `target_parameters`."""
        return bool(self.linears or self.experts)


@dataclass(frozen=True)
class LeftOut:
    """Linear layers that `all-linear` leaves out, by their full names.

    Attributes:
        unreached: no gradient reaches them.
        refused: PEFT has no adapters for them.
        other: their class computes something else than the product with their weight.
    """

    unreached: frozenset[str] = frozenset()
    refused: frozenset[str] = frozenset()
    other: frozenset[str] = frozenset()

    @property
    def names(self) -> frozenset[str]:
        """All of them."""
        return self.unreached | self.refused | self.other


def find_left_out(model: PreTrainedModel, config: LoraConfig, unreached: Collection[str]) -> LeftOut:
    """The linear layers of a model without adapters that `all-linear` leaves out; none with other settings."""
    if config.target_modules != "all-linear":
        return LeftOut()
    modules = dict(model.named_modules())
    not_reached = set()
    refused = set()
    other = set()
    for name in _all_linear(model, config) - find_routers(model):
        if _is_excluded(name, config):
            continue
        if general_name(model, name) in unreached or is_for_another_place(model, name):
            not_reached.add(name)
        if not _takes_adapter(model, name.rpartition(".")[2]):
            refused.add(name)
        layer = modules.get(name)
        if isinstance(layer, nn.Linear) and not computes_linear(layer):
            other.add(name)
    return LeftOut(frozenset(not_reached), frozenset(refused), frozenset(other))


def describe_left_out(model: PreTrainedModel, left_out: LeftOut) -> list[str]:
    """Notes for the log, which name the layers that `all-linear` leaves out."""
    why = {
        "that no gradient reaches": left_out.unreached,
        "that PEFT refuses to adapt": left_out.refused,
        "whose classes compute something of their own": left_out.other,
    }
    return [
        f"lora.target_modules=all-linear leaves out linear layers {reason}: "
        + ", ".join(sorted({general_name(model, name) for name in names}))
        for reason, names in why.items()
        if names
    ]


def find_targets(model: PreTrainedModel, config: LoraConfig, unreached: Collection[str] = ()) -> Targets:
    """Find the layers and weights that the settings adapt, in a model without adapters.

    Raises:
        AdapterError: a name in the settings fits nothing (similar names are listed), or fits a router or another
            module that can't have an adapter.
    """
    places, routers = list(expert_weights(model)), find_routers(model)
    _check_names(model, config, places)
    left_out = find_left_out(model, config, unreached).names
    if not (places or routers or left_out) or config.target_modules == DUMMY_TARGET_MODULES:
        return Targets(_targets_of_peft(model, config))
    modules = dict(model.named_modules())
    is_named = _named_by(model, config, left_out)
    refused = sorted(name for name in routers if config.target_modules != "all-linear" and is_named(name))
    if refused:
        raise AdapterError(
            f"lora.target_modules: {refused[0]} is a router ({type(modules[refused[0]]).__name__}). Routers stay as "
            "they are, in full precision. Take it out."
        )
    experts = [place for place in places if config.experts and _is_expert_named(place, is_named)]
    inside = tuple(f"{place.module}." for place in places)
    named = [n for n in modules if is_named(n) and n not in routers and not f"{n}.".startswith(inside)]
    linears = [name for name in named if isinstance(modules[name], nn.Linear)]
    embeddings = [name for name in named if isinstance(modules[name], nn.Embedding)]
    others = [name for name in named if not isinstance(modules[name], (nn.Linear, nn.Embedding))]
    if others:
        raise AdapterError(
            f"lora.target_modules: {others[0]} is no linear layer ({type(modules[others[0]]).__name__}). "
            f"Set lora.target_modules=all-linear, or some of {linear_endings(model)}."
        )
    former = _remapped_names(model)
    taken = [name for name in linears if name.rpartition(".")[2] in former]
    rest = [name for name in [*linears, *embeddings] if name not in set(taken)]
    parameters = [name for name, _ in model.named_parameters()]  # PEFT asks each of them (Inkling's shared experts)
    return Targets(
        _shortest(rest, modules) if rest else DUMMY_TARGET_MODULES,
        taken,
        experts,
        [f"{name}.weight" for name in _shortest(taken, modules)]
        + _shortest([place.name for place in experts], [*parameters, *(place.name for place in places)]),
    )


def linear_endings(model: nn.Module) -> str:
    """The last parts of the names of all linear layers, adapted or not, for messages."""
    linears = [name for name, module in model.named_modules() if isinstance(module, nn.Linear) and "lora_" not in name]
    return ", ".join(sorted({name.removesuffix(".base_layer").rpartition(".")[2] for name in linears}))


def _named_by(model: PreTrainedModel, config: LoraConfig, left_out: Collection[str]) -> Callable[[str], bool]:
    """Whether the settings name a module or weight, by its full name."""
    everything = _all_linear(model, config) - set(left_out)

    def is_named(name: str) -> bool:
        if _is_excluded(name, config):
            return False
        return name in everything if config.target_modules == "all-linear" else is_target(name, config.target_modules)

    return is_named


def _is_excluded(name: str, config: LoraConfig) -> bool:
    return config.exclude_modules is not None and is_target(name, config.exclude_modules)


def _all_linear(model: PreTrainedModel, config: LoraConfig) -> set[str]:
    """All linear layers and weights of experts of the text decoder, but for heads and what is trained in full."""
    head = model.get_output_embeddings()
    names = set()
    in_full = []  # names of modules that are trained in full, with a dot behind
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and module is not head:
            names.add(name)
        if is_target(name, config.modules_to_save or []):
            in_full.append(f"{name}.")
    names.update(_names_of_experts(expert_weights(model)))

    decoder = find_decoder(model)
    prefix = "" if decoder is None else f"{decoder[0]}."
    return {name for name in names if name.startswith(prefix) and not f"{name}.".startswith(tuple(in_full))}


def _takes_adapter(model: PreTrainedModel, name: str) -> bool:
    """Whether PEFT adapts layers of this name in this model; it has a list of those that Mamba's kernels take apart."""
    try:
        _check_lora_target_modules_mamba(peft.LoraConfig(), model, name)
    except ValueError:
        return False
    return True


def _is_expert_named(place: ExpertWeightPlace, is_named: Callable[[str], bool]) -> bool:
    """Whether the settings name a weight of fused experts: by its name, its module's, or those of its former parts.

    Raises:
        AdapterError: they name the gate's part of a weight but not the other, or the other way round.
    """
    if is_named(place.name) or is_named(place.module):
        return True
    parts = [name for name in place.former_names() if is_named(name)]
    if len(parts) == 1 and place.key == "gate_up_proj":
        found = parts[0].rpartition(".")[2]
        other = {"gate_proj": "up_proj", "up_proj": "gate_proj", "w1": "w3", "w3": "w1"}[found]
        raise AdapterError(
            f"lora.target_modules: {found} without {other} fits experts whose two are one weight, {place.name}. "
            f"Name both, {WITHOUT_EXPERTS}."
        )
    return bool(parts)


def _remapped_names(model: PreTrainedModel) -> set[str]:
    """Names of layers that PEFT replaces by those of fused experts, for this model."""
    patterns: dict[str, str] = vars(peft_conversion)["_MODEL_TO_CONVERSION_PATTERN"]
    return set(peft_conversion._MOE_TARGET_MODULE_MAPPING.get(patterns.get(str(model.config.model_type), ""), {}))


def _shortest(names: Sequence[str], all_names: Iterable[str]) -> list[str]:
    """The fewest ends of names that name these and no others."""
    if not names:
        return []
    others = [name for name in all_names if name not in set(names) and name]
    return sorted(_find_minimal_target_modules(list(names), others))


def _targets_of_peft(model: PreTrainedModel, config: LoraConfig) -> Any:
    """`target_modules` as PEFT is to see it.

    For a multimodal model "all-linear" is limited to the text decoder: the towers have layers of the same names.
    """
    found = find_decoder(model)
    if found is None or config.target_modules != "all-linear":
        return config.target_modules
    name, decoder = found
    endings = sorted({n.rsplit(".", 1)[-1] for n, module in decoder.named_modules() if isinstance(module, nn.Linear)})
    return rf"{re.escape(name)}\..*\.({'|'.join(endings)})"


def _check_names(model: nn.Module, config: LoraConfig, places: Sequence[ExpertWeightPlace]) -> None:
    names = [name for name, module in model.named_modules() if name]
    names += _names_of_experts(places)
    for key in ("target_modules", "exclude_modules", "rank_pattern", "alpha_pattern"):
        wanted = getattr(config, key)
        if isinstance(wanted, (str, Mapping)):
            try_matching(f"lora.{key}", match_all, names, wanted if isinstance(wanted, str) else list(wanted))
    problems = list(_names_that_fit_nothing(model, config, names))
    if problems:  # a saved adapter names every layer of its own base
        lines = problems[:MAX_LISTED]
        if len(problems) > MAX_LISTED:
            lines.append(f"And {len(problems) - MAX_LISTED} more.")
        raise AdapterError("\n".join(lines))


def _names_of_experts(places: Iterable[ExpertWeightPlace]) -> Iterator[str]:
    """All names by which settings may name these weights: today's, and those of earlier versions."""
    for place in places:
        yield place.name
        yield from place.former_names()


def _names_that_fit_nothing(model: nn.Module, config: LoraConfig, names: Sequence[str]) -> Iterator[str]:
    endings = {name.rsplit(".", 1)[-1] for name in names}
    for key in ("target_modules", "exclude_modules", "modules_to_save"):
        wanted = getattr(config, key)
        if wanted in (None, "all-linear", DUMMY_TARGET_MODULES):
            continue
        if isinstance(wanted, str):
            if not any(is_target(name, wanted) for name in names):
                close = difflib.get_close_matches(wanted, sorted(endings), n=3, cutoff=0.5)
                hint = "Set a list of names, or correct it: it must match a module's whole name."
                if close:
                    hint = f"Did you mean lora.{key}=[{close[0]}]?"
                yield (
                    f"lora.{key}={wanted} is a regular expression that fits no module of {type(model).__name__}. {hint}"
                )
            continue
        for target in wanted:
            if not any(is_target(name, [target]) for name in names):
                close = difflib.get_close_matches(target, sorted(endings), n=3, cutoff=0.5)
                hint = f"Close: {', '.join(close)}." if close else f"Its linear layers: {linear_endings(model)}."
                yield f"lora.{key}: {target} fits no module of {type(model).__name__}. {hint}"
    for key in ("rank_pattern", "alpha_pattern"):  # PEFT would warn, and use r and lora_alpha
        for pattern in getattr(config, key):
            if not any(fits_pattern(name, pattern) for name in names):
                yield f"lora.{key}: {pattern} fits no module of {type(model).__name__}. Correct it, or leave it out."
