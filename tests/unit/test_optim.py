"""The optimizer on a rank's own rows against torch's own."""

from __future__ import annotations

import copy

import torch
from bitsandbytes.optim.adamw import AdamW8bit
from torch import nn

from qlora_fsdp.config.schema import OptimConfig, Optimizer
from qlora_fsdp.training.optim import make_optimizer


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
