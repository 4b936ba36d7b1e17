"""Settings and values that went, or are called otherwise now, and what stands in their place.

A run's own config.yaml has every setting, so that one of an earlier version has these too. Where it has their default
of then, nobody asked for anything, and they are passed over. Any other value is refused with the line that is here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Former:
    """A setting that is no more.

    Attributes:
        default: its default.
        instead: what stands in its place, as a sentence or two.
    """

    default: Any
    instead: str


_LIGER = "Set kernels.liger=true for Liger's kernels, or false for torch's."
_AHEAD = "Leave it out: one layer is gathered ahead of the one that runs."

FORMER = {
    "tracking.wandb": Former("disabled", "Set tracking=wandb, and tracking.wandb_mode=online or offline."),
    "tracking.tensorboard": Former(False, "Set tracking=tensorboard, or name it in tracking.report_to."),
    "kernels.rms_norm": Former("auto", _LIGER),
    "kernels.rotary": Former("auto", _LIGER),
    "kernels.glu": Former("auto", _LIGER),
    "quant.bnb_4bit_quant_storage": Former(
        "auto", "Leave it out: codes are stored as bfloat16, which changes no number."
    ),
    "memory.every_k": Former(2, "Set memory.activations=half, which computes every second layer again."),
    "fsdp.forward_prefetch": Former(1, _AHEAD),
    "fsdp.backward_prefetch": Former(1, _AHEAD),
    "data.mix_by": Former("rows", "Leave it out: weights are shares of the rows. Give long rows a smaller weight."),
    "data.mix_tokens": Former(None, "Set data.mix_until to the number of tokens."),
    "data.max_unpack_ratio": Former(200, "Leave it out, and unpack the file yourself if you trust it."),
    "slurm.modules": Former([], 'Set slurm.setup=["module load NAME"].'),
    "slurm.signal_seconds": Former(120, "Add --signal=B:USR1@SECONDS to slurm.options; without it, runs have 120 s."),
    "launch.devices": Former(None, "Set the variable CUDA_VISIBLE_DEVICES, as in CUDA_VISIBLE_DEVICES=0,2."),
    "tracking.entity": Former(None, "Set W&B's own variable WANDB_ENTITY."),
}

# Values by the setting: what a former one is called now.
FORMER_VALUES = {"memory.activations": {"every_k": "half"}, "data.mix_until": {"tokens": "2000000000"}}
