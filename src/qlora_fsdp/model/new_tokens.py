"""Rows of embeddings and head for new tokens: how PEFT's trainable tokens are set up and initialised here.

PEFT resizes a table that is too short for the new tokens, and writes the trained rows into a copy of the table at each
call. Here the table stays as it is, so that it is read, sharded and gathered as without new tokens. Rows after its end
exist as trained rows only (layers/token_rows.py). What is saved is the same: stock PEFT loads it on a base that was
resized to the tokenizer.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist
from peft.utils.other import ModulesToSaveWrapper, TrainableTokensWrapper
from torch import Tensor, nn
from transformers import PreTrainedModel

from qlora_fsdp.common.errors import AdapterError
from qlora_fsdp.common.module_names import is_target
from qlora_fsdp.config.schema import LoraConfig
from qlora_fsdp.data.tokenizer import AddedTokens
from qlora_fsdp.layers.lora import LoraEmbedding
from qlora_fsdp.layers.quantized.linear import QuantizedEmbedding
from qlora_fsdp.layers.quantized_layer import QuantizedLayer
from qlora_fsdp.layers.token_rows import ADAPTER, TokenRows
from qlora_fsdp.runtime.rows import gather_rows, local_rows, local_tensor, shard_group

ROWS_AT_ONCE = 4096  # of a table that are held in float64


def token_rows(model: PreTrainedModel, tokens: AddedTokens, lora: LoraConfig) -> dict[str, list[int]]:
    """The rows to train, by name of their table: PEFT's `trainable_token_indices`.

    The tables are embeddings and head. A table is left out if `lora.modules_to_save` trains it as a whole, and the head
    if it shares the embeddings' weight.

    Raises:
        AdapterError: a table can't have rows for new tokens.
    """
    if not tokens.ids:
        return {}
    embeddings: Any = model.get_input_embeddings()
    tables, whole = {_name(model, embeddings): embeddings}, lora.modules_to_save or []
    has_head_rows = tokens.with_head or is_target(_name(model, embeddings), whole)  # else there would be none
    head = model.get_output_embeddings() if has_head_rows else None
    if head is not None:
        tables[_name(model, head)] = head
    rows = {name: table for name, table in tables.items() if not is_target(name, whole)}
    shares_weight = getattr(head, "weight", None) is embeddings.weight
    is_tied = shares_weight and len(rows) == 2
    for name, table in rows.items():
        reason, fix = None, f"Add it to lora.modules_to_save, which trains {name} as a whole."
        if isinstance(table, QuantizedLayer):
            reason, fix = "is quantized", f"Add {name} to quant.llm_int8_skip_modules, or, if the model's files have "
            fix += "it quantized, set model.path to the model in full precision."
        elif isinstance(table, nn.Linear) and table.bias is not None:
            reason = "has a bias, which PEFT's trainable tokens leave out"
        elif shares_weight and not is_tied and table is embeddings:  # PEFT would look for its rows in the head's copy
            reason = "shares its weight with the head, which lora.modules_to_save trains as a whole"
        elif is_target(name, lora.target_modules or []):
            reason, fix = "is in lora.target_modules", "Take it out there, or add it to lora.modules_to_save instead."
        if reason is not None:
            raise AdapterError(f"tokenizer.add_tokens: {name} {reason}, and can't have rows for new tokens. {fix}")
    size = max(tokens.vocab_size, embeddings.weight.shape[0])
    ids = sorted({*tokens.ids, *range(embeddings.weight.shape[0], size)})
    return {_short(model, name): ids for name, table in rows.items() if table is embeddings or not is_tied}


def use_token_rows(wrapper: TrainableTokensWrapper) -> None:
    """Let PEFT's wrapper of a table on meta compute as `TokenRows` does, with its rows in float32.

    PEFT's wrapper makes its own class of layer and can't be told another, so the layer's class is changed here.
    """
    layer: Any = wrapper.token_adapter
    ids = layer.token_indices[ADAPTER]
    num_rows = layer.base_layer.weight.shape[0]
    layer.__class__ = TokenRows
    slots = torch.full((max(num_rows, ids[-1] + 1),), -1)
    slots[ids] = torch.arange(len(ids))
    layer.register_buffer("slots", slots, persistent=False)
    layer.register_buffer(
        "replaced", torch.tensor([i for i in ids if i < num_rows], dtype=torch.int64), persistent=False
    )
    layer.trainable_tokens_original.clear()  # a copy for unmerging, which never happens here
    if layer.tied_adapter is None:
        layer.trainable_tokens_delta[ADAPTER] = nn.Parameter(layer.rows.detach().float())


def count_tokens(model: PreTrainedModel) -> tuple[int, int]:
    """How many tokens the embeddings of an adapted model know, and how many rows their table has in the base."""
    module: Any = model.get_input_embeddings()
    if isinstance(module, TrainableTokensWrapper):
        layer: Any = module.token_adapter
        return len(layer.slots), len(layer.base_layer.weight)
    if isinstance(module, LoraEmbedding):
        module = module.get_base_layer()
    if isinstance(module, QuantizedEmbedding):  # its `weight` would dequantize the table
        return module.num_embeddings, module.num_embeddings
    base: Any = module.original_module if isinstance(module, ModulesToSaveWrapper) else module
    return module.weight.shape[0], base.weight.shape[0]


def resize_copy(copy: nn.Module, num_rows: int, size: int) -> None:
    """Give a table on meta, a copy that is trained as a whole, `size` rows in the place of `num_rows`."""
    for name, param in list(copy.named_parameters(recurse=False)):
        if param.shape[0] == num_rows:
            setattr(copy, name, nn.Parameter(param.new_empty(size, *param.shape[1:]), param.requires_grad))
    setattr(copy, "num_embeddings" if isinstance(copy, nn.Embedding) else "out_features", size)


@torch.no_grad()
def initialize_rows(wrapper: TrainableTokensWrapper, fresh: frozenset[int]) -> None:
    """Fill the trained rows: with the table's row for a token that the model knew, with the mean row for a fresh one.

    transformers' `resize_token_embeddings` takes the mean too. It is summed in float64 here, so that it is the same for
    any number of ranks.
    """
    layer = cast(TokenRows, wrapper.token_adapter)
    if layer.tied_adapter is None:
        values = _first_rows(cast(Tensor, layer.base_layer.weight), layer.token_indices[ADAPTER], fresh)
        first, last = local_rows(layer.rows)
        local_tensor(layer.rows).copy_(values[first:last])


@torch.no_grad()
def fill_copy(param: Tensor, original: Tensor, fresh: frozenset[int]) -> None:
    """Fill a table that is trained as a whole from its original, whatever the sizes; fresh rows get the mean row."""
    num_rows, (first, last) = original.shape[0], local_rows(param)
    if param.shape == original.shape:
        local_tensor(param).copy_(local_tensor(original))
    else:
        rows = gather_rows(local_tensor(original), num_rows, shard_group(original))[first:last]
        local_tensor(param)[: len(rows)].copy_(rows)
    ids = sorted({*fresh, *range(num_rows, param.shape[0])})
    if ids:
        values = _first_rows(original, ids, fresh)
        for value, index in zip(values, ids, strict=True):
            if first <= index < last:
                local_tensor(param)[index - first].copy_(value)


def _first_rows(table: Tensor, ids: list[int], fresh: frozenset[int]) -> Tensor:
    """First values of new rows: float32 [len(ids), ...] on the table's device. Collective over its shards."""
    local, (first, last) = local_tensor(table), local_rows(table)
    sums = torch.zeros(len(ids) + 1, *table.shape[1:], dtype=torch.float64, device=local.device)
    for slot, index in enumerate(ids):
        if first <= index < last and index not in fresh:
            sums[slot] = local[index - first]
    for rows in local.split(ROWS_AT_ONCE):
        sums[-1] += rows.double().sum(0)
    group = shard_group(table)
    if group is not None:
        dist.all_reduce(sums, group=group)
    mean = sums[-1] / table.shape[0]
    for slot, index in enumerate(ids):
        if index >= table.shape[0] or index in fresh:
            sums[slot] = mean
    return sums[:-1].float()


def _name(model: nn.Module, module: nn.Module) -> str:
    return next(str(name) for name, child in model.named_modules() if child is module)


def _short(model: nn.Module, name: str) -> str:
    """The last part of a module's name, by which PEFT finds it too, if no other module's name ends with it."""
    last: str = name.rpartition(".")[2]
    return last if sum(other.endswith(last) for other, _ in model.named_modules()) == 1 else name
