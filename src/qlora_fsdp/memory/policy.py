"""What a transformer layer keeps of its activations for backward."""

from __future__ import annotations

from enum import Enum

from typing_extensions import assert_never


class Policy(Enum):
    """What a transformer layer keeps of its activations, from most memory to least.

    Attributes:
        none: nothing is given up: the layer keeps everything that backward needs.
        selective: it keeps all but the outputs of its norms. The linear layers that read these recompute them.
        attention: it keeps its input, its attention's result, and what is small: its adapters' low-rank products, and
            attention's log-sums. Backward recomputes the rest of the layer.
        full: the same without attention's result. Backward recomputes the whole layer.
        offload_attention: as `attention`, but input and result wait in host memory.
        offload: as `full`, but the input waits in host memory.
    """

    none = "none"
    selective = "selective"
    attention = "attention"
    full = "full"
    offload_attention = "offload_attention"
    offload = "offload"

    @property
    def recomputes(self) -> bool:
        """Whether backward recomputes the layer, with or without its attention."""
        match self:
            case Policy.none | Policy.selective:
                return False
            case Policy.attention | Policy.full | Policy.offload_attention | Policy.offload:
                return True
            case _:
                assert_never(self)

    @property
    def offloads(self) -> bool:
        """Whether what the layer keeps waits in host memory."""
        return self in (Policy.offload_attention, Policy.offload)
