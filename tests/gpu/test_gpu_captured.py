"""Micro-batches recorded as CUDA graphs compute what launched kernels do, to the bit where sums have one order."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch

from qlora_fsdp.common.errors import TrainingError
from qlora_fsdp.config.schema import ProblemType
from qlora_fsdp.model.tasks.causal_lm import CausalLM
from qlora_fsdp.training.bad_steps import BadSteps
from tests.helpers.classification import LABELS, WORD_LABELS, write_labelled_rows, write_labelled_words
from tests.helpers.failing import PLACES, Place, failing
from tests.helpers.preferences import write_pairs
from tests.helpers.ranks import once, run_ranks
from tests.helpers.runs import Trained, settings, train_all, train_here

NUM_RANKS = torch.cuda.device_count()
ALL_RANKS = f"training.global_batch_size={2 * NUM_RANKS}"
PLAIN = ["training.micro_batch_size=2", ALL_RANKS]
RECORDED = "recorded as a CUDA graph for"
# Pairs of rows of many lengths, so that micro-batches have unlike numbers of answers.
PAIRS = ["task=preference", "data.path=PAIRS", "training.max_length=256", "training.deterministic=true"]
IN_STEP = "preference.precompute=false"
GRAPHS = {"captured": "auto", "eager": "false"}  # compute.cuda_graph
# Norms of gradients that hardly change, so that some are larger than most.
SKIPPED = ["training.on_bad_step=skip", "training.grad_norm_spike=1.05", "training.learning_rate=1e-5"]
SKIPPED += ["training.max_steps=32", "training.deterministic=true"]
ALONE = ["training.packing=false", "training.deterministic=true"]
PADDED = ["training.packing=false", "training.max_length=256"]
HELD = ["fsdp.sharding_strategy=NO_SHARD", "memory.keep_dequantized=run"]
EVALUATED = ["data.eval_fraction=0.1", "training.eval_every_steps=4", "training.deterministic=true"]

# A micro-batch a step: gradients are summed over ranks once, in either case.
SAME_BITS = {
    "packed": [],
    "rows of many lengths": ["training.max_length=256"],
    "recomputed": ["memory=recompute"],
    "recomputed but for attention": ["memory=keep_attention"],
    "selective": ["memory=selective"],
    "in tiles": ["training.max_length=256", "memory=recompute", "memory.tile_tokens=100"],
    "dropout": ["lora.lora_dropout=0.1"],
    "int8": ["quant=int8"],
    "fp8": ["compute=fp8"],
    "skipped steps": SKIPPED,
    "dora": ["lora.use_dora=true"],
    "new tokens": ["tokenizer.add_tokens=[the,cat]"],
    "checkpoints in between": ["checkpoint.every_steps=4"],
    "layers by themselves": ["kernels.fuse_layers=false"],
    "NO_SHARD": ["fsdp.sharding_strategy=NO_SHARD"],
    "weights kept for the run": HELD,
    "weights kept for the run, recomputed": [*HELD, "memory.activations=full"],
    "SHARD_GRAD_OP": ["fsdp.sharding_strategy=SHARD_GRAD_OP"],
    "8-bit optimizer": ["optim=adamw_8bit"],
    "adafactor": ["optim=adafactor"],
    "noise on embeddings": ["task.neftune_noise_alpha=5"],
    "label smoothing": ["task.label_smoothing_factor=0.1"],
    "dft": ["task.loss_type=dft"],
    "dpo": PAIRS,
    "dpo with likelihood": [*PAIRS, "preference.sft_weight=0.5"],
    "orpo": [*PAIRS, "preference.loss=orpo"],
    "kto": [*PAIRS, "preference.loss=kto"],
    "padded": PADDED,
    "dpo, padded": [*PAIRS, "training.packing=false"],
    "kto, padded": [*PAIRS, "preference.loss=kto", "training.packing=false"],
    "rewards": ["task=reward", *PAIRS[1:], "training.packing=false"],
    "labels of rows": ["task=sequence_classification", f"task.labels=[{','.join(LABELS)}]", "data.path=ROWS", *ALONE],
    "labels of words": [
        "task=token_classification",
        f"task.labels=[{','.join(WORD_LABELS)}]",
        "data.path=WORDS",
        *ALONE,
    ],
}
# The reference in the step: two forwards before the backward.
WITH_REFERENCE = {
    "dpo with the reference in the step": [*PAIRS, IN_STEP],
    "dpo with the reference in the step, weights kept for the run": [*PAIRS, IN_STEP, *HELD],
    "dpo with the reference in the step, recomputed": [*PAIRS, IN_STEP, "memory=recompute"],
    "dpo with the reference in the step, SHARD_GRAD_OP": [*PAIRS, IN_STEP, "fsdp.sharding_strategy=SHARD_GRAD_OP"],
    "kto with the reference in the step": [*PAIRS, "preference.loss=kto", IN_STEP],
}
# The evaluations before, between and after the steps too.
SAME_EVALUATIONS = {
    "evaluations": EVALUATED,
    "evaluations of rows of many lengths": [*EVALUATED, "training.max_length=256"],
    "evaluations under SHARD_GRAD_OP": [*EVALUATED, "fsdp.sharding_strategy=SHARD_GRAD_OP"],
    "evaluations of recomputed tiles": [*EVALUATED, "training.max_length=256", "memory=recompute"],
    "evaluations of dpo": [*PAIRS, *EVALUATED],
    "evaluations of dpo with the reference in them": [*PAIRS, *EVALUATED, IN_STEP],
    "evaluations with weights kept for the run": [*EVALUATED, *HELD],
    "evaluations of padded rows": [*EVALUATED, *PADDED],
    "evaluations of rewards": ["task=reward", *PAIRS[1:], "training.packing=false", *EVALUATED],
    "evaluations of kto": [*PAIRS, *EVALUATED, "preference.loss=kto"],
}
ALL_SAME_BITS = SAME_BITS | WITH_REFERENCE | SAME_EVALUATIONS
# Recorded micro-batches sum over ranks each time, others only the last time of a step.
SAME_SUMS = {"accumulation": [f"training.global_batch_size={8 * NUM_RANKS}"]}
# What can't be recorded, and what the log says.
LAUNCHED = {
    "offloaded parameters": (["fsdp=offload"], "host memory"),
    "offloaded activations": (["memory=offload"], "host memory"),
    "offloaded results of attention": (["memory=offload_attention"], "host memory"),
    "Liger's loss": (["kernels.cross_entropy=liger"], "asks the device"),
    "dropout recomputed": (["lora.lora_dropout=0.1", "memory=recompute"], "random numbers"),
}


def folder(rows: Path, name: str, mode: str) -> Path:
    return rows.parent / "captured" / f"{name} {mode}".replace(" ", "_").replace("'", "").replace(",", "")


@pytest.fixture(scope="module")
def trained(
    checkpoint: Callable[..., Path], rows: Path, request: pytest.FixtureRequest
) -> Callable[[str, str], tuple[Trained, str]]:
    """The run of a case, captured or eager, and its log. Cases that this session does not ask for are not run."""
    of_this_file = (item for item in request.session.items if item.path == request.path)
    asked = {item.callspec.params.get("name") for item in of_this_file if hasattr(item, "callspec")} | {"skipped steps"}
    files = {
        "PAIRS": write_pairs(rows.parent / "pairs.jsonl", 600),
        "ROWS": write_labelled_rows(rows.parent / "labelled.jsonl", ProblemType.single_label_classification, 200),
        "WORDS": write_labelled_words(rows.parent / "words.jsonl", 200),
    }
    model = checkpoint("llama")

    def argv(name: str, mode: str, more: list[str]) -> list[str]:
        for word, file in files.items():
            more = [text.replace(f"data.path={word}", f"data.path={file}") for text in more]
        own = [*PLAIN, *more, f"run.folder={folder(rows, name, mode)}", f"compute.cuda_graph={GRAPHS[mode]}"]
        return settings(model, rows, "training.max_steps=12", *own)

    launched = {name: more for name, (more, _) in LAUNCHED.items()}
    worlds: dict[str, Callable[[], Any]] = {}
    for group in (SAME_BITS | SAME_SUMS, WITH_REFERENCE, SAME_EVALUATIONS, launched):  # ranks that start together
        modes = ["captured"] if group is launched else ["captured", "eager"]
        runs = {(name, mode): argv(name, mode, more) for name, more in group.items() if name in asked for mode in modes}
        worlds |= dict.fromkeys(group, once(partial(run_ranks, NUM_RANKS, train_all, runs, gpu=True)))

    def find(name: str, mode: str) -> tuple[Trained, str]:
        result = worlds[name]()[0][name, mode]
        return result, (folder(rows, name, mode) / "train.log").read_text()

    return find


@pytest.mark.parametrize("name", ALL_SAME_BITS)
def test_same_bits(trained, name: str):
    captured, log = trained(name, "captured")
    assert RECORDED in log, log
    assert ("kept for the whole run" in log) is ("kept for the run" in name), log
    eager, log = trained(name, "eager")
    assert RECORDED not in log
    assert captured.losses == eager.losses


def test_the_same_steps_are_skipped(trained, rows: Path):
    for mode in ("captured", "eager"):
        trained("skipped steps", mode)
    captured, launched = (
        {file.name: file.read_text() for file in (folder(rows, "skipped steps", mode) / "bad_steps").iterdir()}
        for mode in ("captured", "eager")
    )
    assert captured and captured == launched


def evaluations_of(run: Path) -> list[float]:
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [line["eval_loss"] for line in lines if "eval_loss" in line]


@pytest.mark.parametrize("name", SAME_EVALUATIONS)
def test_evaluations_are_recorded_and_have_the_same_bits(trained, rows: Path, name: str):
    for mode in ("captured", "eager"):
        _, log = trained(name, mode)
        assert (f"Evaluation: {RECORDED}" in log) is (mode == "captured"), log
    launched, recorded = (evaluations_of(folder(rows, name, mode)) for mode in ("eager", "captured"))
    assert len(set(launched)) == 4 and recorded == launched


@pytest.mark.parametrize("name", SAME_SUMS)
def test_same_sums(trained, name: str):
    captured, log = trained(name, "captured")
    assert RECORDED in log, log
    assert captured.losses == pytest.approx(trained(name, "eager")[0].losses, rel=1e-4)


@pytest.mark.parametrize("name", LAUNCHED)
def test_what_cannot_be_recorded_is_launched_and_the_log_says_why(trained, name: str):
    result, log = trained(name, "captured")
    assert RECORDED not in log
    assert log.count("Step: not recorded as a CUDA graph") == 1 and LAUNCHED[name][1] in log, log
    assert result.losses[-1] < result.losses[0]


class Failure(NamedTuple):
    """What goes wrong in a run: at which place of which recording, counted from 0, on which rank, and how."""

    place: Place
    recording: int = 0
    rank: int = 0
    asks: bool = False  # the device for a value, which ends the recording itself; otherwise there is no memory


def lines_of(lengths: int, *more: str) -> list[str]:
    return [*PLAIN, f"training.max_length={lengths}", "training.max_steps=12", *more]


# The settings of a run, and what fails in it. Rows of 64 tokens need one graph. Of 256 they need two, the second of
# which comes in the same step on two ranks. Of 192 they need a second one on rank 0 alone. The graph behind a step's
# first one is an evaluation's, where there are evaluations.
LAST = NUM_RANKS - 1
FAILING = {
    **{f"{place}, rank {LAST}": (lines_of(64), Failure(place, rank=LAST)) for place in PLACES},
    "forward, rank 0": (lines_of(64), Failure("forward")),
    "a recomputed layer": (lines_of(64, "memory=recompute"), Failure("before backward", rank=LAST)),
    "in several micro-batches": (
        lines_of(64, f"training.global_batch_size={8 * NUM_RANKS}"),
        Failure("behind backward", rank=LAST),
    ),
    "asks the device": (lines_of(64), Failure("forward", rank=LAST, asks=True)),
}
FAILING["Evaluation"] = lines_of(64, *EVALUATED), Failure("forward", recording=1, rank=LAST)
if NUM_RANKS <= 2:
    FAILING["the second graph"] = lines_of(256), Failure("before backward", recording=1, rank=LAST)
if NUM_RANKS == 2:
    FAILING["a graph of one rank"] = lines_of(192), Failure("forward", recording=1)


def train_failing(cases: Mapping[str, tuple[list[str], Failure]]) -> dict[str, Trained]:
    """Runs in which a layer fails while it is recorded, and only then."""
    forward, trained = CausalLM.forward, {}
    for name, (argv, failure) in cases.items():
        num_recordings = 0

        def fail(*args: Any, asks: bool = failure.asks) -> None:
            assert torch.cuda.is_current_stream_capturing()
            if asks:
                torch.ones((), device="cuda").item()
            torch.empty(2**45, dtype=torch.uint8, device="cuda")

        def fail_at_last(
            model: CausalLM, *args: Any, failure: Failure = failure, fail: Callable[..., None] = fail, **options: Any
        ) -> Any:
            nonlocal num_recordings
            fails = False
            if torch.cuda.is_current_stream_capturing():
                fails = int(os.environ["RANK"]) == failure.rank and num_recordings == failure.recording
                num_recordings += 1
            with failing(model, failure.place, fail) if fails else nullcontext():
                return forward(model, *args, **options)

        with patch.object(CausalLM, "forward", fail_at_last):
            trained[name] = train_here(argv)
    return trained


@pytest.fixture(scope="module")
def after_failures(checkpoint: Callable[..., Path], rows: Path) -> Callable[[str], tuple[Trained, Trained, str]]:
    """The run of a case, the run of kernels that are launched, and the log of the first."""
    model = checkpoint("llama")

    def argv(name: str, mode: str, own: list[str]) -> list[str]:
        own = [*own, f"compute.cuda_graph={GRAPHS[mode]}"]
        return settings(model, rows, *own, f"run.folder={folder(rows, name, f'{mode} failing')}")

    failing_runs = {name: (argv(name, "captured", own), failure) for name, (own, failure) in FAILING.items()}
    launched_runs = {name: argv(name, "eager", own) for name, (own, _) in FAILING.items()}
    worlds = [
        once(lambda: run_ranks(NUM_RANKS, train_failing, failing_runs, gpu=True)),
        once(lambda: run_ranks(NUM_RANKS, train_all, launched_runs, gpu=True)),
    ]

    def find(name: str) -> tuple[Trained, Trained, str]:
        failed, launched = (world()[0][name] for world in worlds)
        return failed, launched, (folder(rows, name, "captured failing") / "train.log").read_text()

    return find


@pytest.mark.parametrize("name", FAILING)
def test_a_recording_that_fails_on_one_rank_is_launched_on_all_and_changes_no_bit(after_failures, rows, name: str):
    failed, launched, log = after_failures(name)
    kind = name if name == "Evaluation" else "Step"
    assert log.count("no CUDA graph could be recorded") == log.count(f"{kind}: no CUDA graph could be recorded") == 1, (
        log
    )
    assert (RECORDED in log) is (FAILING[name][1].recording > 0), log
    assert failed.losses == launched.losses and len(failed.losses) == 12
    runs = [folder(rows, name, f"{mode} failing") for mode in ("captured", "eager")]
    assert evaluations_of(runs[0]) == evaluations_of(runs[1])


def train_after_an_error(ends: list[str], argv: list[str]) -> Trained:
    """A run that ends with an error once it has graphs, and another one in the same process."""

    def fail(self: BadSteps, step: int, *args: Any) -> bool:
        if step == 4:
            raise TrainingError("as asked")
        return True

    with patch.object(BadSteps, "check", fail), pytest.raises(TrainingError, match="as asked"):
        train_here(ends)
    return train_here(argv)


def test_an_error_ends_a_run_that_has_graphs_of_all_ranks(checkpoint, rows: Path, tmp_path: Path):
    def argv(name: str) -> list[str]:
        return settings(checkpoint("llama"), rows, *PLAIN, "training.max_steps=6", f"run.folder={tmp_path / name}")

    for rank in run_ranks(NUM_RANKS, train_after_an_error, argv("failing"), argv("next"), gpu=True):
        assert len(rank.losses) == 6
    assert RECORDED in (tmp_path / "failing" / "train.log").read_text()
