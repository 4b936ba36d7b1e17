"""One optimizer step: forward and backward of every micro-batch, then one update of the weights.

The loss of a step is the sum over all its target tokens divided by their number, over all micro-batches and ranks.
Gradients are summed, not averaged. So the same data gives the same loss and the same gradient however it is split.

The host queues the whole step without waiting for the GPU, and reads the step's figures later. There are three
exceptions. The host checks the gradients of a run's first two steps. `LocalBitsandbytes` and `LocalAdafactor` read on
the host whether to update, and paged state is waited for. With offloaded parameters the optimizer runs on the CPU, so
the host waits for the gradients.

Where micro-batches are replayed as CUDA graphs, the host queues the next step's before it reads the figures. Otherwise
the GPU would stand idle from the end of each step until the host has read them and launched the next graph.

Every trainable parameter must get a gradient that can be used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from types import MappingProxyType
from typing import NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor

from qlora_fsdp.common.errors import TrainingError
from qlora_fsdp.common.text import list_some
from qlora_fsdp.data.batch import Batch
from qlora_fsdp.layers.experts.forward import count_loads
from qlora_fsdp.layers.lora import has_zero_gradient_at_start
from qlora_fsdp.model.count import FlopCounter
from qlora_fsdp.model.tasks.task_model import TaskModel
from qlora_fsdp.records.run_folder import log
from qlora_fsdp.runtime.fsdp_state import free_gathered
from qlora_fsdp.runtime.processes import Processes
from qlora_fsdp.runtime.rows import local_tensor
from qlora_fsdp.sharding.shard import sum_gradients
from qlora_fsdp.training.batches import GlobalBatch
from qlora_fsdp.training.capture.passes import Passes
from qlora_fsdp.training.memory_use import PhasePeaks
from qlora_fsdp.training.optim import LocalOptimizer, clip_gradients, set_learning_rate

# While B is zero, the gradient of LoRA's A is zero. So A can be checked only in the second step.
GRADIENT_CHECK_STEPS = 2


class StepFigures(NamedTuple):
    """The figures of a step, which are the same on every rank.

    Attributes:
        loss: mean over the step's target tokens.
        grad_norm: norm of the gradient before clipping.
        max_expert_load: the rows of a layer's busiest expert divided by the mean of the layer's experts; averaged over
            layers. It lies between 1 (even) and the number of experts. None for a model without experts.
        metrics: the task's other figures, by name.
    """

    loss: float
    grad_norm: float
    max_expert_load: float | None = None
    metrics: Mapping[str, float] = MappingProxyType({})


@dataclass(frozen=True)
class StepPasses:
    """The queued forward and backward passes of a step's micro-batches.

    Attributes:
        batch: the global batch that they belong to.
        loss: this rank's part of the step's loss, a float32 scalar on the device.
        micro_losses: what each micro-batch added to this part, in order.
        num_flops: model FLOPs of this rank's micro-batches.
    """

    batch: GlobalBatch
    loss: Tensor
    micro_losses: list[Tensor]
    num_flops: float


class StepRunner:
    """Runs optimizer steps. All ranks call it together, each with its own micro-batches.

    Args:
        model: sharded, loaded and proven.
        passes: runs forward and backward of the model.
        optimizer: over the model's trainable parameters.
        max_grad_norm: a gradient of a larger global norm is scaled down to this norm; 0 turns clipping off.
        flops: counts the FLOPs of a batch.
        peaks: measures the memory of each phase of the step.
        processes: all ranks take part.
    """

    def __init__(
        self,
        model: TaskModel,
        passes: Passes,
        optimizer: LocalOptimizer,
        max_grad_norm: float,
        flops: FlopCounter,
        peaks: PhasePeaks,
        processes: Processes,
    ) -> None:
        self.model = model
        self.passes = passes
        self.optimizer = optimizer
        self.max_grad_norm = max_grad_norm
        self.flops = flops
        self.peaks = peaks
        self.processes = processes
        self.params = [param for param in model.parameters() if param.requires_grad]
        self.expert_loads = count_loads(model)

    def set_learning_rate(self, learning_rate: float) -> None:
        """Set the learning rate of the steps that follow."""
        set_learning_rate(self.optimizer, learning_rate)

    @property
    def may_run_ahead(self) -> bool:
        """Whether `run_passes` may be called for the next step before the figures of this one are known."""
        return self.passes.are_replayed and not self.model.looks_ahead  # to look ahead, ranks wait for one another

    def run_passes(
        self, micro_batches: Iterator[Batch], batch: GlobalBatch, while_gpu_works: Callable[[], None]
    ) -> StepPasses:
        """Queue forward and backward of every micro-batch of a step.

        FSDP sums gradients over ranks in backward. Without FSDP, `sum_gradients` does so in `update`.

        Args:
            micro_batches: this rank's micro-batches; the step takes the next `batch.num_micro_batches`.
            batch: the global batch that these micro-batches belong to.
            while_gpu_works: called after each micro-batch's backward is queued, to do host work while the GPU computes.
        """
        loss_sum, num_flops = torch.zeros((), dtype=torch.float32, device=self.processes.device), 0.0
        micro_losses = []
        self.passes.begin_step(max(1, batch.num_targets))
        if self.model.looks_ahead:
            seen = list(islice(micro_batches, batch.num_micro_batches))
            self.peaks.enter("evaluation")  # its passes have no gradients
            self.model.look_ahead(seen, self.processes)
            free_gathered(self.model)  # a recorded micro-batch gathers the root itself, and leaves it as it was
            micro_batches = iter(seen)
        for micro in range(batch.num_micro_batches):
            micro_batch = next(micro_batches)
            num_flops += self.flops.of_batch(micro_batch)
            micro_losses.append(self.passes.run(micro_batch, is_last=micro == batch.num_micro_batches - 1))
            loss_sum += micro_losses[-1]
            while_gpu_works()
        return StepPasses(batch, loss_sum, micro_losses, num_flops)

    def update(self, passes: StepPasses, norm_limit: float, is_first_update: bool) -> Callable[[], StepFigures]:
        """Queue the update of the weights, which ends a step.

        If the loss or norm is not finite, or the norm is above the limit, the weights do not change. The device decides
        this, so the host queues the update without waiting for the decision.

        Args:
            passes: the step's, as `run_passes` returned them.
            norm_limit: a gradient of a larger norm is not used.
            is_first_update: no earlier step of this start has changed the weights.

        Returns:
            A function that waits until the step's figures are on the host, not for the optimizer, and returns them.

        Raises:
            TrainingError: one of the first steps leaves a trainable parameter without a usable gradient.
        """
        self.peaks.enter("step")
        sum_gradients(self.model, self.params)
        norm = clip_gradients(self.params, self.max_grad_norm).to(passes.loss.device, torch.float64)
        loss = _sum_over_ranks(passes.loss.double())
        is_good = loss.isfinite() & norm.isfinite() & (norm <= norm_limit)
        is_bad = (~is_good).float()
        read_figures, step = self._start_reading(loss, norm), passes.batch.step
        if step < GRADIENT_CHECK_STEPS and not is_bad.item():
            check_gradients(self.model, step, is_first_update, self.processes, loss.item())
        self.optimizer.found_inf = is_bad  # torch's name: the optimizer changes nothing where this is 1
        self.optimizer.step()
        self.passes.end_step(self.optimizer)
        return read_figures

    def _start_reading(self, loss: Tensor, norm: Tensor) -> Callable[[], StepFigures]:
        """Start copying the step's figures to the host. Returns a function that waits for the copy and returns them."""
        loads, sums = self._max_expert_load(), self.model.take_sums()
        measured = [] if sums is None else list(_sum_over_ranks(sums).flatten())
        read_values = _start_copying(loss, norm, *loads, *measured)

        def read_figures() -> StepFigures:
            loss, norm, *others = read_values()
            load = others.pop(0) if loads else None
            return StepFigures(loss, norm, load, self.model.name_figures(others))

        return read_figures

    def _max_expert_load(self) -> list[Tensor]:
        """`StepFigures.max_expert_load` on the device; nothing for a model without experts. Counting begins anew."""
        counted = [load.counts for load in self.expert_loads if load.counts is not None]
        if not counted:
            return []
        counts = _sum_over_ranks(torch.stack(counted))
        for own in counted:
            own.zero_()
        return [(counts.amax(1) / counts.double().mean(1)).mean()]


def _sum_over_ranks(value: Tensor) -> Tensor:
    """Sum a tensor over ranks, in place. A single rank skips this, so NCCL is not started, which saves half a GiB."""
    if dist.get_world_size() > 1:
        dist.all_reduce(value)
    return value


def _start_copying(*figures: Tensor) -> Callable[[], list[float]]:
    """Start copying scalars from the device to the host. Returns a function that waits for this copy only."""
    values = on_host = torch.stack(figures)
    copied: torch.cuda.Event | None = None
    if values.device.type == "cuda":
        copied, on_host = torch.cuda.Event(), torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        on_host.copy_(values, non_blocking=True)
        copied.record()

    def read() -> list[float]:
        if copied is not None:
            copied.synchronize()
        return cast(list[float], on_host.tolist())

    return read


def check_gradients(model: TaskModel, step: int, is_first_update: bool, processes: Processes, loss: float) -> None:
    """Check the gradients after the last backward of a step. This waits for the GPU.

    Args:
        model: sharded.
        step: optimizer steps done before this one.
        is_first_update: the weights have not been updated yet.
        processes: all ranks take part.
        loss: of the step, over all ranks.

    Raises:
        TrainingError: a trainable parameter's gradient is missing, not finite, or zero everywhere.
    """
    reason = model.judge_step(step, loss)
    if reason is not None:
        log.warning(f"Step {step + 1}: {reason}")
    problems = _find_problems(model, is_first_update, processes)
    if not problems:
        return
    fix = "Take their layers out of lora.target_modules or lora.modules_to_save, or check the data"
    had_one_before = [name for name in problems if not has_zero_gradient_at_start(name)]
    if not is_first_update and had_one_before:
        fix = "They had one until the weights were updated. Set training.learning_rate lower, or check the data"
    raise TrainingError(
        f"{len(problems)} parameters that should be trained got no usable gradient in step {step + 1}. {fix}:\n"
        f"{list_some([f'{name} {reason}' for name, reason in problems.items()])}"
    )


def _find_problems(model: TaskModel, is_first_update: bool, processes: Processes) -> dict[str, str]:
    """What is wrong with each parameter that has a problem, by its name.

    LoRA's A gets a gradient of zeros as long as B is zero, which it is until the first update of the weights. So A's
    gradient is not checked for zeros then. Of embeddings it is the other way round.
    """
    params = [(name, param) for name, param in model.model.named_parameters() if param.requires_grad]
    flags: list[float] = []  # three for each parameter, of which each rank knows its own rows
    for _, param in params:
        grad = param.grad
        if grad is None:
            flags += [1.0, 0.0, 0.0]
            continue
        local = local_tensor(grad)
        total = local.double().abs().sum() if local.numel() else torch.zeros((), dtype=torch.float64)
        finite = bool(torch.isfinite(total))
        flags += [0.0, 0.0 if finite else 1.0, float(finite and total > 0)]
    flags = processes.sum(flags)
    problems = {}
    for index, (name, _) in enumerate(params):
        missing, infinite, nonzero = flags[3 * index : 3 * index + 3]
        if missing:
            problems[name] = "got no gradient: nothing in the loss depends on it, or its path is detached"
        elif infinite:
            problems[name] = "got a NaN or infinite gradient"
        elif nonzero or (is_first_update and has_zero_gradient_at_start(name)):
            continue
        elif not model.may_get_zero_gradient(name):
            problems[name] = "got a gradient of zeros: its output does not reach the loss"
    return problems
