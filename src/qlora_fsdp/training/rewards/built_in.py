"""Functions that reward answers and need no file. They have the signature of all others (docs/grpo.md).

Each gets lists of the same length, one entry for each answer, and returns a number for each; None: it has nothing to
say about this one. Imports no torch.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

Rewards = list[float | None]

# Tags as of TRL's think_format_reward: thoughts first, once, and then an answer.
_THOUGHT_FIRST = re.compile(r"^<think>(?!.*<think>)(.*?)</think>.*$", re.DOTALL)
MAX_LETTERS = 20_000  # of an answer in which a pattern is looked for
SOFT_PART = 5  # the last fifth of the room, in which an answer's length counts against it


def text_of(completion: Any) -> str:
    """The text of an answer, which is a list of messages where its prompt is one."""
    if isinstance(completion, str):
        return completion
    return str(completion[-1]["content"])


def exact_match(completions: Sequence[Any], answer: Sequence[Any], **_: Any) -> Rewards:
    """1 where an answer is the row's `answer`, but for outer space."""
    return [
        float(text_of(completion).strip() == str(wanted).strip())
        for completion, wanted in zip(completions, answer, strict=True)
    ]


def ends_with_answer(completions: Sequence[Any], answer: Sequence[Any], **_: Any) -> Rewards:
    """1 where the last word of an answer is the row's `answer`, without a stop or other signs around it."""
    rewards: Rewards = []
    for completion, wanted in zip(completions, answer, strict=True):
        words = text_of(completion).split()
        last = words[-1].strip(".,;:!?*\"'()[]{}$") if words else ""
        rewards.append(float(last == str(wanted).strip()))
    return rewards


def regex_match(completions: Sequence[Any], pattern: Sequence[str], **_: Any) -> Rewards:
    """1 where the row's `pattern` is found in an answer (Python's `re.search`)."""
    return [
        float(re.search(wanted, text_of(completion)[:MAX_LETTERS]) is not None)
        for completion, wanted in zip(completions, pattern, strict=True)
    ]


def think_format(completions: Sequence[Any], **_: Any) -> Rewards:
    """1 where an answer begins with <think>, and there is one </think> after it."""
    return [float(_THOUGHT_FIRST.match(text_of(completion)) is not None) for completion in completions]


def soft_overlong(completion_ids: Sequence[Sequence[int]], max_completion_length: int, **_: Any) -> Rewards:
    """DAPO's penalty (arXiv:2503.14476, equation 13): 0, and from four fifths of the room on down to -1 at its end."""
    soft = max(1, max_completion_length // SOFT_PART)
    expected = max_completion_length - soft
    return [min(0.0, max(-1.0, (expected - len(ids)) / soft)) for ids in completion_ids]


def matches_schema(completions: Sequence[Any], schema: Sequence[Any], **_: Any) -> Rewards:
    """1 where an answer is JSON that the row's `schema` allows: a JSON schema, or its text.

    Raises:
        ImportError: jsonschema is not installed.
    """
    import jsonschema

    rewards: Rewards = []
    for completion, given in zip(completions, schema, strict=True):
        wanted = json.loads(given) if isinstance(given, str) else given
        try:
            jsonschema.validate(json.loads(text_of(completion)), wanted)
        except (ValueError, RecursionError, jsonschema.ValidationError):
            rewards.append(0.0)
        else:
            rewards.append(1.0)
    return rewards


def math_equal(completions: Sequence[Any], answer: Sequence[Any], **_: Any) -> Rewards:
    """1 where the last result of an answer equals the row's `answer`, by math-verify; None where that reads neither.

    Raises:
        ImportError: math-verify is not installed.
    """
    from math_verify import parse, verify

    rewards: Rewards = []
    for completion, wanted in zip(completions, answer, strict=True):
        gold = parse(str(wanted)) or parse(f"${wanted}$")
        rewards.append(None if not gold else float(verify(gold, parse(text_of(completion)))))
    return rewards
