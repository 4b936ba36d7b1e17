"""The weights of a saved adapter, maybe from elsewhere: the checks that they fit the model, and reading them into it.

Its settings are read by config/adapter/adapter_config.py. An adapter is named by a setting, `adapter` of the commands
that use one or `lora.start` of a run that trains on from one, and every message says by which.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import peft
import torch
from peft.utils.constants import DUMMY_TARGET_MODULES
from safetensors import safe_open
from torch import Tensor
from transformers import PreTrainedModel

from qlora_fsdp.common.errors import AdapterError
from qlora_fsdp.common.text import list_some, plural
from qlora_fsdp.config.adapter.adapter_config import (
    ADAPTER_WEIGHTS,
    PREFIX,
    TABLE_OF_ROWS,
    TOKEN_ROWS,
    WEIGHT,
    Shapes,
    as_used,
    read_adapter_config,
    read_shapes,
    read_untrained,
    whole_keys,
    whole_weights,
)
from qlora_fsdp.config.schema import LoraConfig
from qlora_fsdp.data.tokenizer import AddedTokens
from qlora_fsdp.layers.token_rows import ADAPTER
from qlora_fsdp.model.experts import has_experts
from qlora_fsdp.runtime.processes import Processes
from qlora_fsdp.runtime.rows import local_rows, local_tensor

NO_ADAPTER = LoraConfig(r=1, target_modules=DUMMY_TARGET_MODULES)  # PEFT's wrapper around a model without adapters
BASE_COPY = ".base_layer.weight"  # how the name of a weight of the base ends beside an adapter of its layer
EXPERT = re.compile(r"\.experts\.\d+\.")
BASE_FIX = "Set model.path to the model that it was trained on"


@dataclass(frozen=True)
class SavedAdapter:
    """An adapter in PEFT's files.

    Attributes:
        folder: where these are.
        setting: what names the folder: `adapter` or `lora.start`.
        digest: SHA-256 of the weights, where it was asked for.
    """

    folder: Path
    setting: str = "adapter"
    digest: str | None = None

    def __str__(self) -> str:
        return f"{self.setting}={self.folder}"

    def read_tokens(self) -> AddedTokens:
        """The tokens that the adapter has rows for, and how many rows it has of tables that it has as a whole.

        Raises:
            AdapterError: what names the tokens is no list of ids, the adapter's file has another number of rows, or its
                tables have rows for other tokens each.
        """
        saved = read_adapter_config(self.folder, self.setting).get("trainable_token_indices")
        shapes = read_shapes(self.folder, self.setting)
        whole = whole_weights(shapes)
        tables = [key for key, shape in shapes.items() if key.endswith(TABLE_OF_ROWS) and shape]
        if not saved and not tables:
            return AddedTokens(whole=whole)
        rows = {key: shape[0] for key, shape in shapes.items() if key.endswith(TOKEN_ROWS) and shape}
        ids = [tokens_of_rows(saved, key) for key in rows]
        is_apt = rows and all(map(_are_tokens, ids)) and [len(tokens) for tokens in ids] == list(rows.values())
        for key in tables if is_apt else ():  # the rows go into it
            key_of_rows = key.replace(TABLE_OF_ROWS, TOKEN_ROWS)
            is_apt = is_apt and key_of_rows in rows
            is_apt = is_apt and max(tokens_of_rows(saved, key_of_rows), default=0) < shapes[key][0]
        if not is_apt:
            raise AdapterError(
                f"{self}: trainable_token_indices in adapter_config.json are not the tokens that its file has rows "
                "for. Copy it again."
            )
        if tables:
            return AddedTokens(whole=whole)
        if any(set(tokens) != set(ids[0]) for tokens in ids):
            raise AdapterError(
                f"{self}: trainable_token_indices in adapter_config.json are other tokens of the head than of the "
                f"embeddings, which is not here. Set {self.setting} to an adapter that trains the same tokens of both."
            )
        has_two = isinstance(saved, dict) and len(saved) > 1
        return AddedTokens(frozenset(ids[0]), vocab_size=max(ids[0]) + 1, with_head=has_two, whole=whole)

    def check(self, model: peft.PeftModel, may_lack: Collection[str] = (), fix: str = BASE_FIX) -> None:
        """Compare the adapter with the model, which may be on meta, before anything large is read.

        Args:
            model: with the layers of the adapter.
            may_lack: modules of the base, by name, of which the adapter needs no weights: a new head.
            fix: what to do if it does not fit, for the message.

        Raises:
            AdapterError: its file is damaged, tensors are missing, left over or of another shape, it has rows for
                tokens of the head alone, it adapts the head of a base that was resized, or every expert by itself, or
                it holds one of two tied tables.
        """
        shapes = {key: tuple(param.shape) for key, param in adapter_parameters(model).items()}
        found = as_used(read_shapes(self.folder, self.setting))
        new = tuple(f"{PREFIX}{name}." for name in may_lack)
        missing = sorted(key for key in shapes.keys() - found.keys() if not key.startswith(new))
        problems = [f"{key} is missing" for key in missing]
        # A language model's adapter may have rows of its head for new tokens, of which a classifier has no use.
        base = cast(PreTrainedModel, model.get_base_model())
        head = base.get_output_embeddings()
        left_over = [
            key for key in sorted(found.keys() - shapes.keys()) if head is not None or not key.endswith(TOKEN_ROWS)
        ]
        rows_of_head = {f"{PREFIX}{name}.{TOKEN_ROWS}" for name, own in base.named_modules() if own is head}
        if not rows_of_head.isdisjoint(left_over) and any(key.endswith(TOKEN_ROWS) for key in missing):
            raise AdapterError(
                f"{self}: trainable_token_indices in adapter_config.json are tokens of the head alone, and not of the "
                f"embeddings, which is not here. Set {self.setting} to an adapter that trains the same tokens of both."
            )
        # PEFT saves a copy of the base's head, or embeddings, beside an adapter of it.
        adapted = {key.replace(part, BASE_COPY) for key in shapes for part in (".lora_A.weight", ".lora_embedding_A")}
        left_over = [key for key in left_over if key not in adapted]
        problems += [f"{key} is not in the model" for key in left_over]
        problems += [
            f"{key} is {list(found[key])}, in the model {list(shapes[key])}"
            for key in sorted(found.keys() & shapes.keys())
            if found[key] != shapes[key]
        ]
        self._refuse_other_forms(base, shapes, found, left_over)
        if problems:
            has_head_alone = len(problems) == len(left_over) and not any(".lora_" in key for key in left_over)
            if has_head_alone:
                fix = "It has a head of another task: set task to the one that it was trained for"
            number = plural(len(problems), "tensor")
            raise AdapterError(f"{self} does not fit the model ({number}). {fix}:\n{list_some(problems)}")

    def _refuse_other_forms(
        self, base: PreTrainedModel, shapes: Shapes, found: Shapes, left_over: Collection[str]
    ) -> None:
        """Say of adapters in forms that are not known here what helps, where "does not fit" would not.

        Args:
            base: the base with the layers of the adapter.
            shapes: of the trained parameters in the model, by their keys in an adapter's file.
            found: of the tensors in this adapter's file, as they are used.
            left_over: those of them that the model has no place for.

        Raises:
            AdapterError: see `check`.
        """
        for key in found:
            adapter_of_it = key.replace(BASE_COPY, ".lora_B.weight")
            if key != adapter_of_it in shapes and found.get(adapter_of_it, ())[:1] != shapes[adapter_of_it][:1]:
                raise AdapterError(
                    f"{self} adapts {key.removesuffix(BASE_COPY).removeprefix(PREFIX)} of a base that was resized for "
                    "new tokens, which is not here. Merge the two by PEFT's merge_and_unload, and set model.path to "
                    f"the result, without {self.setting}."
                )
        tables = set(read_untrained(self.folder, self.setting))
        for pair in (base.all_tied_weights_keys or {}).items():
            tied = {key.removesuffix(WEIGHT) for key in pair}
            if tables & tied and not tied <= whole_weights(found).keys():
                raise AdapterError(
                    f"{self} holds {', '.join(tables & tied)} of a base that was resized, and not the other of its two "
                    "tied tables, which PEFT saves too. Save it by PEFT's save_pretrained(..., "
                    "save_embedding_layers=True)."
                )
        if has_experts(base) and any(EXPERT.search(key) for key in left_over):
            raise AdapterError(
                f"{self} has adapters for each expert, as `merge write=adapter` writes them for vLLM, and the experts "
                f"of a layer have one here. Set {self.setting} to the adapter that it was written from. If it comes "
                "from elsewhere, load it by PeftModel.from_pretrained and save it again: that joins them."
            )
        missing = shapes.keys() - found.keys()
        if left_over and {_within_stack(key) for key in left_over} == {_within_stack(key) for key in missing}:
            key = min(left_over)
            own = next(name for name in sorted(missing) if _within_stack(name) == _within_stack(key))
            raise AdapterError(
                f"{self} calls layers as other files or classes of the model do ({key.removeprefix(PREFIX)} for "
                f"{own.removeprefix(PREFIX)}); `merge write=adapter` writes such names for vLLM. Set {self.setting} to "
                "the adapter that it was written from."
            )

    def check_values(self, processes: Processes) -> None:
        """Look for NaN and infinite values in an adapter that passed `check`. Each rank reads its share.

        Raises:
            AdapterError: there are some. Every rank raises it.
        """
        problem = None
        with safe_open(self.folder / ADAPTER_WEIGHTS, "pt") as file:
            for key in sorted(file.keys())[processes.rank :: processes.num_ranks]:
                num_bad = int((~torch.isfinite(file.get_tensor(key))).sum())
                if num_bad > 0:
                    problem = (
                        f"{self}: {key} has {plural(num_bad, 'NaN or infinite value')}. Set {self.setting} to an "
                        "intact copy, or to the adapter of an earlier checkpoint."
                    )
                    break
        if (text := processes.first_error(problem)) is not None:
            raise AdapterError(text)

    @torch.no_grad()
    def load(self, model: peft.PeftModel) -> None:
        """Copy the adapter, which has passed `check`, into the model. Of a sharded one each rank copies its own rows.

        Parameters that the adapter has no weights of stay as they are.
        """
        with safe_open(self.folder / ADAPTER_WEIGHTS, "pt") as file:
            stored = set(file.keys())
            saved = read_adapter_config(self.folder, self.setting).get("trainable_token_indices")
            for key, param in adapter_parameters(model).items():
                keys = whole_keys(stored, key)
                if keys["whole"] not in stored:
                    continue
                first, last = local_rows(param)
                if "rows" in keys:
                    values = read_whole(file, keys, tokens_of_rows(saved, keys["rows"]))[first:last]
                elif key.endswith(TOKEN_ROWS):  # ours are by ascending token id, the file's as its maker named them
                    order = np.argsort(tokens_of_rows(saved, key))
                    values = file.get_tensor(key)[order[first:last]]
                else:
                    values = file.get_slice(key)[first:last]
                local_tensor(param).copy_(values)

    @torch.no_grad()
    def load_untrained(self, model: peft.PeftModel) -> None:
        """Copy the tables of the resized base that the adapter was trained on, without the rows that it trained."""
        names = read_untrained(self.folder, self.setting)
        with safe_open(self.folder / ADAPTER_WEIGHTS, "pt") as file:
            stored = set(file.keys())
            for key, param in adapter_parameters(model).items():
                if key.removeprefix(PREFIX).removesuffix(WEIGHT) in names:
                    first, last = local_rows(param)
                    local_tensor(param).copy_(file.get_slice(whole_keys(stored, key)["whole"])[first:last])


def _within_stack(key: str) -> str:
    """A key from the list of transformer layers on: `layers.0.self_attn.q_proj.lora_A.weight`."""
    start = key.find(".layers.")
    return key if start < 0 else key[start:]


def tokens_of_rows(trainable_token_indices: Any, key: str) -> list[int]:
    """The tokens of the trained rows that an adapter's file has under `key`, in the order of the rows there.

    Args:
        trainable_token_indices: as adapter_config.json has them: tokens, or tokens by the name of their table.
        key: of the rows, which begins with the name of their table.
    """
    if not isinstance(trainable_token_indices, dict):
        return cast(list[int], trainable_token_indices)
    table, of_both = key.removesuffix(f".{TOKEN_ROWS}"), [*trainable_token_indices.values()][1:] == []
    return next((ids for name, ids in trainable_token_indices.items() if table.endswith(name) or of_both), [])


def read_whole(file: Any, keys: Mapping[str, str], token_ids: Sequence[int]) -> Tensor:
    """A parameter that an adapter has as a whole, on the CPU, with the rows of tokens put into it that lie apart.

    Args:
        file: the adapter's tensors.
        keys: where they are: `whole`, and `rows` if there are any, as `whole_keys` finds them.
        token_ids: the tokens that the `rows` belong to, in the order of these.
    """
    whole = cast(Tensor, file.get_tensor(keys["whole"]))
    if "rows" in keys:
        whole[token_ids] = file.get_tensor(keys["rows"]).to(whole.dtype)
    return whole


def _are_tokens(ids: Any) -> bool:
    return isinstance(ids, list) and all(type(i) is int and 0 <= i < 2**31 for i in ids) and len(set(ids)) == len(ids)


def adapter_parameters(model: peft.PeftModel) -> dict[str, Tensor]:
    """The trained parameters by their keys in an adapter's file."""
    trained = {name: param for name, param in model.named_parameters() if param.requires_grad}
    params: dict[str, Tensor] = peft.get_peft_model_state_dict(
        model, state_dict=trained, adapter_name=ADAPTER, save_embedding_layers=False
    )
    return params
