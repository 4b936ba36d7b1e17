"""The functions that reward answers, each in a process of its own, which rank 0 has.

All are asked at the same time. A function that does not return in time is ended with its process.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, Queue
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qlora_fsdp.common.errors import RewardError
from qlora_fsdp.common.run_key import NODE_FOLDER, NODE_KEY, RUN_KEY
from qlora_fsdp.common.text import shorten
from qlora_fsdp.config.reward_names import short_name
from qlora_fsdp.config.schema import RewardConfig
from qlora_fsdp.data.questions import Question

WORKER = Path(__file__).with_name("worker.py")
START_SECONDS = 120.0  # to import what a file imports
SHOWN_LETTERS = 300  # of an answer in a message
# What makes a process a rank: what a function starts is none. The secret of the ranks is no business of it.
_OF_RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class AnsweredQuestion:
    """An answer that the model has written.

    Attributes:
        question: what it answers.
        tokens: its token ids.
        text: without special tokens.
    """

    question: Question
    tokens: list[int]
    text: str

    @property
    def completion(self) -> Any:
        """As functions get it: text, or a list with one message where the prompt is a conversation."""
        return [{"role": "assistant", "content": self.text}] if self.question.is_chat else self.text


@dataclass(frozen=True)
class Rewards:
    """What functions have given.

    Attributes:
        by_function: float64 [num_answers, num_functions]; NaN where a function had nothing to say.
        metrics: what functions have logged, by name.
        extra: the same for each answer.
    """

    by_function: NDArray[np.float64]
    metrics: dict[str, float]
    extra: dict[str, list[str]]


class RewardFunctions:
    """Functions in processes of their own.

    Args:
        settings: their names, and the time that they have.
        max_completion_length: tokens of an answer, at most.

    Raises:
        RewardError: a file can't be run, or has no such function.
    """

    def __init__(self, settings: RewardConfig, max_completion_length: int) -> None:
        self.settings = settings
        self.max_completion_length = max_completion_length
        self.names = [short_name(name) for name in settings.functions]
        self.workers: list[_Worker] = []
        try:
            self.workers = [_Worker(name) for name in settings.functions]
            for worker in self.workers:
                worker.receive(START_SECONDS, f"was not imported in {START_SECONDS:.0f} s")
        except BaseException:
            self.close()
            raise

    def reward(self, answers: Sequence[AnsweredQuestion], state: dict[str, Any]) -> Rewards:
        """What each function gives each answer.

        Args:
            answers: of one step.
            state: of the run, as attributes of the `trainer_state` that functions get.

        Raises:
            RewardError: a function raised, took too long, or returned something else than a number for each answer.
        """
        names = dict.fromkeys(name for answer in answers for name in answer.question.columns)
        request = {
            "prompts": [answer.question.prompt for answer in answers],
            "completions": [answer.completion for answer in answers],
            "completion_ids": [answer.tokens for answer in answers],
            "columns": {name: [answer.question.columns.get(name) for answer in answers] for name in names},
            "max_completion_length": self.max_completion_length,
            "state": state,
            "seconds": self.settings.timeout_seconds,
        }
        text = json.dumps(request)
        for worker in self.workers:
            worker.send(text)
        seconds = self.settings.timeout_seconds
        late = f"has not returned within reward.timeout_seconds={seconds:g} for {len(answers)} answers"
        late += "; set it higher, or end what it waits for"
        replies = [worker.receive(seconds, late, answers) for worker in self.workers]
        columns = [[np.nan if value is None else value for value in reply["rewards"]] for reply in replies]
        metrics = {name: value for reply in replies for name, value in reply["metrics"].items()}
        extra = {name: values for reply in replies for name, values in reply["extra"].items()}
        by_function = np.array(columns, dtype=np.float64).reshape(len(columns), len(answers)).T
        return Rewards(by_function, metrics, extra)

    def close(self) -> None:
        """End the processes."""
        for worker in self.workers:
            worker.close()
        self.workers = []


class _Worker:
    """A process with one function."""

    def __init__(self, name: str) -> None:
        self.name = name
        hidden = {*_OF_RANKS, NODE_KEY, NODE_FOLDER, RUN_KEY}
        environ = {key: value for key, value in os.environ.items() if key not in hidden}
        self.process = subprocess.Popen(
            [sys.executable, str(WORKER), name, str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            encoding="utf-8",
            env=environ,
            start_new_session=True,  # a group of its own, which is ended with all that the function has started
        )
        self.replies: Queue[str] = Queue()
        self.requests: Queue[str | None] = Queue()
        # A pipe holds little: whoever writes to a function that does not read would wait with it.
        for work in (self._read, self._write):
            threading.Thread(target=work, daemon=True).start()

    def send(self, text: str) -> None:
        """Ask, without waiting."""
        self.requests.put(text)

    def receive(self, seconds: float, late: str, answers: Sequence[AnsweredQuestion] = ()) -> dict[str, Any]:
        """The next reply.

        Args:
            seconds: to wait for it.
            late: what is said if that is not enough.
            answers: those that were asked about, one of which an error may name.

        Raises:
            RewardError: the function has failed, or its process has ended; it is ended if it takes too long.
        """
        try:
            line = self.replies.get(timeout=seconds)
        except Empty:
            self._kill()
            raise RewardError(f"reward.functions: {self.name} {late}.") from None
        if not line:
            code = self.process.wait()
            reason = f"the process of {self.name} has ended by itself (exit code {code})"
            raise RewardError(f"reward.functions: {reason}. Correct it there.")
        reply: dict[str, Any] = json.loads(line)
        if "error" in reply:
            raise RewardError(_explain(self.name, reply["error"], reply["row"], answers))
        return reply

    def close(self) -> None:
        """End the process."""
        self.requests.put(None)
        self._kill()
        self.process.wait()

    def _kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.replies.put(line)
        self.replies.put("")

    def _write(self) -> None:
        assert self.process.stdin is not None
        try:
            while (text := self.requests.get()) is not None:
                self.process.stdin.write(text + "\n")
                self.process.stdin.flush()
            self.process.stdin.close()
        except OSError:  # it has ended, which the next reply tells
            return


def _explain(name: str, error: str, row: int | None, answers: Sequence[AnsweredQuestion]) -> str:
    """What is said of a function that has failed, with the row and the answer."""
    if row is None or row >= len(answers):
        return f"reward.functions: {name} {error}. Correct it there."
    answer = answers[row]
    shown = shorten(json.dumps(answer.text, ensure_ascii=False), SHOWN_LETTERS)
    return f"reward.functions: {name} {error}, for the answer {shown} to {answer.question.place}. Correct it there."
