"""Functions that reward answers: what they get, what is built in, and what is said of those that fail."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from qlora_fsdp.common.errors import RewardError
from qlora_fsdp.config.reward_names import BUILT_IN
from qlora_fsdp.config.schema import GrpoConfig, PolicyLoss, RewardConfig, ScaleRewards
from qlora_fsdp.data.questions import Question
from qlora_fsdp.training.answers.advantages import advantages_of, weighted_rewards
from qlora_fsdp.training.rewards import built_in
from qlora_fsdp.training.rewards.functions import AnsweredQuestion, RewardFunctions, Rewards

FILE = """
import os, sys, time
from beside import FACTOR

def length(completions, **kwargs):
    print("this goes to stderr")
    return [FACTOR * len(text) for text in completions]

async def some(prompts, answer, trainer_state, log_metric, log_extra):
    log_metric("asked", len(prompts))
    log_extra("wanted", answer)
    return [None if wanted == "b" else trainer_state.global_step for wanted in answer]

def raises(completions, answer):
    return [1 / (wanted != "b") for wanted in answer]

def never(completions, **kwargs):
    time.sleep(600)

def nan(completions, **kwargs):
    return [0.0, float("nan"), 1.0]

def few(completions, **kwargs):
    return [1.0]

def word(completions, **kwargs):
    return [1.0, "x", 2.0]

def together(completions, **kwargs):
    if len(completions) > 1:
        raise ValueError("one at a time")
    return [1.0]

def leaves(completions, **kwargs):
    os._exit(3)

def column(completions, solution, **kwargs):
    return [1.0 for _ in solution]

def secrets(completions, **kwargs):
    return [float(sum(name in os.environ for name in ("RANK", "QLORA_FSDP_RUN_KEY")))] * len(completions)
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "beside.py").write_text("FACTOR = 0.5\n")
    file = tmp_path / "rewards.py"
    file.write_text(FILE)
    return file


def answers() -> list[AnsweredQuestion]:
    texts = {"a": "yes", "b": "no", "c": "maybe"}
    return [
        AnsweredQuestion(Question([1], f"is it {answer}?", {"answer": answer}, f"rows.jsonl:{row}"), [5] * row, text)
        for row, (answer, text) in enumerate(texts.items(), start=1)
    ]


def ask(file: Path, *names: str, seconds: float = 60.0) -> Rewards:
    settings = RewardConfig([f"{file}:{name}" for name in names], timeout_seconds=seconds)
    functions = RewardFunctions(settings, 10)
    try:
        return functions.reward(answers(), {"global_step": 4, "max_steps": 9})
    finally:
        functions.close()
        assert not functions.workers


def test_functions_get_what_trl_gives_them(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("QLORA_FSDP_RUN_KEY", "secret")
    found = ask(file, "length", "some", "secrets")
    np.testing.assert_array_equal(found.by_function[:, 0], [1.5, 1.0, 2.5])
    np.testing.assert_array_equal(found.by_function[:, 1], [4.0, np.nan, 4.0])
    np.testing.assert_array_equal(found.by_function[:, 2], [0.0, 0.0, 0.0])
    assert found.metrics == {"asked": 3.0}
    assert found.extra == {"wanted": ["a", "b", "c"]}


@pytest.mark.parametrize(
    ("name", "told"),
    [
        (
            "raises",
            r'raises raised ZeroDivisionError: division by zero \(rewards.py:15\), for the answer "no" to rows.jsonl:2',
        ),
        ("nan", r'nan returned nan, for the answer "no" to rows.jsonl:2'),
        ("few", r"few returned 1 rewards for 3 answers"),
        ("word", r"""word returned 'x', which is no number, for the answer "no" to rows.jsonl:2"""),
        ("together", r"together raised ValueError: one at a time"),
        ("leaves", r"leaves has ended by itself \(exit code 3\)"),
        ("missing", r"missing can't be loaded: .*rewards.py has no function missing; it has .*raises"),
        ("column", r"column asks for solution, which is no column of the rows \(columns besides the prompt: answer\)"),
    ],
)
def test_a_function_that_fails_is_named_with_row_and_answer(file: Path, name: str, told: str) -> None:
    with pytest.raises(RewardError, match=told):
        ask(file, name)


def test_a_function_that_does_not_return_is_ended(file: Path) -> None:
    with pytest.raises(RewardError, match=r"never has not returned within reward.timeout_seconds=0.5 for 3 answers"):
        ask(file, "never", seconds=0.5)


def test_what_a_function_has_started_ends_with_it(tmp_path: Path) -> None:
    """Code that a model has written runs in a process of its own, and may never end."""
    file = tmp_path / "rewards.py"
    file.write_text(
        "import pathlib, subprocess, time\n"
        "def starts(completions, **kwargs):\n"
        "    child = subprocess.Popen(['sleep', '600'])\n"
        "    pathlib.Path(__file__).with_name('pid').write_text(str(child.pid))\n"
        "    time.sleep(600)\n"
    )
    with pytest.raises(RewardError, match="has not returned"):
        ask(file, "starts", seconds=3.0)
    child = psutil.Process(int((tmp_path / "pid").read_text()))
    with suppress(psutil.NoSuchProcess):
        assert child.status() == psutil.STATUS_ZOMBIE or child.wait(60) is None


def test_signals_of_a_job_end_no_function(file: Path) -> None:
    """A batch system sends them to all processes; the run saves, and needs its answers' rewards for that."""
    functions = RewardFunctions(RewardConfig([f"{file}:length"]), 10)
    try:
        for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT):
            functions.workers[0].process.send_signal(number)
        assert functions.reward(answers(), {"global_step": 4}).by_function[:, 0].tolist() == [1.5, 1.0, 2.5]
    finally:
        functions.close()


def test_a_file_that_cannot_be_run_is_named(tmp_path: Path) -> None:
    file = tmp_path / "broken.py"
    file.write_text("import nothing_of_that_name\n")
    with pytest.raises(RewardError, match=r"broken.py can't be run: ModuleNotFoundError: .*nothing_of_that_name"):
        ask(file, "any")


def test_processes_end_with_the_functions(file: Path) -> None:
    functions = RewardFunctions(RewardConfig([f"{file}:length"]), 10)
    (worker,) = functions.workers
    assert worker.process.pid != os.getpid()
    functions.close()
    assert worker.process.poll() is not None


BUILT: dict[str, tuple[dict[str, Any], list[float | None]]] = {
    "exact_match": ({"completions": [" 4\n", "5"], "answer": [4, "4"]}, [1.0, 0.0]),
    "ends_with_answer": (
        {"completions": ["so it is **4**.", "4 it is", ""], "answer": ["4", "4", "4"]},
        [1.0, 0.0, 0.0],
    ),
    "regex_match": ({"completions": ["a1", "ab"], "pattern": [r"\d", r"\d"]}, [1.0, 0.0]),
    "think_format": (
        {
            "completions": [
                "<think>so</think>4",
                "4",
                "<think><think>a</think>b",
                [{"role": "assistant", "content": "4"}],
            ]
        },
        [1.0, 0.0, 0.0, 0.0],
    ),
    "soft_overlong": (
        {"completion_ids": [[0] * 80, [0] * 90, [0] * 100], "max_completion_length": 100},
        [0.0, -0.5, -1.0],
    ),
    "matches_schema": (
        {"completions": ['{"a": 1}', '{"a": "b"}', "none"], "schema": [{"properties": {"a": {"type": "integer"}}}] * 3},
        [1.0, 0.0, 0.0],
    ),
}


@pytest.mark.parametrize("name", BUILT)
def test_what_is_built_in(name: str) -> None:
    if name == "matches_schema":
        pytest.importorskip("jsonschema")
    given, expected = BUILT[name]
    assert getattr(built_in, name)(**given, prompts=[], trainer_state=None) == expected


def test_mathematical_equality() -> None:
    pytest.importorskip("math_verify")
    given = {"completions": [r"It is $\frac{2}{4}$", "It is 3", "It is 3"], "answer": ["0.5", "1/3", "3"]}
    assert built_in.math_equal(**given) == [1.0, 0.0, 1.0]


def test_all_names_are_functions() -> None:
    assert all(callable(getattr(built_in, name)) for name in BUILT_IN)


def test_advantages_leave_out_what_has_no_reward() -> None:
    rewards = weighted_rewards(np.array([[1.0, np.nan], [0.0, 2.0], [np.nan, np.nan], [3.0, 1.0]]), [1.0, 0.5])
    np.testing.assert_array_equal(rewards, [1.0, 1.0, np.nan, 3.5])
    plain = advantages_of(rewards, 4, GrpoConfig(scale_rewards=ScaleRewards.none))
    np.testing.assert_allclose(plain, [-5 / 6, -5 / 6, 0.0, 5 / 3])
    others = advantages_of(rewards, 4, GrpoConfig(loss_type=PolicyLoss.rloo))
    np.testing.assert_allclose(others, [1 - 2.25, 1 - 2.25, 0.0, 2.5])
