"""What a transformer layer keeps of its activations for backward."""

from __future__ import annotations

from enum import Enum

from typing_extensions import assert_never


class Policy(Enum):
    """What a transformer layer keeps of its activations, from most memory to least.

    Attributes:
        none: nothing is given up: the layer keeps everything that backward needs.
        selective: it keeps all but the outputs of its norms. The linear layers that read these recompute them.
        full: it keeps its input, and its adapters' low-rank products, which are small. Backward recomputes the layer.
        offload: as `full`, but the input waits in host memory.
    """

    none = "none"
    selective = "selective"
    full = "full"
    offload = "offload"

    @property
    def recomputes(self) -> bool:
        """Whether backward recomputes the layer."""
        match self:
            case Policy.none | Policy.selective:
                return False
            case Policy.full | Policy.offload:
                return True
            case _:
                assert_never(self)
