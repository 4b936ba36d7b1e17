"""Bytes of a model's parameters and of its optimizer's state, of which FSDP2 gives each rank a part.

FSDP2 splits dim 0 of every parameter into chunks of equal size, the last of which is padded if needed. Every rank
therefore holds as many bytes as the first.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields

from typing_extensions import assert_never

from qlora_fsdp.config.schema import Optimizer
from qlora_fsdp.memory.traced import Tensor

MIN_8BIT_ELEMENTS = 4096  # for smaller tensors, bitsandbytes' 8-bit AdamW keeps fp32 state
BLOCK_8BIT = 256  # elements of its 8-bit state that share one fp32 scale

FLOAT32_BYTES = 4


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


def sum_bytes(tensors: Iterable[Tensor], num_shards: int = 1) -> ParameterBytes:
    """The tensors' bytes in one of `num_shards` shards."""
    totals: dict[str, int] = {}
    for tensor in tensors:
        totals[tensor.part] = totals.get(tensor.part, 0) + tensor.shard_bytes(num_shards)
    return ParameterBytes(**totals)


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
