"""The optimizer on a rank's own rows against torch's own."""

from __future__ import annotations

import copy

import peft
import pytest
import torch
from bitsandbytes.optim.adamw import AdamW8bit
from peft.optimizers import create_loraplus_optimizer
from tests.helpers.reference import stock_optimizer
from torch import nn
from transformers import TrainingArguments, get_scheduler

from qlora_fsdp.config.schema import LrScheduler, OptimConfig, Optimizer
from qlora_fsdp.training.optim import learning_rate_at, make_optimizer, rate_ratios, set_learning_rate


def test_adamw_is_torchs_own_bit_for_bit():
    torch.manual_seed(0)
    ours = nn.ParameterList(
        [nn.Parameter(torch.randn(8, 5)), nn.Parameter(torch.randn(3)), nn.Parameter(torch.ones(2))]
    )
    plain = copy.deepcopy(ours)
    config = OptimConfig(weight_decay=0.1)
    optimizer = make_optimizer(ours, config, 1e-2)
    reference = torch.optim.AdamW(plain, lr=1e-2, weight_decay=0.1, fused=True)
    for step in range(6):
        for params, made in ((ours, optimizer), (plain, reference)):
            made.param_groups[0]["lr"] = 1e-2 / (step + 1)
            for index, param in enumerate(params):
                if index in (1, 2) and (step + index) % 2:  # now one, now the other has a gradient
                    continue
                param.grad = torch.full_like(param, 0.1 * step - 0.2 + index)
            made.found_inf = torch.tensor(float(step in (0, 4)))
            made.step()
            made.zero_grad()
        if step == 3:  # as loading a checkpoint does
            for param in ours:
                optimizer.state[param] = {key: value.clone() for key, value in optimizer.state[param].items()}
    for param, expected in zip(ours, plain, strict=True):
        assert torch.equal(param, expected)
    for key in ("exp_avg", "exp_avg_sq", "step"):
        assert torch.equal(optimizer.state[ours[0]][key], reference.state[plain[0]][key])


def test_8_bit_adamw_is_bitsandbytes_own_bit_for_bit():
    """With state in 8 bits and, of a small tensor, in 32; one of them without a gradient now and then."""
    torch.manual_seed(0)
    ours = nn.ParameterList([nn.Parameter(torch.randn(64, 256)), nn.Parameter(torch.randn(300))])
    plain = copy.deepcopy(ours)
    optimizer = make_optimizer(ours, OptimConfig(name=Optimizer.adamw_8bit, weight_decay=0.1), 1e-2)
    reference = AdamW8bit(list(plain), lr=1e-2, weight_decay=0.1)
    for step in range(4):
        for index, (param, expected) in enumerate(zip(ours, plain, strict=True)):
            param.grad = None if index == step % 3 else torch.randn(256, 64).t() if index == 0 else torch.randn(300)
            expected.grad = None if param.grad is None else param.grad.clone()
        for made in (optimizer, reference):
            made.param_groups[0]["lr"] = 1e-2 / (step + 1)
            made.step()
        optimizer.found_inf = torch.ones(())
        optimizer.step()  # changes nothing
        optimizer.found_inf = torch.zeros(())
        assert all(map(torch.equal, ours, plain))


OWN_ARGUMENTS = [shape for shape in LrScheduler if not shape.arguments]


@pytest.mark.parametrize("shape", OWN_ARGUMENTS)
@pytest.mark.parametrize("num_steps", [6, 100])
@pytest.mark.parametrize("num_warmup", [0, 1, 5])
def test_the_learning_rate_is_that_of_transformers_after_a_warmup_that_is_a_step_ahead(
    shape: LrScheduler, num_steps: int, num_warmup: int
):
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.5)
    # transformers' schedule of this name rises too, as its `constant_with_warmup`.
    name = "constant_with_warmup" if shape is LrScheduler.constant else shape.value
    schedule = get_scheduler(name, optimizer, num_warmup_steps=num_warmup, num_training_steps=num_steps)
    theirs = []
    for _ in range(num_steps + 1):
        theirs.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    config = OptimConfig(lr_scheduler_type=shape, warmup_steps=num_warmup)
    ours = [learning_rate_at(step, num_steps, 0.5, config) for step in range(num_steps)]
    ahead = min(num_warmup, num_steps)
    assert ours == pytest.approx([*theirs[1 : ahead + 1], *theirs[ahead:num_steps]])


def test_the_part_of_the_steps_is_rounded_as_in_transformers():
    for ratio, num_steps in ((0.03, 100), (0.03, 101), (0.1, 7)):
        config = OptimConfig(warmup_ratio=ratio, lr_scheduler_type=LrScheduler.linear)
        rates = [learning_rate_at(step, num_steps, 1.0, config) for step in range(num_steps)]
        num_warmup = TrainingArguments(warmup_steps=ratio, use_cpu=True).get_warmup_steps(num_steps)
        assert rates.index(1.0) == num_warmup - 1


@pytest.mark.parametrize("num_warmup", [0, 5])
@pytest.mark.parametrize(
    ("shape", "ours", "theirs"),
    [
        (LrScheduler.cosine_with_min_lr, {}, {"min_lr_rate": 0.1}),
        (LrScheduler.cosine_with_min_lr, {"min_lr_rate": 0.3}, {"min_lr_rate": 0.3}),
        (LrScheduler.warmup_stable_decay, {}, {"num_decay_steps": 20}),
        (
            LrScheduler.warmup_stable_decay,
            {"decay_ratio": 0.5, "min_lr_ratio": 0.1},
            {"num_decay_steps": 50, "min_lr_ratio": 0.1},
        ),
        (LrScheduler.polynomial, {"power": 2.0, "lr_end": 0.01}, {"power": 2.0, "lr_end": 0.01}),
        (LrScheduler.cosine_with_restarts, {"num_cycles": 3}, {"num_cycles": 3}),
    ],
)
def test_schedules_with_arguments_are_transformers(
    shape: LrScheduler, ours: dict[str, float], theirs: dict[str, float], num_warmup: int
):
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.5)
    schedule = get_scheduler(shape.value, optimizer, num_warmup, 100, scheduler_specific_kwargs=theirs)
    config = OptimConfig(lr_scheduler_type=shape, lr_scheduler_kwargs=ours, warmup_steps=num_warmup)
    rates = []
    for _ in range(100):
        rates.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    found = [learning_rate_at(step, 100, 0.5, config) for step in range(100)]
    assert found[num_warmup:] == pytest.approx(rates[num_warmup:], rel=1e-12)
    assert found[:num_warmup] == pytest.approx([0.5 * (step + 1) / num_warmup for step in range(num_warmup)])


@pytest.mark.parametrize("name", Optimizer)
def test_lora_plus_is_pefts(name: Optimizer):
    """Against `create_loraplus_optimizer` on a model that PEFT adapts, with torch's or bitsandbytes' AdamW."""
    torch.manual_seed(0)
    base = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64))
    ours = peft.get_peft_model(base, peft.LoraConfig(r=64, target_modules=["0", "2"], use_dora=True))
    theirs = copy.deepcopy(ours)
    config = OptimConfig(name=name, loraplus_lr_ratio=16.0)
    trained = [param for param in ours.parameters() if param.requires_grad]
    optimizer = make_optimizer(trained, config, 1e-3, rate_ratios(ours, config, 1e-3))
    kind = type(stock_optimizer([nn.Parameter(torch.ones(1))], config, 1e-3))
    own = {"scale_parameter": False, "relative_step": False} if name is Optimizer.adafactor else {}
    if name in (Optimizer.lion_32bit, Optimizer.lion_8bit):
        own = {"betas": tuple(config.betas)}
    reference = create_loraplus_optimizer(
        theirs, kind, lr=1e-3, loraplus_lr_ratio=16.0, loraplus_weight_decay=0.0, **own
    )
    inputs = torch.randn(8, 64)
    for step in range(6):
        losses = []
        for model in (ours, theirs):
            model.zero_grad()
            loss = (model(inputs) - 1.0).square().mean()
            loss.backward()
            losses.append(loss.item())
        assert losses[0] == pytest.approx(losses[1], rel=1e-6)
        rate = 1e-3 / (step + 1)
        set_learning_rate(optimizer, rate)
        for group, start in zip(reference.param_groups, [1e-3, 1e-3, 16e-3, 16e-3], strict=False):
            group["lr"] = start / (step + 1)
        optimizer.step()
        reference.step()
    assert losses[0] < 0.9
