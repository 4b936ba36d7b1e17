"""The optimizer, the learning rate of each step, and the clipping of gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any, cast

import torch
import torch.distributed as dist
from peft.tuners import lora
from torch import Tensor, nn
from transformers import get_scheduler
from typing_extensions import assert_never

from qlora_fsdp.common.errors import ConfigError, Problem
from qlora_fsdp.common.sizes import MIN_8BIT_ELEMENTS
from qlora_fsdp.config.schema import LrScheduler, OptimConfig, Optimizer
from qlora_fsdp.layers.token_rows import TokenRows
from qlora_fsdp.runtime.rows import local_tensor, shard_group
from qlora_fsdp.training.adafactor import LocalAdafactor

LR_RATIO = "lr_ratio"  # of a group of parameters: what the learning rate is multiplied by


class LocalAdamW(torch.optim.AdamW):
    """torch's fused AdamW, computed on each rank's own rows. Its state is made, named and saved as torch's.

    torch's own step goes through DTensor. For some hundred adapters that takes the host 6 ms per step, while the GPU
    waits. AdamW is element-wise, so the fused kernel may as well be called on the local tensors, which are looked up
    once and kept.

    Attributes:
        found_inf: float32 scalar on the device; where it is 1, `step` changes nothing. The host never reads it. The
            name is torch's.
    """

    found_inf: Tensor | None = None

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, **options)
        # By group: local tensors of the parameters and of exp_avg, exp_avg_sq and step; and the tensors that they are
        # the parts of.
        self._local: dict[int, tuple[list[Tensor], ...]] = {}
        self._whole: dict[int, Sequence[Tensor]] = {}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for number, group in enumerate(self.param_groups):
            self._step_group(number, group)

    def _step_group(self, number: int, group: dict[str, Any]) -> None:
        params = [p for p in group["params"] if p.grad is not None]
        if not params:
            return
        for param in params:
            if not self.state[param]:
                self.state[param] = new_state(param)
        # The local tensors are looked up again when other parameters have gradients than in the step before, and when
        # a checkpoint was loaded, which replaces the state.
        whole = [value for param in params for value in (param, self.state[param]["exp_avg"])]
        before = self._whole.get(number, ())
        if len(whole) != len(before) or any(old is not new for old, new in zip(before, whole, strict=True)):
            states = [[local_tensor(self.state[p][key]) for p in params] for key in ("exp_avg", "exp_avg_sq", "step")]
            self._local[number], self._whole[number] = ([local_tensor(p) for p in params], *states), whole
        local_params, averages, squares, steps = self._local[number]
        is_skipped = None if self.found_inf is None else self.found_inf.to(steps[0].device)
        torch._foreach_add_(steps, 1)
        if is_skipped is not None:  # given as a list, because the host would read a single tensor and wait for it
            torch._foreach_sub_(steps, [is_skipped] * len(steps))
        torch._fused_adamw_(
            local_params,
            [local_tensor(cast(Tensor, p.grad)) for p in params],
            averages,
            squares,
            [],
            steps,
            lr=group["lr"],
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            amsgrad=False,
            maximize=False,
            found_inf=is_skipped,
        )


def new_state(param: Tensor) -> dict[str, Tensor]:
    """AdamW's state of a parameter before its first step."""
    return {
        "step": torch.zeros((), device=param.device),
        "exp_avg": torch.zeros_like(param),
        "exp_avg_sq": torch.zeros_like(param),
    }


class LocalBitsandbytes(torch.optim.Optimizer):
    """An optimizer of bitsandbytes, computed on each rank's own rows.

    Its kernels do not know DTensors, and AdamW and Lion are element-wise, so each rank's rows can be updated apart. An
    8-bit state is block-wise (arXiv:2110.02861), but for matrices of fewer than MIN_8BIT_ELEMENTS elements.
    bitsandbytes would ask that of each rank's part; here the whole matrix decides, so that the number of ranks does
    not. Blocks of 256 elements begin anew on each rank. Where a rank's part is no multiple of them, as with three
    ranks, the blocks around its edges are others than on one rank, and losses may differ in the fifth digit.

    Args:
        kind: bitsandbytes' class.
        params: all parameters. A checkpoint knows their states by their places in this order.
        groups: groups of them, sharded, with the learning rate's factor of each.
        options: what the class takes besides.

    Attributes:
        found_inf: as in `LocalAdamW`, but here the host reads it, and waits for it.
    """

    found_inf: Tensor | None = None

    def __init__(
        self, kind: Any, params: Sequence[nn.Parameter], groups: Sequence[dict[str, Any]], **options: Any
    ) -> None:
        super().__init__(groups, options)
        self._group_of = {param: group for group in self.param_groups for param in group["params"]}
        self.pairs = [(p, nn.Parameter(local_tensor(p))) for p in params if local_tensor(p).numel()]
        self.inner = kind([local for _, local in self.pairs], **options)

    def init_state(self, index: int) -> None:
        """Make the state of a pair of `pairs` before its first step: in 8 bits, unless the whole matrix is small."""
        param, local = self.pairs[index]
        is_large = param.numel() >= MIN_8BIT_ELEMENTS  # a DTensor's numel is that of the whole matrix
        arguments: Any = self.inner.args
        arguments.min_8bit_size = 0 if is_large else MIN_8BIT_ELEMENTS
        self.inner.init_state(self.inner.param_groups[0], local, 0, index)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        if self.found_inf is not None and self.found_inf.item():
            return
        inner = self.inner
        (group,) = inner.param_groups
        if not inner.initialized:
            inner.check_overrides()
            inner.to_gpu()  # the state that a checkpoint has brought
            inner.initialized = True
        # As bitsandbytes' own `step`, which also waits for the GPU after each tensor: some hundred times, for nothing.
        for index, (param, local) in enumerate(self.pairs):
            if param.grad is None:
                continue
            local.grad = local_tensor(param.grad)
            if not inner.state[local]:
                self.init_state(index)
            group["lr"] = self._group_of[param]["lr"]
            inner.prefetch_state(local)
            inner.update_step(group, local, 0, index)
            local.grad = None
        if inner.is_paged and torch.cuda.is_available():
            torch.cuda.synchronize()  # the host may read pages from here on, as bitsandbytes' own `step` has it


LocalOptimizer = LocalAdamW | LocalBitsandbytes | LocalAdafactor


def state_before_first_step(optimizer: torch.optim.Optimizer, param: Tensor) -> dict[str, Tensor]:
    """The state of a parameter before its first step, of an optimizer whose state can be cut into any rows."""
    if isinstance(optimizer, LocalAdafactor):
        return optimizer.new_state(param)
    return new_state(param)


def rate_ratios(model: nn.Module, config: OptimConfig, learning_rate: float) -> dict[nn.Parameter, float]:
    """What the learning rate of each trained parameter is, over that of the run.

    LoRA+ is about B of each adapter, and about vectors, but not about embeddings, as PEFT has it.

    Raises:
        ConfigError: a rate is set of what the model does not train.
    """
    of_embeddings = _parameters_of(model, (nn.Embedding, TokenRows, lora.Embedding))
    of_experts = _parameters_of(model, (lora.ParamWrapper,))
    problems = []
    for name, those, fix in (
        ("embedding_learning_rate", of_embeddings, "name embed_tokens in lora.modules_to_save"),
        ("expert_learning_rate", of_experts, "give fused experts adapters (lora.experts)"),
    ):
        rate = getattr(config, name)
        if rate is not None and not those:
            reason = "is about nothing: none of these are trained."
            problems.append(Problem(f"optim.{name}={rate:g}", reason, f"Set optim.{name}=null, or {fix}."))
    if problems:
        raise ConfigError(problems)
    ratios = {}
    for name, param in model.named_parameters():
        if not param.requires_grad:
            continue
        rate = learning_rate
        factor = 1.0
        if param in of_embeddings:
            rate = config.embedding_learning_rate or rate
        elif param in of_experts:
            rate = config.expert_learning_rate or rate
        is_faster = "lora_B" in name or param.ndim == 1
        if is_faster and param not in of_embeddings and config.loraplus_lr_ratio is not None:
            factor = config.loraplus_lr_ratio
        ratios[param] = factor * rate / learning_rate
    return ratios


def _parameters_of(model: nn.Module, kinds: tuple[type[nn.Module], ...]) -> set[nn.Parameter]:
    """The trained parameters of modules of some classes, and of what is in them."""
    modules = [module for module in model.modules() if isinstance(module, kinds)]
    return {param for module in modules for param in module.parameters() if param.requires_grad}


def make_optimizer(
    params: Iterable[nn.Parameter],
    config: OptimConfig,
    learning_rate: float,
    ratios: Mapping[nn.Parameter, float] | None = None,
) -> LocalOptimizer:
    """The optimizer that `optim.name` asks for.

    Args:
        params: trainable, sharded.
        config: which optimizer, and its settings.
        learning_rate: the learning rate of the first step; the loop sets it again at every step.
        ratios: what the learning rate of each is multiplied by (`rate_ratios`); None: 1.
    """
    params = list(params)
    by_ratio: dict[float, list[nn.Parameter]] = {}
    for param in params:
        ratio = 1.0 if ratios is None else ratios[param]
        by_ratio.setdefault(ratio, []).append(param)
    groups: list[dict[str, Any]] = [{"params": some, LR_RATIO: ratio} for ratio, some in by_ratio.items()]
    options: dict[str, Any] = {
        "lr": learning_rate,
        "betas": (config.betas[0], config.betas[1]),
        "eps": config.eps,
        "weight_decay": config.weight_decay,
    }
    match config.name:
        case Optimizer.adamw:
            return LocalAdamW(groups, **options, fused=True)
        case Optimizer.adafactor:
            return LocalAdafactor(groups, lr=learning_rate, weight_decay=config.weight_decay)
        case Optimizer.adamw_8bit | Optimizer.paged_adamw_8bit | Optimizer.paged_adamw_32bit:
            return LocalBitsandbytes(_bitsandbytes_class(config.name), params, groups, **options)
        case Optimizer.lion_32bit | Optimizer.lion_8bit:
            del options["eps"]  # Lion's update is a sign
            return LocalBitsandbytes(_bitsandbytes_class(config.name), params, groups, **options)
        case _:
            assert_never(config.name)


def _bitsandbytes_class(name: Optimizer) -> Any:
    """The class of bitsandbytes that has this name in transformers."""
    from bitsandbytes.optim.adamw import AdamW8bit, PagedAdamW8bit, PagedAdamW32bit
    from bitsandbytes.optim.lion import Lion8bit, Lion32bit

    classes = {
        Optimizer.adamw_8bit: AdamW8bit,
        Optimizer.paged_adamw_8bit: PagedAdamW8bit,
        Optimizer.paged_adamw_32bit: PagedAdamW32bit,
        Optimizer.lion_32bit: Lion32bit,
        Optimizer.lion_8bit: Lion8bit,
    }
    return classes[name]


def set_learning_rate(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    """Set the learning rate of the steps that follow: of each group its ratio times this one."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate * group[LR_RATIO]


def learning_rate_at(step: int, num_steps: int, peak: float, config: OptimConfig) -> float:
    """The learning rate of a step.

    During warmup it rises linearly, and the last step of warmup has the peak. Then cosine and linear fall to 0, which
    the step after the last one would have. From there on transformers' schedules of these names do the same, and the
    other shapes are transformers' own; their warmup is a step behind, as their first step has a rate of 0 and changes
    nothing. The host sets the rate before each step, whose update is launched kernel by kernel and is part of no graph.

    Args:
        step: 0 for the first optimizer step.
        num_steps: steps of the run.
        peak: the highest learning rate.
        config: length of the warmup, and the shape after it.
    """
    warmup = config.warmup_steps if config.warmup_steps is not None else math.ceil(config.warmup_ratio * num_steps)
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = (step - warmup) / max(1, num_steps - warmup)
    match config.lr_scheduler_type:
        case LrScheduler.constant:
            return peak
        case LrScheduler.linear:
            return peak * (1.0 - progress)
        case LrScheduler.cosine:
            return peak * 0.5 * (1.0 + math.cos(math.pi * progress))
        case (
            LrScheduler.cosine_with_min_lr
            | LrScheduler.warmup_stable_decay
            | LrScheduler.polynomial
            | LrScheduler.cosine_with_restarts
        ):
            arguments = config.lr_scheduler_type.arguments | config.lr_scheduler_kwargs
            factor = _schedule(config.lr_scheduler_type, warmup, num_steps, peak, tuple(sorted(arguments.items())))
            return peak * factor(step)
        case _:
            assert_never(config.lr_scheduler_type)


@cache
def _schedule(
    shape: LrScheduler, warmup: int, num_steps: int, peak: float, arguments: tuple[tuple[str, float], ...]
) -> Callable[[int], float]:
    """transformers' schedule: from a step to the part of the peak that its rate is."""
    own: dict[str, Any] = dict(arguments)
    if shape is LrScheduler.warmup_stable_decay:  # transformers counts steps
        own["num_decay_steps"] = min(num_steps - warmup, round(own.pop("decay_ratio") * num_steps))
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=peak)
    schedule = get_scheduler(shape.value, optimizer, warmup, num_steps, scheduler_specific_kwargs=own)
    return cast(Callable[[int], float], schedule.lr_lambdas[0])


@torch.no_grad()
def clip_gradients(params: Sequence[nn.Parameter], max_norm: float) -> Tensor:
    """Scale all gradients so that their global norm is at most `max_norm`, without waiting for the GPU.

    Args:
        params: trainable, sharded, after backward.
        max_norm: 0: the gradients stay as they are.

    Returns:
        The norm before scaling: a float64 scalar on the gradients' device, the same on every rank.
    """
    grads = [p.grad for p in params if p.grad is not None]
    local_grads = [local_tensor(grad) for grad in grads]
    norms = torch._foreach_norm(
        [grad for grad in local_grads if grad.numel()] or [local_tensor(params[0]).new_zeros(1)]
    )
    square = torch.stack(list(norms)).double().square().sum()
    group = shard_group(params[0])
    if group is not None:
        dist.all_reduce(square, group=group)
    norm = square.sqrt()
    if max_norm > 0:
        torch._foreach_mul_(local_grads, (max_norm / (norm + 1e-6)).clamp(max=1.0).float())
    return norm
