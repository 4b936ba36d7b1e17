"""A run that learned nothing says so, wherever it is looked at: through the real command."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from qlora_fsdp.data.tokenizer import byte_tokenizer
from tests.cli.launch import SCRIPT, child_environment, run_forked
from tests.helpers.checkpoints import make_checkpoint
from tests.helpers.lines import read_lines, write_lines

ANSWER = "the cat sat on the mat and the dog sat on the log"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_checkpoint("llama", tmp_path_factory.mktemp("first_day") / "base", torch.float32)
    byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def typed(base: Path, tmp_path: Path) -> list[str]:
    """The settings of a run whose 40 rows are some ten sequences: one step, with the default batch."""
    rows = [{"prompt": f"{number}: ", "completion": ANSWER} for number in range(40)]
    write_lines(tmp_path / "rows.jsonl", rows)
    return [f"model.path={base}", "data=rows.jsonl", "training.max_length=256", f"data.cache_folder={tmp_path}"]


def train(folder: Path, *settings: str) -> tuple[str, Path]:
    code, printed = run_forked(folder, "train", *settings, "run.name=run", "run.overwrite=true")
    assert code == 0, printed
    return printed, folder / "outputs" / "run"


def test_a_run_of_one_step_is_told_before_and_after(typed: list[str], tmp_path: Path) -> None:
    few = re.compile(r"Note: 1 step is few: below 50 an adapter learns little\. Set (training\.\S+) (training\.\S+),")
    code, planned = run_forked(tmp_path, "preflight", *typed, "hardware=1x24gib")
    assert code == 0 and few.search(planned), planned
    code, shown = run_forked(tmp_path, "preview", *typed)
    assert code == 0 and few.search(shown), shown
    printed, folder = train(tmp_path, *typed)
    assert len(few.findall(printed)) == 2, printed
    start, _, end = printed.partition("Finished: 1 step")
    assert few.search(start)
    noted = few.search(end)
    assert noted is not None and noted.end() < end.index("Next:")
    assert "below 50" in (folder / "adapter" / "README.md").read_text()
    assert "below 50" in (folder / "report.html").read_text()
    # What it says to set makes a run of 50 steps.
    printed, folder = train(tmp_path, *typed, *noted.groups())
    assert len(read_lines(folder / "metrics.jsonl")) >= 50
    assert "Note: " not in printed.partition("Finished")[2], printed


LEARNS = ["training.max_steps=50", "training.global_batch_size=1"]


@pytest.mark.parametrize(
    ("setting", "at_the_start", "at_the_end"),
    [
        ("training.learning_rate=1e4", "learning_rate=10000 is above what is usual", "10000 is above what is usual"),
        ("training.learning_rate=1e-8", "learning_rate=1e-08 is below what is usual", "is below what is usual"),
        ("training.learning_rate=1e-3", "", ""),
    ],
)
def test_a_run_that_does_not_learn_or_explodes_says_so(
    setting: str, at_the_start: str, at_the_end: str, typed: list[str], tmp_path: Path
) -> None:
    printed, folder = train(tmp_path, *typed, *LEARNS, setting)
    start, _, end = printed.partition("Finished: ")
    notes = [line for line in end.splitlines() if line.startswith("Note: ")]
    assert ("Note: training.learning_rate" in start) is bool(at_the_start), start
    assert at_the_start in start
    assert len(notes) == bool(at_the_end), end
    assert at_the_end in "".join(notes)
    summary = json.loads((folder / "summary.json").read_text())
    assert [f"Note: {summary['doubt']}"] == notes if notes else "doubt" not in summary


@pytest.mark.parametrize("name", ["tokens", "is_target", "starts", "num_targets", "flags"])
def test_a_flipped_byte_in_the_cache_is_found_and_the_data_made_anew(
    name: str, typed: list[str], tmp_path: Path
) -> None:
    settings = [*typed, "training.max_steps=2", "training.global_batch_size=1"]
    _, folder = train(tmp_path, *settings)
    losses = [line["loss"] for line in read_lines(folder / "metrics.jsonl") if "loss" in line]
    (file,) = tmp_path.glob(f"*/{name}.bin")
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    printed, folder = train(tmp_path, *settings)
    assert f"The tokenized data is damaged and made anew: {file} has other bytes" in printed
    assert [line["loss"] for line in read_lines(folder / "metrics.jsonl") if "loss" in line] == losses
    assert "damaged" not in train(tmp_path, *settings)[0]


def test_a_run_has_one_final_training_loss(typed: list[str], tmp_path: Path) -> None:
    printed, folder = train(tmp_path, *typed, "training.max_steps=24", "training.global_batch_size=1")
    losses = [line["loss"] for line in read_lines(folder / "metrics.jsonl") if "loss" in line]
    first, final = sum(losses[:10]) / 10, sum(losses[-10:]) / 10
    assert f"training loss    {first:.4f} -> {final:.4f}, means of 10 steps" in printed
    assert json.loads((folder / "summary.json").read_text())["final_loss"] == pytest.approx(final)
    assert f"{final:.4f} in the last 10 steps" in (folder / "report.html").read_text()
    card = (folder / "adapter" / "README.md").read_text()
    assert f"{first:.4f} in the first 10 steps | {final:.4f} in the last 10 steps" in card
    code, shown = run_forked(tmp_path, "status", "outputs")
    assert code == 0 and f"{final:.4f}" in shown


@pytest.mark.parametrize("command", ["preview", "train"])
def test_a_model_that_can_not_be_had_offline_is_answered_after_one_question(command: str, tmp_path: Path) -> None:
    """Nobody listens at the hub's address. Its libraries' own retries, which would take 100 seconds, print a line."""
    write_lines(tmp_path / "rows.jsonl", [{"prompt": "a", "completion": "b"}])
    nobody = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path)}
    asked = subprocess.run(
        [sys.executable, str(SCRIPT), command, "model=llama3-70b", "data=rows.jsonl"],
        env=child_environment() | nobody,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    printed = asked.stdout + asked.stderr
    assert asked.returncode == 2, printed
    assert "Retry" not in printed
    assert "Connection refused" in printed
    assert "meta-llama/Meta-Llama-3-70B" in printed


def test_preview_tells_rows_that_the_model_has_no_positions_for(base: Path, tmp_path: Path) -> None:
    known = json.loads((base / "config.json").read_text())["max_position_embeddings"]
    write_lines(tmp_path / "rows.jsonl", [{"prompt": "a", "completion": "b" * (known + 10)}])
    typed = [f"model.path={base}", "data=rows.jsonl", f"data.cache_folder={tmp_path}"]
    code, printed = run_forked(tmp_path, "preview", *typed, f"training.max_length={known + 20}", "rows=0")
    assert code == 0 and f"and the model was made for {known:,} positions. Set training.max_length={known}," in printed
    code, printed = run_forked(tmp_path, "preview", *typed, f"training.max_length={known}", "rows=0")
    assert code == 0 and "positions" not in printed


def test_a_plan_for_other_machines_does_not_ask_for_packages_here(tmp_path: Path) -> None:
    flash = "model.attn_implementation=flash_attention_2"
    code, printed = run_forked(tmp_path, "preflight", "model=llama3.2-1b-base", "hardware=1xh100", flash)
    assert code == 0 and printed.startswith("Fits: "), printed


def test_the_smallest_model_of_a_name_is_proposed_first(tmp_path: Path) -> None:
    code, printed = run_forked(tmp_path, "preflight", "model=llama3", "hardware=1xh100")
    assert code == 2 and "Did you mean model=llama3-8b or model=llama3-70b?" in printed


def test_after_plain_text_the_next_command_continues_text(base: Path, tmp_path: Path) -> None:
    write_lines(tmp_path / "rows.jsonl", [{"text": ANSWER}] * 4)
    (tmp_path / "chat.jinja").write_text("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    settings = [f"model.path={base}", "data=rows.jsonl", f"data.cache_folder={tmp_path}", "training.max_steps=1"]
    printed, folder = train(tmp_path, *settings, "data.chat_template=chat.jinja")
    assert f'  qlora-fsdp generate adapter={folder}/adapter raw=true prompt="..."' in printed, printed
    # What a killed process has left behind is gone once the run has finished.
    left = [folder / ".summary.json.a1b2c3.tmp", folder / ".adapter.a1b2c3.tmp"]
    for path in left:
        path.mkdir()
    train(tmp_path, *settings)
    assert not any(path.exists() for path in left)


def test_a_chat_helps(typed: list[str], tmp_path: Path) -> None:
    code, printed = run_forked(tmp_path, "chat", typed[0], "data.chat_template=chatml", text="/help\n/exit\n")
    assert code == 0 and "/system TEXT  sets the system turn" in printed, printed


def test_the_best_adapter_is_the_result_where_that_is_asked(typed: list[str], tmp_path: Path) -> None:
    """A learning rate of 10 makes held-out rows worse; with a usual one the last step is the best."""
    steps = ["training.max_steps=8", "training.global_batch_size=1", "training.eval_every_steps=2"]
    steps += ["data.eval_fraction=0.2", "checkpoint.every_steps=2", "optim.lr_scheduler_type=constant"]
    best = ["checkpoint.keep_best=1", "checkpoint.best_at_end=true"]
    printed, folder = train(tmp_path, *typed, *steps, *best, "training.learning_rate=10")
    losses = {line["step"]: line["eval_loss"] for line in read_lines(folder / "metrics.jsonl") if "eval_loss" in line}
    step = min((step for step in losses if step > 0), key=lambda step: losses[step])
    assert step < 8, losses
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["adapter_step"], summary["eval_loss"]) == (step, losses[step])
    assert f"The adapter is that of step {step}: its evaluation loss {losses[step]:.4f} is lower" in printed
    kept = folder / "checkpoints" / f"step-{step:08d}" / "adapter"
    for file in ("adapter_model.safetensors", "README.md"):
        assert (folder / "adapter" / file).read_bytes() == (kept / file).read_bytes()
    printed, folder = train(tmp_path, *typed, *steps, *best, "training.learning_rate=1e-3")
    assert "adapter_step" not in json.loads((folder / "summary.json").read_text())
    assert "The adapter is that of step" not in printed
    code, printed = run_forked(tmp_path, "train", *typed, *steps, "checkpoint.best_at_end=true")
    assert code == 2 and "needs the best checkpoint, and checkpoint.keep_best=0 keeps the newest ones alone" in printed


def test_a_home_in_which_nothing_can_be_made_is_told_before_anything_is_started(
    typed: list[str], tmp_path: Path
) -> None:
    """As in a container whose user has no home. It was noticed once torch was there and the model built."""
    (tmp_path / "home").write_text("a file")
    settings = [text for text in typed if not text.startswith("data.cache_folder")]
    asked = subprocess.run(
        [sys.executable, str(SCRIPT), "train", *settings],
        env=child_environment() | {"HOME": str(tmp_path / "home")},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert asked.returncode == 2
    assert f"data.cache_folder={tmp_path}/home/.cache/qlora_fsdp/data can't be made" in asked.stderr
    assert "importing torch" not in asked.stdout + asked.stderr


def test_a_run_stops_where_held_out_rows_get_no_better(typed: list[str], tmp_path: Path) -> None:
    """Held-out answers of letters that no row has soon get less likely. Without patience all steps are done."""
    held_out = [{"prompt": f"{number}: ", "completion": "XYZJKQWVX" * 5} for number in range(4)]
    write_lines(tmp_path / "held_out.jsonl", held_out)
    evaluated = ["training.max_steps=12", "training.global_batch_size=1", "training.eval_every_steps=2"]
    evaluated += ["data.eval_path=held_out.jsonl", "training.learning_rate=5e-2"]
    printed, folder = train(tmp_path, *typed, *evaluated, "training.early_stopping_patience=2")
    lines = read_lines(folder / "metrics.jsonl")
    losses = [line["eval_loss"] for line in lines if "eval_loss" in line]
    assert "Stopped early: 2 evaluations without a lower loss." in printed
    assert len(losses) - 1 - losses.index(min(losses)) == 2
    steps = [line["step"] for line in lines if "loss" in line]
    assert 4 <= len(steps) < 12 and f"Finished: {len(steps)} steps" in printed
    assert json.loads((folder / "summary.json").read_text())["steps"] == len(steps)
    _, folder = train(tmp_path, *typed, *evaluated)
    assert len([line for line in read_lines(folder / "metrics.jsonl") if "loss" in line]) == 12
