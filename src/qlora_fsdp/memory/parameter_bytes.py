"""Bytes of a model's parameters, counted from its shape and the settings: frozen weights, adapters, optimizer state.

Every parameter is a `Tensor` here: a number of rows along dim 0, and the bytes of a row. FSDP2 splits dim 0 into chunks
of equal size, the last of which is padded if needed. Every rank therefore holds as many bytes as the first.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields

from typing_extensions import assert_never

from qlora_fsdp.common.module_names import fits_pattern, is_skipped, is_target, is_within
from qlora_fsdp.common.quantized_shapes import FLOAT32_BYTES, STORAGE_BYTES, QuantType, stored_parts
from qlora_fsdp.common.sizes import BLOCKSIZE
from qlora_fsdp.config.schema import Config, EmbeddingStorage, LoraConfig, Optimizer, QuantConfig, TaskName
from qlora_fsdp.memory.shape import Linear, ModelShape

MIN_8BIT_ELEMENTS = 4096  # for smaller tensors, bitsandbytes' 8-bit AdamW keeps fp32 state
BLOCK_8BIT = 256  # elements of its 8-bit state that share one fp32 scale
EMBEDDINGS, LAST_NORM, HEAD = "model.embed_tokens", "model.norm", "lm_head"


@dataclass(frozen=True)
class ParameterBytes:
    """Bytes by kind of parameter, of a layer or of a whole model, whole or of one shard.

    Attributes:
        codes: quantized weights of linear layers.
        scales: the scales of these codes, with the second level of double quantization.
        full_precision: norms, biases, and linear layers that are not quantized.
        embeddings: input embeddings and output head, where they are frozen.
        adapters: everything that is trained, which is in fp32.
    """

    codes: int = 0
    scales: int = 0
    full_precision: int = 0
    embeddings: int = 0
    adapters: int = 0

    @property
    def total(self) -> int:
        return sum(getattr(self, f.name) for f in fields(self))


@dataclass(frozen=True)
class Tensor:
    """A parameter: the field of `ParameterBytes` that counts it, its rows, and the bytes of a row."""

    part: str
    num_rows: int
    row_bytes: int

    def shard_bytes(self, num_shards: int) -> int:
        return -(self.num_rows // -num_shards) * self.row_bytes


def sum_bytes(tensors: Iterable[Tensor], num_shards: int = 1) -> ParameterBytes:
    """The tensors' bytes in one of `num_shards` shards."""
    totals: dict[str, int] = {}
    for tensor in tensors:
        totals[tensor.part] = totals.get(tensor.part, 0) + tensor.shard_bytes(num_shards)
    return ParameterBytes(**totals)


def layer_parameters(
    shape: ModelShape, index: int, quant: QuantConfig, lora: LoraConfig, compute_bytes: int
) -> Iterator[Tensor]:
    """The parameters of transformer layer `index`."""
    for norm, size in shape.norms.items():
        yield Tensor("full_precision", size, compute_bytes)
        if is_saved(f"model.layers.{index}.{norm}", lora):
            yield Tensor("adapters", size, FLOAT32_BYTES)
    for linear in shape.linears:
        name = f"model.layers.{index}.{linear.name}"
        yield from _linear_tensors(linear, is_quantized(name, quant, lora), quant, compute_bytes)
        if is_saved(name, lora):
            yield from _saved_tensors(linear)
        rank = adapter_rank(name, lora)
        if rank:
            yield from _adapter_tensors(linear, rank, lora)


def end_parameters(shape: ModelShape, config: Config, compute_bytes: int) -> dict[str, tuple[Tensor, ...]]:
    """The parameters outside the transformer layers, by FSDP unit: `embeddings`, `head` and `root` (model/shard.py).

    Tied embeddings and head are one weight, and belong to the root. So do a classifier's head and the rows of new
    tokens, always.
    """
    quant, lora, num_new = config.quant, config.lora, num_new_tokens(config)
    predicts_tokens = config.task.name is TaskName.causal_lm
    table = [Tensor("embeddings", shape.vocab_size, shape.hidden_size * compute_bytes)]
    if quant.embeddings is EmbeddingStorage.int8:
        table = list(_quantized_tensors("int8", shape.vocab_size, shape.hidden_size, quant, part="embeddings"))
    head_linear = Linear(HEAD, shape.vocab_size, shape.hidden_size)
    is_tied = shape.is_tied and predicts_tokens
    embeddings, head = [*table], [*table] if predicts_tokens and not is_tied else []
    if head and quant.llm_int8_skip_modules is not None and is_quantized(HEAD, quant, lora):
        head = list(_linear_tensors(head_linear, True, quant, compute_bytes))
    root = [Tensor("full_precision", shape.hidden_size, compute_bytes)]
    if is_saved(LAST_NORM, lora):
        root.append(Tensor("adapters", shape.hidden_size, FLOAT32_BYTES))
    for tensors, name in ((embeddings, EMBEDDINGS), (head, HEAD)):
        if name == HEAD and not predicts_tokens:
            continue
        if is_saved(name, lora):  # the trained copy has rows for the new tokens, too
            tensors.append(Tensor("adapters", shape.vocab_size + num_new, shape.hidden_size * FLOAT32_BYTES))
        elif num_new and (name == EMBEDDINGS or not is_tied or is_saved(EMBEDDINGS, lora)):
            root.append(Tensor("adapters", num_new, shape.hidden_size * FLOAT32_BYTES))
    if predicts_tokens:
        rank = 0 if lora.target_modules == "all-linear" else adapter_rank(HEAD, lora)
        head += _adapter_tensors(head_linear, rank, lora) if rank else []
    else:
        root += _new_head(shape, config, compute_bytes)
    if is_tied:
        return {"embeddings": (), "head": (), "root": (*root, *embeddings, *head)}
    return {"embeddings": tuple(embeddings), "head": tuple(head), "root": tuple(root)}


def optimizer_bytes(tensors: Iterable[Tensor], optimizer: Optimizer, num_shards: int) -> int:
    """Bytes of the two moments that the optimizer keeps of one shard of the trained tensors."""
    trained = (tensor.shard_bytes(num_shards) // FLOAT32_BYTES for tensor in tensors if tensor.part == "adapters")
    return sum(_moment_bytes(num_elements, optimizer) for num_elements in trained)


def _moment_bytes(num_elements: int, optimizer: Optimizer) -> int:
    match optimizer:
        case Optimizer.adamw:
            return num_elements * 2 * FLOAT32_BYTES
        case Optimizer.adamw_8bit if num_elements < MIN_8BIT_ELEMENTS:
            return num_elements * 2 * FLOAT32_BYTES
        case Optimizer.adamw_8bit:
            num_blocks = -(num_elements // -BLOCK_8BIT)
            return 2 * (num_elements + num_blocks * FLOAT32_BYTES)
        case _:
            assert_never(optimizer)


def num_new_tokens(config: Config) -> int:
    """Tokens whose rows are trained.

    The model may have rows for some of them already. Only the tokenizer knows, and the plan does not load it.
    """
    return len({*config.tokenizer.add_tokens, *config.tokenizer.add_special_tokens})


def is_saved(name: str, lora: LoraConfig) -> bool:
    """Whether PEFT's `modules_to_save` train this module as a whole, by itself or as a part of another."""
    return is_within(name, tuple(lora.modules_to_save or ()))


def is_quantized(name: str, quant: QuantConfig, lora: LoraConfig) -> bool:
    """Whether the linear layer of this name is quantized."""
    if _quant_type(quant) is None or is_saved(name, lora):
        return False
    return not is_skipped(name, quant.llm_int8_skip_modules or [])


def adapter_rank(name: str, lora: LoraConfig) -> int:
    """Rank of the adapter of the linear layer of this name; 0 if it has none."""
    targets = lora.target_modules
    if is_saved(name, lora) or (targets != "all-linear" and not is_target(name, targets)):
        return 0
    if lora.exclude_modules is not None and is_target(name, lora.exclude_modules):
        return 0
    ranks = (int(rank) for pattern, rank in lora.rank_pattern.items() if fits_pattern(name, pattern))
    return next(ranks, lora.r)


def _quant_type(quant: QuantConfig) -> QuantType | None:
    """How linear layers are quantized; None if they are not."""
    if quant.load_in_8bit:
        return "int8"
    return quant.bnb_4bit_quant_type.value if quant.load_in_4bit else None


def _linear_tensors(linear: Linear, quantized: bool, quant: QuantConfig, compute_bytes: int) -> Iterator[Tensor]:
    """The frozen weight of a linear layer, and its bias."""
    quant_type = _quant_type(quant)
    if quantized and quant_type is not None:
        yield from _quantized_tensors(quant_type, linear.out_features, linear.in_features, quant)
    else:
        yield Tensor("full_precision", linear.out_features, linear.in_features * compute_bytes)
    if linear.has_bias:
        yield Tensor("full_precision", linear.out_features, compute_bytes)


def _quantized_tensors(
    quant_type: QuantType, rows: int, columns: int, quant: QuantConfig, part: str | None = None
) -> Iterator[Tensor]:
    """Codes and scales of a weight, counted as `part`, or each as what it is."""
    storage_bytes = STORAGE_BYTES[quant.bnb_4bit_quant_storage.value]
    stored = stored_parts(quant_type, quant.bnb_4bit_use_double_quant, BLOCKSIZE, storage_bytes, rows, columns)
    for name, tensor in stored.items():
        counted_as = part or ("codes" if name == "codes" else "scales")
        yield Tensor(counted_as, tensor.shape[0], tensor.row_bytes(storage_bytes))


def _adapter_tensors(linear: Linear, rank: int, lora: LoraConfig) -> Iterator[Tensor]:
    """A, B and, under DoRA, the magnitudes of the rows."""
    yield Tensor("adapters", rank, linear.in_features * FLOAT32_BYTES)
    yield Tensor("adapters", linear.out_features, rank * FLOAT32_BYTES)
    if lora.use_dora:
        yield Tensor("adapters", linear.out_features, FLOAT32_BYTES)


def _saved_tensors(linear: Linear) -> Iterator[Tensor]:
    """The copy of a linear layer that is trained as a whole, in fp32."""
    yield Tensor("adapters", linear.out_features, linear.in_features * FLOAT32_BYTES)
    if linear.has_bias:
        yield Tensor("adapters", linear.out_features, FLOAT32_BYTES)


def _new_head(shape: ModelShape, config: Config, compute_bytes: int) -> Iterator[Tensor]:
    """A classifier's head: the original, which PEFT keeps unused, and the copy that is trained."""
    num_outputs = len(config.task.labels or [None])
    for part, size in (("full_precision", compute_bytes), ("adapters", FLOAT32_BYTES)):
        yield Tensor(part, num_outputs, shape.hidden_size * size)
        if config.task.name is TaskName.token_classification:
            yield Tensor(part, num_outputs, size)
