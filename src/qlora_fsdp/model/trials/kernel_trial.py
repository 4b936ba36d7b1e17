"""Try kernels of recurrent layers on the GPU, in a process of its own with a time limit.

Such kernels (layers/recurrent/packages.py) run on GPUs alone, so only a GPU can tell whether they compute what
transformers' torch code computes, and keep packed rows apart. They may also fail inside CUDA, which leaves a process
that can compute nothing any more, or tune themselves for minutes. So a process of its own tries them, with a small
model of the run's class (row_trial.py): each row alone must give the logits and gradients that torch gives on a CPU.
What fails, differs, or takes too long is not used: the run goes on with torch's code. What the process compiles stays
in Triton's cache.
"""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import CONFIG_MAPPING, PretrainedConfig

from qlora_fsdp.common.text import name_error, shorten
from qlora_fsdp.layers.recurrent.packages import installed_packages
from qlora_fsdp.model.trials.row_trial import GPU_TOLERANCE, RowTrial, largest_difference

LIMIT_SECONDS = 180
MAX_REASON = 200
log = logging.getLogger("qlora_fsdp")


@dataclass(frozen=True)
class KernelVerdict:
    """What was found of the installed kernels.

    Attributes:
        why_not: why torch computes in their place; None if the kernels do.
        why_not_packed: why they don't keep packed rows apart, by the implementation of attention; None if they do.
    """

    why_not: str | None
    why_not_packed: dict[str, str | None] = field(default_factory=dict)


def try_kernels(
    config: PretrainedConfig,
    max_length: int,
    device: torch.device,
    attentions: Sequence[str],
    limit_seconds: float = LIMIT_SECONDS,
) -> KernelVerdict:
    """Try the installed kernels with a small model of a class.

    Args:
        config: of the model; it has recurrent layers.
        max_length: `training.max_length`.
        device: the GPU.
        attentions: the implementations of attention with which packed rows are tried.
        limit_seconds: how long it may take.
    """
    names = " and ".join(installed_packages())
    if config.model_type not in CONFIG_MAPPING:
        return KernelVerdict(f"{names} can't be tried with a model that comes with code of its own")
    log.info("Kernels of %s are tried (%.0f s at most)", names, limit_seconds)
    order = {
        "config": config.to_dict(),
        "max_length": max_length,
        "device": str(device),
        "attentions": list(attentions),
    }
    command = [sys.executable, "-m", __name__]
    try:
        done = subprocess.run(command, input=json.dumps(order).encode(), capture_output=True, timeout=limit_seconds)
    except subprocess.TimeoutExpired:
        return KernelVerdict(f"{names} had not computed a small model in {limit_seconds:.0f} s")
    lines = done.stdout.decode(errors="replace").splitlines()
    complaints = done.stderr.decode(errors="replace").strip().splitlines()
    if done.returncode != 0 or not lines:
        last = shorten(complaints[-1], MAX_REASON) if complaints else ""
        return KernelVerdict(f"a process that tried {names} ended (exit code {done.returncode}) {last}".rstrip())
    found: dict[str, Any] = json.loads(lines[-1])
    why_not = found["why_not"]
    return KernelVerdict(None if why_not is None else f"{names}: {why_not}", found["why_not_packed"])


def _try(order: dict[str, Any]) -> KernelVerdict:
    """The verdict, in the process that may break. `order` has the arguments of `try_kernels`, as JSON tells them."""
    config = CONFIG_MAPPING[order["config"]["model_type"]].from_dict(order["config"])
    by_torch = RowTrial(config, order["max_length"])
    by_kernels = RowTrial(config, order["max_length"], torch.device(order["device"]), with_packages=True)
    if by_kernels.error is not None:
        return KernelVerdict(shorten(by_kernels.error, MAX_REASON))
    for what in ("logits", "gradients"):
        found = [tensor.cpu() for tensor in getattr(by_kernels.alone, what)]
        difference = largest_difference(found, getattr(by_torch.alone, what))
        if not difference <= GPU_TOLERANCE:
            return KernelVerdict(f"its {what} differ from torch's by {difference:.1g} of the largest")
    return KernelVerdict(None, {name: by_kernels.why_not_packed(name) for name in order["attentions"]})


def main() -> None:
    """Reads what is to be tried from standard input, and prints the verdict as the last line."""
    try:
        verdict = _try(json.load(sys.stdin.buffer))
    except Exception as error:
        verdict = KernelVerdict(shorten(name_error(error), MAX_REASON))
    print()
    print(json.dumps({"why_not": verdict.why_not, "why_not_packed": verdict.why_not_packed}), flush=True)


if __name__ == "__main__":
    main()
