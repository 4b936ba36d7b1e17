"""Ranks that share sequences (`distributed.context_parallel`) against stock libraries in one process, in float32.

The stock libraries compute a row at a time: no packing, no slices, no exchange.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from transformers import AutoConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from qlora_fsdp.layers.attention.choose import VARLEN
from qlora_fsdp.layers.attention.sliced import slice_attention
from qlora_fsdp.model.trials.attention_by_starts import BY_STARTS, attend_by_starts, register_stand_ins
from qlora_fsdp.runtime.processes import join_context_group, start_processes, stop_processes
from qlora_fsdp.training import step
from tests.helpers.checkpoints import SHAPE, write_checkpoint
from tests.helpers.lines import write_lines
from tests.helpers.plain_varlen import cpu_with_varlen
from tests.helpers.ranks import Meeting, once, run_ranks
from tests.helpers.reference import stock_losses
from tests.helpers.runs import Trained, attention_of, settings, train_all

pytestmark = pytest.mark.distributed
TOLERANCE = 1e-5
NUM_STEPS = "training.max_steps=6"
AT_ONCE, ALONE = "training.micro_batch_size=2", "training.micro_batch_size=1"

# Ranks, ranks that share a sequence, family and settings. Sequences of 64 tokens hold rows of 10 to 60, which straddle
# slices; windows are of 16 tokens; all but deepseek_v3 have two heads of keys for four of queries. A step's four
# sequences are computed by two at once where nothing else is said.
CASES: dict[str, tuple[int, int, str, list[str]]] = {
    "packed": (2, 2, "llama", []),
    "windows": (2, 2, "mistral", []),
    "sinks, windows and experts": (2, 2, "gpt_oss", []),
    "latent attention and experts": (2, 2, "deepseek_v3", []),
    "a row a sequence": (2, 2, "llama", ["training.packing=false", ALONE]),
    "a sequence at once": (2, 2, "llama", [ALONE]),
    "a length that is no multiple": (2, 2, "opt", ["training.max_length=63", ALONE]),
    "layers computed again": (2, 2, "llama", ["memory.activations=full"]),
    "all but attention computed again": (2, 2, "mistral", ["memory=keep_attention"]),
    "the base on every rank": (2, 2, "llama", ["fsdp.sharding_strategy=NO_SHARD"]),
    "repeatable": (2, 2, "llama", ["training.deterministic=true"]),
    "evaluated": (2, 2, "llama", ["data.eval_fraction=0.1", "training.eval_every_steps=3"]),
    "three ranks": (3, 3, "six_heads", []),
    "four ranks, two heads of keys": (4, 4, "llama", []),
    "two groups of two": (4, 2, "mistral", [ALONE]),
}
QUICK = ("packed", "windows", "sinks, windows and experts", "a length that is no multiple")
CHANGES_DATA = ("data.", "training.max_length", "training.packing")  # the reference needs these too


@pytest.fixture(scope="module")
def argv(checkpoint: Callable[..., Path], rows: Path, tmp_path_factory) -> Callable[..., list[str]]:
    """The command line of a case; without slices that of the reference."""
    shape = SHAPE | {"num_attention_heads": 6, "head_dim": 32}
    config = AutoConfig.for_model("qwen3", **shape, initializer_range=0.1)
    six_heads = write_checkpoint(config, tmp_path_factory.mktemp("six_heads") / "model")

    def make(case: str, sliced: bool) -> list[str]:
        _, num_slices, family, more = CASES[case]
        folder = six_heads if family == "six_heads" else checkpoint(family)
        more = more if sliced else [each for each in more if each.startswith(CHANGES_DATA)]
        return settings(
            folder, rows, NUM_STEPS, AT_ONCE, *more, *([f"distributed.context_parallel={num_slices}"] if sliced else [])
        )

    return make


@contextmanager
def gradients_of(module: Any, clip: str) -> Iterator[list[torch.Tensor]]:
    """The whole gradients of the last step, before they are clipped: of all trained parameters, in their order."""
    found: list[torch.Tensor] = []
    clip_all = getattr(module, clip)

    def record(params: Sequence[torch.Tensor], *args: Any) -> Any:
        grads = [param.grad for param in params]
        found[:] = [grad.full_tensor() if isinstance(grad, DTensor) else grad.clone() for grad in grads]
        return clip_all(params, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, clip, record)
        yield found


def train_sliced(cases: Mapping[str, Sequence[str]]) -> dict[str, tuple[Trained, list[torch.Tensor]]]:
    """Runs on this rank of a world, and the gradients of the last step; varlen computes those with sinks."""
    found = {}
    for case, argv in cases.items():
        varlen = cpu_with_varlen() if any("gpt_oss" in text for text in argv) else nullcontext()
        with varlen, gradients_of(step, "clip_gradients") as grads:
            found[case] = train_all({case: argv}, attention_of)[case], grads
    return found


@pytest.fixture(scope="module")
def runs(argv, tmp_path_factory) -> Callable[[int, bool], list[dict[str, tuple[Trained, list[torch.Tensor]]]]]:
    folder = tmp_path_factory.mktemp("runs")

    def run(num_ranks: int, quick: bool) -> list[dict[str, tuple[Trained, list[torch.Tensor]]]]:
        chosen = [case for case in CASES if CASES[case][0] == num_ranks and (case in QUICK) == quick]
        cases = {case: argv(case, sliced=True) for case in chosen}
        if quick:
            few = ["checkpoint.every_steps=4"]
            kept = f"checkpoint.resume={folder}/kept/checkpoints/step-00000004"
            cases["kept"] = [*argv("packed", sliced=True), *few, f"run.folder={folder}/kept"]
            whole = [f"run.folder={folder}/gone-on", "distributed.context_parallel=1", kept]
            cases["gone on"] = [*argv("packed", sliced=False), *few, *whole]
        return run_ranks(num_ranks, train_sliced, cases)

    return once(run)


@pytest.fixture(scope="module")
def stock(argv) -> Callable[[str], tuple[list[float], list[torch.Tensor]]]:
    """Losses of the reference and the gradients of its last step, computed once for all cases with the same."""

    @cache
    def find(*arguments: str) -> tuple[list[float], list[torch.Tensor]]:
        with gradients_of(torch.nn.utils, "clip_grad_norm_") as grads:
            return stock_losses(arguments), grads

    return lambda case: find(*argv(case, sliced=False))


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[] if case in QUICK else [pytest.mark.slow]) for case in CASES]
)
def test_losses_and_gradients_are_those_of_one_process(runs, stock, case: str):
    num_ranks, num_slices, family, _ = CASES[case]
    expected, expected_grads = stock(case)
    for rank in runs(num_ranks, case in QUICK):
        trained, grads = rank[case]
        for ours, theirs in zip(grads, expected_grads, strict=True):  # Adam hides how large they are
            torch.testing.assert_close(ours, theirs, rtol=0, atol=TOLERANCE)
        assert trained.losses == pytest.approx(expected, abs=TOLERANCE)
        whole = VARLEN if family == "gpt_oss" else BY_STARTS
        assert trained.inspected == f"{whole}_in_{num_slices}_slices"
    assert expected_grads and expected[-1] < expected[0]


def test_a_run_goes_on_at_another_number_of_slices(runs):
    straight, gone_on = (runs(2, True)[0][case][0] for case in ("packed", "gone on"))
    assert "slices" not in gone_on.inspected
    assert gone_on.losses == pytest.approx(straight.losses[4:6], abs=TOLERANCE)


@pytest.mark.slow
def test_slices_learn_to_copy_what_is_in_another_slice(tmp_path: Path):
    """28 letters that are to be written again, in sequences of 64 tokens: most are copied from the slice before.

    Who knows no more than which letters there are has a loss of ln 8 = 2.08.
    """
    rng = random.Random(0)
    texts = ["".join(rng.choices("abcdefgh", k=28)) for _ in range(2000)]
    rows = tmp_path / "rows.jsonl"
    write_lines(rows, ({"prompt": text, "completion": text} for text in texts))
    config = AutoConfig.for_model("llama", **SHAPE, initializer_range=0.05)
    base = write_checkpoint(config, tmp_path / "model", torch.float32)
    trained = ["quant=none", "lora.r=64", "lora.lora_alpha=64", "lora.modules_to_save=[embed_tokens,lm_head]"]
    batch = ["training.micro_batch_size=16", "training.global_batch_size=16"]
    steps = ["training.max_steps=60", "training.learning_rate=5e-3"]
    losses = []
    for n in (1, 2):
        argv = settings(base, rows, *trained, *batch, *steps, f"distributed.context_parallel={n}")
        losses.append(run_ranks(n, train_all, {"copies": argv})[0]["copies"].losses)
    whole, sliced = losses
    # Learning sets in between two steps, and from there on rounding grows: so it does with other micro-batches.
    assert sliced[:15] == pytest.approx(whole[:15], abs=1e-4)
    assert sliced == pytest.approx(whole, abs=0.4)
    assert max(whole[-5:]) < 0.5 and max(sliced[-5:]) < 0.5


# Heads of queries and of keys, and ranks: as many keys' heads as ranks, fewer, and numbers that do not divide.
HEADS = [(4, 2, 2), (4, 1, 2), (6, 3, 3), (12, 4, 3), (6, 2, 3)]
NUM_SEQUENCES, LENGTH, STARTS = 2, 12, (0, 5, 12, 16, 24)


def attend(num_slices: int, heads: Sequence[tuple[int, int, int]]) -> list[float]:
    """On this rank: the largest difference of output and gradients from attention to whole sequences, of each case."""
    register_stand_ins()
    Meeting.new_port()
    processes = start_processes(60, use_cpu=True)
    try:
        name = slice_attention(BY_STARTS, num_slices, join_context_group(processes, num_slices))
        return [_difference(name, processes.rank, *case) for case in heads]
    finally:
        stop_processes()


def _difference(name: str, rank: int, num_heads: int, num_key_heads: int, num_slices: int) -> float:
    generator = torch.Generator().manual_seed(0)

    def draw(num: int, width: int) -> torch.Tensor:
        return torch.randn(NUM_SEQUENCES, num, LENGTH, width, generator=generator, requires_grad=True)

    whole = [draw(num_heads, 8), draw(num_key_heads, 8), draw(num_key_heads, 6)]
    sinks = torch.randn(num_heads, generator=generator, requires_grad=True)
    weights = torch.randn(NUM_SEQUENCES, LENGTH, num_heads, 6, generator=generator)
    told = {"cu_seq_lens_q": torch.tensor(STARTS, dtype=torch.int32), "sliding_window": 4}
    expected, _ = attend_by_starts(torch.nn.Identity(), *whole, None, s_aux=sinks, **told)
    expected_grads = torch.autograd.grad((expected * weights).sum(), [*whole, sinks])
    own = slice(rank * LENGTH // num_slices, (rank + 1) * LENGTH // num_slices)
    mine = [x.detach()[:, :, own].clone().requires_grad_() for x in whole]
    found, _ = ALL_ATTENTION_FUNCTIONS[name](torch.nn.Identity(), *mine, None, s_aux=sinks, **told)
    grads = torch.autograd.grad((found * weights[:, own]).sum(), [*mine, sinks])
    dist.all_reduce(grads[-1])  # each rank has those of its heads
    pairs = [(found, expected[:, own]), (grads[-1], expected_grads[-1])]
    pairs += [(a, b[:, :, own]) for a, b in zip(grads[:3], expected_grads[:3], strict=True)]
    return max(float((a - b).abs().max()) for a, b in pairs)


@pytest.mark.parametrize("num_slices", [2, 3])
def test_attention_of_slices_is_that_of_whole_sequences(num_slices: int):
    cases = [case for case in HEADS if case[2] == num_slices]
    for differences in run_ranks(num_slices, attend, num_slices, cases):
        assert differences == pytest.approx([0.0] * len(cases), abs=TOLERANCE)
