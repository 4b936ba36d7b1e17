"""Which runs record their micro-batches as a CUDA graph (training/capture/captured.py), as far as the settings show it.

The plan needs to know: a graph keeps its memory while evaluations and the optimizer run, and Python takes no time.
"""

from __future__ import annotations

from collections.abc import Sequence

from qlora_fsdp.common.errors import ConfigError
from qlora_fsdp.config.schema import Config, Kernel
from qlora_fsdp.config.settings import problem_with
from qlora_fsdp.config.specs import TaskSpec
from qlora_fsdp.memory.policy import Policy
from qlora_fsdp.memory.workload import Workload

# Beside a graph, this much stays free for the optimizer's step.
SPARE_BYTES = 256 * 2**20


def is_captured(work: Workload, policies: Sequence[Policy]) -> bool:
    """Whether a run that is planned will record its micro-batches."""
    has_dropout = work.config.lora.lora_dropout > 0
    return work.is_cuda and why_not_captured(work.config, policies, has_dropout) is None


def check_graph(config: Config, policies: Sequence[Policy], has_dropout: bool, is_cuda: bool) -> None:
    """Check that a run records its steps if compute.cuda_graph=true asks for it; as `why_not_captured`.

    Raises:
        ConfigError: it asks, and they can't be recorded.
    """
    reason = why_not_captured(config, policies, has_dropout) if is_cuda else "there is no GPU"
    if config.compute.cuda_graph is True and reason is not None:
        problem = problem_with(config, "compute.cuda_graph", f"can't be had: {reason}.", "Set compute.cuda_graph=auto.")
        raise ConfigError([problem])


def why_not_captured(config: Config, policies: Sequence[Policy], has_dropout: bool) -> str | None:
    """Why micro-batches are not recorded; None if they are, unless the model itself prevents it.

    Args:
        config: the run's settings.
        policies: the activation policy of each layer.
        has_dropout: whether the model draws random numbers.
    """
    if config.compute.cuda_graph is False:
        return "compute.cuda_graph=false"
    if config.distributed.num_slices > 1:
        return "the exchange of heads between ranks was not tried in it (distributed.context_parallel)"
    if config.fsdp.cpu_offload or any(policy.offloads for policy in policies):
        return "what comes from host memory can't be part of it"
    if config.kernels.cross_entropy is Kernel.liger:
        return "kernels.cross_entropy=liger asks the device"
    if TaskSpec.of(config).computes_reference and config.lora.start is not None:
        return "the reference, which is the adapter of lora.start, changes places with the one that is trained"
    if has_dropout and any(policy.recomputes for policy in policies):
        return "random numbers can't be drawn again in backward"
    return None
