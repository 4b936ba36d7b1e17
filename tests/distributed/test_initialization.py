"""What a run starts from is the same for a seed at any number of ranks, and is what PEFT would start from."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from qlora_fsdp.model.tasks.causal_lm import CausalLM
from qlora_fsdp.runtime.processes import Processes
from tests.helpers.quick_config import load_config
from tests.helpers.ranks import once, run_ranks
from tests.helpers.reference import add_lora, load_stock
from tests.helpers.runs import gathered_adapter, gathered_parts, settings, train_all

pytestmark = pytest.mark.distributed

CASES = {
    "kaiming": [],
    "gaussian": ["lora.init_lora_weights=Gaussian"],  # in any case, as in PEFT
    "orthogonal": ["lora.init_lora_weights=orthogonal"],
    "another seed": ["training.seed=1"],
    "dora": ["lora.use_dora=true"],
    "dora on a head": ["lora.use_dora=true", "lora.target_modules=[lm_head]"],
    "dora, offloaded": ["lora.use_dora=true", "fsdp.cpu_offload=true"],
    "trained head and embeddings": ["lora.modules_to_save=[lm_head,embed_tokens]"],
    "random base": ["model.weights=random"],
    # From the error of the rounding: tests/unit/test_rounding_error.py says of which format it is what.
    "loftq": ["lora.init_lora_weights=loftq"],
    "loftq, offloaded": ["lora.init_lora_weights=LoftQ", "quant=int8", "lora.use_rslora=true", "fsdp.cpu_offload=true"],
    "loftq, replicated": ["lora.init_lora_weights=loftq", "quant=mxfp4", "fsdp=no_shard", "model.weights=random"],
}


def everything(model: CausalLM, processes: Processes) -> dict[str, Tensor]:
    return gathered_adapter(model, processes) | gathered_parts(model, processes)


@pytest.fixture(scope="module")
def start(checkpoint: Callable[..., Path], rows: Path) -> Callable[[int, str], dict[str, Tensor]]:
    """`start(num_ranks, case)`: everything before the first step."""
    cases = {
        name: settings(checkpoint("llama"), rows, "training.global_batch_size=null", *more)
        for name, more in CASES.items()
    }
    world = once(lambda num_ranks: run_ranks(num_ranks, train_all, cases, everything, False))
    return lambda num_ranks, name: world(num_ranks)[0][name].inspected


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("case", CASES)
def test_ranks_do_not_change_it(start, case: str, num_ranks: int):
    one, several = start(1, case), start(num_ranks, case)
    assert one.keys() == several.keys()
    assert [name for name in one if not torch.equal(one[name], several[name])] == []


def adapters(state: dict[str, Tensor], kind: str) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in state.items() if f".lora_{kind}." in name}


def test_draws_are_of_the_named_kind(start):
    for case in ("kaiming", "gaussian"):
        assert all(not tensor.any() for tensor in adapters(start(1, case), "B").values())
    for name, tensor in adapters(start(1, "kaiming"), "A").items():
        bound = tensor.shape[1] ** -0.5
        assert 0.9 * bound < tensor.abs().max() <= bound and tensor.std().item() == pytest.approx(
            bound / 3**0.5, rel=0.1
        )
        assert start(1, "gaussian")[name].std().item() == pytest.approx(1 / 8, rel=0.15)  # 1 / r
        assert not torch.equal(tensor, start(1, "another seed")[name])
    orthogonal = start(1, "orthogonal")
    for name, a in adapters(orthogonal, "A").items():
        b = orthogonal[name.replace("lora_A", "lora_B")]
        assert a.any() and b.any()
        torch.testing.assert_close(b @ a, torch.zeros(len(b), a.shape[1]), atol=1e-5, rtol=0)  # A and B do not meet
    layers = list(adapters(start(1, "kaiming"), "A").values())
    same_shape = [tensor for tensor in layers if tensor.shape == layers[0].shape]
    assert len({tuple(tensor.flatten().tolist()) for tensor in same_shape}) == len(same_shape) > 2


@pytest.mark.parametrize("case", ["dora", "dora on a head", "dora, offloaded", "trained head and embeddings"])
def test_magnitudes_and_trained_modules_are_pefts(start, checkpoint, rows, case: str):
    config = load_config(settings(checkpoint("llama"), rows, *CASES[case]))
    stock = add_lora(load_stock(checkpoint("llama"), config.quant), config)
    ours = start(2, case)
    expected = {name: param for name, param in stock.named_parameters() if param.requires_grad}
    assert expected.keys() == {
        name for name in ours if name in expected or ".lora_" in name or "modules_to_save" in name
    }
    for name, param in expected.items():
        torch.testing.assert_close(ours[name], param.detach(), rtol=0, atol=1e-6, msg=name)


def test_random_weights_are_drawn_as_configured(start, checkpoint):
    random, loaded = start(1, "random base"), start(1, "kaiming")
    codes = [name for name in loaded if name.endswith(".codes")]
    assert len(codes) == 14 and all(not torch.equal(random[name], loaded[name]) for name in codes)
