"""Groups of ranks that share each sequence (`distributed.context_parallel`).

They stand beside FSDP's mesh (sharding/shard.py), which is over all ranks: parameters are split as if there were no
such groups, and gradients are summed over all ranks, each of which has those of its own tokens.
"""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

from qlora_fsdp.runtime.packets import prove_peers
from qlora_fsdp.runtime.processes import NCCL_GRACE, Processes


def join_context_group(processes: Processes, num_slices: int) -> dist.ProcessGroup:
    """The group of this rank: ranks 0 to num_slices - 1 are the first, and so on. Collective.

    Neighbours share a host, and with it the fastest links. The group has a communicator of its own: on FSDP's, heads
    would wait for the layer that is being gathered ahead.

    Args:
        processes: all ranks take part.
        num_slices: ranks of a group; it divides all ranks.
    """
    timeout = timedelta(seconds=processes.timeout_seconds)
    if processes.device.type == "cuda":
        timeout += NCCL_GRACE  # gloo and the heartbeats find out first who is missing
    group: dist.ProcessGroup = dist.new_subgroups(num_slices, timeout=timeout)[0]
    prove_peers(group, processes.key)
    return group
