"""Bytes of parameters, as the shards hold them: quantized weights, embeddings, adapters, and what training adds.

FSDP2 splits dim 0 into chunks of equal size, the last of which is padded, so every rank holds the first one's bytes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

from qlora_fsdp.common.sizes import BLOCKSIZE, NESTED_BLOCKSIZE
from qlora_fsdp.config.schema import (
    Config,
    EmbeddingStorage,
    LoraConfig,
    Optimizer,
    QuantConfig,
    QuantStorage,
    TaskName,
)
from qlora_fsdp.memory.shape import Linear, ModelShape

MIN_8BIT_ELEMENTS = 4096  # bitsandbytes keeps fp32 state for smaller tensors
BLOCK_8BIT = 256  # elements of its 8-bit state that share a scale
EMBEDDINGS, LAST_NORM, HEAD = "model.embed_tokens", "model.norm", "lm_head"


@dataclass(frozen=True)
class ParameterBytes:
    """Bytes by part, of a layer or a whole model, of one shard or of all.

    Attributes:
        codes: quantized weights.
        scales: of the codes, the second level included.
        full_precision: norms, biases, and linear layers that are not quantized.
        embeddings: input embeddings and output head.
        adapters: everything that is trained, in fp32.
    """

    codes: int = 0
    scales: int = 0
    full_precision: int = 0
    embeddings: int = 0
    adapters: int = 0

    def __add__(self, other: ParameterBytes) -> ParameterBytes:
        return ParameterBytes(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    @property
    def total(self) -> int:
        return sum(getattr(self, f.name) for f in fields(self))


@dataclass(frozen=True)
class Tensor:
    """A parameter: its part, its rows, and the bytes of a row."""

    part: str
    num_rows: int
    row_bytes: int

    def shard_bytes(self, num_shards: int) -> int:
        return -(self.num_rows // -num_shards) * self.row_bytes


def sum_bytes(tensors: Iterator[Tensor], num_shards: int = 1) -> ParameterBytes:
    """The tensors' bytes in one of `num_shards` shards."""
    totals: dict[str, int] = {}
    for tensor in tensors:
        totals[tensor.part] = totals.get(tensor.part, 0) + tensor.shard_bytes(num_shards)
    return ParameterBytes(**totals)


def layer_tensors(
    shape: ModelShape, index: int, quant: QuantConfig, lora: LoraConfig, compute_bytes: int
) -> Iterator[Tensor]:
    """The parameters of transformer layer `index`."""
    for norm, size in shape.norms.items():
        yield Tensor("full_precision", size, compute_bytes)
        if is_saved(f"model.layers.{index}.{norm}", lora):
            yield Tensor("adapters", size, 4)
    for linear in shape.linears:
        name = f"model.layers.{index}.{linear.name}"
        yield from _linear_tensors(linear, is_quantized(name, quant, lora), quant, compute_bytes)
        if is_saved(name, lora):
            yield from _saved_tensors(linear)
        rank = adapter_rank(name, lora)
        if rank:
            yield from _adapter_tensors(linear, rank, lora)


def end_tensors(shape: ModelShape, config: Config, compute_bytes: int) -> dict[str, tuple[Tensor, ...]]:
    """The other parameters, by FSDP unit: `embeddings`, `head`, and `root` (shard.py).

    Embeddings and head are the root's where they are tied. A classifier's head and rows of new tokens always are.
    """
    quant, lora, num_new = config.quant, config.lora, num_new_tokens(config)
    predicts_tokens = config.task.name is TaskName.causal_lm
    table = [Tensor("embeddings", shape.vocab_size, shape.hidden_size * compute_bytes)]
    if quant.embeddings is EmbeddingStorage.int8:
        table = [Tensor("embeddings", shape.vocab_size, size) for size in (_padded(shape.hidden_size, quant), 4)]
    head_linear = Linear(HEAD, shape.vocab_size, shape.hidden_size)
    is_tied = shape.is_tied and predicts_tokens
    embeddings, head = [*table], [*table] if predicts_tokens and not is_tied else []
    if head and quant.llm_int8_skip_modules is not None and is_quantized(HEAD, quant, lora):
        head = list(_linear_tensors(head_linear, True, quant, compute_bytes))
    root = [Tensor("full_precision", shape.hidden_size, compute_bytes)]
    if is_saved(LAST_NORM, lora):
        root.append(Tensor("adapters", shape.hidden_size, 4))
    for tensors, name in ((embeddings, EMBEDDINGS), (head, HEAD)):
        if name == HEAD and not predicts_tokens:
            continue
        if is_saved(name, lora):  # a copy, longer by the new tokens
            tensors.append(Tensor("adapters", shape.vocab_size + num_new, shape.hidden_size * 4))
        elif num_new and (name == EMBEDDINGS or not is_tied or is_saved(EMBEDDINGS, lora)):
            root.append(Tensor("adapters", num_new, shape.hidden_size * 4))
    if predicts_tokens:
        rank = 0 if lora.target_modules == "all-linear" else adapter_rank(HEAD, lora)
        head += _adapter_tensors(head_linear, rank, lora) if rank else []
    else:
        root += _new_head(shape, config, compute_bytes)
    if is_tied:
        return {"embeddings": (), "head": (), "root": (*root, *embeddings, *head)}
    return {"embeddings": tuple(embeddings), "head": tuple(head), "root": tuple(root)}


def num_new_tokens(config: Config) -> int:
    """Tokens whose rows are trained. Without the tokenizer nobody knows whether the model has rows for them already."""
    return len({*config.tokenizer.add_tokens, *config.tokenizer.add_special_tokens})


def is_saved(name: str, lora: LoraConfig) -> bool:
    """Whether the module of this name, or one that it lies in, is trained as a whole: by ends of names, as in PEFT."""
    endings = tuple(lora.modules_to_save or ())
    if not endings:  # as mostly; plans are made by the hundred
        return False
    parts = name.split(".")
    return any(".".join(parts[:length]).endswith(endings) for length in range(1, len(parts) + 1))


def _new_head(shape: ModelShape, config: Config, compute_bytes: int) -> Iterator[Tensor]:
    """A classifier's head: the part of the model that is not used, and its trained copy."""
    num_outputs = len(config.task.labels or [None])
    for part, size in (("full_precision", compute_bytes), ("adapters", 4)):
        yield Tensor(part, num_outputs, shape.hidden_size * size)
        if config.task.name is TaskName.token_classification:
            yield Tensor(part, num_outputs, size)


def optimizer_bytes(tensors: Iterator[Tensor], optimizer: Optimizer, num_shards: int) -> int:
    """Of the optimizer's state of one shard: two moments."""
    total = 0
    for tensor in tensors:
        if tensor.part == "adapters":
            elements = tensor.shard_bytes(num_shards) // 4
            is_8bit = optimizer is Optimizer.adamw_8bit and elements >= MIN_8BIT_ELEMENTS
            total += elements * 2 + -(elements // -BLOCK_8BIT) * 8 if is_8bit else elements * 8
    return total


def is_quantized(name: str, quant: QuantConfig, lora: LoraConfig) -> bool:
    """Whether the linear layer of this name is quantized."""
    if not (quant.load_in_4bit or quant.load_in_8bit) or is_saved(name, lora):
        return False
    return not any(_is_skipped(name, skip) for skip in quant.llm_int8_skip_modules or [])


def _is_skipped(name: str, skip: str) -> bool:
    """As transformers reads llm_int8_skip_modules: a regular expression of outer modules, or the end of a name."""
    return name.endswith(skip) or re.match(rf"(?:{skip})(?:(?<=\.)|(?=\.|$))", name) is not None


def adapter_rank(name: str, lora: LoraConfig) -> int:
    """Rank of the adapter of the linear layer of this name; 0 for none."""
    targets = lora.target_modules
    if is_saved(name, lora) or (targets != "all-linear" and not _matches(name, targets)):
        return 0
    if lora.exclude_modules is not None and _matches(name, lora.exclude_modules):
        return 0
    for pattern, rank in lora.rank_pattern.items():
        if re.match(rf"(.*\.)?({pattern})$", name):
            return int(rank)
    return lora.r


def _matches(name: str, targets: Any) -> bool:
    if isinstance(targets, str):
        return re.fullmatch(targets, name) is not None
    return any(_ends_with(name, target) for target in targets)


def _ends_with(name: str, target: str) -> bool:
    return name == target or name.endswith(f".{target}")


def _linear_tensors(linear: Linear, quantized: bool, quant: QuantConfig, compute_bytes: int) -> Iterator[Tensor]:
    rows, columns = linear.out_features, linear.in_features
    if not quantized:
        yield Tensor("full_precision", rows, columns * compute_bytes)
    elif quant.load_in_8bit:
        yield Tensor("codes", rows, _padded(columns, quant))
        yield Tensor("scales", rows, 4)
    else:
        blocks = columns // BLOCKSIZE
        yield Tensor("codes", rows, _padded(columns // 2, quant))
        if quant.bnb_4bit_use_double_quant:
            yield Tensor("scales", rows, _padded(blocks, quant))
            yield Tensor("scales", math.ceil(rows * blocks / NESTED_BLOCKSIZE) + 1, 4)
        else:
            yield Tensor("scales", rows, blocks * 4)
    if linear.has_bias:
        yield Tensor("full_precision", rows, compute_bytes)


def _adapter_tensors(linear: Linear, rank: int, lora: LoraConfig) -> Iterator[Tensor]:
    yield Tensor("adapters", rank, linear.in_features * 4)
    yield Tensor("adapters", linear.out_features, rank * 4)
    if lora.use_dora:
        yield Tensor("adapters", linear.out_features, 4)


def _saved_tensors(linear: Linear) -> Iterator[Tensor]:
    """The trained copy of a layer."""
    yield Tensor("adapters", linear.out_features, linear.in_features * 4)
    if linear.has_bias:
        yield Tensor("adapters", linear.out_features, 4)


def _padded(num_bytes: int, quant: QuantConfig) -> int:
    """Bytes of a row in whole elements of the storage dtype."""
    storage = quant.bnb_4bit_quant_storage
    itemsize = {QuantStorage.uint8: 1, QuantStorage.float32: 4}.get(storage, 2)
    return -(num_bytes // -itemsize) * itemsize
