"""A process that calls one function: it reads the answers of a step, and writes a reward for each.

It is started as a file, with the name of the function, and ends when nobody writes to it any more. A message is a line
of JSON. What the function prints goes to stderr, so that it is not taken for an answer. Imports no torch.
"""

from __future__ import annotations

import asyncio
import importlib.util
import inspect
import json
import math
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

if __name__ == "__main__":
    # Python begins to look in the folder of this file, whose modules are none of the function's.
    sys.path[:] = [entry for entry in sys.path if Path(entry) != Path(__file__).parent]

from qlora_fsdp.common.startup import end_with
from qlora_fsdp.config.reward_names import split_function
from qlora_fsdp.training.rewards import built_in

Function = Callable[..., Any]
SEARCH_PART = 0.5  # of its time, after which a function that has failed is not asked about each answer by itself


class BadReward(Exception):
    """A function has failed.

    Attributes:
        row: the number of the answer that it has failed at; None: that is not known.
    """

    def __init__(self, text: str, row: int | None = None) -> None:
        super().__init__(text)
        self.row = row


def load_function(name: str) -> Function:
    """The function of a name.

    Raises:
        BadReward: the file can't be run, or has no such function.
    """
    file, attribute = split_function(name)
    if file is None:
        found: Function = getattr(built_in, attribute)
        return found
    path = Path(file).resolve()
    sys.path.insert(0, str(path.parent))  # as if the file had been started: it may import its neighbours
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        raise BadReward(f"can't be loaded: {file} can't be run: {_told(error)}") from error
    function = getattr(module, attribute, None)
    if not callable(function):
        names = [name for name, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__]
        has = f"; it has {', '.join(names)}" if names else ""
        raise BadReward(f"can't be loaded: {file} has no function {attribute}{has}")
    return function  # type: ignore[no-any-return]


def reward(function: Function, request: dict[str, Any]) -> dict[str, Any]:
    """What a function gives the answers of a step.

    Args:
        function: it may be async.
        request: `prompts`, `completions` and `completion_ids`, and `columns`, the lists of the rows' other columns;
            `state`, of the run; `max_completion_length`; and `seconds`, the time that there is.

    Returns:
        `rewards`, a number or None for each answer; and what the function has logged by name: `metrics`, a mean for
        each, and `extra`, a text for each answer.

    Raises:
        BadReward: it raised, or has returned something else than a number or None for each answer.
    """
    started = time.monotonic()
    logged = _Logged({}, {})
    number = len(request["prompts"])
    given = _arguments(request, range(number), logged)
    missing = [name for name in _required_names(function) if name not in given]
    if missing:
        columns = ", ".join(request["columns"]) or "none"
        raise BadReward(
            f"asks for {missing[0]}, which is no column of the rows (columns besides the prompt: {columns})"
        )
    try:
        returned = _call(function, request, range(number), logged)
    except Exception as first:
        error: Exception = first
        row: int | None = None
        for one in range(number):
            if time.monotonic() - started > SEARCH_PART * request["seconds"]:
                break
            try:
                _call(function, request, range(one, one + 1), _Logged({}, {}))
            except Exception as again:
                row = one
                error = again
                break
        raise BadReward(f"raised {_told(error)}", row) from error
    try:
        values = list(returned)
    except TypeError:
        raise BadReward(f"returned {type(returned).__name__}, and not a number for each answer") from None
    if len(values) != number:
        raise BadReward(f"returned {len(values)} rewards for {number} answers")
    rewards = [_as_number(value, row) for row, value in enumerate(values)]
    metrics = {name: math.fsum(each) / len(each) for name, each in logged.metrics.items()}
    return {"rewards": rewards, "metrics": metrics, "extra": logged.extra}


@dataclass(frozen=True)
class _Logged:
    """What a function logs: TRL's `log_metric` and `log_extra`."""

    metrics: dict[str, list[float]]
    extra: dict[str, list[str]]

    def log_metric(self, name: str, value: float) -> None:
        self.metrics.setdefault(str(name), []).append(float(value))

    def log_extra(self, column: str, values: Sequence[Any]) -> None:
        self.extra[str(column)] = [str(value) for value in values]


def _required_names(function: Function) -> list[str]:
    """The arguments that a function can't be called without."""
    parameters = inspect.signature(function).parameters.values()
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [each.name for each in parameters if each.kind in kinds and each.default is each.empty]


def _arguments(request: dict[str, Any], rows: range, logged: _Logged) -> dict[str, Any]:
    """All that a function may ask for, about some of the answers."""
    some = slice(rows.start, rows.stop)
    columns = {name: values[some] for name, values in request["columns"].items()}
    return {
        **columns,
        "prompts": request["prompts"][some],
        "completions": request["completions"][some],
        "completion_ids": request["completion_ids"][some],
        "max_completion_length": request["max_completion_length"],
        "trainer_state": SimpleNamespace(**request["state"]),
        "log_metric": logged.log_metric,
        "log_extra": logged.log_extra,
    }


def _call(function: Function, request: dict[str, Any], rows: range, logged: _Logged) -> Any:
    """Call a function about some of the answers. It gets what it has names for, or all if it takes any."""
    given = _arguments(request, rows, logged)
    parameters = inspect.signature(function).parameters.values()
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        known = {parameter.name for parameter in parameters}
        given = {name: value for name, value in given.items() if name in known}
    found = function(**given)
    return asyncio.run(_awaited(found)) if inspect.isawaitable(found) else found


async def _awaited(found: Any) -> Any:
    return await found


def _as_number(value: Any, row: int) -> float | None:
    if value is None:
        return None
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise BadReward(f"returned {value!r}, which is no number", row) from None
    if not math.isfinite(number):
        raise BadReward(f"returned {number}", row)
    return number


def _told(error: BaseException) -> str:
    """An error with the line of code that it comes from."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if frame.filename != __file__ and "importlib" not in frame.filename]
    where = f" ({Path(own[-1].filename).name}:{own[-1].lineno})" if own else ""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}{where}" if text else f"{type(error).__name__}{where}"


def main() -> None:
    """Serve one function until the pipe is closed."""
    name, parent = sys.argv[1], int(sys.argv[2])
    end_with(parent, signal.SIGKILL)
    # They come to every process of a job, and the run decides what they end: it saves at the end of the step.
    for number in (signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: None)  # not ignored: what a function starts has to end by it
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def reply(value: dict[str, Any]) -> None:
        replies.write(json.dumps(value) + "\n")
        replies.flush()

    try:
        function = load_function(name)
    except BadReward as bad:
        reply({"error": str(bad), "row": None})
        return
    reply({})
    for line in sys.stdin:
        try:
            reply(reward(function, json.loads(line)))
        except BadReward as bad:
            reply({"error": str(bad), "row": bad.row})


if __name__ == "__main__":
    main()
