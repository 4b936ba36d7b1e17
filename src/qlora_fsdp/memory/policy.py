"""What a transformer layer keeps of its activations for backward, and which layers keep less where memory is short."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from itertools import groupby

from typing_extensions import assert_never

from qlora_fsdp.config.schema import Activations, MemoryConfig


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


# Policies that a plan may mix, each ladder from the fastest to the smallest. In short rows it is faster to keep all of
# a few layers, in long ones to keep attention's results of many. Where two ladders lead to about the same speed, the
# earlier one is taken.
LADDERS = (
    (Policy.none, Policy.selective, Policy.full, Policy.offload),
    (Policy.none, Policy.selective, Policy.attention, Policy.full),
    (Policy.none, Policy.selective, Policy.attention, Policy.offload_attention, Policy.offload),
)
_DESCRIPTIONS = {
    Policy.none: "kept",
    Policy.selective: "kept but for the norms' outputs",
    Policy.attention: "recomputed but for attention",
    Policy.full: "recomputed",
    Policy.offload_attention: "recomputed but for attention, its results and their inputs offloaded",
    Policy.offload: "recomputed, their inputs offloaded",
}


def fixed_policies(memory: MemoryConfig, num_layers: int) -> tuple[Policy, ...] | None:
    """The layers' policies that `memory.activations` asks for; None for auto."""
    match memory.activations:
        case Activations.auto:
            return None
        case Activations.half:
            return tuple(Policy.none if index % 2 else Policy.full for index in range(num_layers))
        case other:
            return (Policy(other.value),) * num_layers


def next_smaller(policies: Sequence[Policy]) -> tuple[Policy, ...] | None:
    """Less memory: an eighth of all layers, the first ones that have the fastest policy, take the next of their ladder.

    Returns:
        The new policies; None if all layers have the smallest policy.
    """
    ladder = next(ladder for ladder in LADDERS if set(policies) <= set(ladder))
    fastest = next(policy for policy in ladder if policy in policies)
    if fastest is ladder[-1]:
        return None
    smaller = ladder[ladder.index(fastest) + 1]
    some = [index for index, policy in enumerate(policies) if policy is fastest][: -(len(policies) // -8)]
    return tuple(smaller if index in some else policy for index, policy in enumerate(policies))


def describe_policies(policies: Sequence[Policy]) -> str:
    """`of 12 layers recomputed, of 20 kept`: runs of equal policies in order, or only counts if they alternate.

    Without policies, of a model whose layers are not known, all are kept.
    """
    if not policies:
        return _DESCRIPTIONS[Policy.none]
    runs = [(policy, len(list(group))) for policy, group in groupby(policies)]
    if len(runs) > 3:
        runs = [(policy, policies.count(policy)) for policy in dict.fromkeys(policies)]
    parts = [f"of {count} layers {_DESCRIPTIONS[policy]}" for policy, count in runs]
    return ", ".join([parts[0], *(part.replace(" layers", "") for part in parts[1:])])
