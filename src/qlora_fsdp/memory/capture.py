"""Which runs record their micro-batches as a CUDA graph (training/capture/captured.py), as far as the settings show it.

The plan needs to know: a graph keeps its memory while evaluations and the optimizer run, and Python takes no time.
"""

from __future__ import annotations

from collections.abc import Sequence

from qlora_fsdp.common.errors import ConfigError
from qlora_fsdp.config.schema import Kernel
from qlora_fsdp.config.settings import problem_about
from qlora_fsdp.config.specs import ModuleSpec
from qlora_fsdp.memory.policy import Policy
from qlora_fsdp.memory.workload import Workload

# Beside a graph, this much stays free for the optimizer's step.
SPARE_BYTES = 256 * 2**20


def is_captured(work: Workload, policies: Sequence[Policy]) -> bool:
    """Whether a run that is planned will record its micro-batches."""
    has_dropout = work.config.lora.lora_dropout > 0
    reason = why_not_captured(work.modules, work.config.fsdp.cpu_offload, policies, has_dropout)
    return work.is_cuda and reason is None


def check_graph(
    modules: ModuleSpec, cpu_offload: bool, policies: Sequence[Policy], has_dropout: bool, is_cuda: bool
) -> None:
    """Check that a run records its steps if compute.cuda_graph=true asks for it; as `why_not_captured`.

    Raises:
        ConfigError: it asks, and they can't be recorded.
    """
    reason: str | None = "there is no GPU"
    if is_cuda:
        reason = why_not_captured(modules, cpu_offload, policies, has_dropout)
    if modules.compute.cuda_graph is True and reason is not None:
        problem = problem_about("compute.cuda_graph", True, f"can't be had: {reason}.", "Set compute.cuda_graph=auto.")
        raise ConfigError([problem])


def why_not_captured(
    modules: ModuleSpec, cpu_offload: bool, policies: Sequence[Policy], has_dropout: bool
) -> str | None:
    """Why micro-batches are not recorded; None if they are, unless the model itself prevents it.

    Args:
        modules: what the model is made of.
        cpu_offload: whether parameters are in host memory.
        policies: the activation policy of each layer.
        has_dropout: whether the model draws random numbers.
    """
    if modules.compute.cuda_graph is False:
        return "compute.cuda_graph=false"
    if modules.num_slices > 1:
        return "the exchange of heads between ranks was not tried in it (distributed.context_parallel)"
    if cpu_offload or any(policy.offloads for policy in policies):
        return "what comes from host memory can't be part of it"
    if modules.kernels.cross_entropy is Kernel.liger:
        return "kernels.cross_entropy=liger asks the device"
    if modules.task.computes_reference and modules.lora.start is not None:
        return "the reference, which is the adapter of lora.start, changes places with the one that is trained"
    if has_dropout and any(policy.recomputes for policy in policies):
        return "random numbers can't be drawn again in backward"
    return None
