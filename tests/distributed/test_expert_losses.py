"""Mixtures of experts: losses against stock transformers, bitsandbytes and PEFT, and adapters that stock PEFT loads.

One family of each mechanism. `python -m tests.compare_families` compares all families, and on more steps.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import product
from pathlib import Path

import peft
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from qlora_fsdp.model.tasks.task_model import TaskModel
from qlora_fsdp.runtime.processes import Processes
from tests.helpers.quick_config import load_config
from tests.helpers.ranks import once, run_ranks
from tests.helpers.reference import load_stock, stock_losses
from tests.helpers.runs import Trained, logits_of, settings, train_all

pytestmark = pytest.mark.distributed
TOLERANCE = 1e-5
NUM_STEPS, RESUMED_AFTER = 6, 3
IDS = torch.arange(40).view(1, -1) + 5

# What each has that the others do not, and whether its rows can be packed.
FAMILIES = {
    "qwen3_moe": True,  # plain fused experts
    "gpt_oss": False,  # transposed experts with biases, gate and up interleaved, attention sinks
    "deepseek_v3": True,  # a dense layer first, shared experts that PEFT takes for fused ones, latent attention
    "llama4_text": True,  # experts whose inputs are multiplied by the routing weight, and which PEFT takes for others
    "mixtral": True,  # files whose names are others than the model's
}
ON_FOUR = ("qwen3_moe", "gpt_oss")  # rows of plain and of transposed experts
# Settings, on two ranks.
OTHERS: dict[str, tuple[str, list[str]]] = {
    "recomputed": ("qwen3_moe", ["memory.activations=full"]),
    "fp4, plain scales": ("gpt_oss", ["quant=fp4", "quant.bnb_4bit_use_double_quant=false"]),
    "int8": ("mixtral", ["quant=int8"]),
    "int4": ("gpt_oss", ["quant=int4"]),
    "mxfp4": ("qwen3_moe", ["quant=mxfp4"]),
    "nvfp4": ("qwen3_moe", ["quant=nvfp4"]),
    "mxfp4 of transposes": ("gpt_oss", ["quant=mxfp4"]),
    "fp8": ("qwen3_moe", ["quant=fp8"]),
    "not quantized": ("deepseek_v3", ["quant=none"]),
    "experts not adapted": ("qwen3_moe", ["lora.experts=false"]),
    "experts not quantized": ("mixtral", ["quant.llm_int8_skip_modules=[experts,lm_head]"]),
    "written": ("deepseek_v3", [f"checkpoint.every_steps={RESUMED_AFTER}"]),
}
CHANGES_NOTHING = ("recomputed", "written")


def inspect_logits(model: TaskModel, processes: Processes) -> Tensor:
    return logits_of(model, IDS)


@pytest.fixture(scope="module")
def runs(checkpoint: Callable[..., Path], rows: Path, tmp_path_factory: pytest.TempPathFactory):
    """`runs(num_ranks, case)`: the adapter's folder and what rank 0 saw. Runs on a number of ranks share a world."""
    folder = tmp_path_factory.mktemp("runs")

    def place(num_ranks: int, case: str) -> Path:
        return folder / f"{num_ranks}-{case.replace(' ', '-').replace(',', '')}"

    def cases(num_ranks: int) -> dict[str, list[str]]:
        def run(case: str, family: str, *more: str) -> list[str]:
            split = [f"training.micro_batch_size={4 // num_ranks}", f"run.folder={place(num_ranks, case)}"]
            return setting_of(checkpoint, rows, family, *split, *more)

        found = {family: run(family, family) for family in (ON_FOUR if num_ranks == 4 else FAMILIES)}
        if num_ranks == 2:
            found |= {case: run(case, family, *more) for case, (family, more) in OTHERS.items()}
            written = place(2, "written") / "checkpoints" / f"step-{RESUMED_AFTER:08}"
            found["resumed"] = run("resumed", "deepseek_v3", f"checkpoint.resume={written}")
        return found

    world = once(lambda num_ranks: run_ranks(num_ranks, train_all, cases(num_ranks), inspect_logits))

    def find(num_ranks: int, case: str) -> tuple[Path, Trained]:
        first, *others = [results[case] for results in world(num_ranks)]
        assert all(other.losses == first.losses for other in others), "ranks disagree about the loss"
        return place(num_ranks, case) / "adapter", first

    return find


def setting_of(checkpoint: Callable[..., Path], rows: Path, family: str, *more: str) -> list[str]:
    steps = f"training.max_steps={NUM_STEPS}"
    return settings(checkpoint(family), rows, steps, *more, packing=FAMILIES[family])


@pytest.fixture(scope="module")
def stock(checkpoint: Callable[..., Path], rows: Path):
    """Losses of the reference, each computed once."""
    return cache(lambda family, *more: stock_losses(setting_of(checkpoint, rows, family, *more)))


@pytest.mark.parametrize(
    ("family", "num_ranks"),
    [
        *product(FAMILIES, (1, 2)),
        *(pytest.param(family, 4, marks=pytest.mark.slow) for family in ON_FOUR),
    ],
)
def test_families(runs, stock, family: str, num_ranks: int):
    losses = runs(num_ranks, family)[1].losses
    assert losses == pytest.approx(stock(family), abs=TOLERANCE)
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("case", OTHERS)
def test_settings(runs, stock, case: str):
    family, more = OTHERS[case]
    expected = stock(family, *([] if case in CHANGES_NOTHING else more))
    assert runs(2, case)[1].losses == pytest.approx(expected, abs=TOLERANCE)
    if case not in CHANGES_NOTHING:  # what the setting does shows in the losses
        assert expected != pytest.approx(stock(family), abs=TOLERANCE)


def test_a_resumed_run_goes_on(runs, stock):
    assert runs(2, "resumed")[1].losses == pytest.approx(stock("deepseek_v3")[RESUMED_AFTER:], abs=TOLERANCE)


@pytest.mark.parametrize("case", ["qwen3_moe", "gpt_oss", "mixtral", "not quantized"])
def test_stock_peft_loads_the_adapter(runs, checkpoint, rows: Path, case: str):
    """Onto the stock base, which computes our logits then. PEFT adapts no quantized layer by its parameter, as DeepSeek
    V3's shared experts need: there the base is in full precision."""
    family, more = OTHERS.get(case, (case, []))
    adapter, trained = runs(2, case)
    base = load_stock(checkpoint(family), load_config(setting_of(checkpoint, rows, family, *more)).quant)
    model = peft.PeftModel.from_pretrained(base, adapter).eval()
    saved = load_file(adapter / "adapter_model.safetensors")
    loaded = {name.replace(".default", ""): value for name, value in model.named_parameters() if "lora_" in name}
    assert loaded.keys() == saved.keys()
    assert all(torch.equal(loaded[name], value) for name, value in saved.items())
    assert all(value.any() for value in saved.values())  # B too has been trained, of every layer
    with torch.no_grad():
        logits = model(input_ids=IDS).logits
        with model.disable_adapter():
            of_base = model(input_ids=IDS).logits
    torch.testing.assert_close(trained.inspected, logits, atol=1e-4, rtol=1e-4)
    assert (logits - of_base).abs().max() > 100 * (logits - trained.inspected).abs().max()
