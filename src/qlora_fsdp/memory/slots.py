"""How many slots generated texts have, and what they take (decoding/). Plan and generation share these numbers."""

from __future__ import annotations

from qlora_fsdp.memory.workload import Workload

MAX_SLOTS = 64  # texts that run at the same time
LENGTH_STEP = 128  # a slot has a multiple of this many tokens


def round_slots(num_texts: int) -> int:
    """Slots for `num_texts`, rounded up to a power of two: each number of slots is a graph of its own."""
    return 1 << max(0, num_texts - 1).bit_length()


def round_length(num_tokens: int) -> int:
    """Tokens of a slot for texts of up to `num_tokens`."""
    return -(num_tokens // -LENGTH_STEP) * LENGTH_STEP


def generation_bytes(work: Workload) -> int:
    """Bytes that `tracking.num_generations` needs on a GPU while texts are completed; 0 if there are none.

    A model in shards has no slots: it computes every token from those before it (training/generations.py).
    """
    tracking = work.config.tracking
    if tracking.num_generations == 0 or work.uses_fsdp:
        return 0
    num_slots = min(MAX_SLOTS, round_slots(-(tracking.num_generations // -work.num_ranks)))
    length = round_length(work.config.training.max_length + tracking.generation_tokens)
    return num_slots * length * work.parts.cached_bytes
