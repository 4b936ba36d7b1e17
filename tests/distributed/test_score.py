"""A teacher's probabilities in files: `score` writes what stock models give, and a run on them is stock's step."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from qlora_fsdp import score
from qlora_fsdp.data.sequences import epoch_order
from qlora_fsdp.data.tokenizer import byte_tokenizer
from qlora_fsdp.training.answers.score_answers import AnswerScorer
from tests.helpers.answers import lines_of
from tests.helpers.checkpoints import make_checkpoint
from tests.helpers.distillation import distill_settings, make_teacher_model, write_taught
from tests.helpers.lines import read_lines
from tests.helpers.quick_config import load_config
from tests.helpers.ranks import RanksFailed, run_ranks
from tests.helpers.reference import add_lora, load_stock
from tests.helpers.runs import printed_by, train_here

pytestmark = pytest.mark.distributed
TOP = 5
HINTED = "distill.teacher_prompt=hinted"
SAME = (HINTED, "rollout.temperature=0.8", "training.max_length=48", "rollout.max_completion_length=12", "quant=nf4")
GIVEN = ("distill.lmbda=0", "distill.beta=0.3")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("score")
    make_checkpoint("llama", folder / "model")
    make_teacher_model(folder)
    write_taught(folder / "asked.jsonl")
    return folder


def command(folder: Path, out: str, *more: str) -> list[str]:
    own = [
        f"model.path={folder / 'teacher_model'}",
        "model.tokenizer_path=bytes",
        f"data.path={folder / 'asked.jsonl'}",
    ]
    return [*own, f"out={folder / out}", f"top_k={TOP}", *SAME, *more]


def score_here(argv: Sequence[str]) -> str:
    return printed_by(score.main, argv)


@cache
def scored(folder: Path, num_ranks: int) -> Path:
    """The scores, written by this many ranks."""
    run_ranks(num_ranks, score_here, command(folder, f"scores-{num_ranks}"))
    return folder / f"scores-{num_ranks}"


def stock_step(argv: list[str]) -> tuple[float, float]:
    """Loss and norm of the gradient of the first step, over the teacher's likeliest tokens and all others together."""
    config = load_config(argv)
    rows = read_lines(Path(str(config.data.path)))
    tokenizer = byte_tokenizer()
    student = add_lora(load_stock(Path(str(config.model.path)), config.quant), config)
    teacher = load_stock(Path(str(config.model.path)).parent / "teacher_model", config.quant)
    order = epoch_order(len(rows), config.training.seed, 0)[: config.training.global_batch_size]
    beta = config.distill.beta
    total = torch.zeros(())
    num_tokens = 0
    for number in order.tolist():
        row = rows[number]
        own, hinted = ([256, *tokenizer.encode(row[name], add_special_tokens=False)] for name in ("prompt", "hinted"))
        answer = [*tokenizer.encode(row["completion"], add_special_tokens=False), tokenizer.eos_token_id]
        mine = student(torch.tensor([own + answer])).logits[0, len(own) - 1 : -1] / config.rollout.temperature
        with torch.no_grad():
            theirs = teacher(torch.tensor([hinted + answer])).logits[0, len(hinted) - 1 : -1, : len(tokenizer)]
        q = (theirs / config.rollout.temperature).softmax(-1)
        top, ids = q.topk(TOP)
        p = mine.softmax(-1).gather(1, ids)
        p, q = (torch.cat([values, 1 - values.sum(1, keepdim=True)], 1) for values in (p, top))
        mixed = (1 - beta) * p + beta * q
        total = total + beta * (q * (q / mixed).log()).sum() + (1 - beta) * (p * (p / mixed).log()).sum()
        num_tokens += len(answer)
    loss = total / num_tokens
    loss.backward()
    squares = [param.grad.square().sum() for param in student.parameters() if param.grad is not None]
    return loss.item(), torch.stack(squares).sum().sqrt().item()


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_any_ranks_write_the_same(folder: Path, num_ranks: int) -> None:
    expected, found = (load_file(scored(folder, number) / "00000000.safetensors") for number in (1, num_ranks))
    for name in ("ids", "lengths", "keys"):
        assert np.array_equal(found[name], expected[name])
    for name in ("log_probs", "given"):
        np.testing.assert_allclose(found[name], expected[name], atol=1e-5)
    np.testing.assert_allclose(np.exp(found["log_probs"]).sum(1), 1, atol=1e-5)


@pytest.mark.parametrize(("num_ranks", "more"), [(1, ()), (2, ("training.packing=false",)), (3, ())])
def test_a_run_on_scores_is_stocks_step(folder: Path, num_ranks: int, more: tuple[str, ...]) -> None:
    scores = f"distill.teacher_scores={scored(folder, 1)}"
    held_out = f"data.eval_path={folder / 'asked.jsonl'}"
    argv = distill_settings(folder, f"run-{num_ranks}", scores, *SAME, *GIVEN, held_out, "training.max_steps=2", *more)
    run_ranks(num_ranks, train_here, argv)
    first = lines_of(argv)[0]
    assert (first["loss"], first["grad_norm"]) == pytest.approx(stock_step(argv), abs=1e-5, rel=1e-5)
    lines = [json.loads(line) for line in (folder / "runs" / f"run-{num_ranks}" / "metrics.jsonl").open()]
    losses = [line["eval_loss"] for line in lines if "eval_loss" in line]
    assert len(losses) == 2 and losses[1] < losses[0]


def test_broken_off_it_goes_on_behind_whole_files(folder: Path) -> None:
    expected = load_file(scored(folder, 1) / "00000000.safetensors")
    out = folder / "resumed"
    run_ranks(1, score_in_parts, command(folder, "resumed"), 3, 1)
    assert sorted(file.name for file in out.iterdir()) == ["00000000.safetensors", "scores.json"]
    kept = (out / "00000000.safetensors").stat().st_mtime_ns
    run_ranks(2, score_in_parts, command(folder, "resumed"), 3, 9)
    assert (out / "00000000.safetensors").stat().st_mtime_ns == kept
    parts = [load_file(file) for file in sorted(out.glob("*.safetensors"))]
    assert [len(part["lengths"]) for part in parts] == [3, 3, 2]
    for name in expected:
        np.testing.assert_allclose(np.concatenate([part[name] for part in parts]), expected[name], atol=1e-5)


def score_in_parts(argv: Sequence[str], rows: int, most: int) -> None:
    """Score some rows at a time, and end after a number of files, as a kill would."""
    num_scored = 0
    whole = AnswerScorer.score

    def scored_rows(self: AnswerScorer, *args: object) -> object:
        nonlocal num_scored
        if num_scored == most:
            raise KeyboardInterrupt
        num_scored += 1
        return whole(self, *args)

    score.ROWS_A_PART, AnswerScorer.score = rows, scored_rows
    try:
        with suppress(KeyboardInterrupt):
            score_here(argv)
    finally:
        score.ROWS_A_PART, AnswerScorer.score = 256, whole


def test_what_does_not_belong_together_is_refused(folder: Path) -> None:
    scores = f"distill.teacher_scores={scored(folder, 1)}"
    other = write_taught(folder / "others.jsonl", 9)
    damaged = folder / "damaged"
    shutil.copytree(scored(folder, 1), damaged)
    part = damaged / "00000000.safetensors"
    part.write_bytes(part.read_bytes()[:-8])
    cases = {
        "lacks 1 row of 9, the first others.jsonl:9": (scores, *SAME, *GIVEN, f"data.path={other}"),
        "was written with rollout.temperature=0.8, and here it is 1": (scores, HINTED, *GIVEN),
        "00000000.safetensors is damaged": (f"distill.teacher_scores={damaged}", *SAME, *GIVEN),
    }
    for told, more in cases.items():
        with pytest.raises(RanksFailed, match=told):
            run_ranks(1, train_here, distill_settings(folder, "refused", *more))


def test_a_folder_of_another_teacher_is_not_gone_on_with(folder: Path) -> None:
    scored(folder, 1)
    argv = [text for text in command(folder, "scores-1") if not text.startswith("top_k")]
    with pytest.raises(RanksFailed, match="was begun with another value of top_k"):
        run_ranks(1, score_here, argv)
