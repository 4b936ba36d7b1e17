"""What a plan may choose from: the values of settings that are left open, and smaller ones of those that are not.

Each function yields runs, or settings, and judges none: memory/search.py plans them, and says which is best.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations
from math import gcd
from typing import Any

from qlora_fsdp.config.checks.check_training import check_context_parallel, explain_no_tiles
from qlora_fsdp.config.schema import (
    Activations,
    CompressedFormat,
    EmbeddingStorage,
    Optimizer,
    ShardingStrategy,
    TaskName,
)
from qlora_fsdp.config.settings import show, value_of
from qlora_fsdp.config.world import AUTO, round_default
from qlora_fsdp.memory.gpus import GPUS_A_HOST
from qlora_fsdp.memory.policy import Policy
from qlora_fsdp.memory.workload import Workload

# Tokens of a micro-batch that auto chooses, if a sequence has no more: more gains nothing, on a GPU and on a CPU.
MAX_TOKENS = 2**15
CPU_TOKENS = 2**11
TILE_TOKENS = 2**13  # tokens of a tile that auto chooses: enough for products at the GPU's full rate
MAX_RANKS = 1024
MIN_LENGTH = 512  # tokens per sequence; shorter ones are not suggested

Values = tuple[tuple[str, Any], ...]  # settings by their keys


def ways_to_share(work: Workload) -> Iterator[Workload]:
    """The run with 2, 3 and more ranks of a host that share each sequence, if the settings leave that open.

    The micro-batch must be one sequence, or open. To take one of several sequences at a time needs less memory too, and
    is faster than to share one.
    """
    config = work.config
    is_open = config.distributed.context_parallel == AUTO and config.training.micro_batch_size in (AUTO, 1)
    most = gcd(work.num_ranks, work.local_num_ranks) if is_open and work.is_cuda else 1
    for num_slices in range(2, most + 1):
        shared = work.with_values({"distributed.context_parallel": num_slices})
        conflicts = check_context_parallel(
            shared.config.distributed,
            config.task,
            config.training,
            config.tracking,
            config.model.attn_implementation,
        )
        is_possible = most % num_slices == 0 and next(conflicts, None) is None
        if is_possible and work.model.why_not_sliced(shared.batch) is None:
            yield shared


def ways_to_reshard(work: Workload) -> Iterator[Workload]:
    """The run with layers that stay gathered between forward and backward, if that is open, and the run as it is."""
    fsdp = work.config.fsdp
    is_open = fsdp.reshard_after_forward is None and work.reshards
    if is_open and work.num_shards > 1 and work.is_cuda and not fsdp.cpu_offload:
        yield work.with_values({"fsdp.reshard_after_forward": False})
    yield work


def micro_batch_sizes(work: Workload) -> list[int]:
    """The micro-batch sizes to choose from: powers of two that divide a rank's part of the global batch.

    On a CPU the largest comes first, and is taken if it fits: no time is lost between kernels there, and the speed of
    GPUs predicts nothing.
    """
    training = work.config.training
    if training.micro_batch_size != AUTO:
        return [work.micro_batch_size]
    part = max(1, work.sequences_a_step // work.num_groups)
    length = -(training.max_length // -work.config.distributed.num_slices)
    max_tokens = MAX_TOKENS if work.is_cuda else CPU_TOKENS
    most = max(1, max_tokens // length)
    powers = [2**power for power in range(part.bit_length())]
    sizes = [size for size in powers if part % size == 0 and size <= most]
    return sizes if work.is_cuda else sizes[::-1]


def with_tiles(work: Workload) -> Workload | None:
    """The run with tiles, if that is open and a micro-batch is long enough for them to help."""
    is_open = work.config.memory.tile_tokens == AUTO
    is_long = work.is_cuda and work.num_tokens > MAX_TOKENS
    if not is_open or not is_long or explain_no_tiles(work.config.lora) is not None:
        return None
    return work.with_values({"memory.tile_tokens": TILE_TOKENS})


def with_head_pieces(work: Workload) -> Workload | None:
    """The run whose loss dequantizes an int8 head in pieces, if that is open."""
    config = work.config
    is_int8 = config.quant.embeddings is EmbeddingStorage.int8
    has_own_head = bool(work.parts.ends["head"])  # or it is the embeddings, and not in int8
    is_possible = is_int8 and has_own_head and work.is_cuda and config.task.name is not TaskName.distill
    if config.memory.head_in_pieces != AUTO or not is_possible:
        return None
    return work.with_values({"memory.head_in_pieces": True})


def more_gpus(work: Workload) -> Iterator[Workload]:
    """The run on twice as many GPUs, four times as many and so on."""
    num_ranks = work.num_ranks
    while 2 * num_ranks <= MAX_RANKS:
        num_ranks *= 2
        config, _ = round_default(work.config, num_ranks)
        total = config.training.global_batch_size
        if total is not None and total % config.distributed.num_groups(num_ranks):
            config = config.with_values({"training.global_batch_size": None, "training.micro_batch_size": 1})
        yield replace(work, config=config, num_ranks=num_ranks, local_num_ranks=min(num_ranks, GPUS_A_HOST))


def smaller_settings(work: Workload, policies: Sequence[Policy]) -> Iterator[Values]:
    """Settings that may save memory. Those of the activation policies need the present ones: `policies`, or nothing."""
    config = work.config
    is_offloaded = config.fsdp.cpu_offload
    order = list(Policy)
    for smaller in order[order.index(Policy.attention) :]:
        is_possible = work.is_cuda or not smaller.offloads
        if is_possible and set(policies) & set(order[: order.index(smaller)]):
            yield (("memory.activations", Activations(smaller.value)),)
    if config.optim.name is Optimizer.adamw and not is_offloaded and work.is_cuda:
        yield (("optim.name", Optimizer.adamw_8bit),)
    if config.quant.base_format in (None, "int8", "fp8"):
        yield (
            ("quant.load_in_4bit", True),
            ("quant.load_in_8bit", False),
            ("quant.compressed_tensors", CompressedFormat.none),
        )
    trained = {name.rpartition(".")[2] for name in config.lora.modules_to_save or []}
    trains_ends = not trained.isdisjoint(("embed_tokens", "lm_head"))
    ends = work.parts.ends
    has_tables = ends["embeddings"] or ends["per_layer_tables"]
    if config.quant.embeddings is EmbeddingStorage.none and has_tables and not trains_ends:
        yield (("quant.embeddings", EmbeddingStorage.int8),)
    for size in _smaller_sizes(work):
        yield (("training.micro_batch_size", size),)
    strategy = config.fsdp.sharding_strategy
    if strategy not in (ShardingStrategy.FULL_SHARD, ShardingStrategy.auto) and work.num_ranks > 1:
        yield (("fsdp.sharding_strategy", ShardingStrategy.FULL_SHARD), ("fsdp.hybrid_shard_size", None))
    writes_answers = config.task.writes_answers  # which takes weights on the GPU, and room for a whole answer
    if work.is_cuda and not is_offloaded and strategy is not ShardingStrategy.NO_SHARD and not writes_answers:
        yield (("fsdp.cpu_offload", True), ("optim.name", Optimizer.adamw))
    is_long = config.training.max_length >= 2 * MIN_LENGTH
    if is_long and not writes_answers:
        yield (("training.max_length", config.training.max_length // 2),)


def _smaller_sizes(work: Workload) -> Iterator[int]:
    """Smaller micro-batches: half as large and so on, and where auto has chosen the size, one sequence alone."""
    training = work.config.training
    size = work.micro_batch_size
    if training.micro_batch_size == AUTO:
        if size > 1:
            yield 1
        return
    is_free = training.global_batch_size is None  # if not, the micro-batch size must divide it
    while size % 2 == 0 or (is_free and size > 1):
        size //= 2
        yield size


def all_count(some: Sequence[Values]) -> bool:
    """Whether no change is undone by another that sets the same, such as one of two micro-batch sizes.

    The others together, which are tried by themselves, are the same run, and each plan takes a while.
    """
    names = [{key for key, _ in values} for values in some]
    return not any(one <= other or other <= one for one, other in combinations(names, 2))


def show_values(work: Workload, values: Values) -> str:
    """The overrides as typed, without those that change nothing. A group of conf/ is named if it sets these."""
    texts = [show(key, value) for key, value in values if value_of(work.config, key) != value]
    return " ".join(filter(None, dict.fromkeys(_GROUPS.get(text, text) for text in texts)))


_GROUPS = {
    "memory.activations=attention": "memory=keep_attention",
    "memory.activations=full": "memory=recompute",
    "memory.activations=offload_attention": "memory=offload_attention",
    "memory.activations=offload": "memory=offload",
    "optim.name=adamw_8bit": "optim=adamw_8bit",
    "optim.name=adamw": "optim=adamw",
    "quant.load_in_4bit=true": "quant=nf4",
    "quant.load_in_8bit=false": "",
    "quant.compressed_tensors=none": "",
    "fsdp.cpu_offload=true": "fsdp=offload",
    "fsdp.sharding_strategy=FULL_SHARD": "fsdp=full_shard",
}
