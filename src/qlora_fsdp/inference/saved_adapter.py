"""An adapter in PEFT's files, maybe from elsewhere: its settings, the checks that it fits, and its weights."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import peft
import torch
from peft.utils.constants import DUMMY_TARGET_MODULES
from safetensors import SafetensorError, safe_open
from torch import Tensor

from qlora_fsdp.common.errors import AdapterError
from qlora_fsdp.common.module_names import is_target, limited_matching
from qlora_fsdp.common.text import plural
from qlora_fsdp.config.commands import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from qlora_fsdp.config.schema import LoraConfig
from qlora_fsdp.data.tokenizer import AddedTokens
from qlora_fsdp.model.adapters import ADAPTER
from qlora_fsdp.runtime.processes import Processes
from qlora_fsdp.runtime.rows import local_rows, local_tensor

MAX_RANK, MAX_ALPHA = 2**16, 1e9  # far more than any adapter has
TOKEN_ROWS = "token_adapter.trainable_tokens_delta"  # how the names of such rows end there
NO_ADAPTER = LoraConfig(r=1, target_modules=DUMMY_TARGET_MODULES)  # PEFT's wrapper around a model without adapters

# Values of lora.init_lora_weights after which the base's weights are what they were. Others change them on loading.
PLAIN_STARTS = (True, False, "gaussian", "orthogonal", "eva")

# Settings of PEFT's LoraConfig that make the forward pass another one than base + B A.
OTHER_PASSES = (
    *("alora_invocation_tokens", "arrow_config", "kasa_config", "layer_replication", "lora_bias", "monteclora_config"),
    "use_bdlora",
)


def read_lora(folder: Path) -> LoraConfig:
    """The settings of a saved adapter, in this project's terms.

    Raises:
        AdapterError: it is not a LoRA adapter, or one of a kind that is not supported.
    """
    try:
        saved = peft.PeftConfig.from_pretrained(str(folder))
    except Exception as error:  # the file may hold anything, and PEFT looks at little of it
        raise AdapterError(f"adapter={folder}: adapter_config.json can't be read: {error}. Copy it again.") from error
    if not isinstance(saved, peft.LoraConfig) or saved.bias != "none":
        raise AdapterError(
            f"adapter={folder} is {saved.peft_type}, bias={getattr(saved, 'bias', None)}; only LoRA "
            "adapters without biases can be used here. Set adapter to one of these."
        )
    if saved.init_lora_weights not in PLAIN_STARTS:
        raise AdapterError(
            f"adapter={folder} has init_lora_weights={saved.init_lora_weights}, which also changes the base's weights "
            "when PEFT loads it; here they stay what they are. Save it as a plain adapter, by PEFT's "
            "save_pretrained(..., path_initial_model_for_weight_conversion=...), and set adapter to that."
        )
    others = [f"{name}={getattr(saved, name)}" for name in OTHER_PASSES if getattr(saved, name, None)]
    if others:
        raise AdapterError(f"adapter={folder} has {', '.join(others)}, which is not here. Set adapter to a plain LoRA.")
    odd = next(_find_odd(saved), None)
    if odd is not None:
        raise AdapterError(f"adapter={folder}: {odd} in adapter_config.json is not what PEFT writes. Copy it again.")
    targets: Any = saved.target_modules
    excluded: Any = saved.exclude_modules
    parameters = set(saved.target_parameters or [])
    if parameters or saved.layers_to_transform is not None or isinstance(excluded, str):  # the file names what is left
        targets, excluded = _adapted(folder, targets or [], parameters), None
    return LoraConfig(
        r=saved.r,
        lora_alpha=saved.lora_alpha,
        target_modules=targets if isinstance(targets, str) else sorted(targets or []),
        experts=bool(parameters),
        exclude_modules=None if excluded is None else sorted(excluded),
        modules_to_save=_names(saved.modules_to_save, saved.task_type),
        use_rslora=saved.use_rslora,
        use_dora=saved.use_dora,
        rank_pattern=_without_parameters(saved.rank_pattern),
        alpha_pattern=_without_parameters(saved.alpha_pattern),
    )


def _find_odd(saved: peft.LoraConfig) -> Iterator[str]:
    """Names of settings that are of another type than PEFT's, or too large for any layer."""
    patterns = {name: getattr(saved, name) or {} for name in ("rank_pattern", "alpha_pattern")}
    yield from (name for name, values in patterns.items() if not isinstance(values, dict))
    ranks = [saved.r, *patterns["rank_pattern"].values()]
    if not all(type(rank) is int and rank <= MAX_RANK for rank in ranks):  # PEFT refuses 0 and less
        yield "r or rank_pattern"
    alphas = [saved.lora_alpha, *patterns["alpha_pattern"].values()]
    if not all(type(alpha) in (int, float) and abs(alpha) <= MAX_ALPHA for alpha in alphas):
        yield "lora_alpha or alpha_pattern"
    for name in ("target_modules", "target_parameters", "exclude_modules", "modules_to_save"):
        value = getattr(saved, name)
        is_list = isinstance(value, (list, set)) and all(isinstance(item, str) for item in value)
        may_be_text = name != "target_parameters"
        if not is_list and value is not None and not (may_be_text and isinstance(value, str)):
            yield name


def read_tokens(folder: Path) -> AddedTokens:
    """The tokens that the adapter has rows for. `read_lora` has found its adapter_config.json readable before.

    Raises:
        AdapterError: what names the tokens is no list of ids, or the adapter's file has another number of rows.
    """
    saved = json.loads((folder / ADAPTER_CONFIG).read_text(encoding="utf-8")).get("trainable_token_indices")
    if not saved:
        return AddedTokens()
    ids = next(iter(saved.values())) if isinstance(saved, dict) else saved
    stored = {shape[0] for key, shape in _read_shapes(folder).items() if key.endswith(TOKEN_ROWS) and shape}
    if not isinstance(ids, list) or not all(type(i) is int and 0 <= i < 2**31 for i in ids) or stored != {len(ids)}:
        raise AdapterError(
            f"adapter={folder}: trainable_token_indices in adapter_config.json are not the tokens that its file "
            "has rows for. Copy it again."
        )
    return AddedTokens(frozenset(ids), vocab_size=max(ids) + 1, with_head=isinstance(saved, dict) and len(saved) > 1)


def check_adapter(model: peft.PeftModel, folder: Path) -> None:
    """Compare a saved adapter with the model, which may be on meta, before anything large is read.

    Raises:
        AdapterError: its file is damaged, or tensors are missing, left over or of another shape; all are listed.
    """
    shapes = {key: tuple(param.shape) for key, param in _adapter_parameters(model).items()}
    found = _read_shapes(folder)
    problems = [f"{key} is missing" for key in sorted(shapes.keys() - found.keys())]
    problems += [f"{key} is not in the model" for key in sorted(found.keys() - shapes.keys())]
    problems += [
        f"{key} is {list(found[key])}, in the model {list(shapes[key])}"
        for key in sorted(found.keys() & shapes.keys())
        if found[key] != shapes[key]
    ]
    if problems:
        shown = "\n".join(f"  - {problem}" for problem in problems[:10])
        raise AdapterError(
            f"adapter={folder} does not fit the model ({len(problems)} tensors). Set model.path to the model that it "
            f"was trained on:\n{shown}"
        )


def check_values(folder: Path, processes: Processes) -> None:
    """Look for NaN and infinite values in an adapter that passed `check_adapter`. Each rank reads its share.

    Raises:
        AdapterError: there are some. Every rank raises it.
    """
    found = None
    with safe_open(folder / ADAPTER_WEIGHTS, "pt") as file:
        for key in sorted(file.keys())[processes.rank :: processes.num_ranks]:
            num_bad = int((~torch.isfinite(file.get_tensor(key))).sum())
            if num_bad > 0:
                found = (
                    f"adapter={folder}: {key} has {plural(num_bad, 'NaN or infinite value')}. Set adapter to "
                    "an intact copy, or to the adapter of an earlier checkpoint."
                )
                break
    if (text := processes.first_error(found)) is not None:
        raise AdapterError(text)


@torch.no_grad()
def load_adapter(model: peft.PeftModel, folder: Path) -> None:
    """Copy an adapter that passed `check_adapter` into the model. If that is sharded, each rank copies its own rows."""
    with safe_open(folder / ADAPTER_WEIGHTS, "pt") as file:
        for key, param in _adapter_parameters(model).items():
            first, last = local_rows(param)
            local_tensor(param).copy_(file.get_slice(key)[first:last])


def _adapted(folder: Path, modules: Any, parameters: Collection[str]) -> list[str]:
    """Full names of the linear layers and of the experts' weights that an adapter's file has matrices for.

    PEFT names the matrices of a linear layer after the layer, whether `target_modules` or `target_parameters` name it,
    and those of a weight of experts after the experts' module: those of a second weight there follow `base_layer`.

    Args:
        folder: of the adapter.
        modules: its `target_modules`.
        parameters: its `target_parameters`: parameters' names, or ends of names that are cut at a dot.
    """
    ending = ".lora_A.weight"
    stored = [key.removeprefix("base_model.model.") for key in _read_shapes(folder) if key.endswith(ending)]
    names = sorted({re.sub(r"(\.base_layer)*$", "", key.removesuffix(ending)) for key in stored})
    keys = {name.rpartition(".")[2] for name in parameters} - {"weight"}

    def is_parameter(name: str) -> bool:
        parts = name.split(".")
        return any(".".join(parts[start:]) in parameters for start in range(len(parts)))

    with limited_matching(f"adapter={folder}: target_modules"):
        linears = [name for name in names if not keys or is_target(name, modules) or is_parameter(f"{name}.weight")]
    experts = [f"{name}.{key}" for name in set(names) - set(linears) for key in keys]
    return sorted([*linears, *filter(is_parameter, experts)])


def _without_parameters(patterns: dict[str, Any] | None) -> dict[str, Any]:
    """`rank_pattern` or `alpha_pattern` by the names of layers, for which PEFT may have those of their parameters."""
    return {re.sub(r"\\?\.weight$", "", pattern): value for pattern, value in (patterns or {}).items()}


def _names(modules_to_save: Any, task_type: Any) -> list[str] | None:
    """`modules_to_save` without the usual names of a classifier's head.

    PEFT adds these names when it saves, whether the model has such modules or not, and again when it wraps the model.
    """
    if modules_to_save is None:
        return None
    usual = {"score", "classifier"} if str(task_type).endswith(("SEQ_CLS", "TOKEN_CLS")) else set()
    return sorted(set(modules_to_save) - usual) or None


def _read_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    try:
        with safe_open(folder / ADAPTER_WEIGHTS, "pt") as file:
            return {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise AdapterError(f"adapter={folder}: its weights can't be read: {error}. Copy it again.") from error


def _adapter_parameters(model: peft.PeftModel) -> dict[str, Tensor]:
    """The trained parameters by their keys in an adapter's file."""
    trained = {name: param for name, param in model.named_parameters() if param.requires_grad}
    params: dict[str, Tensor] = peft.get_peft_model_state_dict(
        model, state_dict=trained, adapter_name=ADAPTER, save_embedding_layers=False
    )
    return params
