"""The settings of a saved LoRA adapter, as PEFT's adapter_config.json has them, in this project's terms.

Anybody may have written the file. Every value that is used is checked here, and nothing else is looked at. Of the
adapter's weights only the header of their file is read: the names and shapes of its tensors. Imports no torch, so that
a command line that contradicts an adapter is refused at once.

Where a base was resized for new tokens, PEFT saves whole tables of embeddings and head beside the adapter, trained or
not, because the base's files have other numbers of rows.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from qlora_fsdp.common.errors import AdapterError, Problem
from qlora_fsdp.common.foreign_files import MAX_SMALL_BYTES, find_outside, read_json_object
from qlora_fsdp.common.hub import is_repo_name
from qlora_fsdp.common.module_names import is_target, match_all, try_matching
from qlora_fsdp.common.text import shorten
from qlora_fsdp.config.schema import LoraConfig
from qlora_fsdp.config.settings import show

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"  # the files of PEFT's
SETTINGS_FILE = "qlora_fsdp.yaml"  # what training leaves beside them: how the base was built
# What tokenizers of transformers save beside them.
TOKENIZER_TEXTS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "chat_template.jinja",
)
TOKENIZER_MODELS = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model")
MAX_RANK, MAX_ALPHA = 2**16, 1e9  # far more than any adapter has

# Values of init_lora_weights after which the base's weights are what they were. Others change them on loading.
PLAIN_STARTS = (True, False, "gaussian", "orthogonal", "eva")

# Settings of PEFT's LoraConfig that make the forward pass another one than base + B A.
OTHER_PASSES = (
    "alora_invocation_tokens",
    "arrow_config",
    "kasa_config",
    "layer_replication",
    "lora_bias",
    "monteclora_config",
    "use_bdlora",
)
# What PEFT takes where the file says nothing.
DEFAULTS: dict[str, Any] = {"r": 8, "lora_alpha": 8, "lora_dropout": 0.0, "bias": "none", "init_lora_weights": True}


TOKEN_ROWS = "token_adapter.trainable_tokens_delta"  # how the names of rows end that are trained alone
TABLE_OF_ROWS = "token_adapter.base_layer.weight"  # and the name of their table, where it is saved
PREFIX, WEIGHT = "base_model.model.", ".weight"  # how keys begin in PEFT's files, and names of weights end
_COPIES = re.compile(r"\.(original_module|modules_to_save)\.")  # of what PEFT also saves under the module's own name
_PARTS = ("lora_", ".base_layer.", ".token_adapter.", ".original_module.", ".modules_to_save.")
Shapes = Mapping[str, tuple[int, ...]]  # of the tensors in an adapter's file, by their keys


def adapter_problems(adapter: str, setting: str = "adapter") -> list[Problem]:
    """Returns why a folder can't be used as an adapter's: its files are not there, or one leads out of it."""
    folder = Path(adapter).expanduser()
    missing = [name for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS) if not (folder / name).is_file()]
    if not missing:
        reason, fix = "leads to a file outside the adapter's folder.", "Remove it, or copy that file there yourself."
        return [Problem(str(file), reason, fix) for file in find_outside(folder)]
    reason = f"no {' and no '.join(missing)}" if folder.exists() else "there is no such folder"
    return [Problem(show(setting, adapter), f"holds no adapter: {reason}.", _advise(folder, adapter, setting), setting)]


def _advise(folder: Path, adapter: str, setting: str) -> str:
    """What to do where a folder holds no adapter."""
    if (folder / "adapter" / ADAPTER_CONFIG).is_file():
        return f"Set {setting}={adapter}/adapter."
    if near := _find_near(folder):
        return f"Did you mean {setting}={near}?"
    if (folder.parent / "checkpoints").is_dir():
        return "Its run has not ended: start it with the same command, and it goes on from its newest checkpoint."
    if is_repo_name(adapter) and not folder.exists():
        return f"If it is on the hub, run hf download {adapter} --local-dir FOLDER, and set {setting}=FOLDER."
    return f"Set {setting} to the folder that training wrote, such as outputs/run/adapter."


def _find_near(folder: Path) -> str | None:
    """An adapter's folder whose name is near to that of a folder that is not there; None: there is none."""
    if folder.exists() or not folder.parent.is_dir():
        return None
    there = [path.name for path in folder.parent.iterdir() if (path / ADAPTER_CONFIG).is_file()]
    near = difflib.get_close_matches(folder.name, there, n=1)
    return str(folder.parent / near[0]) if near else None


def read_lora(folder: Path, setting: str = "adapter") -> LoraConfig:
    """The settings of a saved adapter.

    Raises:
        AdapterError: it is not a LoRA adapter, or one of a kind that is not supported, or the file is damaged.
    """
    what = f"{setting}={folder}"
    saved = DEFAULTS | read_adapter_config(folder, setting)
    if saved.get("peft_type") != "LORA" or saved["bias"] != "none":
        kind = shorten(f"{saved.get('peft_type')}, bias={saved['bias']}")
        raise AdapterError(
            f"{what} is {kind}; only LoRA adapters without biases can be used here. Set {setting} to one of these."
        )
    if saved["init_lora_weights"] not in PLAIN_STARTS:
        raise AdapterError(
            f"{what} has init_lora_weights={shorten(str(saved['init_lora_weights']))}, which also changes the base's "
            "weights when PEFT loads it; here they stay what they are. Save it as a plain adapter, by PEFT's "
            f"save_pretrained(..., path_initial_model_for_weight_conversion=...), and set {setting} to that."
        )
    others = [f"{name}={shorten(str(saved[name]))}" for name in OTHER_PASSES if saved.get(name)]
    if others:
        raise AdapterError(f"{what} has {', '.join(others)}, which is not here. Set {setting} to a plain LoRA.")
    odd = next(_find_odd(saved), None)
    if odd is not None:
        raise AdapterError(f"{what}: {odd} in adapter_config.json is not what PEFT writes. Copy it again.")
    shapes = read_shapes(folder, setting)
    targets, excluded = saved.get("target_modules") or [], saved.get("exclude_modules")
    parameters = set(saved.get("target_parameters") or [])
    if parameters or saved.get("layers_to_transform") is not None or isinstance(excluded, str):
        targets, excluded = _adapted(shapes, what, targets, parameters), None  # the file names what is left
    return LoraConfig(
        r=saved["r"],
        lora_alpha=saved["lora_alpha"],
        lora_dropout=saved["lora_dropout"],
        target_modules=targets if isinstance(targets, str) else sorted(set(targets)),
        experts=bool(parameters),
        exclude_modules=None if excluded is None else sorted(set(excluded)),
        modules_to_save=_saved_modules(saved, shapes),
        use_rslora=saved.get("use_rslora") or False,
        use_dora=saved.get("use_dora") or False,
        rank_pattern=_without_parameters(saved.get("rank_pattern")),
        alpha_pattern=_without_parameters(saved.get("alpha_pattern")),
    )


def read_adapter_config(folder: Path, setting: str) -> dict[str, Any]:
    """The values of an adapter_config.json, unchecked.

    Raises:
        AdapterError: it can't be read, or is no JSON object.
    """
    try:
        return read_json_object(folder / ADAPTER_CONFIG, MAX_SMALL_BYTES)
    except (OSError, ValueError) as error:
        reason = shorten(str(error), 400)
        raise AdapterError(
            f"{setting}={folder}: adapter_config.json can't be read: {reason}. Copy it again."
        ) from error


def read_shapes(folder: Path, setting: str) -> dict[str, tuple[int, ...]]:
    """Shapes of an adapter's tensors by their keys, from the header of its file.

    Raises:
        AdapterError: the file can't be read.
    """
    try:
        with safe_open(folder / ADAPTER_WEIGHTS, "np") as file:  # "np" so that torch is not imported
            return {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise AdapterError(f"{setting}={folder}: its weights can't be read: {error}. Copy it again.") from error


def read_untrained(folder: Path, setting: str) -> list[str]:
    """Names of the modules whose weights an adapter has as a whole, although it did not train them as a whole.

    Raises:
        AdapterError: its files can't be read.
    """
    return untrained_tables(read_shapes(folder, setting), _trained_modules(read_adapter_config(folder, setting)))


def _find_odd(saved: Mapping[str, Any]) -> Iterator[str]:
    """Names of settings that are of another type than PEFT's, or too large for any layer."""
    patterns = {name: saved.get(name) or {} for name in ("rank_pattern", "alpha_pattern")}
    odd = [name for name, values in patterns.items() if not isinstance(values, dict)]
    yield from odd
    if odd:
        return
    ranks = [saved["r"], *patterns["rank_pattern"].values()]
    if not all(type(rank) is int and 1 <= rank <= MAX_RANK for rank in ranks):
        yield "r or rank_pattern"
    alphas = [saved["lora_alpha"], *patterns["alpha_pattern"].values()]
    if not all(type(alpha) in (int, float) and abs(alpha) <= MAX_ALPHA for alpha in alphas):
        yield "lora_alpha or alpha_pattern"
    if type(saved["lora_dropout"]) not in (int, float) or not 0 <= saved["lora_dropout"] < 1:
        yield "lora_dropout"
    yield from (name for name in ("use_rslora", "use_dora") if saved.get(name) not in (None, False, True))
    for name in ("target_modules", "target_parameters", "exclude_modules", "modules_to_save"):
        value = saved.get(name)
        is_list = isinstance(value, list) and all(isinstance(item, str) for item in value)
        may_be_text = name in ("target_modules", "exclude_modules")
        if not is_list and value is not None and not (may_be_text and isinstance(value, str)):
            yield name


def _adapted(shapes: Mapping[str, Any], what: str, modules: Any, parameters: Collection[str]) -> list[str]:
    """Full names of the linear layers and of the experts' weights that an adapter's file has matrices for.

    PEFT names the matrices of a linear layer after the layer, whether `target_modules` or `target_parameters` name it,
    and those of a weight of experts after the experts' module: those of a second weight there follow `base_layer`.

    Args:
        shapes: of the tensors of its file, by their keys.
        what: names it in messages.
        modules: its `target_modules`.
        parameters: its `target_parameters`: parameters' names, or ends of names that are cut at a dot.
    """
    stored = [key.removeprefix(PREFIX) for key in shapes]
    found = [re.fullmatch(r"(.*?)(\.base_layer)*\.lora_(A\.weight|embedding_A)", key) for key in stored]
    names = sorted({match[1] for match in found if match is not None})
    keys = {name.rpartition(".")[2] for name in parameters} - {"weight"}

    def is_parameter(name: str) -> bool:
        parts = name.split(".")
        return any(".".join(parts[start:]) in parameters for start in range(len(parts)))

    if keys and isinstance(modules, str):
        try_matching(f"{what}: target_modules", match_all, names, modules)
    linears = [name for name in names if not keys or is_target(name, modules) or is_parameter(f"{name}.weight")]
    experts = [f"{name}.{key}" for name in set(names) - set(linears) for key in keys]
    return sorted([*linears, *filter(is_parameter, experts)])


def _without_parameters(patterns: dict[str, Any] | None) -> dict[str, Any]:
    """`rank_pattern` or `alpha_pattern` by the names of layers, for which PEFT may have those of their parameters."""
    return {re.sub(r"\\?\.weight$", "", pattern): value for pattern, value in (patterns or {}).items()}


def _saved_modules(saved: Mapping[str, Any], shapes: Mapping[str, Any]) -> list[str] | None:
    """`modules_to_save` without the usual names of a classifier's head, and with all tables that the file has whole.

    PEFT adds the head's names when it saves, whether the model has such modules or not, and again when it wraps the
    model. With `ensure_weight_tying` its file has both of two tied tables, of which the setting names one, and that of
    a base that was resized has both in any case.
    """
    names = saved.get("modules_to_save") or []
    tied = list(whole_weights(shapes)) if saved.get("ensure_weight_tying") and names else []
    untrained = untrained_tables(shapes, _trained_modules(saved))
    return sorted({*names, *tied, *untrained} - _usual_heads(saved)) or None


def _trained_modules(saved: Mapping[str, Any]) -> set[str]:
    """What an adapter trained as a whole, as adapter_config.json has it: names of modules, or ends of names."""
    return {*(saved.get("modules_to_save") or []), *_usual_heads(saved)}


def _usual_heads(saved: Mapping[str, Any]) -> set[str]:
    """The names of heads that PEFT adds to a classifier's `modules_to_save`."""
    return {"score", "classifier"} if str(saved.get("task_type")).endswith(("SEQ_CLS", "TOKEN_CLS")) else set()


def as_used(shapes: Shapes) -> dict[str, tuple[int, ...]]:
    """An adapter's tensors by the names of what they are in use: each table once, under its own name.

    Args:
        shapes: of the tensors in its file, by their keys there.
    """
    found = {}
    for key, shape in shapes.items():
        table = _table(key)
        if table is not None and f"{table}.{TABLE_OF_ROWS}" in shapes:
            found[table + WEIGHT] = shapes[f"{table}.{TABLE_OF_ROWS}"]
        elif _COPIES.sub(".", key) == key or _COPIES.sub(".", key) not in shapes:
            found[key] = shape
    return found


def _table(key: str) -> str | None:
    """The table that trained rows, or the whole below them, belong to."""
    return next((key.removesuffix(f".{end}") for end in (TOKEN_ROWS, TABLE_OF_ROWS) if key.endswith(f".{end}")), None)


def whole_keys(stored: Collection[str], key: str) -> dict[str, str]:
    """Where an adapter's file has a parameter as a whole: the key of the `whole`, and of `rows` that go into it."""
    table = key.removesuffix(WEIGHT)
    base = f"{table}.{TABLE_OF_ROWS}"
    return {"whole": base, "rows": f"{table}.{TOKEN_ROWS}"} if base in stored else {"whole": key}


def whole_weights(shapes: Shapes) -> dict[str, int]:
    """The rows of every module whose weight an adapter has as a whole, by the module's name."""
    return {
        key.removeprefix(PREFIX).removesuffix(WEIGHT): shape[0]
        for key, shape in as_used(shapes).items()
        if key.endswith(WEIGHT) and shape and not any(part in key for part in _PARTS)
    }


def untrained_tables(shapes: Shapes, trained: Collection[str]) -> list[str]:
    """Names of the modules whose weights an adapter has as a whole, although it did not train them as a whole.

    Args:
        shapes: of the tensors in its file, by their keys there.
        trained: names of the modules that it trained, or ends of these names.
    """
    return [name for name in whole_weights(shapes) if not any(is_target(outer, trained) for outer in _with_outer(name))]


def _with_outer(name: str) -> Iterator[str]:
    while name:
        yield name
        name = name.rpartition(".")[0]
