"""Losses of our runs against stock transformers, bitsandbytes and PEFT, step by step, in float32."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.checkpoints import FAMILIES
from tests.helpers.ranks import once, run_ranks
from tests.helpers.reference import stock_losses
from tests.helpers.runs import settings, train_all

pytestmark = pytest.mark.distributed
TOLERANCE = 1e-5
NUM_FEW = 6
FEW_STEPS = f"training.max_steps={NUM_FEW}"

# `make test` trains these on at most 2 ranks: the plainest, one with norms of heads, and one that attends to a window.
QUICK_FAMILIES = ("llama", "qwen3", "gemma2")
# Packed where a family can be packed, and padded at 2 ranks where attention is special. Every family at 2 ranks; at 1,
# which takes all sequences at once, the quick ones; at 4 these and one whose projections are joined in a weight, of
# which a rank has rows. 20 steps of the plainest at 2 ranks, else few.
FAMILY_CASES = [(2, family, family != "bert") for family in FAMILIES]
FAMILY_CASES += [(1, family, True) for family in QUICK_FAMILIES]
FAMILY_CASES += [(4, family, True) for family in (*QUICK_FAMILIES, "phi3")]
FAMILY_CASES += [(2, "llama", False), (2, "gemma2", False)]
LONG_CASE = (2, "llama", True)

# The same 8 sequences a step, cut in other ways: (ranks, micro-batch size).
SPLITS = [(1, 8), (1, 2), (2, 4), (2, 1), (4, 2), (4, 1)]

# Settings that must not change what is computed, and the number of ranks they are tried on.
SAME_NUMBERS = {
    "SHARD_GRAD_OP": (2, ["fsdp.sharding_strategy=SHARD_GRAD_OP"]),
    "NO_SHARD": (2, ["fsdp.sharding_strategy=NO_SHARD"]),
    "HYBRID_SHARD": (4, ["fsdp.sharding_strategy=HYBRID_SHARD", "fsdp.hybrid_shard_size=2"]),
    "HYBRID_SHARD, accumulating": (
        4,
        ["fsdp.sharding_strategy=HYBRID_SHARD", "fsdp.hybrid_shard_size=2", "training.global_batch_size=8"],
    ),
    "cpu_offload": (2, ["fsdp.cpu_offload=true", "training.micro_batch_size=1"]),
    "activations recomputed": (2, ["memory.activations=full"]),
    "attention kept": (2, ["memory=keep_attention"]),
    "attention kept on the host": (2, ["memory=offload_attention"]),
    "norms recomputed": (2, ["memory.activations=selective"]),
    "every second layer recomputed": (2, ["memory.activations=half"]),
    "in tiles": (2, ["memory.tile_tokens=64"]),
    "in tiles, inputs offloaded": (2, ["memory.tile_tokens=64", "memory.activations=offload"]),
    "deterministic": (2, ["training.deterministic=true", "training.micro_batch_size=1"]),
    "evaluation between": (2, ["data.eval_fraction=0.1", "training.eval_every_steps=3"]),
}
CHANGES_DATA = ("data.", "training.global_batch_size")  # the reference needs these too

# Settings that change what is computed, in our run and in the reference alike.
OTHER_NUMBERS = {
    "fp4": (2, "llama", ["quant=fp4"]),
    "nf4 without double quantization": (2, "llama", ["quant.bnb_4bit_use_double_quant=false"]),
    "int8": (2, "llama", ["quant=int8"]),
    "int4": (2, "llama", ["quant=int4"]),
    "mxfp4": (2, "llama", ["quant=mxfp4"]),
    "nvfp4": (2, "llama", ["quant=nvfp4"]),
    "int4 in groups of 64, dora": (2, "qwen2", ["quant=int4", "quant.group_size=64", "lora.use_dora=true"]),
    "fp8": (2, "llama", ["quant=fp8"]),
    "int8 embeddings and head": (2, "llama", ["quant.embeddings=int8"]),
    "int8 head in pieces": (2, "llama", ["quant.embeddings=int8", "memory.head_in_pieces=true"]),
    "not quantized": (2, "llama", ["quant=none"]),
    "rslora": (2, "llama", ["lora.use_rslora=true"]),
    "dora": (2, "llama", ["lora.use_dora=true"]),
    "lm_head trained": (2, "llama", ["lora.modules_to_save=[lm_head]"]),
    "embed_tokens trained": (2, "llama", ["lora.modules_to_save=[embed_tokens]"]),
    "tied embed_tokens trained": (2, "qwen2", ["lora.modules_to_save=[embed_tokens]"]),
    "tied lm_head trained": (2, "qwen2", ["lora.modules_to_save=[lm_head]"]),
    "one module adapted": (2, "llama", ["lora.target_modules=[q_proj]"]),
    "head adapted": (2, "llama", ["lora.target_modules=[q_proj,lm_head]"]),
    "some layers not quantized": (2, "qwen2", ["quant.llm_int8_skip_modules=[v_proj,layers.0.mlp,lm_head]"]),
    "the head quantized": (2, "llama", ["quant.llm_int8_skip_modules=[v_proj]"]),
    "layers excluded": (2, "llama", ["lora.exclude_modules=[o_proj,layers.1.mlp.up_proj]"]),
    "decay and momentum": (2, "llama", ["optim.weight_decay=0.1", "optim.betas=[0.8,0.95]", "optim.eps=1e-6"]),
    "ranks and alphas that differ": (2, "llama", ["lora.rank_pattern={q_proj:3}", "lora.alpha_pattern={v_proj:5.0}"]),
    "adamw_8bit": (1, "llama", ["optim=adamw_8bit", "lora.r=64"]),
    # 64 x 64 elements, of which each rank has half: stock bitsandbytes, which has them whole, keeps 8 bits of them.
    "adamw_8bit on two ranks": (2, "llama", ["optim=adamw_8bit", "lora.r=64"]),
}


DROPOUT = {
    "dropout": ["lora.lora_dropout=0.3"],
    "dropout again": ["lora.lora_dropout=0.3"],
    "no dropout": [],
}


@pytest.fixture(scope="module")
def losses(
    checkpoint: Callable[..., Path], rows: Path, request: pytest.FixtureRequest
) -> Callable[[int, object], list[float]]:
    """`losses(num_ranks, case)` of our runs; all runs on a number of ranks share one world.

    It trains the families whose tests are slow only if this session runs any slow test of this file.
    """
    of_this_file = (item for item in request.session.items if item.path == request.path)
    with_slow_ones = any(item.get_closest_marker("slow") is not None for item in of_this_file)

    def cases(num_ranks: int) -> dict[object, list[str]]:
        def run(family: str, *more: str, packing: bool = True) -> list[str]:
            size = f"training.micro_batch_size={4 // num_ranks}"
            return settings(checkpoint(family), rows, size, *more, packing=packing)

        found: dict[object, list[str]] = {
            case[1:]: run(case[1], *([] if case == LONG_CASE else [FEW_STEPS]), packing=case[2])
            for case in FAMILY_CASES
            if case[0] == num_ranks and (with_slow_ones or not is_slow(*case[:2]))
        }
        for size in (size for n, size in SPLITS if n == num_ranks):
            split = [f"training.micro_batch_size={size}", "training.global_batch_size=8"]
            found[("split", size)] = run("llama", FEW_STEPS, *split)
        found |= {case: run("llama", FEW_STEPS, *more) for case, (n, more) in SAME_NUMBERS.items() if n == num_ranks}
        found |= {case: run(f, FEW_STEPS, *more) for case, (n, f, more) in OTHER_NUMBERS.items() if n == num_ranks}
        if num_ranks == 2:
            found |= {case: run("llama", FEW_STEPS, *more) for case, more in DROPOUT.items()}
        return found

    world = once(lambda num_ranks: run_ranks(num_ranks, train_all, cases(num_ranks)))

    def find(num_ranks: int, case: object) -> list[float]:
        everyone = [results[case].losses for results in world(num_ranks)]
        assert all(other == everyone[0] for other in everyone), "ranks disagree about the loss"
        return everyone[0]

    return find


@pytest.fixture(scope="module")
def stock(checkpoint: Callable[..., Path], rows: Path) -> Callable[..., list[float]]:
    """Losses of the reference, each computed once, of as many steps as the longest run that it is compared with."""

    @cache
    def find(family: str, *more: str, packing: bool = True) -> list[float]:
        few = [] if (2, family, packing) == LONG_CASE and not more else [FEW_STEPS]
        return stock_losses(settings(checkpoint(family), rows, *few, *more, packing=packing))

    return find


def assert_close(ours: list[float], reference: list[float]) -> None:
    assert len(ours) >= NUM_FEW and ours == pytest.approx(reference[: len(ours)], abs=TOLERANCE)
    assert ours[-1] < ours[0]


def is_slow(num_ranks: int, family: str = "llama") -> bool:
    """Whether only `make test-all` trains this: on four processes, or a family beside the quick ones."""
    return num_ranks == 4 or family not in QUICK_FAMILIES


def with_slow(cases: Iterable[Any], slow: Callable[[Any], bool]) -> list[Any]:
    """The cases for `parametrize`, of which some are marked slow."""
    return [pytest.param(*case, marks=[pytest.mark.slow] if slow(case) else []) for case in cases]


@pytest.mark.parametrize(
    ("num_ranks", "family", "packing"), with_slow(FAMILY_CASES, lambda case: is_slow(case[0], case[1]))
)
def test_families(losses, stock, num_ranks: int, family: str, packing: bool):
    assert_close(losses(num_ranks, (family, packing)), stock(family, packing=packing))


@pytest.mark.parametrize(("num_ranks", "micro_batch_size"), with_slow(SPLITS, lambda case: is_slow(case[0])))
def test_splits(losses, stock, num_ranks: int, micro_batch_size: int):
    reference = stock("llama", "training.global_batch_size=8")
    assert_close(losses(num_ranks, ("split", micro_batch_size)), reference)
    assert losses(num_ranks, ("split", micro_batch_size)) == pytest.approx(losses(1, ("split", 8)), abs=TOLERANCE)


@pytest.mark.parametrize(
    "case", with_slow([(case,) for case in SAME_NUMBERS], lambda case: is_slow(SAME_NUMBERS[case[0]][0]))
)
def test_settings_that_change_no_number(losses, stock, case: str):
    num_ranks, more = SAME_NUMBERS[case]
    data = [setting for setting in more if setting.startswith(CHANGES_DATA)]
    assert_close(losses(num_ranks, case), stock("llama", *data))


@pytest.mark.parametrize("case", OTHER_NUMBERS)
def test_settings_that_change_numbers(losses, stock, case: str):
    num_ranks, family, more = OTHER_NUMBERS[case]
    assert_close(losses(num_ranks, case), stock(family, *more))


def test_dropout_trains_and_repeats(losses):
    dropped = losses(2, "dropout")
    assert dropped == losses(2, "dropout again")
    assert dropped[0] == losses(2, "no dropout")[0]  # B is zero: the adapters' output is zero, dropped or not
    assert dropped[1:] != losses(2, "no dropout")[1:]
    assert all(map(math.isfinite, dropped)) and dropped[-1] < dropped[0]
