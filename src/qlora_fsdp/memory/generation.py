"""How many slots generated texts have, and what they take (decoding/). Plan and generation share these numbers."""

from __future__ import annotations

from qlora_fsdp.common.sizes import next_power_of_two, round_up
from qlora_fsdp.memory.workload import Workload

MAX_SLOTS = 64  # texts that run at the same time
LENGTH_STEP = 128  # a slot has a multiple of this many tokens


def generation_bytes(work: Workload) -> int:
    """Bytes that `tracking.num_generations` needs on a GPU while texts are completed; 0 if there are none.

    A model in shards has slots only where memory is left over: it can also compute every token from those before it
    (training/generations.py).
    """
    tracking = work.config.tracking
    if tracking.num_generations == 0 or work.uses_fsdp:
        return 0
    num_slots = min(MAX_SLOTS, next_power_of_two(-(tracking.num_generations // -work.num_ranks)))
    length = round_up(work.config.training.max_length + tracking.generation_tokens, LENGTH_STEP)
    return num_slots * length * work.parts.cached_bytes
