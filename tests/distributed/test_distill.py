"""Distillation: stock models give the same loss and gradient, any ranks and layouts the same run, killed or not."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch.nn import functional as F

from qlora_fsdp import evaluate
from qlora_fsdp.data.sequences import epoch_order
from qlora_fsdp.data.tokenizer import byte_tokenizer
from qlora_fsdp.training.answers.rollouts import Completion
from tests.helpers.answers import lines_of, train_and_record
from tests.helpers.checkpoints import make_checkpoint
from tests.helpers.distillation import (
    by_adapter,
    by_model,
    distill_settings,
    make_teacher,
    make_teacher_model,
    write_taught,
)
from tests.helpers.lines import read_lines, write_lines
from tests.helpers.quick_config import load_config
from tests.helpers.ranks import RanksFailed, run_ranks
from tests.helpers.reference import add_lora, load_stock
from tests.helpers.runs import printed_by, train_here

pytestmark = pytest.mark.distributed
PADDED = ["training.packing=false", "training.micro_batch_size=3"]
HINTED = "distill.teacher_prompt=hinted"
Found = tuple[list[list[Completion]], list[dict[str, float]]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("distill")
    make_teacher(folder)
    make_teacher_model(folder)
    return folder


def cases(folder: Path) -> dict[str, list[str]]:
    """Runs by name: taught by an adapter, by the base with hints, by another model, and on answers in the data."""
    return {
        "adapter": [by_adapter(folder), "distill.beta=0.5", "rollout.num_generations=2"],
        "hints": [HINTED],
        "model": [by_model(folder), HINTED, "distill.beta=0.2", "quant=nf4"],
        "given": [by_adapter(folder), HINTED, "distill.beta=0.3", "distill.lmbda=0.5"],
    }


@cache
def trained(folder: Path, num_ranks: int, *more: str) -> dict[str, Found]:
    """The runs of `cases` on this many ranks: what was written in each step, and the figures."""
    argvs = {name: distill_settings(folder, f"{num_ranks}-{name}", *own, *more) for name, own in cases(folder).items()}
    first, *others = run_ranks(num_ranks, train_and_record, argvs)
    assert all(other == first for other in others)
    return {name: (first[name], lines_of(argv)) for name, argv in argvs.items()}


def stock_step(argv: list[str], completions: Sequence[list[int]] | None) -> tuple[float, float]:
    """Loss and norm of the gradient of the first step, by stock models and torch's functions.

    Args:
        argv: the run's settings.
        completions: the answers; None: those of the data.
    """
    config = load_config(argv)
    distill = config.distill
    rows = read_lines(Path(str(config.data.path)))
    tokenizer = byte_tokenizer()
    stock = Path(config.model.path or "")
    student = add_lora(load_stock(stock, config.quant), config)
    teacher: Any = load_stock(Path(distill.teacher_model or stock), config.quant)
    if distill.teacher_adapter is not None:
        teacher = peft.PeftModel.from_pretrained(teacher, distill.teacher_adapter)
    order = epoch_order(len(rows), config.training.seed, 0)[: config.training.global_batch_size]
    num_generations = config.rollout.num_generations if completions is not None else 1
    asked = [rows[row] for row in order.tolist() for _ in range(num_generations)]
    total = torch.zeros(())
    num_tokens = 0
    for number, row in enumerate(asked):
        own = [tokenizer.bos_token_id, *tokenizer.encode(row["prompt"], add_special_tokens=False)]
        hint = row[distill.teacher_prompt] if distill.teacher_prompt else row["prompt"]
        others = [tokenizer.bos_token_id, *tokenizer.encode(hint, add_special_tokens=False)]
        if completions is None:
            answer = [*tokenizer.encode(row["completion"], add_special_tokens=False), tokenizer.eos_token_id]
        else:
            answer = completions[number]
        logits = student(torch.tensor([own + answer])).logits[0, len(own) - 1 : -1]
        with torch.no_grad():
            teachers = teacher(torch.tensor([others + answer])).logits[0, len(others) - 1 : -1]
        teachers = teachers[:, : logits.shape[1]]  # a larger table's rows, which stand for no token
        total = total + divergence(logits.log_softmax(-1), teachers.log_softmax(-1), distill.beta)
        num_tokens += len(answer)
    loss = total / num_tokens
    loss.backward()
    squares = [param.grad.square().sum() for param in student.parameters() if param.grad is not None]
    return loss.item(), torch.stack(squares).sum().sqrt().item()


def divergence(own: torch.Tensor, teachers: torch.Tensor, beta: float) -> torch.Tensor:
    """Equation 1 of arXiv:2306.13649 by `kl_div`, summed over tokens."""

    def kl(target: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return F.kl_div(other, target, reduction="sum", log_target=True)

    if beta in (0.0, 1.0):
        return kl(own, teachers) if beta else kl(teachers, own)
    mixed = torch.log((1 - beta) * own.exp() + beta * teachers.exp())
    return beta * kl(teachers, mixed) + (1 - beta) * kl(own, mixed)


@pytest.mark.parametrize("case", ["adapter", "hints", "model", "given"])
def test_stock_models_give_the_same_loss_and_gradient(folder: Path, case: str) -> None:
    written, lines = trained(folder, 1)[case]
    argv = distill_settings(folder, f"1-{case}", *cases(folder)[case])
    answers = [completion.tokens for completion in written[0]]
    if case == "given":
        argv.append("distill.lmbda=0")
        run_ranks(1, train_here, [*argv, f"run.folder={folder / 'runs' / 'given'}", "training.max_steps=1"])
        lines = lines_of([*argv, f"run.folder={folder / 'runs' / 'given'}"])
    expected = stock_step(argv, None if case == "given" else answers)
    assert (lines[0]["loss"], lines[0]["grad_norm"]) == pytest.approx(expected, abs=1e-5, rel=1e-5)


@pytest.mark.parametrize(("num_ranks", "more"), [(2, (*PADDED,)), (3, ()), (2, ("fsdp=no_shard",))])
def test_any_ranks_and_layout_give_the_same_run(folder: Path, num_ranks: int, more: tuple[str, ...]) -> None:
    expected = trained(folder, 1)
    found = trained(folder, num_ranks, *more)
    for case, (written, lines) in expected.items():
        assert [[each.tokens for each in step] for step in found[case][0]] == [
            [each.tokens for each in step] for step in written
        ]
        for step, (line, other) in enumerate(zip(found[case][1], lines, strict=True)):
            names = [name for name in other if not any(part in name for part in ("second", "gib", "mfu", "sampling"))]
            assert {name: line[name] for name in names} == pytest.approx(
                {name: other[name] for name in names}, abs=1e-5, rel=1e-5
            ), (case, step)
            assert line.get("sampling/sampling_logp_difference/mean", 0.0) < 1e-5


def test_a_part_of_the_steps_is_on_answers_of_the_data(folder: Path) -> None:
    written, lines = trained(folder, 1)["given"]
    is_given = ["rollout_seconds" not in line for line in lines]
    assert 0 < sum(is_given) < len(lines)
    assert len(written) == len(lines) - sum(is_given)
    assert all(
        ("sampling/sampling_logp_difference/mean" in line) is not given
        for line, given in zip(lines, is_given, strict=True)
    )


def test_the_divergence_falls(folder: Path) -> None:
    more = ["training.max_steps=12", "training.learning_rate=1e-2", "rollout.num_generations=4"]
    argv = distill_settings(folder, "learns", by_adapter(folder), *more)
    run_ranks(1, train_here, argv)
    losses = [line["loss"] for line in lines_of(argv)]
    assert sum(losses[-3:]) < 0.5 * sum(losses[:3])


def train_and_evaluate(argv: Sequence[str], evaluation: Sequence[str]) -> str:
    train_here(argv)
    return printed_by(evaluate.main, evaluation)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_evaluate_finds_what_training_found(folder: Path, num_ranks: int) -> None:
    held_out = write_taught(folder / "held_out.jsonl", 5)
    functions = folder / "functions.py"
    teacher = by_adapter(folder) if num_ranks == 1 else by_model(folder)
    more = [teacher, HINTED, f"data.eval_path={held_out}", "rollout.num_generations_eval=2"]
    more += [f"reward.functions=[{functions}:vowels]", "reward.pass_threshold=0.01", "training.max_steps=2"]
    argv = distill_settings(folder, f"use-{num_ranks}", *more)
    run_folder = folder / "runs" / f"use-{num_ranks}"
    kept = ("reward.", "rollout.", "distill.", "training.max_length", "model.tokenizer")
    own = [text for text in argv if text.startswith(kept)]
    evaluation = [f"adapter={run_folder / 'adapter'}", f"data.path={held_out}", *own]
    printed = run_ranks(num_ranks, train_and_evaluate, argv, evaluation)[0]
    last = json.loads((run_folder / "metrics.jsonl").read_text().splitlines()[-1])
    found = json.loads(printed)
    names = ("loss", "entropy", "teacher_log_prob", "reward", "pass@1", "completions/mean_length")
    assert found["loss"] > 0.01
    assert {name: found[name] for name in names} == pytest.approx(
        {name: last[f"eval_{name}"] for name in names}, abs=1e-5
    )


def test_teachers_that_cannot_be_used_are_refused(folder: Path) -> None:
    make_checkpoint("llama", folder / "other", seed=7)
    refused = {
        "base": ([f"model.path={folder / 'other'}"], "holds other weights than those that distill.teacher_adapter="),
        "places": (["lora.target_modules=[k_proj]"], "Set lora.target_modules to the layers that it adapts, or more"),
        "head": (
            ["lora.target_modules=[q_proj,up_proj,lm_head]"],
            "has a head that is trained, which a teacher has not",
        ),
    }
    for name, (more, told) in refused.items():
        with pytest.raises(RanksFailed, match=told):
            run_ranks(1, train_here, distill_settings(folder, name, by_adapter(folder), *more))


def test_a_teacher_with_another_tokenizer_is_refused(folder: Path) -> None:
    for name in ("other", "same"):
        make_checkpoint("llama", folder / f"teacher_{name}", seed=5)
        tokenizer = byte_tokenizer()
        if name == "other":
            tokenizer.add_tokens(["<new>"])
        tokenizer.save_pretrained(folder / f"teacher_{name}")
    told = "teacher_other has another tokenizer than the model: 1 token in one of them alone"
    with pytest.raises(RanksFailed, match=told):
        run_ranks(2, train_here, distill_settings(folder, "tokens", f"distill.teacher_model={folder}/teacher_other"))
    argv = distill_settings(folder, "tokens", f"distill.teacher_model={folder}/teacher_same", "training.max_steps=1")
    run_ranks(2, train_here, argv)
    assert lines_of(argv)[0]["loss"] > 0


def test_a_teacher_that_knows_fewer_positions_is_refused(folder: Path) -> None:
    argv = distill_settings(folder, "positions", by_model(folder), "training.max_length=300")
    with pytest.raises(RanksFailed, match="the teacher was made for 256 positions"):
        run_ranks(1, train_here, argv)


def test_a_teacher_that_is_the_model_itself_is_told(folder: Path) -> None:
    """Its gradients are zero, and the run ended with a message about lora.target_modules."""
    rows = [{**row, "hinted": row["prompt"]} for row in read_lines(write_taught(folder / "asked.jsonl"))]
    same = write_lines(folder / "same.jsonl", rows)
    argv = distill_settings(folder, "same", HINTED, f"data.path={same}", "training.max_steps=3")
    run_ranks(2, train_here, argv)
    assert [line["loss"] for line in lines_of(argv)] == [0.0] * 3
    told = (folder / "runs" / "same" / "train.log").read_text()
    assert told.count("Step 1: the teacher predicts for every token what the model predicts") == 1
    assert told.count("the teacher predicts for every token") == 1
