"""A trained model to use: the quantized base with its adapter, whole on one process or sharded over several."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import peft
import torch
from peft.utils.constants import DUMMY_TARGET_MODULES
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import GenerationConfig, PreTrainedTokenizerBase

from qlora_fsdp.common.errors import AdapterError, DataError
from qlora_fsdp.common.text import count
from qlora_fsdp.config.schema import Config, DataConfig, LoraConfig, TaskName
from qlora_fsdp.data.batch import Batch
from qlora_fsdp.data.row import join_parts
from qlora_fsdp.data.tokenizer import AddedTokens, add_tokens, load_tokenizer
from qlora_fsdp.layers.attention import choose_attention
from qlora_fsdp.model.adapters import ADAPTER, initialize_adapters
from qlora_fsdp.model.assemble import adapt_model, describe_base
from qlora_fsdp.model.build import BuiltModel, build_configured
from qlora_fsdp.model.classifier import Classifier
from qlora_fsdp.model.count import dtype_name
from qlora_fsdp.model.find import ModelFiles, find_model
from qlora_fsdp.model.prove import prove_shards
from qlora_fsdp.model.shard import place_model, shard_model
from qlora_fsdp.model.task_model import TaskModel
from qlora_fsdp.runtime.fallbacks import check_bitsandbytes
from qlora_fsdp.runtime.hardware import choose_dtype
from qlora_fsdp.runtime.processes import Processes
from qlora_fsdp.runtime.rows import local_rows, local_tensor
from qlora_fsdp.runtime.run_command import log
from qlora_fsdp.weights.fill import fill
from qlora_fsdp.weights.quantized_cache import use_cache

ANOTHER = "set data.chat_template=chatml (or llama3, alpaca, or a Jinja file)"
NO_ADAPTER = LoraConfig(r=1, target_modules=DUMMY_TARGET_MODULES)  # PEFT's wrapper around nothing
PLAIN_STARTS = (True, False, "gaussian", "orthogonal", "eva")  # of lora.init_lora_weights: the base stays what it is
OTHER_PASSES = (  # of PEFT's LoraConfig: a forward pass that is not base + B A
    "alora_invocation_tokens",
    "arrow_config",
    "kasa_config",
    "layer_replication",
    "lora_bias",
    "monteclora_config",
    "target_parameters",
    "use_bdlora",
)


@dataclass(frozen=True)
class Trained:
    """A model in evaluation mode, loaded and, on several processes, sharded."""

    model: TaskModel
    tokenizer: PreTrainedTokenizerBase
    tokens: AddedTokens
    files: ModelFiles
    built: BuiltModel
    dtype: torch.dtype


def build_trained(config: Config, adapter: str | None, processes: Processes, generates: bool = False) -> Trained:
    """The base on meta with the adapter's layers, without any weights.

    Args:
        config: of the base; an adapter's folder has it.
        adapter: PEFT's folder of a LoRA adapter; None: the base alone.
        processes: all ranks take part.
        generates: for `generate`: attention that knows a cache and padding on the left.

    Raises:
        AdapterError: the adapter is none of LoRA, does not fit the base, or has NaN or infinite values.
    """
    device, dtype = processes.device, choose_dtype(config.training.precision, processes.device)
    check_bitsandbytes(config, device)
    folder = None if adapter is None else Path(adapter).expanduser()
    lora = NO_ADAPTER if folder is None else read_lora(folder)
    files = find_model(config.model, processes.is_local_main, processes.first_error)
    tokenizer = find_tokenizer(config, files, folder)
    tokens = add_tokens(tokenizer, config.tokenizer)
    if not tokens.ids:
        tokens = read_tokens(folder)
    predicts_tokens = config.task.name is TaskName.causal_lm
    wanted = config.model.attn_implementation.value
    attention, _ = choose_attention(wanted, files.config, device, dtype, is_causal=predicts_tokens and not generates)
    built = build_configured(files, config, lora, dtype, attention, tokenizer)
    model = adapt_model(built, lora, config.task, tokens)
    if folder is not None:
        check_adapter(model.model, folder)
        check_values(folder, processes)
    return Trained(model, tokenizer, tokens, files, built, dtype)


def load_trained(config: Config, adapter: str | None, processes: Processes, generates: bool = False) -> Trained:
    """Build as `build_trained`, then shard and load the base as training does, and put the adapter's weights in.

    Raises:
        AdapterError: as of `build_trained`.
    """
    trained = build_trained(config, adapter, processes, generates)
    model, built, dtype, device = trained.model, trained.built, trained.dtype, processes.device
    assignments = built.assignments
    if config.model.cache_quantized:  # an adapter's settings may come from another machine: nothing is written
        base = describe_base(assignments, processes)
        assignments = use_cache(assignments, base, config.model.cache_folder, dtype, processes, writes=False)
    units = shard_model(model, config.fsdp, processes) if processes.num_ranks > 1 else []
    place_model(model, torch.device("cpu") if units and config.fsdp.cpu_offload else device, device)
    fill(assignments, device, dtype, built.std, config.training.seed)
    initialize_adapters(model.model, True, config.training.seed, trained.tokens)
    if adapter is not None:
        load_adapter(model.model, Path(adapter).expanduser())
    model.eval()
    if units:
        prove_shards(model, units, processes, processes.num_ranks)
        _start_at_the_root(model, device)
    log.info(
        f"Model: {built.model.name_or_path}, {built.kind}, "
        f"{dtype_name(dtype)}, adapter: {adapter or 'none'}, {count(processes.num_ranks, 'rank')} on {device.type}"
    )
    return trained


def find_tokenizer(config: Config, files: ModelFiles, adapter: Path | None) -> PreTrainedTokenizerBase:
    """The adapter's own tokenizer, else the model's."""
    model = replace(config.model, path=str(files.folder) if files.folder is not None else config.model.path)
    if adapter is not None and (adapter / "tokenizer_config.json").is_file():
        model = replace(model, tokenizer_path=str(adapter))
    return load_tokenizer(model, DataConfig(chat_template=config.data.chat_template))


def read_lora(folder: Path) -> LoraConfig:
    """The settings of a saved adapter, in this project's terms.

    Raises:
        AdapterError: it is no LoRA adapter, or one of a kind that is not here.
    """
    try:
        saved = peft.PeftConfig.from_pretrained(str(folder))
    except (ValueError, OSError, TypeError, KeyError, json.JSONDecodeError) as error:
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
    targets: Any = saved.target_modules
    excluded: Any = saved.exclude_modules
    if saved.layers_to_transform is not None or isinstance(excluded, str):  # what these leave, the file tells as well
        targets, excluded = _adapted_layers(folder), None
    return LoraConfig(
        r=saved.r,
        lora_alpha=saved.lora_alpha,
        target_modules=targets if isinstance(targets, str) else sorted(targets or []),
        exclude_modules=None if excluded is None else sorted(excluded),
        modules_to_save=_names(saved.modules_to_save, saved.task_type),
        use_rslora=saved.use_rslora,
        use_dora=saved.use_dora,
        rank_pattern=dict(saved.rank_pattern or {}),
        alpha_pattern=dict(saved.alpha_pattern or {}),
    )


def read_tokens(folder: Path | None) -> AddedTokens:
    """The tokens that a PEFT adapter, which may be from elsewhere, has rows for; `read_lora` has read it before."""
    if folder is None:
        return AddedTokens()
    saved = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8")).get("trainable_token_indices")
    if not saved:
        return AddedTokens()
    ids = frozenset(saved if isinstance(saved, list) else next(iter(saved.values())))
    return AddedTokens(ids, vocab_size=max(ids) + 1, with_head=isinstance(saved, dict) and len(saved) > 1)


def _adapted_layers(folder: Path) -> list[str]:
    shapes, ending = _read_shapes(folder), ".lora_A.weight"
    return [key.removeprefix("base_model.model.").removesuffix(ending) for key in shapes if key.endswith(ending)]


def _names(modules_to_save: Any, task_type: Any) -> list[str] | None:
    """PEFT adds the usual names of a classifier's head, whether the model has them or not, and does so again."""
    if modules_to_save is None:
        return None
    usual = {"score", "classifier"} if str(task_type).endswith(("SEQ_CLS", "TOKEN_CLS")) else set()
    return sorted(set(modules_to_save) - usual) or None


def _read_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    try:
        with safe_open(folder / "adapter_model.safetensors", "pt") as file:
            return {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise AdapterError(f"adapter={folder}: its weights can't be read: {error}. Copy it again.") from error


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
    """Look for NaN and infinite values in a saved adapter, which `check_adapter` has seen; each rank reads its share.

    Raises:
        AdapterError: there are some; on every rank.
    """
    found = None
    with safe_open(folder / "adapter_model.safetensors", "pt") as file:
        for key in sorted(file.keys())[processes.rank :: processes.num_ranks]:
            num_bad = int((~torch.isfinite(file.get_tensor(key))).sum())
            if num_bad > 0:
                found = (
                    f"adapter={folder}: {key} has {count(num_bad, 'NaN or infinite value')}. Set adapter to "
                    "an intact copy, or to the adapter of an earlier checkpoint."
                )
                break
    if (text := processes.first_error(found)) is not None:
        raise AdapterError(text)


@torch.no_grad()
def load_adapter(model: peft.PeftModel, folder: Path) -> None:
    """Copy a saved adapter, which `check_adapter` has seen, into the (sharded) model, each rank its own rows."""
    with safe_open(folder / "adapter_model.safetensors", "pt") as file:
        for key, param in _adapter_parameters(model).items():
            first, last = local_rows(param)
            local_tensor(param).copy_(file.get_slice(key)[first:last])


def _adapter_parameters(model: peft.PeftModel) -> dict[str, Tensor]:
    """The trained parameters by their keys in an adapter's file."""
    trained = {name: param for name, param in model.named_parameters() if param.requires_grad}
    params: dict[str, Tensor] = peft.get_peft_model_state_dict(
        model, state_dict=trained, adapter_name=ADAPTER, save_embedding_layers=False
    )
    return params


@torch.no_grad()
def _start_at_the_root(model: TaskModel, device: torch.device) -> None:
    """One pass through FSDP's root: the first must start there, and `generate` starts inside."""
    ones = torch.ones((1, 8), dtype=torch.int64)
    starts = torch.tensor([0, 8], dtype=torch.int32)
    labels, label_positions = torch.zeros((0, 1)), torch.zeros(0, dtype=torch.int64)
    model(Batch(ones, ones, torch.arange(8)[None], starts, 8, labels, label_positions).to(device))
    if isinstance(model, Classifier):
        model._seen.clear()


def generation_config(trained: Trained) -> GenerationConfig:
    """The checkpoint's own generation_config.json, with the tokenizer's end and padding where it has none."""
    folder = trained.files.folder
    has_own = folder is not None and (folder / "generation_config.json").is_file()
    config = GenerationConfig.from_pretrained(str(folder)) if has_own else GenerationConfig()
    if config.eos_token_id is None:
        config.eos_token_id = trained.tokenizer.eos_token_id
    config.pad_token_id = trained.tokenizer.pad_token_id
    return config


def num_positions(trained: Trained) -> int | None:
    """Tokens that prompt and completion may have together; None: the model sets no limit."""
    return getattr(trained.model.base.config.get_text_config(), "max_position_embeddings", None)


def prompt_tokens(tokenizer: PreTrainedTokenizerBase, prompt: str) -> list[int]:
    """A prompt's tokens as in training: with the begin token where the tokenizer adds one, without an end token."""
    tokens: list[int] = tokenizer(prompt, verbose=False)["input_ids"]
    return tokens[:-1] if len(tokens) > 1 and tokens[-1] == tokenizer.eos_token_id else tokens


def check_template(tokenizer: PreTrainedTokenizerBase, place: str) -> None:
    """Conversations need a chat template.

    Raises:
        DataError: there is none; `place` is who needs it.
    """
    if tokenizer.chat_template is None:
        raise DataError(f"{place}: the tokenizer has no chat template. To use one, {ANOTHER}.")


def chat_tokens(tokenizer: PreTrainedTokenizerBase, messages: Any, tools: Any, place: str) -> list[int]:
    """A conversation's tokens by the chat template, with the beginning of the assistant's next turn.

    Raises:
        DataError: there is no template, or it refuses the conversation.
    """
    check_template(tokenizer, place)
    try:
        messages = [{**message, "content": join_parts(message.get("content"))} for message in messages]
        text = tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=True, tokenize=False)
    except Exception as error:  # templates compute, and their sandbox lets any error through
        raise DataError(f"{place}: the chat template can't be applied: {error}. Correct it, or {ANOTHER}.") from error
    tokens: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return tokens


def pad_left(rows: list[list[int]], pad_token_id: int) -> tuple[Tensor, Tensor]:
    """Token ids and attention mask, int64 [num_rows, longest]."""
    longest = max(map(len, rows))
    input_ids = np.full((len(rows), longest), pad_token_id, dtype=np.int64)
    mask = np.zeros_like(input_ids)
    for index, row in enumerate(rows):
        input_ids[index, longest - len(row) :] = row
        mask[index, longest - len(row) :] = 1
    return torch.from_numpy(input_ids), torch.from_numpy(mask)
